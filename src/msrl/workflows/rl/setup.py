"""Setup of a GRPO run before Ray starts: prompts, sampling, placement, checkpoint to resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from msrl.cluster.placement import Placement
from msrl.config.schema import Config
from msrl.config.sections.rollout import DEVICE_TRANSFERS
from msrl.data.dataset import PromptDataset, PromptMixture, check_templates
from msrl.data.images.files import most_patches
from msrl.data.order import BlendOrder, RowOrder
from msrl.data.tokenizer import TextTokenizer, open_tokenizer
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.plan.derived import needs_critic, updates_per_step
from msrl.plan.run_plan import RunPlan
from msrl.platforms import resolve
from msrl.platforms.base import Platform
from msrl.rewards.rows import RowSources
from msrl.rewards.sources import Source
from msrl.rollout.engine import EngineMetrics, EngineSettings, check_stops
from msrl.rollout.engine_limits import check_limits
from msrl.rollout.episodes.settings import EpisodeSettings
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.types import Prompt, SamplingParams
from msrl.workflows.engine import data_images, engine_settings
from msrl.workflows.episodes.setup import check_environment_names, episode_settings
from msrl.workflows.rl.distillation import check_tags
from msrl.workflows.rl.levels import Levels, difficulty, prompt_levels
from msrl.workflows.training import resume_checks
from msrl.workflows.training.data_checks import (
    check_data,
    check_image_keys,
    check_patches,
    check_reference_tokenizer,
    check_teacher_tokenizers,
    verify_data,
)
from msrl.workflows.training.preflight import check_run_folder
from msrl.workflows.training.settings import policy_schedule, separate_critic


@dataclass(frozen=True, kw_only=True)
class RLSetup:
    """Setup of a run, which does not depend on the cluster."""

    plan: RunPlan
    platform: Platform
    placement: Placement
    state: Mapping[str, Any]  # for the resume checks; every checkpoint holds it
    num_steps: int
    resume: SavedTraining | None
    tokenizer: TextTokenizer

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def start_step(self) -> int:
        """Number of steps before this run."""
        return self.resume.step if self.resume else 0

    @property
    def has_older_versions(self) -> bool:
        """True if policies before the current one may have sampled tokens of a step."""
        return self.config.rollout.asynchronous.is_on

    @property
    def summary(self) -> str:
        """Amount of the inputs of the run, in one line."""
        return f"{self.num_steps:,} steps, devices used: {self.placement.num_devices}"


@dataclass(frozen=True, kw_only=True)
class GenerationSetup(RLSetup):
    """Setup of a run whose engines generate the rollouts."""

    prompts: Prompts
    levels: Levels | None  # of a curriculum
    eval_prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    episodes: EpisodeSettings | None = None

    @property
    def summary(self) -> str:
        return f"{len(self.prompts.rows):,} prompts, {super().summary}"


@dataclass(frozen=True)
class Prompts:
    """Prompts that fit `rollout.max_prompt_tokens`, and their order."""

    dataset: PromptDataset | PromptMixture
    rows: tuple[int, ...]  # of the dataset
    order: RowOrder | BlendOrder

    def after(self, position: int, count: int) -> list[Prompt]:
        """Return `count` prompts, starting at `position` in the order."""
        return [self.dataset[self.rows[row]] for row in self.order.after(position, count)]


def prepare(plan: RunPlan, platform: Platform | None = None) -> GenerationSetup:
    """Check everything that can be checked before Ray starts and return the setup of the run.

    `platform` is that of the configuration by default, which this machine must support then.

    Raises:
        MsrlError: The configuration, the data or the checkpoint is invalid.
    """
    config = plan.config
    platform = platform or resolve(config.cluster.platform)
    _check_async_platform(plan, platform)
    check_limits(rollout_engine_settings(plan), platform, read_config=plan.hf_config)
    tokenizer = checked_tokenizer(plan)
    check_stops("rollout.sampling.stop", config.rollout.sampling.stop, tokenizer)
    check_stops("eval.sampling.stop", config.eval.sampling.stop or (), tokenizer)
    refuse_images(plan)
    prompts = training_prompts(plan, tokenizer)
    check_tags(
        config.algo.distill.teachers,
        (prompts.dataset[row] for row in prompts.rows),
        needs_teacher=plan.is_distillation,
    )
    if config.algo.sample_weight.difficulty:
        for row in prompts.rows:
            difficulty(prompts.dataset[row], "algo.sample_weight.difficulty")
    levels = _levels(config, prompts)
    held_out = eval_prompts(plan, tokenizer)
    num_steps = count_steps(config, len(prompts.rows))
    resume, state = checkpoint_to_resume(plan, prompts.order, num_steps)
    return GenerationSetup(
        plan=plan,
        platform=platform,
        placement=plan.place(platform.ray_resource),
        prompts=prompts,
        levels=levels,
        state=state,
        eval_prompts=held_out,
        sampling=plan.sampling,
        num_steps=num_steps,
        resume=resume,
        tokenizer=tokenizer,
        episodes=episode_settings(plan, (prompts.dataset[row] for row in prompts.rows)),
    )


def _levels(config: Config, prompts: Prompts) -> Levels | None:
    """Return the levels of a curriculum; None without one. Raises MsrlError."""
    section, count = config.data.curriculum, len(prompts.rows)
    if section.sampler is None:
        return None
    batch = config.rollout.prompts_per_step
    if count < batch:
        raise MsrlError(
            f"rollout.prompts_per_step={batch}: the prompts of a step must differ with "
            f"data.curriculum.sampler={section.sampler}, and the data has {count} that fit. Lower "
            "it, or add data."
        )
    return prompt_levels(section, (prompts.dataset[row] for row in prompts.rows), count)


def checked_tokenizer(plan: RunPlan) -> TextTokenizer:
    """Return the tokenizer of a run, after checks of the run's folder and of other tokenizers."""
    check_run_folder(plan.config)
    tokenizer = open_tokenizer(plan.tokenizer_dir)
    check_teacher_tokenizers(plan)
    check_reference_tokenizer(plan)
    return tokenizer


def checkpoint_to_resume(
    plan: RunPlan, order: RowOrder | BlendOrder, num_steps: int
) -> tuple[SavedTraining | None, Mapping[str, Any]]:
    """Return the checkpoint to resume from, and the state for the resume checks of later runs.

    Raises:
        MsrlError: The run cannot resume from the checkpoint.
    """
    config = plan.config
    rates = policy_schedule(config, num_steps)
    resume, state = resume_checks.checkpoint_and_state(plan, order, rates, num_steps)
    if resume:
        _check_critic(plan, resume)
    num_policy_steps = max((resume.step if resume else 0) - config.algo.value.warmup_steps, 0)
    resume_checks.report_schedule(resume, rates, num_policy_steps * updates_per_step(config))
    return resume, state


def refuse_images(plan: RunPlan) -> None:
    """Raise MsrlError if the data has images that a part of the run does not read."""
    if not plan.has_images:
        return
    config = plan.config
    has_model = any(source.model is not None for source in config.reward.sources)
    readers = {
        "environment": (config.environment.is_on, "environments read no images"),
        "reward.sources": (has_model, "reward models read no images"),
    }
    if plan.command != "eval":
        readers |= _training_readers(config)
    for key, (is_on, reason) in readers.items():
        if is_on:
            raise MsrlError(
                f"{key}: the data has images, and {reason} in this version. Remove this part of "
                "the run, or the images."
            )


def _training_readers(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the parts of a training that read no images: key, whether it has them, reason."""
    return {
        "algo.distill.teachers": (bool(config.algo.distill.teachers), "teachers read no images"),
        "algo.advantage.estimator": (needs_critic(config), "the critic reads no images"),
        "train.router.replay=engine": (
            config.train.router.replay == "engine",
            "routes of prompts with images are not recorded",
        ),
    }


def rollout_engine_settings(plan: RunPlan) -> EngineSettings:
    """Return the settings of an engine of the rollout.

    It starts with random weights, which the ranks replace before the first prompt.
    """
    settings = engine_settings(
        plan.config,
        plan.model.hf_dir,
        dtype=plan.dtype,
        logits_dtype=plan.config.model.logits_dtype,
        max_model_len=plan.max_model_len,
        random_weights=True,
    )
    if plan.has_separate_engines:
        settings = replace(settings, engine=settings.engine.model_copy(update={"sleep": 0}))
    rollout = plan.config.rollout
    transfer = rollout.weights.transfer
    return replace(
        settings,
        tokenizer_dir=plan.tokenizer_dir,
        is_stepped=rollout.asynchronous.is_on,
        records_routes=plan.train.router.replay == "engine",
        weight_backend=transfer if transfer in DEVICE_TRANSFERS else None,
        images=data_images(plan),
    )


def numbered_engine_settings(plan: RunPlan) -> list[EngineSettings]:
    """Return the settings of each engine, which has its own port for `log.prometheus`."""
    settings, port = rollout_engine_settings(plan), plan.config.log.prometheus
    if port is None:
        return [settings] * plan.num_engines
    endpoints = [
        EngineMetrics(port + 1 + number, plan.config.run.name) for number in range(plan.num_engines)
    ]
    return [replace(settings, metrics=metrics) for metrics in endpoints]


def _check_async_platform(plan: RunPlan, platform: Platform) -> None:
    """Raise MsrlError if engines cannot generate while the ranks on their devices train."""
    staleness = plan.rollout.asynchronous.max_staleness
    if staleness and not (platform.shares_main_memory or plan.has_separate_engines):
        raise MsrlError(
            f"rollout.async.max_staleness={staleness}: engines share the devices of the training "
            f"ranks on {platform.name}, so they cannot generate while these train. Set "
            "cluster.roles.rollout.devices, or set it to 0."
        )


def training_prompts(plan: RunPlan, tokenizer: TextTokenizer) -> Prompts:
    """Return the prompts of `data.train` or `data.blend`, which fit the model. Raises MsrlError."""
    config, data = plan.config, plan.data
    if data.train is None and not data.blend:
        raise MsrlError("data.train: not set. Set it to the output prefix of `msrl preprocess`.")
    keys = {f"data.blend.{name}": name for name in data.blend}
    if data.train is not None:
        keys = {"data.train": data.train}
    fitting = [_fitting_prompts(plan, key, name, tokenizer) for key, name in keys.items()]
    check_image_keys([dataset.manifest for dataset, _ in fitting], plan)
    batch, seed, shuffle = config.rollout.prompts_per_step, config.run.seed, config.data.shuffle
    if not data.blend:
        dataset, rows = fitting[0]
        return Prompts(dataset, rows, RowOrder(len(rows), batch, seed, shuffle))
    datasets = [dataset for dataset, _ in fitting]
    check_templates(datasets)
    counts = tuple(len(rows) for _, rows in fitting)
    order = BlendOrder(counts, tuple(data.blend.values()), batch, seed, shuffle)
    starts = accumulate((len(dataset) for dataset in datasets), initial=0)
    numbers = [np.array(rows) + start for (_, rows), start in zip(fitting, starts, strict=False)]
    return Prompts(PromptMixture(datasets), tuple(np.concatenate(numbers).tolist()), order)


def eval_prompts(plan: RunPlan, tokenizer: TextTokenizer) -> tuple[Prompt, ...]:
    """Return the first `eval.prompts` prompts of `data.eval`; all if it is not set."""
    if not plan.data.eval:
        return ()
    count = plan.config.eval.prompts or None
    dataset, rows = _fitting_prompts(plan, "data.eval", plan.data.eval, tokenizer, count)
    return tuple(dataset[row] for row in rows)


def _check_critic(plan: RunPlan, resume: SavedTraining) -> None:
    """Raise MsrlError if the checkpoint of a critic with separate devices is absent or damaged."""
    critic = separate_critic(plan, resume)
    problem = critic.damage() if critic is not resume else None
    if problem is not None:
        raise MsrlError(
            f"checkpoint.resume: the critic of step {resume.step} cannot be loaded: {problem}. "
            "Resume from another checkpoint."
        )


def _fitting_prompts(
    plan: RunPlan, key: str, name: str, tokenizer: TextTokenizer, count: int | None = None
) -> tuple[PromptDataset, tuple[int, ...]]:
    """Return a dataset that fits the model, and its rows that are not too long.

    Only the first `count` rows are returned; None returns all.

    Raises:
        MsrlError: The data is damaged or does not fit the model, or the reward sources cannot score
            one of the rows.
    """
    dataset, rows = _short_prompts(plan.config, plan.prefix(name), tokenizer)
    check_data(dataset.manifest, plan, dataset.prefix)
    verify_data(dataset, plan)
    rows = rows[:count]
    images = dataset.images
    if images is not None:
        most = partial(most_patches, ([images.patches(row)] for row in rows))
        check_patches(plan.config, dataset.prefix, most)
    sections = plan.config.reward.sources
    sources = RowSources(
        tuple(Source.of(section) for section in sections),
        is_optional=not sections and (plan.config.environment.is_on or plan.is_distillation),
    )
    try:
        sources.check(dataset[row] for row in rows)
        check_environment_names(plan.config.environment, (dataset[row] for row in rows))
    except MsrlError as error:
        raise MsrlError(f"{key}={name}: {error}") from error
    return dataset, rows


def count_steps(config: Config, num_prompts: int | Fraction) -> int:
    """Return the number of steps of a run with so many prompts per epoch.

    Raises:
        MsrlError: The critic's warm-up takes all of them.
    """
    epochs, warmup = config.train.epochs or 1, config.algo.value.warmup_steps
    count = config.train.steps or -(-epochs * num_prompts // config.rollout.prompts_per_step)
    if warmup >= count:
        raise MsrlError(
            f"algo.value.warmup_steps={warmup}: the run has only {count} steps "
            f"(train.epochs={epochs}, {num_prompts} prompts), so the"
            " policy is never updated. Lower the warm-up, or train for more steps."
        )
    return count


def _short_prompts(
    config: Config, prefix: str, tokenizer: TextTokenizer
) -> tuple[PromptDataset, tuple[int, ...]]:
    """Return a dataset and its rows that are not too long; print how many were dropped."""
    dataset = PromptDataset(prefix, decode=tokenizer.backend.decode)
    limit, rows = config.rollout.max_prompt_tokens, tuple(range(len(dataset)))
    if dataset.max_tokens > limit:
        rows = tuple(row for row in rows if dataset.lengths[row] <= limit)
        num_dropped = len(dataset) - len(rows)
        print_note(
            f"{prefix}: dropped {num_dropped} of {len(dataset)} prompts that are longer than "
            f"rollout.max_prompt_tokens={limit}"
        )
    if not rows:
        raise MsrlError(
            f"rollout.max_prompt_tokens={limit}: every prompt of {prefix} is longer. Raise it; the "
            f"longest has {dataset.max_tokens} tokens."
        )
    return dataset, rows
