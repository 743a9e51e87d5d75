"""Checkpoints of trainings on disk: selection, damage reports and retention, without ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msrl.checkpoint.mcore.files import iteration_dir, namespace, rank_folder
from msrl.config.sections.train import VisionConfig
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.models.shape import Shape
from msrl.trainer.checkpointing.publish import (
    Publication,
    RankFiles,
    SavedModel,
    Weights,
    optimizer_file,
    prepare_folders,
    random_file,
)
from msrl.trainer.checkpointing.resume import (
    KEEP_ALL,
    STATE,
    Retention,
    SavedTraining,
    check_room,
    resume_from,
    saved_steps,
    training_dir,
)
from msrl.trainer.settings import Layout
from support import assert_mentions, mentions

LAYOUT = Layout(tp=2)
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def write(
    root: Path, step: int, hf_dir: Path, shape: Shape, retention: Retention = KEEP_ALL
) -> None:
    """Write a checkpoint of two ranks with tensors that depend on step and rank."""
    prepare_folders(root, step)
    for rank, at in enumerate(LAYOUT.ranks()):
        tensors = {"exp_avg.w": torch.full((50,), float(step + rank))}
        weights = Weights(
            rank_folder(LAYOUT, at),
            {"w": torch.ones(20) * step},
            namespace(shape, LAYOUT),
            {optimizer_file(at): tensors},
        )
        RankFiles(root, step, rank, {"rng": torch.arange(9)}, weights).write()
    model = SavedModel(shape, LAYOUT, "float32", is_adapters=False)
    state = {"step": step, "cut": LAYOUT.as_json(), "extra": {"best": float("nan")}}
    Publication(root, step, 2, state, model, hf_dir, retention).publish()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Folder with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG))
    for step in (2, 4, 6):
        write(folder / "saves", step, folder / "hf", load_shape(folder / "hf"))
    return folder / "saves"


@pytest.fixture
def saves(written, tmp_path) -> Path:
    shutil.copytree(written, tmp_path / "saves")
    return tmp_path / "saves"


def flip_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def flip_weight(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(torch.full((20,), 6.0).numpy().tobytes())
    path.write_bytes(data[:at] + b"\1" + data[at + 1 :])


def alter_count(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 6', '"step": 5'))


FILES = {
    "weights": "iter_0000006/mp_rank_01/model_optim_rng.pt",
    "optimizer": "training/iter_0000006/optimizer_01_000_000.safetensors",
    "random": "training/iter_0000006/rng_00001.safetensors",
    "state": f"training/iter_0000006/{STATE}",
}
DAMAGES = [
    ("weights", flip_weight, ("checksum",)),
    ("weights", Path.unlink, ("missing",)),
    ("weights", lambda path: path.write_bytes(path.read_bytes()[:-9]), ("bytes",)),
    ("optimizer", flip_last_byte, ("checksum",)),
    ("optimizer", lambda path: path.write_bytes(b""), ("0 bytes",)),
    ("random", Path.unlink, ("missing",)),
    ("state", alter_count, ("checksum",)),
    ("state", lambda path: path.write_text("{"), ("read",)),
    ("state", Path.unlink, ("missing",)),
]


@pytest.mark.parametrize(("kind", "damage", "fragments"), DAMAGES)
def test_a_checkpoint_with_a_damaged_or_missing_file_is_skipped_and_the_file_reported(
    saves, kind, damage, fragments
):
    damage(saves / FILES[kind])
    saved, notes = resume_from("auto", saves)
    assert saved == SavedTraining(saves, 4, skipped=(6,))
    assert_mentions(notes[0], FILES[kind], "step 6", *fragments)
    assert_mentions(notes[-1], "step 4", saves)
    check_room(saves, saved)
    with pytest.raises(MsrlError, match=mentions(FILES[kind], *fragments)):
        resume_from(str(saves / "iter_0000006"), saves)


def test_a_run_resumes_from_the_newest_complete_checkpoint_or_a_given_one(saves):
    assert resume_from("none", saves) == (None, ())
    assert (
        resume_from("auto", saves)[0]
        == resume_from(str(saves), Path("elsewhere"))[0]
        == SavedTraining(saves, 6)
    )
    saved, _ = resume_from(str(saves / "iter_0000002"), saves)
    assert saved == SavedTraining(saves, 2) and saved.state()["step"] == 2
    with pytest.raises(MsrlError, match=mentions("steps 4, 6")):
        check_room(saves, saved)


def test_checkpoints_of_another_training_are_rejected_and_not_removed(saves, tmp_path):
    saved = SavedTraining(saves, 6)
    check_room(saves, saved)
    alias = tmp_path / "alias"
    alias.symlink_to(saves)
    check_room(alias, saved)
    for step, fragments in (
        (2, ("another training", saves)),
        (8, ("step 6", "auto")),
    ):
        other = tmp_path / f"other {step}"
        for folder in (other / f"iter_{step:07d}", training_dir(other, step)):
            folder.mkdir(parents=True)
        with pytest.raises(MsrlError, match=mentions(f"step {step}", *fragments)):
            check_room(other, saved)


def test_a_folder_that_is_not_writable_or_has_other_files_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    for root, reason in (
        (Path("/sys/kernel/x"), "denied|not permitted|Read-only"),
        (tmp_path / "file" / "x", "file"),
    ):
        with pytest.raises(MsrlError, match=rf"checkpoint\.save={root}: .*({reason})"):
            check_room(root, None)
    with pytest.raises(
        MsrlError, match=mentions(f"checkpoint.save={tmp_path}: ", "(file)", "empty folder")
    ):
        check_room(tmp_path, None)
    for name in (".iter_0000002.partial", "hf", "training"):
        (tmp_path / "other" / name).mkdir(parents=True)
        check_room(tmp_path / "other", None)
    check_room(tmp_path / "new" / "folder", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


def test_resume_auto_fails_if_all_checkpoints_are_damaged(saves):
    for step in (2, 4, 6):
        (training_dir(saves, step) / random_file(0)).unlink()
    with pytest.raises(MsrlError, match=mentions("step 6", "step 4", "step 2", "rng_00000")):
        resume_from("auto", saves)


def test_a_damaged_checkpoint_is_written_again_and_is_never_the_newest(saves):
    flip_last_byte(saves / FILES["optimizer"])
    hf_dir = saves.parent / "hf"
    shutil.copytree(saves / "hf", hf_dir)
    write(saves, 5, hf_dir, load_shape(hf_dir), Retention(newest=1))
    assert saved_steps(saves) == [5, 6] and resume_from("auto", saves)[0] == SavedTraining(
        saves, 5, (6,)
    )
    write(saves, 6, hf_dir, load_shape(hf_dir), Retention(newest=1))
    assert saved_steps(saves) == [6] and resume_from("auto", saves)[0] == SavedTraining(saves, 6)


def test_a_kill_between_the_two_renames_leaves_no_checkpoint(saves):
    shutil.rmtree(iteration_dir(saves, 6))
    assert resume_from("auto", saves)[0] == SavedTraining(saves, 4)


def test_a_save_removes_incomplete_folders_that_a_kill_left(saves):
    hf_dir = saves.parent / "hf"
    shutil.copytree(saves / "hf", hf_dir)
    prepare_folders(saves, 7)
    assert len(list(saves.rglob("*.partial"))) == 2
    write(saves, 8, hf_dir, load_shape(hf_dir))
    assert not list(saves.rglob("*.partial")) and saved_steps(saves) == [2, 4, 6, 8]


def test_a_save_never_changes_the_configuration_that_earlier_checkpoints_need(saves):
    before = {path.name: path.stat().st_mtime_ns for path in (saves / "hf").iterdir()}
    hf_dir = saves.parent / "other"
    shutil.copytree(saves / "hf", hf_dir)
    write(saves, 8, hf_dir, load_shape(hf_dir))
    assert {path.name: path.stat().st_mtime_ns for path in (saves / "hf").iterdir()} == before
    assert not list(saves.rglob("*partial*")) and not list(saves.rglob("part_*"))


@pytest.mark.slow  # imports Megatron
@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_on_a_full_disk_leaves_no_files(tmp_path, monkeypatch, in_background):
    from msrl.platforms import get

    get("cpu").prepare()
    from msrl.trainer.checkpointing import publish
    from msrl.trainer.checkpointing import state as checkpoints
    from msrl.trainer.checkpointing.saver import Saver

    def raise_disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    files = RankFiles(tmp_path, 3, 0, {"rng": torch.arange(9)})
    monkeypatch.setattr(publish, "record_file", raise_disk_full)  # the file is written by then

    def begin(*_: object, **__: object) -> tuple[RankFiles, None]:
        prepare_folders(tmp_path, 3)
        return files, None

    def save(*_: object, **__: object) -> None:
        begin()[0].write()

    monkeypatch.setattr(checkpoints, "begin", begin)
    monkeypatch.setattr(checkpoints, "save", save)
    saver = Saver(None, tmp_path, tmp_path, in_background=in_background)  # pyright: ignore[reportArgumentType]
    with pytest.raises(MsrlError, match=mentions("step 3", "No space left", "checkpoint.save")):
        saver.save(3, {}, KEEP_ALL)
        saver.finished_saves(must_wait=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow  # imports Megatron
def test_an_error_of_a_background_save_is_raised_by_the_next_call(tmp_path, monkeypatch):
    from msrl.platforms import get

    get("cpu").prepare()
    from msrl.trainer.checkpointing import state as checkpoints
    from msrl.trainer.checkpointing.saver import Saver

    files = RankFiles(tmp_path / "gone", 3, 0, {"rng": torch.arange(9)})
    monkeypatch.setattr(checkpoints, "begin", lambda *_, **__: (files, None))
    saver = Saver(None, tmp_path, tmp_path, in_background=True)  # pyright: ignore[reportArgumentType]
    assert saver.finished_saves() == []
    saver.save(3, {}, KEEP_ALL)
    with pytest.raises(MsrlError, match=mentions("step 3", "checkpoints")):
        saver.end()  # raises before it synchronizes, since rank 0 waits for this rank's files
    with pytest.raises(MsrlError, match=mentions("step 3", "checkpoints")):
        saver.finished_saves(must_wait=True)

    def raise_disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "begin", raise_disk_full)
    with pytest.raises(MsrlError, match=mentions("step 3", "No space left")):
        Saver(None, tmp_path, tmp_path, in_background=True).save(3, {}, KEEP_ALL)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(checkpoints, "begin", lambda *_, **__: (files, None))
    prepare_folders(tmp_path / "gone", 3)
    saver = Saver(None, tmp_path, tmp_path, in_background=True)  # pyright: ignore[reportArgumentType]
    saver.save(3, {}, KEEP_ALL)
    assert [saved.step for saved in saver.finished_saves(must_wait=True)] == [
        3
    ] and saver.finished_saves() == []


@pytest.mark.slow  # imports Megatron
@pytest.mark.parametrize(
    ("before", "key"),
    [
        ({"freeze": ["*.bias"]}, "train.freeze"),
        ({"freeze": ["*.norm.weight", "*.bias"]}, "train.freeze"),
        ({"trains_vision": ["projector_lr"]}, "train.vision.projector_lr"),
        ({"trains_indexers": True}, "train.indexer_loss_coef"),
        ({"critic": {"updates": 3}}, "algo.advantage.estimator"),
    ],
)
def test_a_training_of_other_parameters_is_refused(before: dict[str, object], key: str) -> None:
    from msrl.platforms import get

    get("cpu").prepare()
    from msrl.trainer.checkpointing.state import _check_resumable

    settings = SimpleNamespace(
        freeze=("*.norm.weight",), vision=VisionConfig(), indexer_loss_coef=0.0
    )
    rank: Any = SimpleNamespace(main=SimpleNamespace(settings=settings), critic=None)
    same: dict[str, object] = {"freeze": ["*.norm.weight"]}
    _check_resumable(rank, SavedTraining(Path("runs"), 3), same)
    with pytest.raises(MsrlError, match=mentions(key, "checkpoint.load")):
        _check_resumable(rank, SavedTraining(Path("runs"), 3), {**same, **before})
