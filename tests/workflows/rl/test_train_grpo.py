"""The command train-grpo with real ranks, engines and verifiers.

The numbers of every step are compared with transformers. Runs die and resume.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.source import open_mcore, open_weights
from msrl.data.dataset import PromptDataset
from msrl.models.parallel_layout import ParallelLayout
from msrl.tracking.rollouts import read_records
from support import assert_mentions
from tiny_qwen2 import VOCAB_SIZE, make_model, make_tokenizer
from training_runs import (
    LIMIT_S,
    Command,
    children,
    files_in,
    listening_hosts,
    make_tmp,
    metrics,
    rows,
    run_training,
    shared_memory,
    still_running,
    succeed,
    write_config,
    write_rows,
)
from transformers_logprobs import response_logprobs

pytestmark = pytest.mark.slow
STEPS = 4
END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("grpo"))


def make_inputs(folder: Path, models: Sequence[str] = ("tied", "untied")) -> Path:
    """Write prompts with the answer 1 or 2, and models that guess."""
    from msrl.cli import app

    make_tokenizer().save_pretrained(folder / "tokenizer")
    problems = [{"question": f"{i}%3=", "answer": f"so #### {i % 3}"} for i in range(40) if i % 3]
    for name, split_rows in (("data", problems[:20]), ("eval", problems[20:])):
        source = str(write_rows(folder / f"{name}.jsonl", split_rows))
        arguments = [
            "--input",
            source,
            "--tokenizer",
            str(folder / "tokenizer"),
            "--handler",
            "gsm8k",
            "--template",
            "qwen",
        ]
        app.app(
            ["preprocess", *arguments, "--output-prefix", str(folder / name)], standalone_mode=False
        )
    for name in models:
        model = make_model(tied=name == "tied")
        learn_to_answer(model, PromptDataset(folder / "data"))
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    write_mcore(
        open_weights(save_reward_model(folder / "judge")),
        folder / "judge-mcore",
        McoreTarget(ParallelLayout(1, 2)),
    )
    return folder


def save_reward_model(folder: Path) -> Path:
    """Save a random Qwen2 classifier with one score and another shape than the policy."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=2,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def learn_to_answer(model: Any, prompts: PromptDataset) -> None:
    """Train a model to answer every prompt with a box of 1 or 2."""
    tokenizer = make_tokenizer()
    answers = [[*tokenizer(f"\\boxed{{{digit}}}")["input_ids"], END] for digit in (1, 2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(60):
        batch = [
            (prompts[(number * 4 + i) % len(prompts)].token_ids.tolist(), answers[i % 2])
            for i in range(4)
        ]
        loss = torch.zeros(())
        for prompt, answer in batch:
            ids = torch.tensor([[*prompt, *answer]])
            loss = loss + model(
                ids, labels=torch.tensor([[*[-100] * len(prompt), *answer]])
            ).loss / len(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3, loss


def settings(inputs: Path, name: str, model: str, **sections: Any) -> dict[str, Any]:
    """Return a configuration with 4 prompts of 4 samples and a checkpoint per step."""
    return {
        "run": {"name": name, "dir": str(inputs / "runs"), "seed": 5},
        "model": {"path": str(inputs / model), "dtype": "float32", "template": "qwen"},
        "data": {"train": str(inputs / "data"), "eval": str(inputs / "eval")},
        "cluster": {"platform": "cpu", "rpc_timeout_s": 180.0},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_prompt_tokens": 160,
            "max_response_tokens": 16,
            "sampling": {"temperature": 0.9},
            "engine": {"max_num_seqs": 32},
        },
        "reward": {"sources": SOURCES},
        "train": {"steps": STEPS, "micro_batch": 2, "optimizer": {"lr": 2e-3}},
        "checkpoint": {"every_steps": 1},
        **sections,
    }


# KL values of about 0.01 exceed the target, so the coefficient grows by 20 % per 32 samples.
ADAPTIVE: dict[str, Any] = {
    "kl": {
        "loss": {"coef": 0.05},
        "controller": {"kind": "adaptive", "target": 1e-9, "horizon": 32},
    },
    "clip": {"low": 0.02, "high": 0.02},
}


SOURCES: list[dict[str, Any]] = [{"verifier": "acc"}, {"verifier": "strict_format", "weight": 0.5}]
SAMPLED: dict[str, Any] = {
    "every_steps": 2,
    "at_start": True,
    "prompts": 6,
    "samples_per_prompt": 4,
    "sampling": {"temperature": 0.9},
}


def several_updates(
    inputs: Path, name: str, resume: str = "none", **sections: Any
) -> dict[str, Any]:
    """Return an untied TP 2 configuration: two updates per step and a growing KL coefficient."""
    train = {
        "steps": STEPS,
        "micro_batch": 2,
        "optimizer": {"lr": 3e-4},
        "parallel": {"tp": 2},
        "updates": {"samples_per_update": 8},
    }
    return settings(
        inputs,
        name,
        "untied",
        train=train,
        reward={
            "sources": [
                *SOURCES,
                {"model": str(inputs / "judge-mcore"), "weight": 0.0, "options": {"batch": 3}},
            ]
        },
        **{
            "algo": ADAPTIVE,
            "checkpoint": {"every_steps": 1, "export_hf": True, "resume": resume},
            **sections,
        },
    )


@pytest.fixture(scope="module")
def whole(inputs) -> Path:
    """Run without interruption."""
    tmp = make_tmp()
    run = run_training(inputs, several_updates(inputs, "whole"), tmp=tmp)
    assert files_in(tmp) == []
    return run


@dataclass(frozen=True)
class Interrupted:
    """Run whose process group received a signal, with its processes and remaining files."""

    run: Path
    code: int
    output: str
    processes: dict[int, str]
    shared_memory: set[Path]
    listening: dict[str, set[str]]
    left: list[str]
    reported: list[dict[str, Any]]


@pytest.fixture(scope="module")
def interrupted(inputs) -> Interrupted:
    """Interrupt a run with two data-parallel ranks and a TP 2 engine.

    The model is tied, a step has one update, and every second step is evaluated greedily. Weights
    travel as Ray objects, in many buckets.
    """
    changes = {
        "train": {"steps": 1000, "micro_batch": 4, "optimizer": {"lr": 3e-4}},
        "eval": {"every_steps": 2},
    }
    judge = {"model": str(inputs / "judge"), "engine": "megatron", "name": "judge", "weight": 0.0}
    changes["reward"] = {"sources": [*SOURCES, judge]}
    config = settings(
        inputs, "interrupted", "tied", cluster={"platform": "cpu", "devices_per_node": 2}, **changes
    )
    config["rollout"]["engine"]["tp"] = 2
    config["rollout"]["weights"] = {"transfer": "ray", "verify": "every", "bucket_bytes": 1 << 16}
    write_config(inputs / "interrupted.yaml", config)
    return interrupt(inputs, "interrupted", 3, signal.SIGTERM)


@pytest.fixture(scope="module")
def hung_up(inputs, interrupted) -> Interrupted:
    """Resume the same run and interrupt it again with the signal of a closed terminal."""
    return interrupt(
        inputs, "interrupted", len(rows(interrupted.run)) + 1, signal.SIGHUP, "--resume", "auto"
    )


def interrupt(
    inputs: Path, name: str, step: int, number: signal.Signals, *arguments: str
) -> Interrupted:
    """Run a configuration and send a signal to its process group when a step has its rollouts."""
    tmp, run = make_tmp(), inputs / "runs" / name
    log = inputs / f"{name}-{number.name}.log"
    command = Command(
        "train-grpo", "-c", str(inputs / f"{name}.yaml"), *arguments, log=log, tmp=tmp
    )
    command.when(lambda: (run / "rollouts" / f"step_{step:06d}.jsonl").exists())
    started = children(command.process.pid)
    mapped, listening = shared_memory(started), listening_hosts([command.process.pid, *started])
    command.signal_group(number)
    return Interrupted(
        run,
        command.wait(),
        command.output(),
        started,
        mapped,
        listening,
        files_in(tmp),
        rows(run),
    )


def rollouts(run: Path, step: int, folder: str = "rollouts") -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run / folder / f"step_{step:06d}.jsonl").read_text().splitlines()
    ]


def model_after(run: Path, step: int, start: Path, scratch: Path) -> Any:
    """Return the policy after `step` steps as a transformers model."""
    from transformers import AutoModelForCausalLM

    folder = start
    if step:
        folder = scratch / f"{run.name}-{step}"
        if not folder.exists():
            write_hf(open_mcore(run / "checkpoints", iteration=step), folder, None)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def row_logprobs(model: Any, row: dict[str, Any]) -> np.ndarray:
    return response_logprobs(model, row["prompt_ids"], row["response_ids"], temperature=0.9)


def all_logprobs(model: Any, samples: list[dict[str, Any]]) -> np.ndarray:
    return np.concatenate([row_logprobs(model, row) for row in samples])


def assert_every_update_reached_the_engine(
    run: Path, start: Path, steps: int, scratch: Path
) -> None:
    """Compare the engine's log-probabilities of each step with those of the preceding weights."""
    models = [model_after(run, step, start, scratch) for step in range(steps)]
    for step, model in enumerate(models, 1):
        samples = rollouts(run, step)
        assert {row["policy_version"] for row in samples} == {step - 1}
        sampled = np.concatenate([row["logprobs"] for row in samples])
        assert np.abs(sampled - all_logprobs(model, samples)).max() < 1e-4
        if step > 1:
            assert np.abs(sampled - all_logprobs(models[step - 2], samples)).max() > 1e-2, (
                "the weights have not moved"
            )


@pytest.mark.full
def test_the_engine_samples_from_the_new_weights_after_every_update_of_an_untied_tp_2_model(
    whole, inputs, tmp_path
):
    assert_every_update_reached_the_engine(whole, inputs / "untied", STEPS, tmp_path)
    assert all(row["train/sampler_logprob_difference"] < 1e-5 for row in metrics(whole))


def test_the_engine_samples_from_the_new_weights_after_every_update_of_a_tied_model_on_two_ranks(
    interrupted, inputs, tmp_path
):
    run = interrupted.run
    assert_every_update_reached_the_engine(run, inputs / "tied", 3, tmp_path)
    assert all(row["train/sampler_logprob_difference"] < 1e-5 for row in metrics(run))


def test_prompts_reach_the_engine_with_the_token_ids_of_the_dataset(interrupted, inputs):
    from msrl.data.order import RowOrder

    dataset = PromptDataset(inputs / "data")
    for step in range(1, 4):
        samples = rollouts(interrupted.run, step)
        expected = RowOrder(len(dataset), 4, seed=5, shuffle=True).of_step(step - 1).tolist()
        assert [row["prompt_index"] for row in samples] == [
            index for index in expected for _ in range(4)
        ]
        for row in samples:
            assert row["prompt_ids"] == dataset[row["prompt_index"]].token_ids.tolist()
            assert row["prompt_ids"].count(1) == 3 and row["prompt_ids"].count(END) == 2
            assert row["prompt"].count("<|im_start|>") == 3


@pytest.mark.full
def test_every_step_logs_its_metrics(whole):
    assert [row["step"] for row in rows(whole)] == list(range(1, STEPS + 1))
    expected = {
        "reward/mean",
        "reward/acc",
        "reward/strict_format",
        "rollout/response_length",
        "rollout/truncated",
        "train/kl",
        "train/entropy",
        "train/clip_fraction",
        "train/grad_norm",
        "train/lr",
        "train/policy_loss",
        "train/loss",
        "train/sampler_logprob_difference",
        "train/sampler_kl",
        "rollout/tokens_per_s",
        "perf/tokens_per_s",
    }
    for step, row in enumerate(rows(whole), 1):
        assert expected <= set(row["metrics"])
        assert all(np.isfinite(value) for value in row["metrics"].values())
        assert {"rollout", "reward", "logprobs", "update", "weights", "step"} <= set(row["seconds"])
        samples = rollouts(whole, step)
        assert len(samples) == 16
        assert row["metrics"]["reward/mean"] == pytest.approx(
            np.mean([r["reward"] for r in samples])
        )
        assert row["metrics"]["reward/acc"] == pytest.approx(
            np.mean([r["scores"]["acc"] for r in samples])
        )
        assert row["metrics"]["rollout/response_length"] == np.mean(
            [len(r["response_ids"]) for r in samples]
        )
    assert (whole / "curves.png").is_file() and "Hugging Face model" in (
        whole / "report.md"
    ).read_text()


def test_rewards_are_those_of_the_answers_and_advantages_are_relative_to_the_group(interrupted):
    for step in range(1, 4):
        for _, group in itertools.groupby(
            rollouts(interrupted.run, step), key=lambda row: row["prompt_index"]
        ):
            samples = list(group)
            rewards = np.array([row["reward"] for row in samples])
            for row in samples:
                right = f"\\boxed{{{row['answer']}}}" in row["response"]
                scores = {name: score for name, score in row["scores"].items() if name != "judge"}
                assert scores == {
                    "acc": 1.0 if right else -0.5 if "\\boxed{" in row["response"] else -1.0,
                    "strict_format": -0.5,
                }
                assert row["reward"] == row["scores"]["acc"] - 0.25
            expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            np.testing.assert_allclose([row["advantage"] for row in samples], expected, atol=1e-5)


def with_end(row: dict[str, Any], tokenizer: Any) -> str:
    """Return prompt and response with the token that ended the response."""
    end = row["response_ids"][-1:] if row["finish_reason"] == "stop" else []
    return row["prompt"] + row["response"] + tokenizer.decode(end)


def test_a_reward_model_on_the_training_ranks_agrees_with_transformers(interrupted, inputs):
    samples = rollouts(interrupted.run, 2) + rollouts(interrupted.run, 2, "eval")
    assert_scores_of_the_judge(samples, "judge", inputs)


@pytest.mark.full
def test_a_checkpoint_of_a_reward_model_agrees_with_transformers(whole, inputs):
    assert_scores_of_the_judge(rollouts(whole, 1) + rollouts(whole, 3), "reward_model", inputs)
    mean = np.mean([row["scores"]["reward_model"] for row in rollouts(whole, 1)])
    assert metrics(whole)[0]["reward/reward_model"] == pytest.approx(mean, abs=1e-6)


@torch.no_grad()
def assert_scores_of_the_judge(samples: list[dict[str, Any]], name: str, inputs: Path) -> None:
    """Compare the scores of this name with those of the reward model in transformers."""
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(
        inputs / "judge", dtype=torch.float32
    ).eval()
    tokenizer = make_tokenizer()
    expected = [
        model(**tokenizer(with_end(row, tokenizer), return_tensors="pt")).logits.item()
        for row in samples
    ]
    assert np.std(expected) > 0.1
    assert np.abs(np.array(expected) - [row["scores"][name] for row in samples]).max() < 1e-4


def test_the_first_update_of_a_rollout_has_ratio_one(interrupted):
    run = interrupted.run
    for step, values in enumerate(metrics(run)[:3], 1):
        responses = rollouts(run, step)
        advantages = np.concatenate(
            [np.full(len(row["response_ids"]), row["advantage"]) for row in responses]
        )
        assert values["train/policy_loss"] == pytest.approx(-advantages.mean(), abs=1e-6)
        assert values["train/clip_fraction"] == 0 and values["train/ppo_kl"] == 0
        assert "train/kl" not in values


@pytest.mark.full
def test_a_later_update_of_a_rollout_is_clipped_and_changes_the_policy(whole, inputs, tmp_path):
    steps = metrics(whole)
    assert max(step["train/clip_fraction"] for step in steps) > 0.01
    assert steps[-1]["train/kl"] > 1e-3
    np.testing.assert_allclose([step["train/kl_factor"] for step in steps], 1.1 ** np.arange(STEPS))
    assert [step["train/lr"] for step in steps] == [3e-4] * STEPS
    assert min(step["reward/equal_groups"] for step in steps) < 1


def test_entropy_and_divergence_of_the_first_pass_agree_with_transformers(
    interrupted, inputs, tmp_path
):
    run = interrupted.run
    with torch.no_grad():
        for step in (1, 2):
            model = model_after(run, step - 1, inputs / "tied", tmp_path)
            entropies = []
            for row in rollouts(run, step):
                ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
                logprobs = (
                    model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].double() / 0.9
                ).log_softmax(-1)
                entropies.append(-(logprobs.exp() * logprobs).sum(-1).numpy())
            assert metrics(run)[step - 1]["train/entropy"] == pytest.approx(
                np.concatenate(entropies).mean(), rel=1e-5
            )


@pytest.mark.full
def test_token_values_and_profiles_of_ranks_are_written(inputs, tmp_path):
    log = {"rollouts": "parquet", "tokens": "all", "profile": {"steps": [1], "ranks": [1]}}
    config = several_updates(inputs, "observed", log=log)
    config["train"]["steps"] = 1
    run = run_training(inputs, config)
    model = model_after(run, 0, inputs / "untied", tmp_path)
    records = read_records(run / "rollouts" / "step_000001.parquet")
    assert len(records) == 16
    for record in records:
        logprobs, entropies = transformers_values(model, record.token_ids)
        sampled = np.flatnonzero(record.is_sampled)
        values = (record.trainer_logprobs, record.reference_logprobs, record.entropies)
        for actual, expected in zip(values, (logprobs, logprobs, entropies), strict=True):
            np.testing.assert_allclose(actual[sampled], expected[sampled - 1], rtol=0, atol=1e-4)
    (trace,) = (run / "profile" / "step_000001").iterdir()
    assert trace.name == "rank_00001.json"
    assert any(
        "Backward" in event["name"] for event in json.loads(trace.read_text())["traceEvents"]
    )


@torch.no_grad()
def transformers_values(model: Any, token_ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability of each token but the first, and the entropies, [T - 1] each."""
    ids = torch.tensor(np.asarray(token_ids)[None], dtype=torch.int64)
    logprobs = (model(ids).logits[0, :-1].double() / 0.9).log_softmax(-1)
    picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    return picked.numpy(), -(logprobs.exp() * logprobs).sum(-1).numpy()


@pytest.mark.full
def test_the_exported_model_is_the_last_policy(whole, inputs, tmp_path):
    from transformers import AutoModelForCausalLM

    exported: Any = AutoModelForCausalLM.from_pretrained(whole / "hf", dtype=torch.float32)
    last = model_after(whole, STEPS, inputs / "untied", tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(exported.parameters(), last.parameters(), strict=True)
    )


@pytest.mark.full
def test_every_weight_of_a_bfloat16_policy_learns_although_its_rounding_is_measured(inputs):
    from safetensors.torch import load_file

    changes = settings(inputs, "bfloat16", "untied", checkpoint={"export_hf": True})
    changes["model"]["dtype"] = "bfloat16"
    changes["train"] |= {"steps": 1, "optimizer": {"lr": 0.05}}  # more than bfloat16 rounds
    run = run_training(inputs, changes)
    assert (run / "rounding.json").exists()
    start, last = (
        load_file(folder / "model.safetensors") for folder in (inputs / "untied", run / "hf")
    )
    kept = [name for name in start if torch.equal(start[name].bfloat16(), last[name].bfloat16())]
    assert not kept


@torch.no_grad()
def test_an_evaluation_has_the_greedy_answers_of_the_policy_of_its_step(
    interrupted, inputs, tmp_path
):
    from msrl.rewards.verifiers import acc

    run = interrupted.run
    assert [step for step, values in enumerate(metrics(run), 1) if "eval/pass@1" in values] == list(
        range(2, len(metrics(run)) + 1, 2)
    )
    model, tokenizer, held_out = (
        model_after(run, 2, inputs / "tied", tmp_path),
        make_tokenizer(),
        PromptDataset(inputs / "eval"),
    )
    scores, answers = [], []
    for prompt in held_out:
        ids = torch.from_numpy(prompt.token_ids)[None]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=END,
        )
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        scores.append(acc.score(answers[-1], prompt.answer))
    values = metrics(run)[1]
    assert (
        values["eval/pass@1"] == pytest.approx(np.mean(np.array(scores) == 1.0))
        and "eval/mean@1" not in values
    )
    assert values["eval/reward"] == pytest.approx(np.mean(scores) - 0.25) and values[
        "eval/score/acc"
    ] == pytest.approx(np.mean(scores))
    written = rollouts(run, 2, "eval")
    assert [row["response"] for row in written] == answers
    assert [row["is_right"] for row in written] == [score == 1.0 for score in scores]
    assert [row["prompt_index"] for row in written] == list(range(len(held_out)))


def test_an_interrupt_saves_after_the_current_step_and_leaves_no_processes(interrupted):
    done = len(interrupted.reported)
    assert interrupted.code == 130 and "Traceback" not in interrupted.output
    assert re.search(rf"(?i)saved .*step {done}\b", interrupted.output)
    assert (interrupted.run / "checkpoints" / f"iter_{done:07d}").is_dir()
    ours = r"ray::(TrainActor|RolloutActor)|msrl\.rewards\.worker|/raylet/raylet "
    started = {
        pid: match[0]
        for pid, line in interrupted.processes.items()
        if (match := re.search(ours, line))
    }
    assert {
        "ray::TrainActor",
        "ray::RolloutActor",
        "msrl.rewards.worker",
        "/raylet/raylet ",
    } == set(started.values())
    assert not still_running(started)


def test_no_process_of_a_run_on_one_machine_listens_beyond_loopback(interrupted):
    listening = interrupted.listening
    assert {"gcs_server", "raylet", "ray::TrainActor", "ray::RolloutActor"} <= set(listening)
    assert set().union(*listening.values()) <= {"127.0.0.1", "::1"}, listening


@pytest.mark.full
def test_a_closed_terminal_saves_too_and_the_resumed_run_starts_after_the_saved_step(
    interrupted, hung_up
):
    first, last = len(interrupted.reported), len(hung_up.reported)
    assert hung_up.code == 130 and "Traceback" not in hung_up.output
    assert f"step {last} to" in hung_up.output and last > first
    assert hung_up.reported[:first] == interrupted.reported
    assert [row["step"] for row in hung_up.reported] == list(range(1, last + 1))
    assert (hung_up.run / "checkpoints" / f"iter_{last:07d}").is_dir()
    assert_nothing_is_left(hung_up)


def test_a_run_leaves_no_temporary_files_and_no_shared_memory(interrupted):
    assert_nothing_is_left(interrupted)


def assert_nothing_is_left(run: Interrupted) -> None:
    assert run.left == []
    assert len(run.shared_memory) >= 4, "of the engine's two processes"
    assert not [path for path in run.shared_memory if path.exists()]


@dataclass(frozen=True)
class Resumed:
    """Run with evaluations that was resumed after the death of a rank, and its first attempt."""

    run: Path
    code: int
    output: str
    ended_in_s: float
    num_rows: int


@pytest.fixture(scope="module")
def resumed(inputs) -> Resumed:
    run = inputs / "runs" / "resumed"
    checkpoint = {"every_steps": 1, "keep": 1, "keep_best": True, "resume": "auto"}
    cluster = {"platform": "cpu", "rpc_timeout_s": 180.0, "max_restarts": 0}
    settings = several_updates(
        inputs, "resumed", eval=SAMPLED, checkpoint=checkpoint, cluster=cluster
    )
    file = write_config(inputs / "resumed.yaml", settings)
    first = Command("train-grpo", "-c", str(file), log=inputs / "first.log")
    first.when(lambda: any((run / "checkpoints").glob("iter_*")))
    victim = next(pid for pid, line in children(first.process.pid).items() if "TrainActor" in line)
    psutil.Process(victim).kill()
    died = time.monotonic()
    attempt = Resumed(run, first.wait(), first.output(), time.monotonic() - died, len(rows(run)))
    succeed("train-grpo", "-c", str(file), log=inputs / "second.log")
    return attempt


@pytest.mark.full
def test_a_dead_rank_is_reported_and_the_resumed_run_equals_the_uninterrupted_one(whole, resumed):
    assert resumed.code == 1, resumed.output
    assert resumed.ended_in_s < 90  # half of rpc_timeout_s
    assert re.search(r"^training rank [01] ", resumed.output, re.M), resumed.output
    assert resumed.num_rows <= STEPS
    for step in range(1, STEPS + 1):
        assert rollouts(resumed.run, step) == rollouts(whole, step)


@pytest.mark.full
def test_evaluations_do_not_change_the_training_and_a_resume_repeats_and_skips_none(
    whole, resumed, inputs, tmp_path
):
    run = resumed.run
    assert [row["step"] for row in rows(run)] == list(range(STEPS + 1))
    evaluated = [
        row["step"] for row in rows(run) if any(name.startswith("eval/") for name in row["metrics"])
    ]
    assert evaluated == [0, 2, 4] and not set(metrics(run)[0]) - {
        name for name in metrics(run)[0] if name.startswith("eval/")
    }
    trained = [
        {name: value for name, value in values.items() if not name.startswith("eval/")}
        for values in metrics(run)[1:]
    ]
    assert trained == metrics(whole)
    assert (
        resumed.output.count("step 0/4") == 1
        and "step 0/4" not in (inputs / "second.log").read_text()
    )


@pytest.mark.full
def test_sampled_evaluations_use_the_policy_of_their_step_and_keep_the_best_checkpoint(
    whole, resumed, inputs, tmp_path
):
    from msrl.trainer.checkpointing.resume import saved_steps

    accuracies = {}
    for step in (0, 2, 4):
        samples, logged = rollouts(resumed.run, step, "eval"), metrics(resumed.run)[step]
        assert len(samples) == 6 * 4 and {row["policy_version"] for row in samples} == {step}
        assert len({(row["prompt_index"], row["response"]) for row in samples}) > 6, (
            "samples of a prompt differ"
        )
        sampled = np.concatenate([row["logprobs"] for row in samples])
        assert (
            np.abs(
                sampled
                - all_logprobs(model_after(whole, step, inputs / "untied", tmp_path), samples)
            ).max()
            < 1e-4
        )
        right = np.array(
            [f"\\boxed{{{row['answer']}}}" in row["response"] for row in samples]
        ).reshape(6, 4)
        assert right.ravel().tolist() == [row["is_right"] for row in samples]
        pairs = [right[:, [a, b]].any(axis=1) for a, b in itertools.combinations(range(4), 2)]
        assert logged["eval/pass@1"] == logged["eval/mean@4"] == pytest.approx(right.mean())
        assert logged["eval/pass@2"] == pytest.approx(np.mean(pairs)) and logged[
            "eval/pass@4"
        ] == pytest.approx(right.any(axis=1).mean())
        accuracies[step] = logged["eval/pass@1"]
    best = 2 if accuracies[2] >= accuracies[4] else 4
    assert saved_steps(resumed.run / "checkpoints") == sorted({best, STEPS})


def adapter_settings(inputs: Path, name: str) -> dict[str, Any]:
    """Return a run of three steps on two TP ranks with a KL loss and an evaluation at the end."""
    changes = settings(
        inputs,
        name,
        "untied",
        algo={"kl": {"loss": {"coef": 0.05}}},
        checkpoint={"export_hf": True},
    )
    changes["train"] = {
        "steps": 3,
        "micro_batch": 2,
        "optimizer": {"lr": 5e-3},
        "parallel": {"tp": 2},
        "lora": {"rank": 4, "alpha": 8.0},
    }
    changes["eval"] = {"every_steps": 3, "sampling": {"temperature": 0.9}}
    changes["rollout"]["engine"]["tp"] = 2
    return changes


@pytest.fixture(scope="module")
def adapted(inputs) -> Path:
    """Train adapters."""
    tmp = make_tmp()
    run = run_training(inputs, adapter_settings(inputs, "adapted"), tmp=tmp)
    assert files_in(tmp) == []
    return run


@pytest.mark.full
def test_eval_of_a_run_repeats_the_evaluations_of_its_training(adapted, tmp_path):
    configuration, out = str(adapted / "config.yaml"), tmp_path / "out"
    words = ("-c", configuration, str(adapted), "--output", str(out))
    table = succeed("eval", *words, log=tmp_path / "eval.log")
    assert_mentions(table, "adapted step 3", "pass@1")
    samples = [json.loads(line) for line in (out / "samples/adapted_step_3.jsonl").open()]
    logged = rollouts(adapted, 3, "eval")
    for column in ("prompt_index", "response_ids", "reward", "is_right", "policy_version"):
        assert [row[column] for row in samples] == [row[column] for row in logged], column
    (entry,) = json.loads((out / "results.json").read_text())["checkpoints"]
    values = metrics(adapted)[2]
    for name in ("pass@1", "reward", "response_length", "truncated"):
        assert entry["metrics"][name] == pytest.approx(values[f"eval/{name}"]), name
    assert "not evaluated again" in succeed("eval", *words, log=tmp_path / "again.log")


@pytest.mark.full
@pytest.mark.parametrize("way", ["shared_memory", "ray"])
def test_adapters_sent_alone_give_the_run_of_merged_weights_bit_for_bit(
    adapted: Path, inputs: Path, way: str
):
    changes = adapter_settings(inputs, f"alone-{way}")
    weights = {"adapters_only": True, "transfer": way, "verify": "every", "bucket_bytes": 1 << 16}
    changes["rollout"]["weights"] = weights
    run = run_training(inputs, changes)
    assert metrics(run) == metrics(adapted)
    for step in (1, 2, 3):
        assert rollouts(run, step) == rollouts(adapted, step)
    assert rollouts(run, 3, "eval") == rollouts(adapted, 3, "eval")


@pytest.mark.full
def test_adapters_are_trained_and_their_reference_is_the_model_without_them(
    adapted, inputs, tmp_path
):
    from transformers import AutoModelForCausalLM

    base = model_after(adapted, 0, inputs / "untied", tmp_path)
    for step, values in enumerate(metrics(adapted), 1):
        responses = rollouts(adapted, step)
        sampled, reference = (
            np.concatenate([row["logprobs"] for row in responses]),
            all_logprobs(base, responses),
        )
        k3 = np.exp(reference - sampled) - 1 + sampled - reference
        assert values["train/kl"] == pytest.approx(k3.mean(), abs=1e-6, rel=1e-3), step
        assert values["train/sampler_logprob_difference"] < 1e-5
    assert abs(metrics(adapted)[0]["train/kl"]) < 1e-6
    assert metrics(adapted)[2]["train/kl"] > 1e-4
    exported: Any = AutoModelForCausalLM.from_pretrained(adapted / "hf", dtype=torch.float32)
    evaluated = rollouts(adapted, 3, "eval")
    assert (
        np.abs(
            np.concatenate([row["logprobs"] for row in evaluated])
            - all_logprobs(exported, evaluated)
        ).max()
        < 1e-4
    )
    assert np.abs(all_logprobs(base, evaluated) - all_logprobs(exported, evaluated)).max() > 1e-2


FAILING = """
import os

def raises(response, answer):
    raise KeyError("no such column")

def scores_calls(response, answer, *, file, count):
    with open(file, "ab") as calls:
        calls.write(b"x")
    if os.path.getsize(file) > count:
        raise ConnectionError("the judge has gone away")
    return float(len(response))
"""


def fail_with(inputs: Path, name: str, function: str, **sections: Any) -> Command:
    """Start a run whose second reward source, next to a verifier, is `function`."""
    (inputs / "failing.py").write_text(FAILING)
    options = (
        {"file": str(inputs / f"{name}.calls"), "count": 16} if function == "scores_calls" else {}
    )
    sources = [
        {"verifier": "acc"},
        {"function": f"{inputs}/failing.py:{function}", "options": options},
    ]
    config = settings(inputs, name, "tied", reward={"sources": sources}, **sections)
    return Command(
        "train-grpo",
        "-c",
        str(write_config(inputs / f"{name}.yaml", config)),
        log=inputs / f"{name}.log",
    )


@pytest.mark.full
def test_a_reward_function_that_always_raises_ends_the_run_at_its_first_step_with_the_cause(inputs):
    command = fail_with(inputs, "raises", "raises")
    assert command.wait() == 2, command.output()
    message = command.output().strip().splitlines()[-1]
    for text in (
        f"reward.sources[1].function={inputs}/failing.py:raises",
        "all 16 calls of step 1",
        "KeyError: 'no such column'",
    ):
        assert text in message
    assert "Traceback" not in command.output() and rows(inputs / "runs" / "raises") == []


@pytest.mark.full
def test_a_reward_function_that_fails_later_leaves_the_checkpoints_saved_before_it(inputs):
    from msrl.trainer.checkpointing.resume import saved_steps

    command = fail_with(
        inputs, "later", "scores_calls", checkpoint={"every_steps": 1, "async": True}
    )
    assert command.wait() == 2, command.output()
    for text in (
        "all 16 calls of step 2",
        "ConnectionError: the judge has gone away",
        "--resume auto",
    ):
        assert text in command.output()
    run = inputs / "runs" / "later"
    assert len(rows(run)) == 1 and saved_steps(run / "checkpoints") == [1]


@pytest.mark.full
def test_a_reward_function_that_always_raises_ends_an_evaluation_too(inputs):
    command = fail_with(inputs, "judged", "raises", eval={"every_steps": 2, "at_start": True})
    assert command.wait() == 2, command.output()
    assert (
        "evaluation of step 0" in command.output()
        and "KeyError: 'no such column'" in command.output()
    )


PRESETS: dict[str, dict[str, Any]] = {
    "gspo": {
        "train": {"updates": {"samples_per_update": 8}},
        "algo": {"mismatch": {"weight": "sequence", "filter": "token"}},
    },
    "dr_grpo": {
        "algo": {
            "kl": {"loss": {"coef": 0.05, "estimator": "full"}},
            "sample_weight": {"length": True},
        }
    },
    "reinforce_pp": {
        "rollout": {"samples_per_prompt": 1, "prompts_per_step": 8, "max_response_tokens": 10},
        "algo": {
            "mask": {"truncated": True},
            "advantage": {"gamma": 0.99},
            "sft": {"coef": 0.01},
            "kl": {
                "reward": {"coef": 0.05, "estimator": "k3"},
                "controller": {"kind": "adaptive", "target": 1e-9, "horizon": 16},
            },
        },
    },
}


@pytest.fixture(scope="module", params=sorted(PRESETS))
def preset_run(request, inputs) -> tuple[str, Path]:
    """Run three steps of a preset."""
    name = request.param
    base, changes = settings(inputs, name, "tied"), PRESETS[name]
    base["train"] = {
        "steps": 3,
        "micro_batch": 2,
        "optimizer": {"lr": 3e-4},
        **changes.get("train", {}),
    }
    base["algo"] = {"preset": name, **changes["algo"]}
    base["rollout"] |= changes.get("rollout", {})
    return name, run_training(inputs, base)


@pytest.mark.full
def test_presets_run_and_their_first_step_agrees_with_their_formula(preset_run):
    name, run = preset_run
    steps, samples = metrics(run), rollouts(run, 1)
    assert len(steps) == 3 and all(np.isfinite(value) for step in steps for value in step.values())
    rewards = np.array([row["reward"] for row in samples])
    advantages = np.array([row["advantage"] for row in samples])
    lengths = np.array([len(row["response_ids"]) for row in samples])
    if name == "gspo":
        groups = rewards.reshape(-1, 4)
        expected = (groups - groups.mean(1, keepdims=True)) / (
            groups.std(1, ddof=1, keepdims=True) + 1e-6
        )
        np.testing.assert_allclose(advantages, expected.ravel(), atol=1e-5)
        assert max(step["train/clip_fraction"] for step in steps) > 0
        assert (
            steps[0]["train/mismatch_weight"] == pytest.approx(1.0, abs=1e-3)
            and steps[0]["train/mismatch_filtered"] == 0
        )
    if name == "dr_grpo":
        weights = 1.5 - (lengths - lengths.min()) / max(lengths.max() - lengths.min(), 1)
        groups = rewards.reshape(-1, 4)
        np.testing.assert_allclose(
            advantages,
            (groups - groups.mean(1, keepdims=True)).ravel() * weights / weights.mean(),
            atol=1e-5,
        )
        assert steps[0]["train/policy_loss"] == pytest.approx(
            -(advantages * lengths).sum() / (16 * 16), abs=1e-6
        )
        assert abs(steps[0]["train/kl"]) < 1e-6 < steps[2]["train/kl"]
    if name == "reinforce_pp":
        is_trained = [row["is_trained"] for row in samples]
        assert is_trained == [row["finish_reason"] == "stop" for row in samples]
        assert steps[0].get("train/masked", 0.0) == pytest.approx(1 - np.mean(is_trained))
        assert (advantages * lengths).sum() == pytest.approx(0, abs=1e-4), "z-scores over tokens"
        assert abs(steps[0]["train/reward_kl"]) < 1e-6 < steps[2]["train/reward_kl"]
        assert [step["train/kl_factor"] for step in steps] == pytest.approx([1.0, 0.9, 0.99]), (
            "no divergence yet, then some"
        )


STATISTICS: dict[str, Any] = {
    "policy_loss": "dppo",
    "advantage": {"estimator": "optimal_token_baseline"},
    "clip": {"low": 0.1, "high": 0.1},
    "top_entropy": 0.4,
    "kl": {"loss": {"coef": 0.05, "bias_correction": True}},
    "mismatch": {
        "weight": "sequence",
        "normalize": True,
        "filter": "sequence-product",
        "low": 0.01,
        "high": 100.0,
        "off_policy_limit": 0.5,
    },
}


@pytest.mark.full
@pytest.mark.parametrize("chunk", [None, 64])
def test_statistics_of_tokens_reach_advantages_and_losses_of_two_tp_ranks(inputs, chunk):
    """A baseline is a weighted mean of the group's rewards, or 0 where one response continues."""
    name = f"statistics-{chunk}"
    base = several_updates(inputs, name, algo=STATISTICS)
    base["train"] |= {"steps": 2, "chunk": chunk}
    run = run_training(inputs, base)
    steps, samples = metrics(run), rollouts(run, 1)
    assert len(steps) == 2 and all(np.isfinite(value) for step in steps for value in step.values())
    assert {"train/off_policy_masked", "train/mismatch_filtered"} <= steps[0].keys()
    assert steps[0]["train/mismatch_weight"] == pytest.approx(1.0, abs=1e-2)
    for start in range(0, len(samples), 4):
        group = samples[start : start + 4]
        totals = [0.0, *(row["reward"] for row in group)]
        baselines = [row["reward"] - row["advantage"] for row in group]  # means over tokens
        assert min(totals) - 1e-5 <= min(baselines) <= max(baselines) <= max(totals) + 1e-5
    assert any(row["advantage"] for row in samples)


@pytest.mark.full
def test_remax_on_a_blend_resumes_with_the_same_prompts_baselines_and_losses(inputs):
    """One response per prompt and a greedy one; the second run starts from step 2 of the first."""
    data = {"blend": {str(inputs / "data"): 3.0, str(inputs / "eval"): 1.0}}
    base = settings(
        inputs, "remax", "tied", data=data, algo={"advantage": {"estimator": "remax"}},
        checkpoint={"every_steps": 2},
    )  # fmt: skip
    base["rollout"]["samples_per_prompt"] = 1
    base["train"] |= {"micro_batch": 1}
    run = run_training(inputs, base)
    num_first = len(PromptDataset(inputs / "data"))
    for step in range(1, STEPS + 1):
        samples = rollouts(run, step)
        assert sum(row["prompt_index"] < num_first for row in samples) == 3 and len(samples) == 4
        distances = [row["reward"] - row["greedy_reward"] for row in samples]
        assert [row["advantage"] for row in samples] == pytest.approx(distances, abs=1e-6)
        mean = np.mean([row["greedy_reward"] for row in samples])
        assert metrics(run)[step - 1]["train/greedy_reward"] == pytest.approx(mean)
    assert_resumes_after_step_2(inputs, run, base)


@pytest.mark.full
def test_a_curriculum_resumes_with_the_same_prompts_and_losses(inputs):
    """Informative prompts are repeated, and refills sample further choices."""
    base = settings(inputs, "curriculum", "tied", checkpoint={"every_steps": 2})
    base["data"]["curriculum"] = {"sampler": "replay", "options": {"share": 0.75}}
    base["rollout"]["filter"] = {"kind": "all_equal", "refill": True, "max_refills": 1}
    run = run_training(inputs, base)
    assert metrics(run)[-1]["curriculum/repeated"] > 0
    assert_resumes_after_step_2(inputs, run, base)


def assert_resumes_after_step_2(inputs: Path, run: Path, base: dict[str, Any]) -> None:
    """Assert that a copy of a run resumes from step 2 with the same metrics and rollouts."""
    resumed = run.with_name(f"{run.name}-resumed")
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / "checkpoints" / "iter_0000004")
    (resumed / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    base["run"]["name"] = resumed.name
    run_training(inputs, base, "--resume", "auto")
    assert metrics(resumed) == metrics(run)
    for step in (3, 4):
        assert rollouts(resumed, step) == rollouts(run, step)


CRITIC: dict[str, Any] = {
    "preset": "ppo",
    "value": {"warmup_steps": 1},
    "kl": {"reward": {"coef": 0.05, "estimator": "k1"}},
    "advantage": {"gamma": 0.98},
}


def with_critic(inputs: Path, name: str, resume: str = "none") -> dict[str, Any]:
    """Return an untied TP 2 configuration with two updates of 8 samples per step and a critic.

    The critic has a separate learning rate and is trained alone in the first step.
    """
    cluster = {
        "platform": "cpu",
        "rpc_timeout_s": 180.0,
        "roles": {"critic": {"optimizer": {"lr": 1e-3, "schedule": "linear"}}},
    }
    train = {
        "steps": 3,
        "micro_batch": 2,
        "optimizer": {"lr": 3e-4},
        "parallel": {"tp": 2},
        "updates": {"samples_per_update": 8},
    }
    checkpoint = {"every_steps": 1, "resume": resume, "async": True, "export_hf": True}
    return settings(
        inputs, name, "untied", algo=CRITIC, cluster=cluster, train=train, checkpoint=checkpoint
    )


@pytest.fixture(scope="module")
def critic_run(inputs) -> Path:
    return run_training(inputs, with_critic(inputs, "ppo"))


@pytest.mark.full
def test_a_critic_of_zeros_makes_the_advantages_of_the_first_step_discounted_returns(critic_run):
    """Values and KL of 0 give A_t = (gamma lambda)^(n - 1 - t) R, whitened over the step's tokens.

    The returns are the same before whitening.
    """
    samples, steps = rollouts(critic_run, 1), metrics(critic_run)
    rows_of_tokens = [
        (0.98 * 0.95) ** np.arange(len(row["response_ids"]))[::-1] * row["reward"]
        for row in samples
    ]
    tokens = np.concatenate(rows_of_tokens)
    expected = [
        ((row - tokens.mean()) / (tokens.std(ddof=1) + 1e-6)).mean() for row in rows_of_tokens
    ]
    np.testing.assert_allclose([row["advantage"] for row in samples], expected, atol=1e-4)
    assert steps[0]["train/value_mean"] == 0 and steps[0][
        "train/value_explained_variance"
    ] == pytest.approx(0)
    assert steps[0]["train/return_mean"] == pytest.approx(tokens.mean(), abs=1e-5)


@pytest.mark.full
def test_the_critic_learns_alone_while_it_warms_up_and_its_learning_rate_is_its_own(
    critic_run, inputs, tmp_path
):
    steps = metrics(critic_run)
    assert "train/policy_loss" not in steps[0] and {
        "train/policy_loss",
        "train/clip_fraction",
    } <= set(steps[1])
    assert [step["train/value_lr"] for step in steps] == pytest.approx(
        [1e-3 * (1 - k / 6) for k in (1, 3, 5)]
    )
    assert [step["train/lr"] for step in steps[1:]] == [3e-4, 3e-4]
    assert (
        all(step["train/value_loss"] > 0 for step in steps) and steps[-1]["train/value_mean"] != 0
    )
    before, first = (
        model_after(critic_run, 0, inputs / "untied", tmp_path),
        model_after(critic_run, 1, inputs / "untied", tmp_path),
    )
    second = model_after(critic_run, 2, inputs / "untied", tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(before.parameters(), first.parameters(), strict=True)
    )
    assert not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.full
@torch.no_grad()
def test_the_exported_critic_is_a_classifier_of_transformers_and_another_run_starts_from_it(
    critic_run, inputs
):
    """The value of a token is the score at the previous position, in msrl and transformers."""
    from transformers import AutoModelForSequenceClassification

    config = with_critic(inputs, "ppo3")
    config["cluster"]["roles"]["critic"]["load"] = str(critic_run / "hf_critic")
    config["algo"] = {**CRITIC, "value": {"warmup_steps": 0}}
    config["train"]["steps"] = 1
    succeed(
        "train-grpo", "-c", str(write_config(inputs / "ppo3.yaml", config)), log=inputs / "ppo3.log"
    )
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        critic_run / "hf_critic", dtype=torch.float32
    )
    assert type(model).__name__ == "Qwen2ForSequenceClassification" and model.config.num_labels == 1
    samples, values = rollouts(inputs / "runs" / "ppo3", 1), []
    for row in samples:
        hidden = model.model(
            torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        ).last_hidden_state
        values.append(model.score(hidden)[0, len(row["prompt_ids"]) - 1 : -1, 0].double().numpy())
    (values_row,) = metrics(inputs / "runs" / "ppo3")
    assert (
        values_row["train/value_mean"] == pytest.approx(np.concatenate(values).mean(), rel=1e-4)
        and abs(values_row["train/value_mean"]) > 1e-3
    )
    estimated = [
        _gae_by_a_loop(row["reward"], mine, 0.98, 0.95)
        for row, mine in zip(samples, values, strict=True)
    ]
    tokens = np.concatenate(estimated)
    expected = [((mine - tokens.mean()) / (tokens.std(ddof=1) + 1e-6)).mean() for mine in estimated]
    np.testing.assert_allclose([row["advantage"] for row in samples], expected, atol=1e-4)


def _gae_by_a_loop(reward: float, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Return advantages; there is no KL penalty because the reference is still the policy."""
    advantages, after, following = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
        reward_t = reward if t == len(values) - 1 else 0.0
        after = reward_t + gamma * following - values[t] + gamma * lam * after
        advantages[t], following = after, values[t]
    return advantages


@pytest.mark.full
def test_a_run_with_a_critic_resumes_bitwise_equal_and_only_with_the_critic(critic_run, inputs):
    first = str(critic_run / "checkpoints" / "iter_0000001")
    file = write_config(inputs / "ppo2.yaml", with_critic(inputs, "ppo2", first))
    command = Command(
        "train-grpo",
        "-c",
        str(file),
        "--set",
        "algo.preset=grpo",
        "--set",
        "algo.value.warmup_steps=0",
        log=inputs / "no.log",
    )
    assert command.wait() == 2 and "cluster.roles.critic.optimizer.lr=0.001: " in command.output()
    succeed("train-grpo", "-c", str(file), log=inputs / "ppo2.log")
    assert metrics(inputs / "runs" / "ppo2") == metrics(critic_run)[1:]
    for step in (2, 3):
        assert rollouts(inputs / "runs" / "ppo2", step) == rollouts(critic_run, step)


@pytest.mark.full
def test_a_corrupted_bucket_ends_the_run_with_the_name_of_its_tensor(inputs):
    """Overwrite bytes in the shared memory of a training rank while it sends weights."""
    config = settings(inputs, "corrupted", "untied")
    config["train"]["steps"] = 100
    config["rollout"]["weights"] = {"transfer": "shared_memory", "verify": "every"}
    file, tmp = write_config(inputs / "corrupted.yaml", config), make_tmp()
    command = Command("train-grpo", "-c", str(file), log=inputs / "corrupted.log", tmp=tmp)
    try:
        command.when(lambda: bool(weight_memory(command.process.pid)))
        overwrite_while_running(command, weight_memory(command.process.pid)[0])
    finally:
        if command.process.poll() is None:
            command.kill()
    assert command.wait() == 1
    assert_mentions(command.output(), "embed_tokens", "engine 0", "differs")
    assert "Traceback" not in command.output()
    assert not [name for name in files_in(tmp) if "weights" in name]


def overwrite_while_running(command: Command, memory: Path) -> None:
    """Overwrite bytes near the start of the first bucket until the command ends."""
    deadline = time.monotonic() + LIMIT_S
    with memory.open("r+b", buffering=0) as buckets:
        while command.process.poll() is None and time.monotonic() < deadline:
            for _ in range(1000):
                buckets.seek(4096)
                buckets.write(b"\x5a" * 16)
            time.sleep(0.0005)


def weight_memory(pid: int) -> list[Path]:
    """Return the memory of the buckets among the open files of a run's processes."""
    files = [path for child in children(pid) for path in Path(f"/proc/{child}/fd").glob("*")]
    return [path for path in files if "memfd:msrl-weights" in link_target(path)]


def link_target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # closed, or the process has ended
        return ""


@pytest.mark.full
def test_prompts_from_rows_give_the_numbers_of_preprocessed_prompts(inputs, whole, monkeypatch):
    monkeypatch.setenv("MSRL_DATA_CACHE", str(inputs / "cache"))
    changes = several_updates(inputs, "rows", checkpoint={"every_steps": 1})
    changes["data"] = {"train": str(inputs / "data.jsonl"), "eval": str(inputs / "eval.jsonl")}
    changes["preprocess"] = {"handler": "gsm8k", "template": "qwen"}
    changes["train"] = {**changes["train"], "steps": 1}
    file = write_config(inputs / "rows.yaml", changes)
    succeed("train-grpo", "-c", str(file), log=inputs / "rows.log")
    run = inputs / "runs" / "rows"
    [first], expected = metrics(run), metrics(whole)[0]
    kinds = ("train/", "reward/", "rollout/")
    names = [name for name in expected if name.startswith(kinds) and "_per_s" not in name]
    assert names and {n: first[n] for n in names} == {n: expected[n] for n in names}
    records = json.loads((run / "data.json").read_text())
    assert set(records) == {str(inputs / "data.jsonl"), str(inputs / "eval.jsonl")}
