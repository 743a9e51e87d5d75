"""Conversions from end to end: positions of elements, all layouts, refusals and killed runs."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny_checkpoints as tiny
from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.integrity import damages, mcore_checks
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.mcore.names import Naming
from msrl.checkpoint.source import ShardedSource, open_weights
from msrl.config.schema import Config
from msrl.errors import MsrlError, VerificationError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.verification.bits import compare
from support import assert_mentions, mentions

LAYER = "model.layers.{}."


def to_mcore(
    folder: Path, save: Path, parallel: ParallelLayout | None = None, **target: Any
) -> dict[Coords, dict[str, Tensor]]:
    """Convert, and return the tensors of the files by rank, read with torch."""
    parallel = parallel or ParallelLayout()
    write_mcore(open_weights(folder), save, McoreTarget(parallel, **target))
    return {
        at: torch.load(mcore.rank_file(save, 1, parallel, at), weights_only=False)["model"]
        for at in parallel.ranks()
    }


def test_every_element_goes_to_its_position(tmp_path: Path) -> None:
    """Sizes: hidden 64, 4 heads of 16 in 2 groups, feed-forward 96, vocabulary 100, 2 layers, with
    tp 2 and pp 2.
    """
    hf = tiny.save(tmp_path / "hf", "qwen2")
    ranks = to_mcore(tmp_path / "hf", tmp_path / "mcore", ParallelLayout(2, 2))
    q, k, v = (hf[LAYER.format(1) + f"self_attn.{kind}_proj.weight"] for kind in "qkv")
    gate, up, down = (
        hf[LAYER.format(1) + f"mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down")
    )
    second = ranks[Coords(1, 1)]  # the second half of everything in the second layer
    attention, mlp = "decoder.layers.0.self_attention.", "decoder.layers.0.mlp."
    assert torch.equal(second[attention + "linear_qkv.weight"], torch.cat([q[32:], k[16:], v[16:]]))
    assert torch.equal(second[mlp + "linear_fc1.weight"], torch.cat([gate[48:], up[48:]]))
    assert torch.equal(second[mlp + "linear_fc2.weight"], down[:, 48:])
    assert torch.equal(
        second[attention + "linear_proj.weight"],
        hf[LAYER.format(1) + "self_attn.o_proj.weight"][:, 32:],
    )
    assert torch.equal(
        second["decoder.layers.0.pre_mlp_layernorm.weight"],
        hf[LAYER.format(1) + "post_attention_layernorm.weight"],
    )
    biases = [hf[LAYER.format(0) + f"self_attn.{kind}_proj.bias"] for kind in "qkv"]
    expected = torch.cat([biases[0][:32], biases[1][:16], biases[2][:16]])
    assert torch.equal(ranks[Coords(0, 0)][attention + "linear_qkv.bias"], expected)
    assert torch.equal(
        ranks[Coords(1, 0)]["embedding.word_embeddings.weight"],
        hf["model.embed_tokens.weight"][50:],
    )
    assert torch.equal(second["output_layer.weight"], hf["lm_head.weight"][50:])
    assert (
        "output_layer.weight" not in ranks[Coords(1, 0)]
        and "embedding.word_embeddings.weight" not in second
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_model_comes_back_from_every_layout(
    tmp_path: Path, family: str, tied: bool, tp: int, pp: int
) -> None:
    hf = tiny.save(tmp_path / "hf", family, tie_word_embeddings=tied, vocab_size=99)
    to_mcore(tmp_path / "hf", tmp_path / "mcore", ParallelLayout(tp, pp), vocab_multiple=8)
    write_hf(open_weights(tmp_path / "mcore"), tmp_path / "back", None)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(hf) and all(same_bits(back[name], hf[name]) for name in hf)
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads(
            (tmp_path / "hf" / name).read_text()
        )


def test_a_tied_embedding_is_copied_to_the_last_of_several_stages(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf", tie_word_embeddings=True)
    single = to_mcore(tmp_path / "hf", tmp_path / "one")
    two = to_mcore(tmp_path / "hf", tmp_path / "two", ParallelLayout(pp=2))
    assert (
        "output_layer.weight" not in single[Coords()] and "output_layer.weight" not in two[Coords()]
    )
    assert torch.equal(
        two[Coords(pp=1)]["output_layer.weight"], two[Coords()]["embedding.word_embeddings.weight"]
    )


def test_a_tied_copy_that_differs_is_refused(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf", tie_word_embeddings=True)
    last = to_mcore(tmp_path / "hf", tmp_path / "mcore", ParallelLayout(pp=2))[Coords(pp=1)]
    path = mcore.rank_file(tmp_path / "mcore", 1, ParallelLayout(pp=2), Coords(pp=1))
    args = mcore.read_rank_file(path)["args"]
    mcore.write_rank_file(
        path.with_suffix(".new"),
        {**last, "output_layer.weight": last["output_layer.weight"] * 2},
        args,
        1,
    )
    path.with_suffix(".new").replace(path)
    with pytest.raises(MsrlError, match=mentions("output_layer", "tie_word_embeddings")):
        open_weights(tmp_path / "mcore")


def test_vocabulary_is_padded_and_names_are_chosen(tmp_path: Path) -> None:
    hf = tiny.save(tmp_path / "hf", vocab_size=99)
    ranks = to_mcore(
        tmp_path / "hf",
        tmp_path / "mcore",
        ParallelLayout(2),
        vocab_multiple=64,
        naming=Naming(te=True),
    )
    table = torch.cat([ranks[Coords(rank)]["embedding.word_embeddings.weight"] for rank in (0, 1)])
    assert (
        table.shape == (128, 64)
        and torch.equal(table[:99], hf["model.embed_tokens.weight"])
        and not table[99:].any()
    )
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in ranks[Coords(0, 0)]
    assert (
        compare(open_weights(tmp_path / "hf"), open_weights(tmp_path / "mcore"), None).different
        == ()
    )


@pytest.mark.parametrize(
    ("source", "target"), [((2, 1), (1, 2)), ((1, 2), (2, 2)), ((2, 2), (1, 1)), ((1, 1), (2, 1))]
)
def test_one_layout_becomes_another_as_if_converted_directly(
    tmp_path: Path, source: tuple[int, int], target: tuple[int, int]
) -> None:
    tiny.save(tmp_path / "hf", "qwen3", tie_word_embeddings=True, vocab_size=99)
    to_mcore(tmp_path / "hf", tmp_path / "first", ParallelLayout(*source))
    resharded = to_mcore(tmp_path / "first", tmp_path / "second", ParallelLayout(*target))
    direct = to_mcore(tmp_path / "hf", tmp_path / "direct", ParallelLayout(*target))
    assert resharded.keys() == direct.keys()
    for rank, expected in direct.items():
        assert list(resharded[rank]) == list(expected)
        assert all(same_bits(resharded[rank][name], expected[name]) for name in expected)


def test_other_tensors_of_the_same_names_have_the_same_shards(tmp_path: Path) -> None:
    """For example optimizer moments: float32, on another scale, under the names of the weights."""
    tiny.save(tmp_path / "hf")
    source = open_weights(tmp_path / "hf")
    moments = {
        at: {
            name: tensor.float() ** 2
            for name, tensor in source.local_tensors(ParallelLayout(2), at)
        }
        for at in ParallelLayout(2).ranks()
    }
    resharded = ShardedSource(source.shape, ParallelLayout(2), moments, tmp_path, "moments")
    expected = dict(source.local_tensors(ParallelLayout(pp=2), Coords(pp=1)))
    assert all(
        torch.equal(tensor, expected[name].float() ** 2)
        for name, tensor in resharded.local_tensors(ParallelLayout(pp=2), Coords(pp=1))
    )


def test_a_chosen_type_is_cast_and_written_into_the_config(tmp_path: Path) -> None:
    hf = tiny.save(tmp_path / "hf", dtype=torch.float32)
    to_mcore(tmp_path / "hf", tmp_path / "mcore", dtype=torch.bfloat16)
    write_hf(open_weights(tmp_path / "mcore"), tmp_path / "back", None)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(same_bits(back[name], hf[name].to(torch.bfloat16)) for name in hf)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_comparison_is_by_bits() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), -0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))


def test_the_manifest_detects_damage(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore", ParallelLayout(2))
    assert damages(mcore_checks(tmp_path / "mcore")) == []
    path = mcore.rank_file(tmp_path / "mcore", 1, ParallelLayout(2), Coords(1))
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    (damage,) = damages(mcore_checks(tmp_path / "mcore"))
    assert_mentions(damage, "mp_rank_01", "checksum")


def test_a_taken_folder_and_a_full_disk_are_refused_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(tmp_path / "hf")
    source = open_weights(tmp_path / "hf")
    with pytest.raises(MsrlError, match=mentions("hf", "exists")):
        write_mcore(source, tmp_path / "hf", McoreTarget())
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(MsrlError, match=mentions("1,000 bytes", "disk")):
        write_hf(source, tmp_path / "out", None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_files_of_another_model_or_layout_are_refused(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore", ParallelLayout(2))
    tiny.save(tmp_path / "mcore" / "hf", num_hidden_layers=4)
    with pytest.raises(MsrlError, match=mentions("num_layers=2", "4")):
        open_weights(tmp_path / "mcore")
    (tmp_path / "mcore" / "hf" / "config.json").unlink()
    with pytest.raises(MsrlError, match=mentions("--hf-config", "Hugging Face")):
        open_weights(tmp_path / "mcore")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore")
    path = mcore.rank_file(tmp_path / "mcore", 1, ParallelLayout(), Coords())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MsrlError, match=mentions("model_optim_rng.pt", "torch.save")):
        open_weights(tmp_path / "mcore")


KILLED = """
import os, signal, sys
from pathlib import Path
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.source import open_weights
from msrl.models.parallel_layout import ParallelLayout
written = [0]
def advance(num_bytes):
    written[0] += 1
    if written[0] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
source, save = open_weights(Path(sys.argv[1])), Path(sys.argv[2])
if sys.argv[3] == "mcore":
    write_mcore(source, save, McoreTarget(ParallelLayout(2)), advance)
else:
    write_hf(source, save, None, advance)
"""


@pytest.mark.parametrize("kind", ["mcore", "hf"])
@pytest.mark.sample(1)
@pytest.mark.slow
def test_a_run_killed_while_writing_leaves_nothing_visible_and_can_be_repeated(
    tmp_path: Path, kind: str
) -> None:
    hf = tiny.save(tmp_path / "hf")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "hf"), str(tmp_path / "out"), kind],
        capture_output=True,
    )
    assert done.returncode == -9
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "hf"]
    source = open_weights(tmp_path / "hf")
    write_mcore(
        source, tmp_path / "out", McoreTarget(ParallelLayout(2))
    ) if kind == "mcore" else write_hf(source, tmp_path / "out", None)
    assert compare(source, open_weights(tmp_path / "out"), None).num_tensors == len(hf)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_a_failure_during_a_write_leaves_no_files(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")

    def fail(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_mcore(open_weights(tmp_path / "hf"), tmp_path / "out", McoreTarget(), fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")

    def full(num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source, save = open_weights(tmp_path / "hf"), tmp_path / "new" / "folders" / "out"
    for write in (
        partial(write_mcore, source, save, McoreTarget(), full),
        partial(write_hf, source, save, None, full),
    ):
        with pytest.raises(MsrlError, match=mentions("out", "No space left on device")):
            write()
        assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    (tmp_path / "file").write_text("")
    with pytest.raises(MsrlError, match=mentions("file/out", "folder")):
        write_mcore(open_weights(tmp_path / "hf"), tmp_path / "file" / "out", McoreTarget())


# --- the command, with its proof ---


def run(**convert: Any) -> None:
    from msrl.workflows.convert import run as convert_ckpt

    values = {
        key: str(value) if isinstance(value, Path) else value for key, value in convert.items()
    }
    convert_ckpt.run(Config.model_validate({"convert": values, "cluster": {"platform": "cpu"}}))


def save_real(folder: Path, family: str, *, tied: bool, dtype: str = "float32") -> None:
    """Save a random model of transformers with 4 layers, whose logits depend on every weight."""
    import transformers

    architecture = tiny.FAMILIES[family]["architectures"][0]
    settings: dict[str, Any] = {
        "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    if family == "qwen3":
        settings["head_dim"] = 32
    if family == "llama":
        settings["rope_parameters"] = {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**settings)
    model = getattr(transformers, architecture)(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "parallel"),
    [
        pytest.param("qwen2", True, {"pp": 2, "vpp": 1}, marks=pytest.mark.full),
        pytest.param("qwen2", False, {"tp": 2}, marks=pytest.mark.full),
        ("qwen3", True, {"tp": 1, "pp": 3, "noop_layers": (0, 5)}),
        pytest.param(
            "llama", False, {"tp": 2, "pp": 2, "num_layer_list": (1, 3)}, marks=pytest.mark.full
        ),
    ],
)
def test_a_conversion_is_verified_on_real_megatron_ranks(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    tied: bool,
    parallel: dict[str, Any],
) -> None:
    save_real(tmp_path / "hf", family, tied=tied)
    run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "mcore", **parallel)
    run(command="mcore2hf", load=tmp_path / "mcore", save=tmp_path / "back")
    proofs = capsys.readouterr().out
    assert all(
        proofs.count(check) == 2 for check in ("round trip", "logits, fp32", "distributions")
    )
    assert (tmp_path / "back" / "config.json").is_file()


@pytest.mark.full
@pytest.mark.slow
def test_casts_and_reshards_are_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_real(tmp_path / "hf", "qwen2", tied=True)
    run(
        command="hf2mcore",
        load=tmp_path / "hf",
        save=tmp_path / "one",
        tp=2,
        pad_vocab_to_multiple=16,
        names="te",
    )
    run(command="reshard", load=tmp_path / "one", save=tmp_path / "two", pp=2, dtype="bf16")
    (tmp_path / "two" / "hf").rename(tmp_path / "elsewhere")  # as MindSpeed's own checkpoints are
    run(
        command="mcore2hf",
        load=tmp_path / "two",
        save=tmp_path / "back",
        dtype="fp32",
        hf_config=tmp_path / "elsewhere",
    )
    assert capsys.readouterr().out.count("round trip") == 3
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


def _swap(layout: Any, tensors: Any) -> Any:
    return tensors[::-1] if isinstance(layout, layouts.GateUp) else tensors


def _k_and_v_swapped(layout: Any, tensors: Any) -> Any:
    is_qkv = isinstance(layout, layouts.Grouped) and len(tensors) == 3
    return (tensors[0], tensors[2], tensors[1]) if is_qkv else tensors


@pytest.mark.slow
@pytest.mark.parametrize("swap", [_swap, pytest.param(_k_and_v_swapped, marks=pytest.mark.full)])
def test_a_swap_in_both_directions_fails_the_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: Any
) -> None:
    """If gate and up, or k and v, are swapped both ways, the round trip is equal but the logits
    differ.
    """
    save_real(tmp_path / "hf", "qwen2", tied=True)
    unfuse, pieces = layouts.unfuse, layouts.pieces
    monkeypatch.setattr(
        layouts,
        "pieces",
        lambda layout, tensors, *ranks: pieces(layout, swap(layout, tuple(tensors)), *ranks),
    )
    monkeypatch.setattr(
        layouts, "unfuse", lambda layout, canonical: swap(layout, unfuse(layout, canonical))
    )
    with pytest.raises(VerificationError, match=mentions("logits, fp32")):
        run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "mcore")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore.failed-verification"]


def test_inspect_prints_the_contents_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tmp_path / "hf")
    run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "mcore", tp=2, verify=False)
    run(command="inspect", load=tmp_path / "mcore")
    output = capsys.readouterr().out
    assert (
        "iteration 1, tp 2, pp 1" in output
        and "mp_rank_01/model_optim_rng.pt" in output
        and "bfloat16" in output
    )
    assert_mentions(output, "files:", "manifest")


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(tmp_path / "hf")
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    with pytest.raises(MsrlError, match=mentions("verification", "1.0 KB", "--no-verify")):
        run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "mcore")
    assert not (tmp_path / "mcore").exists()
