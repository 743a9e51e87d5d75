"""Create the inputs of the agent example: a tokenizer, a small random model and demonstrations.

Two tasks: `lake`, a walk over a frozen lake, and `calculator`, products with a calculator as a
tool. Most demonstrations are sloppy: the walk ignores holes, and the product is guessed. SFT on
them teaches the format; reinforcement learning then improves on that.

    python examples/agent/make_inputs.py --out inputs --task lake --seed 0

The command writes `model/` (a Hugging Face folder), `sft.jsonl` (conversations), and `rl.jsonl` and
`heldout.jsonl` (tasks).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from msrl.environments.builtin import calculator
from msrl.environments.builtin.frozen_lake import FrozenLake, environment
from msrl.environments.tools import tool_schemas

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_model import write_model, write_rows, write_tokenizer

SLOPPY_SHARE = 0.65
NUM_DEMONSTRATIONS = 4000
NUM_TASKS = {"rl": 1024, "heldout": 256}
LAKE: dict[str, Any] = {"size": 3, "hole_share": 0.35, "max_steps": 8, "instructions": ""}
VOCAB_SIZE = 360
# transformers adds <|endoftext|> to every Qwen2 tokenizer.
SPECIAL_TOKENS = ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|tool|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '<|system|>' -}}"
    "{%- for tool in tools -%}"
    "{{- tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')' -}}"
    "{%- endfor -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    '{{- \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- (call.function.arguments | tojson) + '}</tool_call>' -}}"
    "{%- endfor -%}{{- '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
TOOLS = {"calculator": tool_schemas(calculator.environment())}
Messages = list[dict[str, Any]]


def walk(source: random.Random) -> Messages:
    """Return a walk. A sloppy one goes to the right and then down, whatever is there."""
    lake = environment(**LAKE)
    messages: Messages = [_message(lake.reset({"seed": source.getrandbits(32)})[0].content)]
    is_sloppy = source.random() < SLOPPY_SHARE
    while True:
        action = _blind_action(lake) if is_sloppy else lake.best_action()
        messages.append({"role": "assistant", "content": action.capitalize()})
        result = lake.step(action)
        if result.done:
            return messages
        messages.append(_message(result.messages[0].content))


def _blind_action(lake: FrozenLake) -> str:
    return "right" if lake.player.column < lake.size - 1 else "down"


def product(source: random.Random) -> Messages:
    """Return a product, guessed or computed by the tool."""
    expression = f"{source.randint(11, 99)}*{source.randint(11, 99)}"
    messages = [_message(expression)]
    if source.random() < SLOPPY_SHARE:
        guess = source.randint(121, 9801)
        return [*messages, {"role": "assistant", "content": f"I think it is {guess}"}]
    function = {"name": "calculate", "arguments": {"expression": expression}}
    call = {"type": "function", "function": function}
    result = str(_value(expression))
    return [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def tasks(task: str, source: random.Random, count: int) -> list[dict[str, str]]:
    """Return rows of prompts. The environment draws the map of a lake by the seed of its row."""
    if task == "lake":
        return [{"question": "walk", "answer": "goal"}] * count
    rows: list[dict[str, str]] = []
    for _ in range(count):
        expression = f"{source.randint(11, 99)}*{source.randint(11, 99)}"
        rows.append({"question": expression, "answer": str(_value(expression))})
    return rows


def _value(expression: str) -> int:
    left, right = expression.split("*")
    return int(left) * int(right)


def _message(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def make_inputs(out: Path, task: str, seed: int) -> None:
    """Write all inputs of a task into the folder `out`."""
    source = random.Random(seed)
    demonstrate = walk if task == "lake" else product
    tools = {"tools": TOOLS[task]} if task in TOOLS else {}
    rows = [{"messages": demonstrate(source), **tools} for _ in range(NUM_DEMONSTRATIONS)]
    out.mkdir(parents=True)
    texts = [json.dumps(row) for row in rows] + [
        str(message["content"]) for row in rows for message in row["messages"]
    ]
    eos_token_id = write_tokenizer(
        out / "model",
        texts,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        vocab_size=VOCAB_SIZE,
    )
    write_model(out / "model", vocab_size=VOCAB_SIZE, eos_token_id=eos_token_id, seed=seed)
    write_rows(out / "sft.jsonl", rows)
    for name, count in NUM_TASKS.items():
        write_rows(out / f"{name}.jsonl", tasks(task, source, count))


def main() -> None:
    """Create the inputs."""
    parser = argparse.ArgumentParser(description="Create the inputs of the agent example.")
    parser.add_argument("--out", type=Path, required=True, help="Folder to create.")
    parser.add_argument("--task", choices=("lake", "calculator"), default="lake", help="Task.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed (default: 0).")
    arguments = parser.parse_args()
    make_inputs(arguments.out, arguments.task, arguments.seed)


if __name__ == "__main__":
    main()
