"""Files of responses of others: their fields, groups and tokens, and a line for each bad row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msrl.data.render import make_renderer
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.workflows.rl.replay.responses import ResponseFile
from support import mentions
from tiny_qwen2 import VOCAB_SIZE, make_tokenizer

END = 2  # <|im_end|>
ROW: dict[str, Any] = {"prompt_ids": [5, 6], "response_ids": [7, END], "reward": 1.0}
TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("responses")
    make_tokenizer().save_pretrained(folder)
    return folder


def read(folder: Path, *rows: object, needs_rewards: bool = True) -> ResponseFile:
    """Write rows, of which texts are lines, and read them."""
    path = folder / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    renderer = make_renderer(load_template("qwen"), open_tokenizer(folder))
    return ResponseFile(path, lambda: renderer, VOCAB_SIZE, needs_rewards=needs_rewards)


def test_tokens_rewards_and_log_probabilities_are_read_unchanged(folder: Path) -> None:
    logprobs = [-0.1, -1.5e-3]
    more = {"logprobs": logprobs, "answer": "2", "tag": "math", "extra": {"level": "3"}}
    recording = read(folder, ROW | more, ROW | {"logprobs": [-0.5, 0], "finish_reason": "length"})
    group = recording.group(0)
    prompt, (first, second) = group.rollout.prompt, group.rollout.completions
    assert prompt.token_ids.tolist() == [5, 6] and prompt.answer == "2"
    assert prompt.extra == {"level": "3", "tag": "math"}
    assert first.token_ids.tolist() == [7, END] and first.finish_reason == "stop"
    assert np.array_equal(first.logprobs, np.array(logprobs, np.float32))
    assert second.finish_reason == "length" and group.rewards[0].total == 1.0
    facts = recording.facts
    assert (facts.num_groups, facts.group_size, facts.has_logprobs) == (1, 2, True)
    assert (facts.max_prompt_tokens, facts.max_response_tokens) == (2, 2)


def test_texts_are_rendered_and_tokenized_as_in_sampling(folder: Path) -> None:
    text = {"prompt": "1+1", "response": "so 2", "reward": 1}
    cut = {"messages": TURNS, "response": "so", "finish_reason": "length", "reward": 0}
    recording = read(folder, text, cut)
    tokenizer = make_tokenizer()
    first, second = (recording.group(number).rollout for number in range(2))
    shown = tokenizer.decode(first.prompt.token_ids)
    assert shown.endswith("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(second.prompt.token_ids).startswith("<|im_start|>system\ns<|im_end|>")
    ids = tokenizer("so 2", add_special_tokens=False)["input_ids"]
    assert first.completions[0].token_ids.tolist() == [*ids, END]
    assert first.completions[0].text == "so 2"
    ids = tokenizer("so", add_special_tokens=False)["input_ids"]
    assert second.completions[0].token_ids.tolist() == ids


def test_groups_are_named_or_consecutive_rows_with_one_prompt(folder: Path) -> None:
    other = ROW | {"prompt_ids": [9]}
    assert read(folder, ROW, ROW, other, other).facts.num_groups == 2
    named = [ROW | {"group": "a"}, other | {"group": 1}] * 2
    recording = read(folder, *named)
    assert [recording.group(n).rollout.prompt.token_ids.tolist() for n in (0, 1)] == [[5, 6], [9]]
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:3", "1 responses", "has 2")):
        read(folder, ROW, ROW, other)
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:2", "'a'", "another prompt")):
        read(folder, ROW | {"group": "a"}, other | {"group": "a"})


def several(changes: dict[str, Any]) -> dict[str, Any]:
    """Return a row with two responses, of which the second has changes."""
    own = {name: ROW[name] for name in ("response_ids", "reward")}
    return {"prompt_ids": ROW["prompt_ids"], "responses": [own, own | changes]}


def test_a_row_with_several_responses_is_a_group(folder: Path) -> None:
    row = several({"reward": 0, "finish_reason": "length"}) | {"answer": "2", "tag": "sum"}
    recording = read(folder, row, row)
    assert (recording.facts.num_groups, recording.facts.group_size) == (2, 2)
    group = recording.group(1)
    assert [reward.total for reward in group.rewards] == [ROW["reward"], 0.0]
    assert [item.finish_reason for item in group.rollout.completions] == ["stop", "length"]
    assert (group.rollout.prompt.answer, group.rollout.prompt.extra) == ("2", {"tag": "sum"})
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:2", "1 responses", "has 2")):
        read(folder, row, ROW)


def test_log_probabilities_may_be_added(folder: Path) -> None:
    recording = read(folder, ROW, ROW)
    assert not recording.facts.has_logprobs and recording.num_tokens == 4
    filled = recording.with_logprobs(np.array([-1, -2, -3, -4], np.float32))
    assert [c.logprobs.tolist() for c in filled.group(0).rollout.completions] == [
        [-1, -2],
        [-3, -4],
    ]
    assert filled.facts.has_logprobs and not recording.facts.has_logprobs
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:2", "logprobs: missing")):
        read(folder, ROW | {"logprobs": [-1, -1]}, ROW)


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{", ["not JSON"]),
        ("", ["not JSON"]),
        ('{"reward": 1, "reward": 2}', ["'reward'", "more than once"]),
        ([1], ["JSON object"]),
        (ROW | {"logprob": [-1, -1]}, ["logprob: unknown", "'logprobs'"]),
        (ROW | {"responses": [{}]}, ["response_ids: belongs", "responses"]),
        ({"prompt_ids": [5], "responses": ["a"]}, ["responses", "list of objects"]),
        ({"prompt_ids": [5], "responses": []}, ["responses", "not empty"]),
        (several({"reward": "1"}), ["responses.1.reward", "number"]),
        (several({"group": 1}), ["responses.1.group: unknown"]),
        (several({"logprobs": [-1]}), ["responses.1.logprobs", "2 numbers"]),
        ({"prompt_ids": [5], "reward": 1}, ["response: missing", "response_ids"]),
        (ROW | {"prompt": "a"}, ["prompt and prompt_ids", "exactly one"]),
        (ROW | {"prompt_ids": []}, ["prompt_ids", "not empty"]),
        (ROW | {"prompt_ids": [True]}, ["prompt_ids", "token ids"]),
        (ROW | {"response_ids": [VOCAB_SIZE]}, [f"token {VOCAB_SIZE}", "vocabulary"]),
        (ROW | {"reward": "1"}, ["reward", "number"]),
        ('{"prompt_ids": [5], "response_ids": [6], "reward": NaN}', ["reward", "finite"]),
        ({"prompt_ids": [5], "response_ids": [6]}, ["reward: missing", "rewards=computed"]),
        (ROW | {"logprobs": [-1.0]}, ["logprobs", "2 numbers"]),
        (ROW | {"logprobs": [0.5, -1.0]}, ["logprobs", "at most 0"]),
        ({"prompt": "a", "response": "b", "logprobs": [-1], "reward": 1}, ["need response_ids"]),
        (ROW | {"finish_reason": "eos"}, ["finish_reason", "stop or length"]),
        (ROW | {"reward": 10**400}, ["reward", "finite"]),
        (ROW | {"logprobs": [-1e300, -1]}, ["logprobs", "2 numbers"]),
        (ROW | {"answer": "\ud800"}, ["UTF-8"]),
        (ROW | {"group": 1.5}, ["group", "integer"]),
        (ROW | {"extra": {"a": 1}}, ["extra", "texts"]),
        (ROW | {"answer": 2}, ["answer", "text"]),
        ({"messages": TURNS[:1], "response": "b", "reward": 1}, ["messages", "user or tool"]),
        (
            {"messages": [{"role": "user", "content": "a", "name": "x"}], "response": "b"},
            ["messages", "nothing else"],
        ),
        ({"prompt": "a", "response": "", "finish_reason": "length"}, ["response", "no tokens"]),
    ],
)
def test_a_bad_row_has_one_line_with_its_number(
    folder: Path, row: object, expected: list[str]
) -> None:
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:2: ", *expected)) as caught:
        read(folder, ROW, row, ROW)
    assert len(str(caught.value).splitlines()) == 1


def test_all_bad_rows_are_reported_together(folder: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:1", "rows.jsonl:3")):
        read(folder, "{", ROW, "{")
    with pytest.raises(MsrlError, match=mentions("rows.jsonl", "no rows")):
        read(folder)
    (folder / "rows.jsonl").write_bytes(b'{}\n{"prompt": "\xff"}\n')
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:2", "UTF-8")):
        ResponseFile(folder / "rows.jsonl", lambda: None, 9, needs_rewards=True)  # type: ignore
    assert read(folder, {"prompt_ids": [5], "response_ids": [6]}, needs_rewards=False)
