"""Layers and experts of each rank, derived by hand from Megatron's and MindSpeed's definitions."""

from __future__ import annotations

import pytest

import mixtures
from msrl.errors import ManyErrors
from msrl.models import stages
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors
from support import assert_each_mentions, assert_mentions
from test_models import LLAMA, shape

EIGHT = shape({**LLAMA, "num_hidden_layers": 8})


def layers(layout: ParallelLayout, num_layers: int = 8) -> list[tuple[tuple[int | None, ...], ...]]:
    return [layout.chunks(num_layers, stage) for stage in range(layout.pp)]


def test_stages_are_equal_blocks() -> None:
    assert layers(ParallelLayout(pp=2)) == [((0, 1, 2, 3),), ((4, 5, 6, 7),)]


def test_virtual_stages_are_interleaved() -> None:
    """Megatron's own example: 8 layers, 2 stages, 2 layers per virtual stage."""
    assert layers(ParallelLayout(pp=2, vpp=2)) == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    assert layers(ParallelLayout(pp=2, vpp=1))[0] == ((0,), (2,), (4,), (6,))


def test_stages_have_the_sizes_of_num_layer_list() -> None:
    assert layers(ParallelLayout(pp=3, num_layer_list=(1, 4, 3))) == [
        ((0,),),
        ((1, 2, 3, 4),),
        ((5, 6, 7),),
    ]


def test_empty_layers_occupy_a_position_but_have_no_number() -> None:
    assert layers(ParallelLayout(pp=2, noop_layers=(0, 7)), 6) == [
        ((None, 0, 1, 2),),
        ((3, 4, 5, None),),
    ]
    assert layers(ParallelLayout(pp=2, vpp=2, noop_layers=(4, 5)), 6) == [
        ((0, 1), (None, None)),
        ((2, 3), (4, 5)),
    ]


def test_names_count_from_the_virtual_stage_and_skip_empty_layers() -> None:
    tensors = stage_tensors(
        shape({**LLAMA, "num_hidden_layers": 7}),
        ParallelLayout(pp=2, vpp=2, noop_layers=(2,)),
        Coords(pp=1),
    )
    norms = {p.name: p.rule.hf[0] for p in tensors if p.name.endswith("input_layernorm.weight")}
    assert norms == {
        "model0.decoder.layers.1.input_layernorm.weight": "model.layers.2.input_layernorm.weight",
        "model1.decoder.layers.0.input_layernorm.weight": "model.layers.5.input_layernorm.weight",
        "model1.decoder.layers.1.input_layernorm.weight": "model.layers.6.input_layernorm.weight",
    }
    assert tensors[-1].name == "model1.output_layer.weight"
    assert stages.split_chunk_name(tensors[-1].name) == (1, "output_layer.weight")


@pytest.mark.parametrize(
    ("layout", "messages"),
    [
        (ParallelLayout(pp=3), [("pp=3", "8 layers")]),
        (ParallelLayout(pp=2, vpp=3), [("vpp=3", "virtual", "4 layers")]),
        (ParallelLayout(vpp=2), [("vpp=2", "stages", "pp")]),
        (ParallelLayout(pp=2, vpp=4), [("vpp=4", "4 layers", "virtual")]),
        (ParallelLayout(pp=2, num_layer_list=(3, 4)), [("num_layer_list=3,4", "8 layers")]),
        (ParallelLayout(pp=2, num_layer_list=(0, 8)), [("num_layer_list=0,8", "stage")]),
        (ParallelLayout(pp=3, num_layer_list=(4, 4)), [("num_layer_list=4,4", "2 stages", "pp=3")]),
        (
            ParallelLayout(pp=2, vpp=2, num_layer_list=(4, 4), noop_layers=(1,)),
            [
                ("num_layer_list=4,4", "vpp"),
                ("num_layer_list=4,4", "noop_layers"),
            ],
        ),
        (ParallelLayout(pp=2, noop_layers=(1,)), [("pp=2", "8 layers", "1 empty")]),
        (ParallelLayout(noop_layers=(1, 10)), [("noop_layers=1,10", "positions", "9")]),
        (ParallelLayout(noop_layers=(1, 1)), [("noop_layers=1,1", "positions", "9")]),
        (ParallelLayout(ep=2, etp=1), [("ep=2", "experts"), ("etp=1", "experts")]),
        (ParallelLayout(tp=4, pp=3), [("tp=4", "KV heads"), ("pp=3", "8 layers")]),
    ],
)
def test_every_size_that_does_not_fit_is_reported(
    layout: ParallelLayout, messages: list[tuple[str, ...]]
) -> None:
    with pytest.raises(ManyErrors) as error:
        layout.check(EIGHT)
    assert_each_mentions(error.value.messages, *messages)


def test_a_layout_survives_json_and_prints_its_options() -> None:
    layout = ParallelLayout(2, 4, vpp=2, noop_layers=(0, 47), ep=8, etp=1)
    assert (
        ParallelLayout.from_json({**layout.as_json(), "noop_layers": [0, 47], "names": "te"})
        == layout
    )
    assert (
        str(layout) == "tp 2, pp 4, vpp 2, noop_layers 0,47, ep 8, etp 1"
        and str(ParallelLayout()) == "tp 1, pp 1"
    )


# Experts


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> Shape:
    return mixtures.install(monkeypatch)


def experts_of_rank(model: Shape, layout: ParallelLayout, at: Coords) -> list[tuple[str, int, int]]:
    """Return the experts in the first mixture layer of one rank: local number, global number,
    shard.
    """
    tensors = [
        p
        for p in stage_tensors(model, layout, at)
        if ".layers.1." in p.name and p.rule.expert is not None and "fc1" in p.name
    ]
    return [(p.name.split(".")[6], int(p.rule.hf[0].split(".")[5]), p.shard) for p in tensors]


def test_experts_are_distributed_in_blocks_and_sharded_over_tp(mixture: Shape) -> None:
    layout = ParallelLayout(tp=2, ep=4)
    layout.check(mixture)
    assert layout.ranks_per_model == 8
    assert layout.ranks() == tuple(Coords(t, 0, e) for e in range(4) for t in range(2))
    assert experts_of_rank(mixture, layout, Coords(1, 0, 2)) == [("0", 4, 1), ("1", 5, 1)]


def test_unsharded_experts_are_distributed_over_the_tensor_parallel_ranks_too(
    mixture: Shape,
) -> None:
    """MindSpeed writes only the ranks that exist: ep = tp % EP or tp = ep % TP."""
    assert ParallelLayout(tp=4, ep=2, etp=1).ranks() == (
        Coords(0, 0, 0),
        Coords(1, 0, 1),
        Coords(2, 0, 0),
        Coords(3, 0, 1),
    )
    assert ParallelLayout(tp=2, ep=4, etp=1).ranks() == (
        Coords(0, 0, 0),
        Coords(1, 0, 1),
        Coords(0, 0, 2),
        Coords(1, 0, 3),
    )
    assert experts_of_rank(mixture, ParallelLayout(tp=2, ep=4, etp=1), Coords(1, 0, 3)) == [
        ("0", 6, 0),
        ("1", 7, 0),
    ]


def test_extended_expert_parallelism_numbers_ranks_by_ep_then_tp(mixture: Shape) -> None:
    layout = ParallelLayout(tp=2, ep=2, moe_tp_extend_ep=True)
    assert layout.ranks() == (Coords(0, 0, 0), Coords(1, 0, 0), Coords(0, 0, 1), Coords(1, 0, 1))
    assert [experts_of_rank(mixture, layout, at)[0][1] for at in layout.ranks()] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelLayout(ep=3), ("ep=3", "8 experts")),
        (ParallelLayout(tp=2, ep=8, moe_tp_extend_ep=True), ("ep=8", "tp=2", "8 experts")),
        (ParallelLayout(tp=2, etp=4), ("etp=4", "tp=2")),
        (ParallelLayout(tp=2, etp=1, moe_tp_extend_ep=True), ("etp=1", "moe_tp_extend_ep")),
    ],
)
def test_layouts_that_do_not_divide_the_experts_are_refused(
    mixture: Shape, layout: ParallelLayout, message: tuple[str, ...]
) -> None:
    with pytest.raises(ManyErrors) as error:
        layout.check(mixture)
    assert_mentions(error.value, *message)
