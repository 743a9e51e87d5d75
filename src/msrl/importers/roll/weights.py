"""Models of the policy and of the reference in ROLL's RL files.

Source: ROLL 8eb27cc2 (configs/base_config.py): `pretrain` is the model of all roles unless
actor_train, actor_infer and reference all have a `model_name_or_path`.
"""

from __future__ import annotations

from msrl.importers.model_roles import needs_reference, put_reference_weights
from msrl.importers.roll.worker import Worker
from msrl.importers.sections import Keys
from msrl.importers.translation import KeyStatus

_OVERWRITTEN = "overwritten by pretrain, unless actor_train, actor_infer and reference all have one"


def put_weights(top: Keys, train: Worker, infer: Worker, reference: Worker) -> None:
    """Translate the paths of the policy and the reference, whose dtype is that of the policy."""
    models = [worker.sections["model_args"] for worker in (train, infer, reference)]
    policy, engine, other = (keys.get("model_name_or_path") for keys in models)
    if policy is None or engine is None or other is None:
        for keys in models:
            keys.record("model_name_or_path", KeyStatus.DEAD, _OVERWRITTEN)
    else:
        top.translation.assign(policy, ["model.path"], policy.value)
        top.record("pretrain", KeyStatus.DEAD, "overridden by model_name_or_path")
        if other.value != policy.value:
            put_reference_weights(top.translation, other, other.value)
    own, dtype = models[0].get("dtype"), models[2].get("dtype")
    if own is None or dtype is None or dtype.value == own.value:
        return
    if needs_reference(top.translation):
        text = f"the reference of msrl computes in the dtype of actor_train, {own.value}"
        top.translation.difference(dtype, text)
