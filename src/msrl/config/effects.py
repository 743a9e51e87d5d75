"""Needs of configuration keys: the trainings that read them, and values of other keys.

A key whose needs are not met has no effect, and `msrl.checks.effects` refuses it. The tables are
beside the schema, because sections have needs too, and several sections inherit the same fields.
A key of a list of sections has no number here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msrl import registry


@dataclass(frozen=True, slots=True)
class Needs:
    """Values of other keys that a key or section needs to have an effect.

    Attributes:
        keys: Dotted keys, of which one is enough.
        values: Values that one of them must have. Default: any that is not empty, 0 or none.
        why: Reason why the key has no effect otherwise, which begins with `which` or `because`.
        commands: Commands that need it. Default: all that read the key.
    """

    keys: tuple[str, ...]
    values: tuple[Any, ...] = ()
    why: str = ""
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NeedsPlugin:
    """Property that the plugin of another key needs.

    Attributes:
        key: Dotted key that selects the plugin.
        package: Package of the plugins.
        function: Function that must have `name` as a parameter; empty for a constant that is true.
        name: Name of the parameter or of the constant.
        why: Reason why the key has no effect otherwise.
        commands: Commands that need it. Default: all that read the key.
    """

    key: str
    package: str
    function: str
    name: str
    why: str = ""
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadBy:
    """Trainings that read a key or section.

    Attributes:
        commands: Names of the trainings.
        why: Reason why it has no effect in others.
        instead: Key with this meaning in others.
    """

    commands: tuple[str, ...]
    why: str = ""
    instead: str = ""


ROLLOUTS = ("train-grpo", "train-distill")

# Trainings that read a key or section. The longest entry counts.
_SAMPLES, _ROWS = ReadBy(ROLLOUTS), ReadBy(("train-sft", "train-dpo", "train-rm"))
_OFFLOADED = ReadBy(ROLLOUTS, "which needs it permanently")
READ_BY = {
    "algo": _SAMPLES,
    "algo.aggregate": ReadBy(("train-sft", *ROLLOUTS)),
    "algo.aggregate.tokens_per_group": _SAMPLES,
    "algo.preference": ReadBy(("train-dpo",)),
    "algo.reward_model": ReadBy(("train-rm",)),
    "cluster.roles": _SAMPLES,
    "cluster.roles.reference": ReadBy(("train-dpo", *ROLLOUTS)),
    "data.curriculum": ReadBy(("train-grpo",)),
    "data.eval_fraction": _ROWS,
    "data.handler": ReadBy(("train-sft",)),
    "data.pack": _ROWS,
    "data.too_long": _ROWS,
    **{
        f"eval.{name}": _SAMPLES
        for name in ("at_start", "max_response_tokens", "right_from", "samples_per_prompt")
    },
    "eval.sampling": _SAMPLES,
    "eval.source": _SAMPLES,
    "rollout.async": ReadBy(("train-grpo",), "which trains on samples of the current policy"),
    "rollout.filter": ReadBy(("train-grpo",)),
    "rollout.replay": ReadBy(("train-grpo",), "which trains on samples of the current policy"),
    "train.chunk": ReadBy(
        ("train-sft", "train-dpo", *ROLLOUTS), "which computes no logits over the vocabulary"
    ),
    "train.forward_micro_batch": ReadBy(("train-dpo", *ROLLOUTS)),
    "train.global_batch": ReadBy(_ROWS.commands, instead="rollout.prompts_per_step"),
    "train.offload.grads": _OFFLOADED,
    "train.offload.params": _OFFLOADED,
    "train.updates": _SAMPLES,
    "train.updates.samples_per_update": ReadBy(ROLLOUTS, instead="train.global_batch"),
}

_EVALUATIONS = Needs(("eval.every_steps", "eval.at_start"), commands=ROLLOUTS)
_JUDGED = Needs(("eval.every_steps", "eval.at_start", "data.curriculum.sampler"), commands=ROLLOUTS)
_SCORES = Needs(("reward.sources",), why="because the environment decides")
_EXAMPLES = Needs(("data.handler",), (None,), "which splits text into rows")
_MODES = ("algo.aggregate.mode", "algo.value.aggregate")
_GROUPS = Needs(_MODES, ("micro-batch-mean",))
_IN_FLIGHT = Needs(("rollout.async.weight_update",), ("in_flight",))
_ONE_LIMIT = Needs(("train.max_tokens_per_micro_batch",), (None,))
_ENGINES_SHARE = Needs(
    ("cluster.roles.rollout.devices",), (None,), "because engines do not share the memory"
)
_CRITIC = NeedsPlugin(
    "algo.advantage.estimator", registry.ADVANTAGES, "", "NEEDS_VALUES", "which has no critic"
)
_REFERENCE = NeedsPlugin(
    "algo.preference.loss",
    registry.PREFERENCES,
    "",
    "NEEDS_REFERENCE",
    "which needs no reference",
    commands=("train-dpo",),
)
_ENVIRONMENT = Needs(("environment.name", "environment.path", "environment.mixture"))
_REPLAY = Needs(("rollout.replay.path",))
_ADAPTERS = Needs(("train.lora.rank",))
_SERVER = Needs(("algo.distill.teachers.url",))
_KL = ("algo.kl.loss.coef", "algo.kl.reward.coef")


def _estimator(parameter: str) -> NeedsPlugin:
    key = "algo.advantage.estimator"
    return NeedsPlugin(key, registry.ADVANTAGES, "advantages", parameter)


def _loss(parameter: str) -> NeedsPlugin:
    return NeedsPlugin("algo.policy_loss", registry.LOSSES, "policy_loss", parameter)


def _recompute(granularity: str) -> Needs:
    return Needs(("train.recompute.granularity",), (granularity,))


def _separate(role: str) -> Needs:
    key = f"cluster.roles.{role}.devices"
    why = "because the model shares layout and micro-batches of the policy"
    return Needs((key,), why=why, commands=ROLLOUTS)


# Needs of a key or section. All of them and all needs of the sections around it must be met.
NEEDS: dict[str, tuple[Needs | NeedsPlugin, ...]] = {
    "algo.advantage.gamma": (_estimator("gamma"),),
    "algo.advantage.lambda": (_estimator("lam"),),
    "algo.aggregate.constant": (Needs(_MODES, ("seq-sum-over-constant",)),),
    "algo.aggregate.samples_per_group": (_GROUPS,),
    "algo.aggregate.tokens_per_group": (_GROUPS,),
    "algo.clip.dual": (_loss("dual"),),
    "algo.clip.high": (_loss("clip_high"),),
    "algo.clip.low": (_loss("clip_low"),),
    "algo.distill": (Needs(("algo.distill.teachers",)),),
    **{
        f"algo.distill.teachers.{name}": (_SERVER,)
        for name in ("served_name", "api_key", "timeout_s", "retries", "concurrency")
    },
    "algo.kl.controller.kind": (Needs(_KL),),
    "algo.kl.controller.target": (Needs(("algo.kl.controller.kind",), ("adaptive",)),),
    "algo.kl.loss.bias_correction": (Needs(("algo.kl.loss.coef",)),),
    "algo.mask.invalid_actions": (_ENVIRONMENT,),
    "algo.mismatch.normalize": (Needs(("algo.mismatch.weight",)),),
    "algo.mismatch.weight": (
        Needs(
            ("algo.old_logprobs",), ("trainer", "log-linear"), "whose ratio contains this weight"
        ),
    ),
    "algo.preference.reference": (_REFERENCE,),
    "algo.reward_model.center_coef": (Needs(("algo.reward_model.kind",), ("outcome",)),),
    "algo.reward_model.reward_tokens": (Needs(("algo.reward_model.kind",), ("process",)),),
    "algo.value": (_CRITIC,),
    "chat.history_keeps": (Needs(("chat.history_turns",)),),
    "checkpoint.keep_best": (Needs(("eval.every_steps",)),),
    "cluster.roles.critic": (_CRITIC,),
    **{
        f"cluster.roles.{role}.{name}": (_separate(role),)
        for role in ("reference", "critic", "reward")
        for name in ("parallel", "micro_batch")
    },
    "cluster.roles.reference": (Needs(_KL, commands=ROLLOUTS),),
    "cluster.roles.reference.load": (_REFERENCE,),
    "cluster.tls.cert": (
        Needs(("cluster.address",), why="because a run on one machine listens on loopback"),
    ),
    "data.curriculum": (Needs(("data.curriculum.sampler",)),),
    "data.eval_fraction": (_EXAMPLES,),
    "data.eval_rows": (Needs(("data.eval_fraction",)),),
    "data.pack": (_EXAMPLES,),
    "data.shuffle": (
        Needs(("data.curriculum.sampler",), (None,), "which decides the order of prompts"),
    ),
    "data.too_long": (_EXAMPLES,),
    "environment": (_ENVIRONMENT,),
    "environment.lockstep": (
        Needs(("rollout.async.max_staleness",), (0,), "whose episodes do not wait for each other"),
    ),
    "eval.max_response_tokens": (_EVALUATIONS,),
    "eval.patience": (Needs(("eval.every_steps",)),),
    "eval.prompts": (_EVALUATIONS,),
    "eval.right_from": (_JUDGED, _SCORES),
    "eval.samples_per_prompt": (_EVALUATIONS,),
    "eval.sampling": (_EVALUATIONS,),
    "eval.source": (_JUDGED, _SCORES),
    **{
        f"evaluate.{name}": (Needs(("evaluate.benchmarks",)),)
        for name in ("benchmark_data", "num_fewshot", "chat_template", "enable_thinking")
    },
    **{
        f"{section}.{name}": (Needs((f"{section}.temperature",), why="which is greedy"),)
        for section in ("eval.sampling", "generate", "chat")
        for name in ("top_p", "top_k", "min_p")
    },
    "log.tokens": (
        Needs(("log.save_rollouts",), commands=ROLLOUTS),
        Needs(("log.rollouts",), ("parquet",), commands=ROLLOUTS),
    ),
    "reward.length.right_above": (Needs(("reward.length.coef",)),),
    "reward.overlong.factor": (Needs(("reward.overlong.buffer",)),),
    "rollout.async": (Needs(("rollout.async.max_staleness",)),),
    "rollout.async.partial": (_IN_FLIGHT,),
    "rollout.async.recompute_kv": (_IN_FLIGHT,),
    "rollout.engine.sleep": (_ENGINES_SHARE,),
    "rollout.filter": (Needs(("rollout.filter.kind",)),),
    "rollout.filter.extra_prompts": (
        Needs(("rollout.filter.refill",)),
        Needs(("rollout.async.max_staleness",), (0,), "where engines sample later groups anyway"),
    ),
    "rollout.filter.high": (Needs(("rollout.filter.kind",), ("mean",)),),
    "rollout.filter.low": (Needs(("rollout.filter.kind",), ("mean", "std")),),
    "rollout.filter.max_refills": (Needs(("rollout.filter.refill",)),),
    "rollout.replay.order": (_REPLAY,),
    "rollout.replay.rewards": (_REPLAY,),
    "rollout.weights.adapters_only": (_ADAPTERS,),
    **{f"train.lora.{name}": (_ADAPTERS,) for name in ("alpha", "targets", "dropout", "load")},
    "train.forward_micro_batch": (_ONE_LIMIT, _REFERENCE),
    "train.max_patches_per_micro_batch": (
        Needs(("train.max_tokens_per_micro_batch",), why="because a pass has a number of rows"),
    ),
    "train.micro_batch": (_ONE_LIMIT,),
    "train.offload.grads": (_ENGINES_SHARE,),
    "train.offload.params": (_ENGINES_SHARE,),
    "train.recompute.layers": (_recompute("full"),),
    "train.recompute.method": (_recompute("full"),),
    "train.recompute.modules": (_recompute("selective"),),
    "train.router.aux_loss_over": (Needs(("train.router.aux_loss_coef",)),),
}
