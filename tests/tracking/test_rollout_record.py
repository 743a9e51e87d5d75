"""The rollout record: what is written is read back, and its columns have stable types."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from msrl.algorithms.packing import Sequences
from msrl.config.sections.reward import RewardSource
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.rewards.sources import Source
from msrl.rewards.verdicts import Judge
from msrl.tracking.rollouts import RolloutRecord, read_records, write_records
from msrl.types import (
    Completion,
    Episode,
    EpisodeTurn,
    Prompt,
    Reward,
    RolloutGroup,
    ScoredGroup,
    TokenSequence,
    VersionRun,
)
from msrl.workflows.rl.update.values import StepValues
from msrl.workflows.rollout_log import RolloutLog
from msrl.workflows.view.samples import read_samples
from prepared_steps import make_step
from support import mentions


def make_tokenizer() -> TextTokenizer:
    """Return a tokenizer that writes token ids as text."""
    backend = Tokenizer(WordLevel({str(number): number for number in range(1000)}))
    return TextTokenizer(backend, None, None, None, "numbers")


def make_log(
    run_dir: Path, *, is_on: bool = True, format: Any = "parquet", judge: Judge | None = None
) -> RolloutLog:
    return RolloutLog(run_dir, make_tokenizer(), is_on=is_on, format=format, judge=judge)


def make_record(**changes: Any) -> RolloutRecord:
    values: dict[str, Any] = {
        "step": 3,
        "group": 0,
        "sample": 1,
        "prompt_index": 7,
        "token_ids": np.array([5, 6, 7, 8]),
        "loss_mask": np.array([False, False, True, True]),
        "is_sampled": np.array([False, False, True, True]),
        "behavior_logprobs": np.array([0, 0, -0.5, -1.25], np.float32),
        "versions": ((1, 1), (2, 1)),
        "trainer_version": 2,
        "advantages": np.array([0, 0, 1.5, 1.5], np.float32),
        "reward": 0.75,
        "scores": {"acc": 1.0, "format": 0.5},
        "finish_reason": "stop",
        "messages": (("prompt", "1+1="), ("assistant", "2")),
        "answer": "2",
        "times": {"rollout": 100.5, "reward": 101.0},
        "trainer_logprobs": np.array([0, 0, -0.5, -1.0], np.float32),
        "reference_logprobs": None,
    }
    return RolloutRecord(**(values | changes))


def equal(first: RolloutRecord, second: RolloutRecord) -> bool:
    return all(
        np.array_equal(value, other) if isinstance(value, np.ndarray) else value == other
        for value, other in (
            (getattr(first, name), getattr(second, name)) for name in RolloutRecord.__slots__
        )
    )


def make_group(index: int, rewards: list[float]) -> ScoredGroup:
    prompt = Prompt(index, np.array([1, 2], np.int64), answer="9")
    logprobs = np.array([-0.25, -0.5], np.float32)
    completions = tuple(
        Completion(np.array([3, 4 + number], np.int64), logprobs, "stop", 2, f"text {number}")
        for number in range(len(rewards))
    )
    scored = tuple(Reward(total, {"acc": total}) for total in rewards)
    return ScoredGroup(RolloutGroup(prompt, completions), scored)


def prepare(group: ScoredGroup, *sets: str, values: StepValues | None = None) -> Sequences:
    """Return sequences with the advantages 0.5 and -0.5, of which the first is trained on."""
    advantages = np.array([0.5, 0.5, -0.5, -0.5])
    return make_step([group], advantages, np.array([[True, False]]), *sets, values=values).sequences


def test_records_are_read_back_unchanged(tmp_path: Path) -> None:
    turn = EpisodeTurn(2, "state", "stop", reward=0.5, tool_calls=({"name": "add"},))
    turns = ({**asdict(turn), "tool_calls": json.dumps(turn.tool_calls)},)
    records = [
        make_record(),
        make_record(sample=2, answer="", times={}, trainer_logprobs=None),
        make_record(sample=3, versions=(), messages=(), turns=turns, success=True, scores={}),
    ]
    write_records(tmp_path / "step.parquet", records)
    assert all(map(equal, read_records(tmp_path / "step.parquet"), records))


def test_columns_have_their_types_in_a_file_without_rows(tmp_path: Path) -> None:
    write_records(tmp_path / "step.parquet", [])
    schema = pq.read_schema(tmp_path / "step.parquet")
    assert str(schema.field("token_ids").type).startswith("list<")
    assert schema.field("trainer_logprobs").type == schema.field("behavior_logprobs").type
    assert schema.metadata[b"msrl.rollouts"] == b"1"
    assert read_records(tmp_path / "step.parquet") == []


def test_staleness_counts_from_the_oldest_version() -> None:
    assert make_record(versions=((1, 5), (4, 2)), trainer_version=4).staleness == 3


def test_the_log_writes_a_record_per_sample_and_dropped_groups_last(tmp_path: Path) -> None:
    group, dropped = make_group(4, [1.0, 0.0]), make_group(5, [1.0, 1.0])
    old = StepValues(policy=tuple(np.full(4, -0.75, np.float32) for _ in range(2)))
    sequences = prepare(group, "train.updates.epochs=2", values=old)
    make_log(tmp_path).write(3, [group], sequences, [dropped], times={"update": 5.0})
    records = read_records(tmp_path / "rollouts" / "step_000003.parquet")
    assert [(r.group, r.sample, r.prompt_index) for r in records] == [
        (0, 0, 4),
        (0, 1, 4),
        (1, 0, 5),
        (1, 1, 5),
    ]
    first, masked, *rest = records
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.behavior_logprobs.tolist() == [0.0, 0.0, -0.25, -0.5]
    assert first.advantages.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert first.trainer_logprobs is not None and first.trainer_logprobs.tolist() == [-0.75] * 4
    assert first.versions == ((2, 2),) and first.trainer_version == 2
    assert first.messages == (("prompt", "1 2"), ("assistant", "text 0"))
    assert first.times == {"update": 5.0}
    assert not masked.loss_mask.any() and masked.is_sampled.tolist() == [False, False, True, True]
    assert all(not record.loss_mask.any() and record.trainer_logprobs is None for record in rest)


def test_the_sequences_of_an_episode_share_its_sampled_tokens(tmp_path: Path) -> None:
    first = TokenSequence(np.array([1, 2, 3, 4, 5]), np.array([False, True, True, False, True]))
    second = TokenSequence(np.array([1, 9, 6]), np.array([False, False, True]))
    turns = (
        EpisodeTurn(1, "a", "stop"),
        EpisodeTurn(1, "b", "stop", is_invalid=True),
        EpisodeTurn(2, "c", "stop", reward=1.0),
    )
    messages = tuple({"role": role, "content": role} for role in ("assistant", "tool", "assistant"))
    episode = Episode((first, second), turns, messages, success=True)
    logprobs = np.array([-1, -2, -3, -4], np.float32)
    runs = (VersionRun(6, 2), VersionRun(7, 2))
    completion = Completion(
        np.array([2, 3, 5, 6]), logprobs, "turns", 6, "x\ny", versions=runs, episode=episode
    )
    group = ScoredGroup(
        RolloutGroup(Prompt(4, np.array([1])), (completion,)), (Reward(0.5, {"env": 1.0}),)
    )
    # The token 3 belongs to a turn without a valid action.
    prepared = make_step([group], np.ones(4), None, "algo.mask.invalid_actions=true")
    make_log(tmp_path).write(8, [group], prepared.sequences)
    records = read_records(tmp_path / "rollouts" / "step_000008.parquet")
    assert [(r.sample, r.sequence) for r in records] == [(0, 0), (0, 1)]
    assert [r.behavior_logprobs.tolist() for r in records] == [[0, -1, -2, 0, -3], [0, 0, -4]]
    assert [r.versions for r in records] == [((6, 2), (7, 1)), ((7, 1),)]
    assert records[0].loss_mask.tolist() == [False, True, False, False, True]
    assert records[0].advantages.tolist() == [0, 1, 1, 0, 1]
    assert records[1].loss_mask.tolist() == [False, False, True]
    assert [role for role, _ in records[0].messages] == ["prompt", "assistant", "tool", "assistant"]
    assert [turn["num_tokens"] for turn in records[1].turns] == [1, 1, 2] and records[1].success


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_verdicts_and_reasons_are_recorded(tmp_path: Path, format: str) -> None:
    source = Source.of(RewardSource(verifier="acc"))
    group = make_group(4, [1.0, 0.0])
    log = make_log(tmp_path, format=format, judge=Judge((source,)))
    log.write(1, [group], prepare(group))
    (file,) = (tmp_path / "rollouts").iterdir()
    rows = read_samples(file)
    assert [row.is_right for row in rows] == [True, False]
    assert all("box" in row.reasons["acc"] for row in rows)


def test_nothing_is_written_if_rollouts_are_not_saved(tmp_path: Path) -> None:
    group = make_group(4, [1.0])
    make_log(tmp_path, is_on=False).write(1, [group], make_step([group]).sequences)
    assert not (tmp_path / "rollouts").exists()


def test_json_lines_are_refused_as_records(tmp_path: Path) -> None:
    (tmp_path / "step_000001.jsonl").write_text("{}\n")
    with pytest.raises(MsrlError, match=mentions("step_000001.jsonl", "log.rollouts=parquet")):
        read_records(tmp_path / "step_000001.jsonl")
