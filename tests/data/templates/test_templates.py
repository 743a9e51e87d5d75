"""Templates: token ids and loss masks compared with the rendering of Hugging Face, and messages."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken

from msrl.data.render import Renderer, make_renderer
from msrl.data.templates.files import load_template, template_names
from msrl.data.tokenizer import load_tokenizer, text_tokenizer
from msrl.errors import MsrlError
from msrl.types import Conversation, Message
from published_tokenizers import published_tokenizer, with_chat_template
from support import assert_mentions, mentions, shared_data

SYSTEM = "You are a helpful assistant."
PREAMBLE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant "
    "solves it. The assistant first thinks "
    "about the reasoning process in the mind and then provides the user with the answer. The "
    "reasoning process and answer are enclosed "
    "within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning "
    "process here </think><answer> answer "
    "here </answer>. Put your final answer within \\boxed{}.\n"
)


def qwen2():
    return published_tokenizer("qwen2.5-0.5b-instruct")


def qwen3():
    return published_tokenizer("qwen3-4b")


def renderer(template: str, hf, **options) -> Renderer:
    return make_renderer(load_template(template), text_tokenizer(hf), **options)


def talk(*turns: tuple[str, str], extra=None) -> Conversation:
    return Conversation(tuple(Message(role, text) for role, text in turns), extra=extra or {})


def hf_ids(hf, conversation: Conversation, **options) -> list[int]:
    messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
    return hf.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]


def trained_texts(hf, example) -> list[str]:
    """Return the trained spans as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask.astype(int), [0]])))
    return [hf.decode(example.token_ids[a:b]) for a, b in edges.reshape(-1, 2)]


CONVERSATIONS = {
    "one question": talk(("user", "What is 2 + 2?"), ("assistant", "4")),
    "several turns": talk(
        ("user", "Hi"),
        ("assistant", "Hello! How can I help?"),
        ("user", "  Two\n\nlines, 日本語 🙂 "),
        ("assistant", "Yes.\n\nSure."),
    ),
    "tools": talk(
        ("user", "Weather?"),
        ("assistant", "<tool_call>\n{}\n</tool_call>"),
        ("tool", "sunny"),
        ("tool", "warm"),
        ("assistant", "Fine."),
    ),
}


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("system", [SYSTEM, "Answer in French."])
def test_qwen_is_equal_to_the_rendering_of_qwen25(case, system):
    conversation = talk(
        ("system", system), *((m.role, m.content) for m in CONVERSATIONS[case].messages)
    )
    example = renderer("qwen", qwen2()).examples([conversation])[0]
    assert example.token_ids.tolist() == hf_ids(qwen2(), conversation)


def test_qwen_has_mindspeeds_default_system_text():
    bare, full = talk(("user", "Hi")), talk(("system", SYSTEM), ("user", "Hi"))
    assert renderer("qwen", qwen2()).prompt(bare).tolist() == hf_ids(
        qwen2(), full, add_generation_prompt=True
    )


def test_prompt_tokens_of_qwen_match_the_golden_ids():
    prompt = renderer("qwen", qwen2()).prompt(talk(("user", "2+2?")))
    # In Qwen's vocabulary <|im_start|> is 151644, <|im_end|> 151645, "\n" 198, "system" 8948,
    # "user" 872 and "assistant" 77091.
    text = [2610, 525, 264, 10950, 17847, 13]
    question = [17, 10, 17, 30]
    expected = [
        151644,
        8948,
        198,
        *text,
        151645,
        198,
        151644,
        872,
        198,
        *question,
        151645,
        198,
        151644,
        77091,
        198,
    ]
    assert prompt.tolist() == expected


def test_exactly_the_answers_with_their_end_of_turn_tokens_are_trained():
    example = renderer("qwen", qwen2()).examples([CONVERSATIONS["several turns"]])[0]
    assert trained_texts(qwen2(), example) == [
        "Hello! How can I help?<|im_end|>",
        "Yes.\n\nSure.<|im_end|>",
    ]


def test_a_prompt_is_a_prefix_of_the_example():
    render = renderer("qwen3", qwen3())
    conversation = talk(("user", "Hi"), ("assistant", "\n Hello"))
    prompt = render.prompt(talk(("user", "Hi")))
    example = render.examples([conversation])[0]
    assert example.token_ids[: len(prompt)].tolist() == prompt.tolist()
    assert not example.loss_mask[: len(prompt)].any()
    assert trained_texts(qwen3(), example) == [" Hello<|im_end|>"]


THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour"
QWEN3 = {
    "no thought in the last answer": talk(("user", "2+2?"), ("assistant", "Four")),
    "a thought in the last answer": talk(("user", "2+2?"), ("assistant", THOUGHT)),
    "a thought before a tool stays": talk(
        ("user", "2+2?"),
        ("assistant", THOUGHT),
        ("tool", "4"),
        ("assistant", THOUGHT),
        ("tool", "5"),
        ("assistant", "Five"),
    ),
    "with a system text": talk(("system", SYSTEM), ("user", "2+2?"), ("assistant", "Four")),
}


@pytest.mark.parametrize("case", QWEN3)
def test_qwen3_is_equal_to_the_rendering_of_qwen3(case):
    assert renderer("qwen3", qwen3()).examples([QWEN3[case]])[0].token_ids.tolist() == hf_ids(
        qwen3(), QWEN3[case]
    )


@pytest.mark.parametrize("enable_thinking", [None, True, False])
@pytest.mark.parametrize("native", [False, True])
def test_qwen3_prompts_depend_on_enable_thinking(enable_thinking, native):
    conversation = talk(("user", "2+2?"), ("assistant", THOUGHT), ("user", "Sure?"))
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    render = renderer("native" if native else "qwen3", qwen3(), enable_thinking=enable_thinking)
    assert render.prompt(conversation).tolist() == hf_ids(
        qwen3(), conversation, add_generation_prompt=True, **options
    )


def test_qwen3_without_thinking_trains_the_answer_without_a_thought():
    render = renderer("qwen3", qwen3(), enable_thinking=False)
    for answer in ("Four", THOUGHT):
        example = render.examples([talk(("user", "2+2?"), ("assistant", answer))])[0]
        assert trained_texts(qwen3(), example) == ["Four<|im_end|>"]
        assert example.token_ids.tolist() == hf_ids(
            qwen3(), talk(("user", "2+2?"), ("assistant", "Four"))
        )


def test_qwen3_with_thinking_trains_the_thought_too():
    example = renderer("qwen3", qwen3()).examples([talk(("user", "2+2?"), ("assistant", THOUGHT))])[
        0
    ]
    assert trained_texts(qwen3(), example) == [f"{THOUGHT}<|im_end|>"]


@pytest.mark.parametrize(("template", "hf"), [("qwen", qwen2)])
def test_native_has_the_ids_and_masks_of_the_packaged_template(template, hf):
    for conversation in CONVERSATIONS.values():
        full = talk(("system", SYSTEM), *((m.role, m.content) for m in conversation.messages))
        ours, native = (renderer(name, hf()).examples([full])[0] for name in (template, "native"))
        assert ours.token_ids.tolist() == native.token_ids.tolist()
        assert ours.loss_mask.tolist() == native.loss_mask.tolist()


@pytest.mark.slow
def test_native_masks_follow_generation_blocks(tmp_path):
    chat_template = "{% for m in messages %}{% if m.role == 'assistant' %}"
    chat_template += "A:{% generation %}{{ m.content }}!{% endgeneration %}\n{% else %}"
    chat_template += "Q:{{ m.content }}\n{% endif %}{% endfor %}"
    tokenizer = with_chat_template("qwen2.5-0.5b-instruct", chat_template, tmp_path)
    native = make_renderer(load_template("native"), tokenizer)
    example = native.examples([CONVERSATIONS["several turns"]])[0]
    assert trained_texts(qwen2(), example) == ["Hello! How can I help?!", "Yes.\n\nSure.!"]


def test_native_trains_an_answer_that_contains_its_end_token_to_its_end():
    text = "I end with <|im_end|>, always"
    example = renderer("native", qwen2()).examples([talk(("user", "Hi"), ("assistant", text))])[0]
    assert trained_texts(qwen2(), example) == [f"{text}<|im_end|>"]


def test_native_needs_a_chat_template():
    gpt2 = published_tokenizer("gpt2")
    with pytest.raises(MsrlError, match=mentions("chat template")):
        renderer("native", gpt2).prompt(talk(("user", "Hi")))


def test_qwen_r1_is_mindspeeds_prompt():
    text = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{PREAMBLE}2+2?<|im_end|>\n"
        f"<|im_start|>assistant\n"
    )
    prompt = renderer("qwen_r1", qwen2()).prompt(talk(("user", "2+2?")))
    assert prompt.tolist() == qwen2()(text)["input_ids"]


def test_qwen_math_r1_asks_for_a_box():
    system = "Please reason step by step, and put your final answer within \\boxed{}."
    text = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        f"<|im_start|>assistant\n"
    )
    assert (
        renderer("qwen_math_r1", qwen2()).prompt(talk(("user", "2+2?"))).tolist()
        == qwen2()(text)["input_ids"]
    )


@pytest.mark.slow
def test_a_mistral_prompt_is_equal_to_the_rendering_of_mistral():
    hf = published_tokenizer("mistral-7b-instruct-v0.2")
    conversation = talk(("user", "Hi <s> there"))
    plain = talk(("user", "Hi there"))
    assert renderer("mistral", hf).prompt(plain).tolist() == hf_ids(hf, plain)
    example = renderer("mistral", hf).examples(
        [talk(("user", "Hi"), ("assistant", "Hello"), ("user", "So?"), ("assistant", "Yes"))]
    )[0]
    assert trained_texts(hf, example) == ["Hello</s>", "Yes</s>"]
    assert renderer("mistral", hf).prompt(conversation)[0] == hf.bos_token_id
    assert renderer("mistral", hf).stop_token_ids == (2,)


@pytest.mark.slow
def test_mistral_puts_the_system_text_inside_the_first_question():
    hf = published_tokenizer("mistral-7b-instruct-v0.2")
    prompt = renderer("mistral", hf).prompt(talk(("system", "Be brief."), ("user", "Hi")))
    assert (
        prompt.tolist()
        == hf("<s>[INST] Be brief.\n\nHi [/INST]", add_special_tokens=False)["input_ids"]
    )


def test_default_and_empty_are_plain_text():
    gpt2 = published_tokenizer("gpt2")
    default = renderer("default", gpt2).examples(
        [talk(("system", "Be brief."), ("user", "Hi"), ("assistant", " Hello"))]
    )[0]
    assert gpt2.decode(default.token_ids) == "Be brief.\nHuman: Hi\nAssistant: Hello<|endoftext|>\n"
    assert trained_texts(gpt2, default) == [" Hello<|endoftext|>"]
    empty = renderer("empty", gpt2).examples([talk(("user", "1 + 1 ="), ("assistant", " 2"))])[0]
    assert gpt2.decode(empty.token_ids) == "1 + 1 = 2"


def with_tokens(tmp_path, *tokens: str, **names: str):
    """Return GPT-2's tokenizer with additional control tokens."""
    hf = load_tokenizer(shared_data("tokenizers", "gpt2"))
    hf.add_special_tokens({"additional_special_tokens": list(tokens), **names})
    hf.save_pretrained(tmp_path)
    return load_tokenizer(tmp_path)


def test_llama3_is_metas_prompt_format(tmp_path):
    names = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")
    hf = with_tokens(tmp_path, *names, bos_token="<|begin_of_text|>")
    example = renderer("llama3", hf).examples(
        [talk(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"))]
    )[0]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    text = (
        f"<|begin_of_text|>{header.format('system')}Be "
        f"brief.<|eot_id|>{header.format('user')}Hi<|eot_id|>{header.format('assistant')}"
    )
    assert hf.decode(example.token_ids) == f"{text}Hello<|eot_id|>"
    assert trained_texts(hf, example) == ["Hello<|eot_id|>"]
    assert renderer("llama3", hf).stop_token_ids == (
        hf.convert_tokens_to_ids("<|eot_id|>"),
        hf.eos_token_id,
    )


def test_deepseek3_ends_answers_with_the_end_of_text_token(tmp_path):
    hf = with_tokens(
        tmp_path,
        "<｜User｜>",
        "<｜Assistant｜>",
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
    )
    example = renderer("deepseek3", hf).examples(
        [talk(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"))]
    )[0]
    assert (
        hf.decode(example.token_ids)
        == "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>Hello<｜end▁of▁sentence｜>"
    )
    assert trained_texts(hf, example) == ["Hello<｜end▁of▁sentence｜>"]


def test_control_tokens_in_the_text_of_a_row_remain_text():
    prompt = renderer("qwen", qwen2()).prompt(talk(("user", "say <|im_end|> twice")))
    ids = qwen2().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert [int((prompt == number).sum()) for number in ids] == [3, 2]
    assert "say <|im_end|> twice" in qwen2().decode(prompt)


def test_a_quoted_control_token_does_not_change_the_ids_before_it():
    marked = renderer("qwen", qwen2()).prompt(talk(("user", "\n\nsay\n<|im_end|>")))
    plain = renderer("qwen", qwen2()).prompt(talk(("user", "\n\nsay\n")))
    user = plain.tolist().index(872)
    assert marked[: user + 3].tolist() == plain[: user + 3].tolist()


@pytest.mark.slow
def test_bos_and_eos_in_the_text_of_a_row_remain_text():
    hf = published_tokenizer("mistral-7b-instruct-v0.2")
    text = "say </s> and <s> twice"
    example = renderer("mistral", hf).examples([talk(("user", text), ("assistant", text))])[0]
    assert [int((example.token_ids == number).sum()) for number in (1, 2)] == [1, 1]
    assert example.token_ids[-1] == 2
    start = hf("<s>[INST] say", add_special_tokens=False)["input_ids"]
    assert example.token_ids[: len(start)].tolist() == start
    gpt2 = published_tokenizer("gpt2")
    default = renderer("default", gpt2).examples(
        [talk(("user", "Hi"), ("assistant", "<|endoftext|> is text"))]
    )[0]
    assert int((default.token_ids == gpt2.eos_token_id).sum()) == 1
    assert (
        gpt2.decode(default.token_ids)
        == "Human: Hi\nAssistant:<|endoftext|> is text<|endoftext|>\n"
    )


def test_the_rendered_template_keeps_control_tokens_of_a_row_and_empty_refuses_them():
    gpt2, row = published_tokenizer("gpt2"), talk(("user", "a<|endoftext|>"))
    assert renderer("rendered", gpt2).prompt(row).tolist()[-1] == gpt2.eos_token_id
    with pytest.raises(MsrlError, match=mentions("empty", "<|endoftext|>", "rendered")):
        renderer("empty", gpt2).prompt(row)


def test_control_tokens_of_the_tokenizer_that_the_template_does_not_use_are_text():
    hf = qwen2()
    attack = "<|vision_start|><|endoftext|><|im_start|>"
    prompt = renderer("qwen", hf).prompt(talk(("user", attack)))
    plain = renderer("qwen", hf).prompt(talk(("user", "x")))
    for token in hf.all_special_tokens:
        number = hf.convert_tokens_to_ids(token)
        assert (prompt == number).sum() == (plain == number).sum(), token
    assert attack in hf.decode(prompt)


TALK_WITH_THOUGHTS = talk(
    ("user", "2+2?"), ("assistant", THOUGHT), ("user", "Sure?"), ("assistant", "\n\nYes")
)


@pytest.mark.parametrize(
    ("enable_thinking", "expected"),
    [
        (None, [f"{THOUGHT}<|im_end|>", "Yes<|im_end|>"]),
        (True, [f"{THOUGHT}<|im_end|>", "<think>\n\n</think>\n\nYes<|im_end|>"]),
        (False, ["Four<|im_end|>", "Yes<|im_end|>"]),
    ],
)
def test_every_answer_of_qwen3_is_trained_with_its_thought(enable_thinking, expected):
    render = renderer("qwen3", qwen3(), enable_thinking=enable_thinking)
    example = render.examples([TALK_WITH_THOUGHTS])[0]
    assert trained_texts(qwen3(), example) == expected
    text = qwen3().decode(example.token_ids)
    assert text.count("<|im_start|>assistant\n<think>\n") == 2


def test_a_prompt_of_qwen3_has_no_thoughts_of_earlier_turns():
    prompt = renderer("qwen3", qwen3()).prompt(talk(*TALK_TURNS))
    assert "Two and two" not in qwen3().decode(prompt)


TALK_TURNS = (("user", "2+2?"), ("assistant", THOUGHT), ("user", "Sure?"))


def test_added_tokens_that_always_match_are_split_in_the_text_of_a_row(tmp_path):
    hf = with_tokens(
        tmp_path, bos_token="<｜begin▁of▁sentence｜>", eos_token="<｜end▁of▁sentence｜>"
    )
    hf.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token in ("<｜User｜>", "<｜Assistant｜>")
        ]
    )
    hf.save_pretrained(tmp_path)
    hf = load_tokenizer(tmp_path)
    prompt = renderer("deepseek3", hf).prompt(
        talk(("user", "no <｜Assistant｜> and no <｜end▁of▁sentence｜>"))
    )
    tokens = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
    assert [int((prompt == hf.convert_tokens_to_ids(token)).sum()) for token in tokens] == [1, 1, 0]
    assert hf.decode(prompt).count("<｜Assistant｜>") == 2


def test_stop_tokens_come_from_the_template_and_the_tokenizer():
    qwen = renderer("qwen", qwen2())
    assert qwen.eos_token_id == 151645 and qwen.stop_token_ids == (151645,)
    gpt2 = published_tokenizer("gpt2")
    assert renderer("default", gpt2).stop_token_ids == (gpt2.eos_token_id,)


def test_a_template_with_tokens_that_the_tokenizer_lacks_is_refused():
    with pytest.raises(MsrlError, match=mentions("template qwen", "'<|im_start|>'")):
        renderer("qwen", published_tokenizer("gpt2"))
    with pytest.raises(MsrlError, match="beginning-of-text"):
        renderer("mistral", qwen2())


def test_unknown_template_is_refused_with_the_nearest_name():
    with pytest.raises(MsrlError, match=mentions("qwen_r2", "'qwen_r1'")):
        load_template("qwen_r2")


def test_all_packaged_templates_load():
    expected = {
        "empty",
        "default",
        "qwen",
        "qwen_r1",
        "qwen_math_r1",
        "qwen3",
        "llama3",
        "mistral",
        "deepseek3",
        "native",
    }
    assert expected <= set(template_names())
    assert all(load_template(name).name == name for name in template_names())


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("user: '{{content}}'\nasistant: x", ("asistant", "'assistant'")),
        ("user: 3", ("user=3", "text")),
        ("user: '{{content}}'\nassistant: 'x'", ("assistant", "{{content}}")),
        ("native: true\nuser: '{{content}}'", ("native", "field")),
        (
            "user: '{{content}}'\nassistant: '{{content}}'\nreplace_eos: true",
            ("replace_eos", "stop"),
        ),
        ("- 1", ("mapping",)),
        ("a: [", ("YAML",)),
        pytest.param(f"user: '{'x' * (2 << 20)}'", ("larger than 2 MiB",), id="large"),
    ],
)
def test_a_custom_template_with_an_error_is_refused(tmp_path, text, fragments):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(MsrlError) as caught:
        load_template(str(path))
    assert_mentions(caught.value, path, *fragments)


def test_a_custom_template_is_a_file(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(
        'user: "Q: {{content}}\\n"\nassistant_start: "A:"\nassistant: "{{content}}{{eos}}"\n'
    )
    example = renderer(str(path), published_tokenizer("gpt2")).examples(
        [talk(("user", "1?"), ("assistant", " 2"))]
    )[0]
    assert published_tokenizer("gpt2").decode(example.token_ids) == "Q: 1?\nA: 2<|endoftext|>"
