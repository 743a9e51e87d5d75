"""Checkpoint files of Hugging Face and Megatron: complete, damaged and harmful."""

from __future__ import annotations

import argparse
import collections
import errno
import itertools
import json
import os
import random
import sys
import types
import zipfile
import zlib
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import tiny_checkpoints as tiny
from msrl.checkpoint.atomic_folder import require_space, staged_folder
from msrl.checkpoint.hf.folder import HfCheckpoint, copy_sidecars
from msrl.checkpoint.hf.writer import HfWriter
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.mcore.locate import find_checkpoint
from msrl.checkpoint.mcore.names import Naming, file_tensors, local_name
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.torch_files import archive
from msrl.checkpoint.torch_files import reader as torch_file
from msrl.checkpoint.torch_files.archive import ALIGNMENT
from msrl.checkpoint.torch_files.pickle_names import Foreign
from msrl.checkpoint.torch_files.reader import (
    Pieces,
    TensorSpec,
    read_torch_file,
    tensor_spec,
)
from msrl.checkpoint.torch_files.whole_files import check_records
from msrl.checkpoint.torch_files.writer import TorchWriter
from msrl.checksums import combine_crc32, crc32
from msrl.errors import MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.tracking.run import RunFolder
from msrl.types import ChatFormat
from support import assert_mentions, mentions
from test_models import LLAMA, QWEN2, shape

# --- torch's file format ---

SAMPLES = {
    "matrix": torch.arange(6.0).view(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "view": torch.arange(12.0).view(3, 4)[:, 1:3],
}


def write_samples(path: Path, order: int = 1) -> Any:
    specs = {name: tensor_spec(tensor) for name, tensor in SAMPLES.items()}
    writer = TorchWriter(
        path, specs, lambda model: {"args": argparse.Namespace(a=1), "model": model}
    )
    for name in list(SAMPLES)[::order]:
        writer.write(name, SAMPLES[name])
    return writer.close()


@pytest.mark.parametrize("mmap", [True, False])
def test_torch_reads_streamed_files(tmp_path: Path, mmap: bool) -> None:
    write_samples(tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=False, mmap=mmap)
    assert loaded["args"] == argparse.Namespace(a=1)
    for name, tensor in SAMPLES.items():
        assert loaded["model"][name].dtype == tensor.dtype and torch.equal(
            loaded["model"][name], tensor
        )


def test_streamed_files_are_sound_zip_archives_with_aligned_data(tmp_path: Path) -> None:
    written = write_samples(tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None
    loaded = torch.load(tmp_path / "file.pt", weights_only=False, mmap=True)
    plain = [tensor for tensor in loaded["model"].values() if tensor.numel()]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in plain)
    assert written.num_bytes == (tmp_path / "file.pt").stat().st_size
    assert written.sha256 == check_records(tmp_path / "file.pt")


def test_tensors_larger_than_a_block_are_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrl.checkpoint.torch_files.reader.BLOCK_BYTES", 10)
    written = write_samples(tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=False)["model"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in SAMPLES.items())
    assert written.sha256 == check_records(tmp_path / "file.pt")


def test_the_order_of_writing_changes_no_byte(tmp_path: Path) -> None:
    assert write_samples(tmp_path / "front.pt") == write_samples(tmp_path / "back.pt", order=-1)
    assert (tmp_path / "front.pt").read_bytes() == (tmp_path / "back.pt").read_bytes()


def test_undeclared_and_missing_tensors_are_an_error(tmp_path: Path) -> None:
    writer = TorchWriter(
        tmp_path / "f.pt", {"a": TensorSpec(torch.float32, (2,))}, lambda model: model
    )
    with pytest.raises(ValueError, match=mentions("declared")):
        writer.write("a", torch.zeros(3))
    with pytest.raises(ValueError, match="not written: data/0"):
        writer.close()


def test_files_beyond_four_gigabytes_are_read_by_torch_and_zipfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write two tensors of 4.3 GB, whose zeros are holes of the file: sizes and positions need 64
    bits.
    """
    block, count = (
        torch.zeros(torch_file.BLOCK_BYTES, dtype=torch.uint8),
        1 + (1 << 32) // torch_file.BLOCK_BYTES,
    )
    real = archive.write_at
    monkeypatch.setattr(
        archive,
        "write_at",
        lambda file, data, at: None if len(data) == len(block) else real(file, data, at),
    )
    monkeypatch.setattr(
        archive,
        "crc32",
        lambda data, crc=0: 0 if len(data) == len(block) else zlib.crc32(data, crc),
    )
    large, small = TensorSpec(torch.uint8, (count, len(block))), torch.arange(5)
    writer = TorchWriter(
        tmp_path / "file.pt",
        {"a": large, "b": tensor_spec(small), "c": large, "d": tensor_spec(small)},
        lambda model: model,
    )
    for name in "abcd":
        writer.write(name, small if name in "bd" else Pieces(large, itertools.repeat(block, count)))
    assert writer.close().num_bytes == (tmp_path / "file.pt").stat().st_size > 8 << 30
    loaded = torch.load(tmp_path / "file.pt", weights_only=False, mmap=True)
    assert (
        torch.equal(loaded["b"], small)
        and torch.equal(loaded["d"], small)
        and loaded["c"].shape == large.shape
    )
    assert not loaded["a"][::1000].any() and not loaded["c"][-1].any()
    with zipfile.ZipFile(tmp_path / "file.pt") as file:
        assert (
            file.read("archive/data/3") == small.numpy().tobytes()
            and file.getinfo("archive/data/2").file_size == large.num_bytes
        )


@pytest.mark.parametrize("block_bytes", [1 << 20, 10])
def test_a_tensor_in_pieces_is_written_as_one_and_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("msrl.checkpoint.torch_files.reader.BLOCK_BYTES", block_bytes)
    pieces = [torch.randn(3, 4), torch.randn(4, 5).t()[:, :4], torch.randn(4, 4)[1:3]]
    expected = torch.cat(pieces).bfloat16()
    spec = tensor_spec(expected)
    writer = TorchWriter(tmp_path / "f.pt", {"a": spec}, lambda model: model)
    for wrong in (pieces[:2], [*pieces, pieces[0]]):
        with pytest.raises(ValueError, match=mentions("bytes", "declared")):
            writer.write("a", Pieces(spec, wrong))
    writer.write("a", Pieces(spec, iter(pieces)))
    writer.close()
    assert torch.equal(read_torch_file(tmp_path / "f.pt")["a"], expected)


def test_the_checksum_of_concatenated_blocks_follows_from_those_of_the_blocks() -> None:
    """Compare with zlib's checksum of the concatenated data."""
    data = random.Random(0).randbytes(100_000)
    for length in (0, 1, 63, 4096, 99_999, 100_000):
        first, second = data[:length], data[length:]
        assert (
            combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
            == zlib.crc32(data)
            == crc32(data)
        )


class Harmful:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("key", ["args", "model"])
def test_a_harmful_file_is_refused_by_name_and_executes_nothing(tmp_path: Path, key: str) -> None:
    file = {"args": argparse.Namespace(), "model": {}, key: Harmful(tmp_path / "proof")}
    torch.save(file, tmp_path / "file.pt")
    with pytest.raises(MsrlError, match=mentions("file.pt", "posix.mkdir")):
        mcore.read_rank_file(tmp_path / "file.pt")
    assert not (tmp_path / "proof").exists()
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "proof").exists()  # a reader that trusts the file executes it


@pytest.mark.parametrize("function", [eval, getattr, torch.load, sum, __import__])
def test_functions_are_not_values_of_a_checkpoint(tmp_path: Path, function: Any) -> None:
    torch.save({"args": function}, tmp_path / "file.pt")
    with pytest.raises(MsrlError, match=mentions("file.pt", function.__name__, "harmful")):
        read_torch_file(tmp_path / "file.pt")


def test_programs_and_old_files_and_junk_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "program.pt", "w") as archive:
        archive.writestr("archive/constants.pkl", b"")
    torch.save({"args": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "junk.pt").write_bytes(b"junk")
    for name, message in (
        ("program", "TorchScript"),
        ("old", "torch.save"),
        ("junk", "torch.save"),
        ("none", "file"),
    ):
        with pytest.raises(MsrlError, match=mentions(f"{name}.pt", message)):
            read_torch_file(tmp_path / f"{name}.pt")


def test_files_saved_by_megatron_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enums = types.ModuleType("megatron.core.enums")
    monkeypatch.setitem(sys.modules, "megatron.core.enums", enums)
    kind = Enum("ModelType", {"encoder_or_decoder": 1}, module="megatron.core.enums")
    monkeypatch.setattr(enums, "ModelType", kind, raising=False)
    args = argparse.Namespace(
        model_type=kind["encoder_or_decoder"],
        params_dtype=torch.bfloat16,
        lr=1e-6,
        names={"a"},
        none=None,
    )
    rng = [
        {
            "random": random.getstate(),
            "numpy": np.random.RandomState(0).get_state(),
            "torch": torch.get_rng_state(),
        }
    ]
    model = collections.OrderedDict(
        weight=torch.nn.Parameter(torch.ones(2)), **{"layer._extra_state": None}
    )
    torch.save(
        {"args": args, "iteration": 5, "rng_state": rng, "model": model}, tmp_path / "file.pt"
    )
    loaded = mcore.read_rank_file(tmp_path / "file.pt")
    assert (
        isinstance(loaded["args"].model_type, Foreign)
        and loaded["args"].params_dtype == torch.bfloat16
    )
    assert list(loaded["model"]) == ["weight"] and loaded["iteration"] == 5
    assert np.array_equal(
        loaded["rng_state"][0]["numpy"][1], np.random.RandomState(0).get_state()[1]
    )


# --- Megatron's folders ---


def test_rank_files_have_mindspeeds_paths(tmp_path: Path) -> None:
    def relative_path(layout: ParallelLayout, at: Coords) -> str:
        return str(mcore.rank_file(tmp_path, 1, layout, at).relative_to(tmp_path))

    assert (
        relative_path(ParallelLayout(4), Coords(3)) == "iter_0000001/mp_rank_03/model_optim_rng.pt"
    )
    assert (
        relative_path(ParallelLayout(4, 2), Coords(3, 1))
        == "iter_0000001/mp_rank_03_001/model_optim_rng.pt"
    )
    assert (
        relative_path(ParallelLayout(2, 2, ep=4), Coords(1, 1, 3))
        == "iter_0000001/mp_rank_01_001_003/model_optim_rng.pt"
    )
    assert (
        relative_path(ParallelLayout(2, 1, ep=4), Coords(1, 0, 3))
        == "iter_0000001/mp_rank_01_003/model_optim_rng.pt"
    )


def test_a_rank_file_holds_what_megatron_expects(tmp_path: Path) -> None:
    loaded = shape(QWEN2)
    mcore.write_rank_file(
        tmp_path / "m" / "f.pt", {"a": torch.ones(2)}, mcore.namespace(loaded, ParallelLayout(2)), 7
    )
    contents = torch.load(tmp_path / "m" / "f.pt", weights_only=False)
    assert sorted(contents) == ["args", "checkpoint_version", "iteration", "model"]
    assert (contents["checkpoint_version"], contents["iteration"]) == (3.0, 7)
    args = vars(contents["args"])
    expected = {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "num_layers": 2,
        "hidden_size": 64, "padded_vocab_size": 100,
        "untie_embeddings_and_output_weights": True, "group_query_attention": True,
        "num_query_groups": 2, "kv_channels": 16,
        "add_qkv_bias": True, "rotary_base": 1e6, "num_experts": None, "bf16": True,
    }  # fmt: skip
    assert {name: args[name] for name in expected} == expected


def test_an_iteration_is_visible_only_when_published(tmp_path: Path) -> None:
    path = mcore.rank_file(tmp_path, 3, ParallelLayout(), Coords(), staged=True)
    mcore.write_rank_file(path, {}, mcore.namespace(shape(QWEN2), ParallelLayout()), 3)
    with pytest.raises(MsrlError, match=mentions("mcore", "checkpoint")):
        find_checkpoint(tmp_path)
    mcore.publish(tmp_path, 3)
    assert find_checkpoint(tmp_path).iteration == 3
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_the_word_release_is_an_iteration(tmp_path: Path) -> None:
    mcore.write_rank_file(
        mcore.rank_file(tmp_path, "release", ParallelLayout(), Coords()),
        {},
        mcore.namespace(shape(QWEN2), ParallelLayout()),
        "release",
    )
    (tmp_path / mcore.TRACKER).write_text("release\n")
    assert find_checkpoint(tmp_path).iteration == "release"


@pytest.mark.parametrize(("text", "message"), [("soon", "release"), ("9", "iter_0000009")])
def test_an_invalid_tracker_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / mcore.TRACKER).write_text(text)
    with pytest.raises(MsrlError, match=mentions("latest_checkpointed_iteration.txt", message)):
        find_checkpoint(tmp_path)


def test_missing_and_unexpected_ranks_are_named(tmp_path: Path) -> None:
    args = mcore.namespace(shape(QWEN2), ParallelLayout(2, 2))
    for tp_rank, pp_rank in ((0, 0), (1, 0), (1, 1)):
        mcore.write_rank_file(
            mcore.rank_file(tmp_path, 1, ParallelLayout(2, 2), Coords(tp_rank, pp_rank)),
            {},
            args,
            1,
        )
    mcore.publish(tmp_path, 1)
    with pytest.raises(MsrlError, match=mentions("mp_rank_00_001/model_optim_rng.pt", "missing")):
        find_checkpoint(tmp_path)
    mcore.write_rank_file(
        mcore.rank_file(tmp_path, 1, ParallelLayout(2, 2), Coords(0, 1)), {}, args, 1
    )
    (tmp_path / "iter_0000001" / "mp_rank_00_000_001").mkdir()
    with pytest.raises(MsrlError, match=mentions("mp_rank_00_000_001", "rank")):
        find_checkpoint(tmp_path)


def test_names_of_transformer_engine_and_local_spec_correspond() -> None:
    local = ["decoder.layers.11.pre_mlp_layernorm.weight", "decoder.final_layernorm.weight"]
    stored = [entry.name for entry in file_tensors(local, Naming(te=True))]
    assert stored == [
        "decoder.layers.11.mlp.linear_fc1.layer_norm_weight",
        "decoder.final_layernorm.weight",
    ]
    assert [local_name(name) for name in stored] == local


def test_names_of_transformer_engine_keep_the_norm_before_latent_attention() -> None:
    names = [
        f"decoder.layers.3.{suffix}"
        for suffix in ("input_layernorm.weight", "self_attention.linear_kv_up_proj.weight")
    ]
    assert [entry.name for entry in file_tensors(names, Naming(te=True))] == names


# --- Hugging Face folders ---


@pytest.mark.parametrize("shards", [1, 3])
def test_a_hugging_face_folder_is_read_from_one_file_or_many(tmp_path: Path, shards: int) -> None:
    weights = tiny.save(tmp_path, shards=shards)
    checkpoint = HfCheckpoint(tmp_path)
    assert checkpoint.specs == {name: tensor_spec(tensor) for name, tensor in weights.items()}
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in weights.items())


def damage(folder: Path, what: str) -> None:
    index = folder / "model.safetensors.index.json"
    first = folder / "model-00001-of-00003.safetensors"
    if what == "truncated":
        first.write_bytes(first.read_bytes()[:-10])
    elif what == "header":
        first.write_bytes(b"\xff" * 100)
    elif what == "gone":
        first.unlink()
    elif what == "index":
        index.write_text("[1, 2")
    elif what == "outside":
        index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    else:
        contents = json.loads(index.read_text())
        contents["weight_map"].pop("model.norm.weight")
        index.write_text(json.dumps(contents))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", ("model-00001-of-00003.safetensors", "download")),
        ("header", ("model-00001-of-00003.safetensors", "download")),
        ("gone", ("model-00001-of-00003.safetensors", "index")),
        ("index", ("model.safetensors.index.json", "weight")),
        ("outside", ("model.safetensors.index.json", "file name")),
        ("unlisted", ("model.safetensors.index.json", "model.norm.weight")),
    ],
)
def test_damage_to_a_hugging_face_folder_is_named(
    tmp_path: Path, what: str, message: tuple[str, ...]
) -> None:
    tiny.save(tmp_path, shards=3)
    damage(tmp_path, what)
    with pytest.raises(MsrlError) as error:
        HfCheckpoint(tmp_path)
    assert_mentions(error.value, *message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 3},
            ("12 tensors", "model.layers.2.input_layernorm.weight", "missing"),
        ),
        (
            {"num_hidden_layers": 1},
            ("12 tensors", "Qwen2ForCausalLM", "model.layers.1.input_layernorm.weight"),
        ),
        (
            {"vocab_size": 101},
            ("model.embed_tokens.weight", "[100, 64]", "[101, 64]", "config.json"),
        ),
        (
            {"tie_word_embeddings": True},
            ("tie_word_embeddings=true", "lm_head.weight", "embedding"),
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    tmp_path: Path, changes: dict[str, Any], message: tuple[str, ...]
) -> None:
    tiny.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN2, **changes}))
    with pytest.raises(MsrlError) as error:
        HfCheckpoint(tmp_path)
    assert_mentions(error.value, *message)


def test_other_folders_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("none", "folder")):
        open_weights(tmp_path / "none")
    with pytest.raises(MsrlError, match=mentions(tmp_path, "empty")):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    with pytest.raises(MsrlError, match=mentions("model.safetensors", "weights")):
        open_weights(tmp_path)


def test_the_writer_splits_and_indexes_shards(tmp_path: Path) -> None:
    weights = tiny.tensors(LLAMA)
    writer = HfWriter(
        tmp_path, {name: tensor_spec(t) for name, t in weights.items()}, max_shard_bytes=20_000
    )
    for name, tensor in reversed(weights.items()):
        writer.write(name, tensor)
    written = writer.close()
    assert (
        len(written)
        == len(list(tmp_path.iterdir()))
        == 1 + len(list(tmp_path.glob("*.safetensors")))
        > 2
    )
    for name, record in written.items():
        contents = (tmp_path / name).read_bytes()
        assert record == {"bytes": len(contents), "crc32": f"{zlib.crc32(contents):08x}"}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(
        sum(t.nbytes for t in _load(file).values()) <= 20_000 or len(_load(file)) == 1
        for file in files
    )
    checkpoint = HfCheckpoint(tmp_path)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in weights.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())


def _load(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def test_a_writer_that_lacks_a_tensor_raises_an_error(tmp_path: Path) -> None:
    writer = HfWriter(
        tmp_path, {"a": TensorSpec(torch.float32, (2,)), "b": TensorSpec(torch.bfloat16, (3,))}
    )
    with pytest.raises(ValueError, match=mentions("declared")):
        writer.write("a", torch.zeros(3))
    writer.write("b", torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="not written: a"):
        writer.close()


def test_sidecar_files_are_copied_and_the_config_has_the_new_dtype(tmp_path: Path) -> None:
    tiny.save(tmp_path / "from", shards=2)
    (tmp_path / "from" / "chat_template.jinja").write_text("x")
    copy_sidecars(tmp_path / "from", tmp_path / "to", torch.float32)
    assert sorted(file.name for file in (tmp_path / "to").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == {
        **QWEN2,
        "torch_dtype": "float32",
    }


def test_halves_of_characters_in_a_config_are_written_as_escapes(tmp_path: Path) -> None:
    r"""JSON can have one (`\ud83d` alone), which UTF-8 cannot."""
    tiny.save(tmp_path / "from")
    for name in ("config.json", "tokenizer_config.json"):
        path = tmp_path / "from" / name
        values = json.loads(path.read_text()) if path.is_file() else {"chat_template": "x"}
        path.write_text(json.dumps({**values, "note": "\ud83d"}))
    copy_sidecars(tmp_path / "from", tmp_path / "to", torch.float32, ChatFormat("trained", (1,)))
    for name in ("config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "to" / name).read_text())["note"] == "\ud83d"


def test_named_chat_templates_are_copied_and_replaced_by_that_of_a_training(
    tmp_path: Path,
) -> None:
    tiny.save(tmp_path / "from", shards=1)
    named = Path("additional_chat_templates", "tool_use.jinja")
    (tmp_path / "from" / named).parent.mkdir()
    (tmp_path / "from" / named).write_text("tools")
    copy_sidecars(tmp_path / "from", tmp_path / "to", torch.float32)
    assert (tmp_path / "to" / named).read_text() == "tools"
    copy_sidecars(tmp_path / "from", tmp_path / "trained", None, ChatFormat("trained", (1,)))
    assert (tmp_path / "trained" / "chat_template.jinja").read_text() == "trained"
    assert not (tmp_path / "trained" / named).parent.exists()


def test_a_folder_that_is_being_written_is_not_written_twice(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "out").exists()
        with (
            pytest.raises(MsrlError, match=mentions("out", "process")),
            staged_folder(tmp_path / "out"),
        ):
            pass
    assert (tmp_path / "out" / "file").read_text() == "x"
    with pytest.raises(MsrlError, match=mentions("out", "exists")), staged_folder(tmp_path / "out"):
        pass


def test_a_file_system_without_locks_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre answers like this if it is mounted without locks."""

    def no_such_call(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_such_call)
    with staged_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    RunFolder.create(tmp_path, "run", config={}).close()
    RunFolder.check(tmp_path, "run", resume=True)
    assert (tmp_path / "out" / "file").is_file() and (tmp_path / "run").is_dir()


def test_a_link_to_an_empty_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk" / "models").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "models")
    with staged_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    assert (tmp_path / "disk" / "models" / "file").read_text() == "x" and (
        tmp_path / "out"
    ).is_symlink()


def test_an_empty_folder_that_cannot_be_replaced_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MsrlError, match=r"^\.: .*folder"), staged_folder(Path()):
        pass
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "volume")
    with (
        pytest.raises(MsrlError, match=mentions("volume", "mount")),
        staged_folder(tmp_path / "volume"),
    ):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["volume"]


def test_remains_of_a_killed_run_count_as_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are removed before the first write. Otherwise a conversion that fills half of the disk
    could not be repeated after a kill.
    """
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1_000_000))
    (tmp_path / ".out.partial" / "iter_0000001").mkdir(parents=True)
    (tmp_path / ".out.partial" / "iter_0000001" / "file").write_bytes(bytes(3_000_000))
    require_space(tmp_path / "out", 3_900_000)
    with pytest.raises(MsrlError, match=mentions("5,000,000 bytes", "disk")):
        require_space(tmp_path / "out", 5_000_000)
    with pytest.raises(
        MsrlError, match=mentions("other", "3,900,000 bytes", "1,000,000 bytes", "disk")
    ):
        require_space(tmp_path / "other", 3_900_000)


def test_a_link_in_the_place_of_an_unfinished_folder_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "file").write_text("x")
    (tmp_path / ".out.partial").symlink_to(tmp_path / "home")
    with (
        pytest.raises(MsrlError, match=mentions(".out.partial", "link")),
        staged_folder(tmp_path / "out"),
    ):
        pass
    assert (tmp_path / "home" / "file").read_text() == "x"


def test_a_result_that_cannot_be_renamed_is_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(MsrlError, match=mentions(".out.partial", "complete")),
        staged_folder(tmp_path / "out") as folder,
    ):
        (folder / "file").write_text("x")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("y")
    assert (tmp_path / ".out.partial" / "file").read_text() == "x" and (
        tmp_path / "out" / "theirs"
    ).read_text() == "y"
