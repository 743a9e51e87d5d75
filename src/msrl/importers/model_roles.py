"""Separate devices of models in files of other systems, as keys of cluster.roles."""

from __future__ import annotations

from collections.abc import Mapping

from msrl.config.messages import node_at
from msrl.config.sources import wrap
from msrl.importers.sections import Keys
from msrl.importers.translation import KeyStatus, SourceKey, Translation

_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "context_parallel_size": "cp",
}


def needs_reference(translation: Translation) -> bool:
    """Return True if the translated KL terms need a reference."""
    for term in ("loss", "reward"):
        node = node_at(translation.tree, ["algo", "kl", term, "coef"])
        if node is not None and isinstance(node.value, int | float) and node.value > 0:
            return True
    return False


def put_reference_weights(translation: Translation, entry: SourceKey, path: object) -> None:
    """Translate the folder of the reference's weights."""
    if needs_reference(translation):
        translation.assign(entry, ["cluster.roles.reference.load"], path)
    else:
        translation.record(entry, KeyStatus.DEAD, "without a KL term, the run has no reference")


def put_layout(
    translation: Translation,
    role: str,
    keys: Keys,
    policy: Keys,
    shared: Mapping[str, int] | None = None,
) -> None:
    """Translate the parallel sizes and the micro-batch of a model on separate devices.

    A size that `keys` lack is the size of all roles in `shared`, or 1. msrl would use the policy's.
    """
    for key, size in _SIZES.items():
        native, entry = f"cluster.roles.{role}.parallel.{size}", keys.get(key)
        if entry is not None:
            translation.assign(entry, [native], entry.value)
        elif (policy.number(key) or 1) != (default := (shared or {}).get(key, 1)):
            translation.set(native, wrap(default, policy.origin(key)))
    entry = keys.get("micro_batch_size", "infer_batch_size")
    if entry is not None:
        translation.assign(entry, [f"cluster.roles.{role}.micro_batch"], entry.value)
