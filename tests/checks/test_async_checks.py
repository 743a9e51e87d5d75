"""Checks of `rollout.async` and `algo.old_logprobs` before a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config_inputs import make_working_folder
from msrl.cli.configuration import load_configuration
from msrl.errors import ManyErrors, MsrlError
from msrl.platforms import get
from msrl.workflows.rl.setup import _check_async_platform
from support import assert_mentions, mentions

S1 = "rollout.async.max_staleness=1"
TOKEN = "algo.mismatch.weight=token"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a working directory with all inputs of a training."""
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path)


def resolve(*sets: str) -> Any:
    return load_configuration(["grpo.yaml"], sets, command="train-grpo")


def error(*sets: str) -> str:
    with pytest.raises((ManyErrors, MsrlError)) as caught:
        resolve(*sets)
    return str(caught.value)


@pytest.mark.parametrize(
    "sets",
    [
        (S1, TOKEN),
        (S1, "algo.mismatch.filter=sequence"),
        (S1, "algo.old_logprobs=behavior"),
        (S1, "algo.old_logprobs=behavior", "algo.policy_loss=dppo"),
        (S1, "rollout.async.allow_uncorrected=true"),
        (S1, TOKEN, "rollout.async.partial=true", "rollout.async.on_stale=drop"),
        (S1, TOKEN, "algo.old_logprobs=log-linear", "train.updates.epochs=2"),
        (S1, TOKEN, "rollout.filter.kind=all_equal", "rollout.filter.refill=true"),
        (S1, TOKEN, "algo.advantage.estimator=remax"),
    ],
)
def test_a_corrected_asynchronous_run_is_valid(sets: tuple[str, ...]) -> None:
    assert resolve(*sets).config.rollout.asynchronous.is_on


@pytest.mark.parametrize(
    "sets",
    [
        (S1,),
        (S1, "algo.old_logprobs=log-linear", "train.updates.epochs=2"),
        (S1, "algo.mismatch.off_policy_limit=0.1"),
    ],
)
def test_staleness_without_a_correction_is_refused(sets: tuple[str, ...]) -> None:
    assert_mentions(error(*sets), "rollout.async.max_staleness", "correction", "allow_uncorrected")


def test_a_loss_without_a_ratio_is_no_correction() -> None:
    text = error(S1, "algo.old_logprobs=behavior", "algo.policy_loss=vanilla")
    assert_mentions(text, "rollout.async.max_staleness", "correction", "algo.old_logprobs")


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (("rollout.async.partial=true",), "rollout.async.partial"),
        (("rollout.async.on_stale=drop",), "rollout.async.on_stale"),
        (("rollout.async.recompute_kv=false",), "rollout.async.recompute_kv"),
        (
            (S1, TOKEN, "rollout.async.weight_update=drain", "rollout.async.partial=true"),
            "rollout.async.partial",
        ),
        (
            (S1, TOKEN, "rollout.async.weight_update=drain", "rollout.async.recompute_kv=false"),
            "rollout.async.recompute_kv",
        ),
        (("algo.old_logprobs=log-linear",), "algo.old_logprobs"),
        (("algo.old_logprobs=behavior", TOKEN), "algo.mismatch.weight"),
        (("algo.old_logprobs=behavior", "algo.policy_loss=vanilla"), "algo.old_logprobs"),
    ],
)
def test_a_key_without_effect_is_refused(sets: tuple[str, ...], key: str) -> None:
    assert_mentions(error(*sets), key, "no effect")


def test_normalized_weights_need_the_trainers_log_probabilities() -> None:
    text = error(
        "algo.old_logprobs=log-linear",
        "train.updates.epochs=2",
        TOKEN,
        "algo.mismatch.normalize=true",
    )
    assert_mentions(text, "algo.mismatch.normalize", "log-linear")


def test_additional_prompts_of_a_refill_are_refused_by_name() -> None:
    refill = ("rollout.filter.kind=all_equal", "rollout.filter.refill=true")
    text = error(S1, TOKEN, *refill, "rollout.filter.extra_prompts=2")
    assert_mentions(text, "rollout.filter.extra_prompts", "no effect", "max_staleness")


def test_asynchronous_scheduling_of_the_engine_is_refused_by_name() -> None:
    text = error(S1, TOKEN, "rollout.engine.options={async_scheduling: true}")
    assert_mentions(text, "rollout.engine.options.async_scheduling", "versions")


def test_a_reward_model_on_the_training_ranks_is_refused_by_name() -> None:
    text = error(S1, TOKEN, "reward.sources=[{model: model, engine: megatron}]")
    assert_mentions(text, "reward.sources.0.model", "training ranks", "cluster.roles.reward")


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_engines_that_share_devices_with_ranks_cannot_be_asynchronous(name: str) -> None:
    config = resolve(S1, TOKEN).config
    shared: Any = SimpleNamespace(rollout=config.rollout, has_separate_engines=False)
    keys = ("rollout.async.max_staleness=1", name, "cluster.roles.rollout.devices")
    with pytest.raises(MsrlError, match=mentions(*keys)):
        _check_async_platform(shared, get(name))
    _check_async_platform(shared, get("cpu"))
    separate: Any = SimpleNamespace(rollout=config.rollout, has_separate_engines=True)
    _check_async_platform(separate, get(name))
