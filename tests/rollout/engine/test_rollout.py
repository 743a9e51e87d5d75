"""Checks, seeds and cache sizes of rollout engines that need no running engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fake_workers import FakeWorkers
from msrl.config.sections.rollout import EngineConfig
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.models.kv_cache import (
    CacheBlocks,
    cache_blocks,
    kv_bytes_per_token,
    state_bytes_per_sequence,
)
from msrl.platforms import get
from msrl.rollout.engine import (
    EngineSettings,
    check_prompt,
    checked_weights,
    expected_weights,
    kv_cache_bytes,
    sample_seed,
    sample_seeds,
)
from msrl.rollout.vllm import VllmEngine
from msrl.types import Prompt, RolloutGroup, SamplingParams
from msrl.workflows.rl.engine_group import EngineGroup, engine_shares
from msrl.workflows.training.restarts import Restarts
from msrl.workflows.training.transport.base import Calls
from support import mentions, shared_data


def qwen() -> Path:
    return shared_data("configs", "Qwen2.5-0.5B-Instruct.config.json")


def prompt(index: int, *ids: int) -> Prompt:
    return Prompt(index, np.asarray(ids, dtype=np.int64))


def test_a_seed_depends_on_every_number_and_fits_a_signed_integer():
    base = (3, 1, 7, 0, 2)
    changed = [tuple(n + (i == position) for i, n in enumerate(base)) for position in range(5)]
    seeds = {sample_seed(*numbers) for numbers in [base, *changed]}
    assert len(seeds) == 6
    assert all(0 <= seed < 1 << 62 for seed in seeds)


def test_the_seeds_of_a_prompt_do_not_change_with_the_batch():
    sampling = SamplingParams(max_tokens=1, num_samples=2, seed=5)
    alone = sample_seeds([prompt(4, 1)], sampling, 0)
    assert sample_seeds([prompt(9, 1), prompt(4, 1)], sampling, 0)[2:] == alone
    assert sample_seeds([prompt(4, 1), prompt(4, 1)], sampling, 0)[2:] != alone
    assert sample_seeds([prompt(4, 1)], sampling, 1) != alone


@pytest.mark.parametrize("num_engines", [1, 2, 3, 7])
def test_a_repeated_prompt_gets_new_samples_for_any_number_of_engines(num_engines: int):
    prompts = [prompt(index, 1) for index in (7, 3, 9, 7, 4, 3)]
    sampling = SamplingParams(max_tokens=1, num_samples=2, seed=5)
    by_position = dict[int, list[int | None]]()
    for positions in engine_shares(prompts, num_engines):
        seeds = sample_seeds([prompts[position] for position in positions], sampling, 0)
        for number, position in enumerate(positions):
            by_position[position] = seeds[2 * number : 2 * number + 2]
    assert [seed for position in range(6) for seed in by_position[position]] == sample_seeds(
        prompts, sampling, 0
    )


def test_engines_share_prompts_evenly_in_contiguous_ranges():
    assert engine_shares([prompt(index, 1) for index in range(5)], 2) == [[0, 1], [2, 3, 4]]
    assert engine_shares([prompt(index, 1) for index in range(2)], 3) == [[], [0], [1]]


class EchoEngines(FakeWorkers):
    """Two stand-ins for engines that return their number with the prompts that they receive."""

    def __init__(self) -> None:
        super().__init__(2)
        self.engines = list[int]()

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        assert method == "generate"
        self.engines.extend(arguments)
        return Calls({engine: own_arguments[0] for engine, own_arguments in arguments.items()})

    def wait(self, calls: Calls) -> list[Any]:
        return [
            [RolloutGroup(prompt, cast("Any", (engine,))) for prompt in prompts]
            for engine, prompts in calls.references.items()
        ]


@pytest.mark.parametrize(
    ("indices", "engines"), [((7, 3, 9, 7, 4, 3), [0, 0, 0, 0, 1, 0]), ((5,), [1])]
)
def test_completions_are_in_the_order_of_the_prompts_and_idle_engines_get_no_call(
    indices: tuple[int, ...], engines: list[int]
):
    workers: Any = EchoEngines()
    prompts = [prompt(index, 1) for index in indices]
    engine_group = EngineGroup(workers, Restarts(0, print, 0))
    completions = engine_group.generate(prompts, SamplingParams(max_tokens=1), 0)
    found = [(*group.completions, group.prompt.index) for group in completions]
    assert found == [*zip(engines, indices, strict=True)]
    assert workers.engines == sorted(set(engines))


def test_without_a_seed_no_sample_has_a_seed():
    assert sample_seeds([prompt(0, 1)], SamplingParams(max_tokens=1, num_samples=3), 0) == [
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("ids", "fragments"),
    [
        ((), ("prompt 3", "empty")),
        ((1, 2, 3, 4), ("prompt 3", "4 tokens")),
        ((1, 10), ("token id 10",)),
        ((-1,), ("token id -1",)),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(ids, fragments):
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        check_prompt(prompt(3, *ids), vocab_size=10, max_model_len=4)


def test_a_prompt_that_leaves_room_for_one_token_is_accepted():
    check_prompt(prompt(0, 1, 2, 9), vocab_size=10, max_model_len=4)


def test_missing_repeated_and_unknown_weights_are_refused():
    expected = frozenset({"a", "b"})
    assert [name for name, _ in checked_weights([("b", None), ("a", None)], expected)] == ["b", "a"]
    for names, fragments in (
        (["a"], ("1 of 2", "b")),
        (["a", "a", "b"], ("a", "twice")),
        (["a", "b", "c"], ("c is not",)),
    ):
        with pytest.raises(ValueError, match=mentions(*fragments)):
            list(checked_weights([(name, None) for name in names], expected))


def test_a_tied_model_expects_no_output_layer():
    names = expected_weights(load_shape(qwen()))
    assert "model.layers.23.self_attn.q_proj.bias" in names
    assert "lm_head.weight" not in names
    # as in the model's safetensors file: 24 layers of 12 tensors, embedding and final norm
    assert len(names) == 290


def test_the_kv_cache_of_qwen_takes_12_kib_a_token():
    shape = load_shape(qwen())
    assert kv_bytes_per_token(shape, 2, tp=1) == 24 * 2 * 2 * 64 * 2
    assert kv_bytes_per_token(shape, 4, tp=2) == 24 * 2 * 1 * 64 * 4


def test_the_kv_cache_holds_all_sequences_or_fills_its_share_of_memory():
    shape = load_shape(qwen())
    settings = EngineSettings(Path("m"), engine=EngineConfig(max_num_seqs=4, memory_fraction=0.5))
    token = 24 * 2 * 2 * 64 * 2
    assert kv_cache_bytes(shape, settings, "bfloat16", 200, 1 << 40) == (4 * 256 + 128) * token
    assert kv_cache_bytes(shape, settings, "bfloat16", 200, 1000 * token) == 500 * token
    with pytest.raises(MsrlError, match=mentions("200 tokens", "4 MiB", "2 MiB", "0.5")):
        kv_cache_bytes(shape, settings, "bfloat16", 200, 400 * token)
    for size in (3 * 128 * token, 3 * 128 * token - 1):
        engine = EngineConfig(kv_cache_bytes=size)
        refused = pytest.raises(MsrlError, match=mentions(f"kv_cache_bytes={size}", "200 tokens"))
        with refused if size % token else contextlib.nullcontext():
            assert (
                kv_cache_bytes(shape, replace(settings, engine=engine), "bfloat16", 200, 0) == size
            )


def test_the_cache_of_qwen_3_5_has_blocks_of_attention_and_of_states():
    """Calculated by hand: 10 layers of attention and 30 delta networks make four groups of 10.

    A token has two heads of 256 channels, keys and values: 2048 bytes in bfloat16. A state has
    three inputs of 8192 channels in bfloat16 and 32 matrices of 128 x 128 in float32: 2146304
    bytes, the room of 1048 tokens. 1152 is the next multiple of 128.
    """
    shape = load_shape(shared_data("configs", "aic", "Qwen--Qwen3.5-35B-A3B_config.json"))
    blocks = cache_blocks(shape, 2, 1, 128)
    assert blocks == CacheBlocks(10 * 1152 * 2048, 1152, attention_groups=1, state_groups=3)
    assert [blocks.per_sequence(length) for length in (1, 1152, 1153)] == [4, 4, 5]
    assert state_bytes_per_sequence(shape, 2, tp=2) == 30 * 2146304 // 2


def test_windows_of_every_second_layer_make_two_groups_of_blocks():
    shape = load_shape(qwen())
    full = shape.layers[0]
    window = replace(full, mixer=replace(full.mixer, window=32))
    layers = (window, window, full, window, full)
    blocks = cache_blocks(replace(shape, layers=layers), 2, 1, 16)
    assert blocks == CacheBlocks(2 * 16 * 512, 16, attention_groups=3, state_groups=0)
    layers = (full, window, full, window, window, full, full)
    blocks = cache_blocks(replace(shape, layers=layers), 2, 1, 16)
    assert blocks == CacheBlocks(4 * 16 * 512, 16, attention_groups=2, state_groups=0)


def write_config(folder: Path, **changes: object) -> Path:
    config = json.loads(qwen().read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "settings", "fragments"),
    [
        ({"hidden_size": 224, "head_dim": 16}, {}, ("head_dim=16", "attention", "vLLM", "32, 64")),
        ({"architectures": ["MambaForCausalLM"]}, {}, ("MambaForCausalLM",)),
        ({}, {"engine": EngineConfig(max_model_len=40000)}, ("32768 positions",)),
        ({}, {"dtype": "int8"}, ("dtype=int8",)),
        ({}, {"engine": EngineConfig(tp=3)}, ("tp=3", "14 attention heads")),
    ],
)
def test_a_model_that_the_engine_cannot_serve_is_refused_before_it_starts(
    tmp_path, changes, settings, fragments
):
    folder = write_config(tmp_path, **changes)
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        VllmEngine(EngineSettings(folder, **settings), get("cpu"))
