"""Operations of a training step against hand calculations, and peaks of devices by name."""

from __future__ import annotations

import dataclasses

import pytest

from families import QWEN2_5_VL
from llama_like import LLAMA_LIKE
from mixture_families import DEEPSEEK_V2, DEEPSEEK_V32, QWEN3_MOE
from msrl.memory.flops import tower_flops, training_flops
from msrl.models.families import all_rules
from msrl.models.shape import DeltaNet, Dense, Layer
from msrl.models.vision.tower import TrainedParts
from msrl.platforms import NAMES, get
from msrl.platforms.cuda import peak_flops as cuda_peak
from msrl.platforms.npu import peak_flops as npu_peak
from test_models import QWEN2, shape


def test_flops_of_a_dense_model_match_a_hand_calculation():
    layer = shape(QWEN2).layers[0]
    mixer = dataclasses.replace(layer.mixer, num_heads=4, num_groups=2, head_dim=3)
    layer = Layer(mixer, Dense(10))
    model = dataclasses.replace(shape(QWEN2), layers=(layer, layer), hidden_size=8, vocab_size=7)
    # A layer: queries 8 x 12, keys and values 8 x 6 each, output 12 x 8, three matrices 8 x 10:
    # 96 + 96 + 96 + 240 = 528 weights.
    # Sequences of 3 and 5 tokens: 8 tokens; 6 + 15 pairs of 4 heads, with 3 channels of scores and
    # 3 channels of weighted sums.
    products = 8 * 2 * 528 + 4 * 8 * 7  # 4 tokens are trained
    attention = 2 * (6 + 15) * 4 * (3 + 3)
    assert training_flops(model, [3, 5], 4) == 3 * (2 * products + 2 * attention)
    assert (
        training_flops(model, [3, 5], 4, weight_gradients=False)
        == 2 * 2 * products + 3 * 2 * attention
    )
    # In the second layer, a token attends to itself and its predecessor:
    # 5 pairs of 3 tokens, 9 of 5.
    windowed = dataclasses.replace(
        model, layers=(layer, Layer(dataclasses.replace(mixer, window=2), Dense(10)))
    )
    assert training_flops(windowed, [3, 5], 4) == 3 * (
        2 * products + attention + 2 * (5 + 9) * 4 * 6
    )


@pytest.mark.parametrize("name", [row for row in LLAMA_LIKE if row != "minicpm 3"])
def test_flops_are_those_of_all_matrices_and_visible_pairs(name: str) -> None:
    """Count all matrices of the files but the table of embeddings, and the pairs one by one."""
    model = shape(LLAMA_LIKE[name].config)
    sizes = [size for rule in all_rules(model) for size in rule.shapes if len(size) == 2]
    matrices = sum(rows * columns for rows, columns in sizes)
    if not model.tie_word_embeddings:
        matrices -= model.vocab_size * model.hidden_size
    pairs = [
        sum(min(token + 1, layer.mixer.window or 9) for token in range(9)) for layer in model.layers
    ]
    attention = 4 * sum(pairs) * model.num_attention_heads * model.head_dim
    assert training_flops(model, [9], 9) == 3 * (2 * 9 * matrices + attention)


def test_a_packed_row_has_fewer_attention_pairs_than_one_long_sequence():
    model = shape(QWEN2)
    saved = (
        3
        * model.num_layers
        * 2
        * (100 * 101 // 2 - 2 * (50 * 51 // 2))
        * model.num_attention_heads
        * 2
        * model.head_dim
    )
    assert training_flops(model, [100], 100) - training_flops(model, [50, 50], 100) == saved


def test_only_active_experts_count():
    model = shape(QWEN3_MOE)
    moe = model.moe
    assert moe is not None
    larger = dataclasses.replace(moe, experts_per_token=moe.experts_per_token + 1)
    layers = tuple(Layer(layer.mixer, larger) for layer in model.layers)
    more = dataclasses.replace(model, layers=layers)
    one_expert = 3 * model.hidden_size * moe.ffn_hidden_size * model.num_layers
    assert training_flops(more, [10], 10) - training_flops(model, [10], 10) == 6 * 10 * one_expert


def test_latent_attention_counts_its_projections():
    model = shape({**DEEPSEEK_V2, "q_lora_rank": 24})
    mla, heads, hidden = model.mla, model.num_attention_heads, model.hidden_size
    assert mla is not None and model.moe is not None
    query = mla.nope_head_dim + mla.rope_head_dim
    down = hidden * ((mla.q_lora_rank or heads * query) + mla.kv_lora_rank + mla.rope_head_dim)
    up = (mla.q_lora_rank or 0) * heads * query + mla.kv_lora_rank * heads * (
        mla.nope_head_dim + mla.v_head_dim
    )
    attention = down + up + heads * mla.v_head_dim * hidden
    moe = model.moe
    active = (
        3 * (moe.experts_per_token * moe.ffn_hidden_size + moe.shared_ffn_hidden_size)
        + moe.num_experts
    )
    weights = sum(
        attention + hidden * (active if is_mixture else 3 * model.ffn_hidden_size)
        for is_mixture in model.mixture_layers
    )
    expected = 6 * (
        10 * weights + 4 * hidden * model.vocab_size
    ) + 6 * model.num_layers * 55 * heads * (query + mla.v_head_dim)
    assert training_flops(model, [10], 4) == expected


def test_an_indexer_counts_where_it_decides():
    model = shape({**DEEPSEEK_V32, "index_topk": 4})
    plain = dataclasses.replace(
        model,
        layers=tuple(
            Layer(dataclasses.replace(layer.mixer, indexer=None), layer.feed_forward)
            for layer in model.layers
        ),
    )
    assert training_flops(model, [4, 3], 4) == training_flops(plain, [4, 3], 4)
    mla = model.mla
    assert mla is not None
    # Of a sequence of 6 tokens, 21 pairs are scored, and 4 + 3 + 2 + 1 + 4 + 4 pairs are chosen.
    # 8 heads have queries of 24 channels from a latent of 40, and one key and 8 weights from 64.
    indexer = 2 * (6 * (8 * 24 * 40 + 64 * (24 + 8)) + 21 * 8 * (24 + 1))
    saved = 3 * 2 * (21 - 18) * mla.num_heads * (mla.head_dim + mla.v_head_dim)
    difference = training_flops(model, [6, 3], 4) - training_flops(plain, [6, 3], 4)
    assert difference == model.num_layers * (indexer - saved)


def test_flops_of_a_delta_network_match_a_hand_calculation():
    attention = shape(QWEN2).layers[0]
    network = DeltaNet(2, 4, 3, 5, 4)  # heads of keys and values, their channels, convolution
    layer = Layer(network, Dense(10))
    model = dataclasses.replace(
        shape(QWEN2), layers=(attention, layer), hidden_size=8, vocab_size=7
    )
    without = dataclasses.replace(model, layers=(attention,))
    # q and k: 2 x 6 rows, v and gate: 2 x 20, a and b: 2 x 4, then the output: 20; and the
    # convolution over 4 tokens of 32 channels.
    weights = 8 * (12 + 40 + 8 + 20) + 4 * 32 + 3 * 8 * 10
    # The state of a value head, 3 x 5, is read with the key and the query, and corrected.
    states = 2 * 3 * 8 * 4 * 15
    assert training_flops(model, [3, 5], 4) - training_flops(without, [3, 5], 4) == 3 * (
        2 * 8 * weights + states
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L40", 181.05e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_the_peak_of_a_gpu_is_dense_bfloat16_of_its_data_sheet(name: str, peak: float | None):
    assert cuda_peak(name) == peak


def test_the_peak_of_an_npu_depends_on_its_generation_and_a_cpu_has_none():
    assert npu_peak("Ascend910B3") == npu_peak("Ascend910_9382") == 354e12
    assert npu_peak("Ascend310P3") is None
    assert get("cpu").peak_flops("bfloat16") is None
    assert all(get(name).peak_flops("float32") is None for name in NAMES)


def test_flops_of_a_tower_match_a_hand_calculation():
    """An image of 4 x 6 patches, whose windows of 4 x 4 are 4 x 4 and 4 x 2 patches.

    A patch has 3 * 2 * 14 * 14 = 1176 numbers, a block 4 * 32 * 32 and three times 32 * 48 weights.
    The merger: 128 * 128 and 128 * 64.
    """
    config = QWEN2_5_VL["vision_config"] | {"depth": 3, "window_size": 56}
    vision = shape(QWEN2_5_VL, vision_config=config).vision
    embedding = 2 * 24 * 1176 * 32
    pairs = 24**2 + 2 * (16**2 + 8**2)  # one layer without windows, and two with them
    blocks = 2 * 24 * 3 * (4 * 32 * 32 + 3 * 32 * 48) + 4 * pairs * 32
    projector = 2 * 6 * (128 * 128 + 128 * 64)

    def flops(tower: bool, projector: bool) -> int:
        return tower_flops(vision, [(1, 4, 6)], TrainedParts(tower, projector))

    assert flops(False, False) == embedding + blocks + projector
    assert flops(False, True) == embedding + blocks + 3 * projector
    assert flops(True, False) == 2 * embedding + 3 * blocks + 2 * projector
    assert flops(True, True) == 2 * embedding + 3 * (blocks + projector)
