"""Changes of the sampler in vLLM's worker that save time. Nothing here imports vllm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from msrl.rollout.inverse_cdf import draw_uniform, sample_tokens

if TYPE_CHECKING:
    from torch import Generator, Tensor

_SAMPLER, _COUNT_RANKS = "vllm.v1.sample.sampler", "batched_count_greater_than"
_FILTERS, _FILTER = "vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p"
_PROCESSED = "processed_logprobs"  # of vLLM's logprobs_mode, which msrl always sets


class SamplerChanges:
    """Methods that vLLM adds to its worker with `WeightReceiver`; `self` is that worker."""

    model_runner: Any

    def change_sampler(self) -> None:
        """Skip the ranks of tokens, and on CPU sample by the inverse distribution function.

        msrl reads no ranks. On a CPU, counting them takes 3% of a decoding step of a small model,
        and the noise of vLLM's Gumbel-max kernel takes 15%.

        If the images of running requests fill vLLM's encoder cache, only the tokens before the next
        image are computed, and the token sampled after them is discarded. vLLM then rewinds the
        generator of the request, which the generators of the CPU do not support. So on CPU, such
        requests draw no number, and no generator is rewound.
        """
        module: Any = sys.modules.get(_SAMPLER)
        if hasattr(module, _COUNT_RANKS):
            setattr(module, _COUNT_RANKS, _no_ranks)
        sampler: Any = getattr(self.model_runner.sampler, "topk_topp_sampler", None)
        on_cpu = getattr(sampler, "forward_cpu", None)
        # TopKTopPSampler.__init__ has selected the method of the platform.
        if on_cpu is not None and sampler.forward == on_cpu:
            assert sampler.logprobs_mode == _PROCESSED, sampler.logprobs_mode
            sampler.forward = partial(_sample, self.model_runner)
            # The only use of generators in this method is to rewind them.
            bookkeep = self.model_runner._bookkeeping_sync
            self.model_runner._bookkeeping_sync = partial(
                _without_generators, self.model_runner, bookkeep
            )


def _no_ranks(logprobs: Tensor, of_tokens: Tensor) -> Tensor:
    """Return zeros instead of ranks, [n], for log-probabilities [n, V] and [n, 1]."""
    import torch

    return torch.zeros(len(of_tokens), dtype=torch.int64, device=logprobs.device)


def _without_generators(runner: Any, bookkeep: Callable[..., Any], *args: Any, **keys: Any) -> Any:
    """Call the method of the model runner while its batch has no generators."""
    batch = runner.input_batch
    generators, batch.generators = batch.generators, {}
    try:
        return bookkeep(*args, **keys)
    finally:
        batch.generators = generators


def _sample(
    runner: Any,
    logits: Tensor,
    generators: Mapping[int, Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sample tokens with the arguments and results of vLLM's `TopKTopPSampler.forward_cpu`.

    Args:
        runner: vLLM's model runner, which knows the requests whose token it will discard.
        logits: [n, V], divided by the temperatures. They may be overwritten.
        generators: Generators of the requests with a seed, by index.
        k: Numbers of tokens to choose from, [n].
        p: Probabilities of the nucleus, [n].

    Returns:
        Token ids [n] and the log-probabilities of all tokens [n, V].
    """
    import torch

    filtered = getattr(sys.modules[_FILTERS], _FILTER)(logits, k, p)
    logprobs = filtered.log_softmax(-1, dtype=torch.float32)
    is_discarded = runner.discard_request_mask.np
    drawing = {index: each for index, each in generators.items() if not is_discarded[index]}
    uniform = draw_uniform(len(logprobs), drawing)
    return sample_tokens(logprobs.exp(), uniform), logprobs
