"""Tokens of an episode: token-in, token-out.

The prompt of a turn is the prompt of the turn before, the tokens sampled then, and the tokens of
the new messages. Sampled tokens are never decoded and encoded again. Where the history is edited,
a new sequence begins.

T tokens of a sequence, R sampled tokens of a turn, L mixture layers, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from msrl.types import Bools, Floats, Ints, Routes, TokenSequence, VersionRun


@dataclass(slots=True)
class _Sequence:
    """Pieces of a sequence and whether they were sampled, and the routes of its first tokens."""

    token_ids: list[Ints]
    are_sampled: list[bool] = field(default_factory=lambda: [False])
    routes: list[Routes] = field(default_factory=list[Routes])

    @property
    def has_samples(self) -> bool:
        return any(self.are_sampled)

    def append(self, token_ids: Ints, *, is_sampled: bool) -> None:
        self.token_ids.append(token_ids)
        self.are_sampled.append(is_sampled)

    def add_routes(self, routes: Routes) -> None:  # [T - 1, L, k]
        """Append the routes of the tokens that no earlier turn has read.

        A token keeps the route of the first turn that read it: with a sampled one, this is the turn
        that sampled the next token.
        """
        self.routes.append(routes[sum(len(rows) for rows in self.routes) :])

    def join(self) -> TokenSequence:
        """Return the sequence up to its last sampled token."""
        while self.has_samples and not self.are_sampled[-1]:
            self.token_ids.pop()
            self.are_sampled.pop()
        lengths = [len(ids) for ids in self.token_ids]
        mask: Bools = np.repeat(np.array(self.are_sampled, np.bool_), lengths)
        routes = np.concatenate(self.routes) if self.routes else None
        return TokenSequence(np.concatenate(self.token_ids), mask, routes)


class EpisodeTokens:
    """Tokens, log-probabilities and policy versions of an episode.

    Args:
        prompt_ids: Prompt of the first turn.
    """

    def __init__(self, prompt_ids: Ints) -> None:
        self._sequences = [_Sequence([prompt_ids])]
        self._logprobs: list[Floats] = []
        self._versions: list[VersionRun] = []

    @property
    def prompt(self) -> Ints:  # [T]
        """Prompt of the next turn."""
        return np.concatenate(self._sequences[-1].token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt of the next turn."""
        return sum(len(ids) for ids in self._sequences[-1].token_ids)

    def add_answer(
        self,
        token_ids: Ints,  # [R]
        logprobs: Floats,  # [R]
        versions: Sequence[VersionRun],
        routes: Routes | None = None,  # [T - 1, L, k] of the prompt of the turn and these tokens
    ) -> None:
        """Append tokens that the policy sampled."""
        self._sequences[-1].append(token_ids, is_sampled=True)
        if routes is not None:
            self._sequences[-1].add_routes(routes)
        self._logprobs.append(logprobs)
        for run in versions:
            if self._versions and self._versions[-1].version == run.version:
                total = self._versions[-1].num_tokens + run.num_tokens
                self._versions[-1] = VersionRun(run.version, total)
            else:
                self._versions.append(run)

    def add_messages(self, token_ids: Ints) -> None:
        """Append tokens of messages."""
        self._sequences[-1].append(token_ids, is_sampled=False)

    def restart(self, prompt_ids: Ints) -> None:
        """Continue with an edited history.

        If it only appends to the present tokens, the sequence continues.
        """
        present = self.prompt
        if len(prompt_ids) >= len(present) and np.array_equal(prompt_ids[: len(present)], present):
            self.add_messages(prompt_ids[len(present) :])
        elif self._sequences[-1].has_samples:
            self._sequences.append(_Sequence([prompt_ids]))
        else:
            self._sequences[-1] = _Sequence([prompt_ids])

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the sequences that have sampled tokens; the first one if none has."""
        sampled = [sequence for sequence in self._sequences if sequence.has_samples]
        return tuple(sequence.join() for sequence in sampled or self._sequences[:1])

    def sampled_tokens(self) -> tuple[Ints, Floats, tuple[VersionRun, ...]]:
        """Return all sampled tokens with their log-probabilities and versions."""
        sequences = self.sequences()
        token_ids = np.concatenate([item.token_ids[item.is_sampled] for item in sequences])
        logprobs = np.concatenate(self._logprobs) if self._logprobs else np.zeros(0, np.float32)
        return token_ids, logprobs, tuple(self._versions)
