"""Benchmarks on the real model of examples/laptop: SmolLM2-135M-Instruct in bfloat16 on CPU.

Their inputs are in the folder `laptop` of the inputs, under the names that the peers' scripts read.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.cases import (
    ROOT,
    Bench,
    Case,
    Measurement,
    Sample,
    peer_step,
    prepare_grpo,
    prepare_sft,
    sft_ours,
    train,
)
from benchmarks.measure import BenchError, quiet_environment, timed

FOLDER = "laptop"
PEERS = ROOT / "benchmarks" / "peers"
NUM_PROMPTS, NUM_TOKENS = 512, 64
GRPO = (
    "model.dtype=bfloat16",
    "rollout.max_prompt_tokens=256",
    "train.optimizer.lr=1e-6",
    "train.max_tokens_per_micro_batch=2048",
)


def on_laptop_inputs(measure: Measurement) -> Measurement:
    """Return a measurement whose inputs are those of the real model."""
    return lambda bench: measure(replace(bench, inputs=bench.inputs / FOLDER))


def prepare(bench: Bench) -> None:
    """Download the model and write and preprocess the rows, if they are missing."""
    folder = bench.inputs / FOLDER
    laptop = replace(bench, inputs=folder)
    if not (folder / "prompts.jsonl").exists():
        script = (ROOT / "examples" / "laptop" / "run.py", "--model-only", "--out", folder)
        if subprocess.run([sys.executable, *script], check=False).returncode:
            raise BenchError("the model of examples/laptop could not be created; see above")
        (folder / "tiny").symlink_to("model")
        write_rows(bench.inputs / "sft.jsonl", folder)
    laptop.work.mkdir(exist_ok=True)
    prepare_sft(laptop)
    prepare_grpo(laptop)


def write_rows(source: Path, folder: Path) -> None:
    """Write the questions of GSM8K as examples, as prompts of GRPO, and as prompts of generate."""
    lines = source.read_text(encoding="utf-8").splitlines()
    dialogues = [json.loads(line)["messages"] for line in lines]
    answers = [answer["content"].rpartition("####")[2].strip() for _, answer in dialogues]
    prompts = [
        {"prompt": [question], "answer": answer}
        for (question, _), answer in zip(dialogues, answers, strict=True)
    ]
    files = {
        "sft": [{"messages": messages} for messages in dialogues],
        "grpo": prompts[:NUM_PROMPTS],
        "prompts": [{"prompt": row["prompt"]} for row in prompts[:NUM_PROMPTS]],
    }
    for name, rows in files.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def grpo_ours(prompts: int, tokens: int, steps: int) -> Measurement:
    """Train on 8 samples of each prompt; the first step, which compiles kernels, is not counted."""
    sizes = (
        f"rollout.prompts_per_step={prompts}",
        "rollout.samples_per_prompt=8",
        f"rollout.max_response_tokens={tokens}",
        f"train.steps={steps}",
    )
    return lambda bench: train(bench, "train-grpo", "grpo", *GRPO, *sizes, settle=1)


def driver_ours(bench: Bench) -> Sample:
    """Return the seconds of a step of 512 samples in which neither engines nor ranks compute."""
    sample = grpo_ours(64, 16, 3)(bench)
    stages = ("rollout", "logprobs", "update", "weights")
    others = sample.value - sum(sample.more.get(f"{stage} s", 0.0) for stage in stages)
    return Sample(others, {"step s": sample.value, **sample.more})


def driver_step(bench: Bench) -> Sample:
    """Return the seconds of the step that `driver_ours` has measured."""
    from msrl.tracking.metrics import read_metrics

    (*_, last) = read_metrics(bench.work / "runs" / "grpo")
    return Sample(last.seconds["step"])


def generate_ours(bench: Bench) -> Sample:
    """Return the tokens per second of `msrl generate`, without the start of the engine."""
    output = bench.work / "generated.jsonl"
    output.unlink(missing_ok=True)
    files = ("--model", bench.inputs / "tiny", "--input", bench.inputs / "prompts.jsonl")
    options = ("--dtype", "bfloat16", "--max-tokens", f"{NUM_TOKENS}", "--temperature", "0")
    done = bench.msrl("generate", *files, "--output", output, *options)
    summary = re.search(r"(\d+) tokens in ([\d.]+) s", done.stderr)
    assert summary is not None, done.stderr
    return Sample(float(summary[1]) / float(summary[2]), {"whole run s": done.seconds})


def generate_vllm(bench: Bench) -> Sample:
    """Return the tokens per second of `vllm.LLM.generate` in the same environment."""
    command = [sys.executable, PEERS / "vllm_offline.py", bench.inputs, f"{NUM_TOKENS}"]
    done = timed(command, environment=quiet_environment(), cwd=bench.inputs)
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    return Sample(figures["tokens_per_s"], {"whole run s": done.seconds})


CASES = tuple(
    replace(
        case,
        ours=on_laptop_inputs(case.ours),
        peers={name: on_laptop_inputs(peer) for name, peer in case.peers.items()},
    )
    for case in (
        Case(
            "laptop-sft",
            "SFT step of SmolLM2-135M on GSM8K, packed 4 x 512, bf16",
            "s/step",
            sft_ours("bfloat16"),
            {
                "raw_hf": peer_step("raw_hf.py", "--bf16"),
                "trl_sft": peer_step("trl_sft.py", "--bf16"),
            },
            {"raw_hf": 0.6, "trl_sft": 0.25},
            prepare,
        ),
        Case(
            "laptop-grpo",
            "GRPO step of SmolLM2-135M on GSM8K, 8 prompts x 8 samples x 128 tokens, bf16",
            "s/step",
            grpo_ours(8, 128, 4),
            {"trl_grpo": peer_step(str(PEERS / "trl_laptop_grpo.py"))},
            {"trl_grpo": 0.45},
            prepare,
        ),
        Case(
            "laptop-generate",
            f"`msrl generate` with SmolLM2-135M, {NUM_PROMPTS} prompts x {NUM_TOKENS} tokens, bf16",
            "tokens/s",
            generate_ours,
            {"vllm": generate_vllm},
            {"vllm": 0.95},
            prepare,
            higher_is_better=True,
        ),
        Case(
            "laptop-driver",
            "driver outside of engines and ranks, GRPO step of SmolLM2-135M with 512 samples",
            "s/step",
            driver_ours,
            {"step": driver_step},
            {"step": 0.03},
            prepare,
        ),
    )
)
