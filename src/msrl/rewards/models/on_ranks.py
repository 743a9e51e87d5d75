"""Rewards of a model with a scalar head on the training ranks, cut as the policy is: texts become tokens here, and scores there.

The model is an mcore checkpoint with `rm_head`, or a Hugging Face folder of a sequence classifier with one label. Who starts the ranks
gives this its `score`: nothing of Megatron's is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from msrl.errors import MsrlError, hub_hint
from msrl.models.families import load_shape
from msrl.models.paths import config_dir
from msrl.models.shape import Shape
from msrl.rewards.models.worker import text_ids
from msrl.rewards.pool import CallResult
from msrl.rewards.remote import Item
from msrl.types import Ints

RankScore = Callable[[Sequence[Ints], int], Sequence[float]]
"""Token ids of sequences, and how many of them share a pass of a rank -> the score at the last token of each."""


class RankModel:
    """A reward model on the training ranks; its options are those of `model.RewardModel`, but for the device."""

    def __init__(
        self, path: str, *, template: Literal["plain", "chat"] = "plain", prompt_column: str = "", batch: int = 8, max_tokens: int = 0
    ) -> None:
        self.path, self._template, self._prompt_column, self._batch = path, template, prompt_column, batch
        self._max_tokens = max_tokens
        self._score: RankScore | None = None
        self._tokenizer: Any = None

    @staticmethod
    def refusal(
        path: str, *, template: str = "plain", prompt_column: str = "", batch: int = 8, max_tokens: int = 0, **_: Any
    ) -> str | None:
        """What is wrong with the model's folder or these options."""
        folder = config_dir(path)
        if not (folder / "config.json").is_file():
            wanted = "give an mcore checkpoint that msrl wrote, or a Hugging Face folder"
            return f"has no config.json, in itself or in {folder.name}; {wanted}{hub_hint(path)}"
        try:
            shape = load_shape(folder)
        except MsrlError as error:
            return str(error)
        if not shape.reward_head:
            return f"is {shape.architecture}, no model with a scalar head; `convert-ckpt hf2mcore --orm` writes one"
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
            return f"has no tokenizer in {folder}; put its files there"
        if template == "chat" and not prompt_column:
            return "options.template=chat needs options.prompt_column, the column with the bare question"
        if max_tokens > shape.max_position_embeddings:
            return f"options.max_tokens={max_tokens}: the model takes {shape.max_position_embeddings} tokens"
        return "options.batch has to be 1 or more, max_tokens 0 or more" if batch < 1 or max_tokens < 0 else None

    @property
    def shape(self) -> Shape:
        return load_shape(config_dir(self.path))

    def connect(self, score: RankScore) -> None:
        """The ranks are there: from now on `outcomes` may be asked for."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(config_dir(self.path), local_files_only=True, trust_remote_code=False)
        self._score = score

    def outcomes(self, items: Sequence[Item]) -> list[CallResult]:
        """A score for every item, or why there is none."""
        assert self._score is not None, "the ranks have not been started"
        limit = self._max_tokens or self.shape.max_position_embeddings
        texts = [item.with_prompt_of(self._prompt_column) for item in items]
        ids = [np.asarray(text_ids(self._tokenizer, self._template, item.prompt, item.response), np.int64) for item in texts]
        fitting = [number for number, one in enumerate(ids) if 0 < len(one) <= limit]
        told = [CallResult(None, "error", f"{len(one)} tokens; the reward model takes from 1 to {limit}") for one in ids]
        scores = self._score([ids[number] for number in fitting], self._batch) if fitting else []
        for number, score in zip(fitting, scores, strict=True):
            is_number = math.isfinite(score)
            told[number] = CallResult(float(score)) if is_number else CallResult(None, "error", f"the reward model gave {score}")
        return told

    def take_retried(self) -> int:
        """Nothing is tried again."""
        return 0

    def close(self) -> None:
        """The ranks end with the training."""
