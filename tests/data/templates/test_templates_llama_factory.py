"""Token ids and loss masks of the packaged templates against LLaMA-Factory's templates.

Every difference is a row of `PEERS`: with the named fields changed, a template equals its peer.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import llama_factory_oracle as oracle
from msrl.data.render import make_renderer
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import load_tokenizer, text_tokenizer
from msrl.types import Conversation, Message, RenderedExample
from support import shared_data

# The line feed after an answer belongs to the next turn in the models' own chat templates.
TRAINED_LINE_FEED = {"assistant": "{{content}}{{eos}}\n", "after_assistant": ""}
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
INTERN = (
    "You are an AI assistant whose name is InternLM (书生·浦语).\n- InternLM (书生·浦语) is a "
    "conversational language model that is developed by Shanghai AI Laboratory (上海人工智能实验室)"
    ". It is designed to be helpful, honest, and harmless.\n- InternLM (书生·浦语) can understand "
    "and communicate fluently in the language chosen by the user such as English and 中文."
)
# Template, LLaMA-Factory's template, and the fields that differ.
PEERS: list[tuple[str, str, dict[str, str]]] = [
    ("qwen_lf", "qwen", {}),
    # The default system text is MindSpeed's.
    ("qwen", "qwen", {"default_system": QWEN, **TRAINED_LINE_FEED}),
    ("qwen3", "qwen3", TRAINED_LINE_FEED),
    ("llama2", "llama2", {}),
    ("llama3", "llama3", {}),
    # The space stands before the closing bracket, as in MindSpeed and in the model's own template.
    (
        "mistral",
        "mistral",
        {"user": "[INST] {{content}}[/INST]", "assistant": " {{content}}{{eos}}"},
    ),
    ("chatml", "chatml", {"assistant": "{{content}}{{eos}}\n", "separator": ""}),
    ("chatml_de", "chatml_de", {"assistant": "{{content}}{{eos}}\n", "separator": ""}),
    ("deepseek2", "deepseek", {}),
    ("deepseek3", "deepseek3", {}),
    ("deepseek3", "deepseekr1", {"thought_start": "<think>\n", "thought_end": "\n</think>\n\n"}),
    ("glm4", "glm4", {}),
    ("glm4_moe", "glm4_moe", {}),
    ("chatglm3", "chatglm3", {}),
    # LLaMA-Factory ends the last answer with the end-of-text token only.
    ("gpt_oss", "gpt_oss", {"assistant": "{{content}}"}),
    (
        "gemma",
        "gemma",
        {"assistant": "{{content}}<end_of_turn>\n", "after_assistant": ""},
    ),
    (
        "gemma",
        "gemma2",
        {"assistant": "{{content}}<end_of_turn>\n", "after_assistant": "", "end": "{{eos}}"},
    ),
    # LLaMA-Factory describes InternLM where a row has no system text.
    ("intern2", "intern2", {"default_system": INTERN}),
    ("alpaca", "alpaca", {"assistant": "{{content}}{{eos}}\n\n", "separator": ""}),
    # Plain turns of MindSpeed, without an end-of-text token after a question.
    (
        "default",
        "default",
        {
            "system": "System: {{content}}{{eos}}\n",
            "user": "Human: {{content}}{{eos}}\n",
            **TRAINED_LINE_FEED,
        },
    ),
    ("empty", "empty", {}),
]
# No control token stands between a system text and a question, which msrl encodes together, as a
# chat template does. LLaMA-Factory encodes them separately.
PLAIN_TEXT = ("deepseek2", "alpaca", "empty")
TALKS: dict[str, list[tuple[str, str]]] = {
    "one round": [("user", "What is 2+2?"), ("assistant", "It is 4.")],
    "system": [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi")],
    "three rounds": [
        ("system", "Answer in German.\nAlways."),
        ("user", "one"),
        ("assistant", "eins"),
        ("user", "  two \n"),
        ("assistant", "zwei\n\nEnde"),
        ("user", "三"),
        ("assistant", "3️⃣ drei"),
    ],
    "empty answer": [("user", "Say nothing."), ("assistant", "")],
}
TOOLS = [(name, changes) for name, _, changes in PEERS if name in ("qwen", "qwen3")]
THOUGHTS: dict[str, list[tuple[str, str]]] = {
    "thoughts": [
        ("user", "2+2?"),
        ("assistant", "<think>\nadd\n</think>\n\n4"),
        ("user", "3+3?"),
        ("assistant", "<think>\nadd\nagain\n</think>\n\n6"),
    ],
    "one thought": [
        ("user", "2+2?"),
        ("assistant", "4"),
        ("user", "3+3?"),
        ("assistant", "<think>\nadd\n</think>\n\n6"),
    ],
}


@cache
def _with_control_tokens(folder: str) -> Any:
    """Return a real tokenizer with the control tokens of all templates and peers."""
    hf = copy.deepcopy(load_tokenizer(shared_data("tokenizers", folder)))
    hf.bos_token = hf.bos_token or hf.eos_token
    tokens = dict.fromkeys(
        token
        for name, peer, _ in PEERS
        for token in (*load_template(name).special, *oracle.special_tokens(peer))
    )
    hf.add_special_tokens(
        {"additional_special_tokens": list(tokens)}, replace_extra_special_tokens=False
    )
    return hf, hf.eos_token


def tokenizer(folder: str, peer: str) -> Any:
    """Return a tokenizer whose end-of-text token is the peer's, if it has one."""
    oracle.template_module()
    hf, eos = _with_control_tokens(folder)
    replaces = oracle.template_module().TEMPLATES[peer].replace_eos
    hf.eos_token = oracle.special_tokens(peer)[0] if replaces else eos
    return hf


def render(
    hf: Any, name: str, changes: dict[str, str], talk: list[tuple[str, str]], **options: Any
) -> RenderedExample:
    tools = options.pop("tools", None)
    template = replace(load_template(name), **changes)
    messages = tuple(Message(role, text) for role, text in talk)  # type: ignore[arg-type]
    extra = {"tools": tools} if tools else {}
    renderer = make_renderer(template, text_tokenizer(hf), **options)
    return renderer.examples([Conversation(messages, extra=extra)])[0]


def peer_messages(talk: list[tuple[str, str]]) -> tuple[str | None, list[dict[str, str]]]:
    system = talk[0][1] if talk[0][0] == "system" else None
    turns = talk[1:] if system is not None else talk
    return system, [{"role": role, "content": text} for role, text in turns]


def assert_equal(
    hf: Any, example: RenderedExample, ids: list[int], mask: list[bool], *, in_turns: bool = True
) -> None:
    """Assert equal tokens and masks, or equal text if the peer splits text that msrl joins."""
    actual, actual_mask = example.token_ids.tolist(), example.loss_mask.tolist()
    assert hf.decode(actual) == hf.decode(ids)
    if in_turns:
        assert (actual, actual_mask) == (ids, mask)
    else:
        assert _trained_text(hf, actual, actual_mask) == _trained_text(hf, ids, mask)


def _trained_text(hf: Any, ids: list[int], mask: list[bool]) -> str:
    return hf.decode([number for number, flag in zip(ids, mask, strict=True) if flag])


@pytest.mark.sample(56)
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("folder", ["qwen2.5-0.5b-instruct", "gpt2"])
@pytest.mark.parametrize(("name", "peer", "changes"), PEERS, ids=[f"{a}-{b}" for a, b, _ in PEERS])
def test_a_template_has_the_tokens_and_mask_of_its_peer(
    name: str, peer: str, changes: dict[str, str], folder: str, talk: str
) -> None:
    hf = tokenizer(folder, peer)
    example = render(hf, name, changes, TALKS[talk])
    system, messages = peer_messages(TALKS[talk])
    thinking = None if load_template(name).thought_start or "thought_start" in changes else True
    assert_equal(
        hf,
        example,
        *oracle.encode(peer, hf, messages, system=system, enable_thinking=thinking),
        in_turns=name not in PLAIN_TEXT,
    )


@pytest.mark.parametrize("talk", THOUGHTS)
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize(("name", "peer"), [("qwen3", "qwen3")])
def test_thoughts_are_trained_as_by_the_peer(
    name: str, peer: str, thinking: bool | None, talk: str
) -> None:
    hf = tokenizer("qwen3-4b", peer)
    example = render(hf, name, TRAINED_LINE_FEED, THOUGHTS[talk], enable_thinking=thinking)
    _, messages = peer_messages(THOUGHTS[talk])
    assert_equal(hf, example, *oracle.encode(peer, hf, messages, enable_thinking=thinking))


@pytest.mark.parametrize(("name", "changes"), TOOLS)
def test_tools_and_their_responses_are_rendered_as_by_the_peer(
    name: str, changes: dict[str, str]
) -> None:
    hf = tokenizer("qwen3-4b", name)
    tool = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    wrapped = json.dumps([{"type": "function", "function": tool}])
    text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    # Without a system text, the peer keeps two line feeds in front of the tools, unlike Qwen.
    talk = [("system", "Be brief."), ("user", "1+2?")]
    talk += [("assistant", text), ("tool", "3"), ("assistant", "It is 3.")]
    example = render(hf, name, changes, talk, tools=wrapped)
    messages = [
        {"role": "user", "content": "1+2?"},
        {"role": "function", "content": json.dumps(call)},
        {"role": "observation", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    tools = json.dumps([tool])
    assert_equal(
        hf,
        example,
        *oracle.encode(name, hf, messages, system="Be brief.", tools=tools, enable_thinking=None),
    )
