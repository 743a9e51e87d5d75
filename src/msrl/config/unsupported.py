"""Known keys and values that this version refuses because they would have no effect."""

from __future__ import annotations

_SHARED = "all roles share the devices, parallel layout and micro-batches of training"

NOT_YET: dict[str, str] = {
    "model.trust_remote_code": "",
    "model.override": "",
    "data.map_keys": "set preprocess.map_keys and run `msrl preprocess`",
    "data.num_workers": "",
    "data.split": "set data.eval to the prefix of the held-out data",
    "data.mixed_modalities": "only text is supported",
    **dict.fromkeys(
        (f"cluster.roles.{role}" for role in ("actor", "rollout", "reference", "reward")), _SHARED
    ),
    **dict.fromkeys(
        (
            f"cluster.roles.critic.{key}"
            for key in ("devices", "colocate", "parallel", "micro_batch")
        ),
        _SHARED,
    ),
    "rollout.max_running_requests": "set rollout.engine.max_num_seqs",
    "rollout.engine.pp": "",
    "rollout.multi_turn": "a response is one turn",
    "rollout.max_turns": "a response is one turn",
    "rollout.engine.ep": "",
    "rollout.engine.sleep": "",
    "rollout.async": "rollout and training alternate",
    "algo.value.coef": "set cluster.roles.critic.optimizer.lr, the learning rate of the critic",
    "train.optimizer.name": "the optimizer is always AdamW",
    "checkpoint.save_optimizer": "the optimizer is always saved",
    "checkpoint.save_rng": "the RNG state is always saved",
    "log.length_plot_every": "",
    "env": "",
}

# Keys of earlier versions. The error message names the new key.
RENAMED = {"convert.layout": "convert.format"}

NOT_YET_VALUES: dict[str, frozenset[str]] = {
    "rollout.engine.name": frozenset({"megatron"}),
    "train.parallel.cp_algo": frozenset(
        {"ring", "ulysses", "hybrid", "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"}
    ),
    "generate.engine": frozenset({"megatron"}),
    "algo.advantage.estimator": frozenset({"gigpo", "step_reinforce", "agentic_reinforce"}),
}


def not_yet(key: str, value: object = None) -> str | None:
    """Return the error message for an unsupported `key` or `value`, or None if it is supported.

    List indices in the key are ignored.
    """
    plain = ".".join(name for name in key.split(".") if not name.isdigit())
    if isinstance(value, str) and value in NOT_YET_VALUES.get(plain, ()):
        return "not in this version yet"
    if plain in NOT_YET:
        remedy = f"; {NOT_YET[plain]}" if NOT_YET[plain] else ""
        return f"not in this version yet{remedy}"
    return None
