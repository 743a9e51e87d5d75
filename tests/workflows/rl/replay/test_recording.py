"""The rollout record as a source of scored groups: all their bits, and what a record may lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from msrl.algorithms.packing import Sequences
from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.types import (
    Completion,
    Episode,
    EpisodeTurn,
    Image,
    PlacedImage,
    Prompt,
    Reward,
    RolloutGroup,
    ScoredGroup,
    TokenSequence,
    VersionRun,
)
from msrl.workflows.rl.asynchronous.records import _encode_group
from msrl.workflows.rl.replay.recording import RunRecording
from msrl.workflows.rollout_log import RolloutLog
from support import mentions

RNG = np.random.default_rng(7)
IMAGE = PlacedImage(1, Image("ab" * 32, (1, 2, 4), b"file"))


def make_tokenizer() -> TextTokenizer:
    """Return a tokenizer that writes token ids as text."""
    backend = Tokenizer(WordLevel({str(number): number for number in range(1000)}))
    return TextTokenizer(backend, None, None, None, "numbers")


def completion(count: int, **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "token_ids": RNG.integers(0, 1000, count),
        "logprobs": -RNG.random(count, np.float32),
        "finish_reason": "stop",
        "policy_version": 0,
        "text": f"text of {count}",
    }
    return Completion(**(values | changes))


def group(index: int, *completions: Completion, **changes: Any) -> ScoredGroup:
    extra = {"tag": "math", "difficulty": "0.5"}
    prompt = Prompt(index, RNG.integers(0, 1000, 3), "9", extra, changes.pop("images", ()))
    rewards = tuple(
        Reward(0.1 + number / 3, {"acc": number / 3}, number != 1)
        for number in range(len(completions))
    )
    return ScoredGroup(RolloutGroup(prompt, completions), rewards, **changes)


def episode(num_sequences: int = 2) -> Completion:
    """Return an episode whose sampled tokens are in several sequences, of two versions."""
    sequences = tuple(
        TokenSequence(RNG.integers(0, 1000, 5), np.array([False, True, True, False, True]))
        for _ in range(num_sequences)
    )
    call = {"name": "add", "arguments": {"a": 1}, "error": ""}
    turns = (
        EpisodeTurn(2, "s0", "stop", 0.1, 0.5, 0.25, (call,), True),
        EpisodeTurn(3 * num_sequences - 2, "s1", "length", None),
    )
    messages = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})
    count = 3 * num_sequences
    return completion(
        count,
        token_ids=np.concatenate([item.token_ids[item.is_sampled] for item in sequences]),
        finish_reason="turns",
        versions=(VersionRun(0, 1), VersionRun(1, count - 1)),
        episode=Episode(sequences, turns, messages, True, ("timeout", "slow"), 2, "calculator", 1),
    )


def record(
    run_dir: Path, *groups: ScoredGroup, num_dropped: int = 0, step: int = 1
) -> RunRecording:
    """Write groups as the record of a step and open it."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"rollout": {"max_prompt_tokens": 8}}))
    taken = groups[: len(groups) - num_dropped]
    sequences: Sequences = rollout_arrays(taken).sequences
    advantages = tuple(np.zeros(len(ids), np.float32) for ids in sequences.token_ids)
    fields = {**sequences.fields, "advantages": advantages}
    log = RolloutLog(run_dir, make_tokenizer(), is_on=True, format="parquet")
    log.write(step, taken, sequences._replace(fields=fields), groups[len(taken) :])
    return RunRecording(run_dir, lambda prompt: [IMAGE])


def assert_same(read: Sequence[ScoredGroup], written: Sequence[ScoredGroup]) -> None:
    """Compare groups bit for bit, with their prompts."""
    assert list(map(_encode_group, read)) == list(map(_encode_group, written))
    for own, other in zip(read, written, strict=True):
        before, after = other.rollout.prompt, own.rollout.prompt
        assert np.array_equal(before.token_ids, after.token_ids)
        assert replace(before, token_ids=after.token_ids) == after


def test_groups_are_read_with_all_their_bits(tmp_path: Path) -> None:
    older = completion(4, versions=(VersionRun(0, 3), VersionRun(2, 1)))
    empty = completion(0, finish_reason="length")
    groups = (
        group(4, completion(3), completion(2)),
        group(9, older, empty),
        group(5, completion(1), completion(1)),
    )
    recording = record(tmp_path / "run", *groups, num_dropped=1)
    step = recording.step(0)
    assert_same(step.taken, groups[:2])
    assert_same(step.dropped, groups[2:])
    assert_same([recording.group(1)], groups[1:2])
    facts = recording.facts
    assert (facts.num_steps, facts.num_groups, facts.groups_per_step, facts.group_size) == (
        1,
        2,
        2,
        2,
    )
    assert not (facts.has_greedy or facts.has_routes or facts.has_episodes)


def test_episodes_are_read_with_all_their_bits(tmp_path: Path) -> None:
    groups = [group(1, episode(), episode(1))]
    assert_same(record(tmp_path / "run", *groups).step(0).taken, groups)


def test_greedy_responses_and_routes_are_read_with_all_their_bits(tmp_path: Path) -> None:
    first = group(1, completion(2, routes=RNG.integers(0, 9, (4, 2, 3)).astype(np.uint8)))
    greedy = completion(5, logprobs=np.zeros(0, np.float32), finish_reason="length")
    baseline = replace(first, rollout=replace(first.rollout, completions=(greedy,)))
    groups = [replace(first, greedy=baseline)]
    recording = record(tmp_path / "run", *groups)
    assert_same(recording.step(0).taken, groups)
    assert recording.facts.has_greedy and recording.facts.has_routes


def test_images_come_from_the_data(tmp_path: Path) -> None:
    groups = [group(1, completion(2), images=(IMAGE,))]
    assert_same(record(tmp_path / "run", *groups).step(0).taken, groups)
    other = [PlacedImage(1, Image("cd" * 32, (1, 2, 4), b""))]
    recording = RunRecording(tmp_path / "run", lambda prompt: other)
    with pytest.raises(MsrlError, match=mentions("data.train", "row 1", "other images")):
        recording.step(0)
    with pytest.raises(MsrlError, match=mentions("data.train", "images", "Set it")):
        RunRecording(tmp_path / "run")


def test_an_incomplete_record_is_refused_by_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(MsrlError, match=mentions("log.rollouts=parquet", "does not exist")):
        RunRecording(run)
    with pytest.raises(MsrlError, match=mentions("step_000001.parquet", "Restore")):
        record(run, group(1, completion(2)), step=2)
    with pytest.raises(MsrlError, match=mentions("differ in size", "samples_per_prompt")):
        record(run, group(1, completion(2), completion(2)), step=1)
    path = run / "rollouts" / "step_000001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["extra", "is_decided"]), path)
    with pytest.raises(MsrlError, match=mentions("is_decided, extra", "earlier version")):
        RunRecording(run)
    path.write_bytes(b"PAR1")
    with pytest.raises(MsrlError, match=mentions("step_000001.parquet", "complete")):
        RunRecording(run)


def test_json_lines_are_no_record(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").touch()
    with pytest.raises(MsrlError, match=mentions("JSON lines", "log.rollouts=parquet")):
        RunRecording(tmp_path)
