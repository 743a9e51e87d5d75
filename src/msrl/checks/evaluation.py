"""What can be known wrong of evaluations while training: the `eval` section, and what goes by it."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks.inputs import value_of
from msrl.config.loader import Resolved
from msrl.errors import MsrlError
from msrl.plan import derived
from msrl.rewards import sources

_GRPO_ONLY = ("at_start", "samples_per_prompt", "max_response_tokens", "sampling", "source", "right_from")


def evaluation(resolved: Resolved) -> Iterator[str]:
    """What both trainings need for an evaluation."""
    config = resolved.config
    if config.data.eval is not None and config.data.eval_fraction > 0:
        yield resolved.mistake("data.eval_fraction", "stands beside data.eval; set only one of them")
    for key, is_set in (("eval.patience", config.eval.patience is not None), ("checkpoint.keep_best", config.checkpoint.keep_best)):
        if is_set and config.eval.every_steps is None:
            yield resolved.mistake(key, "looks at evaluations; set eval.every_steps")


def sft_evaluation(resolved: Resolved) -> Iterator[str]:
    """What train-sft needs: held-out rows, of their own or of the training data."""
    config = resolved.config
    if config.eval.every_steps is not None and config.data.eval is None and not config.data.eval_fraction:
        share = "" if config.data.handler == "pretrain" else ", or data.eval_fraction, a share of data.train"
        yield resolved.mistake("eval.every_steps", f"needs data.eval, the prefix of the held-out data{share}")


def grpo_only(resolved: Resolved) -> Iterator[str]:
    """Lines for what train-sft does not read."""
    for name in _GRPO_ONLY:
        if _is_set(resolved, f"eval.{name}"):
            yield resolved.mistake(_first(resolved, f"eval.{name}"), "is for train-grpo; train-sft does not read it")


def grpo_evaluation(resolved: Resolved) -> Iterator[str]:
    """What train-grpo needs: held-out prompts, evaluations that happen, several answers that differ, lengths that fit, a source."""
    section = resolved.config.eval
    for key in ("every_steps", "at_start"):
        if getattr(section, key) and resolved.config.data.eval is None:
            yield resolved.mistake(f"eval.{key}", "needs data.eval, the prefix of the held-out data")
    if section.every_steps is None and not section.at_start:
        for name in _GRPO_ONLY:
            if _is_set(resolved, f"eval.{name}"):
                yield resolved.mistake(_first(resolved, f"eval.{name}"), "has no effect without evaluations; set eval.every_steps")
        return
    yield from _sampling(resolved)
    yield from _lengths(resolved)
    yield from _source(resolved)


def _sampling(resolved: Resolved) -> Iterator[str]:
    section = resolved.config.eval
    if section.sampling.temperature > 0:
        return
    if section.samples_per_prompt > 1:
        message = "greedy answers to a prompt are all the same; set eval.sampling.temperature above 0, or 1 answer"
        yield resolved.mistake("eval.samples_per_prompt", message)
    for name in ("top_p", "top_k", "min_p"):
        if resolved.is_set(f"eval.sampling.{name}"):
            yield resolved.mistake(f"eval.sampling.{name}", "has no effect on greedy answers; set eval.sampling.temperature above 0")


def _lengths(resolved: Resolved) -> Iterator[str]:
    config = resolved.config
    if config.eval.max_response_tokens is None:
        return
    prompt, response = config.rollout.max_prompt_tokens, config.eval.max_response_tokens
    both = f"rollout.max_prompt_tokens {prompt} + eval.max_response_tokens {response} = {prompt + response} tokens"
    engine = config.rollout.engine.max_model_len
    if engine is not None and engine < prompt + response:
        yield resolved.mistake("rollout.engine.max_model_len", f"must hold {both}")
    try:
        shape = derived.model_shape(config)
    except MsrlError:
        return  # said by model_fits
    if shape is not None and prompt + response > shape.max_position_embeddings:
        yield resolved.mistake("eval.max_response_tokens", f"{both}, and the model takes at most {shape.max_position_embeddings}")


def _source(resolved: Resolved) -> Iterator[str]:
    wanted = resolved.config.eval.source
    known = [sources.Source.of(section).label for section in resolved.config.reward.sources]
    if wanted is not None and known and wanted not in known:
        yield resolved.mistake("eval.source", f"is none of reward.sources, whose names are {', '.join(known)}")


def _is_set(resolved: Resolved, key: str) -> bool:
    """Whether the user gave a key of `eval` another value than nothing."""
    return resolved.is_set(key) and value_of(resolved, key) not in (None, False)


def _first(resolved: Resolved, key: str) -> str:
    """The key itself, or the first one that was set in a section."""
    below = (name for name, origin in resolved.origins.items() if name.startswith(f"{key}.") and origin.is_given)
    return next(below, key)
