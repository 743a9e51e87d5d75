"""Files with altered bytes: read unchanged or refused in one message, and found by checksums."""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints as tiny
from msrl.checkpoint.adapters.peft import read_peft
from msrl.checkpoint.hf.weight_files import open_weight_files
from msrl.checkpoint.integrity import has_manifest, mcore_checks
from msrl.checkpoint.mcore.files import rank_file
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.torch_files.reader import read_torch_file
from msrl.checkpoint.torch_files.whole_files import check_records
from msrl.errors import MsrlError
from msrl.models.hf_config import end_tokens, read_hf_config
from msrl.models.parallel_layout import Coords, ParallelLayout
from support import mentions
from test_convert import to_mcore


def _torch_file(path: Path) -> bytes:
    torch.save(
        {
            "args": argparse.Namespace(a=1),
            "model": {"weight": torch.arange(6.0).view(2, 3)},
            "iteration": 5,
        },
        path,
    )
    return path.read_bytes()


def test_a_torch_file_with_an_altered_byte_is_read_or_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    whole, refused = _torch_file(path), 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        try:
            read_torch_file(path)
        except MsrlError as error:
            assert str(error).startswith(f"{path}: ")
            refused += 1
    assert refused > 100


def test_a_record_whose_name_differs_from_the_directory_is_detected(tmp_path: Path) -> None:
    """torch and zipfile compare the name in the record's header too, and would not read it."""
    path = tmp_path / "file.pt"
    whole = _torch_file(path)
    with zipfile.ZipFile(path) as archive:
        begin = archive.infolist()[-1].header_offset
    for position in (begin, begin + 30):
        path.write_bytes(whole[:position] + b"?" + whole[position + 1 :])
        with pytest.raises(MsrlError, match=mentions("record", "archive")):
            check_records(path)


def test_a_compressed_torch_file_is_not_mapped(tmp_path: Path) -> None:
    """If it were mapped, compressed bytes would be read as the numbers of the first tensor."""
    path, tensors = tmp_path / "file.pt", {"zeros": torch.zeros(1000), "noise": torch.randn(9000)}
    torch.save(tensors, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(
                name, data, zipfile.ZIP_DEFLATED if name.endswith("data/0") else zipfile.ZIP_STORED
            )
    assert torch.load(path, mmap=True)["zeros"].any(), "torch itself reads zeros"
    with pytest.raises(MsrlError, match=mentions("file.pt", "record", "compressed")):
        read_torch_file(path)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        3,
        {},
        {"files": {"x": 1}},
        {"files": {"x": {"sha256": "0"}}},
        {"files": {"x": {"bytes": 1}}},
    ],
)
def test_an_incomplete_manifest_is_refused(tmp_path: Path, entry: Any) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore")
    (tmp_path / "mcore" / "msrl_manifest.json").write_text(
        json.dumps({"format": 1, "iterations": {"1": entry}})
    )
    if entry is None:
        assert not has_manifest(tmp_path / "mcore", is_hf=False)
        return
    with pytest.raises(MsrlError, match=mentions("msrl_manifest.json", "iteration 1", "files")):
        mcore_checks(tmp_path / "mcore")


def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    readers = {
        "config.json": read_hf_config,
        "generation_config.json": end_tokens,
        "model.safetensors.index.json": open_weight_files,
        "adapter_config.json": read_peft,
    }
    for name, read in readers.items():
        (tmp_path / name).write_text("[" * 100_000)
        with pytest.raises(MsrlError, match=mentions(name, "not")):
            read(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "model", "message"),
    [
        ({"expert_tensor_parallel_size": "x"}, {}, ("expert_tensor_parallel_size='x'", "integer")),
        ({"num_layer_list": "1,x"}, {}, ("num_layer_list='1,x'", "layer numbers")),
        ({"num_layers": None}, {}, ("num_layers=None", "2")),
        ({}, {1: torch.zeros(2)}, ("model entry 1", "tensor")),
        ({}, {"language_model": {1: torch.zeros(2)}}, ("language_model.1", "legacy")),
    ],
)
def test_a_rank_file_with_invalid_contents_is_refused(
    tmp_path: Path, arguments: dict[str, Any], model: dict[Any, Any], message: tuple[str, ...]
) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore")
    path = rank_file(tmp_path / "mcore", 1, ParallelLayout(), Coords())
    contents = torch.load(path, weights_only=False)
    vars(contents["args"]).update(arguments)
    torch.save({**contents, "model": model or contents["model"]}, path)
    with pytest.raises(MsrlError, match=mentions(*message)):
        open_weights(tmp_path / "mcore")
