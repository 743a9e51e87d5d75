"""Presets of published algorithms for `algo.preset`: values of keys that the user does not set.

The numbers are those of the papers. Presets do not change learning rates, batch sizes and filters.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv:2402.03300, with the KL coefficient of arXiv:2501.12948
    "grpo": {
        "advantage": {"estimator": "group_norm"},
        "policy_loss": "ppo",
        "clip": {"low": 0.2, "high": 0.2},
        "aggregate": {"mode": "seq-mean-token-mean"},
        "kl": {"loss": {"coef": 0.001, "estimator": "k3"}},
    },
    # arXiv:2503.20783
    "dr_grpo": {
        "advantage": {"estimator": "dr_grpo"},
        "policy_loss": "ppo",
        "clip": {"low": 0.2, "high": 0.2},
        "aggregate": {"mode": "seq-sum-over-constant"},
    },
    # arXiv:2503.14476. Groups of equal rewards are excluded from the loss.
    "dapo": {
        "advantage": {"estimator": "group_norm"},
        "policy_loss": "ppo",
        "clip": {"low": 0.2, "high": 0.28},
        "aggregate": {"mode": "token-mean"},
        "mask": {"equal_groups": True},
    },
    # arXiv:2507.18071
    "gspo": {
        "advantage": {"estimator": "group_norm"},
        "ratio": "sequence",
        "policy_loss": "ppo",
        "clip": {"low": 3e-4, "high": 4e-4},
        "aggregate": {"mode": "seq-mean-token-mean"},
    },
    # arXiv:2507.20673. The clip range is in log space.
    "gmpo": {
        "advantage": {"estimator": "group_norm"},
        "policy_loss": "gmpo",
        "clip": {"low": 0.4, "high": 0.4},
        "aggregate": {"mode": "seq-mean-token-mean"},
    },
    # arXiv:2505.12504
    "cpgd": {
        "advantage": {"estimator": "cpgd"},
        "policy_loss": "cpgd",
        "clip": {"low": 0.2, "high": 0.2},
        "aggregate": {"mode": "token-mean"},
    },
    # arXiv:2402.14740. The clip range matters only if a rollout has several updates.
    "rloo": {
        "advantage": {"estimator": "rloo"},
        "policy_loss": "ppo",
        "clip": {"low": 0.2, "high": 0.2},
        "aggregate": {"mode": "seq-mean-token-sum"},
    },
    # Williams 1992
    "reinforce": {
        "advantage": {"estimator": "reinforce"},
        "policy_loss": "vanilla",
        "aggregate": {"mode": "seq-mean-token-sum"},
    },
    # arXiv:2501.03262, with k1 as in its equation of the penalty
    "reinforce_pp": {
        "advantage": {"estimator": "reinforce_pp"},
        "policy_loss": "ppo",
        "clip": {"low": 0.2, "high": 0.2},
        "aggregate": {"mode": "token-mean"},
        "kl": {"reward": {"coef": 0.001, "estimator": "k1"}},
    },
    # arXiv:1707.06347, with the numbers for language models of arXiv:2203.02155, appendix C.4,
    # and the value clipping of github.com/openai/baselines, ppo2
    "ppo": {
        "advantage": {"estimator": "gae", "gamma": 1.0, "lambda": 0.95, "whiten": True},
        "policy_loss": "ppo",
        "clip": {"low": 0.2, "high": 0.2},
        "aggregate": {"mode": "token-mean"},
        "value": {"clip": 0.2},
    },
    # arXiv:2503.14286
    "topr": {
        "advantage": {"estimator": "dr_grpo"},
        "policy_loss": "topr",
        "aggregate": {"mode": "seq-mean-token-sum"},
    },
    # arXiv:2506.13585, without a lower bound. The paper does not state its upper bound, so this is
    # the one of arXiv:2510.13786.
    "cispo": {
        "advantage": {"estimator": "group_norm"},
        "policy_loss": "cispo",
        "clip": {"low": 1.0, "high": 4.0},
        "aggregate": {"mode": "token-mean"},
    },
}
