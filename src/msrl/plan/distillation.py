"""Configuration of train-distill: that of train-grpo without a policy loss of rewards."""

from __future__ import annotations

from collections.abc import Mapping

from msrl.config.schema import Config

# Values of keys that train-distill implies. The loss has no term with an advantage, so the
# estimator must not need groups of samples, a critic or further passes.
IMPLIED: Mapping[str, object] = {"algo.rl_coef": 0.0, "algo.advantage.estimator": "reinforce"}


def distillation_config(config: Config) -> Config:
    """Return the configuration with the values that train-distill implies."""
    advantage = config.algo.advantage.model_copy(
        update={"estimator": IMPLIED["algo.advantage.estimator"]}
    )
    algo = config.algo.model_copy(
        update={"rl_coef": IMPLIED["algo.rl_coef"], "advantage": advantage}
    )
    return config.model_copy(update={"algo": algo})
