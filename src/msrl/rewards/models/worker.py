"""The process of a reward model, for `model.py`: `python -m msrl.rewards.models.worker`, batches on standard input, scores on
standard output.

Messages are pickled and prefixed by their length (8 bytes). In: Settings, then lists of (prompt, response). Out: "ready" or the reason why
not, then for each list one of (score, None) or (None, why not). The model runs in float32.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from msrl.rewards.worker import LENGTH, send

Answer = tuple[float | None, str | None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the process needs to know; `model.RewardModel` says what it means."""

    path: str
    template: str
    batch: int
    max_tokens: int
    device: str
    path_of_modules: tuple[str, ...]


def main() -> None:
    """Serve batches until the input ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings: Settings = _read(source)
    try:
        model = Model(settings)
    except BaseException:  # whatever it is, the parent says it
        send(sink, traceback.format_exc(limit=-2)[-2000:])
        return
    send(sink, "ready")
    while (texts := _read(source)) is not None:
        send(sink, model.answers(texts))


def _read(source: IO[bytes]) -> Any:
    prefix = source.read(LENGTH.size)
    return pickle.loads(source.read(LENGTH.unpack(prefix)[0])) if len(prefix) == LENGTH.size else None


def text_ids(tokenizer: Any, template: str, prompt: str, response: str) -> list[int]:
    """What a reward model reads: the response behind the prompt, or both as turns of its own chat template."""
    if template == "chat":
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    else:
        text = prompt + response
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Model:
    """A sequence classifier with one label and its tokenizer. Raises ValueError where the folder holds another kind of model."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._settings = settings
        self._tokenizer = AutoTokenizer.from_pretrained(settings.path)
        model, info = AutoModelForSequenceClassification.from_pretrained(settings.path, dtype=torch.float32, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"the checkpoint has no {', '.join(sorted(info['missing_keys'])[:3])}: an untrained head says nothing")
        if model.config.num_labels != 1:
            raise ValueError(f"the head has {model.config.num_labels} labels; one is wanted")
        self._config = model.config.get_text_config()
        self._padding: int | None = self._config.pad_token_id
        self._model = model.eval().to(settings.device)
        self._max_tokens = settings.max_tokens or getattr(model.config, "max_position_embeddings", 0) or sys.maxsize

    def answers(self, texts: Sequence[tuple[str, str]]) -> list[Answer]:
        """One for each (prompt, response), in their order."""
        ids = [text_ids(self._tokenizer, self._settings.template, prompt, response) for prompt, response in texts]
        fitting = [number for number, one in enumerate(ids) if 0 < len(one) <= self._max_tokens]
        told: list[Answer] = [(None, f"{len(one)} tokens; the reward model takes from 1 to {self._max_tokens}") for one in ids]
        scores = self._scores([ids[number] for number in fitting]) if fitting else []
        for number, score in zip(fitting, scores, strict=True):
            told[number] = (score, None) if math.isfinite(score) else (None, f"the reward model gave {score}")
        return told

    def _scores(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Padded on the right, the padding masked. The head reads the last token that is none of the model's padding.

        A model that names no padding reads the last token: then any id pads that no sequence has.
        """
        import torch

        padding = (
            self._padding if self._padding is not None else next(n for n in range(self._config.vocab_size) if not any(n in i for i in ids))
        )
        self._config.pad_token_id = padding
        longest = max(map(len, ids))
        padded = torch.full((len(ids), longest), padding)
        mask = torch.zeros(len(ids), longest, dtype=torch.long)
        for row, one in enumerate(ids):
            padded[row, : len(one)] = torch.tensor(one)
            mask[row, : len(one)] = 1
        with torch.inference_mode():
            logits = self._model(input_ids=padded.to(self._settings.device), attention_mask=mask.to(self._settings.device)).logits
        return logits[:, 0].float().cpu().tolist()


if __name__ == "__main__":
    main()
