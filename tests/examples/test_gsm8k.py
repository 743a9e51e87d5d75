"""Commands of examples/gsm8k on the real GSM8K, with Qwen2.5's tokenizer and vocabulary."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from msrl.config.sections.rollout import EngineConfig
from msrl.data.dataset import PromptDataset, SftDataset
from msrl.platforms import get
from msrl.rewards.verifiers import math_17k_acc
from msrl.rollout.engine import EngineSettings
from msrl.rollout.vllm import VllmEngine
from support import assert_mentions, shared_data
from test_examples import EXAMPLES, readme_commands

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]
README = EXAMPLES / "gsm8k" / "README.md"
LIMIT_S = 900  # per command, for a slow machine under load
NUM_TRAIN, NUM_TEST = 7473, 1319
MAX_DIFFERENCE = 1e-4
RUNS = "runs/gsm8k-laptop"
# Start of the assistant's turn.
ASSISTANT_START = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with the examples and GSM8K's files under their original names."""
    folder = tmp_path_factory.mktemp("gsm8k")
    (folder / "examples").symlink_to(EXAMPLES)
    (folder / "gsm8k").mkdir()
    for name in ("train", "test"):
        (folder / "gsm8k" / f"{name}.jsonl").symlink_to(shared_data("math", f"gsm8k_{name}.jsonl"))
    return folder


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, str]:
    """Run the README's commands for the laptop and return each one's output by `COMMAND [FILE]`."""
    variables = {"QWEN": str(shared_data("tokenizers", "qwen2.5-0.5b-instruct")), "GSM8K": "gsm8k"}
    environment = {
        **os.environ,
        **variables,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    environment.pop("OMP_NUM_THREADS", None)  # users do not set it, but their machine is quiet
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    printed: dict[str, str] = {}
    for line in readme_commands(README, "On a laptop"):
        words = shlex.split(line)
        started = time.perf_counter()
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env=environment,
            timeout=LIMIT_S,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        print(f"{time.perf_counter() - started:6.1f} s  {line}")
        file = f" {Path(words[words.index('-c') + 1]).stem}" if "-c" in words else ""
        printed[" ".join(words[1 : 3 if words[1] == "convert-ckpt" else 2]) + file] = (
            done.stdout + done.stderr
        )
    return printed


@pytest.fixture(scope="module")
def model(folder: Path, outputs: dict[str, str]):
    """Return the exported folder as transformers model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder / RUNS / "hf", dtype=torch.float32, local_files_only=True
    ).eval()


def read_rows(name: str) -> list[dict[str, str]]:
    return [
        json.loads(line)
        for line in shared_data("math", f"gsm8k_{name}.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]


def read_metrics(folder: Path, run: str) -> list[dict[str, float]]:
    lines = (folder / RUNS / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def read_rollouts(folder: Path) -> list[dict]:
    files = sorted((folder / RUNS / "grpo" / "rollouts").glob("step_*.jsonl"))
    assert len(files) == 3
    return [
        json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()
    ]


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data("tokenizers", "qwen2.5-0.5b-instruct"))


def test_every_problem_becomes_a_demonstration_in_packed_rows(
    folder: Path, outputs: dict[str, str]
):
    data = SftDataset(folder / "runs/gsm8k/data/sft")
    assert data.manifest is not None
    assert (data.manifest.num_examples, data.manifest.dropped, data.manifest.vocab_size) == (
        NUM_TRAIN,
        {},
        151665,
    )
    assert (
        "7,473 examples" in outputs["preprocess preprocess_sft"]
        and "dropped: none" in outputs["preprocess preprocess_sft"]
    )
    assert all(
        sum(len(example.token_ids) for example in data[row]) <= 1024 for row in range(len(data))
    )
    examples = [example for row in range(len(data)) for example in data[row]]
    assert len(examples) == NUM_TRAIN
    hf, questions = tokenizer(), {row["question"]: row["answer"] for row in read_rows("train")}
    for example in examples[::500]:
        prompt, _, answer = hf.decode(example.token_ids).partition(ASSISTANT_START)
        question = prompt.rpartition("\\boxed{}.\n")[2]
        assert answer.endswith("</answer><|im_end|>\n") and "<<" not in answer
        trained_text = hf.decode(example.token_ids[np.asarray(example.loss_mask, dtype=bool)])
        assert trained_text == answer.removesuffix("\n")
        assert (
            math_17k_acc.score(
                trained_text.removesuffix("<|im_end|>"), questions[question].rpartition("#### ")[2]
            )
            == 1.0
        )


@pytest.mark.parametrize(
    ("prefix", "name", "count"), [("rl", "train", NUM_TRAIN), ("heldout", "test", NUM_TEST)]
)
def test_every_problem_becomes_a_prompt_with_its_answer(
    folder: Path, outputs: dict[str, str], prefix: str, name: str, count: int
):
    data = PromptDataset(folder / "runs/gsm8k/data" / prefix)
    assert data.manifest is not None and data.manifest.dropped == {} and len(data) == count
    hf = tokenizer()
    for index, row in enumerate(read_rows(name)):
        assert data[index].answer == row["answer"].rpartition("#### ")[2].replace(",", "")
        if index % 100 == 0:
            assert hf.decode(data[index].token_ids).endswith(row["question"] + ASSISTANT_START)


def test_both_conversions_are_verified(outputs: dict[str, str]):
    for output in (outputs["convert-ckpt hf2mcore convert"], outputs["convert-ckpt mcore2hf"]):
        assert_mentions(output, "26 tensors", "round trip")
        table = " ".join(output.split())  # its lines have at most 80 columns
        assert re.search(r"transformers, Megatron: .* positions x 151,936", table)
        assert "(limit 1e-04)" in table


def test_twenty_sft_steps_lower_the_loss_from_that_of_uniform_predictions(
    folder: Path, outputs: dict[str, str]
):
    losses = [metrics["train/loss"] for metrics in read_metrics(folder, "sft")]
    assert len(losses) == 20 and "step 20/20" in outputs["train-sft sft"]
    assert abs(losses[0] - math.log(151936)) < 0.2  # uniform predictions
    assert np.mean(losses[-3:]) < losses[0] - 1.0
    assert (
        folder / RUNS / "sft/checkpoints/iter_0000020/mp_rank_01/model_optim_rng.pt"
    ).is_file()  # TP 2


def test_the_engine_samples_with_the_weights_of_every_grpo_update(
    folder: Path, outputs: dict[str, str]
):
    reports = read_metrics(folder, "grpo")
    assert len(reports) == 3
    for line in (
        "Starting 2 training ranks and 1 engine on cpu",
        "started in",
        "step 3/3",
        f"report: {RUNS}/grpo/report.md",
    ):
        assert line in outputs["train-grpo grpo"]
    for report in reports:
        assert all(math.isfinite(value) for value in report.values())
        assert report["train/grad_norm"] > 0 and 0 < report["rollout/response_length"] <= 24
        assert report["reward/mean"] == pytest.approx(
            report["reward/math_17k_acc"] + 0.1 * report["reward/strict_format"]
        )
        # The engine's weights are those before the first of the step's two updates.
        assert report["train/sampler_logprob_difference"] < MAX_DIFFERENCE
        # From the second update: in the first one of step 1 the policy equals the reference.
        assert report["train/kl"] > 0
    assert "eval/reward" in reports[2]


def test_rollouts_have_the_prompts_and_answers_of_their_problems(
    folder: Path, outputs: dict[str, str]
):
    rollouts, rows = read_rollouts(folder), read_rows("train")
    assert len(rollouts) == 3 * 16 and {row["policy_version"] for row in rollouts} == {0, 1, 2}
    for row in rollouts:
        problem = rows[row["prompt_index"]]
        assert row["prompt"].endswith(problem["question"] + ASSISTANT_START)
        assert row["answer"] == problem["answer"].rpartition("#### ")[2].replace(",", "")


@torch.no_grad()
def test_the_exported_folder_has_the_same_logprobs_in_transformers_and_vllm(
    folder: Path, outputs: dict[str, str], model
):
    hf_dir = folder / RUNS / "hf"
    data = PromptDataset(folder / "runs/gsm8k/data/heldout")
    draw = torch.Generator().manual_seed(0)
    rows = [data[index].token_ids for index in range(4)]
    # Token ids of the full vocabulary, including padding rows.
    rows.append(torch.randint(151936, (64,), generator=draw).numpy())
    engine = VllmEngine(
        EngineSettings(
            hf_dir,
            dtype="float32",
            engine=EngineConfig(max_model_len=512, max_num_seqs=8, kv_cache_bytes=1 << 26),
        ),
        get("cpu"),
    )
    try:
        logprobs_by_row = engine.score(rows)
    finally:
        engine.close()
    for ids, logprobs in zip(rows, logprobs_by_row, strict=True):
        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        expected = (
            model(tokens[None])
            .logits[0, :-1]
            .double()
            .log_softmax(-1)
            .gather(1, tokens[1:, None])[:, 0]
            .numpy()
        )
        assert np.abs(logprobs - expected).max() < MAX_DIFFERENCE


@torch.no_grad()
def test_all_weights_of_the_exported_model_have_changed(
    folder: Path, outputs: dict[str, str], model
):
    from transformers import AutoModelForCausalLM

    initial = AutoModelForCausalLM.from_pretrained(
        folder / RUNS / "model", dtype=torch.float32, local_files_only=True
    )
    assert model.config.tie_word_embeddings and model.config.vocab_size == 151936
    for (name, new), old in zip(model.named_parameters(), initial.parameters(), strict=True):
        assert not torch.equal(new, old), name
