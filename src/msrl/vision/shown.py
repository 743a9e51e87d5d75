"""Tokens of prompts with images as people and reward models read them."""

from __future__ import annotations

import numpy as np

from msrl.types import Ints, Prompt


def shown_ids(prompt: Prompt) -> Ints:
    """Return the tokens of a prompt with one token for each image."""
    if not prompt.images:
        return prompt.token_ids
    is_shown = np.ones(len(prompt.token_ids), np.bool_)
    for placed in prompt.images:
        start = placed.offset
        is_other = prompt.token_ids[start:] != prompt.token_ids[start]
        count = int(np.argmax(is_other)) if is_other.any() else len(is_other)
        is_shown[start + 1 : start + count] = False
    return prompt.token_ids[is_shown]
