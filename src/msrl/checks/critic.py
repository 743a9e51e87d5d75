"""What can be known wrong of the critic, and keys of its that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks.inputs import existing_model
from msrl.checks.training import cut_problems
from msrl.config.loader import Resolved
from msrl.errors import MsrlError
from msrl.models.paths import is_hf, is_mcore
from msrl.plan import derived

_KEYS = ("algo.value.clip", "algo.value.warmup_steps", "cluster.roles.critic")


def critic(resolved: Resolved) -> Iterator[str]:
    """Lines for a critic that cannot be trained as asked, or that is described where none is trained."""
    config = resolved.config
    if not derived.needs_critic(config):
        estimator = config.algo.advantage.estimator
        for key in (key for name in _KEYS for key in _given(resolved, name)):
            yield resolved.mistake(key, f"has no effect with algo.advantage.estimator={estimator}, which needs no critic; set gae")
        return
    steps, warmup = config.train.steps, config.algo.value.warmup_steps
    if steps is not None and warmup >= steps:
        yield resolved.mistake("algo.value.warmup_steps", f"must be below train.steps={steps}, or the policy never learns")
    optimizer = derived.critic_optimizer(config)
    if optimizer.min_lr > optimizer.lr:
        key = f"cluster.roles.critic.optimizer.{'lr' if config.cluster.roles.critic.optimizer.min_lr is None else 'min_lr'}"
        yield resolved.mistake(key, f"the critic's rate would fall from {optimizer.lr:g} to the higher {optimizer.min_lr:g}; set both")
    yield from existing_model(resolved, "cluster.roles.critic.load")
    yield from _fits(resolved)


def _given(resolved: Resolved, key: str) -> list[str]:
    """The keys of a name, or of the section of that name, that the user gave with a value."""
    names = (name for name, origin in resolved.origins.items() if origin.is_given and (name == key or name.startswith(f"{key}.")))
    return [name for name in names if resolved.value(name) not in (None, 0)]


def _fits(resolved: Resolved) -> Iterator[str]:
    """Whether a critic of other weights reads the policy's tokens, and can be cut as the policy is."""
    config, load = resolved.config, resolved.config.cluster.roles.critic.load
    if load is None or not (is_hf(load) or is_mcore(load)):
        return
    try:
        shape, policy = derived.critic_shape(config), derived.model_shape(config)
    except MsrlError as error:
        yield str(error)
        return
    if shape is None or policy is None:
        return
    if shape.vocab_size < policy.vocab_size:
        yield resolved.mistake("cluster.roles.critic.load", f"knows {shape.vocab_size} tokens, fewer than the policy's {policy.vocab_size}")
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > shape.max_position_embeddings:
        message = f"takes at most {shape.max_position_embeddings} tokens, and prompt plus response have up to {longest}"
        yield resolved.mistake("cluster.roles.critic.load", message)
    for line in cut_problems(resolved, shape, "train.parallel", derived.layout_from(config.train.parallel)):
        yield f"{line} (the critic in {load}, which is cut as the policy is)"
