"""Evaluation during RL training: accuracy of the policy on held-out prompts, and its answers.

The evaluation uses separate sampling settings and seeds and leaves no state in the engines:
rollouts and losses of a run are bit-identical with and without it. P prompts, n answers per prompt.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from msrl.algorithms.pass_at_k import depths, pass_at_k
from msrl.algorithms.rollout_arrays import group_arrays
from msrl.config.schema import Config
from msrl.plan.derived import eval_response_tokens, samples_per_step
from msrl.rewards.score import Scorer, Scores
from msrl.rewards.sources import TAG
from msrl.types import Prompt, RolloutGroup, SamplingParams, ScoredGroup, StepReport
from msrl.workflows.episodes.metrics import episode_metrics
from msrl.workflows.rl.setup import GenerationSetup
from msrl.workflows.rollout_log import RolloutLog
from msrl.workflows.scoring import make_judge

_SEED = 0x6576616C  # added to run.seed, so that evaluations and rollouts have different streams


class Sampler(Protocol):
    """Engines that answer held-out prompts."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int
    ) -> tuple[RolloutGroup, ...]:
        """Return a group per prompt that `policy_version` samples."""
        ...

    def onload(self) -> None:
        """Take the devices' memory if it was released."""
        ...

    def forget_prompts(self) -> None:
        """Clear records of past prompts that would influence later completions."""
        ...


class RolloutEvaluator:
    """Evaluator of the `eval` section."""

    is_loss = False

    def __init__(
        self, job: GenerationSetup, engines: Sampler, scorer: Scorer, log: RolloutLog
    ) -> None:
        self._job, self._engines, self._scorer, self._log = job, engines, scorer, log
        self._section = job.config.eval
        self._judge = make_judge(job.config)
        self._sampling = eval_sampling(job.config, job.sampling)

    def is_due(self, step: int) -> bool:
        """Return True every `eval.every_steps` steps and, if it is set, after the last step."""
        every = self._section.every_steps
        return every is not None and (step % every == 0 or step == self._job.num_steps)

    def value(self, report: StepReport) -> float:
        """Return pass@1, or the mean reward if no source judges the answers."""
        return report.metrics.get("eval/pass@1", report.metrics["eval/reward"])

    def evaluate(self, report: StepReport) -> StepReport:
        """Answer the held-out prompts; return the report of the step with their metrics."""
        start = time.perf_counter()
        scores = self._score_all(report.step)
        self._engines.forget_prompts()
        groups = scores.groups
        verdicts = self._judge.verdicts(groups)
        self._log.write_evaluation(report.step, groups, verdicts)
        metrics = {
            f"eval/{name}": value for name, value in evaluation_metrics(scores, verdicts).items()
        }
        seconds = {**report.seconds, "eval": time.perf_counter() - start}
        notes = tuple(f"evaluation: {note}" for note in scores.notes)
        return replace(
            report,
            metrics={**report.metrics, **metrics},
            seconds=seconds,
            notes=(*report.notes, *notes),
        )

    @property
    def _batch_size(self) -> int:
        """Number of prompts per batch.

        A batch has at most as many answers as a step has samples, so that it meets the
        cluster.rpc_timeout_s of a step.
        """
        engines = self._job.plan.num_engines
        num_prompts = samples_per_step(self._job.config) // self._section.samples_per_prompt
        return max(engines, num_prompts)

    def _score_all(self, step: int) -> Scores:
        """Answer and score all prompts.

        Raises:
            RewardSourceError: A source returned no score at all.
        """
        scores, where = Scores((), {}, ()), f"the evaluation of step {step}"
        for start in range(0, len(self._job.eval_prompts), self._batch_size):
            scores = scores.plus(self._score_batch(start, step))
            # A source may still score rows of later batches, so stop early only if its calls are
            # being skipped.
            scores.require_scores(where, only_stopped=True)
        scores.require_scores(where)
        return scores

    def _score_batch(self, start: int, step: int) -> Scores:
        prompts = self._job.eval_prompts[start : start + self._batch_size]
        self._engines.onload()  # reward models on the ranks take the device's memory
        groups = self._engines.generate(prompts, self._sampling, policy_version=step)
        return self._scorer.score(groups)


def eval_sampling(config: Config, rollouts: SamplingParams) -> SamplingParams:
    """Return the sampling of held-out prompts, with the rollouts' stop token ids."""
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


def evaluation_metrics(
    scores: Scores, verdicts: Sequence[Sequence[bool] | None]
) -> dict[str, float]:
    """Return the metrics of an evaluation without their prefix."""
    groups, arrays = scores.groups, group_arrays(scores.groups)
    rollouts = [group.rollout for group in groups]
    return {
        **_accuracies(verdicts),
        **_accuracies_by_tag(groups, verdicts),
        "reward": arrays.mean_reward,
        **{f"score/{name}": value for name, value in scores.means().items()},
        **{f"failed/{name}": float(count) for name, count in scores.failures.items()},
        **{f"score/{name}": float(number) for name, number in scores.usage.items()},
        **episode_metrics(rollouts),
        "response_length": float(arrays.lengths.mean()),
        "truncated": float(arrays.truncated.mean()),
    }


def _accuracies(verdicts: Sequence[Sequence[bool] | None]) -> dict[str, float]:
    """Return pass@k and mean@n over the prompts whose answers are all decided."""
    decided = np.array([row for row in verdicts if row is not None], dtype=np.int64)  # [P, n]
    if not decided.size:
        return {}
    count = decided.shape[1]
    num_right = decided.sum(axis=1)
    metrics = {f"pass@{k}": float(pass_at_k(num_right, count, k).mean()) for k in depths(count)}
    if count > 1:
        metrics[f"mean@{count}"] = float(decided.mean())
    if len(decided) < len(verdicts):
        metrics["undecided"] = float(len(verdicts) - len(decided))
    return metrics


def verdicts_by_tag(
    groups: Sequence[ScoredGroup], verdicts: Sequence[Sequence[bool] | None]
) -> dict[str, list[Sequence[bool] | None]]:
    """Return the verdicts of the rows of each tag, by name; empty if there is only one tag."""
    by_tag = defaultdict[str, list[Sequence[bool] | None]](list)
    for group, verdict in zip(groups, verdicts, strict=True):
        by_tag[group.rollout.prompt.extra.get(TAG, "untagged")].append(verdict)
    return {tag: by_tag[tag] for tag in sorted(by_tag)} if len(by_tag) > 1 else {}


def _accuracies_by_tag(
    groups: Sequence[ScoredGroup], verdicts: Sequence[Sequence[bool] | None]
) -> dict[str, float]:
    """Return pass@1 of the rows of each tag; empty if there is only one tag."""
    by_tag = {tag: _accuracies(rows) for tag, rows in verdicts_by_tag(groups, verdicts).items()}
    return {
        f"pass@1/{tag}": accuracies["pass@1"]
        for tag, accuracies in by_tag.items()
        if "pass@1" in accuracies
    }
