"""What a GRPO run is made of before Ray is asked for: prompts in their order, sampling, placement,
the checkpoint to go on from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.cluster.placement import Placement, Role, plan
from msrl.config.schema import Config
from msrl.data.dataset import PromptDataset
from msrl.data.order import RowOrder
from msrl.data.tokenizer import TextTokenizer, open_tokenizer
from msrl.errors import MsrlError
from msrl.plan.derived import updates_per_step, world_size
from msrl.platforms import resolve
from msrl.platforms.base import Platform
from msrl.rewards.rows import RowSources
from msrl.rewards.sources import Source
from msrl.trainer.checkpointing.resume import SavedTraining, check_room
from msrl.types import Prompt, SamplingParams
from msrl.workflows.training import resume_checks as resume_checks
from msrl.workflows.training.data_checks import check_data, verify_data
from msrl.workflows.training.run_log import checkpoint_root
from msrl.workflows.training.settings import (
    check_order,
    checkpoint_to_resume,
    hf_files,
    order_state,
    policy_schedule,
    tokenizer_path,
)


@dataclass(frozen=True)
class RLSetup:
    """Everything that is known before the cluster is asked for."""

    config: Config
    platform: Platform
    placement: Placement
    prompts: Prompts
    state: Mapping[str, Any]  # what every checkpoint holds of the training
    eval_prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    num_steps: int
    resume: SavedTraining | None
    hf_dir: Path
    tokenizer: TextTokenizer

    @property
    def start_step(self) -> int:
        return self.resume.step if self.resume else 0


@dataclass(frozen=True)
class Prompts:
    """The prompts that are short enough, in their order."""

    dataset: PromptDataset
    rows: tuple[int, ...]
    order: RowOrder

    def after(self, position: int, count: int) -> list[Prompt]:
        """The `count` prompts that come after the first `position` ones."""
        return [self.dataset[self.rows[row]] for row in self.order.after(position, count)]


def prepare(config: Config) -> RLSetup:
    """Everything that can be known, and be wrong, before Ray is asked for. Raises MsrlError."""
    if config.data.train is None:
        raise MsrlError("data.train: not set; name the output prefix of `msrl preprocess`")
    platform = resolve(config.cluster.platform)
    hf_dir = hf_files(config)
    tokenizer = open_tokenizer(tokenizer_path(config))
    prompts = _prompts(config, config.data.train, tokenizer)
    check_data(prompts.dataset.manifest, config, hf_dir, config.data.train)
    verify_data(prompts.dataset, hf_dir)
    if config.algo.sample_weight.difficulty:
        for row in prompts.rows:
            difficulty(prompts.dataset[row])
    held_out = _prompts(config, config.data.eval, tokenizer) if config.data.eval else None
    if held_out is not None:
        check_data(held_out.dataset.manifest, config, hf_dir, str(config.data.eval))
        verify_data(held_out.dataset, hf_dir)
    count = min(len(held_out.rows), config.eval.prompts or len(held_out.rows)) if held_out else 0
    eval_prompts = (
        tuple(held_out.dataset[held_out.rows[i]] for i in range(count)) if held_out else ()
    )
    _check_rows(config, (prompts.dataset[row] for row in prompts.rows), eval_prompts)
    num_steps = steps_of(config, len(prompts.rows))
    resume = checkpoint_to_resume(config, checkpoint_root(config))
    if resume and resume.step >= num_steps:
        raise MsrlError(
            f"train.steps={num_steps}: the checkpoint in {resume.root} has {resume.step} already; raise it to go on"
        )
    if resume:
        check_order(resume, prompts.order, rows_per_step="rollout.prompts_per_step")
    rates = policy_schedule(config, num_steps)
    state = {
        **order_state(prompts.order),
        **resume_checks.remembered(config, rates, command="train-grpo"),
    }
    if resume:
        resume_checks.check(resume, state)
    check_room(checkpoint_root(config), resume)
    done = (resume.step if resume else 0) - config.algo.value.warmup_steps
    resume_checks.report_schedule(resume, rates, max(done, 0) * updates_per_step(config))
    return RLSetup(
        config=config,
        platform=platform,
        placement=_placement(config, platform),
        prompts=prompts,
        state=state,
        eval_prompts=eval_prompts,
        sampling=_sampling(config, prompts.dataset),
        num_steps=num_steps,
        resume=resume,
        hf_dir=hf_dir,
        tokenizer=tokenizer,
    )


def _check_rows(config: Config, train: Iterable[Prompt], held_out: Iterable[Prompt]) -> None:
    """Raise MsrlError for the first row that the reward sources cannot score."""
    sources = RowSources(tuple(Source.of(section) for section in config.reward.sources))
    for key, prefix, prompts in (
        ("data.train", config.data.train, train),
        ("data.eval", config.data.eval, held_out),
    ):
        try:
            sources.check(prompts)
        except MsrlError as error:
            raise MsrlError(f"{key}={prefix}: {error}") from error


def difficulty(prompt: Prompt) -> float:
    """What the data says of a prompt, 0 easy to 1 hard. Raises MsrlError where it says no number."""
    said = prompt.extra.get("difficulty")
    try:
        value = float(said or "")
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    found = "is missing" if said is None else f"is {said!r}, not a number"
    raise MsrlError(
        f"algo.sample_weight.difficulty: the column extra.difficulty of prompt {prompt.index} {found}; "
        "carry it along with preprocess.map_keys: {extra.difficulty: COLUMN}, or set it to false"
    )


def steps_of(config: Config, num_prompts: int) -> int:
    """The steps of a run. Raises MsrlError where the critic's warm-up takes all of them."""
    epochs, warmup = config.train.epochs or 1, config.algo.value.warmup_steps
    count = config.train.steps or -(-epochs * num_prompts // config.rollout.prompts_per_step)
    if warmup >= count:
        made = f"train.epochs={epochs} makes {count} steps of {num_prompts} prompts"
        raise MsrlError(
            f"algo.value.warmup_steps={warmup}: {made}, so the policy never learns; lower it, or train for longer"
        )
    return count


def _prompts(config: Config, prefix: str, tokenizer: TextTokenizer) -> Prompts:
    """The prompts of a prefix; those that are too long are left out, and that is said."""
    dataset = PromptDataset(prefix, decode=tokenizer.backend.decode)
    limit, rows = config.rollout.max_prompt_tokens, range(len(dataset))
    if dataset.max_tokens > limit:
        rows = [row for row in rows if len(dataset[row].token_ids) <= limit]
        left_out = len(dataset) - len(rows)
        print(
            f"{prefix}: {left_out} of {len(dataset)} prompts are left out: longer than rollout.max_prompt_tokens={limit}",
            file=sys.stderr,
        )
    if not rows:
        raise MsrlError(
            f"rollout.max_prompt_tokens={limit}: every prompt of {prefix} is longer; the longest has {dataset.max_tokens} tokens"
        )
    order = RowOrder(
        len(rows), config.rollout.prompts_per_step, config.run.seed, config.data.shuffle
    )
    return Prompts(dataset, tuple(rows), order)


def _placement(config: Config, platform: Platform) -> Placement:
    num_ranks, engine = world_size(config), config.rollout.engine
    roles = [Role("actor", num_ranks), Role("rollout", engine.dp, engine.tp)]
    return plan(
        roles,
        num_ranks // config.cluster.nodes,
        config.cluster.nodes,
        resource=platform.ray_resource,
    )


def _sampling(config: Config, dataset: PromptDataset) -> SamplingParams:
    sampling, manifest = config.rollout.sampling, dataset.manifest
    ends = (
        {
            *manifest.stop_token_ids,
            *([manifest.eos_token_id] if manifest.eos_token_id is not None else []),
        }
        if manifest
        else set()
    )
    return SamplingParams(
        max_tokens=config.rollout.max_response_tokens,
        num_samples=config.rollout.samples_per_prompt,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=sampling.stop,
        stop_token_ids=tuple(sorted(ends)),
        seed=config.run.seed if sampling.seed is None else sampling.seed,
    )
