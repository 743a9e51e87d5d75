"""Small random models whose steps show the time beside products: on ranks, and in an engine."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.config.sections.rollout import EngineConfig
from msrl.config.sections.train import OptimizerConfig
from msrl.platforms.base import Platform
from msrl.rollout.engine import EngineSettings
from msrl.temporary import owned_folder
from msrl.trainer.objective.batches import BatchLimits
from msrl.trainer.objective.losses import SftLoss
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from msrl.types import Prompt, SamplingParams
from msrl.workflows.engine import started_engine
from msrl.workflows.training.train_worker import SavePlan, TrainWorker
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.transport.local import local_workers

_VOCABULARY, _TOKENS, _TIMEOUT_S = 256, 16, 300.0
_FEW_LAYERS, _MANY_LAYERS, _BATCHES = 1, 5, 4
_RUNNING, _SHORT, _LONG = (1, 8, 64, 256), 4, 36


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds beside products: of a layer, forward and backward, a micro-batch, an update."""

    layer: float
    micro_batch: float
    update: float


def host_times(platform: Platform, dtype: str) -> HostTimes:
    """Measure updates of models whose products are too small to matter."""
    few, many = (
        _updates(platform, dtype, layers, batches)
        for layers, batches in ((_FEW_LAYERS, (1, _BATCHES)), (_MANY_LAYERS, (_BATCHES,)))
    )
    per_batch = max((few[1] - few[0]) / (_BATCHES - 1), 1e-9)
    layer = max((many[0] - few[1]) / (_MANY_LAYERS - _FEW_LAYERS) / _BATCHES, 1e-9)
    micro_batch = max(per_batch - _FEW_LAYERS * layer, 1e-9)
    return HostTimes(layer, micro_batch, max(few[0] - per_batch, 1e-9))


def _updates(
    platform: Platform, dtype: str, num_layers: int, batches: tuple[int, ...]
) -> list[float]:
    """Return the median seconds of updates with these numbers of micro-batches on one rank."""
    with owned_folder("msrl-measure-") as folder:
        _write_model(folder, num_layers, dtype)
        policy = ReplicaSettings(
            folder, hf_dir=folder, is_random=True, optimizer=OptimizerConfig(lr=1e-6)
        )
        settings = RankSettings(platform.name, Layout(), dtype, 0, _TIMEOUT_S, policy=policy)
        with local_workers(
            partial(TrainWorker, settings), num_workers=1, platform=platform, env={}
        ) as workers:
            trainers = TrainerGroup(workers)
            trainers.start(None, SavePlan(folder / "none", folder, False))
            seconds = [_median(lambda n=count: _update(trainers, n)) for count in batches]
            trainers.close()
    return seconds


def _update(trainers: TrainerGroup, count: int) -> None:
    ids = tuple(np.full(_TOKENS, 7) for _ in range(count))
    masks = tuple(np.ones(_TOKENS, np.bool_) for _ in range(count))
    trainers.update(UpdateRequest(SftLoss(), 1e-6), Sequences(ids, masks, {}), BatchLimits(1))


def engine_steps(platform: Platform, dtype: str) -> list[tuple[float, float]]:
    """Return numbers of sequences, and the seconds in which an engine adds a token to each."""
    with owned_folder("msrl-measure-") as folder:
        _write_model(folder, _MANY_LAYERS, dtype)
        _write_tokenizer(folder)
        config = EngineConfig(max_model_len=64, kv_cache_bytes=1 << 26, prefix_cache=False)
        settings = EngineSettings(folder, dtype=dtype, engine=config, random_weights=True)
        with started_engine(settings, platform) as engine:

            def generate(count: int, length: int) -> None:
                prompts = [Prompt(number, np.arange(1, 9)) for number in range(count)]
                engine.generate(prompts, SamplingParams(length, ignore_eos=True), 0)

            rows = list[tuple[float, float]]()
            for count in _RUNNING:
                short, long = (
                    _median(lambda n=count, m=length: generate(n, m)) for length in (_SHORT, _LONG)
                )
                rows.append((count, max(long - short, 1e-9) / (_LONG - _SHORT)))
    return rows


def _median(function: Callable[[], None]) -> float:
    """Return the median seconds of 5 calls, after 2 that are not counted."""
    times = list[float]()
    for _ in range(7):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def _write_model(folder: Path, num_layers: int, dtype: str) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": _VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per number, which vLLM needs to start."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(_VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t0").save_pretrained(folder)
