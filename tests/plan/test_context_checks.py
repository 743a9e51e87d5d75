"""Checks and plan of context parallelism: sizes, heads, and bytes that a rank sends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from config_inputs import make_configs
from families import QWEN2
from mixture_families import DEEPSEEK_V3, MIXTURES
from msrl.cli.configuration import load_configuration as load
from msrl.errors import MsrlError
from msrl.memory.activations import Pass, Spread, layer_bytes
from msrl.memory.communication import communication_rows, sent_bytes
from msrl.models.families import load_shape
from msrl.models.shape import Mla
from msrl.plan.run_plan import resolve
from support import assert_mentions

MODELS = {
    "dense": {**QWEN2, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
    "latent": DEEPSEEK_V3,
    "sparse": MIXTURES["glm 5.2"].config,
    "odd": {**MIXTURES["glm 5.2"].config, "num_attention_heads": 3, "num_key_value_heads": 3},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_configs(tmp_path, MODELS)


def _settings(*sets: str) -> list[str]:
    return ["model.path=dense", *(f"train.parallel.{each}" for each in sets)]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (("cp=5", "cp_algo=ulysses"), ("cp=5", "ulysses", "12 attention heads")),
        (
            ("tp=4", "cp=2", "cp_algo=ulysses"),
            ("cp=2", "train.parallel.tp=4", "12 attention heads"),
        ),
        (("cp=6", "cp_algo=ulysses"), ("cp=6", "ulysses", "4 key")),
        (("cp=2", "cp_algo=hybrid"), ("cp_algo=hybrid", "cp_head_ranks", "needs")),
        (
            ("cp=4", "cp_algo=hybrid", "cp_head_ranks=3"),
            ("cp_head_ranks=3", "train.parallel.cp=4", "divide"),
        ),
        (
            ("cp=4", "cp_algo=hybrid", "cp_head_ranks=4"),
            ("cp_head_ranks=4", "train.parallel.cp=4", "ulysses"),
        ),
        (
            ("tp=2", "cp=8", "cp_algo=hybrid", "cp_head_ranks=4"),
            ("cp_head_ranks=4", "train.parallel.tp=2", "12 attention heads"),
        ),
        (
            ("cp=2", "cp_algo=ring", "cp_head_ranks=2"),
            ("cp_head_ranks=2", "cp_algo=ring", "no effect"),
        ),
        (("cp=1", "cp_algo=hybrid", "cp_head_ranks=3"), ("cp_head_ranks=3", "cp=1", "no effect")),
        (("cp=2", "cp_algo=megatron_cp_algo"), ("cp_algo", "megatron_cp_algo", "ring")),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(
    folder: Path, sets: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError) as caught:
        load(["sft.yaml"], _settings(*sets), command="train-sft")
    assert_mentions(caught.value, *fragments)


@pytest.mark.parametrize(
    "sets",
    [
        ("cp=4", "cp_algo=ulysses"),
        ("tp=2", "cp=2", "cp_algo=ulysses"),
        ("tp=4", "cp=3", "cp_algo=ulysses"),  # one key and value head of a rank for three ranks
        ("cp=5", "cp_algo=ring"),
        ("cp=4", "cp_algo=hybrid", "cp_head_ranks=2"),
        ("cp_algo=ulysses",),  # no effect without context parallelism
    ],
)
def test_sizes_that_fit_are_accepted(folder: Path, sets: tuple[str, ...]) -> None:
    batch = "train.global_batch=60"
    config = load(["sft.yaml"], [*_settings(*sets), batch], command="train-sft").config
    rows = communication_rows(resolve(config, "train-sft"))
    assert bool(rows) == (config.train.parallel.cp > 1 and config.data.seq_length is not None)


@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (("cp=2", "cp_algo=ring"), ("cp_algo=ring", "ulysses", "indexers")),
        (("pp=4",), ("pp=4", "layer 1", "layer 0", "num_layer_list")),
        (("pp=2", "num_layer_list=[1,3]"), ("num_layer_list=1,3", "layer 1", "layer 0")),
    ],
)
def test_layouts_that_separate_a_choice_from_its_keys_are_refused(
    folder: Path, sets: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    settings = ["model.path=sparse", *_settings(*sets)[1:]]
    with pytest.raises(MsrlError) as caught:
        load(["sft.yaml"], settings, command="train-sft")
    assert_mentions(caught.value, *fragments)


@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (("tp=2",), ("tp=2", "3 attention heads")),
        (("cp=2", "cp_algo=ulysses"), ("cp=2", "ulysses", "3 attention heads")),
    ],
)
def test_ranks_that_cannot_divide_the_heads_of_sparse_attention_are_refused(
    folder: Path, sets: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError) as caught:
        load(["sft.yaml"], ["model.path=odd", *_settings(*sets)[1:]], command="train-sft")
    assert_mentions(caught.value, *fragments)


def test_ranks_gather_keys_and_choices_of_indexers(folder: Path) -> None:
    shape = load_shape(folder / "sparse")
    mla, spread = shape.layers[0].mixer, Spread(cp=2, head_ranks=2)
    assert isinstance(mla, Mla) and mla.indexer is not None
    plain = sent_bytes(dataclasses.replace(mla, indexer=None), BATCH, spread)
    sent = sent_bytes(mla, BATCH, spread)
    # 512 tokens of a rank: a key of 24 channels in bfloat16, 8 positions in 4 bytes.
    assert sent == (plain.forward + 512 * (24 * 2 + 8 * 4), plain.backward)
    assert sent_bytes(shape.layers[1].mixer, BATCH, spread) == plain


BATCH = Pass(num_tokens=1024, num_trained=1024, longest=512, is_packed=True, element_bytes=2)


def test_sent_bytes_follow_from_the_sizes(folder: Path) -> None:
    # By hand: 256 tokens of a rank, 12 heads of 8 channels and 4 key and value heads in bfloat16.
    shape = load_shape(folder / "dense")
    pairs, mixed = 256 * 4 * 16 * 2, 256 * 12 * 16 * 2
    expected = {
        Spread(cp=4, gathers_keys=True): (3 * pairs, 3 * pairs),
        Spread(cp=4, head_ranks=4): ((pairs + mixed) * 3 // 4, (pairs + mixed) * 3 // 4),
        Spread(cp=4): (3 * pairs, 3 * pairs + 4 * 2 * pairs),
        Spread(cp=4, head_ranks=2): (
            (pairs + mixed) // 2 + pairs,
            (pairs + mixed) // 2 + pairs + 2 * 2 * pairs,
        ),
    }
    for spread, sizes in expected.items():
        assert sent_bytes(shape.attention, BATCH, spread) == sizes, spread


@pytest.mark.parametrize("model", MODELS)
def test_only_gathered_keys_grow_with_the_number_of_ranks(folder: Path, model: str) -> None:
    shape = load_shape(folder / model)
    spreads = {
        "allgather": Spread(cp=4, gathers_keys=True),
        "ulysses": Spread(cp=4, head_ranks=4),
        "ring": Spread(cp=4),
    }
    sizes = {
        name: layer_bytes(shape, shape.layers[0], BATCH, spread).core
        for name, spread in spreads.items()
    }
    assert max(sizes["ulysses"], sizes["ring"]) < sizes["allgather"]
