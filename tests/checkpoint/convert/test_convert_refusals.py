"""Sources that a conversion refuses before it writes anything, and what it leaves behind."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_checkpoints as tiny
from mixture_families import DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN3_MOE
from msrl.checkpoint.adapters.merge import Adapter, Delta, MergedSource
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.mcore.arguments import layout_from_args, num_local_experts
from msrl.checkpoint.mcore.names import Naming
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.torch_files.reader import TensorSpec, read_torch_file
from msrl.checkpoint.torch_files.writer import TorchWriter
from msrl.errors import MsrlError
from msrl.models.hf_config import read_hf_config
from msrl.models.parallel_layout import Coords, ParallelLayout
from support import mentions
from test_cli import msrl
from test_models import LLAMA, MISTRAL, QWEN2, shape

UP = "model.layers.1.mlp.up_proj.weight"


def poison(folder: Path, name: str, value: float) -> Path:
    """Save a small model with one number replaced."""
    weights = tiny.save(folder, dtype=torch.float32)
    weights[name].view(-1)[7] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
@pytest.mark.parametrize(
    "target",
    ["hf", McoreTarget(ParallelLayout(2, 2)), McoreTarget(distributed=True)],
    ids=["hf", "mindspeed", "dist"],
)
def test_a_tensor_with_nan_or_infinity_is_named_and_nothing_is_left(
    tmp_path: Path, value: float, word: str, target: Any
) -> None:
    source = open_weights(poison(tmp_path / "hf", UP, value))
    with pytest.raises(MsrlError, match=mentions(UP, word)):
        if target == "hf":
            write_hf(source, tmp_path / "out", None)
        else:
            write_mcore(source, tmp_path / "out", target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_tensor_that_overflows_float16_is_named_without_verification_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ("--load", str(poison(tmp_path / "hf", UP, 1e6)), "--save", str(tmp_path / "out"))
    assert msrl("convert-ckpt", "hf2mcore", *folders, "--dtype", "fp16", "--no-verify") == 2
    message = capsys.readouterr().err
    assert all(word in message for word in (UP, "overflows", "float16", "1e+06"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "words"), [
    (float("nan"), ("NaN",)), (1e6, ("overflows", "float16")),
])  # fmt: skip
@pytest.mark.parametrize("expert", [0, 2])
@pytest.mark.slow
def test_every_expert_of_a_fused_tensor_is_checked(
    tmp_path: Path, expert: int, value: float, words: tuple[str, ...]
) -> None:
    weights = tiny.save(tmp_path / "hf", dtype=torch.float32, **QWEN3_MOE)
    name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
    weights[name].view(-1)[7] = value
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    target = McoreTarget(dtype=torch.float16, naming=Naming(grouped=True))
    with pytest.raises(MsrlError, match=mentions(name, *words)):
        write_mcore(open_weights(tmp_path / "hf"), tmp_path / "out", target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int32], ids=str)
def test_a_type_that_hugging_face_folders_lack_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny.save(tmp_path / "hf")
    write_mcore(open_weights(tmp_path / "hf"), tmp_path / "mcore", McoreTarget())
    path = mcore.rank_file(tmp_path / "mcore", 1, ParallelLayout(), Coords())
    contents = torch.load(path, weights_only=False)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    contents["model"][name] = contents["model"][name].to(dtype)
    torch.save(contents, path)
    type_name = str(dtype).removeprefix("torch.")
    down = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(MsrlError, match=mentions(down, type_name, "--dtype")):
        write_hf(open_weights(tmp_path / "mcore"), tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_a_type_that_checkpoints_lack_is_named(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("model.pt", "norm", "int8", "--dtype")):
        TorchWriter(tmp_path / "model.pt", {"norm": TensorSpec(torch.int8, (2,))}, dict)
    assert not (tmp_path / "model.pt").exists()


def test_a_tracker_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    (tmp_path / mcore.TRACKER).write_text("9" * 5000)
    with pytest.raises(MsrlError, match=mentions(mcore.TRACKER, "9" * 40, "number")):
        open_weights(tmp_path)


def test_large_finite_numbers_whose_sum_overflows_are_written(tmp_path: Path) -> None:
    weights = tiny.save(tmp_path / "hf", dtype=torch.bfloat16)
    weights[UP].fill_(3e38)
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    write_hf(open_weights(tmp_path / "hf"), tmp_path / "out", None)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[UP], weights[UP])


SIZES = [
    (QWEN2, "num_hidden_layers"),
    (LLAMA, "num_hidden_layers"),
    (MISTRAL, "num_hidden_layers"),
    (MIXTRAL, "num_hidden_layers"),
    (GPT_OSS, "num_hidden_layers"),
    (DEEPSEEK_V3, "num_hidden_layers"),
    (QWEN3_MOE, "num_experts"),
    (DEEPSEEK_V3, "n_routed_experts"),
    (DEEPSEEK_V3, "num_nextn_predict_layers"),
    (GPT_OSS, "num_local_experts"),
    (QWEN2, "hidden_size"),
    (QWEN2, "vocab_size"),
    (QWEN2, "max_position_embeddings"),
]


@pytest.mark.sample(13)
@pytest.mark.parametrize("value", [10**8 * 100, 10**12, 10**400])
@pytest.mark.parametrize(("config", "key"), SIZES)
def test_an_absurd_size_is_refused_before_memory_is_taken(
    config: dict[str, Any], key: str, value: int
) -> None:
    start = time.process_time()
    with pytest.raises(MsrlError, match=mentions("config.json", f"{key}=", "limit")):
        shape(config, **{key: value})
    assert time.process_time() - start < 5


def test_too_many_experts_in_all_layers_are_refused() -> None:
    with pytest.raises(MsrlError, match=mentions("num_hidden_layers=9000", "experts", "limit")):
        shape(QWEN3_MOE, num_hidden_layers=9000, num_experts=60000)


def test_a_config_of_hundreds_of_mebibytes_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(MsrlError, match=mentions("config.json", "MiB")):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("value", [10**9, "8", -8, 7.5])
def test_an_absurd_number_of_experts_in_a_file_is_refused(value: object) -> None:
    from argparse import Namespace

    args = Namespace(num_experts=value, expert_model_parallel_size=2)
    with pytest.raises(MsrlError, match=mentions("num_experts", "file.pt")):
        num_local_experts(Path("file.pt"), args)


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "expert_model_parallel_size",
                                  "num_layers_per_virtual_pipeline_stage"])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, 10**9, True, "2"])
def test_an_absurd_parallel_size_in_a_file_is_refused(name: str, value: object) -> None:
    from argparse import Namespace

    with pytest.raises(MsrlError, match=mentions(f"{name}={value!r}")):
        layout_from_args(Namespace(**{name: value}))


@pytest.mark.parametrize("name", ["num_layer_list", "noop_layers"])
@pytest.mark.parametrize("value", [[float("inf")], [1.5], [True], "1,x", "1" * 5000, {"a": 1}, 7])
def test_layer_numbers_that_are_none_are_refused(name: str, value: object) -> None:
    from argparse import Namespace

    with pytest.raises(MsrlError, match=mentions(name, "layer numbers")):
        layout_from_args(Namespace(**{name: value}))


def test_layer_numbers_are_read_from_text_and_lists() -> None:
    from argparse import Namespace

    assert layout_from_args(Namespace(num_layer_list="3, 5")).num_layer_list == (3, 5)
    assert layout_from_args(Namespace(noop_layers={47, 0})).noop_layers == (0, 47)
    assert layout_from_args(Namespace(num_layer_list=None, noop_layers="")) == ParallelLayout()


def test_folders_that_count_billions_of_ranks_are_refused(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    write_mcore(open_weights(tmp_path / "hf"), tmp_path / "mcore", McoreTarget())
    (tmp_path / "mcore" / "iter_0000001" / "mp_rank_999999999").mkdir()
    with pytest.raises(MsrlError, match=mentions("ranks", "limit")):
        open_weights(tmp_path / "mcore")


@pytest.mark.parametrize("contents", [b"", b"PK\3\4 and so on", pickle.dumps({"args": 1})])
@pytest.mark.parametrize("command", ["mcore2hf", "reshard"])
def test_a_broken_common_file_leaves_no_result(
    tmp_path: Path, contents: bytes, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tmp_path / "hf")
    save = tmp_path / "mcore"
    write_mcore(open_weights(tmp_path / "hf"), save, McoreTarget(distributed=True))
    (save / "msrl_manifest.json").unlink()
    (save / "iter_0000001" / "common.pt").write_bytes(contents)
    folders = ("--load", str(save), "--save", str(tmp_path / "out"))
    assert msrl("convert-ckpt", command, *folders, "--no-verify") == 2
    assert "common.pt" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore"]


def test_a_file_of_the_old_form_of_torch_save_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(MsrlError, match=mentions(str(path), "old form", "torch.save")):
        read_torch_file(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(MsrlError, match=mentions(str(path), "pickle")):
        read_torch_file(path)


def test_a_converted_model_of_the_old_form_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tiny.save(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    path = tmp_path / "hf" / "pytorch_model.bin"
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    folders = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "out"))
    assert msrl("convert-ckpt", "hf2mcore", *folders) == 2
    assert "old form" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_merged_weight_is_rounded_once_to_the_type_of_the_result(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    weights = tiny.save(tmp_path / "hf", dtype=torch.bfloat16)
    a, b = torch.randn(3, 64), torch.randn(96, 3)
    adapter = Adapter("adapter", 6.0, {UP: Delta(a, b, 2.0)}, {})
    source = MergedSource(open_weights(tmp_path / "hf"), adapter, dtype=dtype)
    for save, write in (("hf2", write_hf), ("mcore", write_mcore)):
        target = dtype if save == "hf2" else McoreTarget(ParallelLayout(2), dtype)
        write(source, tmp_path / save, target)  # type: ignore[operator]
        result = open_weights(tmp_path / save)
        merged = dict(zip(*_up_tensors(result), strict=True))[UP]
        exact = weights[UP].double() + 2.0 * b.double() @ a.double()
        torch.testing.assert_close(
            merged.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4 * torch.finfo(dtype).eps
            if dtype == torch.float16 else 2e-6,
        )  # fmt: skip


def _up_tensors(source: Any) -> tuple[tuple[str, ...], tuple[torch.Tensor, ...]]:
    from msrl.models.families import all_rules

    rule = next(rule for rule in all_rules(source.shape) if UP in rule.hf)
    return rule.hf, source.hf_tensors(rule)


def test_an_unverified_merge_in_fp32_keeps_more_than_bfloat16(tmp_path: Path) -> None:
    from test_lora import full_adapter, save_peft

    tiny.save(tmp_path / "hf", dtype=torch.bfloat16)
    save_peft(tmp_path / "peft", full_adapter())
    folders = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "out"))
    lora = ("--lora", str(tmp_path / "peft"), "--dtype", "fp32", "--no-verify")
    assert msrl("convert-ckpt", "hf2hf", *folders, *lora) == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")[
        "model.layers.0.self_attn.q_proj.weight"
    ]
    assert not torch.equal(merged, merged.bfloat16().float())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
