"""Accuracy and speed of the verifiers.

Usage: `python -m benchmarks.rewards [--data FOLDER] [--workers N]`. Accuracy compares the true
answer of every problem with itself, and with that of another problem drawn at random (except pairs
of identical text), and counts misjudged variants of true answers (`answer_variants.py`). Speed
scores 10,000 plain numeric responses, without and with responses among them that hang, crash or
raise. No score may be lost.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.answer_variants import Variant, variants
from msrl.rewards.score import Scorer, Scores, Source
from msrl.types import Completion, Prompt, RolloutGroup

NUM_SCORINGS = 10_000
NUM_VARIANTS = 10_000
FAILURES = ("timeout", "crash", "error")
UNRELIABLE = """
import os, signal, time
from msrl.rewards.verifiers.acc import score

def unreliable(response, answer):
    if "HANG" in response:
        time.sleep(3600)
    if "CRASH" in response:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "RAISE" in response:
        raise ValueError(response)
    return score(response, answer)
"""
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewards", description=__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="Folder of the real inputs with the subfolder math/.",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="Number of scoring processes (default: 2)."
    )
    args = parser.parse_args()
    print("| answers | verifier | problems | same answer | other answer | identical pairs |")
    print("|---|---|---|---|---|---|")
    for name, verifier, answers in data_sets(args.data / "math"):
        print(agreement_row(name, verifier, answers, args.workers))
    print()
    print("| variants | wrong ones accepted | right ones rejected |")
    print("|---|---|---|")
    print(variants_row(args.data / "math", args.workers))
    print()
    print("| 10,000 plain numbers | scores per second | lost | timeouts | crashes | errors |")
    print("|---|---|---|---|---|---|")
    for num_failures in (0, 10):
        print(speed_row(args.workers, num_failures))
    return 0


def data_sets(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name of a dataset, the verifier and the true answers."""
    math = read_answers(folder / "math500.jsonl")
    yield "MATH-500", "math_17k_acc", math
    yield "MATH-500", "math_verify_reward", math
    train, test = folder / "gsm8k_train.jsonl", folder / "gsm8k_test.jsonl"
    gsm8k = read_answers(train) + read_answers(test)
    yield "GSM8K", "acc", [text.rpartition("#### ")[2] for text in gsm8k]
    dapo = dapo_answers(folder / "dapo_math_17k.parquet")
    yield "DAPO-17k", "math_17k_acc", dapo
    yield "DAPO-17k", "acc_for_dapo", dapo


def read_answers(file: Path) -> list[str]:
    """Return the column `answer` of a JSONL file."""
    return [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]


def dapo_answers(file: Path) -> list[str]:
    """Return the ground truths of a Parquet file in DAPO's format."""
    from pyarrow import parquet

    rows = parquet.read_table(file, columns=["reward_model"])["reward_model"].to_pylist()
    return [row["ground_truth"] for row in rows]


def all_true_answers(folder: Path) -> list[str]:
    """Return the true answers of MATH-500, GSM8K, DAPO-17k and DeepScaleR."""
    named = {name: answers for name, _, answers in data_sets(folder)}
    named["DeepScaleR"] = deepscaler_answers(folder / "deepscaler_1209.parquet")
    return [answer for answers in named.values() for answer in answers]


def deepscaler_answers(file: Path) -> list[str]:
    """Return the ground truths of a Parquet file whose rows may be Python literals."""
    from pyarrow import parquet

    rows = parquet.read_table(file, columns=["reward_model"])["reward_model"].to_pylist()
    records = [ast.literal_eval(row) if isinstance(row, str) else row for row in rows]
    return [record["ground_truth"] for record in records]


def variants_row(folder: Path, num_workers: int) -> str:
    """Return the numbers of wrong variants that are accepted and right ones that are rejected."""
    sample = variants(all_true_answers(folder), NUM_VARIANTS)
    mistakes = misjudged_variants(sample, num_workers)
    num_rejects = sum(variant.is_right for variant in mistakes)
    return f"| {len(sample)} | {len(mistakes) - num_rejects} | {num_rejects} |"


def misjudged_variants(sample: Sequence[Variant], num_workers: int) -> list[Variant]:
    """Return the variants to which `math_17k_acc` gives the wrong score."""
    groups = [
        group(variant.truth, [variant.response], number) for number, variant in enumerate(sample)
    ]
    with Scorer([Source(verifier="math_17k_acc", timeout_s=30.0)], num_workers) as scorer:
        scores = scorer.score(groups)
    return [
        variant
        for variant, scored in zip(sample, scores.groups, strict=True)
        if (scored.rewards[0].total == 1.0) is not variant.is_right
    ]


def agreement_row(name: str, verifier: str, answers: Sequence[str], num_workers: int) -> str:
    """Return the shares of accepted answers: the same one, and different ones of other problems."""
    pairs = other_answers(answers)
    different = [(own, other) for own, other in pairs if own != other]
    with Scorer([Source(verifier=verifier, timeout_s=30.0)], num_workers) as scorer:
        same_share = accepted_share(scorer, verifier, [(own, own) for own in answers])
        other_share = accepted_share(scorer, verifier, different)
    num_identical = len(pairs) - len(different)
    shares = f"{same_share:.2%} | {other_share:.2%}"
    return f"| {name} | `{verifier}` | {len(answers)} | {shares} | {num_identical} |"


def accepted_share(scorer: Scorer, verifier: str, pairs: Sequence[tuple[str, str]]) -> float:
    """Return the share of (ground truth, answer) pairs with the full score."""
    groups = []
    for number, (true, claimed) in enumerate(pairs):
        groups.append(group(true, [response(verifier, claimed)], number))
    return num_right(scorer.score(groups)) / len(pairs)


def other_answers(answers: Sequence[str], seed: int = 0) -> list[tuple[str, str]]:
    """Return every answer paired with that of another problem, the next one in a random order."""
    order = list(range(len(answers)))
    random.Random(seed).shuffle(order)
    shifted = order[1:] + order[:1]
    return [(answers[a], answers[b]) for a, b in zip(order, shifted, strict=True)]


def response(verifier: str, answer: str) -> str:
    """Return a response with `answer` in the format of the verifier."""
    if verifier == "acc_for_dapo":
        return f"so it is\nAnswer: {answer}"
    return f"<think> so it is </think><answer> \\boxed{{{answer}}} </answer>"


def speed_row(num_workers: int, num_failures: int) -> str:
    """Return the scores per second with `num_failures` failing responses of each kind."""
    texts = speed_texts(num_failures)
    groups = [group("132", texts[n : n + 8], n) for n in range(0, NUM_SCORINGS, 8)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "unreliable.py"
        file.write_text(UNRELIABLE, encoding="utf-8")
        source = Source(function=f"{file}:unreliable", timeout_s=1.0, wrong=-0.5)
        with Scorer([source], num_workers) as scorer:
            scorer.score([group("1", ["\\boxed{1}"] * 64, 0)])  # starts the processes
            start = time.perf_counter()
            scores = scorer.score(groups)
            seconds = time.perf_counter() - start
    num_lost = NUM_SCORINGS - sum(len(g.rewards) for g in scores.groups)
    counts = [scores.failures.get(f"unreliable/{kind}", 0) for kind in FAILURES]
    cells = [f"{3 * num_failures} failing responses", f"{NUM_SCORINGS / seconds:,.0f}"]
    return f"| {' | '.join([*cells, *map(str, [num_lost, *counts])])} |"


def speed_texts(num_failures: int) -> list[str]:
    """Return random responses, of which `num_failures` each hang, crash and raise."""
    rng = random.Random(0)
    thought = f"<think> {'7+5=12; ' * 50} </think>"
    texts: list[str] = []
    for _ in range(NUM_SCORINGS):
        texts.append(f"{thought}<answer> \\boxed{{{rng.randrange(1000)}}} </answer>")
    positions = rng.sample(range(NUM_SCORINGS), 3 * num_failures)
    for position, kind in zip(positions, ("HANG", "CRASH", "RAISE") * num_failures, strict=True):
        texts[position] = kind
    return texts


def num_right(scores: Scores) -> int:
    """Return the number of completions with the full score."""
    return sum(reward.total == 1.0 for group in scores.groups for reward in group.rewards)


def group(answer: str, texts: Sequence[str], index: int) -> RolloutGroup:
    """Return a group of completions without tokens."""
    no_ids, no_logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
    completions = [Completion(no_ids, no_logprobs, "stop", 0, text) for text in texts]
    return RolloutGroup(Prompt(index, no_ids, answer), tuple(completions))


if __name__ == "__main__":
    sys.exit(main())
