"""Scorer and judge of the answers to prompts, from the configured reward sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrl.config.schema import Config
from msrl.plan.run_plan import RunPlan
from msrl.rewards.score import Scorer, Source
from msrl.rewards.verdicts import Judge
from msrl.types import Ints

if TYPE_CHECKING:  # `msrl view` imports this module without torch
    from msrl.data.tokenizer import TextTokenizer
    from msrl.platforms.base import Platform


def make_scorer(plan: RunPlan, tokenizer: TextTokenizer, platform: Platform) -> Scorer:
    """Return the scorer of the configured sources.

    Servers and models get prompts as the policy sees them, special tokens included.
    """

    def prompt_text(token_ids: Ints) -> str:
        return tokenizer.backend.decode(token_ids.tolist(), skip_special_tokens=False)

    environment = plan.config.environment
    return Scorer(
        _sources(plan.config),
        num_workers=max(1, min(8, platform.device_count())),
        prompt_text=prompt_text,
        read_config=plan.hf_config,
        environment_weight=environment.reward_weight if environment.is_on else None,
        is_optional=plan.is_distillation,
    )


def make_judge(config: Config) -> Judge:
    """Return the judge of right and wrong answers of a configuration."""
    return Judge(_sources(config), config.eval.source, config.eval.right_from)


def _sources(config: Config) -> tuple[Source, ...]:
    return tuple(Source.of(section) for section in config.reward.sources)
