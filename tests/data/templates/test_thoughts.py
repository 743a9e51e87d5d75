"""A thought stands at the beginning of an answer, up to its first end tag."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from msrl.data.native import turn_fields
from msrl.data.render import Renderer, make_renderer
from msrl.data.templates.files import load_template
from msrl.data.templates.form import Template
from msrl.data.tokenizer import TextTokenizer, text_tokenizer
from msrl.environments.tools import split_thoughts
from msrl.errors import MsrlError
from msrl.thoughts import SplitAnswer, split_thought, without_thought
from msrl.types import Conversation, Message
from published_tokenizers import published_tokenizer, with_chat_template
from support import mentions

SPLITS: list[tuple[str, bool, SplitAnswer]] = [
    ("four", False, SplitAnswer(None, "four")),
    ("<think>a</think>b", False, SplitAnswer("a", "b")),
    (" \n<think>a</think>b", False, SplitAnswer("a", "b")),
    ("<think>a</think>b<think>c</think>d", False, SplitAnswer("a", "b<think>c</think>d")),
    ("<think>a<think>b</think>c</think>d", False, SplitAnswer("a<think>b", "c</think>d")),
    ("Use the </think> tag.", False, SplitAnswer(None, "Use the </think> tag.")),
    ("b <think>a</think>", False, SplitAnswer(None, "b <think>a</think>")),
    ("<think>a", False, SplitAnswer("a", "", is_terminated=False)),
    ("a</think>b", True, SplitAnswer("a", "b")),
    ("<think>a</think>b", True, SplitAnswer("a", "b")),
    ("a", True, SplitAnswer("a", "", is_terminated=False)),
]
UNTRAINABLE = [
    ("Use the </think> tag to end.", "without"),
    ("reasons</think>answer", "without"),
    ("<think>a<think>b</think>c</think>d", "without"),
    ("<think>cut", "no </think>"),
    ("<think>a</think>", "no answer"),
    ("<think>a</think>\n\n", "no answer"),
]


@pytest.mark.parametrize(("answer", "is_open", "expected"), SPLITS)
def test_a_thought_ends_at_its_first_end_tag(answer: str, is_open: bool, expected: SplitAnswer):
    assert split_thought(answer, is_open=is_open) == expected


@pytest.mark.parametrize(("answer", "is_open", "expected"), SPLITS)
def test_calls_are_read_where_the_thought_ends(answer: str, is_open: bool, expected: SplitAnswer):
    thought, visible, rest = split_thoughts(answer, opens_thought=is_open)
    assert thought + visible + rest == answer
    assert visible + rest == expected.text


def test_a_ground_truth_has_no_thought_and_no_part_of_one():
    assert without_thought(" <think>a</think>\n\n4") == "4"
    assert without_thought("<think>cut") == ""
    assert without_thought("4") == "4"
    with pytest.raises(MsrlError, match=mentions("</think>", "without")):
        without_thought("two and two</think>4")


@cache
def tokenizer() -> TextTokenizer:
    return text_tokenizer(published_tokenizer("qwen3-4b"))


def qwen3(name: str) -> Renderer:
    return make_renderer(load_template(name), tokenizer())


def talk(*answers: str) -> Conversation:
    turns = [turn for a in answers for turn in (Message("user", "q"), Message("assistant", a))]
    return Conversation(tuple(turns))


def targets(renderer: Renderer, conversation: Conversation) -> str:
    (example,) = renderer.examples([conversation])
    ids = np.asarray(example.token_ids)[np.asarray(example.loss_mask)]
    return renderer.tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ["qwen3", "native"])
@pytest.mark.parametrize(("answer", "keyword"), UNTRAINABLE)
def test_an_answer_with_an_incomplete_thought_is_not_trained(name: str, answer: str, keyword: str):
    for conversation in (talk(answer), talk("fine", answer), talk(answer, "fine")):
        with pytest.raises(MsrlError, match=mentions(keyword)):
            qwen3(name).examples([conversation])


@pytest.mark.parametrize("name", ["qwen3", "native"])
def test_all_text_after_the_first_thought_is_trained(name: str):
    text = targets(qwen3(name), talk("<think>a</think>text1<think>b</think>text2"))
    assert text == "<think>\na\n</think>\n\ntext1<think>b</think>text2<|im_end|>"


@pytest.mark.parametrize("name", ["qwen3", "native"])
def test_a_tag_in_an_earlier_answer_of_a_prompt_stays_text(name: str):
    renderer = qwen3(name)
    prompt = (Message("user", "q"), Message("assistant", "Use </think>."), Message("user", "r"))
    text = renderer.tokenizer.backend.decode(renderer.prompt(Conversation(prompt)).tolist())
    assert "assistant\nUse </think>.\nuser" in text


OPEN = Template(
    "open", user="<|im_start|>user\n{{content}}<|im_end|>\n",
    assistant_start="<|im_start|>assistant\n<think>\n", assistant="{{content}}<|im_end|>",
    after_assistant="\n",
)  # fmt: skip


def test_a_template_that_begins_the_thought_does_not_repeat_its_tag():
    renderer = make_renderer(OPEN, tokenizer())
    for answer in ("<think>\na\n</think>\n\nb", "a\n</think>\n\nb"):
        assert targets(renderer, talk(answer)) == "a\n</think>\n\nb<|im_end|>"
    with pytest.raises(MsrlError, match=mentions("thought", "no </think>")):
        renderer.examples([talk("b")])


@pytest.mark.slow
def test_a_native_template_that_begins_the_thought_trains_it(tmp_path: Path):
    source = published_tokenizer("qwen3-4b").chat_template
    generation = source.rindex("<|im_start|>assistant\\n")
    chat_template = source[:generation] + source[generation:].replace(
        "<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n", 1
    )
    tokenizer = with_chat_template("qwen3-4b", chat_template, tmp_path)
    renderer = make_renderer(load_template("native"), tokenizer)
    for answer in ("<think>\na\n</think>\n\nb", "a</think>b"):
        assert targets(renderer, talk(answer)) == "a\n</think>\n\nb<|im_end|>"


def test_a_thought_is_passed_in_the_field_that_the_chat_template_reads():
    message = Message("assistant", "<think>a</think>b")
    plain = {"role": "assistant", "content": "b"}
    assert turn_fields(message, "{{ m.reasoning_content }}") == {**plain, "reasoning_content": "a"}
    assert turn_fields(message, "{{ message['thinking'] }}") == {**plain, "thinking": "a"}
    unknown = turn_fields(message, "{% if thinking %}{{ enable_thinking }}{% endif %}")
    assert unknown == {"role": "assistant", "content": message.content}
