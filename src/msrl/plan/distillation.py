"""Configuration of train-distill: train-grpo without advantages of rewards."""

from __future__ import annotations

from collections.abc import Mapping

from msrl.config.schema import Config


def implied_values(config: Config) -> Mapping[str, object]:
    """Return the values of keys that train-distill implies.

    Only teachers on servers give advantages, so only they need the policy loss. The estimator must
    not need groups of samples, a critic or further passes.
    """
    rl_coef = 1.0 if config.algo.distill.has_servers else 0.0
    return {"algo.rl_coef": rl_coef, "algo.advantage.estimator": "reinforce"}


def distillation_config(config: Config) -> Config:
    """Return the configuration with the values that train-distill implies."""
    implied = implied_values(config)
    advantage = config.algo.advantage.model_copy(
        update={"estimator": implied["algo.advantage.estimator"]}
    )
    algo = config.algo.model_copy(
        update={"rl_coef": implied["algo.rl_coef"], "advantage": advantage}
    )
    return config.model_copy(update={"algo": algo})
