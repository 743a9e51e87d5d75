"""Consistency of the README, the CI script, the changelog and the package metadata."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import msrl
from msrl import registry
from msrl.config.loader import load
from msrl.tracking.run import stack_versions
from mutants import MUTANTS, source
from support import ROOT

SETUP = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox -s "


def bash_commands(markdown: str) -> list[str]:
    """Return the lines of all `bash` blocks."""
    return [
        line
        for block in re.findall(r"^```bash\n(.*?)^```", markdown, re.S | re.M)
        for line in block.splitlines()
    ]


def test_the_readme_has_two_one_line_setup_commands() -> None:
    commands = bash_commands((ROOT / "README.md").read_text())
    assert [line for line in commands if line.startswith("python3 -m venv")] == [
        SETUP + "quickstart",
        SETUP + "tests",
    ]


def test_the_ci_script_runs_only_the_readmes_test_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    program = [
        line for line in lines if line and not line.startswith(("#", "set ", "cd ", "export "))
    ]
    assert program == [SETUP + "tests"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)


def test_all_documented_nox_sessions_exist() -> None:
    mentioned = {
        session
        for file in ("README.md", "CONTRIBUTING.md", "pyproject.toml")
        for session in re.findall(r"nox -s ([\w-]+)", (ROOT / file).read_text())
    }
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "-l"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert mentioned <= set(re.findall(r"^[*-] ([\w-]+)", listed, re.M))


def test_every_tracker_that_is_an_extra_is_tested_in_its_own_environment() -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    expected = tuple(name for name in registry.names(registry.TRACKERS) if name in extras)
    text = (ROOT / "noxfile.py").read_text()
    tested = re.search(r"^TRACKERS = (\(.*?\))", text, re.M)
    assert tested is not None and ast.literal_eval(tested[1]) == expected


def test_the_version_is_the_same_everywhere() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert msrl.__version__ == version[1] == stack_versions()["msrl"]
    released = re.findall(r"^## \[?(\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert not released or released[0] == version[1]


def test_the_contributing_page_lists_exactly_the_existing_folders() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = re.search(r"^```text\nmsrl/\n(.*?)^```", text, re.S | re.M)
    assert tree is not None
    mentioned = set(re.findall(r"^ {2,4}([\w.]+/)", tree[1], re.M))
    packages = {
        f"{path.name}/"
        for path in (ROOT / "src" / "msrl").iterdir()
        if (path / "__init__.py").exists()
    }
    top_folders = {"src/", "tests/", "templates/", "examples/", "benchmarks/", "docs/", ".ci/"}
    assert mentioned == packages | top_folders


def test_the_readme_fits_in_130_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_configuration_of_the_readme_has_valid_keys_and_values(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    (tmp_path / "grpo.yaml").write_text(block)
    assert load([str(tmp_path / "grpo.yaml")]).config.rollout.samples_per_prompt == 8


def test_links_in_documents_have_targets() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "README.md"]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_every_mutant_changes_the_present_code() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.mistaken(source(mutant)) != source(mutant), mutant.name


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text[:200]
    assert "END OF TERMS AND CONDITIONS" in text
