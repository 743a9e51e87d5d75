"""train-grpo with roles on separate devices, on real ranks and engines.

With equal layouts, a run equals bit for bit a run whose roles share the devices of training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msrl.checkpoint.source import open_mcore, open_weights
from msrl.models.families import all_rules
from msrl.tracking.rollouts import read_records
from test_train_grpo import SOURCES, make_inputs, rollouts, row_logprobs, settings
from training_runs import rows, succeed, write_config

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS = 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("roles"))


def train(
    inputs: Path,
    name: str,
    roles: dict[str, Any],
    *,
    algo: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    steps: int = STEPS,
    arguments: tuple[str, ...] = (),
    **sections: Any,
) -> Path:
    """Train with a reference and a reward model on ranks; return the run folder."""
    judge = {"model": str(inputs / "judge"), "engine": "megatron", "name": "judge", "weight": 0.1}
    config = settings(
        inputs,
        name,
        "tied",
        cluster={"platform": "cpu", "rpc_timeout_s": 180.0, "roles": roles},
        train={
            "steps": steps,
            "micro_batch": 2,
            "optimizer": {"lr": 3e-4},
            "updates": {"samples_per_update": 8},
        },
        algo={"kl": {"loss": {"coef": 0.05}}, **(algo or {})},
        reward={"sources": [*SOURCES, judge]},
        checkpoint={"every_steps": 1, "keep": 1, "export_hf": True},
        **sections,
    )
    config["rollout"] |= rollout or {}
    file = write_config(inputs / f"{name}.yaml", config)
    succeed("train-grpo", "-c", str(file), *arguments, log=inputs / f"{name}-{steps}.log")
    return inputs / "runs" / name


@pytest.fixture(scope="module")
def shared(inputs: Path) -> Path:
    return train(inputs, "shared", {})


@pytest.fixture(scope="module")
def separate(inputs: Path) -> Path:
    roles = {role: {"devices": 1} for role in ("rollout", "reference", "reward")}
    return train(inputs, "separate", roles)


def numbers(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps except times and rates."""
    return [
        {
            key: value
            for key, value in row["metrics"].items()
            if not key.startswith("perf/") and not key.endswith("_per_s")
        }
        for row in rows(run)
    ]


def weights(run: Path) -> dict[str, np.ndarray]:
    source = open_mcore(run / "checkpoints", iteration=STEPS)
    return {
        name: tensor.numpy()
        for rule in all_rules(source.shape)
        for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True)
    }


def test_roles_on_separate_devices_train_bit_for_bit_as_on_shared_ones(
    shared: Path, separate: Path
) -> None:
    assert numbers(shared) == numbers(separate)
    for step in range(1, STEPS + 1):
        assert rollouts(shared, step) == rollouts(separate, step)
    before, after = weights(shared), weights(separate)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_reference_with_its_own_weights_and_layout_scores_with_them(inputs: Path) -> None:
    roles = {
        "reference": {
            "load": str(inputs / "untied"),
            "devices": 2,
            "parallel": {"tp": 2},
            "micro_batch": 3,
        }
    }
    run = train(inputs, "teacher", roles, log={"rollouts": "parquet"})
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(inputs / "untied")
    records = read_records(run / "rollouts" / "step_000001.parquet")
    assert len(records) == 16
    for record in records:
        ids = record.token_ids
        row = {
            "prompt_ids": ids[~record.is_sampled].tolist(),
            "response_ids": ids[record.is_sampled].tolist(),
        }
        expected = row_logprobs(teacher, row)
        assert record.reference_logprobs is not None
        assert np.abs(record.reference_logprobs[record.is_sampled] - expected).max() < 1e-4
    # A replay of the record has the reference on the same devices.
    words = ("-c", str(run / "config.yaml"), "--from-rollouts", str(run), "--name", "replayed")
    succeed("train-grpo", *words, log=inputs / "replayed.log")
    before, after = weights(run), weights(inputs / "runs" / "replayed")
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_rollout_record_has_the_values_of_every_token(inputs: Path, shared: Path) -> None:
    run = train(inputs, "recorded", {}, log={"rollouts": "parquet"})
    records = read_records(run / "rollouts" / "step_000002.parquet")
    lines = rollouts(shared, 2)
    assert len(records) == len(lines)
    for record, line in zip(records, lines, strict=True):
        sampled = record.is_sampled
        assert record.token_ids.tolist() == [*line["prompt_ids"], *line["response_ids"]]
        assert np.abs(record.behavior_logprobs[sampled] - line["logprobs"]).max() < 1e-6
        assert not record.behavior_logprobs[~sampled].any()
        assert record.versions == ((1, len(line["response_ids"])),) and record.staleness == 0
        assert record.reward == line["reward"] and record.scores == line["scores"]
        assert record.trainer_logprobs is not None
        difference = record.trainer_logprobs[sampled] - record.behavior_logprobs[sampled]
        assert np.abs(difference).max() < 1e-4
        assert float(record.advantages[sampled].mean(dtype=np.float64)) == line["advantage"]
        assert np.array_equal(record.loss_mask, sampled & line["is_trained"])
        assert record.times["rollout"] <= record.times["reward"] <= record.times["update"]


def test_a_reward_model_on_separate_devices_scores_while_the_policy_trains(inputs: Path) -> None:
    run = train(
        inputs,
        "asynchronous",
        {role: {"devices": 1} for role in ("rollout", "reward")},
        algo={"mismatch": {"weight": "token"}},
        rollout={"async": {"max_staleness": 1}},
        log={"rollouts": "parquet"},
    )
    for step in range(1, STEPS + 1):
        records = read_records(run / "rollouts" / f"step_{step:06d}.parquet")
        assert len(records) == 16
        assert all(record.scores.keys() >= {"judge"} for record in records)
        assert all(0 <= record.staleness <= 1 for record in records)
        for record in records:
            assert sum(count for _, count in record.versions) == record.is_sampled.sum()


def exported_critic(run: Path) -> dict[str, np.ndarray]:
    source = open_weights(run / "hf_critic")
    return {
        name: tensor.numpy()
        for rule in all_rules(source.shape)
        for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True)
    }


def test_a_critic_on_separate_devices_resumes_and_equals_a_shared_one(inputs: Path) -> None:
    ppo: dict[str, Any] = {"algo": {"preset": "ppo"}}
    shared = train(inputs, "ppo-shared", {}, **ppo)
    roles = {"critic": {"devices": 1, "optimizer": {"lr": 3e-4}}}
    train(inputs, "ppo-separate", roles, steps=1, **ppo)
    separate = train(inputs, "ppo-separate", roles, arguments=("--resume", "auto"), **ppo)
    assert numbers(shared) == numbers(separate)
    before, after = exported_critic(shared), exported_critic(separate)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    steps = sorted(path.name for path in (separate / "checkpoints" / "critic").glob("iter_*"))
    assert steps == ["iter_0000001", "iter_0000002"]  # one more than checkpoint.keep
