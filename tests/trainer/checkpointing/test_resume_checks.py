"""Resume checks: settings that must not change, and warnings on changed learning rates."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config_inputs import TRAINING, make_data, make_mcore, make_model
from msrl.cli.configuration import load_configuration as load
from msrl.data.manifest import fingerprint
from msrl.errors import MsrlError
from msrl.files import write_text
from msrl.plan.run_plan import resolve
from msrl.trainer.checkpointing.integrity import with_checksum
from msrl.trainer.checkpointing.resume import STATE, SavedTraining, check_room, training_dir
from msrl.trainer.checkpointing.state import _check_resumable
from msrl.trainer.schedule import Schedule
from msrl.trainer.settings import ReplicaSettings
from msrl.workflows.training import resume_checks
from msrl.workflows.training.best import Best
from support import assert_mentions, mentions

RATES = Schedule("cosine", 1e-3, 0.0, 2, 10)
LORA = ("train.lora.rank=4", "train.lora.targets=[q_proj,v_proj]")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with all inputs of a training."""
    make_model(tmp_path / "model")
    make_data(tmp_path / "data")
    (tmp_path / "sft.yaml").write_text(TRAINING, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def state_now(*sets: str, command: str = "train-sft") -> dict[str, Any]:
    plan = resolve(load(["sft.yaml"], sets).config, command)
    return resume_checks.checked_values(plan, RATES)


def saved_with(folder: Path, state: dict[str, Any], name: str = "saves") -> SavedTraining:
    training_dir(folder / name, 5).mkdir(parents=True)
    files = {"training/iter_0000005/optimizer.safetensors": {"bytes": 1, "crc32": "0"}}
    contents = {"step": 5, "cut": {}, "files": files, "extra": state}
    text = with_checksum(json.loads(json.dumps(contents)))
    write_text(training_dir(folder / name, 5) / STATE, text)
    return SavedTraining(folder / name, 5)


def test_a_training_with_the_same_settings_resumes(folder: Path):
    saved = saved_with(folder, state_now(*LORA))
    resume_checks.check(saved, state_now(*LORA[:1], "train.lora.targets=[v_proj,q_proj]"))
    resume_checks.check(
        saved,
        state_now(
            *LORA, "train.optimizer.lr=1.0", "train.parallel.tp=2", "cluster.devices_per_node=2"
        ),
    )


def test_a_training_with_other_rewards_sampling_and_evaluations_resumes(folder: Path):
    changes = (
        "reward.sources=[{verifier: exact_match}]",
        "rollout.sampling.temperature=0.5",
        "rollout.max_response_tokens=5",
        "algo.policy_loss=cispo",
        "algo.clip.high=0.3",
        "eval.every_steps=7",
        "log.every_steps=3",
        "train.steps=99",
        "train.micro_batch=4",
    )
    saved = saved_with(folder, state_now(command="train-grpo"))
    resume_checks.check(saved, state_now(*changes, command="train-grpo"))


def test_a_training_saved_by_an_earlier_version_resumes(folder: Path):
    resume_checks.check(saved_with(folder, {}), state_now())


@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (("model.dtype=bfloat16",), ("model.dtype", "was float32, is bfloat16")),
        (LORA, ("train.lora.rank", "was unset, is 4")),
        (
            ("data.seq_length=64", "data.too_long=truncate"),
            ("data.seq_length", "is 64", "data.too_long", "is truncate"),
        ),
        (("data.pack=true",), ("data.pack", "was false, is true")),
    ],
)
def test_changed_settings_are_refused_with_their_keys(
    folder: Path, sets: tuple[str, ...], fragments: tuple[str, ...]
):
    saved = saved_with(folder, state_now("model.dtype=float32"))
    with pytest.raises(MsrlError, match=mentions("step 5", "saves", *fragments)):
        resume_checks.check(saved, state_now("model.dtype=float32", *sets))


SMOOTHED = "algo.preference.options={label_smoothing: 0.1}"


@pytest.mark.parametrize(
    ("command", "before", "now", "fragments"),
    [
        ("train-dpo", (), (SMOOTHED,), ("options.label_smoothing", "was 0.0, is 0.1")),
        ("train-dpo", (SMOOTHED,), (), ("options.label_smoothing", "was 0.1, is 0.0")),
        ("train-dpo", (), ("algo.preference.sft_coef=0.5",), ("sft_coef", "was 0.0, is 0.5")),
        ("train-rm", (), ("algo.reward_model.center_coef=0.1",), ("center_coef", "is 0.1")),
        (
            "train-rm",
            ("algo.reward_model.kind=process",),
            ("algo.reward_model.kind=process", "algo.reward_model.reward_tokens=[a, b]"),
            ("algo.reward_model.reward_tokens", "was +, -, is a, b"),
        ),
        ("train-dpo", ("data.eval=data",), ("data.eval=other",), ("data.eval", "contents")),
        ("train-rm", ("data.eval=data",), ("data.eval=other",), ("data.eval", "contents")),
    ],
)
def test_a_changed_loss_and_changed_held_out_data_are_refused(
    folder: Path,
    command: str,
    before: tuple[str, ...],
    now: tuple[str, ...],
    fragments: tuple[str, ...],
) -> None:
    ids = next(folder.glob("data*input_ids_document.bin"))
    ids.with_name(ids.name.replace("data", "other")).write_bytes(b"other")
    state = state_now(*before, command=command)
    saved = saved_with(folder, state)
    resume_checks.check(saved, state_now(*before, command=command))
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        resume_checks.check(saved, state_now(*now, command=command))
    # A checkpoint of an earlier version lacks these values.
    keys = {key: value for key, value in state["remembered"]["keys"].items() if "algo" not in key}
    earlier = {"remembered": {**state["remembered"], "keys": keys, "contents": {}}}
    resume_checks.check(saved_with(folder, earlier, "earlier"), state_now(*now, command=command))


@pytest.mark.parametrize(
    ("was_trained", "coef", "fragments"),
    [
        (True, 0.0, ("train.indexer_loss_coef=0.0", "above 0")),
        (False, 0.5, ("train.indexer_loss_coef=0.5", "with 0")),
        (True, 0.25, ()),
        (False, 0.0, ()),
    ],
)
def test_whether_indexers_are_trained_must_not_change_but_the_coefficient_may(
    folder: Path, was_trained: bool, coef: float, fragments: tuple[str, ...]
) -> None:
    settings = ReplicaSettings(folder, indexer_loss_coef=coef)
    rank: Any = SimpleNamespace(main=SimpleNamespace(settings=settings), critic=None)
    saved = saved_with(folder, {})
    expected = pytest.raises(MsrlError, match=mentions(*fragments, "checkpoint.load"))
    with expected if fragments else contextlib.nullcontext():
        _check_resumable(rank, saved, {"trains_indexers": was_trained})


def test_an_option_that_is_set_to_its_default_resumes(folder: Path) -> None:
    saved = saved_with(folder, state_now(command="train-dpo"))
    default = "algo.preference.options={label_smoothing: 0, form: sigmoid}"
    resume_checks.check(saved, state_now(default, command="train-dpo"))


def test_a_changed_model_and_changed_data_are_refused(folder: Path):
    saved = saved_with(folder, state_now())
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(MsrlError, match=mentions("model.path", "4 layers", "2 layers")):
        resume_checks.check(saved, state_now())
    (folder / "model" / "config.json").write_text(json.dumps(config))
    ids = next((folder / "data").parent.glob("data*input_ids_document.bin"))
    before = fingerprint("data")
    ids.write_bytes(ids.read_bytes() + b"more")
    assert fingerprint("data") != before
    with pytest.raises(MsrlError, match=mentions("data.train", "contents")):
        resume_checks.check(saved, state_now())


TEACHER = "algo.distill.teachers=[{model: self}]"
TWO_TEACHERS = "algo.distill.teachers=[{model: self}, {url: 'http://127.0.0.1:1/v1'}]"
KL = "algo.kl.loss.coef=0.1"
OWN_REFERENCE = "cluster.roles.reference.load=other-model"
BLEND = ("data.train=null", "data.blend={data: 1, second: 3}")


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        ((TEACHER,), (TWO_TEACHERS,), "algo.distill.teachers"),
        ((TEACHER,), (), "algo.distill.teachers"),
        ((KL,), (KL, OWN_REFERENCE), "cluster.roles.reference.load"),
        ((KL, OWN_REFERENCE), (KL,), "cluster.roles.reference.load"),
        (BLEND, (BLEND[0], "data.blend={data: 1, third: 3}"), "data.blend.third"),
        (BLEND, (BLEND[0], "data.blend={second: 1, data: 3}"), "data.blend.second"),
        ((), (BLEND[0], "data.blend={second: 1}"), "data.blend.second"),
    ],
)
def test_teachers_references_and_datasets_that_are_added_or_replaced_are_refused(
    folder: Path, before: tuple[str, ...], now: tuple[str, ...], key: str
) -> None:
    make_model(folder / "other-model")
    for name in ("second", "third"):
        for path in make_data(folder / name).parent.glob(f"{name}_*"):
            path.write_bytes(name.encode())
    saved = saved_with(folder, state_now(*before, command="train-grpo"))
    resume_checks.check(saved, state_now(*before, command="train-grpo"))
    with pytest.raises(MsrlError, match=mentions(key)):
        resume_checks.check(saved, state_now(*now, command="train-grpo"))


def test_datasets_of_a_blend_may_move(folder: Path) -> None:
    saved = saved_with(folder, state_now(*BLEND[:1], "data.blend={data: 1}"))
    for path in list(folder.glob("data_*")):
        path.rename(path.with_name(path.name.replace("data", "moved")))
    resume_checks.check(saved, state_now(*BLEND[:1], "data.blend={moved: 1}"))


@pytest.mark.parametrize(
    ("sets", "command", "counts"),
    [
        (LORA, "train-sft", True),
        (("algo.kl.loss.coef=0.1",), "train-grpo", True),
        (("algo.kl.loss.coef=0.0",), "train-grpo", False),
        ((), "train-sft", False),
    ],
)
def test_changed_base_weights_are_refused_if_checkpoints_do_not_contain_them(
    folder: Path, sets: tuple[str, ...], command: str, counts: bool
):
    """These are the base of adapters and a reference, in Hugging Face or mcore format."""
    make_mcore(folder / "mcore")
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    for step in (1, 2):
        (folder / "mcore" / f"iter_{step:07d}" / "mp_rank_00").mkdir(parents=True)
        (folder / "mcore" / f"iter_{step:07d}" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(
            b"weights of %d" % step
        )
    kinds = {
        "model": folder / "model" / "model.safetensors",
        "mcore": folder / "mcore" / "latest_checkpointed_iteration.txt",
    }
    for name, changed in kinds.items():
        saved = saved_with(
            folder, state_now(*sets, f"model.path={name}", command=command), f"saves of {name}"
        )
        resume_checks.check(saved, state_now(*sets, f"model.path={name}", command=command))
        changed.write_text("2")
        now = state_now(*sets, f"model.path={name}", command=command)
        if counts:
            with pytest.raises(MsrlError, match=mentions("model.path", "contents")):
                resume_checks.check(saved, now)
        else:
            resume_checks.check(saved, now)


def test_a_changed_learning_rate_and_a_run_shorter_than_its_warm_up_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    saved = saved_with(folder, state_now())
    resume_checks.report_schedule(saved, RATES, 5)
    assert not capsys.readouterr().err
    resume_checks.report_schedule(saved, dataclasses.replace(RATES, num_updates=20), 5)
    assert_mentions(capsys.readouterr().err, "9.33e-04", "6.91e-04")
    resume_checks.report_schedule(None, dataclasses.replace(RATES, num_updates=1), 0)
    assert_mentions(capsys.readouterr().err, "warm-up", "1 updates", "learning rate", "5.0e-04")
    resume_checks.report_schedule(None, Schedule("wsd", 1e-3, 0.0, 3, 5, 4), 0)
    assert_mentions(capsys.readouterr().err, "warm-up", "decay", "5 updates")


def test_checkpoints_without_training_state_are_reported(tmp_path: Path):
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(MsrlError, match=mentions("step 3", "checkpoint.load")):
        check_room(tmp_path, None)


def test_relative_and_absolute_paths_of_a_folder_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for step in (3, 4):
        (tmp_path / "saves" / f"iter_{step:07d}").mkdir(parents=True)
        training_dir(tmp_path / "saves", step).mkdir(parents=True)
    check_room(tmp_path / "saves", SavedTraining(Path("saves"), 3, skipped=(4,)))


FILES = {"x": {"bytes": 1, "crc32": "0"}}


@pytest.mark.parametrize(
    "state",
    [
        5,
        {"files": FILES, "cut": {}, "extra": 5},
        {"files": [1], "cut": {}, "extra": {}},
        {"files": {"x": {"bytes": "1"}}, "cut": {}, "extra": {}},
        {"files": FILES, "cut": {"tp": 10**9}, "extra": {}},
        {"files": FILES, "cut": {"tp": "x"}, "extra": {}},
        {"files": FILES, "extra": {}},
    ],
)
def test_a_state_of_other_types_with_a_right_checksum_is_one_message(state: Any, tmp_path: Path):
    """Others can compute a checksum, too."""
    saved = SavedTraining(tmp_path, 5)
    saved.training_dir.mkdir(parents=True)
    text = with_checksum(state) if isinstance(state, dict) else json.dumps(state)
    for content in (text, "[" * 100_000):
        (saved.training_dir / STATE).write_text(content)
        with pytest.raises(MsrlError, match=mentions(STATE)):
            saved.state()
        assert STATE in str(saved.damage())


def test_a_state_with_a_hole_is_not_read(tmp_path: Path):
    saved = SavedTraining(tmp_path, 5)
    saved.training_dir.mkdir(parents=True)
    (saved.training_dir / STATE).write_text("{")
    os.truncate(saved.training_dir / STATE, 1 << 40)
    with pytest.raises(MsrlError, match=mentions(STATE, "hole")):
        saved.state()


@pytest.mark.parametrize("best", [5, {"step": 3}, {"step": 3, "value": "x", "since": 0}])
def test_a_best_evaluation_of_other_types_is_one_message(best: Any):
    with pytest.raises(MsrlError, match=mentions("best evaluation")):
        Best.of({"best": best})
    assert Best.of({"best": {"step": 3, "value": 0.5, "since": 1}}) == Best(3, 0.5, 1)
