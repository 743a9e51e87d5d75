"""Damaged files of models and data are refused before an engine or a rank starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.integrity import damages, hf_checks, mcore_checks, weight_checks
from msrl.checkpoint.source import open_weights
from msrl.config.schema import Config
from msrl.data.dataset import PromptDataset, SftDataset, TextDataset
from msrl.data.indexed import IndexedWriter
from msrl.errors import MsrlError
from msrl.models.parallel_layout import ParallelLayout
from msrl.plan.run_plan import resolve as plan_run
from msrl.platforms import get
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows import preprocess
from msrl.workflows.convert import run as convert_ckpt
from msrl.workflows.rl import run as train_grpo
from msrl.workflows.serve import chat, generate
from msrl.workflows.sft import run as train_sft
from msrl.workflows.training import supervised
from msrl.workflows.training.settings import loaded_models
from tiny_qwen2 import VOCAB_SIZE, save_model
from training_runs import write_rows

RANK_FILE, LAYER_FILE = "iter_0000001/mp_rank_01/model_optim_rng.pt", "iter_0000001/__1_0.distcp"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model in every format, with and without msrl's manifest, and datasets for both
    trainings.
    """
    folder = tmp_path_factory.mktemp("originals")
    save_model(folder / "hf", tied=False, positions=256)
    source = open_weights(folder / "hf")
    write_hf(source, folder / "export", None)
    write_mcore(source, folder / "mcore", McoreTarget(ParallelLayout(2)))
    write_mcore(source, folder / "dist", McoreTarget(distributed=True))
    for name in ("mcore", "dist"):
        shutil.copytree(folder / name, folder / f"{name}-foreign")
        (folder / f"{name}-foreign" / "msrl_manifest.json").unlink()
    shutil.copytree(folder / "hf", folder / "bin")
    torch.save(load_file(folder / "hf" / "model.safetensors"), folder / "bin" / "pytorch_model.bin")
    (folder / "bin" / "model.safetensors").unlink()
    rows = [{"instruction": f"{i}+{i}=", "output": f"{2 * i}"} for i in range(8)]
    inputs = [str(write_rows(folder / "rows.jsonl", rows))]
    for kind in ("sft", "prompts"):
        options = {
            "input": inputs,
            "tokenizer": str(folder / "hf"),
            "handler": "alpaca",
            "template": "qwen",
            "kind": kind,
        }
        preprocess.run(
            Config.model_validate({"preprocess": {**options, "output_prefix": str(folder / kind)}})
        )
    return folder


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    return shutil.copytree(originals, tmp_path / "copy")


# Format -> the file to damage and a pattern of the message.
FORMATS = {
    "export": ("model.safetensors", "altered"),
    "bin": ("pytorch_model.bin", r"record \S+/data/\d+ .*checksum"),
    "mcore": (RANK_FILE, r"record \S+/data/\d+ .*checksum"),
    "mcore-foreign": (RANK_FILE, r"record \S+/data/\d+ .*checksum"),
    "dist": (LAYER_FILE, r"byte \d+: record \S+/data/0 .*checksum"),
    "dist-foreign": (LAYER_FILE, r"byte \d+: record \S+/data/0 .*checksum"),
}


def flip(path: Path, position: int | None = None) -> None:
    """Change one bit, by default in the middle of the file."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2 if position is None else position] ^= 1
    path.write_bytes(contents)


def answering(section: str) -> Callable[[Path, Path], None]:
    def run(folder: Path, model: Path) -> None:
        prompt = {"prompt": "1+1="} if section == "generate" else {}
        {"generate": generate, "chat": chat}[section].run(
            Config.model_validate({section: {"model": str(model), **prompt}})
        )

    return run


def training(folder: Path, model: Path, data: str, *, tp: int = 1, **sections: Any) -> Config:
    settings = {
        "run": {"name": "x", "dir": str(folder / "runs")},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(folder / data)},
        "cluster": {"platform": "cpu"},
        "train": {"steps": 2, "global_batch": 2, "micro_batch": 1, "parallel": {"tp": tp}},
        **sections,
    }
    return Config.model_validate(settings, strict=False)


ROLLOUT = {
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "max_prompt_tokens": 64,
    "max_response_tokens": 8,
}


def sft(folder: Path, model: Path, **sections: Any) -> None:
    train_sft.run(plan_run(training(folder, model, "sft", **sections), "train-sft"))


def grpo(folder: Path, model: Path, **sections: Any) -> None:
    sections = {
        "rollout": ROLLOUT,
        "reward": {"sources": [{"verifier": "acc"}]},
        "train": {"steps": 2},
        **sections,
    }
    train_grpo.run(plan_run(training(folder, model, "prompts", **sections), "train-grpo"))


def has_started(folder: Path) -> bool:
    return (folder / "runs").exists()


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "command",
    [answering("generate"), answering("chat"), sft, grpo],
    ids=["generate", "chat", "sft", "grpo"],
)
def test_a_flipped_byte_of_a_model_is_refused_before_anything_starts(
    folder: Path, kind: str, command: Callable[..., None]
) -> None:
    name, keyword = FORMATS[kind]
    flip(folder / kind / name)
    with pytest.raises(MsrlError, match=rf"{kind}/{name}: .*{keyword}"):
        command(folder, folder / kind)
    assert not has_started(folder)


@pytest.mark.sample(5)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_flipped_byte_is_not_converted(folder: Path, kind: str, verify: bool) -> None:
    """Without verification, the manifest's checksums are not compared; those within archives always
    are.
    """
    if kind == "export" and not verify:
        pytest.skip("safetensors files contain no checksums")
    name, keyword = FORMATS[kind]
    flip(folder / kind / name)
    command = "hf2mcore" if kind in ("export", "bin") else "mcore2hf"
    options = {
        "command": command,
        "load": str(folder / kind),
        "save": str(folder / "out"),
        "verify": verify,
    }
    with pytest.raises(MsrlError, match=rf"{kind}/{name}: .*{keyword}"):
        convert_ckpt.run(Config.model_validate({"convert": options}))
    assert not (folder / "out").exists()


def test_checkpoints_without_a_manifest_are_inspected_by_their_own_checksums(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("bin", "mcore-foreign", "dist-foreign"):
        options = {"command": "inspect", "load": str(folder / kind)}
        convert_ckpt.run(Config.model_validate({"convert": options}))
        assert "no manifest" in capsys.readouterr().out
        flip(folder / kind / FORMATS[kind][0])
        with pytest.raises(MsrlError, match=FORMATS[kind][1]):
            convert_ckpt.run(Config.model_validate({"convert": options}))


def test_every_byte_of_a_torch_file_that_is_loaded_counts(folder: Path) -> None:
    """A changed bit in the data of a record is found; bytes between records are not data."""
    path = folder / "mcore-foreign" / RANK_FILE
    size, whole = path.stat().st_size, path.read_bytes()
    num_detected = 0
    for position in range(0, size, size // 97):
        path.write_bytes(whole)
        flip(path, position)
        num_detected += bool(damages(mcore_checks(folder / "mcore-foreign")))
    assert num_detected > 90
    path.write_bytes(whole)
    assert not damages(mcore_checks(folder / "mcore-foreign"))


def test_optimizer_tensors_of_a_foreign_checkpoint_are_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msrl.checkpoint import integrity

    tensors, objects = integrity.read_metadata(folder / "dist-foreign" / "iter_0000001")
    renamed = {
        f"optimizer.state.exp_avg.{key}"
        if "layers.0" in key or "__1_" in str(stored)
        else key: stored
        for key, stored in tensors.items()
    }
    monkeypatch.setattr(integrity, "read_metadata", lambda folder: (renamed, objects))
    flip(folder / "dist-foreign" / LAYER_FILE)
    assert not damages(mcore_checks(folder / "dist-foreign"))
    assert damages(mcore_checks(folder / "dist")) == []


def test_each_file_is_read_once_and_its_bytes_are_reported(folder: Path) -> None:
    for kind in FORMATS:
        read = list[int]()
        checks = weight_checks(folder / kind)
        assert not damages(checks, read.append)
        assert (
            0.9 * sum(check.num_bytes for check in checks)
            < sum(read)
            <= sum(check.num_bytes for check in checks)
        ), kind


def test_a_missing_or_truncated_file_of_the_manifest_is_reported(folder: Path) -> None:
    path = folder / "export" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (damage,) = damages(hf_checks(folder / "export", "sizes"))
    assert "model.safetensors: has" in damage and "msrl_manifest.json" in damage
    path.unlink()
    (damage,) = damages(hf_checks(folder / "export"))
    assert "model.safetensors: is missing" in damage


def test_a_bin_file_of_torch_before_archives_is_left_to_the_loader(folder: Path) -> None:
    torch.save(
        {"a": torch.zeros(2)},
        folder / "bin" / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    assert not damages(hf_checks(folder / "bin"))


def test_the_critic_and_reward_models_of_a_training_are_verified(folder: Path) -> None:
    flip(folder / "mcore-foreign" / RANK_FILE)
    critic = {"platform": "cpu", "roles": {"critic": {"load": str(folder / "mcore-foreign")}}}
    with pytest.raises(MsrlError, match=rf"mcore-foreign/{RANK_FILE}: record"):
        grpo(
            folder,
            folder / "hf",
            algo={"preset": "ppo", "advantage": {"estimator": "gae"}},
            cluster=critic,
        )
    source = {"model": str(folder / "mcore-foreign"), "engine": "hf"}
    with pytest.raises(MsrlError, match=rf"mcore-foreign/{RANK_FILE}: record"):
        grpo(folder, folder / "hf", reward={"sources": [source]})
    assert not has_started(folder)


# --- data ---


@pytest.mark.parametrize(
    ("command", "name", "position"),
    [
        (sft, "sft_packed_input_ids_document.bin", None),
        (sft, "sft_packed_attention_mask_document.bin", None),
        (sft, "sft_packed_labels_document.bin", None),
        (sft, "sft_packed_input_ids_document.idx", -1),
        (grpo, "prompts_packed_input_ids_document.bin", None),
        (grpo, "prompts_answers.jsonl", 15),
    ],
)
def test_a_flipped_byte_of_preprocessed_data_is_refused(
    folder: Path, command: Callable[..., None], name: str, position: int | None
) -> None:
    flip(folder / name, position)
    with pytest.raises(MsrlError, match=rf"{name} .*checksum"):
        command(folder, folder / "hf")
    assert not has_started(folder)


def without_checksums(prefix: Path) -> None:
    """Write a manifest as earlier versions did."""
    path = Path(f"{prefix}_manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["files"]
    path.write_text(json.dumps(manifest))


@pytest.mark.sample(5)
@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("token", [10**9, VOCAB_SIZE, -7])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_token_outside_of_the_vocabulary_is_named_with_its_row(
    folder: Path, tp: int, token: int, is_foreign: bool
) -> None:
    """The data has no checksums, as data of an earlier version or another system."""
    without_checksums(folder / "sft")
    if is_foreign:
        (folder / "sft_manifest.json").unlink()
    lengths = SftDataset(folder / "sft").lengths()
    path = folder / "sft_packed_input_ids_document.bin"
    values = np.fromfile(path, np.int32)
    values[lengths[0] + lengths[1] + 3] = token
    values.tofile(path)
    with pytest.raises(
        MsrlError, match=rf"{path}: row 2: token {token} at position 3 is outside .* {VOCAB_SIZE}"
    ):
        sft(folder, folder / "hf", tp=tp)
    assert not has_started(folder)


def test_a_token_of_a_prompt_outside_of_the_vocabulary_is_named(folder: Path) -> None:
    without_checksums(folder / "prompts")
    path = folder / "prompts_packed_input_ids_document.bin"
    values = np.fromfile(path, np.int32)
    values[0] = VOCAB_SIZE
    values.tofile(path)
    with pytest.raises(MsrlError, match=rf"{path}: row 0: token {VOCAB_SIZE} at position 0"):
        grpo(folder, folder / "hf")
    assert not has_started(folder)


def test_data_without_checksums_is_still_read(folder: Path) -> None:
    for prefix in ("sft", "prompts"):
        without_checksums(folder / prefix)
    assert SftDataset(folder / "sft").manifest is not None
    assert SftDataset(folder / "sft").stray_token(VOCAB_SIZE) is None
    assert PromptDataset(folder / "prompts").stray_token(VOCAB_SIZE) is None


def test_checksums_stay_valid_where_data_is_moved_under_another_name(folder: Path) -> None:
    for path in folder.glob("sft_*"):
        path.rename(path.with_name(path.name.replace("sft_", "moved_", 1)))
    config = training(folder, folder / "hf", "moved")
    plan = plan_run(config, "train-sft")
    assert supervised.prepare(plan, get("cpu"), train_sft.SftTask()).num_steps == 2


def write(folder: Path, name: str, sequences: list[list[int]]) -> None:
    writer = IndexedWriter(folder / f"{name}.bin", folder / f"{name}.idx")
    for sequence in sequences:
        writer.add(np.array(sequence, np.int32), np.array([len(sequence)], np.int32))
    writer.close()


def test_padding_may_be_any_number(tmp_path: Path) -> None:
    columns = {
        "input_ids": [[5, 6, 99], [7, -1, 98]],
        "attention_mask": [[1, 1, 0], [1, 0, 1]],
        "labels": [[5, 6, 9], [7, 9, 9]],
    }
    for key, sequences in columns.items():
        write(tmp_path, f"x_packed_{key}_document", sequences)
    stray = SftDataset(tmp_path / "x").stray_token(10)
    assert stray is not None and (stray.row, stray.position, stray.token) == (1, 2, 98)
    assert SftDataset(tmp_path / "x").stray_token(99) is None


def test_tokens_are_found_in_documents_with_empty_ones_between(tmp_path: Path) -> None:
    write(tmp_path, "x_text_document", [[1, 2], [], [3, 4], [], [5, 300]])
    stray = TextDataset(tmp_path / "x").stray_token(256)
    assert stray is not None and (stray.row, stray.position, stray.token) == (4, 1, 300)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int64])
def test_the_range_of_tokens_is_right_for_every_type(tmp_path: Path, dtype: Any) -> None:
    from msrl.data.indexed import IndexedReader
    from msrl.data.integrity import stray_token

    codes = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int64: 5, np.uint16: 8}
    largest = np.iinfo(dtype).max
    values = np.array([0, 1, largest], dtype)
    values.tofile(tmp_path / "x.bin")
    write(tmp_path, "y", [[0, 0, 0]])
    index = bytearray((tmp_path / "y.idx").read_bytes())
    index[17] = codes[dtype]
    (tmp_path / "x.idx").write_bytes(index)
    reader = IndexedReader(tmp_path / "x")
    stray = stray_token(reader, int(largest))
    assert stray is not None and (stray.position, stray.token) == (2, largest)
    assert stray_token(reader, int(largest) + 1) is None


@pytest.mark.parametrize(
    ("position", "keyword"),
    [(34, "damaged"), (37, "damaged"), (34 + 8, "damaged"), (34 + 8 + 7, "damaged")],
)
def test_an_index_whose_sequences_do_not_follow_one_another_is_refused(
    tmp_path: Path, position: int, keyword: str
) -> None:
    """Lengths and offsets are redundant, so damage to either is visible."""
    write(tmp_path, "x_text_document", [[1, 2], [3]])
    path = tmp_path / "x_text_document.idx"
    contents = bytearray(path.read_bytes())
    contents[position] ^= 0x80
    path.write_bytes(contents)
    with pytest.raises(
        MsrlError, match=rf"x_text_document\.idx: sequence \d .*{keyword}|cut short|truncated"
    ):
        TextDataset(tmp_path / "x")


def test_weights_of_a_checkpoint_that_is_resumed_are_not_verified_again(folder: Path) -> None:
    """`SavedTraining.damage` has read them. Base of adapters and reference are other files."""
    model, saved = folder / "hf", SavedTraining(folder / "checkpoints", 2)
    plan = plan_run(training(folder, model, "sft"), "train-sft")
    assert loaded_models(plan, None) == [model]
    assert loaded_models(plan, saved) == []
    adapters = training(folder, model, "sft", train={"lora": {"rank": 2}})
    assert loaded_models(plan_run(adapters, "train-sft"), saved) == [model]
    reference = training(folder, model, "prompts", algo={"kl": {"loss": {"coef": 0.1}}})
    assert loaded_models(plan_run(reference, "train-grpo"), saved) == [model]
