"""The search of layouts and `msrl plan`: what is legal, what fits, and what would make it fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mixture_families import QWEN3_MOE
from msrl.checks.validate import find_layout_errors
from msrl.config.loader import load
from msrl.layouts import choice as choices
from msrl.layouts import profile as profiles
from msrl.layouts.search import Devices, Search, _layer_list
from msrl.memory.estimate import training_memory
from msrl.plan.run_plan import resolve
from support import assert_mentions
from test_cli import msrl
from test_cost import profile
from test_models import QWEN2, shape

FILES = Path(profiles.__file__).parent / "profiles"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with small models, a profile whose devices have 1 GB, and a configuration."""
    for name, config in {"dense": QWEN2, "mixture": QWEN3_MOE}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({**config, "max_position_embeddings": 8192})
        )
    set_memory(tmp_path, 1e9)
    values = {
        "model": {"path": str(tmp_path / "mixture"), "dtype": "bfloat16"},
        "data": {"train": "data/sft", "seq_length": 4096},
        "train": {"steps": 1, "global_batch": 16, "chunk": 1024},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def set_memory(folder: Path, size: float) -> None:
    values = yaml.safe_load((FILES / "h100.yaml").read_text())
    values["memory_bytes"]["value"] = size
    (folder / "own.yaml").write_text(yaml.safe_dump(values))


def plan(folder: Path, *words: str) -> int:
    own = ("--profile", str(folder / "own.yaml"))
    return msrl("plan", "-c", str(folder / "run.yaml"), *own, *words)


def search(folder: Path, devices: Devices, *sets: str, memory: float = 1e9) -> Search:
    """Return a search of the layouts of the folder's configuration."""
    resolved = load([str(folder / "run.yaml")], sets)
    device = profile(memory_bytes=memory)
    request = choices.Request(devices, device)
    run = resolve(resolved.config, "train-sft")
    return choices._search(resolved, run, request, choices._lengths(run, None))


def test_every_layout_is_legal_fits_and_none_is_faster_than_the_ones_before(folder: Path):
    found = search(folder, Devices(2, 2))
    layouts = found.best(100)
    seconds = [layout.update.seconds for layout in layouts]
    assert len(layouts) > 5 and seconds == sorted(seconds)
    sizes = {tuple(getattr(x.train.parallel, n) for n in ("tp", "pp", "ep")) for x in layouts}
    assert {(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)} <= sizes
    for layout in layouts:
        parallel = layout.train.parallel.model_dump(mode="json")
        run = load(
            [str(folder / "run.yaml")],
            flags=[],
            sets=[
                f"train.parallel={json.dumps(parallel)}",
                f"train.micro_batch={layout.train.micro_batch}",
                f"train.recompute={json.dumps(layout.train.recompute.model_dump(mode='json'))}",
                *("cluster.nodes=2", "cluster.devices_per_node=2", "cluster.address=a:1"),
            ],
        )
        resolved = resolve(run.config, "train-sft")
        assert not find_layout_errors(run, resolved)
        assert training_memory(resolved, temporary_elements=1 << 26) == layout.memory


@pytest.mark.slow
def test_the_quick_lower_bounds_never_exceed_the_memory_estimate(folder: Path):
    for model in ("dense", "mixture"):
        found = search(folder, Devices(2, 2), f"model.path={folder / model}", memory=1e15)
        checked = 0
        for train, update in found._by_time():
            layout = found._legal(train, update)
            if layout is not None:
                assert found.model.least_bytes(train) <= layout.memory.peak * 1.001
                checked += 1
        assert checked > 20


def test_a_table_of_layouts_is_printed_and_the_written_keys_are_a_legal_configuration(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    file = folder / "layout.yaml"
    assert plan(folder, "--devices", "2x2", "--write", str(file)) == 0
    output = capsys.readouterr().out
    assert_mentions(output, "2x2", "not measured", "matrix products", "data.seq_length", str(file))
    resolved = load([str(folder / "run.yaml"), str(file)], ["cluster.address=a:1"])
    run = resolve(resolved.config, "train-sft")
    assert run.world_size == 4 and not find_layout_errors(resolved, run)
    assert plan(folder, "--devices", "2x2", "--write", str(file)) == 2  # it exists
    assert plan(folder, "--devices", "2x2") == 0
    assert capsys.readouterr().out.startswith(output.partition("next:")[0])  # the same again


def test_kept_keys_hold_for_all_layouts(folder: Path, capsys: pytest.CaptureFixture[str]):
    keep = ("--keep", "train.parallel.tp", "--keep", "train.recompute")
    assert plan(folder, "--devices", "4", *keep, "--set", "train.parallel.tp=2") == 0
    rows = capsys.readouterr().out.splitlines()
    layouts = [row for row in rows if " none " in row]
    assert layouts and all("TP 2" in row for row in layouts)
    assert plan(folder, "--devices", "4", "--keep", "train.chunk") == 2
    assert_mentions(capsys.readouterr().err, "train.chunk", "train.parallel.tp")


def test_a_training_that_does_not_fit_is_told_what_would_make_it_possible(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    found = search(folder, Devices(1, 2), memory=1e15)
    layouts = (found._legal(train, update) for train, update in found._by_time())
    least = min(layout.memory.peak for layout in layouts if layout is not None)
    set_memory(folder, 0.99 * least / 0.9)
    assert plan(folder, "--devices", "2") == 2
    message = capsys.readouterr().err
    assert_mentions(message, "2 devices", "x2 devices")
    set_memory(folder, 1e4)
    assert plan(folder, "--devices", "2") == 2
    assert_mentions(capsys.readouterr().err, "16 times")


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("--devices", "2x2x2"), ("2x2x2", "machines")),
        (("--devices", "0"), ("0", "positive")),
        ((), ("cluster.devices_per_node", "--devices")),
        (("--devices", "3", "--keep", "train.parallel.pp"), ("train.global_batch=16", "multiple")),
        (("--devices", "2", "--set", "cluster.platform=npu"), ("cluster.platform=npu", "cuda")),
        (("--devices", "2", "--set", "data.seq_length=null"), ("data.seq_length", "--tokens")),
        (("--devices", "2", "--set", "algo.preference.loss=ipo"), ("train-dpo", "train-sft")),
    ],
)
def test_a_request_without_an_answer_is_refused(
    words: tuple[str, ...],
    fragments: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
):
    assert plan(folder, *words) == 2
    assert_mentions(capsys.readouterr().err, *fragments)


def test_stages_that_cannot_be_equal_have_fewer_layers_at_the_ends():
    model = shape({**QWEN2, "num_hidden_layers": 10})
    assert _layer_list(model, 4) == (2, 3, 3, 2)
    assert _layer_list(model, 5) is None
