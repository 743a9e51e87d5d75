"""The boxed answer is right: 1.0; anything else: 0.0. MindSpeed-RL's name, in its PPO recipes, of what `math_17k_acc` does."""

from __future__ import annotations

from msrl.rewards.verifiers.math_17k_acc import NEEDS_ANSWER, WRONG, answer_refusal, score

__all__ = ["NEEDS_ANSWER", "WRONG", "answer_refusal", "score"]
