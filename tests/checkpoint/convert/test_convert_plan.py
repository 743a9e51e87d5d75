"""Plans of conversions from config.json, of every real config, in under a second."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch

import families
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.checkpoint.convert import McoreTarget, ruled_plan, write_mcore
from msrl.checkpoint.distributed.read import read_metadata
from msrl.checkpoint.source import open_weights
from msrl.errors import MsrlError
from msrl.models.families import families as registered
from msrl.models.families import load_shape, num_experts, num_parameters
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.shape import Shape
from msrl.workflows.convert.plan import file_rows
from support import assert_mentions, shared_data
from test_cli import msrl


def _usual_layout(shape: Shape) -> ParallelLayout:
    """Return sizes as large as the model allows, up to 8 each."""
    experts = num_experts(shape)
    tp, pp = math.gcd(8, shape.num_query_groups), math.gcd(8, shape.num_layers)
    return (
        ParallelLayout(tp, pp, ep=math.gcd(8, experts), etp=1)
        if experts
        else ParallelLayout(tp, pp)
    )


def _seconds(shape: Shape, target: McoreTarget) -> float:
    """Return the processor time of a plan."""
    start = time.process_time()
    assert dict(file_rows(shape, target, ruled_plan(shape, target), Path("save")))
    return time.process_time() - start


def _is_quick(shape: Shape, target: McoreTarget) -> bool:
    """Return True if a plan takes less than a second, or as little on a slower or busy machine."""
    if _seconds(shape, target) < 1:
        return True
    start = time.process_time()
    for _ in range(10**7):  # a tenth of a second on current processors
        pass
    return _seconds(shape, target) < 15 * (time.process_time() - start)


@pytest.mark.full
def test_files_bytes_and_padding_of_every_real_config_are_planned_in_under_a_second() -> None:
    """An unsupported model is refused; the message names the key of the feature."""
    planned, refused = 0, list[str]()
    for file in sorted(shared_data("configs").rglob("*.json")):
        if (json.loads(file.read_text()).get("architectures") or ["none"])[0] not in registered():
            continue
        try:
            shape = load_shape(file)
        except MsrlError as error:
            refused.append(str(error))
            continue
        target = McoreTarget(_usual_layout(shape), vocab_multiple=128)
        assert _is_quick(shape, target), file
        plan = ruled_plan(shape, target)
        files = dict(file_rows(shape, target, plan, Path("save")))
        assert plan.padded_vocab % 128 == 0 and 0 <= plan.padded_vocab - shape.vocab_size < 128
        assert len(files) == len(target.layout.ranks())
        assert (
            sum(spec.num_elements for specs in files.values() for spec in specs)
            == plan.num_elements
            >= num_parameters(shape)
        )
        planned += 1
    assert planned >= 25 and all("quantization_config" in message for message in refused)


@pytest.mark.sample(3)
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen1.5", ParallelLayout(2, 2)),
        ("deepseek v3", ParallelLayout(2, ep=2, etp=1)),
        ("gpt-oss", ParallelLayout(pp=2, ep=4)),
    ],
)
def test_the_written_files_match_the_plan(
    tmp_path: Path, name: str, layout: ParallelLayout, distributed: bool
) -> None:
    family = (FAMILIES | MIXTURES)[name]
    folder = families.save_models(tmp_path, {name: family})[name]
    target = McoreTarget(layout, torch.bfloat16, distributed=distributed)
    plan = ruled_plan(load_shape(folder), target)
    planned = dict(file_rows(load_shape(folder), target, plan, tmp_path / "mcore"))
    write_mcore(open_weights(folder), tmp_path / "mcore", target)
    if distributed:
        stored, _ = read_metadata(tmp_path / "mcore" / "iter_0000001")
        tensor_bytes = [stored[key].dtype.itemsize * math.prod(stored[key].shape) for key in stored]
        assert sum(tensor_bytes) == sum(
            spec.num_bytes for specs in planned.values() for spec in specs
        )
        assert all((tmp_path / "mcore" / file).is_file() for file in planned)
        return
    files = {
        str(path.relative_to(tmp_path / "mcore")): path
        for path in (tmp_path / "mcore").rglob("*.pt")
    }
    assert files.keys() == planned.keys()
    for file, specs in planned.items():
        model = torch.load(files[file], weights_only=False)["model"]
        assert sorted((tuple(spec.shape), spec.dtype) for spec in specs) == sorted(
            (tuple(t.shape), t.dtype) for t in model.values()
        )


def test_a_dry_run_prints_the_plan_of_a_folder_that_has_a_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two ranks has, for each of 4 layers, 96 x 64 + 96 (q, k and v), 64 x 32, 96 x 64, 64
    x 48 and 2 x 64 (norms) elements, 17,632 in total. With 100 of 200 rows of the tied embedding
    and the last norm they are 76,992, four bytes each.
    """
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(FAMILIES["qwen1.5"].config))
    load, save = str(tmp_path / "hf"), str(tmp_path / "mcore")
    assert (
        msrl("convert-ckpt", "hf2mcore", "--load", load, "--save", save, "--tp", "2", "--dry-run")
        == 0
    )
    output = capsys.readouterr().out
    assert_mentions(output, "2 files", "615.9 KB", "vocabulary", "199 rows", 200)
    for rank in (0, 1):
        assert (
            f"iter_0000001/mp_rank_0{rank}/model_optim_rng.pt  30       76,992      308.0 KB"
            in output
        )
    assert not (tmp_path / "mcore").exists()
    arguments = ("--load", load, "--save", save, "--format", "dist", "--noop-layers", "0,5")
    assert msrl("convert-ckpt", "hf2mcore", *arguments, "--dry-run") == 2
    assert_mentions(capsys.readouterr().err, "distributed", "layers")
