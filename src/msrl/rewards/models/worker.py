"""Worker process of `server.py`, started as `python -m msrl.rewards.models.worker`.

Messages on standard input: Settings, then lists of (prompt, response, full_response), see
`text_ids`. Frames on standard output: READY or RAISED, then ANSWERED for each list, with a list of
(score, None) or (None, error) as JSON. The model runs in float32.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msrl.chat_rendering.client import Chat, render_chats, template_variables
from msrl.processes.interpreter import no_collections
from msrl.processes.messages import READY, error_frame, frame, read
from msrl.processes.parent import leave_signals_to_parent

Answer = tuple[float | None, str | None]
ANSWERED = 1  # kind of frames with answers


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a reward model; `server.RewardModel` documents them."""

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
    leave_signals_to_parent()
    settings: Settings = read(source)
    try:
        with no_collections():
            model = Classifier(settings)
    except BaseException:  # the parent reports any error
        sink.write(error_frame(traceback.format_exc(limit=-2)[-2000:]))
        return
    sink.write(frame(READY))
    sink.flush()
    while (texts := read(source)) is not None:
        sink.write(frame(ANSWERED, detail=json.dumps(model.answers(texts)).encode()))
        sink.flush()


def text_ids(
    tokenizer: Any, template: str, prompt: str, response: str, full_response: str
) -> list[int]:
    """Return the token ids of a text, whose last token has the score.

    It is prompt + full_response, or prompt and response as messages of the chat template.
    `full_response` also has the special tokens of the response.
    """
    if template == "chat":
        user = {"role": "user", "content": prompt}
        assistant = {"role": "assistant", "content": response}
        variables = template_variables(tokenizer, [user, assistant], {}, generation=False)
        text = render_chats([Chat(tokenizer.get_chat_template(), variables)])[0].text
    else:
        text = prompt + full_response
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def length_error(num_tokens: int, limit: int) -> str:
    """Return the error for a text that is empty or longer than the limit."""
    return f"the text has {num_tokens} tokens; the reward model supports 1 to {limit}"


class Classifier:
    """Sequence classifier with one label, and its tokenizer.

    Raises:
        ValueError: The folder holds another kind of model.
    """

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._settings = settings
        self._tokenizer = AutoTokenizer.from_pretrained(settings.path)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            settings.path, dtype=torch.float32, output_loading_info=True
        )
        if info["missing_keys"]:
            names = ", ".join(sorted(info["missing_keys"])[:3])
            raise ValueError(f"the checkpoint has no {names}: the scores would be random")
        if model.config.num_labels != 1:
            raise ValueError(f"the head has {model.config.num_labels} labels instead of one")
        self._config = model.config.get_text_config()
        self._padding: int | None = self._config.pad_token_id
        self._model = model.eval().to(settings.device)
        model_limit = getattr(model.config, "max_position_embeddings", 0) or sys.maxsize
        self._max_tokens = settings.max_tokens or model_limit

    def answers(self, texts: Sequence[tuple[str, str, str]]) -> list[Answer]:
        """Return one answer per (prompt, response, full_response), in order."""
        template = self._settings.template
        sequences = [text_ids(self._tokenizer, template, *parts) for parts in texts]
        limit = self._max_tokens
        fitting = [number for number, ids in enumerate(sequences) if 0 < len(ids) <= limit]
        answers: list[Answer] = [(None, length_error(len(ids), limit)) for ids in sequences]
        scores = self._scores([sequences[number] for number in fitting]) if fitting else []
        for number, score in zip(fitting, scores, strict=True):
            is_valid = math.isfinite(score)
            answers[number] = (score, None) if is_valid else (None, _value_error(score))
        return answers

    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the scores at the last token of each sequence, padded on the right."""
        import torch

        padding = self._padding_id(sequences)
        self._config.pad_token_id = padding
        device, longest = self._settings.device, max(map(len, sequences))
        padded = torch.full((len(sequences), longest), padding)
        mask = torch.zeros(len(sequences), longest, dtype=torch.long)
        for row, ids in enumerate(sequences):
            padded[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        with torch.inference_mode():
            output = self._model(input_ids=padded.to(device), attention_mask=mask.to(device))
        return output.logits[:, 0].float().cpu().tolist()

    def _padding_id(self, sequences: Sequence[Sequence[int]]) -> int:
        """Return the padding id of the model, or an id that no sequence contains."""
        if self._padding is not None:
            return self._padding
        used = {token for ids in sequences for token in ids}
        return next(token for token in range(self._config.vocab_size) if token not in used)


def _value_error(score: float) -> str:
    return f"the reward model returned {score}"


if __name__ == "__main__":
    main()
