"""Checkpoints of every parallel layout: MindSpeed's format by hand, and resharding."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mixtures
import tiny_checkpoints as tiny
from msrl.checkpoint import source as source_module
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.mcore.arguments import layout_from_args
from msrl.checkpoint.mcore.names import Naming, file_tensors
from msrl.checkpoint.source import WeightSource, open_mcore, open_weights
from msrl.errors import MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.verification.bits import compare
from support import mentions

LAYERS = 4
FAMILIES = tuple(tiny.FAMILIES)


def write(
    source: WeightSource, save: Path, layout: ParallelLayout, naming: Naming | None = None
) -> dict[Coords, dict[str, Any]]:
    """Convert, and return the contents of the files, read with torch."""
    write_mcore(source, save, McoreTarget(layout, naming=naming or Naming()))
    return {
        at: torch.load(mcore.rank_file(save, 1, layout, at), weights_only=False)
        for at in layout.ranks()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Qwen2 of four layers."""
    path = tmp_path_factory.mktemp("hf")
    tiny.save(path, num_hidden_layers=LAYERS)
    return path


def norms(chunk: Mapping[str, Tensor]) -> list[int]:
    """Return the local layer numbers of a virtual stage."""
    return sorted(
        int(name.split(".")[2]) for name in chunk if name.endswith("pre_mlp_layernorm.weight")
    )


def test_virtual_stages_are_models_of_one_file(tmp_path: Path, folder: Path) -> None:
    files = write(open_weights(folder), tmp_path / "mcore", ParallelLayout(pp=2, vpp=1))
    hf = open_weights(folder)
    assert all(
        "model" not in file
        and sorted(k for k in file if k.startswith("model")) == ["model0", "model1"]
        for file in files.values()
    )
    second = files[Coords(pp=1)]
    name = "decoder.layers.0.pre_mlp_layernorm.weight"
    expected = {
        chunk: hf._checkpoint.tensor(f"model.layers.{layer}.post_attention_layernorm.weight")
        for chunk, layer in ((0, 1), (1, 3))
    }  # type: ignore[attr-defined]
    assert all(
        same_bits(second[f"model{chunk}"][name], tensor) for chunk, tensor in expected.items()
    )
    assert (
        "embedding.word_embeddings.weight" in files[Coords()]["model0"]
        and "output_layer.weight" in second["model1"]
    )
    args = second["args"]
    assert (
        args.num_layers_per_virtual_pipeline_stage,
        args.virtual_pipeline_model_parallel_size,
    ) == (1, 2)


def test_uneven_stages_and_empty_layers_are_recorded_in_the_arguments(
    tmp_path: Path, folder: Path
) -> None:
    uneven = write(
        open_weights(folder), tmp_path / "uneven", ParallelLayout(pp=2, num_layer_list=(3, 1))
    )
    assert [norms(file["model"]) for file in uneven.values()] == [[0, 1, 2], [0]]
    assert uneven[Coords()]["args"].num_layer_list == "3,1"
    empty = write(
        open_weights(folder), tmp_path / "empty", ParallelLayout(pp=3, noop_layers=(0, 5))
    )
    assert [norms(file["model"]) for file in empty.values()] == [[1], [0, 1], [0]]
    assert (empty[Coords()]["args"].num_layers, empty[Coords()]["args"].noop_layers) == (6, "0,5")


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(pp=3, noop_layers=(0, 5)),
        ParallelLayout(1, 2, vpp=2, noop_layers=(2, 3, 6, 7)),
    ],
    ids=str,
)
def test_empty_layers_that_the_arguments_only_count_follow_from_the_names(
    tmp_path: Path, folder: Path, layout: ParallelLayout
) -> None:
    """MindSpeed's converter needs them as an option on the way back; msrl does not."""
    write(open_weights(folder), tmp_path / "mcore", layout)
    for at in layout.ranks():
        path = mcore.rank_file(tmp_path / "mcore", 1, layout, at)
        contents = mcore.read_rank_file(path, mmap=False)
        delattr(contents["args"], "noop_layers")
        mcore.write_rank_file(path, contents["model"], contents["args"], 1)
    assert open_mcore(tmp_path / "mcore").layout == layout
    assert compare(open_weights(folder), open_weights(tmp_path / "mcore"), None).different == ()


def test_arguments_are_read_as_megatron_keeps_them_after_parsing() -> None:
    args = argparse.Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        noop_layers={47, 0},
        num_layer_list=None,
    )
    assert layout_from_args(args) == ParallelLayout(2, 4, noop_layers=(0, 47))
    args = argparse.Namespace(
        tensor_model_parallel_size=4, expert_tensor_parallel_size=4, num_layer_list=[3, 5]
    )
    assert layout_from_args(args) == ParallelLayout(4, num_layer_list=(3, 5))


def round_trip(tmp_path: Path, family: str, layout: ParallelLayout, naming: Naming) -> None:
    tiny.save(tmp_path / "hf", family, num_hidden_layers=LAYERS, vocab_size=99)
    source = open_weights(tmp_path / "hf")
    layout.check(source.shape)
    write(source, tmp_path / "mcore", layout, naming)
    back = open_mcore(tmp_path / "mcore")
    assert back.layout == layout
    write_hf(back, tmp_path / "back", None)
    result = open_weights(tmp_path / "back")
    assert (
        compare(source, result, None).different == ()
        and compare(source, back, None).num_tensors > 0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_back_from_virtual_stages(tmp_path: Path, family: str) -> None:
    round_trip(tmp_path, family, tiny.LAYOUTS["tp2 vpp"], Naming(te=True))


@pytest.mark.parametrize("chain", [("tp2 pp2", "tp1 pp4", "tp4 pp1"), ("vpp", "uneven", "empty")])
def test_a_chain_of_layouts_ends_as_if_converted_directly(
    tmp_path: Path, chain: tuple[str, ...]
) -> None:
    layouts = {
        **tiny.LAYOUTS,
        "tp2 pp2": ParallelLayout(2, 2),
        "tp1 pp4": ParallelLayout(1, 4),
        "tp4 pp1": ParallelLayout(4),
    }
    tiny.save(
        tmp_path / "hf",
        "qwen3",
        num_hidden_layers=LAYERS,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        vocab_size=99,
    )
    source = open_weights(tmp_path / "hf")
    for number, name in enumerate(chain):
        write(source, tmp_path / str(number), layouts[name])
        source = open_weights(tmp_path / str(number))
    direct = write(open_weights(tmp_path / "hf"), tmp_path / "direct", layouts[chain[-1]])
    for at, expected in direct.items():
        model_shape = torch.load(
            mcore.rank_file(tmp_path / str(len(chain) - 1), 1, layouts[chain[-1]], at),
            weights_only=False,
        )
        for key in (key for key in expected if key.startswith("model")):
            assert list(model_shape[key]) == list(expected[key])
            assert all(
                same_bits(model_shape[key][name], tensor) for name, tensor in expected[key].items()
            )
    assert compare(open_weights(tmp_path / "hf"), source, None).different == ()


# --- experts ---

MIXTURE_LAYOUTS = {
    "whole": ParallelLayout(), "ep4": ParallelLayout(ep=4), "tp2 ep2": ParallelLayout(2, ep=2),
    "tp2 ep2 etp1": ParallelLayout(2, ep=2, etp=1), "tp2 ep4 etp1": ParallelLayout(2, ep=4, etp=1),
    "tp4 ep2 etp1": ParallelLayout(4, ep=2, etp=1),
    "extended": ParallelLayout(2, ep=2, moe_tp_extend_ep=True),
    "pp2 vpp ep2": ParallelLayout(1, 2, vpp=1, ep=2),
    "tp2 pp2 ep2 etp1": ParallelLayout(2, 2, ep=2, etp=1),
    "tp4 etp2 ep2": ParallelLayout(4, ep=2, etp=2),
}  # fmt: skip
NAMINGS = {
    "local": Naming(),
    "grouped": Naming(grouped=True),
    "te": Naming(te=True),
    "te grouped": Naming(te=True, grouped=True),
}


@pytest.fixture
def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mixtures.Weights:
    """Return weights of a mixture of experts; `open_mcore` treats every checkpoint as one of it."""
    model_shape = mixtures.install(monkeypatch)
    monkeypatch.setattr(source_module, "load_shape", lambda folder: model_shape)
    monkeypatch.setattr(ParallelLayout, "_tensor_problems", lambda self, shape: iter(()))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({}))
    return mixtures.Weights(model_shape, tmp_path / "hf")


@pytest.mark.parametrize(
    ("layout", "naming"),
    [("tp2 ep2", "grouped"), ("extended", "local"), ("tp2 ep4 etp1", "te grouped")],
)
def test_a_mixture_comes_back(
    tmp_path: Path, mixture: mixtures.Weights, layout: str, naming: str
) -> None:
    write(mixture, tmp_path / "mcore", MIXTURE_LAYOUTS[layout], NAMINGS[naming])
    back = open_mcore(tmp_path / "mcore")
    assert back.layout == MIXTURE_LAYOUTS[layout]
    assert compare(mixture, back, None).different == ()


@pytest.mark.full
@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("layout", MIXTURE_LAYOUTS)
@pytest.mark.parametrize("target", ["whole", "tp2 ep2", "tp2 ep4 etp1"])
def test_a_mixture_comes_back_from_every_layout_through_another(
    tmp_path: Path, mixture: mixtures.Weights, layout: str, naming: str, target: str
) -> None:
    write(mixture, tmp_path / "first", MIXTURE_LAYOUTS[layout], NAMINGS[naming])
    write(
        open_mcore(tmp_path / "first"),
        tmp_path / "second",
        MIXTURE_LAYOUTS[target],
        NAMINGS[naming],
    )
    assert compare(mixture, open_mcore(tmp_path / "second"), None).different == ()


def test_experts_of_a_rank_are_fused_for_grouped_products(
    tmp_path: Path, mixture: mixtures.Weights
) -> None:
    """With four experts of two columns each on a rank, weight1 is [hidden, 4 * 2 * 2] in memory as
    [4, hidden, 4], and weight2 is [4 * 2, hidden].
    """
    files = write(mixture, tmp_path / "mcore", ParallelLayout(2, ep=2), Naming(grouped=True))
    model = files[Coords(1, 0, 1)]["model"]
    experts = "decoder.layers.2.mlp.experts."
    assert model[experts + "weight1"].shape == (6, 16) and model[experts + "weight2"].shape == (
        8,
        6,
    )
    hf = {
        kind: mixture.tensors[f"model.layers.2.mlp.experts.5.{kind}_proj.weight"]
        for kind in ("gate", "up", "down")
    }
    second = model[experts + "weight1"].view(4, 6, 4)[1]  # expert 5 is the second of the rank's
    assert torch.equal(second, torch.cat([hf["gate"][2:], hf["up"][2:]]).t())
    assert torch.equal(model[experts + "weight2"].view(4, 2, 6)[1], hf["down"][:, 2:].t())
    assert not any("local_experts" in name for name in model)
    args = files[Coords(1, 0, 1)]["args"]
    assert (
        args.num_experts,
        args.moe_grouped_gemm,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size,
    ) == (8, True, 2, 2)


def test_names_of_transformer_engine_keep_the_norm_before_a_router() -> None:
    names = [
        f"decoder.layers.{layer}.{suffix}"
        for layer in (0, 1)
        for suffix in ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    ]
    names += [
        f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc{i}.weight"
        for e in (0, 1)
        for i in (1, 2)
    ]
    assert [entry.name.removeprefix("decoder.layers.") for entry in file_tensors(names,
    Naming(te=True, grouped=True))] == [
        "0.self_attention.linear_qkv.layer_norm_weight", "0.mlp.linear_fc1.layer_norm_weight",
        "1.self_attention.linear_qkv.layer_norm_weight", "1.pre_mlp_layernorm.weight",
        "1.mlp.experts.linear_fc1.weight0", "1.mlp.experts.linear_fc2.weight0",
        "1.mlp.experts.linear_fc1.weight1", "1.mlp.experts.linear_fc2.weight1",
    ]  # fmt: skip


def test_files_of_ranks_that_hold_copies_are_not_written(
    tmp_path: Path, mixture: mixtures.Weights
) -> None:
    write(mixture, tmp_path / "mcore", ParallelLayout(2, ep=4, etp=1))
    assert sorted(path.name for path in (tmp_path / "mcore" / "iter_0000001").iterdir()) == [
        "mp_rank_00_000", "mp_rank_00_002", "mp_rank_01_001", "mp_rank_01_003",
    ]  # fmt: skip


def test_a_single_number_beside_tp_is_a_stage_or_an_expert_group_as_the_arguments_say(
    tmp_path: Path, mixture: mixtures.Weights
) -> None:
    write(mixture, tmp_path / "experts", ParallelLayout(ep=2))
    write(mixture, tmp_path / "stages", ParallelLayout(pp=2))
    assert open_mcore(tmp_path / "experts").layout == ParallelLayout(ep=2) and open_mcore(
        tmp_path / "stages"
    ).layout == ParallelLayout(pp=2)


def test_grouped_experts_whose_number_is_unknown_are_refused(
    tmp_path: Path, mixture: mixtures.Weights
) -> None:
    write(mixture, tmp_path / "mcore", ParallelLayout(), Naming(grouped=True))
    path = mcore.rank_file(tmp_path / "mcore", 1, ParallelLayout(), Coords())
    contents = torch.load(path, weights_only=False)
    contents["args"].num_experts = None
    torch.save(contents, path)
    with pytest.raises(MsrlError, match=mentions("arguments", "num_experts")):
        open_mcore(tmp_path / "mcore")


def test_a_checkpoint_of_a_v_shaped_schedule_is_refused_by_name(
    tmp_path: Path, folder: Path
) -> None:
    write(open_weights(folder), tmp_path / "mcore", ParallelLayout(pp=2))
    path = mcore.rank_file(tmp_path / "mcore", 1, ParallelLayout(pp=2), Coords())
    contents = mcore.read_rank_file(path, mmap=False)
    contents["args"].schedules_method = "dualpipev"
    mcore.write_rank_file(path, contents["model"], contents["args"], 1)
    with pytest.raises(MsrlError, match=mentions("--schedules-method dualpipev")):
        open_weights(tmp_path / "mcore")
