"""Runs with every stateful feature, killed with SIGKILL in steps and in saves.

After resuming, they end with the same numbers as uninterrupted runs. One has a critic.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from msrl.trainer.checkpointing.resume import SavedTraining
from test_train_grpo import make_inputs, rollouts, settings
from training_runs import Command, children, metrics, rows, run_training, succeed, write_config

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS, CRITIC_STEPS, WARMUP = 12, 7, 3
Moment = tuple[Callable[[], bool], float]  # condition, and seconds to wait after it is met


def rollout_section(max_refills: int) -> dict[str, Any]:
    """Return 4 prompts of 4 samples, with groups of equal rewards dropped and refilled."""
    return {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_prompt_tokens": 160,
        "max_response_tokens": 12,
        "sampling": {"temperature": 0.9},
        "engine": {"max_num_seqs": 32},
        "filter": {
            "kind": "all_equal",
            "source": "acc",
            "refill": True,
            "max_refills": max_refills,
        },
    }


def everything(inputs: Path, name: str) -> dict[str, Any]:
    """Return a configuration with every stateful feature except a critic.

    It has two ranks, a reference, two epochs of two shuffled updates per step, rewards normalized
    by running moments, an adaptive KL coefficient in rewards and loss, dropped and refilled groups,
    a falling learning rate, several passes over the data, and asynchronous checkpoints every second
    step.
    """
    return settings(
        inputs,
        name,
        "tied",
        cluster={"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": 180.0},
        # Hot enough for truncated responses, which are masked.
        rollout={**rollout_section(max_refills=2), "sampling": {"temperature": 1.3}},
        reward={
            "sources": [{"verifier": "acc"}, {"verifier": "strict_format", "weight": 0.5}],
            "overlong": {"buffer": 4, "factor": 0.5},
            "norm": {"center": "running", "scale": "running"},
        },
        algo={
            "preset": "dapo",
            "entropy_coef": 0.001,
            "mask": {"truncated": True},
            "kl": {
                "reward": {"coef": 0.05, "estimator": "k3"},
                "loss": {"coef": 0.02},
                "controller": {"kind": "adaptive", "target": 1e-9, "horizon": 32},
            },
        },
        train={
            "steps": STEPS,
            "micro_batch": 2,
            "updates": {"samples_per_update": 8, "epochs": 2},
            "optimizer": {"lr": 5e-4, "schedule": "cosine", "warmup": 3},
        },
        checkpoint={"every_steps": 2, "keep": 2, "resume": "auto", "async": True},
    )


def with_critic(inputs: Path, name: str) -> dict[str, Any]:
    """Return a configuration with a critic.

    It has two ranks, a critic with a separate schedule that is trained alone in the first steps, a
    KL penalty with an adaptive coefficient, two epochs of two shuffled updates per step, dropped
    and refilled groups, and asynchronous checkpoints every second step.
    """
    roles = {"critic": {"optimizer": {"lr": 1e-3, "schedule": "linear", "warmup": 2}}}
    return settings(
        inputs,
        name,
        "untied",
        cluster={"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": 180.0, "roles": roles},
        rollout=rollout_section(max_refills=1),
        reward={"sources": [{"verifier": "acc"}], "norm": {"scale": "running"}},
        algo={
            "preset": "ppo",
            "value": {"warmup_steps": WARMUP},
            "advantage": {"gamma": 0.98},
            "kl": {
                "reward": {"coef": 0.05},
                "controller": {"kind": "adaptive", "target": 1e-9, "horizon": 32},
            },
        },
        train={
            "steps": CRITIC_STEPS,
            "micro_batch": 2,
            "updates": {"samples_per_update": 8, "epochs": 2},
            "optimizer": {"lr": 3e-4, "schedule": "cosine"},
        },
        checkpoint={"every_steps": 2, "keep": 2, "resume": "auto", "async": True},
    )


@dataclass(frozen=True)
class Killed:
    """Run that was killed several times: metrics written by each life, and number of kills in
    saves.
    """

    run: Path
    lives: tuple[list[dict[str, float]], ...]
    kills_in_a_save: int


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("killed-grpo"))


@pytest.fixture(scope="module")
def whole(inputs) -> Path:
    return run_training(inputs, everything(inputs, "whole"))


def is_saving(run: Path) -> bool:
    folder = run / "checkpoints"
    return any(folder.glob(".iter_*.partial")) or any(folder.glob("training/.iter_*.partial"))


def kill_all(command: Command) -> None:
    """Send SIGKILL to the command and all its child processes, including Ray's."""
    started = children(command.process.pid)
    command.kill()
    for pid in started:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def at_step(run: Path, step: int) -> Callable[[], bool]:
    return lambda: len(rows(run)) >= step


def in_a_save(run: Path, step: int) -> Callable[[], bool]:
    return lambda: len(rows(run)) >= step and is_saving(run)


def killed_at(inputs: Path, config: dict[str, Any], moments: Sequence[Moment]) -> Killed:
    """Run a configuration, kill it at these moments, and resume it until it ends."""
    name = config["run"]["name"]
    file, run = write_config(inputs / f"{name}.yaml", config), inputs / "runs" / name
    lives, kills_in_a_save = [], 0
    for number, (happened, wait_s) in enumerate(moments):
        command = Command("train-grpo", "-c", str(file), log=inputs / f"{name}-life{number}.log")
        command.when(happened, every_s=0.002)
        time.sleep(wait_s)
        kills_in_a_save += is_saving(run)
        kill_all(command)
        lives.append(metrics(run))
    succeed("train-grpo", "-c", str(file), log=inputs / f"{name}-last.log")
    return Killed(run, tuple(lives), kills_in_a_save)


@pytest.fixture(scope="module")
def killed(inputs, whole) -> Killed:
    """Kill a run in a save, after an unsaved step, at a random moment of a step, and in a later
    save.
    """
    run, seconds = (
        inputs / "runs" / "killed",
        float(np.median([row["seconds"]["step"] for row in rows(whole)])),
    )
    sometime = random.Random(1).random() * seconds
    moments = [
        (in_a_save(run, 2), 0.0),
        (at_step(run, 3), 0.0),
        (at_step(run, 5), sometime),
        (in_a_save(run, 6), 0.0),
    ]
    return killed_at(inputs, everything(inputs, "killed"), moments)


def test_a_killed_run_has_the_same_rollouts_rewards_and_losses(whole, killed):
    assert metrics(killed.run) == metrics(whole) and len(metrics(whole)) == STEPS
    for step in range(1, STEPS + 1):
        assert rollouts(killed.run, step) == rollouts(whole, step)
    for life in killed.lives:
        assert life == metrics(whole)[: len(life)], (
            "a step that was done twice was the same both times"
        )
    assert killed.kills_in_a_save > 0


def test_all_state_changes_in_steps_and_is_restored_bitwise(whole, killed):
    states = [SavedTraining(run / "checkpoints", STEPS).state() for run in (whole, killed.run)]
    assert states[0] == states[1]  # with the checksums of weights, moments and random numbers
    extra = states[0]["extra"]
    assert (
        extra["rewards"]["count"]
        == 4 * sum(step["rollout/prompts"] for step in metrics(whole))
        > STEPS * 16
    )
    factors = [step["train/kl_factor"] for step in metrics(whole)]
    assert len(set(factors)) == STEPS and extra["kl_factor"] > factors[-1] > 1.0
    assert len({step["train/lr"] for step in metrics(whole)}) > 3
    assert max(step.get("train/masked", 0.0) for step in metrics(whole)) > 0
    assert max(step["rollout/refills"] for step in metrics(whole)) > 0
    asked = sum(step["rollout/prompts"] for step in metrics(whole))
    assert extra["prompts_taken"] >= asked > STEPS * 4, (
        "those that a step had already are passed over"
    )
    seen = [
        row["prompt_index"] for step in range(1, STEPS + 1) for row in rollouts(whole, step)[::4]
    ]
    assert len(seen) > 2 * len(set(seen)), "several passes over the data"
    assert re.search(r"step \d+.*checkpoint", (whole.parent.parent / "killed-last.log").read_text())
    assert not list((killed.run / "checkpoints").rglob(".iter*partial"))


def test_a_killed_run_with_a_critic_equals_the_uninterrupted_one(inputs):
    """Kills happen while only the critic is trained, in a save, and when both are trained."""
    whole, run = (
        run_training(inputs, with_critic(inputs, "critic")),
        inputs / "runs" / "killed-critic",
    )
    moments = [(at_step(run, WARMUP), 0.0), (in_a_save(run, 4), 0.0), (at_step(run, 5), 0.0)]
    killed = killed_at(inputs, with_critic(inputs, "killed-critic"), moments)
    assert metrics(killed.run) == metrics(whole) and len(metrics(whole)) == CRITIC_STEPS
    for life in killed.lives:
        assert life == metrics(whole)[: len(life)]
    for step in range(1, CRITIC_STEPS + 1):
        assert rollouts(killed.run, step) == rollouts(whole, step)
    states = [
        SavedTraining(each / "checkpoints", CRITIC_STEPS).state() for each in (whole, killed.run)
    ]
    assert states[0] == states[1]  # with the checksums of the critic's weights and moments
    assert any("critic" in name for name in states[0]["files"])
    assert 0 < states[0]["updates"] < states[0]["critic"]["updates"] <= 4 * CRITIC_STEPS
    assert (
        len({step["train/value_lr"] for step in metrics(whole)}) > 3
        and metrics(whole)[-1]["train/value_mean"] != 0
    )
    assert max(step["rollout/refills"] for step in metrics(whole)) > 0
    assert [("train/policy_loss" in step) for step in metrics(whole)[:WARMUP]] == [False] * WARMUP
