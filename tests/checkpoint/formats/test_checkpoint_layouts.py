"""Positions of weight elements: calculated by hand from Megatron's layout, then random tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from msrl.checkpoint.rank_shapes import make_plan
from msrl.checkpoint.tensor_layouts import (
    hf_pieces,
    join,
    pieces,
    reshard,
    shard,
    shard_shape,
    split,
    unfuse,
)
from msrl.errors import MsrlError
from msrl.models.families import all_rules, num_parameters
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.rules import GateUp, Grouped, Joined, Layout, Packed, Replicated, Sharded, Vocab
from msrl.models.stages import stage_tensors
from support import assert_mentions
from test_models import LLAMA, QWEN2, QWEN3, shape

# Two groups of two query heads, each of two rows. A group is [four q rows, two k rows, two v rows].
Q, K, V = torch.arange(8.0), torch.arange(10.0, 14), torch.arange(20.0, 24)
QKV = Grouped(2, (4, 2, 2))
QKV_RANKS = ([0, 1, 2, 3, 10, 11, 20, 21], [4, 5, 6, 7, 12, 13, 22, 23])


def fuse(layout: Layout, tensors: Sequence[Tensor]) -> Tensor:
    """Return the canonical tensor of Hugging Face tensors."""
    return join(layout, [shard(layout, tensors, 0, 1)])


def test_qkv_of_a_rank_holds_complete_query_groups() -> None:
    weights = [t[:, None] for t in (Q, K, V)]
    for tensors in ((Q, K, V), weights):  # bias and weight have the same order
        ranks = split(QKV, fuse(QKV, tensors), 2)
        assert [rank.flatten().tolist() for rank in ranks] == list(QKV_RANKS)
        assert [shard(QKV, tensors, rank, 2).flatten().tolist() for rank in (0, 1)] == list(
            QKV_RANKS
        )


def test_qkv_is_split_into_q_k_and_v() -> None:
    canonical = join(QKV, [torch.tensor(rank) for rank in QKV_RANKS])
    assert [tensor.tolist() for tensor in unfuse(QKV, canonical)] == [
        Q.tolist(),
        K.tolist(),
        V.tolist(),
    ]


def test_a_rank_holds_its_gate_rows_then_its_up_rows() -> None:
    gate, up = torch.arange(4)[:, None], torch.arange(10, 14)[:, None]
    expected = [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert [
        rank.flatten().tolist() for rank in split(GateUp(), fuse(GateUp(), (gate, up)), 2)
    ] == expected
    assert [shard(GateUp(), (gate, up), rank, 2).flatten().tolist() for rank in (0, 1)] == expected
    back = unfuse(GateUp(), join(GateUp(), [torch.tensor(rank)[:, None] for rank in expected]))
    assert [tensor.flatten().tolist() for tensor in back] == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_row_parallel_weights_are_split_by_columns() -> None:
    weight = torch.arange(8).view(2, 4)
    assert [rank.tolist() for rank in split(Sharded(1), weight, 2)] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    assert shard(Sharded(1), [weight], 1, 2).tolist() == [[2, 3], [6, 7]]


def test_vocabulary_is_padded_with_zeros_and_trimmed_again() -> None:
    table = torch.arange(1, 11).view(5, 2)
    expected = [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [0, 0]], [[0, 0], [0, 0]]]
    assert [rank.tolist() for rank in split(Vocab(5), table, 4, padded_vocab=8)] == expected
    assert [shard(Vocab(5), [table], rank, 4, 8).tolist() for rank in range(4)] == expected
    assert join(Vocab(5), [torch.tensor(rank) for rank in expected]).tolist() == table.tolist()


def test_replicated_tensors_are_complete_on_every_rank() -> None:
    norm = torch.arange(3)
    assert [rank.tolist() for rank in split(Replicated(), norm, 2)] == [[0, 1, 2], [0, 1, 2]]
    assert join(Replicated(), [norm, norm]) is norm


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (Grouped(4, (6, 2, 2)), ((24, 5), (8, 5), (8, 5))),
        (Grouped(4, (6, 2, 2)), ((24,), (8,), (8,))),
        (GateUp(), ((8, 5), (8, 5))),
        (Sharded(0), ((8, 5),)),
        (Sharded(1), ((5, 8),)),
        (Vocab(7), ((7, 5),)),
        (Replicated(), ((5,),)),
    ],
)
def test_every_layout_comes_back_from_any_number_of_ranks(
    layout: Layout, shapes: tuple[tuple[int, ...], ...], tp: int
) -> None:
    tensors = [torch.randn(size) for size in shapes]
    canonical = fuse(layout, tensors)
    ranks = split(layout, canonical, tp)
    assert torch.equal(join(layout, ranks), canonical)
    assert all(torch.equal(a, b) for a, b in zip(unfuse(layout, canonical), tensors, strict=True))
    for rank in range(tp):
        assert torch.equal(shard(layout, tensors, rank, tp), ranks[rank])
        assert torch.equal(torch.cat(list(pieces(layout, tensors, rank, tp))), ranks[rank])
        assert tuple(ranks[rank].shape) == shard_shape(layout, shapes, tp)


@pytest.mark.sample(20)
@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (Grouped(4, (6, 2, 2)), ((24, 5), (8, 5), (8, 5))),
        (Grouped(4, (6, 2, 2)), ((24,), (8,), (8,))),
        (GateUp(), ((8, 5), (8, 5))),
        (Packed(GateUp(), (8, 8)), ((16, 5),)),
        (Packed(GateUp(), (8, 8), alternating=True, transposed=True), ((5, 16),)),
        (Packed(Sharded(0), (8,), transposed=True), ((5, 8),)),
        (Sharded(0), ((8, 5),)),
        (Sharded(1), ((5, 8),)),
        (Vocab(7), ((7, 5),)),
        (Replicated(), ((5,),)),
        (Joined((3, 2)), ((3, 5), (2, 5))),
    ],
)
def test_shards_of_one_layout_are_built_from_those_of_another(
    layout: Layout, shapes: tuple[tuple[int, ...], ...], before: int, after: int
) -> None:
    tensors = [torch.randn(size) for size in shapes]
    canonical = fuse(layout, tensors)
    shards, rows = split(layout, canonical, before), 12 if isinstance(layout, Vocab) else None
    for rank, expected in enumerate(split(layout, canonical, after, rows)):
        assert torch.equal(torch.cat(list(reshard(layout, shards, rank, after, rows))), expected)
    for tensor_pieces, tensor in zip(hf_pieces(layout, shards), tensors, strict=True):
        assert torch.equal(torch.cat(list(tensor_pieces)), tensor)


def test_tensors_split_by_rows_are_resharded_without_a_copy() -> None:
    shards = [torch.randn(6, 5), torch.randn(6, 5)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in shards}
    for layout in (Grouped(6, (1, 1, 1)), GateUp(), Sharded(0), Vocab(12)):
        for size in (1, 3):
            assert {
                piece.untyped_storage().data_ptr() for piece in reshard(layout, shards, 0, size)
            } <= storages
    for layout in (GateUp(), Sharded(0), Vocab(11)):
        assert {
            piece.untyped_storage().data_ptr()
            for tensor_pieces in hf_pieces(layout, shards)
            for piece in tensor_pieces
        } == storages


def test_a_shard_is_made_of_views_of_its_sources_and_of_padding() -> None:
    tensors = [torch.randn(8, 5), torch.randn(4, 5), torch.randn(4, 5)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for layout, sources in (
        (QKV, tensors),
        (GateUp(), tensors[1:]),
        (Sharded(1), [tensors[0].t()]),
        (Vocab(8), tensors[:1]),
    ):
        assert {
            piece.untyped_storage().data_ptr() for piece in pieces(layout, sources, 1, 2)
        } <= storages
    views = list(pieces(Vocab(8), tensors[:1], 1, 2, 12))
    assert (
        [len(tensor) for tensor in views] == [2, 4]
        and views[0].untyped_storage().data_ptr() in storages
        and not views[1].any()
    )


def test_stages_are_equal_blocks_that_count_their_own_layers() -> None:
    stages = [
        [
            entry.name
            for entry in stage_tensors(
                shape(LLAMA, num_hidden_layers=4), ParallelLayout(pp=2), Coords(pp=rank)
            )
        ]
        for rank in (0, 1)
    ]
    layers = [f"decoder.layers.{layer}" for layer in (0, 1)]
    assert stages[0][0] == "embedding.word_embeddings.weight" and stages[1][-2:] == [
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    assert [sorted({name[:16] for name in stage if "layers." in name}) for stage in stages] == [
        layers,
        layers,
    ]
    second = {
        entry.name: entry.rule.hf[0]
        for entry in stage_tensors(
            shape(LLAMA, num_hidden_layers=4), ParallelLayout(pp=2), Coords(pp=1)
        )
    }
    assert (
        second["decoder.layers.0.input_layernorm.weight"] == "model.layers.2.input_layernorm.weight"
    )


def test_a_tied_output_layer_is_stored_only_with_several_stages() -> None:
    tied = shape(QWEN2, tie_word_embeddings=True)
    single = stage_tensors(tied, ParallelLayout(), Coords())
    last = stage_tensors(tied, ParallelLayout(pp=2), Coords(pp=1))
    assert "output_layer.weight" not in [entry.name for entry in single]
    assert last[-1].name == "output_layer.weight" and last[-1].rule.hf == (
        "model.embed_tokens.weight",
    )


def test_a_plan_counts_what_all_ranks_hold() -> None:
    model_shape = shape(QWEN3)
    replicated = sum(
        size[0]
        for rule in all_rules(model_shape)
        if rule.layout == Replicated()
        for size in rule.shapes
    )
    plan = make_plan(model_shape, ParallelLayout(2, 2), vocab_multiple=64)
    padding = 2 * (128 - 100) * 64  # embedding and output layer, rows added, hidden size
    assert plan.padded_vocab == 128
    assert plan.num_elements == num_parameters(model_shape) + replicated + padding


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [(4, 1, ("tp=4", "KV heads")), (1, 3, ("pp=3", "2 layers")), (5, 1, ("tp=5", "96", "ffn"))],
)
def test_a_layout_that_does_not_divide_is_refused(
    tp: int, pp: int, message: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError) as error:
        make_plan(shape(QWEN2), ParallelLayout(tp, pp))
    assert_mentions(error.value, *message)


def test_the_vocabulary_is_padded_to_a_multiple_of_the_ranks() -> None:
    assert make_plan(shape(QWEN2), ParallelLayout(2), vocab_multiple=None).padded_vocab == 100
    assert make_plan(shape(QWEN2), ParallelLayout(2), vocab_multiple=51).padded_vocab == 102
