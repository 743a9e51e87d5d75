"""Model replicas of a rank: settings by role, and their behavior on a real rank."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from config_inputs import make_model, make_working_folder
from msrl.cli.configuration import load_configuration as load
from msrl.config.sections.train import OptimizerConfig
from msrl.errors import MsrlError
from msrl.trainer.settings import RankSettings, ReplicaSettings, resumed_settings
from msrl.workflows.training.settings import rank_settings
from support import checked_plan, mentions, python_path

REFERENCE = ("algo.kl.loss.coef=0.1", "cluster.roles.reference.load=reference")
CRITIC = (
    "algo.preset=ppo",
    "train.optimizer.weight_decay=0.1",
    "train.chunk=64",
    "train.recompute.granularity=full",
)
LORA = ("train.lora.rank=8", "train.chunk=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_working_folder(tmp_path_factory.mktemp("replicas"))
    make_model(folder / "reference")
    return folder


def settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *sets: str, **arguments: Any
) -> RankSettings:
    monkeypatch.chdir(folder)
    plan = checked_plan(load(["grpo.yaml"], [*sets]), "train-grpo")
    return rank_settings(plan, "cpu", **arguments)


def test_a_critic_and_reward_models_have_settings_of_their_role(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = settings(
        folder,
        monkeypatch,
        *CRITIC,
        *REFERENCE,
        reward_models={"judge": Path("judge")},
    )
    policy, critic, judge = rank.policy, rank.critic, rank.reward_models["judge"]
    assert critic is not None and policy.optimizer is not None and critic.optimizer is not None
    assert (policy.logit_chunk, critic.logit_chunk, judge.logit_chunk) == (64, None, None)
    assert (policy.freeze, critic.freeze) == ((), ("rm_head.bias",))
    assert (
        critic.recompute == policy.recompute
        and critic.bad_batch_dir == policy.bad_batch_dir / "critic"
    )
    reference = folder / "reference"
    assert rank.reference == ReplicaSettings(reference, hf_dir=reference, logit_chunk=64)
    assert judge == ReplicaSettings(Path("judge"))


def test_a_checkpoint_that_is_resumed_gives_the_policy_its_weights_and_no_other_replica(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = settings(folder, monkeypatch, *CRITIC, *REFERENCE)
    rank = resumed_settings(rank, Path("saves"), 3)
    assert (rank.policy.model, rank.policy.iteration) == (Path("saves").absolute(), 3)
    assert rank.critic is not None and rank.reference is not None
    assert (rank.critic.iteration, rank.reference.iteration) == (None, None)


def test_with_adapters_the_reference_is_the_policy_and_a_resume_keeps_the_base_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = settings(
        folder,
        monkeypatch,
        *LORA,
        "algo.kl.loss.coef=0.1",
    )
    rank = resumed_settings(rank, Path("saves"), 3)
    assert rank.reference is None and rank.policy.lora.rank == 8
    assert rank.policy.iteration is None and rank.policy.model != Path("saves")


def test_settings_of_a_rank_survive_pickling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = settings(folder, monkeypatch, *CRITIC, reward_models={"judge": Path("judge")})
    assert pickle.loads(pickle.dumps(rank)) == rank


def test_an_optimizer_has_one_declaration_of_its_defaults() -> None:
    types = {field.name: field.type for field in dataclasses.fields(ReplicaSettings)}
    assert types["optimizer"] == "OptimizerConfig | None" and OptimizerConfig().weight_decay == 0.0


def test_changed_internals_of_megatron_are_reported_before_a_model_is_built() -> None:
    from msrl.trainer.model.seams import SEAMS, Seam, check_seams

    def renamed(self: object, hidden: object) -> None: ...
    def extended(self: object, hidden_states: object, scale: float) -> None: ...
    def optional(self: object, hidden_states: object, scale: float = 1.0) -> None: ...
    def wrapped(*args: object, **kwargs: object) -> None: ...

    check_seams(SEAMS)
    for function in (renamed, extended):
        with pytest.raises(
            MsrlError, match=mentions("megatron-core=", function.__name__, "model/gpt.py", "0.16.1")
        ):
            check_seams((Seam(function, ("self", "hidden_states"), "model/gpt.py"),))
    check_seams(
        tuple(
            Seam(function, ("self", "hidden_states"), "model/gpt.py")
            for function in (optional, wrapped)
        )
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from msrl.platforms import get
    from msrl.trainer.launch import run_ranks
    from training_cases import SIZES, make_model, randomize

    root = tmp_path_factory.mktemp("models")
    scored = Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=1, pad_token_id=None))
    for name, model in {
        "policy": make_model("qwen2"),
        "reference": make_model("qwen2 tied"),
        "scored": scored,
    }.items():
        randomize(model).save_pretrained(root / name)
    models_by_role = (root / "policy", root / "reference", root / "scored")
    (measurements,) = run_ranks(
        "replica_ranks:main",
        models_by_role,
        num_ranks=1,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return measurements


@pytest.mark.slow
def test_every_micro_batch_is_compared_with_the_reference_at_its_own_positions(
    report: dict[str, Any],
) -> None:
    """The mean over tokens follows from single micro-batches, even if one occurs twice."""
    (first, second), (few, many) = report["kl alone"], report["tokens"]
    assert first > 0 and first != pytest.approx(second, rel=1e-3)
    assert report["kl"]["both"] == pytest.approx(
        (first * few + second * many) / (few + many), rel=1e-6
    )
    assert report["kl"]["twice"] == pytest.approx(
        (2 * first * few + second * many) / (2 * few + many), rel=1e-6
    )


@pytest.mark.slow
def test_a_pass_that_returns_hidden_states_does_not_change_the_next_one(
    report: dict[str, Any],
) -> None:
    assert report["logits are the same"]


@pytest.mark.slow
def test_all_replicas_of_a_rank_are_offloaded_and_those_with_an_optimizer_are_saved(
    report: dict[str, Any],
) -> None:
    assert report["bytes after offload"] == [0, 0, 0, 0]
    assert report["trained"] == ["policy", "scored"]


@pytest.mark.slow
def test_a_critic_starts_with_the_values_of_the_reward_model_that_it_is_loaded_from(
    report: dict[str, Any],
) -> None:
    assert report["values are the scores"]


@pytest.mark.slow
def test_statistics_of_tokens_are_those_of_the_logits(report: dict[str, Any]) -> None:
    errors = report["statistics"]
    assert set(errors) == {"entropies", "squared_probabilities"} and max(errors.values()) < 1e-5
