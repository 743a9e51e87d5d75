"""Interface of rollout engines.

They take token ids and return token ids with log-probabilities of the sampling distribution.

No engine package is imported here.

Letters: P prompt tokens, R response tokens, T = P + R, L mixture layers, k experts per token.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from msrl.config.sections.rollout import EngineConfig
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.models.entries import file_names
from msrl.models.kv_cache import cache_blocks
from msrl.models.shape import Shape
from msrl.platforms.base import Platform
from msrl.types import Floats, Ints, PlacedImage, Prompt, RolloutGroup, Routes, SamplingParams
from msrl.vision.settings import VisionSettings
from msrl.vision.sizes import image_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.rollout.weights.digest import Digests

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK_TOKENS = 128  # of vLLM's KV cache in main memory
_SEED_BITS = 62


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Endpoint of an engine's metrics. `run` is the label `model_name` of vLLM's series."""

    port: int
    run: str


@dataclass(frozen=True, slots=True)
class EngineImages:
    """Images of prompts: the largest number in a prompt, and how they become patches."""

    max_images: int
    vision: VisionSettings


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings for starting an engine.

    Without `engine.max_model_len`, the limit is the model's own.
    With `random_weights`, the folder needs only a config and a tokenizer: weights are loaded with
    `load_weights` before anything is generated.
    With `weight_backend`, vLLM's weight transfer engine of this name receives weights.
    With `is_stepped`, the engine can be used as a `StepEngine`.
    With `records_routes`, it records the experts of every token, for `SamplingParams.with_routes`.
    With `metrics`, vLLM counts requests, tokens and times, and Prometheus can read them.
    With `images`, prompts may have images; otherwise the engine has no vision tower.
    """

    model_dir: Path
    tokenizer_dir: Path | None = None
    dtype: str | None = None  # float32, bfloat16 or float16; None: the config's dtype
    logits_dtype: str | None = None  # of the output layer's product; None: `dtype`
    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 0
    random_weights: bool = False
    weight_backend: str | None = None
    verbose: bool = False
    is_stepped: bool = False
    records_routes: bool = False
    metrics: EngineMetrics | None = None
    images: EngineImages | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one step added to a completion, and the finish reason with the last piece."""

    text: str
    finish_reason: Literal["stop", "length"] | None


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that one step added to a request, and the finish reason with the last ones.

    The last ones have the routes of the request, if it requested them.
    """

    request: str
    token_ids: Ints  # [R]
    logprobs: Floats  # [R]
    finish_reason: Literal["stop", "length"] | None
    routes: Routes | None = None  # [T - 1, L, k]


class StepEngine(Protocol):
    """An engine whose steps the caller runs, so that weights can change between two steps."""

    def add_request(
        self, request: str, prompt: Prompt, sampling: SamplingParams, seed: int | None, salt: str
    ) -> None:
        """Add a request for one completion. Requests share cached keys only under equal salts.

        Raises:
            MsrlError: The prompt is invalid, as in `Engine.generate`.
        """
        ...

    def step(self) -> list[NewTokens]:
        """Sample the next tokens of the running requests."""
        ...

    def abort_requests(self, requests: Sequence[str]) -> None:
        """Remove requests."""
        ...

    def recompute_requests(self) -> None:
        """Drop all cached keys and values; running requests compute theirs again."""
        ...

    def text(self, token_ids: Ints) -> str:
        """Return the decoded text of a completion, without control tokens."""
        ...


class Engine(Protocol):
    """An engine that generates with the weights that were loaded last."""

    max_model_len: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        policy_version: int,
        *,
        on_finished: Callable[[int], object] | None = None,
    ) -> tuple[RolloutGroup, ...]:
        """Return one group per prompt, in order.

        `on_finished` is called with numbers of completions as they finish, for a progress display.
        With a seed, a completion depends only on its prompt's index, its number in the group and
        `policy_version`, not on the other prompts. A completion that reaches the model's maximum
        length has the finish reason `length`.

        Raises:
            MsrlError: A prompt is empty, contains ids outside of the vocabulary, or leaves no room
                for a response token.
        """
        ...

    def stream(self, prompt: Prompt, sampling: SamplingParams) -> Generator[Piece, None, None]:
        """Yield the text of one completion as it is sampled; closing the iterator aborts it.

        Nothing else may be generated during this call.
        """
        ...

    def score(
        self, token_ids: Sequence[Ints], images: Sequence[tuple[PlacedImage, ...]] = ()
    ) -> tuple[Floats, ...]:
        """Return the log-probability of every token but the first, given the previous ones.

        Input: [T], output: [T - 1], at temperature 1. T must be less than `max_model_len`. `images`
        are the images of each sequence; without them, no sequence has images.
        """
        ...

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, verify: bool = False
    ) -> Sequence[Digests]:
        """Load new weights under their Hugging Face names, in any order. All weights are required.

        Returns:
            With `verify`, the digests of the weights in each process of the engine, as they are
            before the engine packs them.

        Raises:
            ValueError: A weight is missing or unknown.
        """
        ...

    def forget_prompts(self) -> None:
        """Drop cached keys and values of prompts, and features of their images."""
        ...

    def sleep(self, *, discard_weights: bool = False) -> None:
        """Release device memory as `rollout.engine.sleep` says; only `wake` and `close` may follow.

        At level 2, `discard_weights` discards the weights, which the caller will replace.
        """
        ...

    def wake(self, *, before_loading: bool = False) -> None:
        """Take device memory again.

        With `before_loading`, the KV cache waits for `load_weights`, which must follow. After
        discarded weights, generating before `load_weights` raises RuntimeError.
        """
        ...

    def close(self) -> None:
        """Stop the engine and release all of its resources."""
        ...


def sample_seed(seed: int, policy_version: int, index: int, occurrence: int, sample: int) -> int:
    """Return the seed of one completion.

    It is a hash, so that the random streams of adjacent prompts, steps and samples are independent.
    """
    numbers = ",".join(map(str, (seed, policy_version, index, occurrence, sample)))
    return int.from_bytes(hashlib.blake2b(numbers.encode(), digest_size=8).digest(), "big") >> (
        64 - _SEED_BITS
    )


def sample_seeds(
    prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int
) -> list[int | None]:
    """Return a seed for every sample of every prompt, prompt by prompt.

    All are None if `sampling` has no seed. A prompt that occurs twice gets different samples the
    second time.
    """
    if sampling.seed is None:
        return [None] * (len(prompts) * sampling.num_samples)
    seen = Counter[int]()
    seeds: list[int | None] = []
    for prompt in prompts:
        seeds += [
            sample_seed(sampling.seed, policy_version, prompt.index, seen[prompt.index], n)
            for n in range(sampling.num_samples)
        ]
        seen[prompt.index] += 1
    return seeds


def check_prompt(prompt: Prompt, vocab_size: int, max_model_len: int) -> None:
    """Check that the model can continue a prompt.

    Raises:
        MsrlError: The prompt is empty or too long, or has ids outside of the vocabulary.
    """
    length = len(prompt.token_ids)
    if length == 0:
        raise MsrlError(f"prompt {prompt.index}: the prompt is empty. Pass at least one token.")
    if length >= max_model_len:
        raise MsrlError(
            f"prompt {prompt.index}: has {length} tokens, but prompt and response together may "
            f"have at most {max_model_len}. Shorten the prompt."
        )
    low, high = int(prompt.token_ids.min()), int(prompt.token_ids.max())
    if low < 0 or high >= vocab_size:
        invalid = low if low < 0 else high
        raise MsrlError(
            f"prompt {prompt.index}: token id {invalid} is outside of the model's vocabulary "
            f"of {vocab_size}. Check that the tokenizer belongs to the model."
        )


def check_images(prompt: Prompt, images: EngineImages | None) -> None:
    """Check that the engine can read the images of a prompt.

    Raises:
        MsrlError: The engine reads no images or not so many, or an image has other tokens.
    """
    where, number = f"prompt {prompt.index}", len(prompt.images)
    if not number:
        return
    if images is None:
        raise MsrlError(f"{where}: has images, but the engine reads text only. Remove the images.")
    if number > images.max_images:
        raise MsrlError(
            f"{where}: has {number} images, but the engine reads at most {images.max_images} in a "
            "prompt. Use fewer images."
        )
    vision, end = images.vision, 0
    for placed in prompt.images:
        start, end_before = placed.offset, end
        end = start + image_tokens(placed.image.grid, vision.merge_size)
        ids = prompt.token_ids[start:end]
        if start < end_before or len(ids) < end - start or (ids != vision.image_token_id).any():
            raise MsrlError(
                f"{where}: the image of {end - start} tokens at token {start} has other tokens "
                "there. Preprocess the data again for this model."
            )


def check_stops(key: str, stops: Sequence[str], tokenizer: TextTokenizer) -> None:
    """Check stop texts before an engine starts. Raises MsrlError as `stop_conditions` does."""
    added = tokenizer.backend.get_added_tokens_decoder()
    control = {token.content: number for number, token in added.items() if token.special}
    stop_conditions(SamplingParams(max_tokens=1, stop=tuple(stops)), control, key=key)


def stop_conditions(
    sampling: SamplingParams, control: Mapping[str, int], *, key: str = "stop"
) -> tuple[list[str], list[int]]:
    """Return the stop texts and the token ids that end a completion.

    `control` are the control tokens, which do not appear in the text of a completion; a stop text
    that is one of them becomes a token id.

    Raises:
        MsrlError: A stop text contains a control token besides other text, so it could never match.
    """
    texts = [stop for stop in sampling.stop if stop not in control]
    for stop in texts:
        for token in control:
            if token in stop:
                raise MsrlError(
                    f"{key}={stop!r}: {token} is a control token, which the text of a "
                    f"completion never contains. Use {token!r} as a separate stop."
                )
    control_ids = [control[stop] for stop in sampling.stop if stop in control]
    return texts, list(dict.fromkeys((*sampling.stop_token_ids, *control_ids)))


def expected_weights(shape: Shape) -> frozenset[str]:
    """Return the Hugging Face names of all weights of a model of this shape."""
    return file_names(shape)


def checked_weights(
    tensors: Iterable[tuple[str, Tensor]], expected: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors` and check their names.

    Raises:
        ValueError: A name is unknown or repeated, or at the end, a name is missing.
    """
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in expected or name in seen:
            raise ValueError(
                f"weights: {name} "
                f"{'occurs twice' if name in seen else 'is not a weight of this model'}"
            )
        seen.add(name)
        yield name, tensor
    missing = sorted(expected - seen)
    if missing:
        raise ValueError(
            f"weights: {len(missing)} of {len(expected)} are missing, the first is {missing[0]}"
        )


def sleep_level(engine: EngineConfig, platform: Platform) -> int:
    """Return the sleep level of an engine, by default 1 where the platform has sleep mode."""
    has_sleep_mode = bool(platform.engine_arguments().get("enable_sleep_mode"))
    return int(has_sleep_mode) if engine.sleep is None else engine.sleep


def is_eager(engine: EngineConfig, platform: Platform) -> bool:
    """Return True if an engine neither captures graphs nor compiles, by default on CPU."""
    return platform.is_eager if engine.eager is None else engine.eager


def check_platform(engine: EngineConfig, platform: Platform) -> None:
    """Check that a platform supports the engine's settings.

    Raises:
        MsrlError: It has no sleep mode, or sets an engine argument of `options` itself.
    """
    arguments = platform.engine_arguments()
    if engine.sleep and not arguments.get("enable_sleep_mode"):
        raise MsrlError(
            f"rollout.engine.sleep={engine.sleep}: vLLM has no sleep mode on {platform.name}. "
            "Remove it or set it to 0."
        )
    for name in engine.options:
        if name in arguments:
            raise MsrlError(
                f"rollout.engine.options.{name}: vLLM needs {name}={arguments[name]} on "
                f"{platform.name}. Remove it."
            )


def kv_cache_bytes(
    shape: Shape,
    settings: EngineSettings,
    dtype: str,
    max_model_len: int,
    available_bytes: int,
) -> int:
    """Return the size of vLLM's cache in main memory.

    By default, it holds `max_num_seqs` sequences of maximum length, but uses at most the configured
    fraction of the free memory.

    Raises:
        MsrlError: A single sequence of maximum length does not fit into it.
    """
    engine = settings.engine
    tokens = int(engine.options.get("block_size", BLOCK_TOKENS))
    blocks = cache_blocks(shape, BYTES_PER_ELEMENT[dtype], engine.tp, tokens)
    per_sequence = blocks.per_sequence(max_model_len)
    minimum = (per_sequence + 1) * blocks.num_bytes  # the engine reserves one block
    requested = (per_sequence * engine.max_num_seqs + 1) * blocks.num_bytes
    needed = f"the KV cache of one sequence of {max_model_len} tokens takes {minimum >> 20} MiB"
    explicit = engine.kv_cache_bytes
    if explicit is not None:
        # Blocks of latent attention are smaller on some processors.
        if explicit < minimum and shape.mla is None:
            raise MsrlError(
                f"rollout.engine.kv_cache_bytes={explicit}: {needed} ({minimum} bytes) in "
                f"{settings.model_dir}. Raise it or lower max_model_len."
            )
        return explicit
    limit = int(available_bytes * engine.memory_fraction)
    if minimum > limit:
        raise MsrlError(
            f"{settings.model_dir}: {needed}, but only "
            f"{limit >> 20} MiB may be used ({engine.memory_fraction:g} of the free memory). "
            "Lower max_model_len or raise memory_fraction."
        )
    return min(requested, limit)
