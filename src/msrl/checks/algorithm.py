"""What can be known wrong, or is known to go badly, in the `algo` section."""

from __future__ import annotations

from collections.abc import Iterator

from msrl import registry
from msrl.checks import plugins
from msrl.config.loader import Resolved
from msrl.config.schema import AlgoConfig
from msrl.plan.derived import updates_per_step

ADVANTAGES, LOSSES = "msrl.algorithms.advantages", "msrl.algorithms.losses"
SEQUENCE_CLIP_LIMIT = 0.05


def algorithm(resolved: Resolved) -> Iterator[str]:
    """A line for everything in `algo` that cannot be done, or would have no effect."""
    algo = resolved.config.algo
    unknown = [
        *plugins.plugin(resolved, "algo.advantage.estimator", ADVANTAGES, algo.advantage.estimator),
        *plugins.plugin(resolved, "algo.policy_loss", LOSSES, algo.policy_loss),
    ]
    yield from unknown
    if not unknown:
        both = ((ADVANTAGES, algo.advantage.estimator, "advantages"), (LOSSES, algo.policy_loss, "policy_loss"))
        yield from plugins.options(resolved, "algo.options", *both)
        yield from _estimator(resolved)
        yield from _loss(resolved)
        yield from _one_advantage(resolved)
    yield from _kl(resolved)
    yield from _terms(resolved)
    yield from _mismatch(resolved)
    if algo.aggregate.constant is not None and algo.aggregate.mode != "seq-sum-over-constant":
        yield resolved.mistake("algo.aggregate.constant", f"has no effect with algo.aggregate.mode={algo.aggregate.mode}")
    if algo.mask.difficulty is not None and algo.mask.difficulty[0] >= algo.mask.difficulty[1]:
        yield resolved.mistake("algo.mask.difficulty", "the first number must be below the second")
    if algo.mask.equal_groups and resolved.config.rollout.samples_per_prompt < 2:
        yield resolved.mistake("algo.mask.equal_groups", "compares the samples of a prompt; set rollout.samples_per_prompt to 2 or more")
    if resolved.config.rollout.sampling.temperature == 0:
        yield resolved.mistake("rollout.sampling.temperature", "must be above 0: with greedy sampling all samples of a prompt are the same")


def _estimator(resolved: Resolved) -> Iterator[str]:
    name = resolved.config.algo.advantage.estimator
    plugin = registry.declaration(ADVANTAGES, name, key="algo.advantage.estimator")
    if plugin.constant("COMPARES_GROUPS") and resolved.config.rollout.samples_per_prompt < 2:
        yield resolved.mistake(
            "rollout.samples_per_prompt", f"{name} compares the completions of a prompt and needs at least 2; set 2 or more"
        )
    if plugin.constant("NEEDS_TURNS"):
        yield resolved.mistake("algo.advantage.estimator", "needs episodes of several turns: not in this version yet")
    if resolved.is_set("algo.advantage.lambda") and not plugin.has_parameter("advantages", "lam"):
        yield resolved.mistake("algo.advantage.lambda", f"has no effect with algo.advantage.estimator={name}; it belongs to gae")
    if resolved.config.algo.advantage.gamma != 1.0 and not plugin.has_parameter("advantages", "gamma"):
        yield resolved.mistake("algo.advantage.gamma", f"has no effect with algo.advantage.estimator={name}; set 1")


def _loss(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each key that the chosen loss does not read."""
    algo = resolved.config.algo
    clip = algo.clip
    asked = [key for key in ("low", "high", "dual") if resolved.is_set(f"algo.clip.{key}") and getattr(clip, key) is not None]
    if clip.dual is not None and clip.dual <= 1.0 + clip.high:
        yield resolved.mistake("algo.clip.dual", f"must be above 1 + algo.clip.high = {1.0 + clip.high:g}")
    if not asked and algo.ratio == "token":
        return
    plugin = registry.declaration(LOSSES, algo.policy_loss, key="algo.policy_loss")
    if algo.ratio == "sequence" and plugin.constant("OWN_RATIO"):
        yield resolved.mistake("algo.ratio", f"algo.policy_loss={algo.policy_loss} has a ratio of its own; leave algo.ratio at token")
    for key in asked:
        if not plugin.has_parameter("policy_loss", "dual" if key == "dual" else f"clip_{key}"):
            yield resolved.mistake(f"algo.clip.{key}", f"has no effect with algo.policy_loss={algo.policy_loss}; take it away")


def _one_advantage(resolved: Resolved) -> Iterator[str]:
    """A line for each key that makes advantages or weights differ within a sequence, where the loss needs equal ones."""
    algo, varying = resolved.config.algo, dict(_varying_by_token(resolved))
    loss = registry.declaration(LOSSES, algo.policy_loss, key="algo.policy_loss")
    if loss.constant("ONE_ADVANTAGE"):
        limit = f"algo.policy_loss={algo.policy_loss} is defined only for one advantage and one weight per sequence"
        for key, (effect, remedy) in varying.items():
            yield resolved.mistake(key, f"{effect}, but {limit}. {remedy}.")


def _varying_by_token(resolved: Resolved) -> Iterator[tuple[str, tuple[str, str]]]:
    """Keys by which advantages or mismatch weights differ between the tokens of a sequence: key, effect and remedy."""
    algo = resolved.config.algo
    estimator = registry.declaration(ADVANTAGES, algo.advantage.estimator, key="algo.advantage.estimator")
    if estimator.constant("NEEDS_VALUES"):
        remedy = "Use an estimator without a critic, such as group_norm"
        yield "algo.advantage.estimator", ("gives each token its own advantage", remedy)
    elif estimator.has_parameter("advantages", "gamma"):
        yield from _varying_returns(algo)
    for key in ("weight", "filter"):
        if getattr(algo.mismatch, key) == "token":
            yield f"algo.mismatch.{key}", ("gives each token its own weight", "Set it to sequence or none")


def _varying_returns(algo: AlgoConfig) -> Iterator[tuple[str, tuple[str, str]]]:
    """The same for estimators of each token's return, which is equal within a sequence without a discount and rewards of tokens."""
    effect = f"with algo.advantage.estimator={algo.advantage.estimator}, gives each token its own advantage"
    group = "use an estimator that compares groups, such as group_norm"
    if algo.advantage.gamma != 1.0:
        yield "algo.advantage.gamma", (effect, "Set it to 1")
    if algo.kl.reward.coef:
        yield "algo.kl.reward.coef", (effect, f"Set algo.kl.loss.coef instead, or {group}")
    if algo.advantage.whiten_rewards:
        yield "algo.advantage.whiten_rewards", (effect, f"Set it to false, or {group}")


def _has_clip(policy_loss: str) -> bool:
    return registry.declaration(LOSSES, policy_loss, key="algo.policy_loss").has_parameter("policy_loss", "clip_low")


def _kl(resolved: Resolved) -> Iterator[str]:
    kl = resolved.config.algo.kl
    if kl.controller.kind == "adaptive":
        if kl.controller.target is None:
            yield resolved.mistake("algo.kl.controller.kind", "needs algo.kl.controller.target, the wanted mean divergence per token")
        if not kl.reward.coef and not kl.loss.coef:
            yield resolved.mistake("algo.kl.controller.kind", "has nothing to adapt; set algo.kl.loss.coef or algo.kl.reward.coef")
    elif kl.controller.target is not None:
        yield resolved.mistake("algo.kl.controller.target", "has no effect with a fixed coefficient; set algo.kl.controller.kind: adaptive")


def _terms(resolved: Resolved) -> Iterator[str]:
    algo = resolved.config.algo
    if not (algo.rl_coef or algo.sft.coef or algo.entropy_coef):
        yield resolved.mistake("algo.rl_coef", "leaves the loss without a term; set algo.sft.coef or algo.entropy_coef, or more than 0")


def _mismatch(resolved: Resolved) -> Iterator[str]:
    mismatch = resolved.config.algo.mismatch
    if mismatch.low >= mismatch.high:
        yield resolved.mistake("algo.mismatch.low", f"must be below algo.mismatch.high={mismatch.high}")
    cut = _cut_sampling(resolved)
    for key in ("weight", "filter"):
        if cut and getattr(mismatch, key) != "none":
            message = f"the two log-probabilities are not comparable with {' and '.join(cut)}; switch it off"
            yield resolved.mistake(f"algo.mismatch.{key}", message)


def _cut_sampling(resolved: Resolved) -> list[str]:
    """The sampling keys that cut tokens off, which the trainer's distribution does not."""
    sampling = resolved.config.rollout.sampling
    active = {"top_p": sampling.top_p < 1.0, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0.0}
    return [f"rollout.sampling.{name}" for name, is_on in active.items() if is_on]


def advice(resolved: Resolved, command: str) -> list[str]:
    """What is allowed, and known to go badly: one line each."""
    return list(_advice(resolved)) if command == "train-grpo" else []


def _advice(resolved: Resolved) -> Iterator[str]:
    config, algo = resolved.config, resolved.config.algo
    widest = max(algo.clip.low, algo.clip.high)
    if algo.ratio == "sequence" and widest > SEQUENCE_CLIP_LIMIT and _has_clip(algo.policy_loss):
        yield resolved.mistake(
            "algo.clip.high" if algo.clip.high == widest else "algo.clip.low",
            "is the width for tokens' ratios; a sequence's ratio hardly leaves 1, and GSPO's own widths are 3e-4 and 4e-4",
        )
    if algo.advantage.estimator == "reinforce" and not algo.advantage.whiten:
        yield resolved.mistake("algo.advantage.estimator", "has no baseline, so its gradient is noisy; rloo and reinforce_pp have one")
    if algo.kl.loss.coef and algo.kl.loss.estimator == "k1":
        yield resolved.mistake("algo.kl.loss.estimator", "its gradient is zero on average: in a loss it holds nothing back; k3 and k2 do")
    if algo.kl.reward.coef and algo.kl.reward.estimator != "k1":
        message = "penalises a token that has become too rare as well, and makes it rarer; in rewards k1 has the divergence's gradient"
        yield resolved.mistake("algo.kl.reward.estimator", message)
    if algo.policy_loss == "vanilla" and updates_per_step(config) > 1:
        message = f"has no ratio, and {updates_per_step(config)} updates of a rollout are off-policy; tis has one"
        yield resolved.mistake("algo.policy_loss", message)
    cut = _cut_sampling(resolved)
    if cut:
        yield f"{', '.join(cut)}: the sampler's log-probabilities are not comparable with the trainer's, so train/sampler_* say little"
