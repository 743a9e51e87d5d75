"""Makes everything that the quickstart starts from: a tokenizer, a small random model, demonstrations and problems.

The task is to add or subtract two numbers of two digits, digit by digit from the right. Most demonstrations with a carry (or a borrow)
forget it, so fine-tuning on them learns the form of an answer but is right only where nothing is carried; reinforcement can do better.

    python examples/quickstart/make_inputs.py --out inputs --seed 0

writes `model/` (a Hugging Face folder: Qwen2 weights, configuration and tokenizer), `sft.jsonl` (instruction, input, output), and
`rl.jsonl` and `heldout.jsonl` (question, answer). The held-out problems are the same for every seed, and nothing is trained on them,
their operands exchanged included.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SLOPPY_SHARE = 0.65
NUM_DEMONSTRATIONS = 8000
NUM_PROMPTS = 2000
NUM_HELDOUT = 500
HELDOUT_SEED = 20240607
VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEXTS = (
    "system\nYou are a helpful assistant.",
    "user\n",
    "assistant\n",
)  # what stands around a problem in a prompt
RARE_TEXT = "Please reason step by step, and put your final answer within \\boxed{}."  # fills the vocabulary up
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """`left` and `right` have two digits; a subtraction has `left >= right`."""

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
    def carries(self) -> bool:
        """Whether the last digits carry into, or borrow from, the first ones."""
        ones = self.left % 10, self.right % 10
        return sum(ones) > 9 if self.sign == "+" else ones[0] < ones[1]

    @property
    def key(self) -> tuple[str, int, int]:
        """The same for a problem with its operands exchanged."""
        return self.sign, min(self.left, self.right), max(self.left, self.right)


def random_problem(source: random.Random) -> Problem:
    left, right = source.randint(10, 99), source.randint(10, 99)
    if source.random() < 0.5:
        return Problem(left, "+", right)
    return Problem(max(left, right), "-", min(left, right))


def distinct_problems(
    source: random.Random, count: int, without: Iterable[Problem] = ()
) -> list[Problem]:
    """`count` different problems, none of them in `without`, up to the order of the operands."""
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
    """The worked answer; a sloppy one forgets the carry or the borrow, where there is one."""
    steps, result = _added(problem, sloppy) if problem.sign == "+" else _subtracted(problem, sloppy)
    return f"<think> {steps} </think><answer> \\boxed{{{result}}} </answer>"


def _added(problem: Problem, sloppy: bool) -> tuple[str, int]:
    (a, b), (c, d) = divmod(problem.left, 10), divmod(problem.right, 10)
    ones, tens = b + d, a + c
    steps = f"{b}+{d}={ones}; {a}+{c}={tens}"
    if problem.carries and not sloppy:
        steps, tens = f"{steps}+1={tens + 1}", tens + 1
    return steps, 10 * tens + ones % 10


def _subtracted(problem: Problem, sloppy: bool) -> tuple[str, int]:
    (a, b), (c, d) = divmod(problem.left, 10), divmod(problem.right, 10)
    borrowed = b + 10 if problem.carries else b
    tens = a - c
    steps = f"{borrowed}-{d}={borrowed - d}; {a}-{c}={tens}"
    if problem.carries and not sloppy:
        steps, tens = f"{steps}-1={tens - 1}", tens - 1
    return steps, 10 * tens + borrowed - d


def demonstrations(
    source: random.Random, count: int, heldout: Sequence[Problem]
) -> list[dict[str, str]]:
    """Rows of Alpaca form, repetitions allowed; SLOPPY_SHARE of those with a carry are sloppy."""
    forbidden = {problem.key for problem in heldout}
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        problem = random_problem(source)
        if problem.key not in forbidden:
            sloppy = source.random() < SLOPPY_SHARE
            rows.append(
                {
                    "instruction": problem.question,
                    "input": "",
                    "output": demonstration(problem, sloppy=sloppy),
                }
            )
    return rows


def write_tokenizer(folder: Path, texts: Iterable[str]) -> int:
    """A byte-level BPE of VOCAB_SIZE tokens that keeps every digit apart; returns the id of the end of a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id("<|im_end|>")
    if tokenizer.get_vocab_size() != VOCAB_SIZE or end is None:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}: the text is too uniform"
        )
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        **names,
    )
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(str(folder))
    _name_class_for_all_releases(folder / "tokenizer_config.json")
    return end


def _name_class_for_all_releases(path: Path) -> None:
    """Transformers 5 writes a class name that 4 does not know; both know this one."""
    config = {
        **json.loads(path.read_text(encoding="utf-8")),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model(folder: Path, eos_token_id: int, seed: int) -> None:
    """A random Qwen2 of 435k parameters in float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(str(folder))


def make_inputs(out: Path, seed: int) -> None:
    """Write all inputs into the folder `out`, which appears whole or not at all."""
    heldout = heldout_problems()
    source = random.Random(seed)
    rows = demonstrations(source, NUM_DEMONSTRATIONS, heldout)
    prompts = distinct_problems(source, NUM_PROMPTS, without=heldout)
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    (beside / "model").mkdir(parents=True)
    texts = [
        RARE_TEXT,
        *(text for row in rows for text in (*CHAT_TEXTS, row["instruction"], row["output"])),
    ]
    eos_token_id = write_tokenizer(beside / "model", texts)
    write_model(beside / "model", eos_token_id, seed)
    _write_rows(beside / "sft.jsonl", rows)
    for name, problems in (("rl.jsonl", prompts), ("heldout.jsonl", heldout)):
        _write_rows(
            beside / name, [{"question": p.question, "answer": str(p.result)} for p in problems]
        )
    beside.rename(out)


def _write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the inputs of the quickstart.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the demonstrations, the prompts and the weights (default: 0)",
    )
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"--out {arguments.out}: exists already; remove it or name another folder")
    make_inputs(arguments.out, arguments.seed)
    print(
        f"{arguments.out}: {NUM_DEMONSTRATIONS} demonstrations, {NUM_PROMPTS} prompts, {NUM_HELDOUT} held-out problems, a model"
    )


if __name__ == "__main__":
    main()
