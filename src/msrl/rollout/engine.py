"""What a rollout engine is to msrl: token ids in, token ids with the log-probabilities of the sampling distribution out.

Letters: P prompt tokens, R response tokens, T = P + R. Nothing of an engine's own package is imported here.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from msrl.errors import MsrlError
from msrl.models.entries import file_names
from msrl.models.kv_cache import kv_bytes_per_token
from msrl.models.shape import Shape
from msrl.types import Floats, Ints, Prompt, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
_SEED_BITS = 62


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How to start an engine. Unset numbers: `max_model_len` is the model's own, the others are chosen from the machine.

    With `random_weights` the folder needs a config and a tokenizer only: the weights are pushed in before anything is generated.
    """

    model_dir: Path
    tokenizer_dir: Path | None = None
    dtype: str | None = None  # float32, bfloat16 or float16; unset: the config's
    tp: int = 1
    max_model_len: int | None = None  # tokens of prompt and response
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    memory_fraction: float = 0.5  # of the device's memory
    eager: bool = False
    prefix_cache: bool = True
    seed: int = 0
    random_weights: bool = False
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to an answer: its text, and how it ended with the last piece."""

    text: str
    finish_reason: Literal["stop", "length"] | None


class Engine(Protocol):
    """Generates with the weights that it was given last."""

    max_model_len: int

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int) -> tuple[RolloutGroup, ...]:
        """One group per prompt, in order. With a seed, a completion depends on its prompt's index, its number in the group and
        `policy_version` alone, not on what else is generated. A completion that meets the end of the model ends with `length`.
        Raises MsrlError for a prompt that is empty, holds ids the model has not, or leaves no room for a token."""
        ...

    def stream(self, prompt: Prompt, sampling: SamplingParams) -> Generator[Piece, None, None]:
        """The text of one completion as it is sampled; closing the iterator stops it. Nothing else may be generated meanwhile."""
        ...

    def score(self, token_ids: Sequence[Ints]) -> tuple[Floats, ...]:
        """Log-probability at temperature 1 of every token but the first given those before it: [T] in, [T - 1] out.
        T must be less than `max_model_len`."""
        ...

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights under their Hugging Face names, all of them, in any order. Raises ValueError when one is missing or unknown."""
        ...

    def forget_prompts(self) -> None:
        """Drop the keys and values that are kept of beginnings of prompts: what comes next is computed as if nothing had been asked."""
        ...

    def sleep(self) -> None:
        """Give back device memory where the platform can; only `wake` and `close` may follow."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None:
        """Stop the engine and give back all that it holds."""
        ...


def sample_seed(seed: int, policy_version: int, index: int, occurrence: int, sample: int) -> int:
    """The seed of one completion: a hash, so that neighbouring prompts, steps and samples share no stream of random numbers."""
    numbers = ",".join(map(str, (seed, policy_version, index, occurrence, sample)))
    return int.from_bytes(hashlib.blake2b(numbers.encode(), digest_size=8).digest(), "big") >> (64 - _SEED_BITS)


def sample_seeds(prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int) -> list[int | None]:
    """A seed for every sample of every prompt, prompt by prompt; None throughout where `sampling` has none.

    A prompt that is given twice gets other samples the second time.
    """
    if sampling.seed is None:
        return [None] * (len(prompts) * sampling.num_samples)
    seen = Counter[int]()
    seeds: list[int | None] = []
    for prompt in prompts:
        seeds += [sample_seed(sampling.seed, policy_version, prompt.index, seen[prompt.index], n) for n in range(sampling.num_samples)]
        seen[prompt.index] += 1
    return seeds


def check_prompt(prompt: Prompt, vocab_size: int, max_model_len: int) -> None:
    """Raises MsrlError for a prompt that the model cannot continue."""
    length = len(prompt.token_ids)
    if length == 0:
        raise MsrlError(f"prompt {prompt.index} is empty: there is nothing to continue")
    if length >= max_model_len:
        raise MsrlError(f"prompt {prompt.index} has {length} tokens, but prompt and response together may have {max_model_len}; shorten it")
    low, high = int(prompt.token_ids.min()), int(prompt.token_ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise MsrlError(f"prompt {prompt.index} holds token id {wrong}, but the model knows {vocab_size}; is it the right tokenizer?")


def stops(sampling: SamplingParams, control: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """The texts and the token ids that end a completion. `control` has the control tokens, which no text of an answer shows: a stop
    text that is one ends it as a token. Raises MsrlError for a text that holds one beside others, since it could never come."""
    texts = [stop for stop in sampling.stop if stop not in control]
    for stop in texts:
        for token in control:
            if token in stop:
                raise MsrlError(f"stop={stop!r}: {token} is a control token, which no answer's text shows; name {token!r} alone")
    named = [control[stop] for stop in sampling.stop if stop in control]
    return texts, list(dict.fromkeys((*sampling.stop_token_ids, *named)))


def expected_weights(shape: Shape) -> frozenset[str]:
    """The Hugging Face names that a whole model of this shape consists of."""
    return file_names(shape)


def checked_weights(tensors: Iterable[tuple[str, Tensor]], expected: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """`tensors` as they come. Raises ValueError at an unknown or repeated name, and at the end when a name did not come."""
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in expected or name in seen:
            raise ValueError(f"weights: {name} {'came twice' if name in seen else 'is not a weight of this model'}")
        seen.add(name)
        yield name, tensor
    missing = sorted(expected - seen)
    if missing:
        raise ValueError(f"weights: {len(missing)} of {len(expected)} did not come, the first is {missing[0]}")


def kv_cache_bytes(shape: Shape, settings: EngineSettings, dtype: str, max_model_len: int, block_tokens: int, available_bytes: int) -> int:
    """A KV cache in main memory: room for `max_num_seqs` of the longest sequences, but at most the allowed share of what is free.

    Raises MsrlError when not even one longest sequence fits into that share.
    """
    per_block = kv_bytes_per_token(shape, BYTES_PER_ELEMENT[dtype], settings.tp) * block_tokens
    blocks_per_sequence = -(-max_model_len // block_tokens)
    least = (blocks_per_sequence + 1) * per_block  # the engine keeps one block for itself
    wanted = (blocks_per_sequence * settings.max_num_seqs + 1) * per_block
    allowed = int(available_bytes * settings.memory_fraction)
    if least > allowed:
        raise MsrlError(
            f"{settings.model_dir}: the KV cache of one sequence of {max_model_len} tokens takes {least >> 20} MiB, but "
            f"{allowed >> 20} MiB may be used ({settings.memory_fraction:g} of what is free); lower max_model_len or raise memory_fraction"
        )
    return min(wanted, allowed)
