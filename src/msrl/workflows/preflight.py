"""Checks that a command makes before it starts anything, for `--dry-run` and `msrl doctor -c`.

They call the functions that the command itself calls, so both refuse the same inputs with the same
messages. They need no device and write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.hub import is_without_weights
from msrl.packages import missing_package
from msrl.plan.derived import data_kind
from msrl.plan.run_plan import RunPlan

if TYPE_CHECKING:
    from msrl.data.tokenizer import TextTokenizer
    from msrl.workflows.shown_examples import ShownExample
    from msrl.workflows.training.supervised import SupervisedTask


@dataclass(frozen=True, slots=True)
class Inputs:
    """Checked inputs of a command.

    Attributes:
        summary: Their amount, in one line.
        examples: Rendered rows of the training data, as text.
        is_checked: False if a missing package prevented the checks.
    """

    summary: str
    examples: tuple[ShownExample, ...] = ()
    tokenizer: TextTokenizer | None = None
    is_checked: bool = True

    def show(self) -> None:
        """Print the examples."""
        from msrl.workflows.shown_examples import print_examples

        print_examples(self.examples, self.tokenizer)


def check(plan: RunPlan) -> Inputs:
    """Check the inputs of a planned command as the command does, and return them.

    Raises:
        MsrlError: the command would refuse them.
    """
    try:
        if plan.command in ("generate", "chat", "serve") and _is_later(plan):
            text = "not checked, because the command downloads the weights of its model first"
            return Inputs(text)
        if plan.command == "preprocess":
            return _preprocess(plan.config)
        if not plan.reads_data:
            return Inputs(_CHECKS[plan.command](plan.config))
        from msrl.workflows.row_cache import prepare_rows

        with prepare_rows(plan, keep=False) as ready:
            if plan.is_training:
                return _with_examples(_TRAININGS[plan.command](ready), ready)
            return Inputs(_CHECKS[plan.command](ready.config))
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise MsrlError(f"{name}cannot be read or written: {error.strerror or error}") from error
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        return Inputs(f"not checked. {missing}", is_checked=False)


def _is_later(plan: RunPlan) -> bool:
    """Return True if the model is one of a hub whose weights the command will download."""
    model = {
        "generate": plan.config.generate.model,
        "chat": plan.config.chat.model,
        "serve": plan.config.serve.model,
    }[plan.command]
    return model is not None and is_without_weights(Path(model))


def _train_sft(plan: RunPlan) -> str:
    from msrl.workflows.sft.run import SftTask

    return _check_supervised(plan, SftTask())


def _train_dpo(plan: RunPlan) -> str:
    from msrl.workflows.preference.run import PreferenceTask

    return _check_supervised(plan, PreferenceTask(plan))


def _train_rm(plan: RunPlan) -> str:
    from msrl.workflows.preference.reward_model import RewardModelTask
    from msrl.workflows.preference.steps import StepTask

    return _check_supervised(plan, StepTask() if plan.trains_steps else RewardModelTask())


def _check_supervised(plan: RunPlan, task: SupervisedTask[Any]) -> str:
    from msrl.workflows.training.preflight import check_start, planned_platform
    from msrl.workflows.training.supervised import prepare

    job = prepare(plan, planned_platform(plan.config), task)
    longest = job.train.longest
    has_images = job.train.has_images
    check_start(plan, job.platform, job.resume, longest=longest, has_images=has_images)
    return f"{job.num_steps:,} steps; the longest row has {longest:,} tokens"


def _train_grpo(plan: RunPlan) -> str:
    from msrl.workflows.rl.start import prepare
    from msrl.workflows.training.preflight import check_start, planned_platform

    job = prepare(plan, planned_platform(plan.config))
    check_start(plan, job.platform, job.resume, has_images=plan.has_images)
    return job.summary


def _with_examples(summary: str, plan: RunPlan) -> Inputs:
    """Return the inputs of a training with the first rows of its data."""
    from msrl.data.tokenizer import open_tokenizer
    from msrl.workflows.shown_examples import show_data

    try:
        tokenizer = open_tokenizer(plan.tokenizer_dir)
    except MsrlError:  # the checks of the training have reported it
        tokenizer = None
    kind, count = data_kind(plan.config, plan.command), plan.config.preprocess.show or 1
    if plan.is_replay:
        return Inputs(summary, (), tokenizer)
    names = [*plan.data.blend] or [str(plan.data.train)]
    examples = [
        example
        for name in names
        for example in show_data(plan.prefix(name), plan.shown_name(name), kind, tokenizer, count)
    ]
    return Inputs(summary, tuple(examples), tokenizer)


def _preprocess(config: Config) -> Inputs:
    from msrl.data.tokenizer import open_tokenizer
    from msrl.workflows.preprocess import check as check_rows
    from msrl.workflows.preprocess import examples

    summary = f"the first {check_rows(config):,} rows can be preprocessed"
    settings = config.preprocess
    if settings.show is None:
        return Inputs(summary)
    return Inputs(summary, tuple(examples(settings)), open_tokenizer(str(settings.tokenizer)))


def _generate(config: Config) -> str:
    from msrl.workflows.serve.generate import prepare

    return f"{len(prepare(config).requests):,} prompts"


def _chat(config: Config) -> str:
    from msrl.workflows.serve.chat import prepare

    source, _ = prepare(config)
    return f"a model of {source.shape.architecture}"


def _serve(config: Config) -> str:
    from msrl.workflows.serve.server import prepare, summary

    return summary(prepare(config))


def _eval(config: Config) -> str:
    if config.evaluate.benchmarks:
        from msrl.workflows.evaluate import benchmark_run

        return benchmark_run.summary(benchmark_run.prepare(config))
    from msrl.workflows.evaluate.run import prepare, summary

    return summary(prepare(config))


def _convert(config: Config) -> str:
    from msrl.models.paths import has_weight_files
    from msrl.workflows.convert.run import check as check_conversion

    load = Path(str(config.convert.load))
    if not has_weight_files(load):
        return f"{load} has no weights, so only its config.json was checked"
    check_conversion(config)
    return f"the weights in {load} can be read"


_TRAININGS = {
    "train-sft": _train_sft,
    "train-dpo": _train_dpo,
    "train-rm": _train_rm,
    "train-grpo": _train_grpo,
    "train-distill": _train_grpo,
}
_CHECKS = {
    "generate": _generate,
    "chat": _chat,
    "serve": _serve,
    "eval": _eval,
    "convert-ckpt": _convert,
}
