"""Accuracy of the boxed answer: right 1.0, else 0.0.

This is the name of `math_17k_acc` in MindSpeed-RL's PPO recipes.
"""

from __future__ import annotations

from msrl.rewards.verifiers.math_17k_acc import NEEDS_ANSWER, WRONG, answer_refusal, score

__all__ = ["NEEDS_ANSWER", "WRONG", "answer_refusal", "score"]
