"""Reward model with a scalar head on the training ranks, in the parallel layout of the policy.

The model is an mcore checkpoint with `rm_head`, or a Hugging Face folder of a sequence classifier
with one label. This module tokenizes texts, and the ranks score the tokens: the caller that starts
the ranks passes their function to `connect`, so Megatron is not imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from msrl.errors import MsrlError, hub_hint
from msrl.models.families import shape_from_config
from msrl.models.hf_config import ReadConfig, read_hf_config
from msrl.models.paths import config_dir
from msrl.models.shape import Shape
from msrl.rewards.models.server import option_refusal
from msrl.rewards.models.worker import length_error, text_ids
from msrl.rewards.pool import CallResult
from msrl.rewards.remote import Item
from msrl.types import Ints

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
RankScore = Callable[[Sequence[Ints], int], Sequence[float]]
"""Function of token ids of sequences and the batch size per rank.

It returns the score at the last token of each sequence.
"""


class RankModel:
    """Reward model on the training ranks, with the options of `RewardModel` except the device.

    The model supports sequences of up to `max_length` tokens.
    """

    def __init__(
        self,
        path: str,
        max_length: int,
        *,
        template: Literal["plain", "chat"] = "plain",
        prompt_column: str = "",
        batch: int = 8,
        max_tokens: int = 0,
    ) -> None:
        self.path = path
        self._template, self._prompt_column = template, prompt_column
        self._batch, self._limit = batch, max_tokens or max_length
        self._rank_score: RankScore | None = None
        self._tokenizer: Any = None

    @staticmethod
    def refusal(
        path: str,
        *,
        template: str = "plain",
        prompt_column: str = "",
        batch: int = 8,
        max_tokens: int = 0,
        read_config: ReadConfig = read_hf_config,
        **_: Any,
    ) -> str | None:
        """Return the reason why the folder or these options cannot be used, or None."""
        folder = config_dir(path)
        if not (folder / "config.json").is_file():
            remedy = "use an mcore checkpoint written by msrl, or a Hugging Face folder"
            return f"has no config.json, directly or in {folder.name}; {remedy}{hub_hint(path)}"
        try:
            shape = shape_from_config(read_config(folder))
        except MsrlError as error:
            return str(error)
        reason = _folder_refusal(folder, shape)
        reason = reason or option_refusal(template, prompt_column, batch, max_tokens)
        limit = shape.max_position_embeddings
        if reason is None and max_tokens > limit:
            return f"options.max_tokens={max_tokens}: the model supports at most {limit} tokens"
        return reason

    def connect(self, score: RankScore) -> None:
        """Load the tokenizer and use `score` of the started ranks from now on."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            config_dir(self.path), local_files_only=True, trust_remote_code=False
        )
        self._rank_score = score

    def score(self, items: Sequence[Item]) -> list[CallResult]:
        """Return the score of every item, or the reason why it has none."""
        assert self._rank_score is not None, "the ranks have not been started"
        limit = self._limit
        sequences = [self._token_ids(item.use_prompt_column(self._prompt_column)) for item in items]
        fitting = [number for number, ids in enumerate(sequences) if 0 < len(ids) <= limit]
        results: list[CallResult] = []
        for ids in sequences:
            results.append(CallResult(None, "error", length_error(len(ids), limit)))
        inputs = [sequences[number] for number in fitting]
        scores = self._rank_score(inputs, self._batch) if inputs else []
        for number, score in zip(fitting, scores, strict=True):
            results[number] = _score_result(score)
        return results

    def _token_ids(self, item: Item) -> Ints:
        ids = text_ids(
            self._tokenizer, self._template, item.prompt, item.response, item.full_response
        )
        return np.asarray(ids, np.int64)

    def take_counts(self) -> dict[str, float]:
        """Return no counts because nothing is retried."""
        return {}

    def close(self) -> None:
        """Do nothing: the training stops the ranks."""


def _score_result(score: float) -> CallResult:
    if math.isfinite(score):
        return CallResult(float(score))
    return CallResult(None, "error", f"the reward model returned {score}")


def _folder_refusal(folder: Path, shape: Shape) -> str | None:
    if not shape.reward_head:
        remedy = "`convert-ckpt hf2mcore --orm` writes one"
        return f"is {shape.architecture}, which has no scalar head; {remedy}"
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return f"has no tokenizer in {folder}; put its files there"
    return None
