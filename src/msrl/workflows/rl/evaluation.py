"""Evaluation while training with reinforcement: how many held-out prompts the policy answers right, and what it answers.

It has sampling and seeds of its own and leaves nothing behind in the engines: a run with it has the rollouts and losses of one without, to
the bit. P prompts, n answers to each.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from msrl.algorithms.pass_at_k import depths, pass_at_k
from msrl.algorithms.samples import length_matrix, reward_matrix, truncated_matrix
from msrl.config.schema import Config
from msrl.plan.derived import eval_response_tokens, samples_per_step
from msrl.rewards.score import Scorer, Scores, Source
from msrl.rewards.sources import TAG
from msrl.rewards.verdicts import Judge
from msrl.types import SamplingParams, ScoredGroup, StepReport
from msrl.workflows.rl.rollout_log import RolloutLog
from msrl.workflows.rl.setup import RLSetup
from msrl.workflows.rl.worker_groups import EngineGroup
from msrl.workflows.training.best import Best, best_state

_SEED = 0x6576616C  # added to run.seed: another stream than the rollouts'


class Evaluator:
    """Evaluates as the `eval` section says. Its state is the best evaluation so far."""

    def __init__(self, job: RLSetup, engines: EngineGroup, scorer: Scorer, log: RolloutLog, state: Mapping[str, Any]) -> None:
        """`state` is what `state()` returned when the checkpoint to go on from was saved, or empty."""
        self._job, self._engines, self._scorer, self._log = job, engines, scorer, log
        self._section = job.config.eval
        self._judge = judge(job.config)
        self._sampling = eval_sampling(job.config, job.sampling)
        self.best, self._last_step = Best.of(state), None

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold."""
        return best_state(self.best)

    def at_start(self) -> StepReport:
        """The report of step 0. There is no checkpoint of it, so it is never the best."""
        return self._added(StepReport(0, {}))

    def after(self, report: StepReport) -> StepReport:
        """The report of a step, with an evaluation where one is due after it."""
        every = self._section.every_steps
        if every is None or (report.step % every and report.step != self._job.num_steps):
            return report
        report = self._added(report)
        value = report.metrics.get("eval/pass@1", report.metrics["eval/reward"])
        self.best, self._last_step = Best.after(self.best, report.step, value, is_loss=False), report.step
        return report

    def must_save(self, step: int) -> bool:
        """Whether a checkpoint of this step is wanted because it is the best."""
        return self._job.config.checkpoint.keep_best and self.best is not None and self.best.step == step

    def ends_with(self, step: int) -> bool:
        """Whether the evaluation after this step, if there was one, was one too many without a new best; that is said."""
        patience, best = self._section.patience, self.best
        if patience is None or best is None or self._last_step != step or best.since < patience:
            return False
        print(f"ended early: {best.since} evaluations without a better one than {best.value:.4f} of step {best.step}", file=sys.stderr)
        return True

    def _added(self, report: StepReport) -> StepReport:
        started = time.perf_counter()
        scores = self._all_scored(report.step)
        self._engines.forget_prompts()
        groups = scores.groups
        verdicts = [self._judge.verdicts(group) for group in groups]
        self._log.write_evaluation(report.step, groups, verdicts)
        metrics = {f"eval/{name}": value for name, value in _metrics(scores, verdicts).items()}
        seconds = {**report.seconds, "eval": time.perf_counter() - started}
        notes = tuple(f"evaluation: {note}" for note in scores.notes)
        return replace(report, metrics={**report.metrics, **metrics}, seconds=seconds, notes=(*report.notes, *notes))

    @property
    def _prompts_at_once(self) -> int:
        """As many as make no more answers than a step has, so that they take no longer than cluster.rpc_timeout_s allows for a step."""
        engines = self._job.config.rollout.engine.dp
        return max(engines, samples_per_step(self._job.config) // self._section.samples_per_prompt)

    def _all_scored(self, step: int) -> Scores:
        """Answer and score all prompts. Raises RewardSourceError when a source gives no score at all."""
        scores, where = Scores((), {}, ()), f"the evaluation of step {step}"
        for start in range(0, len(self._job.eval_prompts), self._prompts_at_once):
            scores = scores.joined(self._scored(start, step))
            scores.require_scores(where, only_stopped=True)  # later parts may have other rows, unless calls take all the time
        scores.require_scores(where)
        return scores

    def _scored(self, start: int, step: int) -> Scores:
        prompts = self._job.eval_prompts[start : start + self._prompts_at_once]
        return self._scorer.score(self._engines.generate(prompts, self._sampling, policy_version=step))


def judge(config: Config) -> Judge:
    """What tells right from wrong in this configuration."""
    sources = tuple(Source.of(section) for section in config.reward.sources)
    return Judge(sources, config.eval.source, config.eval.right_from)


def eval_sampling(config: Config, rollouts: SamplingParams) -> SamplingParams:
    """How held-out prompts are answered; what ends an answer of a rollout by the template ends these too."""
    sampling = config.eval.sampling
    return SamplingParams(
        max_tokens=eval_response_tokens(config),
        num_samples=config.eval.samples_per_prompt,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=rollouts.stop if sampling.stop is None else sampling.stop,
        stop_token_ids=rollouts.stop_token_ids,
        seed=config.run.seed + _SEED if sampling.seed is None else sampling.seed,
    )


def _metrics(scores: Scores, verdicts: Sequence[Sequence[bool] | None]) -> dict[str, float]:
    """What an evaluation logs, but for its prefix."""
    groups, lengths = scores.groups, length_matrix(scores.groups)
    return {
        **_accuracies(verdicts),
        **_by_tag(groups, verdicts),
        "reward": float(reward_matrix(groups).mean()),
        **{f"score/{name}": value for name, value in scores.means().items()},
        **{f"failed/{name}": float(count) for name, count in scores.failures.items()},
        "response_length": float(lengths.mean()),
        "truncated": float(truncated_matrix(groups).mean()),
    }


def _accuracies(verdicts: Sequence[Sequence[bool] | None]) -> dict[str, float]:
    """pass@k of the prompts on which a source decides, and mean@n under that name; nothing where it decides on none."""
    decided = np.array([verdict for verdict in verdicts if verdict is not None], dtype=np.int64)  # [P, n]
    if not decided.size:
        return {}
    count = decided.shape[1]
    found = {f"pass@{k}": float(pass_at_k(decided.sum(axis=1), count, k).mean()) for k in depths(count)}
    mean = {f"mean@{count}": float(decided.mean())} if count > 1 else {}
    undecided = {"undecided": float(len(verdicts) - len(decided))} if len(decided) < len(verdicts) else {}
    return found | mean | undecided


def _by_tag(groups: Sequence[ScoredGroup], verdicts: Sequence[Sequence[bool] | None]) -> dict[str, float]:
    """pass@1 of the rows of every tag, where there are several."""
    tagged = defaultdict[str, list[Sequence[bool] | None]](list)
    for group, verdict in zip(groups, verdicts, strict=True):
        tagged[group.rollout.prompt.extra.get(TAG, "untagged")].append(verdict)
    if len(tagged) < 2:
        return {}
    means = {tag: _accuracies(mine).get("pass@1") for tag, mine in sorted(tagged.items())}
    return {f"pass@1/{tag}": value for tag, value in means.items() if value is not None}
