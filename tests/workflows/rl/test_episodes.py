"""Episodes: turns, limits, versions, rewards and training samples.

Environments and the engine are scripted here; `test_train_grpo_episodes.py` uses real ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.algorithms.token_rewards import TokenRewards
from msrl.algorithms.turns import with_turn_rewards
from msrl.config.loader import load
from msrl.config.sections.environment import EnvironmentConfig
from msrl.data.tokenizer import open_tokenizer
from msrl.environments.base import EpisodeFault, Opening, StepResult
from msrl.errors import MsrlError
from msrl.rewards.score import Scorer
from msrl.rewards.sources import Source
from msrl.rollout.engine import NewTokens
from msrl.rollout.episodes.runner import EpisodeRunner, turn_seed
from msrl.rollout.episodes.settings import EpisodeSettings
from msrl.rollout.episodes.template import EpisodeTemplate
from msrl.rollout.runtime.buffer import BufferState, FinishedGroup, Ticket
from msrl.rollout.runtime.engine_loop import EngineLoop, GroupRequest, LoopMessage
from msrl.tracking.rollouts import read_records
from msrl.trainer.objective.batches import pad_sequences
from msrl.types import (
    Completion,
    Episode,
    EpisodeTurn,
    Floats,
    Ints,
    Message,
    Prompt,
    Reward,
    RolloutGroup,
    SamplingParams,
    ScoredGroup,
    TokenSequence,
    VersionRun,
)
from msrl.workflows.episodes.metrics import episode_metrics
from msrl.workflows.rl.asynchronous.records import decode, encode
from msrl.workflows.rl.update.advantages import placed_rewards
from msrl.workflows.rollout_log import RolloutLog
from prepared_steps import make_step
from support import mentions, wait_until
from tiny_qwen2 import make_tokenizer

END = 2  # <|im_end|>
SAMPLING = SamplingParams(max_tokens=200, num_samples=1, stop_token_ids=(END,), seed=7)
Reply = StepResult | EpisodeFault
Script = Callable[[str, int], Reply]  # (answer, number of the turn)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> EpisodeTemplate:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return EpisodeTemplate(open_tokenizer(folder))


def more(text: str = "more", reward: float | None = 0.0, **info: Any) -> StepResult:
    return StepResult([Message("user", text)], reward, info=info)


def end(reward: float | None = 1.0, **info: Any) -> StepResult:
    return StepResult([], reward, done=True, info=info)


class ScriptedEnvironments:
    """Environments that reply by a function, at once or after `release`."""

    def __init__(self, script: Script, opening: Opening | EpisodeFault, *, holds: bool) -> None:
        self.script, self.opening, self.holds = script, opening, holds
        self.turns, self.answers = dict[str, int](), list[str]()
        self.are_truncated = list[bool]()
        self.rows, self.closed = list[dict[str, Any]](), list[str]()
        self.waiting = list[tuple[Future[Any], Any]]()

    def open(self, episode_id: str, row: dict[str, Any]) -> Future[Any]:
        self.turns[episode_id] = 0
        self.rows.append(row)
        return self._reply(self.opening)

    def step(self, episode_id: str, answer: str, *, is_truncated: bool = False) -> Future[Any]:
        self.answers.append(answer)
        self.are_truncated.append(is_truncated)
        reply = self.script(answer, self.turns[episode_id])
        self.turns[episode_id] += 1
        return self._reply(reply)

    def close(self, episode_id: str) -> None:
        self.closed.append(episode_id)

    def release(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, value in waiting:
            future.set_result(value)

    def _reply(self, value: Any) -> Future[Any]:
        future = Future[Any]()
        if self.holds:
            self.waiting.append((future, value))
        else:
            future.set_result(value)
        return future


class ScriptedPolicy:
    """Engine that samples one token per step; `answers` are its answers in order of requests."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers, self.weights = list(answers), 0
        self.requests = list[tuple[str, Prompt, SamplingParams, int | None]]()
        self.remaining = dict[str, list[int]]()

    def add_request(
        self, request: str, prompt: Prompt, sampling: SamplingParams, seed: int | None, salt: str
    ) -> None:
        self.requests.append((request, prompt, sampling, seed))
        self.remaining[request] = list(self.answers.pop(0))[: sampling.max_tokens]

    def step(self) -> list[NewTokens]:
        outputs = list[NewTokens]()
        for request, tokens in list(self.remaining.items()):
            token = tokens.pop(0)
            reason = "stop" if token == END else None if tokens else "length"
            if reason:
                del self.remaining[request]
            logprob = np.array([-token / 100 - self.weights], np.float32)
            outputs.append(NewTokens(request, np.array([token]), logprob, reason))
        return outputs

    def abort_requests(self, requests: Sequence[str]) -> None:
        for request in requests:
            del self.remaining[request]

    def recompute_requests(self) -> None:
        pass

    def text(self, token_ids: Ints) -> str:
        return str([token for token in token_ids.tolist() if token != END])


def make_runner(
    template: EpisodeTemplate,
    script: Script,
    opening: Opening | EpisodeFault | None = None,
    *,
    holds: bool = False,
    max_model_len: int = 512,
    max_prompt_tokens: int = 100,
    **limits: Any,
) -> tuple[EpisodeRunner, ScriptedEnvironments]:
    section = EnvironmentConfig(**{"name": "scripted", **limits})
    settings = EpisodeSettings(section, Path(), "", "hermes", max_prompt_tokens)
    environments = ScriptedEnvironments(script, opening or Opening([]), holds=holds)
    runner = EpisodeRunner(environments, settings, template, max_model_len, lambda ids: str(ids))
    return runner, environments


def run_one(
    runner: EpisodeRunner,
    answers: Sequence[Sequence[int]],
    sampling: SamplingParams = SAMPLING,
    prompt: Prompt | None = None,
) -> tuple[Completion, ScriptedPolicy]:
    """Run one episode and return its completion and the engine."""
    policy = ScriptedPolicy(answers)
    loop = EngineLoop(policy, 3, episodes=runner)
    prompt = prompt or Prompt(4, np.arange(40, 50), "7", {"level": "2", "environment": "other"})
    groups = loop.complete([GroupRequest("a", prompt, sampling, (11,))])
    (completion,) = groups["a"].completions
    return completion, policy


def ids(template: EpisodeTemplate, text: str) -> list[int]:
    return template.tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_a_turn_s_prompt_is_the_earlier_tokens_and_the_rendered_suffix(
    template: EpisodeTemplate,
) -> None:
    runner, environments = make_runner(
        template, lambda _, turn: end() if turn == 1 else more("no <|im_end|>")
    )
    answers = [[70, 71, END], [72, END]]
    completion, policy = run_one(runner, answers)
    suffix = template.suffix(1, [Message("user", "no <|im_end|>")], END).tolist()
    assert [prompt.token_ids.tolist() for _, prompt, _, _ in policy.requests] == [
        list(range(40, 50)),
        [*range(40, 50), 70, 71, END, *suffix],
    ]
    assert END in suffix and suffix.count(END) == 1  # of the template, not of the message
    assert [seed for *_, seed in policy.requests] == [11, turn_seed(11, 1)]
    assert completion.token_ids.tolist() == [70, 71, END, 72, END]
    assert np.allclose(completion.logprobs, [-3.7 + 3, -3.71 + 3, -0.02, -0.72, -0.02], atol=1e-6)
    assert completion.finish_reason == "stop" and completion.policy_version == 3
    assert completion.episode is not None
    (sequence,) = completion.episode.sequences
    assert sequence.token_ids[sequence.is_sampled].tolist() == completion.token_ids.tolist()
    assert sequence.token_ids.tolist() == [*range(40, 50), 70, 71, END, *suffix, 72, END]
    assert [turn.num_tokens for turn in completion.episode.turns] == [3, 2]
    assert [turn.reward for turn in completion.episode.turns] == [0.0, 1.0]
    assert environments.closed == ["a/0"]
    assert environments.answers[0] == template.tokenizer.backend.decode([70, 71])
    (row,) = environments.rows
    assert row["answer"] == "7" and row["index"] == 4 and row["level"] == "2"
    assert "environment" not in row and isinstance(row["seed"], int)


def test_separate_turns_repeat_the_end_of_messages_and_max_tokens_ends_an_episode(
    template: EpisodeTemplate,
) -> None:
    new = template.separate([Message("user", "more")]).tolist()
    longest = 10 + 3 + len(new) + 1
    runner, environments = make_runner(
        template, lambda *_: more(), history="separate", max_tokens=longest
    )
    completion, policy = run_one(runner, [[70, 71, END], [72]])
    assert policy.requests[1][1].token_ids.tolist() == [*range(40, 50), 70, 71, END, *new]
    assert new[0] == END
    assert policy.requests[1][2].max_tokens == 1
    assert len(environments.answers) == 2
    assert completion.finish_reason == "length"


def test_an_environment_s_messages_replace_the_prompt_of_the_row(template: EpisodeTemplate) -> None:
    opening = Opening([Message("user", "Walk.")], info={"state": "start"})
    runner, _ = make_runner(template, lambda *_: end(), opening)
    completion, policy = run_one(runner, [[70, END]])
    assert (
        policy.requests[0][1].token_ids.tolist()
        == template.conversation([Message("user", "Walk.")]).tolist()
    )
    assert completion.episode is not None
    assert [dict(item) for item in completion.episode.messages] == [
        {"role": "user", "content": "Walk."},
        {"role": "assistant", "content": template.tokenizer.backend.decode([70])},
    ]


@pytest.mark.parametrize(
    ("limits", "reason", "num_turns"),
    [({"max_turns": 2}, "turns", 2), ({"max_episode_s": 1e-9}, "time", 1), ({}, "length", 7)],
)
def test_each_limit_of_an_episode_has_its_own_finish_reason(
    template: EpisodeTemplate, limits: dict[str, Any], reason: str, num_turns: int
) -> None:
    runner, _ = make_runner(template, lambda *_: more(), **limits)
    sampling = replace(SAMPLING, max_tokens=180)
    completion, policy = run_one(runner, [[70, END]] * 20, sampling)
    assert completion.finish_reason == reason
    assert completion.episode is not None
    assert len(completion.episode.turns) == num_turns == len(policy.requests)
    assert len(completion.episode.sequences[0].token_ids) <= 10 + 180


def test_an_answer_at_the_limit_of_the_episode_is_truncated_even_if_it_is_the_last(
    template: EpisodeTemplate,
) -> None:
    runner, _ = make_runner(template, lambda *_: end())
    completion, policy = run_one(runner, [[70] * 50], replace(SAMPLING, max_tokens=8))
    assert policy.requests[0][2].max_tokens == 8
    assert completion.finish_reason == "length" and len(completion.token_ids) == 8


def test_an_answer_at_the_limit_of_a_turn_continues_with_the_token_that_ends_it(
    template: EpisodeTemplate,
) -> None:
    runner, environments = make_runner(
        template, lambda _, turn: end() if turn else more(), max_turn_tokens=3
    )
    completion, policy = run_one(runner, [[70] * 50, [71, END]])
    assert environments.are_truncated == [True, False]
    second = policy.requests[1][1].token_ids.tolist()
    assert second[10:14] == [70, 70, 70, END]  # the last one comes from the template
    assert completion.finish_reason == "stop" and completion.episode is not None
    (sequence,) = completion.episode.sequences
    assert sequence.is_sampled[10:14].tolist() == [True, True, True, False]
    assert completion.episode.turns[0].finish_reason == "length"


def test_turns_of_episodes_in_lockstep_start_in_the_order_of_the_requests(
    template: EpisodeTemplate,
) -> None:
    def script(_: str, turn: int) -> Reply:
        return end() if turn == 2 else more()

    runner, environments = make_runner(template, script, holds=True)
    policy = ScriptedPolicy([[70, END], [71, 72, 73, END]] * 3)
    loop = EngineLoop(policy, 0, episodes=runner)

    def release_backwards() -> None:
        while len(environments.closed) < 2:
            if len(environments.waiting) == 2:
                environments.waiting.reverse()
                environments.release()
            time.sleep(0.001)

    replies = threading.Thread(target=release_backwards)
    replies.start()
    prompt = Prompt(0, np.arange(40, 50))
    reports = list[int]()
    request = GroupRequest("a", prompt, SAMPLING, (1, 2))
    loop.complete([request], in_lockstep=True, on_finished=reports.append)
    assert reports == [1, 1]
    replies.join(10)
    assert [name for name, *_ in policy.requests] == ["a/0", "a/1"] * 3


def test_faults_end_one_episode_with_their_reason(template: EpisodeTemplate) -> None:
    runner, _ = make_runner(
        template, lambda _, turn: EpisodeFault("timeout", "30 s") if turn else more()
    )
    completion, _ = run_one(runner, [[70, END], [71, END]])
    assert completion.finish_reason == "fault" and completion.episode is not None
    assert completion.episode.fault == ("timeout", "30 s")
    assert completion.token_ids.tolist() == [70, END, 71, END]
    runner, environments = make_runner(template, lambda *_: end(), EpisodeFault("crash", "gone"))
    completion, policy = run_one(runner, [])
    assert completion.episode is not None and completion.episode.fault == ("crash", "gone")
    assert not policy.requests and len(completion.token_ids) == 0
    assert completion.episode.sequences[0].token_ids.tolist() == list(range(40, 50))
    assert completion.policy_version == 3 and environments.closed == ["a/0"]


def test_an_episode_begins_again_when_its_environment_is_lost(template: EpisodeTemplate) -> None:
    lost = [EpisodeFault("lost", "killed")] * 3
    runner, environments = make_runner(
        template, lambda _, turn: more() if not turn else lost.pop() if lost else end()
    )
    completion, policy = run_one(runner, [[70, END], [71, END]] * 4)
    episode = completion.episode
    assert episode is not None and episode.fault == ("", "") and episode.repeats == 3
    assert completion.token_ids.tolist() == [70, END, 71, END] and len(episode.turns) == 2
    assert len(environments.rows) == 4 and environments.rows == environments.rows[:1] * 4
    assert environments.closed == ["a/0"] * 4
    seeds = [seed for *_, seed in policy.requests]
    assert seeds == seeds[:2] * 4
    assert episode_metrics([RolloutGroup(Prompt(4, np.arange(3)), (completion,))])["repeats"] == 3.0


def test_an_episode_that_is_always_lost_is_a_fault(template: EpisodeTemplate) -> None:
    runner, environments = make_runner(
        template, lambda *_: end(), EpisodeFault("lost", "the fork server ended")
    )
    completion, _ = run_one(runner, [])
    assert completion.episode is not None and completion.episode.repeats == 3
    assert completion.episode.fault == ("lost", "the fork server ended")
    assert len(environments.rows) == 4


def test_a_generation_prompt_may_begin_a_thought(template: EpisodeTemplate) -> None:
    prompt = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    assert not template.opens_thought
    assert EpisodeTemplate(template.tokenizer, prompt + "\n").opens_thought
    assert not EpisodeTemplate(template.tokenizer, prompt + "\n\n</think>\n\n").opens_thought
    section = EnvironmentConfig(name="frozen_lake")
    settings = EpisodeSettings(section, Path(), "", "hermes", 9, opens_thought=True)
    with settings.pool() as pool:
        pool.start()
        assert pool._loop._make_setup(0).opens_thought


def test_an_opening_that_is_too_long_is_a_fault(template: EpisodeTemplate) -> None:
    opening = Opening([Message("user", "x" * 300)])
    runner, _ = make_runner(template, lambda *_: end(), opening)
    completion, _ = run_one(runner, [])
    assert completion.episode is not None and completion.episode.fault[0] == "long_prompt"


def test_an_opening_must_leave_room_for_an_answer_in_the_engine(template: EpisodeTemplate) -> None:
    opening = Opening([Message("user", "x" * 50)])
    length = len(template.conversation(opening.messages))
    for room, limits, keyword in (
        (1, {"max_model_len": length + 1, "max_prompt_tokens": 1000}, ""),
        (0, {"max_model_len": length, "max_prompt_tokens": 1000}, f"max_model_len={length}"),
        (0, {"max_prompt_tokens": length - 1}, f"max_prompt_tokens={length - 1}"),
        (1, {"max_tokens": length + 1, "max_prompt_tokens": 1000}, ""),
        (0, {"max_tokens": length, "max_prompt_tokens": 1000}, f"environment.max_tokens={length}"),
    ):
        runner, _ = make_runner(template, lambda *_: end(), opening, **limits)
        completion, policy = run_one(runner, [[70]])
        assert completion.episode is not None and len(policy.requests) == room
        reason, detail = completion.episode.fault
        assert (reason == "long_prompt") is (room == 0) and keyword in detail


def test_an_episode_without_a_first_prompt_is_a_fault(template: EpisodeTemplate) -> None:
    runner, _ = make_runner(template, lambda *_: end())
    completion, policy = run_one(runner, [], prompt=Prompt(0, np.zeros(0, np.int64)))
    assert completion.episode is not None and not policy.requests
    assert completion.episode.fault[0] == "invalid"


def test_text_that_no_tokenizer_reads_ends_its_episode(template: EpisodeTemplate) -> None:
    fields = {"role": "user", "content": "x", "name": "\ud800"}
    listed = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ messages[-1].name }}"
    named = EpisodeTemplate(template.tokenizer, listed)
    for opening in (
        Opening([Message("user", "x", fields)]),
        Opening([Message("user", "x")], [{"type": "function", "name": "\ud800"}]),
    ):
        runner, _ = make_runner(named, lambda *_: end(), opening)
        completion, _ = run_one(runner, [])
        assert completion.episode is not None and completion.episode.fault[0] == "template"


def test_long_and_damaged_messages_are_truncated_and_counted(template: EpisodeTemplate) -> None:
    text = "\x00\ud800<|im_end|>" + "x" * 10_000_000
    runner, _ = make_runner(
        template, lambda _, turn: end() if turn else more(text), max_message_chars=40
    )
    completion, policy = run_one(runner, [[70, END], [71, END]])
    assert completion.episode is not None and completion.episode.truncated_messages == 1
    assert len(policy.requests[1][1].token_ids) < 200
    assert "more characters" in completion.episode.messages[1]["content"]
    assert policy.requests[1][1].token_ids.tolist().count(END) == 2


def test_an_edited_history_begins_a_new_sequence(template: EpisodeTemplate) -> None:
    opening = Opening([Message("user", "Walk.")])
    history = [{"role": "user", "content": "Summary: walked."}]
    runner, _ = make_runner(
        template, lambda _, turn: end() if turn else more("Go on.", history=history), opening
    )
    completion, policy = run_one(runner, [[70, END], [71, END]])
    assert completion.episode is not None
    first, second = completion.episode.sequences
    rendered = template.conversation(
        [Message("user", "Summary: walked."), Message("user", "Go on.")]
    )
    assert policy.requests[1][1].token_ids.tolist() == rendered.tolist()
    assert second.token_ids.tolist() == [*rendered.tolist(), 71, END]
    assert first.token_ids[first.is_sampled].tolist() == [70, END]
    assert completion.token_ids.tolist() == [70, END, 71, END]


def test_an_edited_history_may_have_other_tools(template: EpisodeTemplate) -> None:
    listing = EpisodeTemplate(
        template.tokenizer,
        "{% for t in tools or [] %}{{ t.name }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    opening = Opening([Message("user", "Walk.")], [{"name": "look"}])
    info: dict[str, Any] = {
        "history": [{"role": "user", "content": "Walk."}],
        "tools": [{"name": "jump"}],
    }
    runner, _ = make_runner(
        listing, lambda _, turn: end() if turn else more("Go.", **info), opening
    )
    _, policy = run_one(runner, [[70, END], [71, END]])
    prompts = [prompt.token_ids.tolist() for _, prompt, _, _ in policy.requests]
    assert prompts == [ids(listing, "lookWalk."), ids(listing, "jumpWalk.Go.")]


def test_the_history_of_an_unknown_prompt_cannot_be_edited(template: EpisodeTemplate) -> None:
    runner, _ = make_runner(template, lambda *_: more(), history="template")
    completion, _ = run_one(runner, [[70, END]])
    assert completion.episode is not None
    assert completion.episode.fault[0] == "template"
    assert "reset" in completion.episode.fault[1]


def test_states_are_those_of_the_environment_or_the_observations(template: EpisodeTemplate) -> None:
    runner, _ = make_runner(template, lambda _, turn: end() if turn == 3 else more(f"{turn % 2}"))
    completion, _ = run_one(runner, [[70, END]] * 4)
    assert completion.episode is not None
    first, second, third, fourth = (turn.state for turn in completion.episode.turns)
    assert len({first, second, third}) == 3 and second == fourth
    runner, _ = make_runner(
        template, lambda _, turn: end() if turn == 2 else more(f"{turn}", state="same")
    )
    completion, _ = run_one(runner, [[70, END]] * 3)
    assert completion.episode is not None
    assert completion.episode.turns[1].state == completion.episode.turns[2].state


def test_weights_that_change_within_an_episode_are_recorded_by_token(
    template: EpisodeTemplate,
) -> None:
    runner, environments = make_runner(
        template, lambda _, turn: end() if turn else more(), holds=True
    )
    policy = ScriptedPolicy([[70, 71, END], [72, END]])
    loop = EngineLoop(policy, 5, episodes=runner)
    loop.start()
    prompt = Prompt(0, np.arange(40, 50))
    loop.exchange(LoopMessage((GroupRequest("a", prompt, SAMPLING, (None,)),)), 0.0)

    wait_until(lambda: environments.waiting)
    environments.release()  # the opening
    wait_until(lambda: len(environments.answers) == 1)
    loop.update(6, lambda: setattr(policy, "weights", 1))
    wait_until(lambda: loop.exchange(LoopMessage(), 0.0).version == 6)
    environments.release()
    wait_until(lambda: len(environments.answers) == 2 and environments.waiting)
    environments.release()
    report = loop.exchange(LoopMessage(), 10.0)
    (completion,) = report.finished["a"].completions
    assert completion.versions == (VersionRun(5, 3), VersionRun(6, 2))
    assert completion.policy_version == 5
    assert np.allclose(completion.logprobs[3:], [-1.72, -1.02])
    loop.close()


def test_an_aborted_group_closes_its_environments(template: EpisodeTemplate) -> None:
    runner, environments = make_runner(template, lambda *_: more(), holds=True)
    loop = EngineLoop(ScriptedPolicy([]), 0, episodes=runner)
    loop.start()
    request = GroupRequest("a", Prompt(0, np.arange(5)), SAMPLING, (1, 2))
    loop.exchange(LoopMessage((request,)), 0.0)
    wait_until(lambda: len(environments.waiting) == 2)
    loop.exchange(LoopMessage(aborted=("a",)), 0.0)
    wait_until(lambda: len(environments.closed) == 2)
    assert sorted(environments.closed) == ["a/0", "a/1"]
    loop.close()


# --- rewards, turns and training samples ---


def make_completion(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    turns: Sequence[EpisodeTurn],
    **fields: Any,
) -> Completion:
    """Return an episode from (token ids, sampled positions) and turns; token t has logprob -t."""
    rows = list[TokenSequence]()
    for tokens, positions in sequences:
        mask = np.isin(np.arange(len(tokens)), list(positions))
        rows.append(TokenSequence(np.array(tokens), mask))
    token_ids = np.concatenate([row.token_ids[row.is_sampled] for row in rows])
    logprobs: Floats = -token_ids.astype(np.float32)
    record = Episode(tuple(rows), tuple(turns), (), fields.pop("success", None), **fields)
    reason = "fault" if record.fault[0] else "stop"
    return Completion(token_ids, logprobs, reason, 0, "text", (), record)


def turn(num_tokens: int, state: str, reward: float | None = None) -> EpisodeTurn:
    return EpisodeTurn(num_tokens, state, "stop", reward)


# Two episodes of one prompt: two sequences with turns of 2 and 1 tokens, and one with 1 and 2.
FIRST = make_completion(
    [((1, 2, 5, 6), (2, 3)), ((1, 9, 7), (2,))], [turn(2, "s", 0.5), turn(1, "t", 1.0)]
)
SECOND = make_completion(
    [((1, 2, 4, 3, 8, 8), (2, 4, 5))], [turn(1, "s", 0.0), turn(2, "u", 0.25)], success=True
)


def score(*completions: Completion, rewards: Sequence[float] = (1.5, 0.25)) -> ScoredGroup:
    group = RolloutGroup(Prompt(0, np.array([1, 2])), completions)
    return ScoredGroup(group, tuple(Reward(reward, {}) for reward in rewards))


def test_an_episode_of_two_sequences_becomes_two_samples_with_exact_masks() -> None:
    group = score(FIRST, SECOND)
    advantages = np.arange(1.0, 7.0)
    step = make_step([group], advantages, np.array([[True, False]]))
    assert step.arrays.counts == (2, 1)
    sequences = step.sequences
    assert [row.tolist() for row in sequences.token_ids] == [
        [1, 2, 5, 6],
        [1, 9, 7],
        [1, 2, 4, 3, 8, 8],
    ]
    assert [row.tolist() for row in sequences.loss_masks] == [
        [False, False, True, True],
        [False, False, True],
        [False] * 6,
    ]
    assert [row.tolist() for row in sequences.fields["advantages"]] == [
        [0, 0, 1, 2],
        [0, 0, 3],
        [0, 0, 4, 0, 5, 6],
    ]
    assert [row.tolist() for row in sequences.fields["sampler_logprobs"]] == [
        [0, 0, -5, -6],
        [0, 0, -7],
        [0, 0, -4, 0, -8, -8],
    ]


def test_turns_without_a_valid_action_can_be_masked() -> None:
    first, second = FIRST.episode, SECOND.episode
    assert first is not None and second is not None
    invalid = (replace(first.turns[0], is_invalid=True), first.turns[1])
    group = score(replace(FIRST, episode=replace(first, turns=invalid)), SECOND)
    step = make_step([group], None, None, "algo.mask.invalid_actions=true")
    masks = [row.tolist() for row in step.sequences.loss_masks]
    assert masks[0] == [False] * 4 and masks[1] == [False, False, True]
    assert masks[2] == [False, False, True, False, True, True]


def test_answers_without_a_valid_action_lose_the_penalty(template: EpisodeTemplate) -> None:
    calls = [[{"name": "f", "arguments": {}, "error": error}] for error in ("malformed", "raised")]
    infos: list[dict[str, Any]] = [
        {"invalid_action": True},
        {"tool_calls": calls[0]},
        {"tool_calls": calls[1]},
    ]
    runner, _ = make_runner(
        template,
        lambda _, turn: end(None) if turn == 3 else more(reward=0.25, **infos[turn]),
        format_penalty=0.5,
    )
    completion, _ = run_one(runner, [[70, END]] * 4)
    assert completion.episode is not None
    turns = completion.episode.turns
    assert [turn.reward for turn in turns] == [-0.25, -0.25, 0.25, None]
    assert [turn.is_invalid for turn in turns] == [True, True, False, False]


def test_rows_of_a_mixture_have_the_tag_of_their_environment(template: EpisodeTemplate) -> None:
    entries: dict[str, Any] = {"lake": {"name": "frozen_lake"}, "room": {"name": "sokoban"}}
    groups = list[ScoredGroup]()
    for name in ("room", "lake", "room"):
        runner, _ = make_runner(template, lambda *_: end(), name=None, mixture=entries)
        prompt = Prompt(0, np.arange(40, 50), "", {"environment": name})
        completion, _ = run_one(runner, [[70, END]], prompt=prompt)
        groups.append(ScoredGroup(RolloutGroup(prompt, (completion,)), (Reward(1.0, {}),)))
    assert [group.tag for group in groups] == ["room", "lake", "room"]
    turns = rollout_arrays(groups).turns
    assert turns.tags is not None and turns.tags.tolist() == [1, 0, 1]
    tagged = replace(groups[0].rollout.prompt, extra={"tag": "own"})
    assert replace(groups[0], rollout=replace(groups[0].rollout, prompt=tagged)).tag == "own"


def test_rewards_of_early_turns_move_to_their_turn_and_totals_stay() -> None:
    group = score(FIRST, SECOND)
    turns = rollout_arrays([group]).turns
    assert turns.counts.tolist() == [[2, 2]] and turns.lengths.tolist() == [2, 1, 1, 2]
    assert turns.states.tolist() == [0, 1, 0, 2]
    plain = TokenRewards(np.array([[3.0, 0.5]]), np.array([[3, 3]]))
    moved = with_turn_rewards(plain, turns, 2.0)
    assert moved.per_token().tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 0.5]
    assert moved.totals().tolist() == [[3.0, 0.5]]
    assert turns.returns(moved, 0.5).tolist() == [2.0, 2.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ((), [0.0, 1.0, 2.0]),
        (("environment.reward_at=turn",), [0.0, 1.0, 2.0]),
        (("environment.reward_at=end",), [0.0, 0.0, 3.0]),
        (("reward.clip=4.0",), [0.0, 0.0, 3.0]),
        (("reward.norm.center=group",), [0.0, 0.0, 3.0]),
    ],
)
def test_the_last_token_of_a_turn_or_of_the_episode_earns_rewards_of_turns(
    sets: tuple[str, ...], expected: list[float]
) -> None:
    group = score(FIRST, SECOND)
    on = ("environment.name=frozen_lake", "environment.reward_weight=2.0")
    config = load(sets=(*on, *sets)).config
    plain = TokenRewards(np.array([[3.0, 0.5]]), np.array([[3, 3]]))
    placed = placed_rewards(config, plain, rollout_arrays([group]).turns)
    assert placed.per_token().tolist() == [*expected, 0.0, 0.0, 0.5]


def test_environment_rewards_join_those_of_sources_and_faults_are_neutral() -> None:
    fault = make_completion([((1, 2, 5), (2,))], [turn(1, "s")], fault=("crash", "gone"))
    group = RolloutGroup(Prompt(0, np.array([1, 2])), (FIRST, SECOND, fault))
    with Scorer([], 1, environment_weight=2.0) as scorer:
        scores = scorer.score([group])
    (result,) = scores.groups
    assert [reward.total for reward in result.rewards] == [3.0, 0.5, 1.75]
    assert result.rewards[0].scores == {"environment": 1.5}
    assert scores.failures == {"environment/crash": 1}
    arrays = rollout_arrays([result])
    assert arrays.faults.tolist() == [[False, False, True]]
    assert arrays.turns.complete_turns.tolist() == [True] * 4 + [False]
    assert "gone" in scores.notes[0]
    scores.require_scores("step 1")


@pytest.mark.parametrize(
    ("reason", "detail", "remedy"),
    [
        ("timeout", "30 s", "environment.timeout_s"),
        ("long_prompt", "644 tokens", "rollout.max_prompt_tokens"),
        ("error", "KeyError", "Fix the environment;"),
    ],
)
def test_a_step_in_which_every_environment_fails_ends_the_run_with_the_remedy(
    reason: str, detail: str, remedy: str
) -> None:
    fault = make_completion([((1, 2, 5), (2,))], [turn(1, "s")], fault=(reason, detail))
    with Scorer([], 1, environment_weight=1.0) as scorer:
        scores = scorer.score([RolloutGroup(Prompt(0, np.array([1])), (fault, fault))])
    with pytest.raises(MsrlError, match=mentions("environment", reason, detail, remedy)):
        scores.require_scores("step 1")


def test_verifiers_score_the_answers_of_an_episode_and_functions_see_its_messages(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "import json\n"
        "def score(response, answer, *, extra):\n"
        "    return float(len(json.loads(extra['messages'])))\n"
    )
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    episode = replace(FIRST.episode, messages=messages) if FIRST.episode else None
    completion = replace(FIRST, episode=episode)
    with Scorer([Source(function=f"{file}:score")], 1, environment_weight=1.0) as scorer:
        (result,) = scorer.score([RolloutGroup(Prompt(0, np.array([1])), (completion,))]).groups
    assert result.rewards[0].total == 2.0 + 1.5


def test_padding_repeats_a_sequence_without_loss() -> None:
    result = pad_sequences(rollout_arrays([score(FIRST, SECOND)]).sequences, 4)
    assert len(result.token_ids) == 4 and result.token_ids[3].tolist() == [1, 9, 7]
    assert not result.loss_masks[3].any()
    assert pad_sequences(result, 2) is result


def test_metrics_of_episodes() -> None:
    values = episode_metrics([score(FIRST, SECOND).rollout])
    assert values["turns"] == 2.0 and values["sequences"] == 1.5 and values["success"] == 0.5
    assert values["observation_tokens"] == 0.5  # token 3 of the second episode
    plain = Completion(np.array([1]), np.zeros(1, np.float32), "stop", 0, "")
    assert episode_metrics([score(plain, rewards=(0.0,)).rollout]) == {}


def test_a_checkpoint_keeps_finished_episodes_exactly() -> None:
    calls = ({"name": "f", "arguments": {"x": 1}, "error": None},)
    first = replace(FIRST, episode=_with_calls(FIRST.episode, calls))
    group = score(first, SECOND)
    ticket = Ticket(3, 1)
    state = BufferState(4, 0, (), (FinishedGroup(ticket, 2, group),))
    stored = json.loads(json.dumps(encode(state)))
    (restored,) = decode(stored, lambda _: group.rollout.prompt).finished
    for before, after in zip(
        group.rollout.completions, restored.group.rollout.completions, strict=True
    ):
        assert before.episode is not None and after.episode is not None
        assert after.episode.turns == before.episode.turns
        assert after.episode.success == before.episode.success
        for left, right in zip(before.episode.sequences, after.episode.sequences, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()
            assert left.is_sampled.tolist() == right.is_sampled.tolist()


def _with_calls(episode: Episode | None, calls: Any) -> Episode | None:
    if episode is None:
        return None
    return replace(episode, turns=(replace(episode.turns[0], tool_calls=calls), episode.turns[1]))


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_rollout_files_have_the_sequences_and_turns_of_episodes(
    tmp_path: Path, template: EpisodeTemplate, format: Any
) -> None:
    group = score(FIRST, SECOND)
    step = make_step([group], np.arange(1.0, 7.0), np.array([[True, False]]))
    log = RolloutLog(tmp_path, template.tokenizer, is_on=True, format=format)
    log.write(1, [group], step.sequences, [group])
    if format == "jsonl":
        lines = (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        first, second, *dropped = map(json.loads, lines)
        assert first["advantage"] == 2.0 and first["is_trained"] and not second["is_trained"]
        assert [turn["reward"] for turn in first["turns"]] == [0.5, 1.0]
        assert first["response_ids"] == [5, 6, 7] and len(dropped) == 2
        return
    records = read_records(tmp_path / "rollouts" / "step_000001.parquet")
    assert [(record.sample, record.sequence) for record in records] == [(0, 0), (0, 1), (1, 0)] * 2
    assert records[1].behavior_logprobs.tolist() == [0, 0, -7]
    assert records[2].advantages.tolist() == [0, 0, 4, 0, 5, 6]
    assert records[0].versions == ((0, 2),) and records[2].success is True
    assert [turn["reward"] for turn in records[0].turns] == [0.5, 1.0]
    assert not records[3].loss_mask.any()
