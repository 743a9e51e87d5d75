"""What flows between the stages: frozen, one type per stage, no field filled in later.

Letters: P prompt tokens, R response tokens, T = P + R tokens of a sequence, N tokens of a packed
micro-batch, S sequences in it. Arrays are numpy: token ids int64, log-probabilities and rewards
float32, masks bool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a dataset as turns. `answer` is the ground truth that verifiers read; `extra` are
    further columns to carry.
    """

    messages: tuple[Message, ...]
    answer: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """A conversation as tokens; `loss_mask` is True where a token is to be learnt."""

    token_ids: Ints  # [T]
    loss_mask: Bools  # [T]


class FileRecord(TypedDict):
    """Size and CRC-32 (eight hexadecimal digits) of a whole file."""

    bytes: int
    crc32: str


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """What preprocessing wrote and dropped; stands beside the data as JSON."""

    kind: Literal["pretrain", "sft", "prompts"]
    template: str
    handler: str
    tokenizer_hash: str
    vocab_size: int
    seq_length: int
    pack: bool
    num_rows: int
    num_examples: int
    num_tokens: int
    num_loss_tokens: int
    max_tokens: int
    dropped: Mapping[str, int]
    keys: tuple[str, ...]
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    truncated: int = 0
    chat_template: str = (
        ""  # the template as Jinja; empty where it is the tokenizer's own, and for text
    )
    files: Mapping[str, FileRecord] = field(
        default_factory=dict[str, "FileRecord"]
    )  # by what follows the prefix in their names


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model wants to be asked: its chat template (Jinja), and the tokens that end an answer."""

    template: str
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. temperature 0 is greedy; top_k -1 is off; `seed` None leaves the engine's own."""

    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids that go to the engine as they are. `index` is the row of the dataset; `answer` is
    the ground truth.
    """

    index: int
    token_ids: Ints  # [P]
    answer: str = ""
    extra: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled, the end-of-turn token included; `logprobs` are those of the sampling
    distribution.
    """

    token_ids: Ints  # [R]
    logprobs: Floats  # [R]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    text: str


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of one completion: the weighted total, and each source's own score by name."""

    total: float
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    rollout: RolloutGroup
    rewards: tuple[Reward, ...]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence to learn from, or, where `is_learnt` is False, to leave out. Response arrays are
    aligned with the response tokens.
    """

    prompt_ids: Ints  # [P]
    response_ids: Ints  # [R]
    advantages: Floats  # [R]
    sampler_logprobs: Floats  # [R]
    is_trained: bool = True


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences laid end to end. Everything is aligned with the token that is *predicted at* a
    position: labels[i] follows token_ids[i].

    A position without a successor in its own sequence has loss_mask False. `fields` holds further
    per-position numbers of the loss (advantages, weights, old_logprobs, reference_logprobs,
    sampler_logprobs), 0 where loss_mask is False. The last `num_padding` positions, if any, belong
    to no sequence of the batch.
    """

    token_ids: Ints  # [N]
    labels: Ints  # [N]
    loss_mask: Bools  # [N]
    cu_seqlens: NDArray[np.int32]  # [S + 1], starts with 0, ends with N
    fields: Mapping[str, Floats] = field(default_factory=dict[str, Floats])  # each [N]
    num_padding: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step (or one iteration of reinforcement) did; metric names are
    `group/name`.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()


JsonObject = dict[str, Any]
