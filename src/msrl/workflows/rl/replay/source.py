"""Recorded rollouts as the source of a run, and its workers, which have no engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from msrl.rewards.score import Scorer, Scores
from msrl.types import ScoredGroup
from msrl.workflows.rl.model_groups import ModelGroups
from msrl.workflows.rl.replay.initial_logprobs import compute_initial_logprobs
from msrl.workflows.rl.replay.recording import RecordedStep, Recording
from msrl.workflows.rl.replay.responses import ResponseFile
from msrl.workflows.rl.replay.setup import ReplaySetup
from msrl.workflows.rl.rollouts import StepRollouts, select_groups, with_greedy
from msrl.workflows.rl.sources import RolloutSource
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.teacher_servers import TeacherServers
from msrl.workflows.rl.workers import Workers, model_groups, open_placement, rank_model_folders
from msrl.workflows.rollout_log import RolloutLog
from msrl.workflows.scoring import make_scorer
from msrl.workflows.training.settings import rank_settings
from msrl.workflows.training.trainers import open_trainers, save_plan


@dataclass(frozen=True, slots=True)
class ReplayWorkers(Workers):
    """Workers of a replay. `scorer` is None for rewards of the record.

    `recording` has log-probabilities of all responses.
    """

    scorer: Scorer | None
    recording: Recording


@contextmanager
def start_replay_workers(job: ReplaySetup, teachers: TeacherServers) -> Iterator[ReplayWorkers]:
    """Start the ranks and, if rewards are computed, the scorer; stop them at the end.

    Only models on separate devices need Ray.
    """
    with ExitStack() as stack:
        scorer = None
        if job.plan.scores_responses:
            scorer = stack.enter_context(make_scorer(job.plan, job.tokenizer, job.platform))
        models = {} if scorer is None else scorer.rank_models
        if job.plan.separate_models:
            trainers = model_groups(job, models, *stack.enter_context(open_placement(job)))
        else:
            folders = rank_model_folders(models)
            settings = rank_settings(job.plan, job.platform.name, reward_models=folders)
            ranks = stack.enter_context(open_trainers(job.config, settings, job.platform))
            trainers = ModelGroups(ranks, {}, shares_devices=False)
        trainers.start(job.resume, save_plan(job.plan))
        trainers.start_separate(job.resume)
        for name, model in models.items():
            model.connect(partial(trainers.scores, name))
        recording = job.recording
        if isinstance(recording, ResponseFile) and not recording.facts.has_logprobs:
            logprobs = compute_initial_logprobs(job.plan, recording, trainers)
            recording = recording.with_logprobs(logprobs)
        yield ReplayWorkers(trainers, teachers, scorer, recording)


class ReplaySource(RolloutSource):
    """Recorded rollouts. A step depends on its number only, so there is no state."""

    def __init__(self, job: ReplaySetup, workers: ReplayWorkers) -> None:
        self._job, self._scorer, self._recording = job, workers.scorer, workers.recording

    def evaluator(self, log: RolloutLog) -> None:
        """Return None: no engine answers held-out prompts."""

    def take(self, step: int, clock: Clock) -> StepRollouts:
        rollout = self._job.config.rollout
        with clock("read"):
            recorded = self._recorded_step(step)
        scores = Scores((*recorded.taken, *recorded.dropped), {}, ())
        if self._scorer is not None:
            with clock("reward"):
                scores = _scored_again(scores.groups, self._scorer)
            scores.require_scores(f"step {step + 1}")
        return select_groups(rollout.filter, rollout.prompts_per_step, scores)

    def _recorded_step(self, step: int) -> RecordedStep:
        order, recording = self._job.order, self._recording
        if recording.facts.num_steps and not order.shuffle:
            return recording.step(step % recording.facts.num_steps)
        return RecordedStep(tuple(recording.group(int(n)) for n in order.of_step(step)))

    def begin_update(self, clock: Clock) -> None:
        """Do nothing: the ranks always have their devices."""

    def publish(self, version: int, clock: Clock) -> None:
        """Do nothing: no engine needs the weights."""

    def state(self) -> Mapping[str, Any]:
        return {}


def _scored_again(groups: tuple[ScoredGroup, ...], scorer: Scorer) -> Scores:
    """Return groups with new rewards, also of their greedy responses."""
    scores = scorer.score([group.rollout for group in groups])
    greedy = [group.greedy.rollout for group in groups if group.greedy is not None]
    return with_greedy(scores, scorer.score(greedy)) if greedy else scores
