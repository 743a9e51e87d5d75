"""Every family on real Megatron ranks computes the logits of transformers (or of a forward pass written by hand for remote code)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import families
import parity_ranks
import reference_models
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.verify import same_bits
from msrl.errors import MsrlError
from msrl.models.cut import Coords, Cut
from msrl.models.families import families as registered
from msrl.trainer.settings import Layout
from parity_ranks import Case
from support import python_path

LAYOUTS = {"whole": Layout(), "tp2": Layout(tp=2), "tp2 sp pp2": Layout(tp=2, pp=2, sp=True)}


def test_every_registered_architecture_has_a_row() -> None:
    missing = set(registered()) - {family.architecture for family in (FAMILIES | MIXTURES).values()}
    assert not missing, f"add a row to tests/families.py or mixture_families.py for {', '.join(sorted(missing))}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of each row as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("families")
    for name, family in FAMILIES.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(family.config))
        save_file(families.weights(family.config), root / name / "model.safetensors", metadata={"format": "pt"})
    return {name: root / name for name in FAMILIES}


@pytest.fixture(scope="module")
def megatron(folders: dict[str, Path]) -> dict[str, np.ndarray]:
    """Logits of every row at every layout, [tokens, vocabulary]."""
    from msrl.platforms import get
    from msrl.trainer.launch import run_ranks

    cases = [Case(f"{name}, {cut}", folder, layout) for cut, layout in LAYOUTS.items() for name, folder in folders.items()]
    return dict(run_ranks("parity_ranks:main", cases, num_ranks=4, platform=get("cpu"), env={"PYTHONPATH": python_path()}))


def transformers_logits(folder: Path, ids: list[np.ndarray]) -> np.ndarray:
    """Logits of transformers, one sequence at a time; it must find every weight and have a place for each."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.inference_mode():
        return torch.cat([model.eval()(torch.from_numpy(row)[None]).logits[0] for row in ids]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_reference_at_every_layout(folders: dict[str, Path], megatron: dict[str, np.ndarray], name: str) -> None:
    family = FAMILIES[name]
    ids = parity_ranks.sequences(families.shape(family.config).vocab_size)
    if family.reference == "transformers":
        expected = transformers_logits(folders[name], ids)
    else:
        expected = getattr(reference_models, family.reference)(family.config, load_file(folders[name] / "model.safetensors"), ids)
    assert expected.std() > 0.3, "logits so small that nothing is compared"
    for cut in LAYOUTS:
        found = megatron[f"{name}, {cut}"]
        assert np.abs(found - expected).max() < 1e-4, cut


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_comes_back_bit_for_bit_from_a_cut(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    write_mcore(open_weights(folders[name]), tmp_path / "mcore", McoreTarget(Cut(2, 2), vocab_multiple=8))
    write_mcore(open_weights(tmp_path / "mcore"), tmp_path / "whole", McoreTarget(Cut()))
    write_hf(open_weights(tmp_path / "whole"), tmp_path / "hf", None)
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[name], tmp_path / "hf"))
    assert before.keys() == after.keys() and all(same_bits(before[tensor], after[tensor]) for tensor in before)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == FAMILIES[name].config


def test_packed_tensors_are_cut_by_head_and_by_half(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Rank 1 of 2 of ChatGLM's 4 heads of 16 in 2 groups: its heads are rows 32 to 63, its key 80 to 95, its value 112 to 127."""
    hf = load_file(folders["chatglm 2"] / "model.safetensors")
    rank = dict(open_weights(folders["chatglm 2"]).local_tensors(Cut(2), Coords(1)))
    packed, halves = (hf[f"transformer.encoder.layers.0.{name}.weight"] for name in ("self_attention.query_key_value", "mlp.dense_h_to_4h"))
    expected = torch.cat([packed[32:64], packed[80:96], packed[112:128]])
    assert torch.equal(rank["decoder.layers.0.self_attention.linear_qkv.weight"], expected)
    assert torch.equal(rank["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([halves[48:96], halves[144:192]]))


@pytest.mark.parametrize("name", ["internlm 2", "chatglm 2", "baichuan 2", "glm 4"])
def test_packed_groups_and_halves_are_not_cut_through(name: str) -> None:
    with pytest.raises(MsrlError, match=r"tp=8: must divide the model's [24] query groups"):
        Cut(8).check(families.shape(FAMILIES[name].config))


BAD = [
    ("baichuan 2", {"max_position_embeddings": None}, "ALiBi positions are not supported"),
    ("baichuan 2", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ("internlm 2", {"bias": True}, "bias=true"),
    ("chatglm 2", {"add_bias_linear": True}, "add_bias_linear=true"),
    ("chatglm 2", {"original_rope": False}, "original_rope=false"),
    ("chatglm 2", {"pre_seq_len": 128}, "pre_seq_len=128"),
    ("chatglm 2", {"padded_vocab_size": None}, "padded_vocab_size"),
    ("chatglm 2", {"kv_channels": 18}, "even number"),
    ("glm 4", {"partial_rotary_factor": 1.5}, "must be at most 1"),
    ("gemma 2", {"hidden_activation": "silu"}, "hidden_activation"),
    ("gemma 2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
    ("gemma 2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_what_a_family_does_not_do_is_refused_by_key(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(MsrlError, match=message):
        families.shape(FAMILIES[name].config, **changes)
