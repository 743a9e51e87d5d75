"""Checks of eval: checkpoints, prompts, sampling and reward sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msrl.checks.evaluation import check_eval_sampling, check_eval_source
from msrl.checks.inputs import path_hint
from msrl.checks.rewards import check_sources
from msrl.checks.rollout import check_temperature
from msrl.config.loader import Resolved
from msrl.data.files import location
from msrl.errors import hub_hint
from msrl.models.paths import (
    TRACKER,
    is_adapter_folder,
    is_hf,
    is_iteration,
    is_mcore,
    run_checkpoints,
    runs_on_ranks,
)
from msrl.plan.run_plan import RunPlan


def check_evaluate(resolved: Resolved) -> Iterator[str]:
    """Check the checkpoints and the settings of sampling."""
    models = resolved.config.evaluate.models
    if not models:
        yield "evaluate.models: missing. Name checkpoints: msrl eval MODEL..."
    for number, path in enumerate(models):
        yield from _model(resolved, f"evaluate.models.{number}", path)
    output = Path(resolved.config.evaluate.output)
    if output.exists() and not output.is_dir():
        yield resolved.mistake("evaluate.output", "is not a folder. Choose another name.")
    yield from check_temperature(resolved, "eval.sampling.temperature")
    if resolved.config.evaluate.benchmarks:
        yield from _benchmarks(resolved)
        return
    yield from check_eval_sampling(resolved)
    yield from check_eval_source(resolved)


def _benchmarks(resolved: Resolved) -> Iterator[str]:
    """Check the settings of an evaluation on benchmarks."""
    config = resolved.config
    if config.data.eval is not None and resolved.origins["data.eval"].name == "--data":
        yield resolved.mistake(
            "data.eval", "benchmarks have their own rows. Remove it, or evaluate.benchmarks."
        )
    data = config.evaluate.benchmark_data
    if data is not None and not Path(data).is_dir():
        yield resolved.mistake("evaluate.benchmark_data", f"folder not found{path_hint(data)}")
    if config.eval.samples_per_prompt > 1:
        yield resolved.mistake(
            "eval.samples_per_prompt", "a benchmark takes one answer to each question. Set it to 1."
        )
    if config.eval.sampling.stop is not None:
        yield resolved.mistake(
            "eval.sampling.stop", "the texts that end an answer are those of the suite. Remove it."
        )


def _model(resolved: Resolved, key: str, path: str) -> Iterator[str]:
    if not Path(path).is_dir():
        yield resolved.mistake(key, f"folder not found{hub_hint(path) or path_hint(path)}")
        return
    tests = (is_hf, is_mcore, is_adapter_folder, is_iteration)
    if not any(test(path) for test in tests) and run_checkpoints(path) is None:
        yield resolved.mistake(
            key,
            f"contains neither config.json (Hugging Face) nor {TRACKER} (mcore), and is not the "
            "folder of a run with checkpoints",
        )


def _run_hint(resolved: Resolved) -> str:
    """Return a hint at the configuration of a run among the models, or nothing."""
    for path in resolved.config.evaluate.models:
        file = Path(path) / "config.yaml"
        if run_checkpoints(path) is not None and file.is_file():
            return f" -c {file} loads the settings of the run."
    return ""


def check_evaluation_prompts(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check that data.eval has prompts, or rows to preprocess."""
    if resolved.config.evaluate.benchmarks:
        return
    name = resolved.config.data.eval
    if name is None:
        yield (
            "data.eval: missing. Use --data with held-out prompts of `msrl preprocess` or rows, or "
            "--benchmark NAME."
            f"{_run_hint(resolved)}"
        )
        return
    if problem := location.mistake(name, resolved.config.preprocess.split):
        yield resolved.mistake("data.eval", problem)
        return
    manifest = plan.datasets[name].manifest  # an error is reported when the data is opened
    if manifest is not None and manifest.kind != "prompts":
        yield resolved.mistake(
            "data.eval",
            f"contains {manifest.kind} data instead of prompts data. Preprocess it with a handler "
            "for prompts such as r1, or --kind prompts.",
        )


def check_evaluation_sources(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check the reward sources. Reward models on training ranks cannot score here."""
    if resolved.config.evaluate.benchmarks:
        return
    yield from check_sources(resolved, plan, f".{_run_hint(resolved)}")
    for number, section in enumerate(resolved.config.reward.sources):
        if runs_on_ranks(section.model, section.engine):
            yield resolved.mistake(
                f"reward.sources.{number}.model",
                "runs on training ranks, which eval does not start. Remove this source, or serve "
                "the model and use url.",
            )
