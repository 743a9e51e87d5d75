"""Rows of verl's supervised trainer have the tokens of its own dataset class.

Source: verl 1dda0392, verl/utils/dataset/multiturn_sft_dataset.py. T tokens.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import verl_oracle as oracle
from msrl.data.native import native_examples
from msrl.data.tokenizer import load_tokenizer, open_tokenizer
from msrl.errors import ManyErrors
from msrl.importers.command import translate_arguments
from msrl.types import Conversation, Message
from support import assert_mentions, shared_data

CONVERSATIONS = (
    (("user", "2+2?"), ("assistant", "4")),
    (
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello!"),
        ("user", "2+2?"),
        ("assistant", "It is 4."),
    ),
)


def _functions(file: str, names: dict[str, Any], *wanted: str) -> None:
    """Execute functions of a file, also of its classes, with `names` as their globals."""
    path = oracle.checkout() / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in wanted]
    for node in nodes:
        arguments = (*node.args.args, *node.args.kwonlyargs)
        node.returns, node.decorator_list = None, []
        for argument in arguments:
            argument.annotation = None
    exec(compile(ast.Module([*nodes], []), str(path), "exec"), names)


def _verl_rows(tokenizer: Any, turns: tuple[tuple[str, str], ...]) -> tuple[list[int], list[bool]]:
    """Return the token ids and the loss mask [T] of verl."""
    names: dict[str, Any] = {"torch": torch, "logger": None}
    _functions("verl/utils/tokenizer/tokenizer.py", names, "normalize_token_ids")
    prompts = ("apply_chat_template", "extract_system_prompt_and_generation")
    _functions("verl/utils/tokenizer/chat_template.py", names, *prompts)
    single = "_process_single_message"
    _functions("verl/utils/dataset/multiturn_sft_dataset.py", names, single)
    dataset = oracle.Section(tokenizer=tokenizer, processor=None, apply_chat_template_kwargs={})
    parts = names["extract_system_prompt_and_generation"](tokenizer)
    dataset.update(system_prompt=parts[0], generation_prompt=parts[1])
    ids: list[int] = []
    mask: list[bool] = []
    for number, (role, text) in enumerate(turns):
        message = {"role": role, "content": text}
        rendered = names[single](dataset, number, message, [])
        ids += rendered[0].tolist()
        mask += rendered[1].bool().tolist()
    return ids, mask


@pytest.mark.sample(1)
@pytest.mark.parametrize("turns", CONVERSATIONS)
@pytest.mark.parametrize("name", ["qwen2.5-0.5b-instruct", "granite-3.1-1b-a400m"])
def test_rows_differ_from_verl_only_in_what_follows_an_end_of_turn(
    name: str, turns: tuple[tuple[str, str], ...]
) -> None:
    folder = shared_data("tokenizers", name)
    tokenizer: Any = load_tokenizer(folder)
    ids, mask = _verl_rows(tokenizer, turns)
    conversation = Conversation(tuple(Message(role, text) for role, text in turns))
    (row,) = native_examples(open_tokenizer(folder), [conversation], None)
    assert row.token_ids.tolist() == ids
    different = [t for t, value in enumerate(row.loss_mask.tolist()) if value != mask[t]]
    assert different
    for t in different:
        assert mask[t] and ids[t - 1] == tokenizer.eos_token_id
        assert tokenizer.decode([ids[t]]) == "\n"


def test_the_difference_in_trained_tokens_needs_consent(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(
        "python -m verl.trainer.sft_trainer data.train_files=a.parquet data.truncation=left\n"
    )
    with pytest.raises(ManyErrors) as caught:
        translate_arguments("verl", [str(script)])
    (message,) = caught.value.messages  # without padding, left truncates as right does
    assert_mentions(message, "train_files=a.parquet", "end-of-turn", "--approximate")
