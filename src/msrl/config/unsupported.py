"""Known keys and values that this version refuses because they would have no effect."""

from __future__ import annotations

NOT_YET_TEXT = "not in this version yet"  # as the troubleshooting page lists it

# Keys with what to do instead.
NOT_YET: dict[str, str] = {
    "model.trust_remote_code": "",
    "model.override": "",
    "data.map_keys": "set preprocess.map_keys and run `msrl preprocess`",
    "data.num_workers": "",
    "data.split": "set data.eval to the prefix of the held-out data",
    "cluster.roles.actor": "set cluster.devices_per_node, train.parallel and train.micro_batch",
    **dict.fromkeys(
        (f"cluster.roles.{role}.colocate" for role in ("rollout", "reference", "critic", "reward")),
        "a role without devices shares those of training",
    ),
    "rollout.max_running_requests": "set rollout.engine.max_num_seqs",
    "rollout.engine.pp": "",
    "rollout.multi_turn": "set environment.name",
    "rollout.max_turns": "set environment.max_turns",
    "algo.value.coef": "set cluster.roles.critic.optimizer.lr, the learning rate of the critic",
    "checkpoint.save_optimizer": "the optimizer is always saved",
    "checkpoint.save_rng": "the RNG state is always saved",
    "env": "set environment.name",
}

_NO_TOP_K = (
    "is refused: the divergence is exact over the full vocabulary. A divergence over the top k "
    "tokens that serves as an advantage would have no gradient on the policy's own samples. "
    "Remove it"
)
# Keys that are refused with the reason, and are in no version.
REFUSED: dict[str, str] = {"algo.distill.top_k": _NO_TOP_K, "algo.distill.topk": _NO_TOP_K}

# Keys of earlier versions. The error message names the new key.
RENAMED = {"convert.layout": "convert.format"}

NOT_YET_VALUES: dict[str, frozenset[str]] = {
    "rollout.engine.name": frozenset({"megatron"}),
    "generate.engine": frozenset({"megatron"}),
}

_NO_FLOAT16 = (
    "float16 is not supported for training: its gradients need loss scaling, which msrl does not "
    "have. Set it to bfloat16, which has the range of float32"
)
_NO_MUON = (
    "Muon is not supported: it orthogonalizes complete matrices, but Megatron's distributed "
    "optimizer splits them over ranks, and megatron-core's Muon needs the package "
    "emerging_optimizers, which msrl does not install. Set it to adamw"
)
# Values that are refused with the reason, and are not choices of any version.
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "model.dtype": dict.fromkeys(("float16", "fp16", "half"), _NO_FLOAT16),
    "train.optimizer.name": {
        "muon": _NO_MUON,
        "sgd": "the only optimizer is adamw. Set it to that",
    },
    "train.router.replay": {
        "R2": "is verl's name of trainer. Set it to that",
        "R3": "is verl's name of engine. Set it to that",
    },
}


def not_yet(key: str, value: object = None) -> str | None:
    """Return the error message for an unsupported `key` or `value`, or None if it is supported.

    List indices in the key are ignored.
    """
    plain = ".".join(name for name in key.split(".") if not name.isdigit())
    if isinstance(value, str) and value in NOT_YET_VALUES.get(plain, ()):
        return NOT_YET_TEXT
    if isinstance(value, str) and value in REFUSED_VALUES.get(plain, {}):
        return REFUSED_VALUES[plain][value]
    if plain in REFUSED:
        return REFUSED[plain]
    if plain in NOT_YET:
        remedy = f"; {NOT_YET[plain]}" if NOT_YET[plain] else ""
        return f"{NOT_YET_TEXT}{remedy}"
    return None
