"""Pages of the documentation: commands, configurations, links, generated parts and translations."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.main
import yaml

from msrl import registry
from msrl.cli.app import app
from msrl.config.facts import settable_keys
from msrl.config.loader import load
from msrl.config.presets import preset_names
from msrl.config.unsupported import REFUSED
from msrl.registry.declarations import declaration
from support import ROOT
from test_cli import msrl
from tiny_qwen2 import make_tokenizer

DOCS = ROOT / "docs"
COMMANDS: Any = typer.main.get_command(app)
PAGES = sorted(
    [
        *ROOT.glob("README*.md"),
        *DOCS.glob("*.md"),
        *ROOT.glob("examples/*/README.md"),
        ROOT / "benchmarks" / "README.md",
        ROOT / "templates" / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
)
SITE = sorted(page for page in DOCS.glob("*.md") if not page.name.endswith(".zh.md"))
CHINESE = sorted([*DOCS.glob("*.zh.md"), ROOT / "README.zh.md"])
ORIGINALS = [page for page in PAGES if page not in CHINESE]  # translations have equal blocks
LANGUAGES = {"bash", "sh", "yaml", "python", "json", "text", "", "{toctree}"}
SUFFIXES = {"bin", "json", "jsonl", "md", "png", "py", "sh", "txt", "yaml"}
IMMEDIATE = ("--install-completion", "--show-completion", "--version")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the code blocks of a page in these languages."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\S*)\n(.*?)^```", text, re.S | re.M)
    return [block for language, block in fences if language in languages]


def prose(page: Path) -> str:
    """Return a page without code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(line) for line in re.findall(r"^#+ (.*)", prose(page), re.M)}


def command_lines(block: str) -> list[list[str]]:
    """Return the words of the msrl commands of a shell block, without redirections."""
    lines = block.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("msrl ")]
    return [re.split(r"\0(?:>|\||&&|\|\|)\0", "\0".join(line))[0].split("\0") for line in words]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_blocks_declare_a_known_language(page: Path):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\S*)$", text, re.M)
    assert len(fences) % 2 == 0 and {*fences[::2]} <= LANGUAGES and {*fences[1::2]} <= {""}


@pytest.mark.parametrize("page", ORIGINALS, ids=page_id)
def test_commands_have_existing_names_options_and_keys(page: Path):
    script = "\n".join(blocks(page, "bash", "sh"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
    for block in blocks(page, "bash", "sh"):
        for line in command_lines(block):
            check_command(line[1:])


def check_command(words: list[str]) -> None:
    """Parse a command, and validate its `--set` assignments."""
    if words[0] in IMMEDIATE:
        return
    name, command = "msrl", COMMANDS
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        command = command.commands[name]
    sets = [words[number + 1] for number, word in enumerate(words) if word == "--set"]
    load([], sets)
    command.make_context(name, words)


@pytest.mark.parametrize("page", ORIGINALS, ids=page_id)
def test_configurations_have_valid_keys_and_values(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for number, block in enumerate(blocks(page, "yaml")):
        for variable in re.findall(r"\$\{env:(\w+)\}", block):
            monkeypatch.setenv(variable, "1")
        tree = yaml.safe_load(block)
        if "apiVersion" in tree:  # Kubernetes
            assert {"kind", "metadata", "spec"} <= {*tree}
            continue
        file = tmp_path / f"{number}.yaml"
        file.write_text(block, encoding="utf-8")
        load([str(file)])


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_and_json_blocks_can_be_parsed(page: Path):
    for block in blocks(page, "python"):
        ast.parse(block)
    for block in blocks(page, "json"):
        for line in block.splitlines():
            json.loads(line)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_existing_files_and_headings(page: Path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose(page)):
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page_id(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page_id(page)} links to {target}#{anchor}"


@pytest.mark.parametrize("page", SITE, ids=page_id)
def test_a_page_begins_with_a_sentence_about_its_contents(page: Path):
    title, _, body = page.read_text(encoding="utf-8").partition("\n\n")
    first = body.partition("\n\n")[0]
    assert title.startswith("# ") and "\n" not in title
    assert re.match(r"This (page|site) .*\.", first, re.S) and len(first.split()) > 8


def generator() -> Any:
    """Return the module docs/generate.py."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_generated_pages_and_drawings_are_current():
    for path, text in generator().outputs().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python docs/generate.py"


def test_key_tables_tell_supported_keys_from_keys_of_later_versions():
    rows = generator().key_tables("mindspeed_rl").splitlines()
    (variable,) = (row for row in rows if row.startswith("| `HCCL_CONNECT_TIMEOUT` |"))
    assert "| `cluster.env.HCCL_CONNECT_TIMEOUT` |" in variable
    (pipeline,) = (row for row in rows if row.startswith("| `infer_pipeline_parallel_size` |"))
    assert "version" in pipeline and "`1`" in pipeline
    (split,) = (row for row in rows if row.startswith("| `split` |"))
    assert "data.eval" in split


def test_the_references_are_complete():
    keys = {*re.findall(r"^\| `([\w.]+)` \|", (DOCS / "configuration.md").read_text(), re.M)}
    sections = {key.rpartition(".")[0] for key in settable_keys()}
    assert {*settable_keys()} - sections <= keys
    commands = (DOCS / "commands.md").read_text()
    for name, command in COMMANDS.commands.items():
        for below in getattr(command, "commands", {"": command}):
            assert re.search(rf"^#+ msrl {name} ?{below}$", commands, re.M), (name, below)


# Page with the table of a kind of plugin, and the functions whose options the table lists.
PLUGIN_TABLES = {
    registry.ADVANTAGES: ("algorithms.md", ("advantages",)),
    registry.DIVERGENCES: ("preference.md", ("divergence",)),
    registry.ENVIRONMENTS: ("environments.md", ("environment",)),
    registry.HANDLERS: ("data.md", ("conversation", "text", "preference", "steps")),
    registry.LOSSES: ("algorithms.md", ("policy_loss",)),
    registry.PREFERENCES: ("preference.md", ("preference_loss",)),
    registry.SAMPLERS: ("reinforcement.md", ("pools",)),
    registry.TOOL_FORMATS: ("environments.md", ()),
    registry.TRACKERS: ("monitoring.md", ("open_tracker",)),
    registry.VERIFIERS: ("rewards.md", ("score",)),
}


@pytest.mark.parametrize("package", PLUGIN_TABLES)
def test_every_plugin_is_in_a_table_with_its_options(package: str):
    page, functions = PLUGIN_TABLES[package]
    for name in registry.names(package):
        rows = rows_about(DOCS / page, name)
        assert rows, f"docs/{page}: {name} of {package} is in no table"
        plugin = declaration(package, name, key="plugin")
        present = [function for function in functions if function in plugin.functions]
        options = {option for function in present for option in plugin.options(function)}
        missing = [
            option for option in options if not re.search(rf"`(?:[\w.]+\.)?{option}\b", rows)
        ]
        assert not missing, f"docs/{page}: {name} has no description of {missing}"


def rows_about(page: Path, name: str) -> str:
    """Return the rows of tables that begin with a name, and the sections that they link to."""
    text = page.read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"^\| .*", text, re.M) if f"`{name}`" in row.split("|")[1]]
    for file, anchor in re.findall(r"\]\(([^)#]*)#([^)]*)\)", "\n".join(rows)):
        sections = re.split(r"^#+ ", (page.parent / (file or page.name)).read_text(), flags=re.M)
        rows += [section for section in sections if slug(section.partition("\n")[0]) == anchor]
    return "\n".join(rows)


def test_every_preset_is_in_the_tables_of_the_algorithms():
    for name in preset_names():
        assert rows_about(DOCS / "algorithms.md", name), name


def test_drawings_are_files_without_references():
    for path in DOCS.glob("images/*.svg"):
        tree = ElementTree.parse(path)
        assert tree.getroot().tag.endswith("svg") and "href" not in path.read_text()


def test_every_message_of_troubleshooting_is_in_the_code():
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py")]
    code = re.sub(r'"\s+[frb]*"', "", "\n".join(sources))  # joins the lines of a text
    for page in ("troubleshooting.md", "troubleshooting.zh.md"):
        fragments = re.findall(r"^### `(.*)`$", (DOCS / page).read_text(encoding="utf-8"), re.M)
        assert len(fragments) >= 25
        for fragment in fragments:
            assert fragment in code, f"{page}: {fragment}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_keys_in_the_prose_exist(page: Path):
    if page.name.startswith("from-"):
        return  # these pages name keys of other systems, too
    keys = {*settable_keys(), *REFUSED}
    known = {key.rsplit(".", count)[0] for key in keys for count in range(key.count(".") + 1)}
    known |= {key.replace(".0", "") for key in known}  # positions in lists may be absent
    known |= {key.removeprefix("cluster.roles.") for key in known}  # rows of docs/devices.md
    sections = {key.partition(".")[0] for key in keys}
    texts = re.findall(r"`([^`\n]*)`", prose(page))
    named = {
        name
        for text in texts
        for name in re.findall(r"(?<![\w./-])[a-z_]+(?:\.\w+)+(?![\w<])", text)
    }
    for name in named:
        is_key = name.partition(".")[0] in sections and Path(name).suffix[1:] not in SUFFIXES
        is_option = ".options." in name
        assert name in known or is_option or not is_key, f"{page_id(page)}: no key {name}"


def test_the_keys_of_the_verl_page_exist():
    table = (DOCS / "from-verl.md").read_text(encoding="utf-8").partition("## Keys")[2]
    targets = [row[1] for row in re.findall(r"^\| (`.*?) \| (`.*?) \|", table, re.M)]
    keys = {name for target in targets for name in re.findall(r"`([\w.]+)`", target)}
    known = {*settable_keys()} | {key.rpartition(".")[0] for key in settable_keys()}
    known |= {key.rpartition(".")[0] for key in known}
    assert len(keys) > 40 and keys <= known


def test_each_of_the_questions_has_an_answer_with_a_link():
    sections = re.split(r"^### ", (DOCS / "faq.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    assert len(sections) >= 20
    for section in sections:
        question, _, answer = section.partition("\n")
        assert question.endswith("?") and "](" in answer, question


# Questions that users of similar tools ask most in their issue trackers, as words to search for,
# and the page and heading with the answer.
QUESTIONS = {
    "training out of memory": ("parallelism", "remedies-cheapest-first"),
    "out of memory after some steps": ("troubleshooting", "out-of-memory-during-a-step"),
    "vLLM sleep memory": ("devices", "memory-of-engines-that-share-devices"),
    "batch size": ("concepts", "batch-sizes"),
    "slow generation": ("faq", "why-is-generation-slow"),
    "reward hacking": ("rewards", "is-the-reward-hacked"),
    "own reward function": ("rewards", "a-function-of-your-own"),
    "KL growing": ("faq", "why-is-my-kl-growing"),
    "loss NaN": ("faq", "why-is-the-loss-nan"),
    "responses become longer": ("faq", "why-do-responses-become-longer-and-longer"),
    "truncated responses": ("reinforcement", "masks-and-weights-of-samples"),
    "asynchronous staleness": ("asynchronous", "staleness"),
    "load balance of experts": ("parallelism", "load-balance"),
    "own dataset": ("own-data", ""),
    "chat template": ("data", "templates"),
    "evaluation during training": ("reinforcement", "evaluation"),
    "LoRA": ("sft", "lora"),
    "resume": ("stopping", ""),
    "repeatable deterministic": ("stopping", "repeatable-runs"),
    "export Hugging Face": ("faq", "how-do-i-export-a-hugging-face-model"),
    "several machines hang": ("troubleshooting", "a-run-on-several-machines-hangs"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_two_clicks_away_from_its_answer(question: str):
    page, heading = QUESTIONS[question]
    assert not heading or heading in anchors(DOCS / f"{page}.md")
    if page != "faq":
        target = f"{page}.md#{heading}" if heading else f"{page}.md"
        assert f"]({target})" in (DOCS / "faq.md").read_text(encoding="utf-8")
    assert "](faq.md)" in (DOCS / "index.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    entries = [line for block in blocks(DOCS / "index.md", "{toctree}") for line in block.split()]
    for page in SITE:
        if page.name != "index.md":
            name = page.stem
            assert any(
                name == entry or (entry.endswith("*") and name.startswith(entry[:-1]))
                for entry in entries
            ), name
    assert len(SITE) >= 25 and "*.zh" in index


# --- own data


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


ROWS = [
    (row, command)
    for page in ("own-data.md", "own-data.zh.md")
    for row, command in re.findall(
        r"^```json\n(.*?)^```\n+(?:[^`]*?)^```bash\n(.*?)^```",
        (DOCS / page).read_text(encoding="utf-8"),
        re.S | re.M,
    )
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("row", "command"), ROWS, ids=str)
def test_every_row_of_own_data_is_read_by_its_command(
    row: str, command: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (words,) = command_lines(command)
    Path(words[words.index("--input") + 1]).write_text(row, encoding="utf-8")
    words[words.index("--tokenizer") + 1] = str(tokenizer)
    assert msrl(*words[1:], "--dry-run") == 0 == msrl(*words[1:])
    assert [*tmp_path.glob("data/*.bin")]


def test_the_reward_function_of_the_page_scores_answers():
    (block,) = blocks(DOCS / "rewards.md", "python")
    names: dict[str, Any] = {}
    exec(compile(block, "reward.py", "exec"), names)
    score = names["short_and_right"]
    assert score("It is 12.", "12") > 0.9 and score("13", "12") == 0.0 == score("", "12")
    assert score("12" + " " * 500 + "12", "12", limit=600) < 0.6
    assert len([line for line in block.splitlines() if line.strip()]) <= 11


# --- translations


def digest(page: Path) -> str:
    return hashlib.sha256(page.read_bytes()).hexdigest()[:16]


@pytest.mark.parametrize("page", CHINESE, ids=page_id)
def test_a_chinese_page_is_not_older_than_its_english_page(page: Path):
    original = page.with_name(page.name.replace(".zh.md", ".md"))
    recorded = re.search(r"^<!-- translates (\S+) ([0-9a-f]{16}) -->$", page.read_text(), re.M)
    assert recorded is not None and recorded[1] == original.name
    assert recorded[2] == digest(original), (
        f"{page_id(original)} has changed since it was translated. Update {page_id(page)}, then "
        f"record the digest: python docs/translations.py"
    )


@pytest.mark.parametrize("page", CHINESE, ids=page_id)
def test_a_chinese_page_has_the_commands_and_settings_of_its_english_page(page: Path):
    original = page.with_name(page.name.replace(".zh.md", ".md"))
    assert blocks(page, "bash", "sh") == blocks(original, "bash", "sh")
    ours, theirs = (
        [yaml.safe_load(block) for block in blocks(p, "yaml")] for p in (page, original)
    )
    assert ours == theirs


@pytest.mark.parametrize("page", CHINESE, ids=page_id)
def test_a_chinese_page_has_the_sections_rows_and_tests_of_its_english_page(page: Path):
    original = page.with_name(page.name.replace(".zh.md", ".md"))
    for start in ("#", "|"):  # headings, rows of tables
        ours, theirs = (
            sum(line.startswith(start) for line in prose(p).splitlines()) for p in (page, original)
        )
        assert ours >= theirs
    ours, theirs = (Counter(_TEST_NAME.findall(p.read_text())) for p in (page, original))
    assert ours == theirs


# --- tests


def test_every_test_that_a_page_names_exists_once():
    defined = Counter(
        name
        for file in (ROOT / "tests").glob("**/test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    )
    named = {name for page in DOCS.glob("*.md") for name in _TEST_NAME.findall(page.read_text())}
    assert len(named) > 60 and not {name: defined[name] for name in named if defined[name] != 1}


@pytest.mark.parametrize("page", ["security", "failures"])
def test_every_row_about_an_attack_or_a_loss_names_its_test_or_that_it_has_none(page: str):
    tables = re.findall(
        r"^\|.* test \|\n\|[-|]+\n((?:\|.*\n)+)", (DOCS / f"{page}.md").read_text(), re.M
    )
    rows = [row.split("|")[-2] for table in tables for row in table.splitlines()]
    assert len(rows) > 20 and all(_TEST_NAME.search(row) or "none;" in row for row in rows)


# --- site

_TEST_NAME = re.compile(r"`(test_\w+_\w+_\w+)`")  # keys have fewer words
# Searches of users, collected from issue trackers of similar tools, and a page with the answer.
SEARCHES = {
    **{query: f"docs/{page}" for query, (page, _) in QUESTIONS.items()},
    "out of memory": "docs/faq",
    "OOM 显存": "docs/troubleshooting.zh",
    "reward hacked": "docs/rewards",
    "resume run": "docs/faq",
    "reward function": "docs/rewards",
    "entropy collapse": "docs/faq",
    "multiple machines slurm": "docs/launching",
    "merge LoRA adapter": "docs/faq",
    "custom dataset": "docs/own-data",
    "learning rate schedule": "docs/sft",
    "export Hugging Face": "docs/faq",
    "tensorboard wandb": "docs/monitoring",
    "checkpoint interval": "docs/faq",
    "vLLM memory fraction": "docs/parallelism",
    "HCCL timeout": "docs/install-ascend",
    "tool calls": "docs/own-data",
    "dynamic sampling": "docs/reinforcement",
    "reward server": "docs/rewards",
    "cluster token": "docs/security",
    "续训": "docs/troubleshooting.zh",
    "昇腾驱动固件": "docs/install-ascend.zh",
    "奖励函数": "docs/own-data.zh",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site; warnings fail."""
    pytest.importorskip("furo", reason="the documentation's packages are not installed")
    pytest.importorskip("myst_parser")
    folder = tmp_path_factory.mktemp("site")
    options = ("--fail-on-warning", "--keep-going", "--nitpicky", "-q", "-c", "docs")
    command = [sys.executable, "-m", "sphinx", *options, ".", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
@pytest.mark.slow
def test_the_site_loads_nothing_from_the_network(site: Path):
    pages = [*site.rglob("*.html")]
    assert len(pages) >= 25
    for page in pages:
        sources = r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"'
        assert not re.findall(sources, page.read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:|@import", style.read_text(encoding="utf-8")), (
            style
        )


@pytest.mark.slow
def test_the_scripts_of_the_search_are_valid(site: Path):
    scripts = (site / "_static" / "language_data.js").read_text(encoding="utf-8")
    assert "window.Stemmer = EnglishStemmer;" in scripts and "function splitQuery" in scripts
    node = shutil.which("node")
    if node is not None:
        check = [node, "--check", str(site / "_static" / "language_data.js")]
        subprocess.run(check, check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_finds_the_page_with_the_answer(query: str, site: Path):
    import snowballstemmer
    from sphinx.search.en import SearchEnglish

    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    page = index["docnames"].index(SEARCHES[query])
    stem = snowballstemmer.stemmer("english").stemWord
    for word in query_words(query.lower()):
        pages: set[int] = set()
        for table in ("terms", "titleterms"):
            hits = index[table].get(stem(word), [])
            pages |= {hits} if isinstance(hits, int) else {*hits}
        assert page in pages or word in SearchEnglish.stopwords, word


def query_words(query: str) -> list[str]:
    """Split a query as `splitQuery` of docs/conf.py does."""
    words: list[str] = []
    for run in re.findall(r"[\u4e00-\u9fff]+|[a-z0-9_]+", query):
        is_chinese = "\u4e00" <= run[0] <= "\u9fff"
        words += [run[i : i + 2] for i in range(0, len(run), 2)] if is_chinese else [run]
    return words
