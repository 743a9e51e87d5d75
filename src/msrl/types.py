"""Frozen types that pass between stages, one per stage. No field is filled in later.

Letters: P prompt tokens, R response tokens, T = P + R tokens of a sequence, N tokens of a packed
micro-batch, S sequences in it, L mixture layers of a model, k experts per token. Arrays are numpy:
token ids int64, log-probabilities and rewards float32, masks bool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Number = TypeVar("Number", bound=np.generic)
Routes = NDArray[np.integer[Any]]
"""Numbers of the experts of every token in every mixture layer, [T, L, k] or [N, L, k].

Their type is the smallest of uint8 and int16 that holds the numbers.
"""
Role = Literal["system", "user", "assistant", "tool"]
Grid = tuple[int, int, int]
"""Frames (1), rows and columns of an image in patches."""


@dataclass(frozen=True, slots=True)
class Image:
    """Image of a row as an encoded file, such as a JPEG.

    `key` is the SHA-256 of the file: equal images have equal keys. `grid` is the size to which it
    is resized. Comparisons use both.

    `source` is the file, or a function that reads it: images of datasets stay on disk until they
    are needed. A pickled image has the file, because other machines may lack the dataset.
    """

    key: str
    grid: Grid
    source: bytes | Callable[[], bytes] = field(compare=False, repr=False)

    @property
    def data(self) -> bytes:
        """The file. Raises MsrlError if the dataset has changed."""
        return self.source if isinstance(self.source, bytes) else self.source()

    def without_file(self) -> Image:
        """Return the image without its file, which equals this one."""
        return Image(self.key, self.grid, b"")

    def __reduce__(self) -> tuple[type[Image], tuple[str, Grid, bytes]]:
        """Pickle the file in place of the function that reads it."""
        return Image, (self.key, self.grid, self.data)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Image whose first image token is token `offset` of a sequence or micro-batch."""

    offset: int
    image: Image


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `content` includes thoughts and tool calls as text. `fields` has them separately, in OpenAI's
    form, for chat templates that render them; None if role and content say everything. An answer
    with `is_trained=False` is context only: the loss mask leaves it out. `images` are the sources
    of images as the row names them; the content has one mark for each (`data/images/marks.py`).
    """

    role: Role
    content: str
    fields: Mapping[str, Any] | None = None
    is_trained: bool = True
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a dataset as messages.

    `answer` is the ground truth for verifiers. `extra` has the pass-through columns. `images` are
    the images of all messages, once their files are read.
    """

    messages: tuple[Message, ...]
    answer: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """One row of preference data.

    `conversations` are a chosen and a rejected one, which differ in the last answer only, or one
    with a label. `value` is the margin of a pair, or the label: 1 for a desirable answer and 0 for
    an undesirable one.
    """

    conversations: tuple[Conversation, ...]
    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class StepRow:
    """Text with a placeholder after each step, and the reward token of each step."""

    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """Conversation as tokens. `loss_mask` is True for tokens that are trained on.

    A text with labeled steps has `labels`: the token to predict at each placeholder, which the loss
    mask selects. `images` are in the order of their tokens.
    """

    token_ids: Ints  # [T]
    loss_mask: Bools  # [T]
    labels: Ints | None = None  # [T]
    images: tuple[PlacedImage, ...] = ()

    def truncate(self, length: int) -> RenderedExample:
        """Return the first `length` tokens, which must have all tokens of its images."""
        labels = None if self.labels is None else self.labels[:length]
        ids, mask = self.token_ids[:length], self.loss_mask[:length]
        return replace(self, token_ids=ids, loss_mask=mask, labels=labels)


@dataclass(frozen=True, slots=True)
class RenderedPreference:
    """Row of preference data as tokens. The loss masks cover the last answers only."""

    sides: tuple[RenderedExample, ...]  # chosen and rejected, or one with a label
    value: float
    weight: float


class FileRecord(TypedDict):
    """Size in bytes and CRC-32 (eight hexadecimal digits) of a complete file."""

    bytes: int
    crc32: str


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """Manifest of preprocessed data, stored beside it as JSON."""

    kind: Literal["pretrain", "sft", "prompts", "pairs", "labeled", "steps"]
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
    num_without_answer: int = 0  # prompts without a ground truth
    # Template as Jinja. It is empty for plain text and for the tokenizer's own template.
    chat_template: str = ""
    date: str = ""  # day that the chat template may write into the rows (YYYY-MM-DD)
    # Files by the part of their name that follows the prefix.
    files: Mapping[str, FileRecord] = field(default_factory=dict[str, "FileRecord"])
    # Settings of the images, their number, and the version of Pillow. Empty without images.
    vision: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Chat template (Jinja) of a model, and the tokens that end a response."""

    template: str
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling.

    Temperature 0 decodes greedily, and top_k -1 disables top-k. `seed` None uses the seed of the
    engine. With `with_routes`, completions have the routes of the engine, which must record them.
    Without `with_logprobs`, they have no log-probabilities, which saves a softmax of all logits.
    """

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
    with_routes: bool = False
    with_logprobs: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt as token ids, which the engine receives unchanged.

    `index` is the row of the dataset, and `answer` is the ground truth. `images` are in the order
    of their tokens.
    """

    index: int
    token_ids: Ints  # [P]
    answer: str = ""
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    images: tuple[PlacedImage, ...] = ()


def without_images(prompt: Prompt) -> Prompt:
    """Return a prompt without its images, for a reader that has them."""
    return replace(prompt, images=())


FinishReason = Literal["stop", "length", "turns", "time", "fault"]
"""End of a response or an episode.

- "stop": a stop token, or the environment ended the episode.
- "length": the limit of tokens.
- "turns", "time": the limits of turns and seconds of an episode.
- "fault": the environment failed.
"""


class VersionRun(NamedTuple):
    """Consecutive tokens of a response that one policy version sampled."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Sequence of tokens in which the policy sampled some.

    `routes` are the experts that the engine chose. The last token was sampled, but not read.
    `images` are those of the prompt.
    """

    token_ids: Ints  # [T]
    is_sampled: Bools  # [T]
    routes: Routes | None = None  # [T - 1, L, k]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """Turn of an episode: an answer of the policy, and the reply of the environment.

    Attributes:
        num_tokens: Number of sampled tokens.
        state: Digest of the state in which the turn began.
        finish_reason: End of the answer.
        reward: Reward of the turn; None leaves it to the reward sources.
        generation_s: Seconds from the request of the answer to its last token.
        environment_s: Seconds in which the episode waited for the reply.
        tool_calls: Tool calls of the answer, each with name, arguments and error.
        is_invalid: True if the answer was no action of the environment.
    """

    num_tokens: int
    state: str
    finish_reason: Literal["stop", "length"]
    reward: float | None = None
    generation_s: float = 0.0
    environment_s: float = 0.0
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    is_invalid: bool = False


@dataclass(frozen=True, slots=True)
class Episode:
    """Several turns with an environment.

    Attributes:
        sequences: Token sequences; a new one begins where the history was edited. Their sampled
            tokens, end to end, equal the tokens of the completion.
        turns: Turns in order. Their tokens, end to end, equal the tokens of the completion.
        messages: Conversation as {role, content}. A rendered prompt has the role `prompt`.
        success: True or False if the environment reports it.
        fault: Kind and detail of the environment's failure; empty without one.
        truncated_messages: Number of messages that were too long and truncated.
        environment: Name of the environment in `environment.mixture`; empty without a mixture.
        repeats: Number of times that the episode began again, since its environment was killed.
    """

    sequences: tuple[TokenSequence, ...]
    turns: tuple[EpisodeTurn, ...]
    messages: tuple[Mapping[str, Any], ...]
    success: bool | None = None
    fault: tuple[str, str] = ("", "")
    truncated_messages: int = 0
    environment: str = ""
    repeats: int = 0

    @property
    def reward(self) -> float | None:
        """Sum of the rewards of the turns; None if the environment gave none."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        return sum(rewards) if rewards else None


@dataclass(frozen=True, slots=True)
class Completion:
    """Response of the engine, including the end-of-turn token.

    `logprobs` are log-probabilities under the sampling distribution, of the version that sampled
    the token. `policy_version` is the oldest of these versions. `versions` lists them in the order
    of the tokens; it is empty if the response was generated without an update in between.

    With `episode`, the tokens are all sampled tokens of the episode, end to end, and the text has
    the answers of all turns.

    `routes` are the experts that the engine chose for prompt and response, without the last token,
    which it did not read. With `episode`, its sequences have them.
    """

    token_ids: Ints  # [R]
    logprobs: Floats  # [R], or [0] without log-probabilities
    finish_reason: FinishReason
    policy_version: int
    text: str
    versions: tuple[VersionRun, ...] = ()
    episode: Episode | None = None
    routes: Routes | None = None  # [P + R - 1, L, k]

    @property
    def version_runs(self) -> tuple[VersionRun, ...]:
        """Policy versions of all tokens as run lengths."""
        return self.versions or (VersionRun(self.policy_version, len(self.token_ids)),)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    @property
    def num_tokens(self) -> int:
        """Number of response tokens of all completions."""
        return sum(len(completion.token_ids) for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Reward:
    """Reward of one completion.

    Attributes:
        total: Weighted sum of the scores. If it is not decided, the mean of its group.
        scores: Score of each source by name, without sources that did not decide.
        is_decided: False if a source with a weight did not decide, or the environment failed. The
            completion then has no advantage and counts in no statistic of rewards.
    """

    total: float
    scores: Mapping[str, float]
    is_decided: bool = True


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Completions of one prompt with their rewards.

    `greedy` is a group of one greedy completion of the prompt, if the advantage estimator compares
    with it.
    """

    rollout: RolloutGroup
    rewards: tuple[Reward, ...]
    greedy: ScoredGroup | None = None

    @property
    def is_decided(self) -> list[bool]:
        """Completions whose reward all sources decided."""
        return [reward.is_decided for reward in self.rewards]

    @property
    def tag(self) -> str:
        """Tag of the row, else the name of its environment; empty without both."""
        episode = self.rollout.completions[0].episode
        return self.rollout.prompt.extra.get("tag") or (
            "" if episode is None else episode.environment
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Concatenated sequences. Arrays are aligned with the predicting position.

    labels[i] is the token after token_ids[i]. A position without a successor in its sequence has
    loss_mask False. `fields` holds further per-position values of the loss (advantages, weights,
    old_logprobs, reference_logprobs, sampler_logprobs), which are 0 where loss_mask is False. The
    last `num_padding` positions, if any, belong to no sequence of the batch. `routes` are the
    experts that a pass replays, where `is_routed` is True; None means every position. `images` are
    in the order of their offsets.
    """

    token_ids: Ints  # [N]
    labels: Ints  # [N]
    loss_mask: Bools  # [N]
    cu_seqlens: NDArray[np.int32]  # [S + 1], starts with 0, ends with N
    fields: Mapping[str, Floats] = field(default_factory=dict[str, Floats])  # each [N]
    num_padding: int = 0
    routes: Routes | None = None  # [N, L, k]
    is_routed: Bools | None = None  # [N]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class StageRoutes:
    """Routes that a pass recorded in the mixture layers of one pipeline stage.

    Attributes:
        layers: Numbers of these layers among the mixture layers of the model.
        micro_batches: Routes of each micro-batch, [N, l, k] for l layers.
    """

    layers: tuple[int, ...]
    micro_batches: tuple[Routes, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of one optimizer step, or of one train-grpo step. Metric names are `group/name`."""

    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()


JsonObject = dict[str, Any]
