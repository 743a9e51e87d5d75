"""Tasks of the laptop example: short questions, with an answer that a program can check.

    python examples/laptop/tasks.py --out FOLDER [--seed N]

The command writes:

- `sft.jsonl`: questions with a worked answer (messages)
- `rl.jsonl`, `heldout.jsonl`: questions with the result (question, answer, tag)

The held-out questions are the same for every seed. The other files contain none of them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    *("Amara", "Chen", "Diego", "Felix", "Hana", "Ivan", "Jonas", "Lena", "Mia", "Nadia", "Omar"),
    *("Ravi", "Sofia", "Tom", "Yuki", "Zara"),
)
THINGS = (
    *("apples", "beads", "books", "buttons", "cards", "coins", "cookies", "marbles"),
    *("pencils", "shells", "stamps", "stickers"),
)
CONTAINERS = ("bags", "baskets", "boxes", "jars", "packs", "shelves")
WORDS = (
    *("apple", "banana", "bridge", "candle", "cheese", "desert", "dragon", "engine"),
    *("flower", "forest", "garden", "guitar", "hammer", "harbor", "island", "jacket"),
    *("jungle", "kitchen", "ladder", "lemon", "market", "mirror", "needle", "number"),
    *("ocean", "orange", "pencil", "planet", "quiet", "rabbit", "river", "silver", "summer"),
    *("tiger", "tunnel", "umbrella", "valley", "window", "yellow", "zebra"),
)
NUM_DEMONSTRATIONS = {"words": 120, "sums": 40, "letters": 40, "order": 40}
NUM_PROMPTS = {"words": 400, "sums": 160, "letters": 120, "order": 120}
NUM_HELDOUT = {"words": 200, "sums": 100, "letters": 50, "order": 50}
HELDOUT_SEED = 20261129


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the steps that lead to its result, and the result."""

    question: str
    steps: tuple[str, ...]
    result: str

    @property
    def solution(self) -> str:
        return " ".join([*(f"{step}." for step in self.steps), f"Answer: {self.result}"])


# --- Tasks ------------------------------------------------------------------------------------


def word_problem(source: random.Random) -> Problem:
    """Return a problem of two steps of arithmetic about people and things."""
    return source.choice(SCENES)(source, *source.sample(NAMES, 2), source.choice(THINGS))


def shopping(source: random.Random, one: str, other: str, things: str) -> Problem:
    have, more = source.randint(12, 60), source.randint(5, 40)
    given = source.randint(3, have + more - 2)
    question = (
        f"{one} has {have} {things}. {one} buys {more} more and then gives {given} to {other}. "
        f"How many {things} does {one} have now?"
    )
    return arithmetic(question, (have, "+", more), "-", given)


def containers(source: random.Random, one: str, other: str, things: str) -> Problem:
    number, size, more = source.randint(2, 9), source.randint(3, 9), source.randint(5, 40)
    question = (
        f"{one} has {number} {source.choice(CONTAINERS)} with {size} {things} in each. {other} "
        f"gives {one} {more} more. How many {things} does {one} have in all?"
    )
    return arithmetic(question, (number, "*", size), "+", more)


def table(source: random.Random, one: str, other: str, things: str) -> Problem:
    number, size = source.randint(2, 9), source.randint(3, 9)
    taken = source.randint(1, number * size - 1)
    question = (
        f"There are {number} {source.choice(CONTAINERS)} on a table. Each holds {size} {things}. "
        f"{one} takes {taken} of the {things} for {other}. How many are left?"
    )
    return arithmetic(question, (number, "*", size), "-", taken)


def finding(source: random.Random, one: str, other: str, things: str) -> Problem:
    first, second, more = (source.randint(low, high) for low, high in ((12, 60), (5, 40), (3, 30)))
    question = (
        f"{one} found {first} {things} on Monday and {second} on Tuesday. {other} found {more} "
        f"more than {one} did on both days. How many {things} did {other} find?"
    )
    return arithmetic(question, (first, "+", second), "+", more)


def change(source: random.Random, one: str, _: str, things: str) -> Problem:
    price, number, rest = source.randint(3, 9), source.randint(2, 9), source.randint(5, 40)
    paid = price * number + rest
    question = (
        f"{things.capitalize()} cost {price} dollars each. {one} buys {number} and pays with "
        f"{paid} dollars. How many dollars does {one} get back?"
    )
    steps = (f"{number} * {price} = {number * price}", f"{paid} - {number * price} = {rest}")
    return Problem(question, steps, str(rest))


def together(source: random.Random, one: str, other: str, things: str) -> Problem:
    first, more = source.randint(12, 60), source.randint(5, 40)
    second = first + more
    question = (
        f"{one} and {other} collect {things}. {one} has {first}, and {other} has {more} more than "
        f"{one}. How many {things} do they have together?"
    )
    steps = (f"{first} + {more} = {second}", f"{first} + {second} = {first + second}")
    return Problem(question, steps, str(first + second))


def reading(source: random.Random, one: str, _: str, __: str) -> Problem:
    days, pages, more = source.randint(3, 9), source.randint(3, 9), source.randint(5, 40)
    question = (
        f"{one} reads {pages} pages of a book on each of {days} days and {more} pages on the next "
        f"day. How many pages has {one} read?"
    )
    return arithmetic(question, (days, "*", pages), "+", more)


SCENES = (shopping, containers, table, finding, change, together, reading)


def arithmetic(question: str, first: tuple[int, str, int], sign: str, last: int) -> Problem:
    """Return a problem whose first step is a calculation, and whose second continues with it."""
    left, first_sign, right = first
    middle = left + right if first_sign == "+" else left * right
    result = middle + last if sign == "+" else middle - last
    steps = (f"{left} {first_sign} {right} = {middle}", f"{middle} {sign} {last} = {result}")
    return Problem(question, steps, str(result))


def long_sum(source: random.Random) -> Problem:
    """Return a sum of two numbers of three digits."""
    left, right = source.randint(100, 999), source.randint(100, 999)
    step = f"{left} + {right} = {left + right}"
    return Problem(f"What is {left} + {right}?", (step,), str(left + right))


def letters(source: random.Random) -> Problem:
    """Return the question of how often a letter occurs in two words."""
    words = source.sample(WORDS, 2)
    letter = source.choice(sorted(set("".join(words))))
    question = f'How many times does the letter "{letter}" occur in "{" ".join(words)}"?'
    counts = [word.count(letter) for word in words]
    steps = [f"{' '.join(word)}: {count}" for word, count in zip(words, counts, strict=True)]
    return Problem(question, tuple(steps), str(sum(counts)))


def order(source: random.Random) -> Problem:
    """Return four words to sort by the alphabet."""
    words = source.sample(WORDS, 4)
    question = f"Sort these words alphabetically: {', '.join(words)}."
    return Problem(question, (), ", ".join(sorted(words)))


TASKS: Mapping[str, Callable[[random.Random], Problem]] = {
    "words": word_problem,
    "sums": long_sum,
    "letters": letters,
    "order": order,
}


# --- Files ------------------------------------------------------------------------------------


def problems(
    counts: Mapping[str, int], seed: str, excluded: Iterable[str] = ()
) -> list[tuple[str, Problem]]:
    """Return as many problems of each task, each once, without the excluded questions, shuffled."""
    seen, rows = set(excluded), list[tuple[str, Problem]]()
    for task, count in counts.items():
        source = random.Random(f"{task} {seed}")
        first = len(rows)
        while len(rows) < first + count:
            problem = TASKS[task](source)
            if problem.question not in seen:
                seen.add(problem.question)
                rows.append((task, problem))
    random.Random(seed).shuffle(rows)
    return rows


def write_tasks(folder: Path, seed: int) -> None:
    """Write the three files."""
    heldout = problems(NUM_HELDOUT, f"{HELDOUT_SEED}")
    questions = [problem.question for _, problem in heldout]
    prompts = problems(NUM_PROMPTS, f"rl {seed}", questions)
    demonstrations = problems(NUM_DEMONSTRATIONS, f"sft {seed}", questions)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("rl", prompts), ("heldout", heldout)):
        entries = [
            {"question": problem.question, "answer": problem.result, "tag": task}
            for task, problem in rows
        ]
        write_rows(folder / f"{name}.jsonl", entries)
    turns = [
        [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": problem.solution},
        ]
        for _, problem in demonstrations
    ]
    write_rows(folder / "sft.jsonl", [{"messages": messages} for messages in turns])


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the tasks of the laptop example.")
    parser.add_argument("--out", type=Path, required=True, help="Folder to write to.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed (default: %(default)s).")
    arguments = parser.parse_args()
    write_tasks(arguments.out, arguments.seed)
