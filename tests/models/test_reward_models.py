"""Reward models: conversion between transformers and MindSpeed, and scores of real ranks.

A sequence classifier with one label in transformers is an `rm_head` in MindSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import families
import parity_ranks
from mixture_families import QWEN3_MOE
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.scored import with_score_head
from msrl.checkpoint.source import open_weights
from msrl.errors import ManyErrors, MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.trainer.settings import Layout
from msrl.workflows.convert.inspection import training_state
from parity_ranks import Case
from support import assert_each_mentions, mentions
from test_convert import run

TIED = {"tie_word_embeddings": True}
ROWS = {
    "llama": families.LLAMA,
    "qwen2": families.QWEN2 | TIED,
    "gemma2": families.GEMMA2,
    "mistral": families.MISTRAL,
    "qwen3 moe": QWEN3_MOE,
}
PAD = 5
LAYOUTS = {
    "whole": Layout(),
    "tp2": Layout(tp=2),
    "tp2 sp pp2": Layout(tp=2, pp=2, sp=True),
    "tp2 pp2 vpp": Layout(tp=2, pp=2, vpp=1),
    "pp2, uneven": Layout(pp=2, num_layer_list=(3, 1)),
    "pp2, empty layers": Layout(pp=2, noop_layers=(0, 5)),
}


def save(folder: Path, row: str, **changes: Any) -> dict[str, Tensor]:
    """Save a small random reward model with distinguishable scores and return its weights."""
    base = ROWS[row]
    name = base["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    config = {
        **base,
        "architectures": [name],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": PAD,
        **changes,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        key: tensor for key, tensor in families.weights(base).items() if key != "lm_head.weight"
    }
    weights["score.weight"] = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


@pytest.mark.parametrize("name", ["chatglm 2", "qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_a_family_without_a_classifier_of_transformers_gets_a_score_head(
    tmp_path: Path, name: str
) -> None:
    folder = families.save_model(tmp_path / "hf", families.FAMILIES[name].config)
    source = open_weights(folder)
    scored = with_score_head(source)
    assert scored.shape.reward_head
    assert scored.shape.architecture == source.shape.architecture
    stored = dict(scored.local_tensors(ParallelLayout(), Coords()))
    assert not stored["rm_head.weight"].any() and "output_layer.weight" not in stored


def ranks(folder: Path, layout: ParallelLayout) -> dict[Coords, dict[str, Tensor]]:
    return {
        at: torch.load(mcore.rank_file(folder, 1, layout, at), weights_only=False)["model"]
        for at in layout.ranks()
    }


def test_a_score_head_is_split_along_hidden_and_its_bias_is_zero_on_every_rank(
    tmp_path: Path,
) -> None:
    hf = save(tmp_path / "hf", "qwen2")
    write_mcore(
        open_weights(tmp_path / "hf"), tmp_path / "mcore", McoreTarget(ParallelLayout(2, 2))
    )
    tensors = ranks(tmp_path / "mcore", ParallelLayout(2, 2))
    for tp_rank in (0, 1):
        last = tensors[Coords(tp_rank, 1)]
        assert torch.equal(
            last["rm_head.weight"], hf["score.weight"][:, 32 * tp_rank : 32 * tp_rank + 32]
        )
        assert (
            torch.equal(last["rm_head.bias"], torch.zeros(1)) and "output_layer.weight" not in last
        )
        assert "rm_head.weight" not in tensors[Coords(tp_rank, 0)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("row", ROWS)
def test_a_reward_model_comes_back_bit_for_bit_from_another_layout(
    tmp_path: Path, row: str
) -> None:
    hf = save(tmp_path / "hf", row)
    write_mcore(
        open_weights(tmp_path / "hf"),
        tmp_path / "first",
        McoreTarget(ParallelLayout(2, 2), vocab_multiple=8),
    )
    write_mcore(
        open_weights(tmp_path / "first"), tmp_path / "second", McoreTarget(ParallelLayout(1, 4))
    )
    write_hf(open_weights(tmp_path / "second"), tmp_path / "back", None)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == hf.keys() and all(same_bits(back[name], hf[name]) for name in hf)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (tmp_path / "hf" / "config.json").read_text()
    )


def add_tensors(folder: Path, layout: ParallelLayout, **added: Tensor) -> None:
    """Add tensors to the last stage's files as another system would have written them."""
    for at in layout.ranks():
        if at.pp == layout.pp - 1:
            path = mcore.rank_file(folder, 1, layout, at)
            contents = mcore.read_rank_file(path, mmap=False)
            model = {
                **contents["model"],
                **{name.replace("__", "."): tensor for name, tensor in added.items()},
            }
            mcore.write_rank_file(path, model, contents["args"], 1)


def test_an_output_layer_that_a_reward_model_does_not_use_is_dropped_and_reported(
    tmp_path: Path,
) -> None:
    hf = save(tmp_path / "hf", "llama")
    write_mcore(open_weights(tmp_path / "hf"), tmp_path / "mcore", McoreTarget(ParallelLayout(2)))
    add_tensors(tmp_path / "mcore", ParallelLayout(2), output_layer__weight=torch.randn(100, 64))
    write_hf(open_weights(tmp_path / "mcore"), tmp_path / "back", None)
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == hf.keys()
    assert_each_mentions(training_state(tmp_path / "mcore"), ("output layer", "reward model"))


def test_a_bias_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "hf", "llama")
    write_mcore(open_weights(tmp_path / "hf"), tmp_path / "mcore", McoreTarget(ParallelLayout(2)))
    add_tensors(tmp_path / "mcore", ParallelLayout(2), rm_head__bias=torch.ones(1))
    with pytest.raises(
        MsrlError, match=mentions("rm_head.bias", "zero", "LlamaForSequenceClassification")
    ):
        open_weights(tmp_path / "mcore")


@pytest.mark.parametrize(
    ("labels", "message"), [({"0": "a", "1": "b", "2": "c"}, "3 scores"), (None, "2 scores")]
)
def test_a_classifier_with_other_than_one_score_is_refused(
    tmp_path: Path, labels: Any, message: str
) -> None:
    save(tmp_path / "hf", "llama", id2label=labels)
    with pytest.raises(MsrlError, match=mentions("id2label", message, "num_labels")):
        open_weights(tmp_path / "hf")


def test_a_reward_model_can_neither_be_trained_nor_generate_text(tmp_path: Path) -> None:
    from msrl.config.schema import Config, ModelConfig
    from msrl.plan.run_plan import resolve

    save(tmp_path / "hf", "llama")
    with pytest.raises(
        (MsrlError, ManyErrors), match=mentions("LlamaForSequenceClassification", "scores")
    ):
        _ = resolve(Config(model=ModelConfig(path=str(tmp_path / "hf"))), "train-sft").shape


@pytest.mark.slow
def test_scores_of_real_ranks_agree_with_transformers_in_every_layout(tmp_path: Path) -> None:
    import transformers

    for row in ROWS:
        save(tmp_path / row, row)
    cases = [
        Case(f"{row}, {name}", tmp_path / row, layout)
        for name, layout in LAYOUTS.items()
        for row in ROWS
    ]
    scores = parity_ranks.rank_logits(cases)
    ids = parity_ranks.sequences(199)
    ends = np.cumsum([len(row) for row in ids]) - 1
    for row in ROWS:
        model_class = getattr(
            transformers,
            json.loads((tmp_path / row / "config.json").read_text())["architectures"][0],
        )
        model = model_class.from_pretrained(
            tmp_path / row, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with (
            torch.inference_mode()
        ):  # the model's own forward pass: the score of a sequence is its last token's score
            expected = torch.cat(
                [model(torch.from_numpy(tokens)[None]).logits for tokens in ids]
            ).numpy()
        assert all(tokens[-1] != PAD for tokens in ids)
        assert expected.shape == (len(ids), 1) and expected.std() > 0.3
        for name in LAYOUTS:
            assert np.abs(scores[f"{row}, {name}"][ends] - expected).max() < 1e-4, (row, name)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("fits", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_conversion_of_a_reward_model_is_verified_by_its_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    from msrl.verification import report as convert_proof

    monkeypatch.setattr(convert_proof, "fits_in_memory", lambda shape: fits)
    save(tmp_path / "hf", "qwen2")
    run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "mcore", tp=2)
    run(command="mcore2hf", load=tmp_path / "mcore", save=tmp_path / "back")
    output = " ".join(capsys.readouterr().out.split())
    assert (
        output.count("scores, fp32") == 2
        and output.count("64 positions x 1") == 2
        and "distributions" not in output
    )
