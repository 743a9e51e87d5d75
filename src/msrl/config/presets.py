"""`algo.preset`: a published algorithm by name, as values for the keys that the user does not set.

The numbers are those of the papers. What a paper takes for granted elsewhere (learning rates, batch sizes, filters) is left alone.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv:2402.03300; the coefficient of the divergence is that of arXiv:2501.12948
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
    # arXiv:2503.14476; groups of equal rewards are left out of the loss
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
    # arXiv:2507.20673; the widths are in log space
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
    # arXiv:2402.14740; the clip only matters where a rollout has several updates
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
    # arXiv:2501.03262; k1 as in its equation of the penalty
    "reinforce_pp": {
        "advantage": {"estimator": "reinforce_pp"},
        "policy_loss": "ppo",
        "clip": {"low": 0.2, "high": 0.2},
        "aggregate": {"mode": "token-mean"},
        "kl": {"reward": {"coef": 0.001, "estimator": "k1"}},
    },
    # arXiv:1707.06347 with the numbers for language models of arXiv:2203.02155, appendix C.4, and github.com/openai/baselines, ppo2
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
    # arXiv:2506.13585: no lower bound; the upper one, which the paper leaves open, as in arXiv:2510.13786
    "cispo": {
        "advantage": {"estimator": "group_norm"},
        "policy_loss": "cispo",
        "clip": {"low": 1.0, "high": 4.0},
        "aggregate": {"mode": "token-mean"},
    },
}
