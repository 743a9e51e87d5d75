"""How far the logits of transformers and of Megatron may lie apart for a conversion to be proven,
by family, and why.

Both sides compute in float32. The figures in the reasons are the largest differences of the
families' small random models, on two tensor-parallel ranks, logits with a standard deviation of
1.2; at most layouts and sizes of tests/families.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrl.models.shape import Shape

MAX_DIVERGENCE = 1e-6  # nats; that of differences of 1e-4 in the logits is below 1e-8


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`logits`: the largest difference of logits whose standard deviation is at most 1, in
    proportion above.

    `strays`: the share of positions that may lie beyond it, whose distributions are not compared
    either. What a rule got wrong is wrong at every position, so a share below a half hides nothing.
    """

    logits: float
    strays: float
    reason: str


DENSE = Tolerance(1e-4, 0.0, "sums in another order: 1.4e-5")
ROUTED = Tolerance(
    1e-4,
    0.25,
    "sums in another order: 6e-6; two experts that tie to rounding change places, and later positions see it",
)
LATENT = Tolerance(
    2e-4,
    0.25,
    "as other mixtures, and keys, values and queries pass through latents with norms: 3.2e-5",
)
TOLERANCES = {
    "qwen3_moe": ROUTED,
    "mixtral": ROUTED,
    "gpt_oss": ROUTED,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}


def tolerance_of(shape: Shape) -> Tolerance:
    """The tolerance of a model's family; `DENSE` where the table has none of its own."""
    return TOLERANCES.get(shape.family, DENSE)
