"""Prompts of imported inference scripts beside MindSpeed-LLM's own functions, token by token.

Its files are executed from the checkout of `mindspeed_oracle.py`: the templates, and the functions
that tokenize prompts and remember the turns of a chat.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mindspeed_oracle import checkout
from msrl.config.loader import Importers, load
from msrl.config.schema import Config
from msrl.importers.command import translate_arguments
from msrl.importers.translation import KeyStatus
from msrl.types import Message
from msrl.workflows.engine import choose_renderer, raw_ids
from msrl.workflows.serve.chat import ChatPrompts
from tiny_qwen2 import make_tokenizer

SPECIALS = [
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"),
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
]
QUESTIONS = [f"question {number}?\n" for number in range(6)]


@cache
def original() -> types.SimpleNamespace:
    """Return the functions of MindSpeed-LLM, or skip the test."""
    root = checkout() / "mindspeed_llm"
    package = types.ModuleType("mindspeed_preprocess")
    package.__path__ = [str(root / "tasks" / "preprocess")]
    sys.modules["mindspeed_preprocess"] = package
    templates = importlib.import_module("mindspeed_preprocess.templates")
    base = _module(root / "tasks" / "inference" / "infer_base.py")
    names = {"get_model_template": templates.get_model_template, "Template": templates.Template}
    text = (root / "inference" / "text_generation" / "tokenization.py").read_text("utf-8")
    start, end = text.index("def _encode_no_template"), text.index("def tokenize_prompts")
    import torch

    names["torch"] = torch
    exec(text[start:end], names)
    return types.SimpleNamespace(**names, base=base, shipped=root.parent / "configs/finetune")


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("mindspeed_infer_base", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS, "bos_token": "<s>"})
    tokenizer.save_pretrained(path)
    return path


def convert(flags: str) -> Config:
    translation = translate_arguments("mindspeed-llm", f"inference.py --load ckpt {flags}".split())
    importers = Importers(translate=lambda _: translation)
    return load([translation.name], importers=importers).config


def tokenizer_of(folder: Path, template: str) -> Any:
    """Return the tokenizer as the original changes it for a template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template:
        fix = sys.modules["mindspeed_preprocess.templates"].fix_model_tokenizer
        fix(tokenizer, template, str(original().shipped / "templates.json"))
    return tokenizer


def expected_ids(folder: Path, template: str, thinking: bool | None, prompts: Any) -> list[int]:
    functions, tokenizer = original(), tokenizer_of(folder, template)
    if not template:
        return functions._encode_no_template(tokenizer, prompts)[0]
    file = str(functions.shipped / "templates.json")
    sys.modules["mindspeed_preprocess.templates"].templates.pop(template)  # of another mode
    rules = functions.get_model_template(template, file, thinking)
    return functions._encode_by_template(rules, tokenizer, prompts)[0]


def chat_prompts(config: Config, folder: Path) -> ChatPrompts:
    section = config.chat
    renderer = choose_renderer(folder, section.template, enable_thinking=section.enable_thinking)
    return ChatPrompts.of(config, renderer)


TEMPLATES = ["", "qwen", "qwen3", "llama3", "default", "empty"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_of_generate_is_that_of_the_original(template: str, folder: Path) -> None:
    original()
    config = convert("--task greedy" + (f" --prompt-type {template}" if template else ""))
    section = config.generate
    renderer = choose_renderer(folder, section.template, enable_thinking=section.enable_thinking)
    text = str(section.prompt)
    ids = raw_ids(renderer, text) if section.raw else renderer.prompt(_question(text))
    assert ids.tolist() == expected_ids(folder, template, None, ["how are you?"])


def _question(text: str) -> Any:
    from msrl.types import Conversation

    return Conversation((Message("user", text),))


@pytest.mark.sample(24)
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("turns", [None, 0, 1, 4])
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_prompt_of_a_chat_is_that_of_the_original(
    template: str, turns: int | None, thinking: bool | None, folder: Path
) -> None:
    flags = "--task chat" + (f" --prompt-type {template}" if template else "")
    flags += "" if turns is None else f" --history-turns {turns}"
    flags += "" if thinking is None else f" --enable-thinking {str(thinking).lower()}"
    if thinking is not None and template != "qwen3":
        pytest.skip("only templates with thoughts read it")
    base, prompts = original().base, chat_prompts(convert(flags), folder)
    args = types.SimpleNamespace(
        hf_chat_template=False, prompt_type=template or None, history_turns=3
    )
    args.history_turns = 3 if turns is None else turns
    plain: list[Any] = []
    messages: list[Any] = []
    state: tuple[Message, ...] = ()
    for number, question in enumerate(QUESTIONS):
        instruction = base.chat_get_instruction(args, plain, messages, question)
        state = prompts.recall((*state, Message("user", question)))
        ids = prompts.token_ids(state)
        assert ids.tolist() == expected_ids(folder, template, thinking, instruction), number
        answer = f"answer {number}"
        _remember(args, answer, plain, messages, question)
        state = (*state, Message("assistant", answer))


def _remember(args: Any, answer: str, plain: list[Any], messages: list[Any], text: str) -> None:
    """Add a response as chat_print_and_update_histories does without its rank 0."""
    base = original().base
    distributed = base.dist
    base.dist = types.SimpleNamespace(get_rank=lambda: 1)
    try:
        base.chat_print_and_update_histories(args, [answer], plain, messages, text)
    finally:
        base.dist = distributed


def test_the_chat_template_of_the_tokenizer_is_used_on_request(folder: Path) -> None:
    prompts = chat_prompts(convert("--task chat --hf-chat-template"), folder)
    turns = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    expected = tokenizer_of(folder, "").apply_chat_template(
        [{"role": turn.role, "content": turn.content} for turn in turns],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert prompts.token_ids(turns).tolist() == expected


@pytest.mark.parametrize(
    ("flags", "section", "values"),
    [
        ("--task chat --add-eos-token <|im_end|> x", "chat", {"stop": ("<|im_end|>", "x")}),
        (
            "--task greedy --lora-load a --lora-target-modules linear_qkv",
            "generate",
            {"lora": "a"},
        ),
        ("--task chat", "chat", {"dtype": "float32", "lora": None}),
        ("--task chat --bf16 --top-p 0 --top-k 0", "chat", {"top_p": 1.0, "top_k": -1}),
    ],
)
def test_options_of_inference_are_honored(flags: str, section: str, values: dict[str, Any]) -> None:
    config = getattr(convert(flags), section)
    assert {name: getattr(config, name) for name in values} == values


def test_sizes_that_do_not_divide_the_heads_become_one_that_does() -> None:
    line = (
        "inference.py --load ckpt --task greedy --num-attention-heads 28 "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
    )
    translation = translate_arguments("mindspeed-llm", line.split())
    results = {r.entry.key: r for r in translation.key_results}
    size = results["pipeline_model_parallel_size"]
    assert size.status is KeyStatus.APPLIED and "28 attention heads" in size.text
    assert convert(line.partition("ckpt ")[2]).rollout.engine.tp == 4
