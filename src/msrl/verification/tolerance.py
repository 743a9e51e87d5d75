"""Tolerances of the verification by family, for logits of transformers and Megatron.

Both sides compute in float32. The numbers in the reasons are the largest differences of the
families' small random models on two tensor-parallel ranks, with logits of standard deviation 1.2,
over most parallel layouts and sizes in tests/helpers/models/families.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrl.models.shape import Shape

MAX_DIVERGENCE = 1e-6  # nats; differences of 1e-4 in the logits cause less than 1e-8


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerance of a family, and its reason.

    `logits` is the largest difference for logits with a standard deviation of up to 1; the limit
    grows in proportion above. `outliers` is the share of positions that may exceed it, whose
    distributions are not compared either. A wrong weight rule affects every position, so a share
    below a half hides no mistake.
    """

    logits: float
    outliers: float
    reason: str


DENSE = Tolerance(1e-4, 0.0, "another order of sums: 1.4e-5")
ROUTED = Tolerance(
    1e-4,
    0.25,
    "another order of sums: 6e-6; experts that tie up to rounding may be swapped, which affects "
    "later positions",
)
LATENT = Tolerance(
    2e-4,
    0.25,
    "as other mixtures of experts; keys, values and queries pass through normalized latents: "
    "3.2e-5",
)


def family_tolerance(shape: Shape) -> Tolerance:
    """Return the tolerance of a model by the kinds of its layers."""
    if shape.moe is None:
        return DENSE
    return ROUTED if shape.mla is None else LATENT
