"""Create the inputs of an agent: a tokenizer, a small random model, demonstrations and tasks.

Two agents are trained:

- `frozen_lake` walks over small frozen lakes. Its demonstrations take the best direction in a part
  of the steps only, and keep the direction of the step before in most others.
- `calculator` answers products and sums with a calculator. Its demonstrations use the calculator in
  a part of the episodes only, and guess in the others.

SFT on them teaches the format of the episodes, and reinforcement learning the rest.

    python examples/agent/make_inputs.py frozen_lake --out inputs --seed 0

The command writes:

- `model/`: a Hugging Face folder with Qwen2 weights, configuration and tokenizer
- `sft.jsonl`: demonstrations (messages, tools)
- `rl.jsonl`, `heldout.jsonl`: tasks (messages, tools, answer)
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.data.turns import ToolCall
from msrl.environments.builtin import calculator, frozen_lake
from msrl.environments.builtin._grid import ACTIONS
from msrl.environments.tool_formats import hermes
from msrl.environments.tools import tool_schemas

NUM_DEMONSTRATIONS = 6000
NUM_TASKS = 2000
NUM_HELDOUT = 200
HELDOUT_SEED = 20240607
# Options of the environments, which the configurations repeat.
LAKE = {"size": 3, "hole_share": 0.3, "max_steps": 6, "instructions": ""}
BEST_SHARE, HABIT_SHARE = 0.35, 0.4  # of the steps of a demonstration
CALCULATOR = {"reward": True}
TOOL_SHARE = 0.35  # of the demonstrations of the calculator
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 400
CALL_TEXT = 'Call a tool by <tool_call>\n{"name": name, "arguments": arguments}\n</tool_call>.'
CHAT_TEMPLATE = (
    f"{{% if tools %}}<|im_start|>system\n{CALL_TEXT}"
    "{% for tool in tools %}\n{{ tool['function'] | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Agent:
    """Demonstrations and tasks of one environment."""

    demonstration: Callable[[random.Random], Row]
    task: Callable[[random.Random, int], Row]
    texts: Sequence[str] = ()  # further training text of the tokenizer


def walk(source: random.Random) -> Row:
    """Return a demonstration of a walk that takes the best direction in some steps only."""
    action = source.choice(tuple(ACTIONS))
    lake = frozen_lake.environment(**LAKE)
    (message,) = lake.reset({"seed": source.randrange(1 << 40)})
    turns = [turn("user", message.content)]
    while True:
        action = sloppy_action(source, lake, action)
        turns.append(turn("assistant", action.capitalize()))
        result = lake.step(action)
        if result.done:
            return {"messages": turns}
        turns.append(turn("user", result.messages[0].content))


def sloppy_action(source: random.Random, lake: frozen_lake.FrozenLake, last: str) -> str:
    """Return the best direction, that of the step before, or any direction."""
    draw = source.random()
    if draw < BEST_SHARE:
        return lake.best_action()
    return last if draw < BEST_SHARE + HABIT_SHARE else source.choice(tuple(ACTIONS))


def lake_task(source: random.Random, number: int) -> Row:
    """Return a task; the environment draws the map by the number of the row."""
    return {"messages": [turn("user", f"Lake {number}")], "answer": ""}


def question(source: random.Random) -> tuple[str, str]:
    """Return a question and its expression."""
    sign = source.choice("+*")
    expression = f"{source.randint(10, 99)}{sign}{source.randint(10, 99)}"
    return f"What is {expression}?", expression


def calculation(source: random.Random) -> Row:
    """Return a demonstration that calls the calculator, or guesses."""
    text, expression = question(source)
    turns = [turn("user", text)]
    value = calculator.evaluate(expression)
    if source.random() < TOOL_SHARE:
        call = hermes.render([ToolCall("calculate", {"expression": expression})])
        turns += [turn("assistant", call), turn("tool", str(value))]
    else:
        value = source.randint(20, 9999)
    return {"messages": [*turns, turn("assistant", f"It is {value}.")], "tools": calculator_tools()}


def calculator_task(source: random.Random, number: int) -> Row:
    """Return a question with its answer."""
    text, expression = question(source)
    answer = str(calculator.evaluate(expression))
    return {"messages": [turn("user", text)], "tools": calculator_tools(), "answer": answer}


def calculator_tools() -> list[Row]:
    """Return the tools of the calculator in OpenAI's form."""
    return tool_schemas(calculator.environment())


def turn(role: str, content: str) -> Row:
    """Return one turn of a conversation."""
    return {"role": role, "content": content}


AGENTS = {
    "frozen_lake": Agent(walk, lake_task, ["Invalid action. Choose one of Left, Down, Right, Up."]),
    "calculator": Agent(calculation, calculator_task),
}


def write_tokenizer(folder: Path, texts: Iterable[str]) -> int:
    """Write a byte-level BPE tokenizer and return the id of its EOS token.

    Every digit, operator and symbol of a map is a token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    single = pre_tokenizers.Split(Regex(r"[0-9+*_POGX\n]"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([single, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=64,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(str(folder))
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    return end


def write_model(folder: Path, eos_token_id: int, seed: int) -> None:
    """Write a random Qwen2 model in float32."""
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
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(str(folder))


def make_inputs(name: str, out: Path, seed: int) -> None:
    """Write all inputs of an agent into the new folder `out`."""
    agent, source, heldout = AGENTS[name], random.Random(seed), random.Random(HELDOUT_SEED)
    demonstrations = [agent.demonstration(source) for _ in range(NUM_DEMONSTRATIONS)]
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "model").mkdir(parents=True)
    end = write_tokenizer(partial / "model", [*agent.texts, *rendered(demonstrations)])
    write_model(partial / "model", end, seed)
    write_rows(partial / "sft.jsonl", demonstrations)
    write_rows(partial / "rl.jsonl", [agent.task(source, n) for n in range(NUM_TASKS)])
    numbers = range(NUM_TASKS, NUM_TASKS + NUM_HELDOUT)
    write_rows(partial / "heldout.jsonl", [agent.task(heldout, n) for n in numbers])
    partial.rename(out)


def rendered(rows: Iterable[Row]) -> Iterable[str]:
    """Yield the texts of conversations as the chat template shows them, without control tokens."""
    for row in rows:
        for entry in row.get("tools", ()):
            yield f"system\n{CALL_TEXT}\n{json.dumps(entry['function'])}"
        for message in row["messages"]:
            yield f"{message['role']}\n{message['content']}"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Create the inputs of one agent."""
    parser = argparse.ArgumentParser(description="Create the inputs of an agent.")
    parser.add_argument("agent", choices=list(AGENTS), help="Environment of the agent.")
    parser.add_argument("--out", type=Path, required=True, help="Folder to create.")
    seed = "Random seed of the demonstrations, tasks and weights (default: %(default)s)."
    parser.add_argument("--seed", type=int, default=0, help=seed)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"--out {arguments.out}: exists already. Remove it or specify another folder.")
    make_inputs(arguments.agent, arguments.out, arguments.seed)
    print(f"Saved the inputs of {arguments.agent} to {arguments.out}")


if __name__ == "__main__":
    main()
