"""Templates as Jinja: transformers renders the same text as msrl for every packaged template."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from msrl.data.chat_template import chat_template
from msrl.data.render import Renderer, make_renderer
from msrl.data.templates.files import load_template, template_names
from msrl.data.tokenizer import TextTokenizer, open_tokenizer
from msrl.errors import MsrlError
from msrl.types import ChatFormat, Conversation
from test_templates import talk
from tiny_qwen2 import make_tokenizer

TOOL = '{"type": "function", "function": {"name": "weather", "description": "日本 \\"it\'s\\""}}'
CONVERSATIONS = {
    "a question": talk(("user", "What is 2 + 2?")),
    "a system text": talk(("system", 'Say it\'s "so".\n'), ("user", "  Two\n\nlines, 日本語 🙂 ")),
    "several turns": talk(
        ("user", "Hi"),
        ("assistant", "\n\nHello!"),
        ("user", "{{content}} {%- x %}"),
        ("user", "So?"),
    ),
    "an answer": talk(("user", "Hi"), ("assistant", "Hello!")),
    "thoughts": talk(
        ("user", "a"),
        ("assistant", "<think>\nb\n</think>\n\nc"),
        ("user", "d"),
        ("assistant", "<think>e</think>f"),
    ),
    "tool answers": talk(
        ("user", "Weather?"),
        ("assistant", "<think>\nhm\n</think>\n\ncall"),
        ("tool", "sunny"),
        ("tool", "warm"),
        ("assistant", "Fine."),
        ("tool", "!"),
        ("assistant", "ok"),
    ),
    "tools": talk(("user", "Weather?"), extra={"tools": f"[{TOOL}, {TOOL}]"}),
    "tools and a system text": talk(
        ("system", "Be brief."), ("user", "Weather?"), extra={"tools": f"[{TOOL}]"}
    ),
}


@cache
def tokenizer_with(tokens: tuple[str, ...]) -> TextTokenizer:
    """Return a tokenizer that has the control tokens of a template."""
    backend: Any = make_tokenizer().backend_tokenizer
    backend.add_special_tokens([*tokens, "<s>", "</s>"])
    return TextTokenizer(backend, "<s>", "</s>", None, folder="here")


def make_test_renderer(name: str, **options: bool) -> Renderer:
    template = load_template(name)
    return make_renderer(template, tokenizer_with((*template.special, *template.stop)), **options)


def by_jinja(source: str, conversation: Conversation, *, asks: bool, **options: bool) -> str:
    messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
    tools = json.loads(conversation.extra["tools"]) if "tools" in conversation.extra else None
    return make_tokenizer().apply_chat_template(
        messages,
        tools=tools,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=asks,
        **options,
    )


def by_parts(renderer: Renderer, conversation: Conversation, *, asks: bool) -> str:
    return "".join(
        span.text
        for span in [
            *renderer.spans(conversation, is_prompt=asks),
            *(renderer.generation_prompt() if asks else []),
        ]
    )


@pytest.mark.sample(50)
@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", [name for name in template_names() if name != "native"])
def test_the_chat_template_renders_the_same_text_as_the_template(name: str, case: str):
    conversation = CONVERSATIONS[case]
    for options in (
        ({}, {"enable_thinking": False}, {"enable_thinking": True})
        if load_template(name).thought_start
        else ({},)
    ):
        renderer = make_test_renderer(name, **options)
        source = chat_template(renderer)
        for asks in (True, False):
            try:
                expected = by_parts(renderer, conversation, asks=asks)
            except MsrlError:
                with pytest.raises(TemplateError, match=rf"template {name} "):
                    by_jinja(source, conversation, asks=asks)
                continue
            assert by_jinja(source, conversation, asks=asks) == expected
            assert (
                by_jinja(
                    chat_template(make_test_renderer(name)), conversation, asks=asks, **options
                )
                == expected
            )


def test_the_tokenizers_chat_template_is_not_replaced():
    assert chat_template(make_test_renderer("native")) == ""


def test_an_exported_folder_contains_the_template_and_its_stop_tokens(tmp_path: Path):
    from msrl.checkpoint.hf.folder import copy_sidecars
    from msrl.workflows.engine import choose_renderer

    (tmp_path / "from").mkdir()
    make_tokenizer().save_pretrained(tmp_path / "from")
    settings = json.loads((tmp_path / "from" / "tokenizer_config.json").read_text())
    settings |= {
        "eos_token": "<|endoftext|>",
        "chat_template": "{{ messages[0].content }}",
    }  # a base model, and where templates once lay
    (tmp_path / "from" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "from" / "config.json").write_text("{}")
    (tmp_path / "from" / "generation_config.json").write_text('{"eos_token_id": 0, "top_p": 0.8}')
    original = make_renderer(load_template("qwen_r1"), open_tokenizer(tmp_path / "from"))
    copy_sidecars(
        tmp_path / "from",
        tmp_path / "to",
        None,
        ChatFormat(chat_template(original), original.stop_token_ids),
    )
    exported = choose_renderer(tmp_path / "to", None)
    question = CONVERSATIONS["a question"]
    assert exported.prompt(question).tolist() == original.prompt(question).tolist()
    assert (
        set(exported.stop_token_ids) == {0, 2} == set(original.stop_token_ids)
    )  # <|endoftext|> and <|im_end|>
    assert json.loads((tmp_path / "to" / "generation_config.json").read_text()) == {
        "eos_token_id": [2, 0],
        "top_p": 0.8,
    }
    assert "chat_template" not in json.loads(
        (tmp_path / "to" / "tokenizer_config.json").read_text()
    )
