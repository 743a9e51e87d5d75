"""Probability pass@k that one of k responses is correct. P prompts.

It is estimated from n >= k responses with c correct ones:

    pass@k = 1 - C(n - c, k) / C(n, k)

The estimate is unbiased for every k up to n (arXiv:2107.03374, section 2.1). pass@1 is the share of
correct responses, also called mean@n.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pass_at_k(
    num_right: NDArray[np.int64], num_samples: int, k: int
) -> NDArray[np.float64]:  # [P] -> [P]
    """Return pass@k of every prompt. Raises ValueError unless 1 <= k <= num_samples."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples")
    # C(n - c, k) / C(n, k), one factor for each of the k answers that are drawn.
    drawn = np.arange(k)
    wrong = np.clip(num_samples - num_right[:, None] - drawn, 0, None) / (num_samples - drawn)
    return 1.0 - wrong.prod(axis=1)


def depths(num_samples: int) -> list[int]:
    """Return the values of k to report: powers of two, and all samples."""
    return [
        *(2**power for power in range(num_samples.bit_length()) if 2**power < num_samples),
        num_samples,
    ]
