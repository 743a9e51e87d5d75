"""Engines, models and prompts of the commands that generate: settings, weights and renderers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from msrl import platforms
from msrl.config.schema import ChatConfig, Config, GenerateConfig
from msrl.data.native import with_date
from msrl.data.render import Renderer, make_renderer
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import load_tokenizer, text_tokenizer
from msrl.data.tokenizer_limits import reported_failures
from msrl.errors import MsrlError, RunFailedError
from msrl.models.families import all_rules
from msrl.models.hf_config import end_tokens
from msrl.processes import trees
from msrl.rollout.engine import EngineImages, EngineSettings
from msrl.rollout.engine_limits import check_limits
from msrl.temporary import ProcessRecord, is_running
from msrl.types import Conversation, Ints, Message, SamplingParams
from msrl.vision.settings import from_json
from msrl.workflows.training.integrity import verify_models
from msrl.workflows.training.preflight import planned_platform

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.checkpoint.source import WeightSource
    from msrl.plan.run_plan import RunPlan
    from msrl.platforms.base import Platform
    from msrl.rollout.vllm import VllmEngine


def engine_settings(
    config: Config,
    model_dir: Path,
    *,
    dtype: str | None,
    logits_dtype: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    random_weights: bool = False,
) -> EngineSettings:
    """Return `rollout.engine` as engine settings.

    Lengths in the configuration take precedence over the arguments. `dtype` None means the dtype of
    the checkpoint.
    """
    engine = config.rollout.engine
    lengths = {
        "max_model_len": engine.max_model_len or max_model_len,
        "max_num_seqs": min(engine.max_num_seqs, max_num_seqs or engine.max_num_seqs),
    }
    return EngineSettings(
        model_dir=model_dir,
        dtype=dtype,
        logits_dtype=logits_dtype,
        engine=engine.model_copy(update=lengths),
        seed=config.run.seed,
        random_weights=random_weights,
        verbose=bool(os.environ.get("MSRL_VERBOSE")),
    )


def data_images(plan: RunPlan) -> EngineImages | None:
    """Return the limits of an engine for the images of a run's data; None without images.

    Each image has the size of its data; the limits are those of the data with the largest ones.
    """
    manifests = [dataset.manifest for dataset in plan.datasets.values()]
    visions = [from_json(each.vision) for each in manifests if each is not None and each.vision]
    if not visions:
        return None
    largest = max(visions, key=lambda vision: vision.max_pixels)
    smallest = min(vision.min_pixels // vision.factor**2 for vision in visions)
    # Two more tokens enclose the tokens of an image.
    longest = max(each.max_tokens for each in manifests if each is not None)
    return EngineImages(max(1, longest // (max(smallest, 1) + 2)), largest)


def check_engine(config: Config, settings: EngineSettings) -> None:
    """Check the limits of the engine on the platform of `config`, without starting it.

    Raises:
        MsrlError: vLLM cannot serve this model with these settings.
    """
    check_limits(settings, planned_platform(config))


def open_model(model: str | None, key: str, lora: str | None = None) -> WeightSource:
    """Open the weights of a Hugging Face or mcore folder, with an adapter merged into them.

    Raises:
        MsrlError: `model` is None or the folder is damaged. `key` is the setting's name for the
            message.
    """
    from msrl.checkpoint.source import open_weights

    if model is None:
        raise MsrlError(
            f"{key}: no model is set. Set it to a Hugging Face folder or an mcore checkpoint."
        )
    verify_models([Path(model)])
    if lora is None:
        return open_weights(Path(model))
    return _merge_adapter(Path(model), Path(lora))


def _merge_adapter(model: Path, lora: Path) -> WeightSource:
    """Return the weights of a model with an adapter, which may be in the same mcore folder."""
    from msrl.checkpoint.adapters.megatron import read_adapter
    from msrl.checkpoint.adapters.merge import MergedSource
    from msrl.checkpoint.integrity import adapter_checks
    from msrl.checkpoint.source import open_mcore, open_weights
    from msrl.models.paths import is_mcore
    from msrl.workflows.training.integrity import verify_files

    verify_files(adapter_checks(lora))
    is_same = lora.resolve() == model.resolve() and is_mcore(str(model))
    base = open_mcore(model, beside_adapter=True) if is_same else open_weights(model)
    return MergedSource(base, read_adapter(lora, base.shape))


def hf_weights(source: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights under their Hugging Face names.

    Only the tensors of one rule (or the experts of one layer) are in memory at a time.
    """
    from msrl.checkpoint.hf.expert_stacks import stack_experts
    from msrl.models.entries import stack_sizes

    tensors = (
        named
        for rule in all_rules(source.shape)
        for named in zip(rule.hf, source.hf_tensors(rule), strict=True)
    )
    yield from stack_experts(tensors, stack_sizes(source.shape))


@contextlib.contextmanager
def running_engine(
    config: Config, source: WeightSource, settings: EngineSettings
) -> Generator[VllmEngine, None, None]:
    """Yield a vLLM engine with the weights of `source`.

    Weights of an mcore checkpoint are transferred in memory, tensor by tensor.

    Raises:
        RunFailedError: A process of the engine has ended.
    """
    with started_engine(settings, platforms.resolve(config.cluster.platform)) as engine:
        if settings.random_weights:
            engine.load_weights(hf_weights(source))
        yield engine


@contextlib.contextmanager
def started_engine(
    settings: EngineSettings, platform: Platform
) -> Generator[VllmEngine, None, None]:
    """Yield a vLLM engine in this process, and close it at the end.

    Raises:
        RunFailedError: A process of the engine has ended.
    """
    from msrl.rollout.vllm import VllmEngine

    before = trees.descendants(os.getpid())
    engine = VllmEngine(settings, platform)
    started = [each for each in trees.descendants(os.getpid()) if each not in before]
    try:
        yield engine
    except Exception as error:
        _raise_if_lost(started, error)
        raise
    finally:
        engine.close()


def _raise_if_lost(started: Sequence[ProcessRecord], error: Exception) -> None:
    """Raise RunFailedError for a process of the engine that has ended, the reason of `error`."""
    ended = [f"{each.name} (pid {each.pid})" for each in started if not is_running(each)]
    if ended and not isinstance(error, MsrlError):
        raise RunFailedError(
            f"The engine has lost processes: {', '.join(ended)}. One crashed or was killed, for "
            "example by the out-of-memory killer (see dmesg). Start the same command again."
        ) from error


def needs_weight_transfer(source: WeightSource, model: str | None, lora: str | None = None) -> bool:
    """Return True if the engine cannot read the weights itself.

    That is the case if they are not in the folder of config and tokenizer, have an adapter, or have
    experts in another form than the published one.
    """
    is_elsewhere = model is not None and source.hf_dir != Path(model)
    return lora is not None or is_elsewhere or not source.has_published_experts


def choose_renderer(
    folder: Path,
    template: str | None,
    *,
    enable_thinking: bool | None = None,
    day: str | None = None,
) -> Renderer:
    """Return the renderer for the tokenizer in `folder` with the template of that name.

    The default is the tokenizer's template, or `empty` if it has none. It writes `day` in place of
    the current date. With the tokenizer's
    template, the tokens of the folder's generation_config.json end a response too.
    """
    tokenizer = load_tokenizer(folder)
    name = template or ("native" if getattr(tokenizer, "chat_template", None) else "empty")
    form = load_template(name)
    dated_tokenizer = with_date(text_tokenizer(tokenizer), form, day)
    renderer = make_renderer(form, dated_tokenizer, enable_thinking=enable_thinking)
    if name != "native":
        return renderer
    return replace(
        renderer,
        stop_token_ids=tuple(dict.fromkeys((*renderer.stop_token_ids, *end_tokens(folder)))),
    )


def other_template(folder: Path, renderer: Renderer) -> str | None:
    """Return a warning if a template renders prompts differently from the one of the folder.

    A checkpoint contains the template of its training.
    """
    if renderer.template.native:
        return None
    conversation = Conversation((Message("user", "?"),))
    with contextlib.suppress(MsrlError):  # the folder's own template is not usable
        own = choose_renderer(folder, None)
        same = np.array_equal(own.prompt(conversation), renderer.prompt(conversation))
        if own.template.native and not same:
            return (
                f"warning: template {renderer.template.name} renders prompts differently from the "
                f"chat template of {folder}. Omit the template to use that one."
            )
    return None


def raw_ids(renderer: Renderer, text: str) -> Ints:
    """Return the P token ids of a text as the tokenizer encodes it, including control tokens."""
    with reported_failures(renderer.tokenizer.folder):
        return np.asarray(renderer.tokenizer.backend.encode(text).ids, dtype=np.int64)


def system_turns(system: str | None) -> tuple[Message, ...]:
    """Return the system message as the first turns of a conversation; none if it is None."""
    return () if system is None else (Message("system", system),)


def sampling_params(
    config: Config,
    section: GenerateConfig | ChatConfig,
    stop_token_ids: tuple[int, ...],
    num_samples: int = 1,
) -> SamplingParams:
    """Return the sampling options of `generate` or `chat`."""
    return SamplingParams(
        max_tokens=section.max_tokens,
        num_samples=num_samples,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        stop=section.stop,
        stop_token_ids=stop_token_ids,
        seed=config.run.seed if section.seed is None else section.seed,
    )
