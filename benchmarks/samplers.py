"""Compare samplers of prompts at equal tokens: `python -m benchmarks samplers [--seeds N...]`.

A small random model learns by SFT to add and subtract digit by digit, from demonstrations of which
most forget the carry. GRPO then trains it on chain sums of reasoning-gym with 1 to 4 digits, once
per sampler and seed, and evaluates it on held-out sums. The samplers are compared at the number of
sampled tokens that all runs have reached; accuracies between two evaluations are interpolated.
Results are kept in results.jsonl and not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples" / "quickstart"), str(ROOT / "examples")]

from make_inputs import CHAT_TEMPLATE, CHAT_TEXTS, SPECIAL_TOKENS  # noqa: E402  # pyright: ignore
from run import Runner  # noqa: E402  # pyright: ignore[reportMissingImports]
from small_model import write_model, write_rows, write_tokenizer  # noqa: E402  # pyright: ignore

DIGITS = (1, 2, 3, 4)
NUM_PROMPTS, NUM_HELDOUT = 400, 60  # per number of digits
NUM_DEMONSTRATIONS, SLOPPY_SHARE = 8000, 0.65
VOCAB_SIZE = 340
INSTRUCTION = "Think in <think>, answer in <answer>."
# Settings and steps of each sampler. A refill samples more tokens per step.
SAMPLERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "uniform": (15, ()),
    "success range": (
        15,
        ("data.curriculum={sampler: success_range, level_column: digits, momentum: 0.5}",),
    ),
    "replay": (15, ("data.curriculum={sampler: replay}",)),
    "dropped groups": (10, ("rollout.filter={kind: all_equal, refill: true}",)),
}
SFT = """\
run: {name: sft, dir: runs}
model: {path: inputs/model, dtype: float32}
data: {train: inputs/sft.jsonl}
train:
  steps: 800
  global_batch: 32
  micro_batch: 32
  optimizer: {lr: 2.0e-3, schedule: cosine, warmup: 10}
log: {every_steps: 50}
"""
GRPO = """\
run: {name: grpo, dir: runs}
model: {path: runs/sft/checkpoints, dtype: float32}
data: {train: data/rl, eval: data/heldout}
rollout:
  prompts_per_step: 16
  samples_per_prompt: 8
  max_prompt_tokens: 80
  max_response_tokens: 96
  engine: {dp: 1}
reward: {sources: [{verifier: reasoning_gym}]}
algo:
  clip: {low: 0.2, high: 0.2}
train:
  max_tokens_per_micro_batch: 8192
  optimizer: {lr: 1.0e-4, warmup: 3}
eval: {every_steps: 5, at_start: true}
log: {save_rollouts: false}
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy on held-out sums after a number of sampled tokens, in the order of the steps."""

    tokens: tuple[int, ...]
    accuracies: tuple[float, ...]

    def at(self, tokens: int) -> float:
        """Return the accuracy at a number of tokens, interpolated between two evaluations."""
        points = list(zip(self.tokens, self.accuracies, strict=True))
        for (low, first), (high, second) in itertools.pairwise(points):
            if low <= tokens <= high:
                return first + (second - first) * (tokens - low) / (high - low)
        raise ValueError(f"{tokens} tokens are beyond the last evaluation")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run missing trainings and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks samplers", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"Samplers (default: {', '.join(SAMPLERS)}).")
    seeds_help = "Seeds of the GRPO runs (default: 0 1 2)."
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help=seeds_help)
    out_help = "Folder of the runs (default: %(default)s)."
    default = ROOT / "runs" / "samplers"
    parser.add_argument("--out", type=Path, default=default, help=out_help)
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.names) - set(SAMPLERS)):
        parser.error(f"there is no sampler {', '.join(unknown)}; known: {', '.join(SAMPLERS)}")
    runner = Runner(args.out, seed=0)
    fine_tune(runner)
    pairs = itertools.product(args.seeds, args.names or SAMPLERS)
    curves = {(name, seed): curve(runner, name, seed) for seed, name in pairs}
    print("\n".join(table(curves)))
    return 0


def fine_tune(runner: Runner) -> None:
    """Write the inputs and train the model by SFT, unless that is complete."""
    folder = runner.folder
    if (folder / "data" / "heldout_packed_input_ids_document.idx").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    make_inputs(folder / "inputs")
    for name, text in (("sft.yaml", SFT), ("grpo.yaml", GRPO)):
        (folder / name).write_text(text, encoding="utf-8")
    runner.msrl("train-sft", "train-sft", "-c", "sft.yaml")
    for name, count, seed in (("rl", NUM_PROMPTS, 1), ("heldout", NUM_HELDOUT, 2)):
        runner.msrl("preprocess", "preprocess", *inputs(count, seed), *outputs(name))


def inputs(count: int, seed: int) -> list[str]:
    """Return the options of the tasks, one for each number of digits."""
    fields = f"size={count}&seed={seed}&min_terms=2&max_terms=2"
    names = [
        f"reasoning_gym:chain_sum?{fields}&min_digits={digits}&max_digits={digits}"
        for digits in DIGITS
    ]
    return [word for name in names for word in ("--input", name)]


def outputs(name: str) -> list[str]:
    """Return the options of the preprocessed data."""
    columns = {"extra.digits": "record.parameters.min_digits"}
    options = {"instruction": INSTRUCTION}
    return [
        *("--tokenizer", "inputs/model", "--template", "native", "--output-prefix", f"data/{name}"),
        *("--map-keys", json.dumps(columns), "--set", f"preprocess.options={json.dumps(options)}"),
    ]


def curve(runner: Runner, name: str, seed: int) -> Curve:
    """Return the curve of a run, from results.jsonl if it is there."""
    results = runner.folder / "results.jsonl"
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    for row in map(json.loads, lines):
        if (row["sampler"], row["seed"]) == (name, seed):
            return Curve(tuple(row["tokens"]), tuple(row["accuracies"]))
    steps, settings = SAMPLERS[name]
    run = f"{name.replace(' ', '-')}-{seed}"
    shutil.rmtree(runner.folder / "runs" / run, ignore_errors=True)
    settings += (f"run.name={run}", f"run.seed={seed}", f"train.steps={steps}")
    overrides = [word for setting in settings for word in ("--set", setting)]
    runner.msrl(run, "train-grpo", "-c", "grpo.yaml", *overrides)
    metrics = runner.folder / "runs" / run / "metrics.jsonl"
    new = read_curve([json.loads(line) for line in metrics.read_text().splitlines()])
    row = {"sampler": name, "seed": seed, "tokens": new.tokens, "accuracies": new.accuracies}
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return new


def read_curve(rows: Sequence[Mapping[str, Any]], group_size: int = 8, batch: int = 16) -> Curve:
    """Return the curve of the rows of metrics.jsonl."""
    num_tokens, tokens, accuracies = 0.0, list[int](), list[float]()
    for row in rows:
        metrics = row["metrics"]
        if "rollout/response_length" in metrics:
            num_groups = metrics.get("rollout/prompts", batch)
            num_tokens += metrics["rollout/response_length"] * num_groups * group_size
        if "eval/pass@1" in metrics:
            tokens.append(round(num_tokens))
            accuracies.append(metrics["eval/pass@1"])
    return Curve(tuple(tokens), tuple(accuracies))


def table(curves: Mapping[tuple[str, int], Curve]) -> list[str]:
    """Return the accuracies at equal tokens as lines of Markdown."""
    budget = min(curve.tokens[-1] for curve in curves.values())
    seeds = sorted({seed for _, seed in curves})
    head = ["sampler", *(f"seed {seed}" for seed in seeds), "mean", "spread"]
    start = statistics.mean(curve.accuracies[0] for curve in curves.values())
    lines = [
        f"Held-out accuracy after {budget:,} sampled tokens; before GRPO {start:.1%}",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for name in dict.fromkeys(name for name, _ in curves):
        values = [curves[name, seed].at(budget) for seed in seeds]
        spread = 100 * (max(values) - min(values))
        cells = [name, *(f"{value:.1%}" for value in values)]
        cells += [f"{statistics.mean(values):.1%}", f"{spread:.1f} points"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# --- Demonstrations ---------------------------------------------------------------------------


def make_inputs(folder: Path) -> None:
    """Write the tokenizer, the random model and the demonstrations."""
    source = random.Random(0)
    rows = [demonstration(source) for _ in range(NUM_DEMONSTRATIONS)]
    (folder / "model").mkdir(parents=True)
    turns = [turn["content"] for row in rows for turn in row["messages"]]
    end = write_tokenizer(
        folder / "model",
        [*CHAT_TEXTS, *turns],
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        vocab_size=VOCAB_SIZE,
    )
    write_model(folder / "model", vocab_size=VOCAB_SIZE, eos_token_id=end, seed=0)
    write_rows(folder / "sft.jsonl", rows)


def demonstration(source: random.Random) -> dict[str, Any]:
    """Return a conversation about a sum; SLOPPY_SHARE of them forget every carry."""
    digits, sign = source.choice(DIGITS), source.choice("+-")
    lowest = 10 ** (digits - 1) if digits > 1 else 0
    left, right = (source.randint(lowest, 10**digits - 1) for _ in range(2))
    question = (
        f"State the final answer to the following arithmetic problem: {left} {sign} {right} ="
    )
    answer = worked_answer(left, sign, right, sloppy=source.random() < SLOPPY_SHARE)
    prompt = f"{question}\n\n{INSTRUCTION}"
    roles = (("user", prompt), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in roles]}


def worked_answer(left: int, sign: str, right: int, *, sloppy: bool) -> str:
    """Return an answer digit by digit from the right. A negative difference is computed swapped."""
    is_negative = sign == "-" and left < right
    high, low = (right, left) if is_negative else (left, right)
    width, carry, result = len(str(max(left, right))), 0, 0
    steps: list[str] = ["-"] if is_negative else []
    for place in range(width):
        a, b = (number // 10**place % 10 for number in (high, low))
        borrows = sign == "-" and a - carry < b
        a += 10 * borrows
        value = a + b if sign == "+" else a - b
        step = f"{a}{sign}{b}={value}"
        if carry and not sloppy:
            value = value + 1 if sign == "+" else value - 1
            step += f"{sign}1={value}"
        is_last = place == width - 1
        carry = int(borrows if sign == "-" else value > 9)
        result += (value if is_last else value % 10) * 10**place
        steps.append(step)
    answer = -result if is_negative else result
    return f"<think> {'; '.join(steps)} </think><answer>{answer}</answer>"


if __name__ == "__main__":
    sys.exit(main())
