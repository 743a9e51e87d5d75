"""`msrl eval`: answers of checkpoints to held-out prompts, scored as evaluations of train-grpo.

With an environment, an answer is an episode. One engine generates for all checkpoints of the same
shape. P prompts, n answers per prompt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from msrl import platforms
from msrl.algorithms.intervals import mean_interval
from msrl.algorithms.pass_at_k import depths, pass_at_k
from msrl.config.schema import Config
from msrl.config.secrets import recorded
from msrl.data.manifest import read_manifest
from msrl.data.tokenizer import TextTokenizer, open_tokenizer
from msrl.errors import MsrlError
from msrl.files import digest_of_ends
from msrl.limits import print_note
from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Platform
from msrl.registry import own
from msrl.rewards.score import Scorer, Scores, Source, check_functions
from msrl.rollout.engine import check_stops
from msrl.rollout.episodes.settings import EpisodeSettings
from msrl.rollout.runtime.episode_sampler import EpisodeSampler
from msrl.tracking.progress import duration_text, progress
from msrl.types import Prompt, RolloutGroup, SamplingParams
from msrl.workflows.engine import check_engine
from msrl.workflows.episodes.setup import episode_settings, running_pool
from msrl.workflows.evaluate.checkpoints import Checkpoint, find_checkpoints
from msrl.workflows.evaluate.engines import (
    EvaluatedModel,
    SharedEngine,
    evaluation_settings,
    labeled,
    model_plan,
)
from msrl.workflows.evaluate.results import Result, ResultFolder, reported, show
from msrl.workflows.rl.evaluation import (
    eval_sampling,
    evaluation_metrics,
    verdicts_by_tag,
)
from msrl.workflows.rl.setup import eval_prompts, refuse_images
from msrl.workflows.rollout_log import RolloutLog
from msrl.workflows.scoring import make_judge, make_scorer
from msrl.workflows.training.interrupts import EndAtOnce
from msrl.workflows.training.resume_checks import weights_digest

_BATCH = 512  # responses per engine call; between calls, progress is shown


@dataclass(frozen=True, slots=True)
class EvaluationSetup:
    """Checked inputs of `msrl eval`."""

    config: Config
    models: tuple[EvaluatedModel, ...]
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    tokenizer: TextTokenizer
    results: ResultFolder
    episodes: EpisodeSettings | None  # None if a response is one turn

    @property
    def pending(self) -> list[EvaluatedModel]:
        """Checkpoints to evaluate."""
        return [model for model in self.models if not model.is_finished]

    @property
    def longest_prompt(self) -> int:
        """Largest number of tokens before the first answer."""
        return _longest_prompt(self.config, self.prompts)


def prepare(config: Config) -> EvaluationSetup:
    """Check checkpoints, prompts, rewards and results of earlier calls; start nothing.

    Raises:
        MsrlError: One of them is not valid.
    """
    checkpoints = find_checkpoints(config.evaluate.models)
    plans = [model_plan(config, checkpoint) for checkpoint in checkpoints]
    refuse_images(plans[0])
    tokenizer = open_tokenizer(plans[0].tokenizer_dir)
    distinct = {plan.model.hf_dir: plan for plan in reversed(plans)}  # prints once per folder
    prompts = [eval_prompts(plan, tokenizer) for plan in distinct.values()][-1]
    sampling = eval_sampling(config, plans[0].sampling)
    stop_section = "rollout" if config.eval.sampling.stop is None else "eval"
    check_stops(f"{stop_section}.sampling.stop", sampling.stop, tokenizer)
    longest = _longest_prompt(config, prompts)
    limits = _engine_limits(longest, len(prompts), sampling)
    for plan in plans:
        _check_lengths(plan, longest, sampling)
        check_engine(config, evaluation_settings(plan, plan.model.hf_dir, *limits))
    check_functions([Source.of(section) for section in config.reward.sources])
    results = ResultFolder(
        Path(config.evaluate.output),
        _settings(config, sampling),
        overwrite=config.evaluate.overwrite,
    )
    models = tuple(
        EvaluatedModel(checkpoint, plan, code, results.is_finished(checkpoint.label, code))
        for checkpoint, plan, code in labeled(checkpoints, plans, results)
    )
    episodes = episode_settings(plans[0], prompts)
    return EvaluationSetup(config, models, prompts, sampling, tokenizer, results, episodes)


def summary(setup: EvaluationSetup) -> str:
    """Return the amount of work in one line."""
    num_finished = len(setup.models) - len(setup.pending)
    finished = f", {num_finished} of them finished before" if num_finished else ""
    return (
        f"{_count_text(len(setup.models), 'checkpoint')}{finished}; "
        f"{_count_text(len(setup.prompts), 'prompt')}, "
        f"{_count_text(setup.sampling.num_samples, 'response')} each"
    )


def _count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _longest_prompt(config: Config, prompts: Sequence[Prompt]) -> int:
    """Return the length of the longest prompt; an environment may begin with a longer one."""
    environment = config.environment
    if environment.is_on and not environment.is_single_turn:
        return config.rollout.max_prompt_tokens
    return max(len(prompt.token_ids) for prompt in prompts)


def _check_lengths(plan: RunPlan, longest: int, sampling: SamplingParams) -> None:
    """Raise MsrlError if a prompt with its response is longer than model or engine support."""
    shape, weights = plan.shape, plan.model.weights
    max_model_len = plan.config.rollout.engine.max_model_len
    if max_model_len is not None and longest + sampling.max_tokens > max_model_len:
        raise MsrlError(
            f"rollout.engine.max_model_len={max_model_len}: the longest prompt of {longest} tokens "
            f"and eval.max_response_tokens={sampling.max_tokens} need "
            f"{longest + sampling.max_tokens}. Raise it, or remove it."
        )
    if shape.reward_head:
        raise MsrlError(f"{weights}: {shape.architecture} generates scores instead of text.")
    if longest + sampling.max_tokens > shape.max_position_embeddings:
        raise MsrlError(
            f"eval.max_response_tokens={sampling.max_tokens}: with the longest prompt of {longest} "
            f"tokens, this exceeds the {shape.max_position_embeddings} tokens that the model in "
            f"{weights} supports. Lower it, or lower rollout.max_prompt_tokens."
        )


def _settings(config: Config, sampling: SamplingParams) -> dict[str, Any]:
    """Return all values that the results depend on besides the checkpoints."""
    written: dict[str, Any] = recorded(config)
    environment = {"environment": written["environment"]} if config.environment.is_on else {}
    logits = config.model.logits_dtype
    samplings = asdict(sampling)
    del samplings["with_routes"]  # no result depends on it
    return {
        "data.eval": _data_digest(str(config.data.eval)),
        "eval.prompts": config.eval.prompts,
        "rollout.max_prompt_tokens": config.rollout.max_prompt_tokens,
        **{f"sampling.{name}": value for name, value in samplings.items()},
        "reward.sources": written["reward"]["sources"],
        "eval.source": config.eval.source,
        "eval.right_from": config.eval.right_from,
        "model.dtype": config.model.dtype,
        **({} if logits is None else {"model.logits_dtype": logits}),
        "evaluate.confidence": config.evaluate.confidence,
        **environment,
        **scoring_files(config),
    }


def scoring_files(config: Config) -> dict[str, str]:
    """Return digests of the user's files that score answers or run episodes, by key and path."""
    digests: dict[str, str] = {}
    for source in config.reward.sources:
        name = source.function or source.verifier or ""
        if own.is_own(name):
            file = Path(own.split(name)[0])
            digests[f"reward.sources: {file}"] = digest_of_ends([(file.name, file)])
        elif source.model is not None:
            model = Path(source.model)
            digests[f"reward.sources: {model}"] = weights_digest(model)
    section = config.environment
    for entry in (section, *section.mixture.values()):
        if entry.path is not None:
            file = Path(entry.path.rpartition(":")[0])
            digests[f"environment: {file}"] = digest_of_ends([(file.name, file)])
    return digests


def _data_digest(prefix: str) -> str:
    """Return a digest of the prompts: their recorded checksums, or the ends of their files."""
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.files:
        return json.dumps(manifest.files, sort_keys=True)
    path = Path(prefix)
    files = sorted(path.parent.glob(f"{path.name}_*"))
    return digest_of_ends((file.name, file) for file in files if file.is_file())


def run(config: Config) -> None:
    """Evaluate the checkpoints of `config.evaluate` that are not finished, and print all results.

    With benchmarks, evaluate on these.

    Raises:
        MsrlError: The inputs are not valid; they are checked before an engine starts.
        KeyboardInterrupt: A signal ended the evaluation. Finished checkpoints are saved.
    """
    if config.evaluate.benchmarks:
        from msrl.workflows.evaluate import benchmark_run

        benchmark_run.run(config)
        return
    with EndAtOnce():
        setup = prepare(config)
        platform = platforms.resolve(config.cluster.platform)
        finished = [model.checkpoint.label for model in setup.models if model.is_finished]
        with reported(setup.results, finished):
            _evaluate_pending(setup, platform)
    show(setup.results)


def _evaluate_pending(setup: EvaluationSetup, platform: Platform) -> None:
    if not setup.pending:
        return
    limits = _engine_limits(setup.longest_prompt, len(setup.prompts), setup.sampling)
    with (
        running_pool(setup.episodes) as pool,
        SharedEngine(*limits) as shared,
        make_scorer(setup.models[0].plan, setup.tokenizer, platform) as scorer,
    ):
        for model in setup.pending:
            engine = shared.load(model)
            sampler: ResponseSource = engine
            if pool is not None and setup.episodes is not None:
                sampler = EpisodeSampler(engine, pool, setup.episodes)
            result, rows = _evaluate(setup, model, sampler, scorer)
            setup.results.add(result, rows)
            for note in result.notes:
                print_note(f"{result.label}: {note}")
            accuracy = result.metrics.get("pass@1")
            text = "" if accuracy is None else f"pass@1 {accuracy:.1%}, "
            print_note(f"{result.label}: {text}{duration_text(result.seconds)}")


class ResponseSource(Protocol):
    """Source of responses: an engine, or episodes with one."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        policy_version: int,
        *,
        on_finished: Callable[[int], object] | None = None,
    ) -> tuple[RolloutGroup, ...]:
        """Return a group of responses per prompt, in order; report responses as they finish."""
        ...


def _engine_limits(
    longest_prompt: int, num_prompts: int, sampling: SamplingParams
) -> tuple[int, int]:
    """Return the lengths and the number of sequences of an engine that answers all prompts."""
    return longest_prompt + sampling.max_tokens, num_prompts * sampling.num_samples


def _evaluate(
    setup: EvaluationSetup, model: EvaluatedModel, sampler: ResponseSource, scorer: Scorer
) -> tuple[Result, list[dict[str, object]]]:
    """Return the result of one checkpoint, and a row for each of its responses."""
    started = time.perf_counter()
    checkpoint, referee = model.checkpoint, make_judge(setup.config)
    scores = _score_all(setup, checkpoint, sampler, scorer)
    verdicts = referee.verdicts(scores.groups)
    result = Result(
        label=checkpoint.label,
        series=checkpoint.series,
        path=str(checkpoint.root),
        step=checkpoint.step,
        digest=model.digest,
        num_prompts=len(setup.prompts),
        num_samples=setup.sampling.num_samples,
        metrics=evaluation_metrics(scores, verdicts),
        intervals=_all_intervals(scores, verdicts, setup.config.evaluate.confidence),
        seconds=round(time.perf_counter() - started, 3),
        samples=setup.results.samples_file(checkpoint.label),
        notes=scores.notes,
    )
    log = RolloutLog(setup.results.folder, setup.tokenizer, is_on=True)
    return result, log.evaluation_rows(scores.groups, verdicts)


def _score_all(
    setup: EvaluationSetup, checkpoint: Checkpoint, sampler: ResponseSource, scorer: Scorer
) -> Scores:
    """Return the scored responses to all prompts.

    Raises:
        RewardSourceError: A source returned no score at all.
    """
    scores, where = Scores((), {}, ()), f"the evaluation of {checkpoint.label}"
    size = max(1, _BATCH // setup.sampling.num_samples)
    title, sampling = f"evaluating {checkpoint.label}", setup.sampling
    total = len(setup.prompts) * sampling.num_samples
    with progress(title, total=total, unit="responses") as bar:
        for first in range(0, len(setup.prompts), size):
            batch = setup.prompts[first : first + size]
            groups = sampler.generate(batch, sampling, checkpoint.version, on_finished=bar.advance)
            scores = scores.plus(scorer.score(groups))
            scores.require_scores(where, only_stopped=True)
    scores.require_scores(where)
    return scores


def _all_intervals(
    scores: Scores, verdicts: Sequence[Sequence[bool] | None], confidence: float
) -> dict[str, tuple[float, float]]:
    """Return the confidence intervals over all prompts, and of pass@1 over those of each tag."""
    found = dict(intervals(verdicts, confidence))
    for tag, rows in verdicts_by_tag(scores.groups, verdicts).items():
        own = intervals(rows, confidence)
        if own:
            found[f"pass@1/{tag}"] = own["pass@1"]
    return found


def intervals(
    verdicts: Sequence[Sequence[bool] | None], confidence: float
) -> Mapping[str, tuple[float, float]]:
    """Return the confidence intervals of pass@k and mean@n over the decided prompts."""
    decided = np.array([row for row in verdicts if row is not None], dtype=np.int64)  # [P, n]
    if not decided.size:
        return {}
    count, num_right = decided.shape[1], decided.sum(axis=1)
    values = {f"pass@{k}": pass_at_k(num_right, count, k) for k in depths(count)}
    if count > 1:
        values[f"mean@{count}"] = decided.mean(axis=1)
    return {
        name: mean_interval(per_prompt, count, confidence) for name, per_prompt in values.items()
    }
