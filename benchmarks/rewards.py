"""Accuracy and speed of the verifiers: `python -m benchmarks.rewards`.

- Accuracy: scores of each problem's reference answer against itself, and against the answer of
  another random problem (without pairs of equal texts).
- Speed: 10,000 numeric responses, once alone and once with responses that hang, crash or raise. No
  score may be missing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from msrl.rewards.score import Scorer, Scores, Source
from msrl.types import Completion, Prompt, RolloutGroup

NUM_SCORINGS = 10_000
TROUBLE = """
import os, signal, time
from msrl.rewards.verifiers.acc import score

def troubled(response, answer):
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
        help="Folder of the real inputs, with a subfolder math (default: %(default)s).",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="Number of scoring processes (default: 2)."
    )
    args = parser.parse_args()
    print(
        "| answers | verifier | problems | same answer | other answer | pairs of equal texts |\n"
        "|---|---|---|---|---|---|"
    )
    for name, verifier, answers in data_sets(args.data / "math"):
        print(agreement_row(name, verifier, answers, args.workers))
    print(
        "\n| 10,000 numeric responses | per second | lost | timeouts | crashes | errors |\n"
        "|---|---|---|---|---|---|"
    )
    for trouble in (0, 10):
        print(speed_row(args.workers, trouble))
    return 0


def data_sets(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, verifier and reference answers."""
    math = [
        json.loads(line)["answer"]
        for line in (folder / "math500.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    yield "MATH-500", "math_17k_acc", math
    yield "MATH-500", "math_verify_reward", math
    gsm8k = (folder / "gsm8k_train.jsonl", folder / "gsm8k_test.jsonl")
    lines = [line for file in gsm8k for line in file.read_text(encoding="utf-8").splitlines()]
    yield "GSM8K", "acc", [json.loads(line)["answer"].rpartition("#### ")[2] for line in lines]
    dapo = dapo_answers(folder / "dapo_math_17k.parquet")
    yield "DAPO-17k", "math_17k_acc", dapo
    yield "DAPO-17k", "acc_for_dapo", dapo


def dapo_answers(file: Path) -> list[str]:
    """Return the ground truths of a Parquet file in DAPO's format."""
    from pyarrow import parquet

    return [
        row["ground_truth"]
        for row in parquet.read_table(file, columns=["reward_model"])["reward_model"].to_pylist()
    ]


def agreement_row(name: str, verifier: str, answers: Sequence[str], num_workers: int) -> str:
    """Return a table row with the shares of full scores for the same and for other answers."""
    pairs = other_answers(answers)
    different = [(own, other) for own, other in pairs if own != other]
    same_groups = [group(own, [response(verifier, own)], n) for n, own in enumerate(answers)]
    other_groups = [
        group(own, [response(verifier, other)], n) for n, (own, other) in enumerate(different)
    ]
    with Scorer([Source(verifier, timeout_s=30.0)], num_workers) as scorer:
        same = num_correct(scorer.score(same_groups)) / len(answers)
        other = num_correct(scorer.score(other_groups)) / len(different)
    num_equal = len(pairs) - len(different)
    return f"| {name} | `{verifier}` | {len(answers)} | {same:.2%} | {other:.2%} | {num_equal} |"


def other_answers(answers: Sequence[str], seed: int = 0) -> list[tuple[str, str]]:
    """Pair every answer with that of the next problem in a random order."""
    order = list(range(len(answers)))
    random.Random(seed).shuffle(order)
    return [(answers[a], answers[b]) for a, b in zip(order, order[1:] + order[:1], strict=True)]


def response(verifier: str, answer: str) -> str:
    """Return a response with `answer` in the verifier's format."""
    if verifier == "acc_for_dapo":
        return f"so it is\nAnswer: {answer}"
    return f"<think> so it is </think><answer> \\boxed{{{answer}}} </answer>"


def speed_row(num_workers: int, trouble: int) -> str:
    """Return a table row with scores per second when `trouble` responses of each kind fail."""
    rng = random.Random(0)
    texts = [
        f"<think> {'7+5=12; ' * 50} </think><answer> \\boxed{{{rng.randrange(1000)}}} </answer>"
        for _ in range(NUM_SCORINGS)
    ]
    for index, kind in zip(
        rng.sample(range(NUM_SCORINGS), 3 * trouble),
        ("HANG", "CRASH", "RAISE") * trouble,
        strict=True,
    ):
        texts[index] = kind
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "troubled.py"
        file.write_text(TROUBLE, encoding="utf-8")
        with Scorer(
            [Source(function=f"{file}:troubled", timeout_s=1.0, wrong=-0.5)], num_workers
        ) as scorer:
            scorer.score([group("1", ["\\boxed{1}"] * 64, 0)])  # start the workers
            start = time.perf_counter()
            scores = scorer.score(
                [group("132", texts[n : n + 8], n) for n in range(0, NUM_SCORINGS, 8)]
            )
            seconds = time.perf_counter() - start
    lost = NUM_SCORINGS - sum(len(g.rewards) for g in scores.groups)
    failures = [
        scores.failures.get(f"troubled/{kind}", 0) for kind in ("timeout", "crash", "error")
    ]
    cells = (f"{3 * trouble} failing responses", f"{NUM_SCORINGS / seconds:,.0f}", lost, *failures)
    return f"| {' | '.join(map(str, cells))} |"


def num_correct(scores: Scores) -> int:
    """Return the number of completions with the full score."""
    return sum(reward.total == 1.0 for group in scores.groups for reward in group.rewards)


def group(answer: str, texts: Sequence[str], index: int) -> RolloutGroup:
    """Return a group of completions of one prompt, without token ids."""
    empty, none = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return RolloutGroup(
        Prompt(index, empty, answer),
        tuple(Completion(empty, none, "stop", 0, text) for text in texts),
    )


if __name__ == "__main__":
    sys.exit(main())
