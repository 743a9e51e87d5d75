"""vLLM as a rollout engine, inside this process if one device suffices (API of vLLM 0.23 to 0.32).

Functions import vllm, because the environment must be set before. With several devices, vLLM starts
a process for each. New weights reach them through shared memory (`vllm_weights.py`), since vLLM's
control channel cannot transfer tensors.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from msrl import temporary
from msrl.errors import MsrlError, RunFailedError
from msrl.limits import print_note, printable
from msrl.models.families import load_shape
from msrl.platforms import bind_stores, share_gloo_devices
from msrl.platforms._quiet import quiet_processes  # no import of its package: it is a main module
from msrl.platforms.base import Platform
from msrl.processes.interpreter import no_collections
from msrl.rollout.engine import (
    EngineSettings,
    NewTokens,
    Piece,
    check_images,
    check_prompt,
    is_eager,
    sample_seeds,
    sleep_level,
    stop_conditions,
)
from msrl.rollout.engine_arguments import engine_arguments
from msrl.rollout.engine_limits import check_limits, model_length
from msrl.rollout.images.inputs import ImageInputs, run_rendered
from msrl.rollout.images.processors import VARIABLE, class_variable, prepare_process
from msrl.rollout.routed_requests import RoutedRequests
from msrl.rollout.runtime.finished_requests import progress_class
from msrl.rollout.sleep import EngineMemory
from msrl.rollout.vllm_routes import ROUTES_KEY
from msrl.rollout.vllm_weights import send_to_workers
from msrl.rollout.weights.channel import WeightChannel
from msrl.rollout.weights.digest import Digests
from msrl.tracking.prometheus import MetricsServer
from msrl.types import (
    Completion,
    Floats,
    Ints,
    PlacedImage,
    Prompt,
    RolloutGroup,
    SamplingParams,
)

if TYPE_CHECKING:
    from torch import Tensor

_BUCKET_BYTES = 1 << 26  # of weights for the processes of several devices
_TRANSFER_S = 600.0  # until such a process must have read the next bucket
_FINISHED = ("stop", "length")
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # by default in the temporary folder
# They report the loss of a process in this one, with all settings. msrl has a message for it.
_LOSS_LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.logging_utils.dump_input")
# Errors of vLLM's start if a process of the engine has ended, whose reason is in its logs.
_LOST_AT_START = ("WorkerProc initialization failed", "Engine core initialization failed")


class VllmEngine:
    """Implementation of `msrl.rollout.engine.Engine`."""

    def __init__(self, settings: EngineSettings, platform: Platform) -> None:
        """Start the engine, which takes seconds.

        Raises:
            MsrlError: vLLM cannot serve this model with these settings.
            RunFailedError: A process of the engine has ended.
        """
        check_limits(settings, platform)
        self._shape = load_shape(settings.model_dir)
        self._settings = settings
        self.max_model_len = model_length(settings, self._shape)
        _prepare_environment(platform, settings)
        import torch

        # vLLM's CPU worker replaces it by a function that only warns (v1/worker/cpu_worker.py).
        self._set_num_threads = torch.set_num_threads
        # If not, vLLM creates torch's default group in this process, and `close` destroys it.
        self._torch_was_distributed = torch.distributed.is_initialized()
        # vLLM registers its metrics in the registry of the process.
        self._metrics = settings.metrics and MetricsServer(settings.metrics.port)
        self._folder = temporary.claim(Path(tempfile.mkdtemp(prefix="msrl-engine-")))
        try:
            self._llm = _start(
                engine_arguments(settings, self._shape, platform),
                settings,
                self._folder,
            )
        except BaseException:
            temporary.remove(self._folder)
            self._end_metrics()
            raise
        self._tokenizer = self._llm.get_tokenizer()
        self._control = {
            token.content: number
            for number, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._memory = EngineMemory(self._llm, sleep_level(settings.engine, platform))
        self._routed = RoutedRequests(self.call_workers)
        self._images = self._image_inputs()
        self.call_workers("change_sampler")
        if platform.token_multiple(torch.bfloat16) > 1 and is_eager(settings.engine, platform):
            self.call_workers("pad_products")
        has_graphs = settings.random_weights and settings.engine.eager is False
        self._checks_addresses = has_graphs and platform.checks_addresses
        if self._checks_addresses:
            self.call_workers("record_addresses")
        if settings.logits_dtype is not None:
            self._check_logits(settings.logits_dtype)
        if settings.records_routes:
            self._begin_recording()

    def _image_inputs(self) -> ImageInputs | None:
        """Return what makes inputs of prompts with images, or None for text only."""
        if self._settings.images is None:
            return None
        # MultiModalConfig of vLLM 0.29 and later; earlier versions have no such option.
        config = self._llm.llm_engine.model_config.multimodal_config
        normalizes = getattr(config, "mm_device_do_normalize", False)
        return ImageInputs(self._settings.images, is_normalized=not normalizes)

    def _input(self, prompt: Prompt) -> dict[str, Any]:
        """Check a prompt and return it in vLLM's form.

        Raises:
            MsrlError: The prompt or an image of it is invalid.
        """
        check_prompt(prompt, self._shape.vocab_size, self.max_model_len)
        check_images(prompt, self._settings.images)
        if self._images is None or not prompt.images:
            return {"prompt_token_ids": prompt.token_ids.tolist()}
        return self._images.make(prompt.token_ids, prompt.images)

    def _run(
        self, inputs: Sequence[dict[str, Any]], params: Sequence[Any], bar: Any = False
    ) -> list[Any]:
        """Return vLLM's output of each input; `bar` is the argument `use_tqdm` of vLLM.

        `LLM.generate` takes no rendered inputs, so those are added to the engine itself.
        """
        if not inputs:
            return []
        if not any("mm_kwargs" in content for content in inputs):
            return self._llm.generate(list(inputs), list(params), use_tqdm=bar)
        return run_rendered(self._llm, inputs, params, bar)

    def _check_logits(self, dtype: str) -> None:
        """Close the engine if its model rounds logits to another dtype than this one.

        Models and plugins of vLLM may have an output layer of their own.
        """
        actual = self.call_workers("describe_logits")[0]
        if actual != dtype:
            self.close()
            raise MsrlError(
                f"model.logits_dtype={dtype}: the engine's class of this model computes its logits "
                f"in {actual} ({self._settings.model_dir}). Remove the key."
            )

    def _begin_recording(self) -> None:
        """Record routes from now on; close the engine if vLLM does not show them."""
        assert self._shape.moe is not None, "a dense model has no routes"
        try:
            self._routed.begin(sum(self._shape.mixture_layers), self._shape.moe)
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        policy_version: int,
        *,
        on_finished: Callable[[int], object] | None = None,
    ) -> tuple[RolloutGroup, ...]:
        self._memory.check_ready()
        # One request per sample instead of vLLM's `n`: each has its own seed.
        copies = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
        inputs = [self._input(prompt) for prompt in copies]
        seeds = sample_seeds(prompts, sampling, policy_version)
        keys = self._routed.new_keys(len(copies))
        params = [
            self._params(prompt, sampling, seed, key)
            for prompt, seed, key in zip(copies, seeds, keys, strict=True)
        ]
        bar = on_finished is not None and progress_class(on_finished)
        outputs = self._run(inputs, params, bar)
        results = [self._completion(output.outputs[0], policy_version) for output in outputs]
        if sampling.with_routes:
            results = self._routed.add_routes(copies, results, keys)
        completions = iter(results)
        return tuple(
            RolloutGroup(prompt, tuple(islice(completions, sampling.num_samples)))
            for prompt in prompts
        )

    def stream(self, prompt: Prompt, sampling: SamplingParams) -> Generator[Piece, None, None]:
        from vllm.sampling_params import RequestOutputKind

        self._memory.check_ready()
        content = self._input(prompt)
        params = self._params(prompt, sampling, sampling.seed)
        # DELTA: a step returns its new text only. Nothing reads the log-probabilities.
        params.detokenize, params.output_kind, params.logprobs = True, RequestOutputKind.DELTA, None
        engine, request = self._llm.llm_engine, str(next(self._llm.request_counter))
        engine.add_request(request, content, params)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    reason = output.outputs[0].finish_reason
                    yield Piece(
                        output.outputs[0].text, None if reason is None else _finish_reason(reason)
                    )
        finally:
            engine.abort_request([request])

    def add_request(
        self, request: str, prompt: Prompt, sampling: SamplingParams, seed: int | None, salt: str
    ) -> None:
        from vllm.sampling_params import RequestOutputKind

        # vLLM hashes the salt into the first block, so no prefix is shared across salts.
        content = {**self._input(prompt), "cache_salt": salt}
        params = self._params(prompt, sampling, seed, request)
        # Otherwise each step returns all tokens so far again.
        params.output_kind = RequestOutputKind.DELTA
        if sampling.with_routes:
            self._routed.start(request, len(prompt.token_ids))
        self._llm.llm_engine.add_request(request, content, params)

    def step(self) -> list[NewTokens]:
        outputs = [
            _new_tokens(output.request_id, output.outputs[0])
            for output in self._llm.llm_engine.step()
        ]
        return self._routed.add_step_routes(outputs)

    def abort_requests(self, requests: Sequence[str]) -> None:
        self._llm.llm_engine.abort_request(list(requests))
        self._routed.abort(requests)

    def recompute_requests(self) -> None:
        # Scheduler.reset_prefix_cache (vLLM 0.23 to 0.32) moves running requests back to the
        # queue with their tokens. The next step computes their keys and values from all tokens.
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not clear the keys and values of the running requests")

    def text(self, token_ids: Ints) -> str:
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def encode(self, text: str) -> Ints:
        """Return the token ids of a text, without the tokens that a tokenizer adds at its ends."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(ids, dtype=np.int64)

    def score(
        self, token_ids: Sequence[Ints], images: Sequence[tuple[PlacedImage, ...]] = ()
    ) -> tuple[Floats, ...]:
        outputs = self._score(token_ids, images)
        return tuple(
            _logprobs(ids[1:], output.prompt_logprobs)
            for ids, output in zip(token_ids, outputs, strict=True)
        )

    def score_ranked(
        self,
        token_ids: Sequence[Ints],
        *,
        on_finished: Callable[[int], object] | None = None,
    ) -> tuple[tuple[Floats, Ints], ...]:
        """Return the log-probability and the rank of each token after the first, [T - 1] each.

        Rank 1 is the likeliest token. Sequences are reported as they finish.
        """
        bar = on_finished is not None and progress_class(on_finished)
        outputs = self._score(token_ids, (), bar)
        return tuple(
            (
                _logprobs(ids[1:], output.prompt_logprobs),
                np.asarray(output.prompt_logprobs.ranks, dtype=np.int64),
            )
            for ids, output in zip(token_ids, outputs, strict=True)
        )

    def _score(
        self,
        token_ids: Sequence[Ints],
        images: Sequence[tuple[PlacedImage, ...]],
        bar: Any = False,
    ) -> list[Any]:
        """Return vLLM's outputs with the log-probabilities of prompts, as `_run`."""
        import vllm

        self._memory.check_ready()
        placed = images or [()] * len(token_ids)
        inputs = [
            self._input(Prompt(index, ids, images=own))
            for index, (ids, own) in enumerate(zip(token_ids, placed, strict=True))
        ]
        # vLLM must sample a token, which is ignored. Its temperature does not scale these logits
        # (GPUModelRunner._get_prompt_logprobs_dict).
        params = vllm.SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        return self._run(inputs, [params] * len(inputs), bar)

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, verify: bool = False
    ) -> tuple[Digests, ...]:
        self._memory.check_loadable()
        model_dir = str(self._settings.model_dir)
        # With one device, vLLM's worker is an object of this process and takes an iterator.
        if self._settings.engine.tp == 1:
            arguments = (tensors, model_dir, verify)
            digests = self._llm.collective_rpc("load_tensors", args=arguments)
        else:
            digests = self._load_in_workers(tensors, model_dir, verify)
        self._memory.finish_loading()
        self._check_addresses()
        self.forget_prompts()
        return tuple(digests) if verify else ()

    def _load_in_workers(
        self, tensors: Iterable[tuple[str, Tensor]], model_dir: str, verify: bool
    ) -> list[Digests]:
        """Load weights in the processes of all devices, and return their digests."""
        num_workers = self._settings.engine.tp
        channel = WeightChannel(_BUCKET_BYTES, _TRANSFER_S)
        with ThreadPoolExecutor(max_workers=1) as executor:
            sending = executor.submit(send_to_workers, channel, tensors, num_workers)
            # If the tensors cannot be read, closing the connections ends the workers' calls.
            sending.add_done_callback(lambda _: channel.close())
            address = (channel.address.machine, channel.address.name)
            arguments = (address, model_dir, _TRANSFER_S, verify)
            try:
                return self._llm.collective_rpc("load_channel", args=arguments)
            except Exception:
                # A failed sender closes the connections: its error is the cause.
                if sending.done():
                    sending.result()
                raise
            finally:
                channel.close()

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of vLLM's workers and return the result of each."""
        return self._llm.collective_rpc(method, args=arguments)

    def finish_device_loading(self) -> None:
        """Prepare to generate with weights that vLLM's weight transfer engine has loaded."""
        self._memory.finish_loading()
        self._check_addresses()
        self.forget_prompts()

    def _check_addresses(self) -> None:
        """Check that captured graphs read the weights that were loaded.

        Raises:
            MsrlError: A tensor of the model has moved.
        """
        if not self._checks_addresses:
            return
        moved = sorted({name for names in self.call_workers("moved_tensors") for name in names})
        if moved:
            raise MsrlError(
                f"rollout.engine.eager=false: new weights have moved {len(moved)} tensors of the "
                f"model, the first is {moved[0]}. Captured graphs would read the old ones: remove "
                "the key."
            )

    def forget_prompts(self) -> None:
        self._llm.reset_prefix_cache()
        if self._images is not None:
            # `reload_weights` clears the features in the workers, but the scheduler knows of them
            # (EncoderCacheManager). Transfers from device to device clear neither.
            self._llm.llm_engine.reset_encoder_cache()

    def sleep(self, *, discard_weights: bool = False) -> None:
        self._memory.release(discard_weights=discard_weights)

    def wake(self, *, before_loading: bool = False) -> None:
        self._memory.take(before_loading=before_loading)

    def close(self) -> None:
        import torch
        from vllm.distributed.parallel_state import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        if not self._torch_was_distributed:
            destroy_model_parallel()
            destroy_distributed_environment()
        torch.set_num_threads = self._set_num_threads
        gc.collect()
        temporary.remove(self._folder)
        self._end_metrics()

    def _end_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def release(self) -> None:
        """End the engine's processes and remove its files before this process is killed.

        The memory of this process is not released.
        """
        if self._settings.engine.tp > 1:
            self._llm.llm_engine.engine_core.shutdown()
        temporary.remove(self._folder)

    def _params(
        self, prompt: Prompt, sampling: SamplingParams, seed: int | None, key: str = ""
    ) -> Any:
        """Return vLLM's parameters of one completion, whose routes are kept under `key`.

        Text is decoded afterwards unless vLLM must look for a stop text.
        """
        assert self._settings.records_routes or not sampling.with_routes
        import vllm

        texts, token_ids = stop_conditions(sampling, self._control)
        routes: dict[str, Any] = {"extra_args": {ROUTES_KEY: key}} if sampling.with_routes else {}
        return vllm.SamplingParams(
            max_tokens=min(sampling.max_tokens, self.max_model_len - len(prompt.token_ids)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop=texts,
            stop_token_ids=token_ids,
            seed=seed,
            ignore_eos=sampling.ignore_eos,
            # The log-probability of the sampled token only.
            logprobs=0 if sampling.with_logprobs else None,
            flat_logprobs=True,
            detokenize=bool(texts),
            **routes,
        )

    def _completion(self, output: Any, policy_version: int) -> Completion:
        token_ids = np.asarray(output.token_ids, dtype=np.int64)
        return Completion(
            token_ids,
            _logprobs(token_ids, output.logprobs),
            _finish_reason(output.finish_reason),
            policy_version,
            self.text(token_ids),
        )


def _new_tokens(request: str, output: Any) -> NewTokens:
    token_ids = np.asarray(output.token_ids, dtype=np.int64)
    reason = None if output.finish_reason is None else _finish_reason(output.finish_reason)
    return NewTokens(request, token_ids, _logprobs(token_ids, output.logprobs), reason)


def _logprobs(token_ids: Ints, flat: Any) -> Floats:
    """Return the log-probability of each token from vLLM's `FlatLogprobs` of these tokens.

    They are empty if `flat` is None.
    """
    if flat is None:
        return np.zeros(0, np.float32)
    assert flat.token_ids == token_ids.tolist(), "vLLM returned log-probabilities of other tokens"
    return np.asarray(flat.logprobs, dtype=np.float32)


def _finish_reason(reason: str) -> Literal["stop", "length"]:
    if reason not in _FINISHED:
        raise RuntimeError(f"vLLM ended a completion with the unexpected reason {reason!r}")
    return cast(Literal["stop", "length"], reason)


def engine_variables(platform: Platform, settings: EngineSettings) -> dict[str, str]:
    """Return the variables that vLLM reads when it is imported. The user's variables come first."""
    common = {
        # The engine's core runs in this process, which steps it and passes weights to it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output is for completions
        "VLLM_LOGGING_LEVEL": "INFO" if settings.verbose else "ERROR",
        "TORCH_CPP_LOG_LEVEL": "WARNING" if settings.verbose else "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    own = platform.engine_environment(
        settings.engine.tp, is_eager=is_eager(settings.engine, platform)
    )
    vision = class_variable(settings.model_dir)
    # All processes of an engine are on one machine.
    return {**common, **own, **platform.network_environment("lo"), **vision}


def _prepare_environment(platform: Platform, settings: EngineSettings) -> None:
    """Set the variables that vLLM reads when it is imported, unless the user has set them."""
    os.environ.pop(VARIABLE, None)  # of another engine in this process
    for name, value in engine_variables(platform, settings).items():
        os.environ.setdefault(name, value)
    # This process compiles too, after the engine has started.
    if cache := temporary.environment(Path()).get(_COMPILED):
        os.environ.setdefault(_COMPILED, cache)
    for override in platform.engine_overrides(os.environ):
        change = f"{override.name}={os.environ[override.name]}: the engine uses {override.value!r}"
        print_note(f"{change}, because {override.reason}.")
        if override.value:
            os.environ[override.name] = override.value
        else:  # vllm-ascend 0.23 appends settings to an empty value, which torch_npu cannot parse
            del os.environ[override.name]


def _start(arguments: dict[str, Any], settings: EngineSettings, folder: Path) -> Any:
    """Start vLLM with its temporary files in `folder`, where its shared memory is listed.

    Raises:
        MsrlError: vLLM refuses the settings.
        RunFailedError: A process of the engine has ended.
    """
    with warnings.catch_warnings():
        if not settings.verbose:
            warnings.simplefilter("ignore")
            logging.getLogger("vllm").setLevel(logging.ERROR)
            for name in _LOSS_LOGGERS:  # vLLM resets their levels, but not their filters
                logging.getLogger(name).addFilter(_drop)
        with no_collections():
            import vllm

        share_gloo_devices()
        bind_stores()
        before = temporary.segments()
        inspection = _Inspection()
        registry = logging.getLogger("vllm.model_executor.models.registry")
        registry.addFilter(inspection)
        try:
            quiet = contextlib.nullcontext() if settings.verbose else quiet_processes()
            with temporary.redirect(folder), quiet, no_collections():  # it imports much more
                prepare_process()
                return vllm.LLM(**arguments)
        # vLLM raises ValueError for a configuration that it refuses; TypeError for an option.
        except (ValueError, TypeError) as error:
            if isinstance(error, TypeError) and not settings.engine.options:
                raise
            if inspection.reason:
                raise MsrlError(
                    f"{settings.model_dir}: vLLM cannot load the class of this model: "
                    f"{inspection.reason}. Install what is missing, or use another model."
                ) from error
            raise MsrlError(
                f"{settings.model_dir}: vLLM refuses these settings: {error}"
            ) from error
        except Exception as error:
            if not str(error).startswith(_LOST_AT_START):
                raise
        finally:
            registry.removeFilter(inspection)
            temporary.list_segments(folder, _own_processes(), before)
    gc.collect()  # objects of the engine end before their shared memory is removed
    raise RunFailedError(
        "The engine did not start: one of its processes failed or was killed, for example by the "
        "out-of-memory killer (see dmesg). Start the same command again; --verbose prints the logs "
        "of the engine."
    )


def _drop(_: logging.LogRecord) -> bool:
    """Drop every record of a logger."""
    return False


class _Inspection(logging.Filter):
    """Reason why vLLM cannot import the class of a model, which it logs with two tracebacks.

    vLLM imports it in a process and logs its output (`_try_inspect_model_cls` in
    vllm/model_executor/models/registry.py of vLLM 0.23 to 0.32). The last line has the reason.
    """

    reason = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the reason of an exception, and show no record of it."""
        error = record.exc_info[1] if record.exc_info else None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] if error else []
        if lines:
            self.reason = printable(lines[-1])
        return not lines


def _own_processes() -> list[int]:
    """Return the pids of this process and of all its descendants."""
    import psutil

    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
