"""Keys and values that the design names and this version does not do: refused by name, so that nobody thinks they took effect."""

from __future__ import annotations

_SHARED = "all roles share the devices, the layout and the micro-batches of training"

NOT_YET: dict[str, str] = {
    "model.trust_remote_code": "",
    "model.override": "",
    "data.map_keys": "set preprocess.map_keys and run `msrl preprocess` first",
    "data.num_workers": "",
    "data.split": "name the held-out data in data.eval",
    "data.mixed_modalities": "text only",
    **dict.fromkeys((f"cluster.roles.{role}" for role in ("actor", "rollout", "reference", "reward")), _SHARED),
    **dict.fromkeys((f"cluster.roles.critic.{key}" for key in ("devices", "colocate", "parallel", "micro_batch")), _SHARED),
    "rollout.max_running_requests": "set rollout.engine.max_num_seqs",
    "rollout.engine.pp": "",
    "rollout.engine.ep": "",
    "rollout.engine.sleep": "",
    "rollout.async": "rollout and training take turns",
    "algo.value.coef": "the critic has an optimizer of its own; set cluster.roles.critic.optimizer.lr",
    "train.optimizer.name": "it is AdamW",
    "checkpoint.save_optimizer": "it is always saved",
    "checkpoint.save_rng": "it is always saved",
    "log.length_plot_every": "",
    "env": "",
}

RENAMED = {"convert.layout": "convert.format"}  # keys of earlier versions, refused with their new names

NOT_YET_VALUES: dict[str, frozenset[str]] = {
    "rollout.engine.name": frozenset({"megatron"}),
    "train.parallel.cp_algo": frozenset({"ring", "ulysses", "hybrid", "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"}),
    "generate.engine": frozenset({"megatron"}),
    "algo.advantage.estimator": frozenset({"gigpo", "step_reinforce", "agentic_reinforce"}),
}


def not_yet(key: str, value: object = None) -> str | None:
    """What to say of `key` (with `value`) when it is known but not built; None when it is not one of these. List indices don't count."""
    plain = ".".join(part for part in key.split(".") if not part.isdigit())
    if isinstance(value, str) and value in NOT_YET_VALUES.get(plain, ()):
        return "not in this version yet"
    if plain in NOT_YET:
        return "not in this version yet" + (f"; {NOT_YET[plain]}" if NOT_YET[plain] else "")
    return None
