"""`msrl eval --benchmark`: published suites by lm-evaluation-harness on the engine of msrl.

All benchmarks of a checkpoint, and all checkpoints of the same shape, share one engine. Each result
is saved as soon as it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.plan.run_plan import RunPlan
from msrl.tracking.progress import duration_text, progress
from msrl.types import SamplingParams
from msrl.workflows.engine import check_engine
from msrl.workflows.evaluate.checkpoints import Checkpoint, find_checkpoints
from msrl.workflows.evaluate.engines import (
    EvaluatedModel,
    SharedEngine,
    evaluation_settings,
    labeled,
    model_plan,
)
from msrl.workflows.evaluate.harness import outcome, tasks
from msrl.workflows.evaluate.harness.benchmark import Benchmark
from msrl.workflows.evaluate.harness.requests import Questions, Size
from msrl.workflows.evaluate.harness.sampling import AnswerSampling
from msrl.workflows.evaluate.harness.tasks import LoadedBenchmark
from msrl.workflows.evaluate.harness.text import ModelText
from msrl.workflows.evaluate.results import (
    BenchmarkRecord,
    Result,
    ResultFolder,
    benchmark_setting,
    reported,
    show,
)
from msrl.workflows.rl.evaluation import eval_sampling
from msrl.workflows.training.interrupts import EndAtOnce

if TYPE_CHECKING:
    from msrl.rollout.vllm import VllmEngine


@dataclass(frozen=True, slots=True)
class BenchmarkModel:
    """A checkpoint to evaluate.

    Attributes:
        model: The checkpoint.
        text: Its tokenizer and chat template.
        is_chat: Whether each benchmark goes through the chat template.
        finished: Names of the benchmarks that are finished.
    """

    model: EvaluatedModel
    text: ModelText
    is_chat: Mapping[str, bool]
    finished: frozenset[str]


@dataclass(frozen=True, slots=True)
class BenchmarkSetup:
    """Checked inputs of an evaluation on benchmarks.

    Attributes:
        config: The configuration.
        models: Checkpoints.
        benchmarks: Loaded benchmarks, by name and whether they go through a chat template.
        sampling: Sampling of answers; `max_tokens` 0 is that of the suite.
        longest: Largest number of tokens of a question with its answer.
        num_requests: Number of requests of each benchmark.
        results: Folder of the results.
    """

    config: Config
    models: tuple[BenchmarkModel, ...]
    benchmarks: Mapping[tuple[str, bool], LoadedBenchmark]
    sampling: SamplingParams
    longest: int
    num_requests: Mapping[tuple[str, bool], int]
    results: ResultFolder

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the benchmarks."""
        return self.config.evaluate.benchmarks


def prepare(config: Config) -> BenchmarkSetup:
    """Check checkpoints, benchmarks, rows and results of earlier calls; start nothing.

    Raises:
        MsrlError: One of them is not valid.
    """
    harness = tasks.version()
    checkpoints = find_checkpoints(config.evaluate.models)
    plans = [model_plan(config, checkpoint) for checkpoint in checkpoints]
    texts = {
        plan.tokenizer_dir: ModelText(plan.tokenizer_dir, config.evaluate.enable_thinking)
        for plan in plans
    }
    chats = {folder: _chats(config, text) for folder, text in texts.items()}
    benchmarks = _load(config, chats.values())
    sampling = _sampling(config, plans[0])
    sizes = {
        folder: _sizes(config, benchmarks, sampling, text, chats[folder])
        for folder, text in texts.items()
    }
    longest = max(size.longest for each in sizes.values() for size in each.values())
    count = max(size.count for each in sizes.values() for size in each.values())
    for plan in plans:
        _check_lengths(plan, sizes[plan.tokenizer_dir], sampling.max_tokens)
        check_engine(config, evaluation_settings(plan, plan.model.hf_dir, longest, count))
    settings = _settings(config, sampling, harness, benchmarks)
    results = ResultFolder(
        Path(config.evaluate.output), settings, overwrite=config.evaluate.overwrite
    )
    models = tuple(
        _model(config, results, each, texts, chats) for each in labeled(checkpoints, plans, results)
    )
    num_requests = {
        (name, chats[folder][name]): size.count
        for folder, each in sizes.items()
        for name, size in each.items()
    }
    return BenchmarkSetup(config, models, benchmarks, sampling, longest, num_requests, results)


def _model(
    config: Config,
    results: ResultFolder,
    labeled_checkpoint: tuple[Checkpoint, RunPlan, str],
    texts: Mapping[Path, ModelText],
    chats: Mapping[Path, Mapping[str, bool]],
) -> BenchmarkModel:
    """Return a checkpoint with the benchmarks that are finished."""
    checkpoint, plan, code = labeled_checkpoint
    names = config.evaluate.benchmarks
    finished = {name for name in names if results.is_finished(checkpoint.label, code, name)}
    model = EvaluatedModel(checkpoint, plan, code, is_finished=len(finished) == len(names))
    folder = plan.tokenizer_dir
    return BenchmarkModel(model, texts[folder], chats[folder], frozenset(finished))


def _sizes(
    config: Config,
    benchmarks: Mapping[tuple[str, bool], LoadedBenchmark],
    sampling: SamplingParams,
    text: ModelText,
    chats: Mapping[str, bool],
) -> dict[str, Size]:
    """Return the sizes of the benchmarks for a tokenizer."""
    return {
        name: Questions(
            benchmarks[name, is_chat], AnswerSampling(sampling, text, is_chat), config.eval.prompts
        ).measure()
        for name, is_chat in chats.items()
    }


def summary(setup: BenchmarkSetup) -> str:
    """Return the amount of work in one line."""
    finished = sum(len(model.finished) for model in setup.models)
    done = f"; {finished} results finished before" if finished else ""
    checkpoints = f"{len(setup.models):,} checkpoint{'' if len(setup.models) == 1 else 's'}"
    return f"{checkpoints} on {', '.join(setup.names)}{done}"


def _chats(config: Config, text: ModelText) -> dict[str, bool]:
    """Return whether the questions of each benchmark go through the chat template.

    Raises:
        MsrlError: The tokenizer has none, but it was requested.
    """
    choice, names = config.evaluate.chat_template, config.evaluate.benchmarks
    if choice and text.template is None:
        raise MsrlError(
            f"evaluate.chat_template=true: the tokenizer in {text.folder} has no chat template. "
            "Remove the key."
        )
    if choice is not None:
        return dict.fromkeys(names, choice)
    return {name: text.template is not None and Benchmark.read(name).generates for name in names}


def _load(
    config: Config, chats: Iterable[Mapping[str, bool]]
) -> dict[tuple[str, bool], LoadedBenchmark]:
    """Return the benchmarks in the forms that the models need."""
    section = config.evaluate
    return {
        (name, is_chat): tasks.load(
            Benchmark.read(name),
            section.benchmark_data,
            shots=section.num_fewshot,
            is_chat=is_chat,
        )
        for name, is_chat in dict.fromkeys(item for chat in chats for item in chat.items())
    }


def _sampling(config: Config, plan: RunPlan) -> SamplingParams:
    """Return the sampling of answers. Stop texts and stop tokens follow from suite and model."""
    sampling = eval_sampling(config, plan.sampling)
    limit = config.eval.max_response_tokens or 0
    return replace(sampling, max_tokens=limit, stop=(), stop_token_ids=(), with_logprobs=False)


def _check_lengths(plan: RunPlan, sizes: Mapping[str, Size], limit: int) -> None:
    """Raise MsrlError if a question with its answer is longer than model or engine support."""
    shape, weights = plan.model.require_shape(), plan.model.weights
    if shape.reward_head:
        raise MsrlError(f"{weights}: {shape.architecture} generates scores instead of text.")
    max_model_len = plan.config.rollout.engine.max_model_len
    for name, size in sizes.items():
        key = f"eval.max_response_tokens={limit}" if limit else f"evaluate.benchmarks={name}"
        need = f"the longest question of {name} needs {size.longest} tokens with its answer"
        if max_model_len is not None and size.longest > max_model_len:
            raise MsrlError(
                f"rollout.engine.max_model_len={max_model_len}: {need}. Raise it, or remove it."
            )
        if size.longest > shape.max_position_embeddings:
            raise MsrlError(
                f"{key}: {need}, and the model in {weights} supports "
                f"{shape.max_position_embeddings}. Lower eval.max_response_tokens or "
                "evaluate.num_fewshot."
            )


def _settings(
    config: Config,
    sampling: SamplingParams,
    harness: str,
    benchmarks: Mapping[tuple[str, bool], LoadedBenchmark],
) -> dict[str, Any]:
    """Return all values that the results depend on besides the checkpoints."""
    section, logits = config.evaluate, config.model.logits_dtype
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    values = asdict(sampling)
    return {
        "lm_eval": harness,
        "eval.prompts": config.eval.prompts,
        **{f"sampling.{name}": values[name] for name in names},
        "evaluate.num_fewshot": section.num_fewshot,
        "evaluate.chat_template": section.chat_template,
        "evaluate.enable_thinking": section.enable_thinking,
        "evaluate.confidence": section.confidence,
        "model.dtype": config.model.dtype,
        **({} if logits is None else {"model.logits_dtype": logits}),
        **{benchmark_setting(name): item.rows for (name, _), item in benchmarks.items()},
    }


def run(config: Config) -> None:
    """Evaluate the checkpoints on the benchmarks that are not finished, and print all results.

    Raises:
        MsrlError: The inputs are not valid; they are checked before an engine starts.
        KeyboardInterrupt: A signal ended the evaluation. Finished benchmarks are saved.
    """
    with EndAtOnce():
        setup = prepare(config)
        finished = [
            f"{model.model.checkpoint.label} on {name}"
            for model in setup.models
            for name in setup.names
            if name in model.finished
        ]
        limits = setup.longest, max(setup.num_requests.values())
        with reported(setup.results, finished), SharedEngine(*limits) as shared:
            for model in setup.models:
                _evaluate_model(setup, model, shared)
    show(setup.results)


def _evaluate_model(setup: BenchmarkSetup, model: BenchmarkModel, shared: SharedEngine) -> None:
    """Evaluate a checkpoint on the benchmarks that are not finished."""
    if model.model.is_finished:
        return
    engine = shared.load(model.model)
    for name in (name for name in setup.names if name not in model.finished):
        result, rows = _evaluate(setup, model, engine, name)
        setup.results.add(result, rows)
        for note in result.notes:
            print_note(f"{result.label}, {name}: {note}")
        print_note(
            f"{result.label}: {name} {result.metrics[name]:.1%}, {duration_text(result.seconds)}"
        )


def _evaluate(
    setup: BenchmarkSetup, model: BenchmarkModel, engine: VllmEngine, name: str
) -> tuple[Result, list[dict[str, object]]]:
    """Return the result of one benchmark, and a row for each of its questions."""
    started, checkpoint = time.perf_counter(), model.model.checkpoint
    is_chat = model.is_chat[name]
    loaded = setup.benchmarks[name, is_chat]
    sampling = AnswerSampling(setup.sampling, model.text, is_chat)
    questions = Questions(loaded, sampling, setup.config.eval.prompts)
    title = f"evaluating {checkpoint.label} on {name}"
    total = setup.num_requests[name, is_chat]
    with progress(title, total=total, unit="requests") as bar:
        answers = questions.ask(engine, checkpoint.version, bar.advance)
    metrics = outcome.metrics(loaded, answers.results)
    confidence = setup.config.evaluate.confidence
    notes: tuple[str, ...] = ()
    if answers.num_answers:
        share = answers.num_truncated / answers.num_answers
        metrics[f"{name}/truncated"] = share
        notes = (f"{share:.1%} of the answers reached the limit of tokens",) if share else ()
    result = Result(
        label=checkpoint.label,
        series=checkpoint.series,
        path=str(checkpoint.root),
        step=checkpoint.step,
        digest=model.model.digest,
        num_prompts=answers.num_questions,
        num_samples=1,
        metrics=metrics,
        intervals=outcome.interval(loaded, answers.samples, metrics[name], confidence),
        seconds=round(time.perf_counter() - started, 3),
        samples=setup.results.samples_file(checkpoint.label, name),
        notes=notes,
        benchmark=BenchmarkRecord(name, tasks.version(), loaded.versions, loaded.shots, is_chat),
    )
    return result, outcome.rows(loaded, answers.samples)
