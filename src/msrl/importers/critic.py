"""What other systems say of their critic, as keys of cluster.roles.critic: its own learning rate, by the keys of the policy's."""

from __future__ import annotations

from collections.abc import Iterable

from msrl.config.sections.general import CriticOptimizerConfig
from msrl.importers.conversions import CONVERSIONS
from msrl.importers.sections import Keys
from msrl.importers.translation import Fate, Given, Translation

_POLICY, _CRITIC = "train.optimizer.", "cluster.roles.critic.optimizer."
NOT_GAE = "read where a critic is, with the estimator gae only"


def put_optimizer(translation: Translation, keys: Iterable[Given], policy: Keys) -> None:
    """The keys that set the policy's learning rate set the critic's, where they stand in the critic's section.

    The rest of the optimizer is the `policy`'s: another value of it is refused.
    """
    for given in keys:
        row = translation.row(given)
        names = [key.removeprefix(_POLICY) for key in row.to if key.startswith(_POLICY)]
        if not names:
            continue
        if any(name not in CriticOptimizerConfig.model_fields for name in names):
            if given.value != policy.value(given.key):
                translation.say(given, Fate.NOT_YET, f"the critic's {names[0]} is the policy's, which is {policy.value(given.key)}")
            continue
        try:
            value = CONVERSIONS[row.via](given.value)
        except ValueError as error:
            translation.mistake(given, str(error))
            continue
        translation.take(given, [_CRITIC + name for name in names], value)


def say_dead(translation: Translation, keys: Iterable[Given]) -> None:
    """Keys of a critic that the original does not make."""
    for given in keys:
        translation.say(given, Fate.DEAD, NOT_GAE)
