"""Where a cut puts layers and experts: worked out by hand from Megatron's and MindSpeed's definitions."""

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


def layers(cut: ParallelLayout, num_layers: int = 8) -> list[tuple[tuple[int | None, ...], ...]]:
    return [cut.chunks(num_layers, stage) for stage in range(cut.pp)]


def test_stages_are_equal_blocks() -> None:
    assert layers(ParallelLayout(pp=2)) == [((0, 1, 2, 3),), ((4, 5, 6, 7),)]


def test_virtual_stages_take_turns() -> None:
    """Megatron's own example: 8 layers, 2 stages, 2 layers per virtual stage."""
    assert layers(ParallelLayout(pp=2, vpp=2)) == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    assert layers(ParallelLayout(pp=2, vpp=1))[0] == ((0,), (2,), (4,), (6,))


def test_stages_of_a_list_have_its_sizes() -> None:
    assert layers(ParallelLayout(pp=3, num_layer_list=(1, 4, 3))) == [((0,),), ((1, 2, 3, 4),), ((5, 6, 7),)]


def test_empty_layers_take_a_place_and_no_number() -> None:
    assert layers(ParallelLayout(pp=2, noop_layers=(0, 7)), 6) == [((None, 0, 1, 2),), ((3, 4, 5, None),)]
    assert layers(ParallelLayout(pp=2, vpp=2, noop_layers=(4, 5)), 6) == [((0, 1), (None, None)), ((2, 3), (4, 5))]


def test_names_count_from_the_chunk_and_leave_holes_for_empty_layers() -> None:
    placed = stage_tensors(shape({**LLAMA, "num_hidden_layers": 7}), ParallelLayout(pp=2, vpp=2, noop_layers=(2,)), Coords(pp=1))
    norms = {p.name: p.rule.hf[0] for p in placed if p.name.endswith("input_layernorm.weight")}
    assert norms == {
        "model0.decoder.layers.1.input_layernorm.weight": "model.layers.2.input_layernorm.weight",
        "model1.decoder.layers.0.input_layernorm.weight": "model.layers.5.input_layernorm.weight",
        "model1.decoder.layers.1.input_layernorm.weight": "model.layers.6.input_layernorm.weight",
    }
    assert placed[-1].name == "model1.output_layer.weight"
    assert stages.chunk_of(placed[-1].name) == (1, "output_layer.weight")


@pytest.mark.parametrize(
    ("cut", "messages"),
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
        (ParallelLayout(tp=4, pp=3), [("tp=4", "query groups"), ("pp=3", "8 layers")]),
    ],
)
def test_every_size_that_does_not_fit_is_named(cut: ParallelLayout, messages: list[tuple[str, ...]]) -> None:
    with pytest.raises(ManyErrors) as error:
        cut.check(EIGHT)
    assert_each_mentions(error.value.messages, *messages)


def test_a_cut_goes_through_json_and_says_what_it_is() -> None:
    cut = ParallelLayout(2, 4, vpp=2, noop_layers=(0, 47), ep=8, etp=1)
    assert ParallelLayout.from_json({**cut.as_json(), "noop_layers": [0, 47], "names": "te"}) == cut
    assert str(cut) == "tp 2, pp 4, vpp 2, noop_layers 0,47, ep 8, etp 1" and str(ParallelLayout()) == "tp 1, pp 1"


# --- experts --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> Shape:
    return mixtures.install(monkeypatch)


def held(found: Shape, cut: ParallelLayout, at: Coords) -> list[tuple[str, int, int]]:
    """Experts of the first layer that has some, on one rank: local number in the name, global number, shard."""
    placed = [p for p in stage_tensors(found, cut, at) if ".layers.1." in p.name and p.rule.expert is not None and "fc1" in p.name]
    return [(p.name.split(".")[6], int(p.rule.hf[0].split(".")[5]), p.shard) for p in placed]


def test_experts_are_dealt_out_in_blocks_and_cut_over_tp(mixture: Shape) -> None:
    cut = ParallelLayout(tp=2, ep=4)
    cut.check(mixture)
    assert cut.ranks_per_model == 8
    assert cut.ranks() == tuple(Coords(t, 0, e) for e in range(4) for t in range(2))
    assert held(mixture, cut, Coords(1, 0, 2)) == [("0", 4, 1), ("1", 5, 1)]


def test_whole_experts_spread_over_the_tensor_parallel_ranks_too(mixture: Shape) -> None:
    """MindSpeed writes only the ranks that exist: ep = tp % EP or tp = ep % TP."""
    assert ParallelLayout(tp=4, ep=2, etp=1).ranks() == (Coords(0, 0, 0), Coords(1, 0, 1), Coords(2, 0, 0), Coords(3, 0, 1))
    assert ParallelLayout(tp=2, ep=4, etp=1).ranks() == (Coords(0, 0, 0), Coords(1, 0, 1), Coords(0, 0, 2), Coords(1, 0, 3))
    assert held(mixture, ParallelLayout(tp=2, ep=4, etp=1), Coords(1, 0, 3)) == [("0", 6, 0), ("1", 7, 0)]


def test_extended_expert_parallelism_numbers_ranks_by_ep_then_tp(mixture: Shape) -> None:
    cut = ParallelLayout(tp=2, ep=2, moe_tp_extend_ep=True)
    assert cut.ranks() == (Coords(0, 0, 0), Coords(1, 0, 0), Coords(0, 0, 1), Coords(1, 0, 1))
    assert [held(mixture, cut, at)[0][1] for at in cut.ranks()] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (ParallelLayout(ep=3), ("ep=3", "8 experts")),
        (ParallelLayout(tp=2, ep=8, moe_tp_extend_ep=True), ("ep=8", "tp=2", "8 experts")),
        (ParallelLayout(tp=2, etp=4), ("etp=4", "tp=2")),
        (ParallelLayout(tp=2, etp=1, moe_tp_extend_ep=True), ("etp=1", "moe_tp_extend_ep")),
    ],
)
def test_cuts_that_experts_do_not_fit_are_refused(mixture: Shape, cut: ParallelLayout, message: tuple[str, ...]) -> None:
    with pytest.raises(ManyErrors) as error:
        cut.check(mixture)
    assert_mentions(error.value, *message)
