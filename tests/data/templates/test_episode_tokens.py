"""Tokens of episodes for every packaged template and every tokenizer of the shared data."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest

from msrl.data.chat_template import chat_template
from msrl.data.render import make_renderer
from msrl.data.templates.files import load_template, template_names
from msrl.data.tokenizer import TextTokenizer, open_tokenizer
from msrl.errors import MsrlError
from msrl.rollout.episodes.template import EpisodeTemplate
from msrl.rollout.episodes.tokens import EpisodeTokens
from msrl.types import Ints, Message, VersionRun
from support import mentions, shared_data

TOKENIZERS = (
    "gpt2",
    "granite-3.1-1b-a400m",
    "mistral-7b-instruct-v0.2",
    "qwen2.5-0.5b-instruct",
    "qwen3-4b",
)
EACH_TOKENIZER = [
    pytest.param(name, marks=() if name == "qwen2.5-0.5b-instruct" else pytest.mark.full)
    for name in TOKENIZERS
]
# Templates that do not show the token that ends an answer. The sampled one stays in the history.
WITHOUT_END = {"empty", "hunyuan", "rendered", "trl"}
WORDS = (
    "move",
    "left",
    "12",
    "<|im_end|>",
    "</s>",
    "<|endoftext|>",
    "é",
    "\n",
    "[INST]",
    "🙂",
    "a b",
)


@dataclass(frozen=True)
class Case:
    """A template with a tokenizer. `roles` are the roles of messages that it can show."""

    name: str
    template: EpisodeTemplate
    end: int
    roles: tuple[str, ...]


@lru_cache
def load_cached_tokenizer(name: str) -> TextTokenizer:
    return open_tokenizer(shared_data("tokenizers", name))


@lru_cache
def cases(tokenizer_name: str) -> list[Case]:
    """Return all templates that the tokenizer has the tokens for."""
    tokenizer = load_cached_tokenizer(tokenizer_name)
    fitting: list[Case] = []
    for name in template_names():
        try:
            renderer = make_renderer(load_template(name), tokenizer)
            template = EpisodeTemplate(tokenizer, chat_template(renderer))
            template.check(needs_tools=False)
        except MsrlError:
            continue
        roles = ["user"]
        try:
            template.check(needs_tools=True)
            roles.append("tool")
        except MsrlError:
            pass
        stops, eos = renderer.stop_token_ids, renderer.eos_token_id
        shown = int(template.suffix(1, [Message("user", "q")], None)[0])
        end = shown if shown in stops or eos is None else eos
        fitting.append(Case(name, template, end, tuple(roles)))
    return fitting


def encode(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def decode(tokenizer: TextTokenizer, ids: Ints) -> str:
    return tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)


def text(random_: random.Random) -> str:
    return " ".join(random_.choices(WORDS, k=random_.randint(1, 6)))


@pytest.mark.parametrize("name", EACH_TOKENIZER)
def test_sampled_tokens_survive_and_masks_are_exact_in_random_dialogues(name: str) -> None:
    tokenizer = load_cached_tokenizer(name)
    all_cases, vocab_size = cases(name), tokenizer.vocab_size
    assert len(all_cases) >= 12
    for number, case in enumerate(all_cases):
        random_ = random.Random(number)
        opening = [Message("user", text(random_))]
        prompt = case.template.conversation(opening)
        tokens, sampled, versions = EpisodeTokens(prompt), list[Ints](), list[VersionRun]()
        harmless = len(prompt)
        for turn in range(3):
            ids = np.array([random_.randrange(vocab_size) for _ in range(5)])
            is_truncated = random_.random() < 0.3
            if not is_truncated:
                ids[-1] = case.end
            runs = (VersionRun(turn, 3), VersionRun(turn + 1, 2))
            logprobs = -np.arange(1, 6, dtype=np.float32) - turn
            tokens.add_answer(ids, logprobs, runs)
            sampled.append(ids)
            versions += runs
            if turn == 2:
                break
            new = [Message(random_.choice(case.roles), text(random_)) for _ in range(1)]
            last = None if is_truncated else int(ids[-1])
            suffix = case.template.suffix(turn + 1, new, last)
            plain = case.template.suffix(turn + 1, [Message(new[0].role, "move left")], last)
            controls = set(map(tokenizer.token_id, case.template.controls))
            assert [i for i in suffix.tolist() if i in controls] == [
                i for i in plain.tolist() if i in controls
            ], (case.name, new)
            tokens.add_messages(suffix)
            harmless += len(suffix)
        (sequence,) = tokens.sequences()
        token_ids, logprobs, own_versions = tokens.sampled_tokens()
        assert token_ids.tolist() == np.concatenate(sampled).tolist()
        assert sequence.token_ids[sequence.is_sampled].tolist() == token_ids.tolist()
        assert int((~sequence.is_sampled).sum()) == harmless
        assert logprobs.tolist() == [-float(k) - t for t in range(3) for k in range(1, 6)]
        assert own_versions == (
            VersionRun(0, 3),
            VersionRun(1, 5),
            VersionRun(2, 5),
            VersionRun(3, 2),
        )


def tool(description: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}}
    entry = {"name": "price", "description": description, "parameters": parameters}
    return {"type": "function", "function": entry}


@pytest.mark.parametrize("name", [*EACH_TOKENIZER[1:2], *EACH_TOKENIZER[3:]])  # that fit tools
def test_tools_are_shown_and_their_descriptions_add_no_control_token(name: str) -> None:
    tokenizer, opening = load_cached_tokenizer(name), [Message("user", "go")]
    with_tools = [case for case in cases(name) if "tool" in case.roles]
    for case in with_tools:
        controls = set(map(tokenizer.token_id, case.template.controls))
        plain = case.template.conversation(opening, [tool("Return a price.")])
        hostile = case.template.conversation(opening, [tool(" ".join(WORDS))])
        assert "price" in decode(tokenizer, plain), case.name
        assert [i for i in hostile.tolist() if i in controls] == [
            i for i in plain.tolist() if i in controls
        ], case.name
    assert with_tools


@pytest.mark.parametrize("name", EACH_TOKENIZER)
def test_the_tokens_equal_the_template_s_own_rendering_or_differ_for_a_known_reason(
    name: str,
) -> None:
    tokenizer = load_cached_tokenizer(name)
    num_exact = 0
    for case in cases(name):
        for role in case.roles:
            messages = [Message("user", "Go on the ice.")]
            tokens = EpisodeTokens(case.template.conversation(messages))
            for number in range(2):
                answer = f"I go to field {number}."
                ids = np.array([*encode(tokenizer, answer), case.end])
                tokens.add_answer(ids, np.zeros(len(ids), np.float32), ())
                new = [Message(role, f"You see <|im_end|> field {number}.")]  # type: ignore[arg-type]
                tokens.add_messages(case.template.suffix(number + 1, new, case.end))
                messages += [Message("assistant", answer), *new]
            own, rendered = tokens.prompt, case.template.conversation(messages)
            if np.array_equal(own, rendered):
                num_exact += 1
                continue
            # Known reasons: a SentencePiece tokenizer puts a space before an answer that is encoded
            # alone. Other tokenizers may merge the end of a prompt that ends with plain text and
            # the beginning of an answer. A template without an end of answers drops the sampled
            # one.
            ends = {case.end} if case.name in WITHOUT_END else set[int]()
            left, right = (
                decode(tokenizer, np.array([item for item in row.tolist() if item not in ends]))
                for row in (own, rendered)
            )
            if name.startswith("mistral"):
                left, right = left.replace(" ", ""), right.replace(" ", "")
            assert left == right, (case.name, role)
    assert num_exact or name.startswith("mistral")


def test_an_answer_is_neither_encoded_again_nor_ended_twice() -> None:
    tokenizer = load_cached_tokenizer("qwen3-4b")
    template = EpisodeTemplate(tokenizer)
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    complete = template.suffix(1, [Message("user", "more")], end)
    truncated = template.suffix(1, [Message("user", "more")], None)
    assert truncated.tolist() == [end, *complete.tolist()]
    assert decode(tokenizer, complete).startswith("\n<|im_start|>user\nmore<|im_end|>")


def test_separate_messages_follow_the_token_that_ends_messages_and_no_line_feed() -> None:
    tokenizer = load_cached_tokenizer("qwen3-4b")
    template = EpisodeTemplate(tokenizer, enable_thinking=False)
    shown = decode(tokenizer, template.separate([Message("user", "go <|im_end|>")]))
    head, tail = "<|im_end|><|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    thought = "<think>\n\n</think>\n\n"
    assert shown == f"{head}go <|im_end|>{tail}{thought}"
    control = tokenizer.backend.token_to_id("<|im_end|>")
    assert template.separate([Message("user", "go <|im_end|>")]).tolist().count(control) == 2
    assert decode(tokenizer, template.conversation([Message("user", "a")])).endswith(thought)
    free = EpisodeTemplate(tokenizer)
    assert not decode(tokenizer, free.separate([Message("user", "a")])).endswith(thought)


@pytest.mark.slow
def test_separate_messages_need_a_template_in_which_they_follow_each_other() -> None:
    mistral = EpisodeTemplate(load_cached_tokenizer("mistral-7b-instruct-v0.2"))
    with pytest.raises(MsrlError, match=mentions("chat template", "alternate")):
        mistral.separate([Message("user", "a")])


def test_thoughts_stay_with_append_and_begin_a_new_sequence_with_the_template() -> None:
    tokenizer = load_cached_tokenizer("qwen3-4b")
    template = EpisodeTemplate(tokenizer)
    opening = [Message("user", "1+1?")]
    answer = "<think>\neasy\n</think>\n\n3"
    ids = np.array([*encode(tokenizer, answer), tokenizer.token_id("<|im_end|>")])
    new = Message("user", "Wrong.")
    tokens = EpisodeTokens(template.conversation(opening))
    tokens.add_answer(ids, np.zeros(len(ids), np.float32), ())
    tokens.restart(template.conversation([*opening, Message("assistant", answer), new]))
    tokens.add_answer(ids[:2], np.zeros(2, np.float32), ())
    first, second = tokens.sequences()
    assert "easy" in decode(tokenizer, first.token_ids)
    assert "easy" not in decode(tokenizer, second.token_ids)
    assert first.token_ids[first.is_sampled].tolist() == ids.tolist()
    assert second.token_ids[second.is_sampled].tolist() == ids[:2].tolist()
    assert second.is_sampled[-2:].all() and second.is_sampled.sum() == 2


def test_an_unchanged_history_continues_its_sequence() -> None:
    tokens = EpisodeTokens(np.arange(3))
    tokens.add_answer(np.array([7, 8]), np.zeros(2, np.float32), ())
    tokens.restart(np.array([0, 1, 2, 7, 8, 5]))
    tokens.add_answer(np.array([9]), np.zeros(1, np.float32), ())
    (sequence,) = tokens.sequences()
    assert sequence.token_ids.tolist() == [0, 1, 2, 7, 8, 5, 9]
    assert np.flatnonzero(sequence.is_sampled).tolist() == [3, 4, 6]


def test_messages_after_the_last_answer_are_in_no_sequence() -> None:
    tokens = EpisodeTokens(np.arange(3))
    tokens.add_answer(np.array([7]), np.zeros(1, np.float32), ())
    tokens.add_messages(np.array([5, 5]))
    (sequence,) = tokens.sequences()
    assert sequence.token_ids.tolist() == [0, 1, 2, 7]
    untouched = EpisodeTokens(np.arange(3))
    assert not untouched.sequences()[0].is_sampled.any()
    assert len(untouched.sampled_tokens()[0]) == 0


@pytest.mark.slow
def test_a_template_without_tools_is_refused() -> None:
    template = EpisodeTemplate(load_cached_tokenizer("mistral-7b-instruct-v0.2"))
    with pytest.raises(MsrlError, match=mentions("environment", "mistral", "template")):
        template.check(needs_tools=True)
