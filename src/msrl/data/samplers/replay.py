"""Prompts that were informative, again, beside new ones.

A prompt is informative if some of its responses are right and others are wrong.
"""

from __future__ import annotations

from msrl.data.samplers.base import Floats, Pool

OPTION_RANGES = {"share": (-1e-9, 1)}


def pools(
    success: Floats,  # [N]
    *,
    share: float = 0.5,
) -> tuple[Pool, ...]:
    """Return the informative prompts with their `share`, and all others."""
    is_mixed = (success > 0) & (success < 1)
    return Pool(is_mixed, share), Pool(~is_mixed, 1 - share)
