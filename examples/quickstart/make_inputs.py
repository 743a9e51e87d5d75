"""Create the quickstart's inputs: a tokenizer, a small random model, demonstrations and problems.

The task is to add or subtract two numbers of two digits, digit by digit from the right. Most
demonstrations of problems with a carry (or a borrow) forget it. SFT on them teaches the response
format but gives correct answers only for problems without a carry; reinforcement learning then
improves on that.

    python examples/quickstart/make_inputs.py --out inputs --seed 0

The command writes:

- `model/`: a Hugging Face folder with Qwen2 weights, configuration and tokenizer
- `sft.jsonl`: demonstrations (instruction, input, output)
- `rl.jsonl`, `heldout.jsonl`: problems (question, answer)

The held-out problems are the same for every seed. The other files contain none of them, not even
with exchanged operands.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_model import write_model, write_rows, write_tokenizer

SLOPPY_SHARE = 0.65
NUM_DEMONSTRATIONS = 8000
NUM_PROMPTS = 2000
NUM_HELDOUT = 500
HELDOUT_SEED = 20240607
VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The text around a problem in a prompt.
CHAT_TEXTS = ("system\nYou are a helpful assistant.", "user\n", "assistant\n")
# More training text for the tokenizer, which would not reach VOCAB_SIZE tokens without it.
RARE_TEXT = "Please reason step by step, and put your final answer within \\boxed{}."
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """An addition or a subtraction of two-digit numbers. A difference also has two digits."""

    left: int
    sign: str
    right: int

    @property
    def question(self) -> str:
        return f"What is {self.left} {self.sign} {self.right}?"

    @property
    def result(self) -> int:
        return self.left + self.right if self.sign == "+" else self.left - self.right

    @property
    def has_carry(self) -> bool:
        """Return True if adding the last digits carries or subtracting them borrows."""
        ones = self.left % 10, self.right % 10
        return sum(ones) > 9 if self.sign == "+" else ones[0] < ones[1]

    @property
    def key(self) -> tuple[str, int, int]:
        """Return a key that is equal for two problems with exchanged operands."""
        return self.sign, min(self.left, self.right), max(self.left, self.right)


def random_problem(source: random.Random) -> Problem:
    """Return an addition or a subtraction with equal probability.

    Differences below 10 are excluded: demonstrations would show too few of them to learn from.
    """
    sign = source.choice("+-")
    while True:
        left, right = source.randint(10, 99), source.randint(10, 99)
        if sign == "+":
            return Problem(left, "+", right)
        if abs(left - right) >= 10:
            return Problem(max(left, right), "-", min(left, right))


def distinct_problems(
    source: random.Random, count: int, without: Iterable[Problem] = ()
) -> list[Problem]:
    """Return `count` problems that differ from each other and from `without` in their `key`."""
    seen = {problem.key for problem in without}
    problems: list[Problem] = []
    while len(problems) < count:
        problem = random_problem(source)
        if problem.key not in seen:
            seen.add(problem.key)
            problems.append(problem)
    return problems


def heldout_problems() -> list[Problem]:
    return distinct_problems(random.Random(HELDOUT_SEED), NUM_HELDOUT)


def demonstration(problem: Problem, *, sloppy: bool) -> str:
    """Return the worked answer; a sloppy one forgets the carry or the borrow."""
    steps, result = _added(problem, sloppy) if problem.sign == "+" else _subtracted(problem, sloppy)
    return f"<think> {steps} </think><answer> \\boxed{{{result}}} </answer>"


def _added(problem: Problem, sloppy: bool) -> tuple[str, int]:
    (a, b), (c, d) = divmod(problem.left, 10), divmod(problem.right, 10)
    ones, tens = b + d, a + c
    steps = f"{b}+{d}={ones}; {a}+{c}={tens}"
    if problem.has_carry and not sloppy:
        steps, tens = f"{steps}+1={tens + 1}", tens + 1
    return steps, 10 * tens + ones % 10


def _subtracted(problem: Problem, sloppy: bool) -> tuple[str, int]:
    (a, b), (c, d) = divmod(problem.left, 10), divmod(problem.right, 10)
    borrowed = b + 10 if problem.has_carry else b
    tens = a - c
    steps = f"{borrowed}-{d}={borrowed - d}; {a}-{c}={tens}"
    if problem.has_carry and not sloppy:
        steps, tens = f"{steps}-1={tens - 1}", tens - 1
    return steps, 10 * tens + borrowed - d


def demonstrations(
    source: random.Random, count: int, heldout: Sequence[Problem]
) -> list[dict[str, str]]:
    """Return Alpaca rows, possibly repeated; SLOPPY_SHARE of those with a carry are sloppy."""
    heldout_keys = {problem.key for problem in heldout}
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        problem = random_problem(source)
        if problem.key not in heldout_keys:
            sloppy = source.random() < SLOPPY_SHARE
            rows.append(
                {
                    "instruction": problem.question,
                    "input": "",
                    "output": demonstration(problem, sloppy=sloppy),
                }
            )
    return rows


def make_inputs(out: Path, seed: int) -> None:
    """Write all inputs atomically into the folder `out`."""
    heldout = heldout_problems()
    source = random.Random(seed)
    rows = demonstrations(source, NUM_DEMONSTRATIONS, heldout)
    prompts = distinct_problems(source, NUM_PROMPTS, without=heldout)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "model").mkdir(parents=True)
    texts = [
        RARE_TEXT,
        *(text for row in rows for text in (*CHAT_TEXTS, row["instruction"], row["output"])),
    ]
    eos_token_id = write_tokenizer(
        partial / "model",
        texts,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        vocab_size=VOCAB_SIZE,
    )
    write_model(partial / "model", vocab_size=VOCAB_SIZE, eos_token_id=eos_token_id, seed=seed)
    write_rows(partial / "sft.jsonl", rows)
    for name, problems in (("rl.jsonl", prompts), ("heldout.jsonl", heldout)):
        write_rows(
            partial / name, [{"question": p.question, "answer": str(p.result)} for p in problems]
        )
    partial.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the inputs of the quickstart.")
    parser.add_argument("--out", type=Path, required=True, help="Folder to create.")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Random seed of the demonstrations, prompts and weights (default: 0).",
    )
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"--out {arguments.out}: exists already. Remove it or specify another folder.")
    make_inputs(arguments.out, arguments.seed)
    print(
        f"Saved {NUM_DEMONSTRATIONS} demonstrations, {NUM_PROMPTS} prompts, "
        f"{NUM_HELDOUT} held-out problems and a model to {arguments.out}"
    )


if __name__ == "__main__":
    main()
