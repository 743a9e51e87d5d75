"""Templates of a user's templates.json, and the packaged names of MindSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msrl.data.render import make_renderer
from msrl.data.templates.files import load_template, template_names
from msrl.data.tokenizer import load_tokenizer, text_tokenizer
from msrl.errors import MsrlError
from msrl.types import Conversation, Message
from support import assert_mentions, shared_data

MINDSPEED_LLM = [
    "chatglm2",
    "chatglm3",
    "chatglm3_system",
    "glm4",
    "glm4_moe",
    "chatml",
    "chatml_de",
    "cpm",
    "default",
    "empty",
    "trl",
    "qwen_lf",
    "qwen",
    "qwen_r1",
    "qwen_math_r1",
    "llama3",
    "mistral",
    "mixtral",
    "magistral",
    "gemma",
    "llama2",
    "alpaca",
    "deepseek2",
    "deepseek2-lite",
    "minicpm3",
    "baichuan2",
    "deepseek3",
    "intern2",
    "hunyuan",
    "qwen3",
    "bailing_mini",
    "plm",
    "gpt_oss",
    "deepseek4",
]
MINDSPEED_RL = [
    "default",
    "empty",
    "trl",
    "qwen",
    "qwen_retool",
    "qwen_search_tool",
    "qwen_r1",
    "qwen_math_r1",
    "qwen3",
    "llama3",
    "mistral",
    "mixtral",
    "gemma",
    "llama2",
    "alpaca",
    "deepseek2",
    "deepseek2-lite",
    "minicpm3",
    "baichuan2",
    "deepseek3",
    "deepseek3_r1",
]


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", sorted({*MINDSPEED_LLM, *MINDSPEED_RL}))
def test_every_name_of_mindspeed_is_packaged_or_refused_with_a_reason(name: str):
    assert (len(MINDSPEED_LLM), len(MINDSPEED_RL)) == (34, 21)
    if name != "deepseek4":
        assert load_template(name).name == name
        return
    with pytest.raises(MsrlError) as caught:
        load_template(name)
    assert_mentions(caught.value, "deepseek4", "native")


ENTRIES: list[dict[str, Any]] = [
    {
        "name": "rounds",
        "format_prefix": {"slots": [["bos_token"]]},
        "format_user": {"slots": ["[{{idx}}] {{content}} ", {"token": "<|endoftext|>"}, "A:"]},
        "format_system": {"slots": ["S:{{content}}\n"]},
        "format_separator": {"slots": ["\n--\n"]},
        "default_system": ["Be ", "brief."],
        "efficient_eos": True,
    },
    {"name": "plain", "format_user": {"slots": ["Q: {{content}} A:"]}},
    {
        "name": "thinking",
        "format_user": {"slots": ["Q: {{content}} A:"]},
        "template_class": "ReasoningTemplate",
        "thought_words": ["<t>", "</t>"],
    },
    {
        "name": "llama2_own",
        "format_user": {"slots": ["[{{content}}]"]},
        "format_system": {"slots": ["<{{content}}>"]},
    },
    {"name": "in_code", "template_class": "DeepSeek4Template"},
    {"name": "odd", "format_user": {"slots": [{"tokens": "x"}]}},
    {"name": "later", "format_thing": {"slots": ["x"]}},
]


def render(tmp_path: Path, name: str, *turns: tuple[str, str]) -> tuple[str, list[str]]:
    """Return the text and the trained texts of a conversation with a template of the file."""
    path = tmp_path / "templates.json"
    path.write_text(json.dumps(ENTRIES))
    gpt2 = load_tokenizer(shared_data("tokenizers", "gpt2"))
    renderer = make_renderer(load_template(f"{path}:{name}"), text_tokenizer(gpt2))
    conversation = Conversation(tuple(Message(role, text) for role, text in turns))  # type: ignore[arg-type]
    spans = renderer.spans(conversation)
    example = renderer.examples([conversation])[0]
    text = gpt2.decode(example.token_ids)
    assert text == "".join(span.text for span in spans)
    return text, [gpt2.decode(example.token_ids[example.loss_mask])]


TALK = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))


def test_slots_separator_index_and_efficient_eos_are_rendered(tmp_path: Path):
    eos = "<|endoftext|>"
    text, trained = render(tmp_path, "rounds", *TALK)
    assert text == f"{eos}S:Be brief.\n[0] a {eos}A:b\n--\n[1] c {eos}A:d{eos}"
    assert trained == [f"bd{eos}"]


def test_answers_end_with_the_end_of_text_token_by_default(tmp_path: Path):
    text, trained = render(tmp_path, "plain", *TALK)
    assert text == "Q: a A:b<|endoftext|>Q: c A:d<|endoftext|>"
    assert trained == ["b<|endoftext|>d<|endoftext|>"]


def test_reasoning_templates_have_the_thought_words_of_the_file(tmp_path: Path):
    text, _ = render(tmp_path, "thinking", ("user", "a"), ("assistant", "<think>h</think>b"))
    assert text == "Q: a A:<t>h</t>b<|endoftext|>"


def test_llama2_templates_put_the_system_text_into_the_question(tmp_path: Path):
    text, _ = render(tmp_path, "llama2_own", ("system", "s"), *TALK[:2])
    assert text == "[<s>a]b<|endoftext|>"


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("in_code", ("in_code", "DeepSeek4Template", "native")),
        ("odd", ("format_user", "tokens")),
        ("later", ("format_thing", "field")),
        ("plane", ("plane", "'plain'")),
        ("", ("FILE.json:NAME",)),
    ],
)
def test_an_entry_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, fragments: tuple[str, ...]
):
    path = tmp_path / "templates.json"
    path.write_text(json.dumps(ENTRIES))
    with pytest.raises(MsrlError) as caught:
        load_template(f"{path}:{name}" if name else str(path))
    assert_mentions(caught.value, path, *fragments)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "[1]", "[" * 100_000, pytest.param(" " * (3 << 20), id="large")]
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "templates.json"
    path.write_text(text)
    with pytest.raises(MsrlError) as caught:
        load_template(f"{path}:x")
    assert_mentions(caught.value, path)


def test_qwen_r1_of_both_systems_can_be_told_apart():
    assert "qwen_r1_mindspeed_llm" in template_names()
    assert "</answer>. Put your final" in load_template("qwen_r1").user
    assert "</answer>Put your final answer within \\\\boxed{}. {{content}}" in (
        load_template("qwen_r1_mindspeed_llm").user
    )
