"""Log-probabilities of tokens by models of transformers, computed from their logits in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


@torch.no_grad()
def token_logprobs(
    model: Any, token_ids: Sequence[int] | np.ndarray, temperature: float = 1.0
) -> np.ndarray:  # [T] -> [T - 1]
    """Return the log-probability of each token but the first."""
    ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64))
    logits = model(ids[None]).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()


def response_logprobs(
    model: Any,
    prompt_ids: Sequence[int] | np.ndarray,
    response_ids: Sequence[int] | np.ndarray,
    temperature: float = 1.0,
) -> np.ndarray:  # [P], [R] -> [R]
    """Return the log-probabilities of the tokens of a response."""
    values = token_logprobs(model, [*prompt_ids, *response_ids], temperature)
    return values[len(prompt_ids) - 1 :]
