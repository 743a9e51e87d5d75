"""Checkpoints of Megatron's models before megatron-core: module tree and all conversions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny_checkpoints as tiny
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.mcore.names import Naming
from msrl.checkpoint.source import open_weights
from msrl.errors import MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from support import assert_mentions, mentions
from test_convert import run, save_real, to_mcore

LEGACY = Naming(legacy=True)


def by_hand(
    hf: dict[str, Tensor], *, stage: int, tp_rank: int, tied: bool
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Return a file of the tiny Qwen2 with tp 2 and pp 2 (hidden 64, 4 heads of 16 in 2 groups,
    feed-forward 96, vocabulary 100, 2 layers).
    """

    def half(tensor: Tensor, axis: int = 0) -> Tensor:
        return tensor.chunk(2, axis)[tp_rank]

    layer = {
        name.removeprefix(f"model.layers.{stage}."): tensor
        for name, tensor in hf.items()
        if f"layers.{stage}." in name
    }
    encoder = {
        "layers.0.input_norm.weight": layer["input_layernorm.weight"],
        "layers.0.self_attention.query_key_value.weight": torch.cat(
            [half(layer[f"self_attn.{x}_proj.weight"]) for x in "qkv"]
        ),
        "layers.0.self_attention.query_key_value.bias": torch.cat(
            [half(layer[f"self_attn.{x}_proj.bias"]) for x in "qkv"]
        ),
        "layers.0.self_attention.dense.weight": half(layer["self_attn.o_proj.weight"], 1),
        "layers.0.post_attention_norm.weight": layer["post_attention_layernorm.weight"],
        "layers.0.mlp.dense_h_to_4h.weight": torch.cat(
            [half(layer[f"mlp.{x}_proj.weight"]) for x in ("gate", "up")]
        ),
        "layers.0.mlp.dense_4h_to_h.weight": half(layer["mlp.down_proj.weight"], 1),
    }
    table = half(hf["model.embed_tokens.weight"])
    if stage == 0:
        return {
            "language_model": {
                "embedding": {"word_embeddings": {"weight": table}},
                "encoder": encoder,
            }
        }  # pyright: ignore
    encoder["final_norm.weight"] = hf["model.norm.weight"]
    if tied:
        return {
            "language_model": {"encoder": encoder},
            "word_embeddings_for_head": {"weight": table},
        }  # pyright: ignore
    return {
        "language_model": {
            "encoder": encoder,
            "output_layer": {"weight": half(hf["lm_head.weight"])},
        }
    }


def leaves(tree: object, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {prefix: tree}
    assert isinstance(tree, dict)
    return {
        name: leaf
        for key, value in tree.items()
        for name, leaf in leaves(value, f"{prefix}/{key}").items()
    }


@pytest.mark.parametrize("tied", [True, False])
def test_files_have_the_tree_of_modules_of_legacy_models(tmp_path: Path, tied: bool) -> None:
    hf, layout = tiny.save(tmp_path / "hf", tie_word_embeddings=tied), ParallelLayout(2, 2)
    files = to_mcore(tmp_path / "hf", tmp_path / "legacy", layout, naming=LEGACY)
    # The same tree written by torch, with further entries of such files.
    by_torch = tmp_path / "theirs"
    for at in layout.ranks():
        expected = leaves(by_hand(hf, stage=at.pp, tp_rank=at.tp, tied=tied))
        ours = leaves(files[at])
        assert ours.keys() == expected.keys() and all(
            same_bits(ours[name], expected[name]) for name in expected
        )
        path = mcore.rank_file(tmp_path / "legacy", 1, layout, at)
        tree = by_hand(hf, stage=at.pp, tp_rank=at.tp, tied=tied)
        tree["language_model"]["encoder"]["layers.0.self_attention._extra_state"] = None  # pyright: ignore
        args = mcore.read_rank_file(path)["args"]
        assert args.use_mcore_models is False
        copy = mcore.rank_file(by_torch, 1, layout, at)
        copy.parent.mkdir(parents=True)
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": tree}, copy)
    (by_torch / "latest_checkpointed_iteration.txt").write_text("1")
    (by_torch / "hf").symlink_to(tmp_path / "hf")
    write_hf(open_weights(by_torch), tmp_path / "back", None)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == hf.keys() and all(same_bits(back[name], hf[name]) for name in hf)


@pytest.mark.sample(3)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral"])
def test_every_direction_of_the_guides_table_ends_as_if_converted_directly(
    tmp_path: Path, family: str, tied: bool
) -> None:
    """HF -> legacy -> mcore -> legacy -> legacy -> HF, each with another parallel layout."""
    hf = tiny.save(
        tmp_path / "0", family, tie_word_embeddings=tied, num_hidden_layers=4, vocab_size=99
    )
    steps = [
        (ParallelLayout(2, 2), LEGACY),
        (ParallelLayout(1, 4), Naming()),
        (ParallelLayout(1, 2, vpp=1), LEGACY),
        (ParallelLayout(2, 2, num_layer_list=(1, 3)), LEGACY),
    ]
    for number, (layout, naming) in enumerate(steps):
        write_mcore(
            open_weights(tmp_path / str(number)),
            tmp_path / str(number + 1),
            McoreTarget(layout, naming=naming),
        )
    write_hf(open_weights(tmp_path / "4"), tmp_path / "back", None)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == hf.keys() and all(same_bits(back[name], hf[name]) for name in hf)
    direct = to_mcore(tmp_path / "0", tmp_path / "direct", ParallelLayout(1, 4))
    by_way = {
        at: torch.load(
            mcore.rank_file(tmp_path / "2", 1, ParallelLayout(1, 4), at), weights_only=False
        )["model"]
        for at in direct
    }
    assert all(
        same_bits(by_way[at][name], tensor) for at in direct for name, tensor in direct[at].items()
    )


def test_a_model_without_legacy_names_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    tiny.save(tmp_path / "hf", "qwen3")
    with pytest.raises(
        MsrlError, match=mentions("self_attention.k_layernorm.weight", "Qwen3ForCausalLM")
    ):
        write_mcore(open_weights(tmp_path / "hf"), tmp_path / "legacy", McoreTarget(naming=LEGACY))
    assert not (tmp_path / "legacy").exists()


def test_an_unknown_legacy_tensor_is_reported(tmp_path: Path) -> None:
    hf = tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "legacy", naming=LEGACY)
    path = mcore.rank_file(tmp_path / "legacy", 1, ParallelLayout(), Coords())
    contents = torch.load(path, weights_only=False)
    contents["model"]["language_model"]["pooler"] = {"dense.weight": hf["model.norm.weight"]}
    torch.save(contents, path)
    with pytest.raises(MsrlError, match=mentions("language_model.pooler.dense.weight", "legacy")):
        open_weights(tmp_path / "legacy")


@pytest.mark.full
@pytest.mark.slow
def test_a_conversion_to_legacy_names_is_verified_by_real_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_real(tmp_path / "hf", "qwen2", tied=True)
    run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "legacy", tp=2, names="legacy")
    output = capsys.readouterr().out
    assert_mentions(output, "round trip", "64/64")
