"""`python -m benchmarks.rewards [--data FOLDER] [--workers N]`: how right and how fast the verifiers are, on real answers.

Right: the true answer of every problem against itself, and against that of another problem drawn at random (pairs of the same text apart).
Fast: 10,000 plain numeric responses, and the same with responses that hang, crash and raise among them, of which none may be lost.
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
        "--data", type=Path, default=DATA, help="folder of the real inputs, with math/ in it"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that score (default: 2)")
    args = parser.parse_args()
    print(
        "| answers | verifier | problems | itself | another's | pairs of the same text |\n|---|---|---|---|---|---|"
    )
    for name, verifier, answers in data_sets(args.data / "math"):
        print(agreement_row(name, verifier, answers, args.workers))
    print(
        "\n| 10,000 scorings of plain numbers | per second | lost | timeouts | crashes | errors |\n|---|---|---|---|---|---|"
    )
    for trouble in (0, 10):
        print(speed_row(args.workers, trouble))
    return 0


def data_sets(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Name, verifier, true answers."""
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
    """The ground truths of a Parquet file of DAPO's form."""
    import pyarrow.parquet as parquet

    return [
        row["ground_truth"]
        for row in parquet.read_table(file, columns=["reward_model"])["reward_model"].to_pylist()
    ]


def agreement_row(name: str, verifier: str, answers: Sequence[str], num_workers: int) -> str:
    """Shares of right scores: every answer against itself, and against another's that is not the same text."""
    pairs = other_answers(answers)
    different = [(own, other) for own, other in pairs if own != other]
    with Scorer([Source(verifier, timeout_s=30.0)], num_workers) as scorer:
        itself = right(
            scorer.score(
                [group(own, [response(verifier, own)], n) for n, own in enumerate(answers)]
            )
        )
        others = right(
            scorer.score(
                [
                    group(own, [response(verifier, other)], n)
                    for n, (own, other) in enumerate(different)
                ]
            )
        )
    same = len(pairs) - len(different)
    return f"| {name} | `{verifier}` | {len(answers)} | {itself / len(answers):.2%} | {others / len(different):.2%} | {same} |"


def other_answers(answers: Sequence[str], seed: int = 0) -> list[tuple[str, str]]:
    """Every answer with that of another problem: the next one in an order drawn at random."""
    order = list(range(len(answers)))
    random.Random(seed).shuffle(order)
    return [(answers[a], answers[b]) for a, b in zip(order, order[1:] + order[:1], strict=True)]


def response(verifier: str, answer: str) -> str:
    """A response that gives `answer` in the form that the verifier reads."""
    if verifier == "acc_for_dapo":
        return f"so it is\nAnswer: {answer}"
    return f"<think> so it is </think><answer> \\boxed{{{answer}}} </answer>"


def speed_row(num_workers: int, trouble: int) -> str:
    """Scorings per second with `trouble` responses of each bad kind among them."""
    rng = random.Random(0)
    texts = [
        f"<think> {'7+5=12; ' * 50} </think><answer> \\boxed{{{rng.randrange(1000)}}} </answer>"
        for _ in range(NUM_SCORINGS)
    ]
    for place, kind in zip(
        rng.sample(range(NUM_SCORINGS), 3 * trouble),
        ("HANG", "CRASH", "RAISE") * trouble,
        strict=True,
    ):
        texts[place] = kind
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "troubled.py"
        file.write_text(TROUBLE, encoding="utf-8")
        with Scorer(
            [Source(function=f"{file}:troubled", timeout_s=1.0, wrong=-0.5)], num_workers
        ) as scorer:
            scorer.score([group("1", ["\\boxed{1}"] * 64, 0)])  # started
            start = time.perf_counter()
            scores = scorer.score(
                [group("132", texts[n : n + 8], n) for n in range(0, NUM_SCORINGS, 8)]
            )
            seconds = time.perf_counter() - start
    lost = NUM_SCORINGS - sum(len(g.rewards) for g in scores.groups)
    failed = [scores.failures.get(f"troubled/{kind}", 0) for kind in ("timeout", "crash", "error")]
    return f"| {3 * trouble} bad ones among them | {NUM_SCORINGS / seconds:,.0f} | {lost} | {failed[0]} | {failed[1]} | {failed[2]} |"


def right(scores: Scores) -> int:
    """How many completions got the full score."""
    return sum(reward.total == 1.0 for group in scores.groups for reward in group.rewards)


def group(answer: str, texts: Sequence[str], index: int) -> RolloutGroup:
    """Completions of one prompt, without tokens."""
    empty, none = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return RolloutGroup(
        Prompt(index, empty, answer),
        tuple(Completion(empty, none, "stop", 0, text) for text in texts),
    )


if __name__ == "__main__":
    sys.exit(main())
