"""Recipes of examples/recipes: dry runs with real config.json files, without weights or devices."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from msrl.config.loader import load
from support import ROOT, shared_data
from test_cli import msrl
from tiny_qwen2 import make_tokenizer

RECIPES = ROOT / "examples" / "recipes"
README = (RECIPES / "README.md").read_text(encoding="utf-8")
FILES = sorted(file for file in RECIPES.glob("*.yaml") if file.stem.count("_") >= 2)
# config.json of the real models, by their name on the hub.
MODELS = {
    "Qwen/Qwen3-8B": "aic/Qwen--Qwen3-8B_config.json",
    "Qwen/Qwen2.5-32B-Instruct": "Qwen2.5-32B.transcribed.config.json",
    "Qwen/Qwen3-30B-A3B": "aic/Qwen--Qwen3-30B-A3B_config.json",
    "Qwen/Qwen3-235B-A22B": "aic/Qwen--Qwen3-235B-A22B_config.json",
}
GB = 10**9
# A tenth of the device's memory remains for kernels, communication and fragmentation.
LIMITS = {"a2": 0.9 * 64 * GB, "a3": 0.9 * 64 * GB, "h200": 0.9 * 141 * GB}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a working folder with preprocessed data and a cache of the hub without weights."""
    folder = tmp_path_factory.mktemp("recipes")
    for name, config in MODELS.items():
        make_snapshot(folder / "cache", name, config)
    with shared_data("math", "gsm8k_train.jsonl").open(encoding="utf-8") as lines:
        (folder / "rows.jsonl").write_text("".join(islice(lines, 64)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        for kind, suffix in (("sft", "sft"), ("grpo", "rl")):
            for family, model in (("qwen3", "Qwen3-8B"), ("qwen2.5", "Qwen2.5-32B-Instruct")):
                code = msrl(
                    *("preprocess", "-c", str(RECIPES / f"preprocess_{kind}.yaml")),
                    *("--input", "rows.jsonl", "--tokenizer", f"Qwen/{model}"),
                    *("--output-prefix", f"data/{family}/{suffix}"),
                )
                assert code == 0
        yield folder


def make_snapshot(cache: Path, name: str, config: str) -> None:
    """Write the config.json of a model and a small tokenizer into a cache of the hub."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    make_tokenizer().save_pretrained(snapshot)
    shutil.copyfile(shared_data("configs", *config.split("/")), snapshot / "config.json")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")


@pytest.mark.sample(5)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_passes_its_dry_run_and_fits_on_its_devices(
    file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
):
    kind, *_, hardware = file.stem.split("_")
    has_cluster = load([str(file)]).config.cluster.nodes > 1
    address = ("--set", "cluster.address=10.0.0.1:6344") if has_cluster else ()
    code = msrl(f"train-{kind}", "-c", str(file), *address, "--dry-run")
    output = capsys.readouterr()
    assert code == 0, output.err
    peaks = re.findall(r"peak during \w+ +([\d.,]+) GB", output.out)
    assert peaks and all(float(peak) * GB <= LIMITS[hardware] for peak in peaks), output.out
    (row,) = re.findall(rf"^\| \[`{re.escape(file.name)}`\].*", README, re.M)
    assert re.findall(r"([\d.]+) GB", row) == peaks
    assert not re.search("^warning", output.err, re.M), output.err


@pytest.mark.sample(7)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_names_its_model_and_says_that_it_was_not_run(file: Path):
    comment = file.read_text(encoding="utf-8").partition("defaults:")[0]
    config = load([str(file)]).config
    assert "Not run" in comment and "config.json" in comment
    assert str(config.model.path).removeprefix("Qwen/").removesuffix("-Instruct") in comment
    assert config.run.name == file.stem.replace(".", "")


def test_every_recipe_is_in_the_table_of_the_readme():
    rows = re.findall(r"^\| \[`([\w.]+)\.yaml`\]", README, re.M)
    assert sorted(rows) == [file.stem for file in FILES]
