"""Forms of weights in Hugging Face folders, and errors that name file and tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_checkpoints as tiny
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.hf.folder import HfCheckpoint, sidecar_files
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.torch_files.reader import tensor_spec
from msrl.data.tokenizer import load_tokenizer, open_tokenizer
from msrl.errors import ManyErrors, MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.paths import irregular_file, oversized_file
from support import assert_mentions, mentions
from test_cli import msrl
from test_convert import to_mcore


def as_torch_files(folder: Path, shards: int = 1, **save: Any) -> dict[str, Tensor]:
    """Save a tiny folder with weights in `pytorch_model*.bin`."""
    weights = tiny.save(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = (
        ["pytorch_model.bin"]
        if shards == 1
        else [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    )
    for number, file in enumerate(files):
        torch.save({name: weights[name] for name in names[number::shards]}, folder / file, **save)
    if shards > 1:
        weight_map = {name: files[number % shards] for number, name in enumerate(names)}
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return weights


@pytest.mark.parametrize("shards", [1, 3])
def test_torchs_own_files_are_read_like_safetensors(tmp_path: Path, shards: int) -> None:
    weights = as_torch_files(tmp_path / "hf", shards)
    checkpoint = HfCheckpoint(tmp_path / "hf")
    assert checkpoint.specs == {name: tensor_spec(tensor) for name, tensor in weights.items()}
    assert all(same_bits(checkpoint.tensor(name), tensor) for name, tensor in weights.items())
    tiny.save(tmp_path / "safe")
    from_torch, from_safe = (
        to_mcore(tmp_path / "hf", tmp_path / "a", ParallelLayout(2)),
        to_mcore(tmp_path / "safe", tmp_path / "b", ParallelLayout(2)),
    )
    assert all(
        same_bits(from_torch[rank][name], tensor)
        for rank, model in from_safe.items()
        for name, tensor in model.items()
    )


def test_safetensors_come_before_torch_files(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never looked at")
    assert HfCheckpoint(tmp_path).specs


class Harmful:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_harmful_torch_file_runs_nothing(tmp_path: Path) -> None:
    weights = as_torch_files(tmp_path / "hf")
    torch.save(
        {**weights, "model.norm.weight": Harmful(tmp_path / "proof")},
        tmp_path / "hf" / "pytorch_model.bin",
    )
    with pytest.raises(MsrlError, match=mentions("pytorch_model.bin", "posix.mkdir")):
        HfCheckpoint(tmp_path / "hf")
    assert not (tmp_path / "proof").exists()


# --- what is refused ---

FIRST = "model-00001-of-00003.safetensors"


def _edit(path: Path, change: Any) -> None:
    """Rewrite a safetensors file after `change(tensors)`."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _rename(old: str, new: str) -> Any:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def _recast(name: str, dtype: torch.dtype) -> Any:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def _index(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    contents = json.loads(path.read_text())
    change(contents["weight_map"])
    path.write_text(json.dumps(contents))


Q = "model.layers.0.self_attn.q_proj.weight"
SINGLE: list[tuple[str, Any, tuple[str, ...]]] = [
    (
        "cut short",
        lambda f: f.write_bytes(f.read_bytes()[:-10]),
        ("hf/model.safetensors", "download"),
    ),
    (
        "unknown name",
        lambda f: _edit(f, _rename(Q, "model.layers.0.self_attn.query.weight")),
        (
            "tensor",
            "Qwen2ForCausalLM",
            "model.layers.0.self_attn.query.weight",
            "model.layers.*.self_attn.q_proj.weight -> "
            "decoder.layers.*.self_attention.linear_qkv.weight",
        ),
    ),
    (
        "unfilled rule",
        lambda f: _edit(f, lambda tensors: tensors.pop(Q)),
        ("missing", Q, "decoder.layers.0.self_attention.linear_qkv.weight"),
    ),
    (
        "shape",
        lambda f: _edit(f, lambda tensors: tensors.update({Q: torch.zeros(64, 65)})),
        ("hf/model.safetensors", Q, "[64, 65]", "[64, 64]", "config.json"),
    ),
    ("integers", lambda f: _edit(f, _recast(Q, torch.int8)), (Q, "I8", "BF16")),
    ("mixed", lambda f: _edit(f, _recast(Q, torch.float32)), ("types", "--dtype")),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in SINGLE], ids=[case[0] for case in SINGLE]
)
def test_the_command_refuses_a_damaged_folder_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Any,
    message: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "hf")
    damage(tmp_path / "hf" / "model.safetensors")
    assert msrl("convert-ckpt", "hf2mcore", "--load", "hf", "--save", "out", "--no-verify") == 2
    output = capsys.readouterr()
    assert_mentions(output.err, *message)
    assert "Traceback" not in output.err and output.out == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_types_that_differ_are_cast_when_one_is_chosen(tmp_path: Path) -> None:
    weights = tiny.save(tmp_path / "hf")
    _edit(tmp_path / "hf" / "model.safetensors", _recast(Q, torch.float32))
    ranks = to_mcore(tmp_path / "hf", tmp_path / "mcore", dtype=torch.bfloat16)
    assert torch.equal(
        ranks[Coords()]["decoder.layers.0.self_attention.linear_qkv.weight"][:32], weights[Q][:32]
    )


def test_all_mistakes_of_a_sharded_folder_are_reported_at_once(tmp_path: Path) -> None:
    tiny.save(tmp_path, shards=3)
    (tmp_path / FIRST).write_bytes((tmp_path / FIRST).read_bytes()[:-10])
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    _index(
        tmp_path,
        lambda names: names.update({"model.ghost.weight": "model-00003-of-00003.safetensors"}),
    )
    with pytest.raises(ManyErrors) as error:
        HfCheckpoint(tmp_path)
    first, second, third = error.value.messages
    assert_mentions(first, FIRST, "download")
    assert_mentions(second, "model-00002-of-00003.safetensors", "index")
    assert_mentions(third, "model.ghost.weight", "model.safetensors.index.json")


def test_damaged_torch_files_are_named(tmp_path: Path) -> None:
    as_torch_files(tmp_path, 2)
    path = tmp_path / "pytorch_model-00002-of-00002.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(MsrlError, match=mentions("pytorch_model-00002-of-00002.bin", "torch.save")):
        HfCheckpoint(tmp_path)
    torch.save([1, 2], path)
    with pytest.raises(MsrlError, match=mentions("00002.bin", "list", "tensors")):
        HfCheckpoint(tmp_path)
    path.write_bytes(whole)
    as_torch_files(tmp_path / "old", _use_new_zipfile_serialization=False)
    with pytest.raises(MsrlError, match=mentions("pytorch_model.bin", "torch.save")):
        open_weights(tmp_path / "old")


def test_links_of_a_model_folder_lead_to_files_of_the_model_or_are_refused(tmp_path: Path) -> None:
    secret, blobs, model = tmp_path / "id_rsa", tmp_path / "hub/blobs", tmp_path / "hub/snapshots/1"
    secret.write_text("secret")
    for folder in (blobs, model):
        folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (blobs / name[:3]).write_text("{}")
        (model / name).symlink_to(f"../../blobs/{name[:3]}")
    (model / "vocab.json").symlink_to("tokenizer.json")
    assert {file.name for file in sidecar_files(model)} == {
        "config.json",
        "tokenizer.json",
        "vocab.json",
    }
    (model / "generation_config.json").symlink_to(secret)
    with pytest.raises(MsrlError, match=mentions(model / "generation_config.json", secret)):
        sidecar_files(model)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
def test_an_optional_file_of_a_model_that_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "generation_config.json"
    assert irregular_file(tmp_path) is None
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else "gone")
    assert irregular_file(tmp_path) == file
    with pytest.raises(MsrlError, match=mentions(file, "no file")):
        sidecar_files(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "vocab.model"])
def test_a_file_beside_the_weights_that_is_too_large_is_refused(name: str, tmp_path: Path) -> None:
    """A file with a hole has any size, but its copy would fill a disk."""
    tiny.save(tmp_path / "model")
    assert oversized_file(tmp_path / "model") is None
    file = tmp_path / "model" / name
    file.touch()
    os.truncate(file, 1 << 40)
    assert oversized_file(tmp_path / "model") == file
    for read in (open_tokenizer, load_tokenizer, sidecar_files):
        with pytest.raises(MsrlError, match=mentions(name, "MiB")):
            read(tmp_path / "model")


def test_a_file_of_a_model_that_links_to_itself_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "config.json"
    link.symlink_to(link)
    with pytest.raises(MsrlError, match=mentions(link, "link")):
        sidecar_files(tmp_path)
