"""Checks of the `eval` section and of keys that depend on evaluations during training."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.config.loader import Resolved
from msrl.plan.run_plan import RunPlan
from msrl.rewards import sources


def check_evaluation(resolved: Resolved) -> Iterator[str]:
    """Check the evaluation settings of all training commands."""
    config = resolved.config
    if config.data.eval is not None and config.data.eval_fraction > 0:
        yield resolved.mistake(
            "data.eval_fraction", "conflicts with data.eval. Set only one of them."
        )


def check_sft_evaluation(resolved: Resolved) -> Iterator[str]:
    """Check that a training on rows has held-out rows, separate or from the training data."""
    config = resolved.config
    if config.eval.every_steps is None or config.data.eval is not None:
        return
    if not config.data.eval_fraction:
        remedy = "data.eval to its prefix"
        if config.data.handler != "pretrain":
            remedy += ", or data.eval_fraction to a fraction of data.train"
        message = f"needs held-out data. Set {remedy}."
        yield resolved.mistake("eval.every_steps", message)


def check_grpo_evaluation(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check the evaluation settings of train-grpo: prompts, sampling, lengths and source."""
    section = resolved.config.eval
    for key in ("every_steps", "at_start"):
        if getattr(section, key) and resolved.config.data.eval is None:
            yield resolved.mistake(
                f"eval.{key}", "needs held-out data. Set data.eval to its prefix."
            )
    if section.every_steps is None and not section.at_start:
        return
    yield from check_eval_sampling(resolved)
    yield from _lengths(resolved, plan)
    yield from check_eval_source(resolved)


def check_eval_sampling(resolved: Resolved) -> Iterator[str]:
    """Check that several samples of a prompt can differ."""
    section = resolved.config.eval
    if section.sampling.temperature == 0 and section.samples_per_prompt > 1:
        message = (
            "greedy responses to a prompt are identical. "
            "Set eval.sampling.temperature above 0, or use 1 sample."
        )
        yield resolved.mistake("eval.samples_per_prompt", message)


def _lengths(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    config = resolved.config
    if config.eval.max_response_tokens is None:
        return
    prompt, response = config.rollout.max_prompt_tokens, config.eval.max_response_tokens
    both = (
        f"rollout.max_prompt_tokens {prompt} + eval.max_response_tokens {response} = "
        f"{prompt + response} tokens"
    )
    engine = config.rollout.engine.max_model_len
    if engine is not None and engine < prompt + response:
        yield resolved.mistake("rollout.engine.max_model_len", f"must be at least {both}")
    shape = plan.shape_or_none
    if shape is not None and prompt + response > shape.max_position_embeddings:
        yield resolved.mistake(
            "eval.max_response_tokens",
            f"{both} exceeds the {shape.max_position_embeddings} tokens that the model supports",
        )


def check_eval_source(resolved: Resolved) -> Iterator[str]:
    """Check that eval.source names a reward source."""
    name = resolved.config.eval.source
    known = [sources.Source.of(section).label for section in resolved.config.reward.sources]
    if name is not None and known and name not in known:
        yield resolved.mistake(
            "eval.source",
            f"is not a reward source. Choose one of reward.sources: {', '.join(known)}.",
        )
