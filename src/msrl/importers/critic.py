"""Keys of the critic in other systems, as keys of cluster.roles.critic."""

from __future__ import annotations

from collections.abc import Iterable

from msrl.config.messages import node_at
from msrl.config.sections.roles import CriticOptimizerConfig
from msrl.importers.conversions import CONVERSIONS
from msrl.importers.micro_batches import VALUE_MODE
from msrl.importers.sections import Keys
from msrl.importers.translation import KeyStatus, SourceKey, Translation

_POLICY, _CRITIC = "train.optimizer.", "cluster.roles.critic.optimizer."
NOT_GAE = "the original reads it with the estimator gae only"


def assign_critic_optimizer(
    translation: Translation, keys: Iterable[SourceKey], policy: Keys
) -> None:
    """Assign the learning-rate keys of the critic's section to the critic's optimizer.

    The critic shares all other optimizer settings with the policy, so another value is refused.
    """
    for entry in keys:
        row = translation.row(entry)
        names = [key.removeprefix(_POLICY) for key in row.to if key.startswith(_POLICY)]
        if not names:
            continue
        if any(name not in CriticOptimizerConfig.model_fields for name in names):
            value = policy.value(entry.key)
            if entry.value != value:
                reason = f"{names[0]} of the critic equals that of the policy, which is {value}"
                translation.record(entry, KeyStatus.UNSUPPORTED, reason)
            continue
        try:
            value = CONVERSIONS[row.via](entry.value)
        except ValueError as error:
            translation.add_error(entry, str(error))
            continue
        translation.assign(entry, [_CRITIC + name for name in names], value)


def record_unused(translation: Translation, keys: Iterable[SourceKey]) -> None:
    """Record keys of a critic that the original does not create."""
    for entry in keys:
        translation.record(entry, KeyStatus.DEAD, NOT_GAE)


def report_other_batches(critic: Keys, policy: Keys, names: Iterable[str]) -> None:
    """Report batch sizes of the critic that differ from the policy's."""
    for name in names:
        entry = critic.get(name)
        if entry is not None and entry.value != policy.value(name):
            text = f"the critic of msrl has the batches of the policy, {policy.value(name)}"
            if critic.translation.is_recorded(entry):
                critic.translation.report_difference(entry, text)
            else:
                critic.translation.difference(entry, text)


def report_other_ranks(translation: Translation, entry: SourceKey) -> None:
    """Report that a separate critic averages its loss over other ranks than the policy."""
    mode = node_at(translation.tree, VALUE_MODE.split("."))
    if mode is not None and mode.value == "micro-batch-mean":
        text = "the value loss is averaged by the ranks of the critic, in msrl by the policy's"
        translation.report_difference(entry, text)
