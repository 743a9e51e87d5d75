"""Adapters that PEFT creates and saves, merged by msrl and by PEFT."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import families
import tiny_checkpoints as tiny
from mixture_families import MIXTURES
from msrl.checkpoint.adapters.megatron import read_adapter
from msrl.checkpoint.adapters.merge import Adapter, Delta, MergedSource
from msrl.checkpoint.adapters.peft import dropped_by_peft, write_peft
from msrl.checkpoint.convert import write_hf
from msrl.checkpoint.source import open_weights
from msrl.errors import MsrlError
from msrl.models.families import all_rules, load_shape
from support import mentions

RANK, ALPHA = 4, 8.0


@pytest.mark.slow
def test_an_adapter_of_the_output_layer_comes_with_its_base(tmp_path: Path) -> None:
    """PEFT saves the base weight next to the factors if the output layer is a target."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    tiny.save(tmp_path / "hf", dtype=torch.float32, model_type="qwen2")
    model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["lm_head", "q_proj"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "peft")
    assert "base_model.model.lm_head.base_layer.weight" in load_file(
        tmp_path / "peft" / "adapter_model.safetensors"
    )
    base = open_weights(tmp_path / "hf")
    write_hf(
        MergedSource(base, read_adapter(tmp_path / "peft", base.shape)), tmp_path / "ours", None
    )
    theirs, ours = (
        adapted.merge_and_unload().state_dict(),
        load_file(tmp_path / "ours" / "model.safetensors"),
    )
    torch.testing.assert_close(
        ours["lm_head.weight"], theirs["lm_head.weight"], rtol=1e-6, atol=1e-5
    )
    assert not torch.equal(
        ours["lm_head.weight"], load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("ties", [True, False])
def test_an_embedding_trained_beside_a_tied_output_layer_is_merged_only_if_peft_tied_them(
    tmp_path: Path, ties: bool
) -> None:
    """Without `ensure_weight_tying`, PEFT's merged model keeps the old output layer and is no
    longer tied.
    """
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    tiny.save(tmp_path / "hf", dtype=torch.float32, model_type="qwen2", tie_word_embeddings=True)
    model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    config = peft.LoraConfig(
        r=RANK,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=ties,
    )
    with pytest.warns(UserWarning) if not ties else contextlib.nullcontext():
        adapted = peft.get_peft_model(model, config)
    adapted.get_input_embeddings().weight.data += 1.0
    adapted.save_pretrained(tmp_path / "peft")
    base = open_weights(tmp_path / "hf")
    adapter = read_adapter(tmp_path / "peft", base.shape)
    if not ties:
        with pytest.raises(MsrlError, match=mentions("embedding", "output layer", "tie")):
            MergedSource(base, adapter)
        return
    write_hf(MergedSource(base, adapter), tmp_path / "ours", None)
    theirs, ours = (
        adapted.merge_and_unload().state_dict(),
        load_file(tmp_path / "ours" / "model.safetensors"),
    )
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert torch.equal(theirs["lm_head.weight"], ours["model.embed_tokens.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek v3", "qwen3 moe"])
def test_the_adapters_that_peft_ignores_are_reported(tmp_path: Path, name: str) -> None:
    """Shared experts and first layers of DeepSeek have the names of experts; PEFT then adapts only
    the experts.
    """
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    shape = load_shape(families.save_model(tmp_path / "hf", MIXTURES[name].config))
    sizes = {
        n: size
        for rule in all_rules(shape)
        for n, size in zip(rule.hf, rule.shapes, strict=True)
        if _is_adapted(n)
    }
    deltas = {
        n: Delta(torch.randn(RANK, columns), torch.randn(rows, RANK), 1.0)
        for n, (rows, columns) in sizes.items()
    }
    adapter = Adapter("here", ALPHA, deltas, {})
    write_peft(adapter, tmp_path / "peft", "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    read = {
        name_in_peft
        for name_in_peft, _ in peft.PeftModel.from_pretrained(
            model, str(tmp_path / "peft")
        ).named_parameters()
        if ".lora_B." in name_in_peft
    }
    alone = {n.removesuffix(".weight") for n in deltas if ".experts." not in n}
    ignored = {n for n in alone if not any(f"{n}.lora_B." in name_in_peft for name_in_peft in read)}
    assert dropped_by_peft(adapter, shape) == sorted({n.rsplit(".", 1)[-1] for n in ignored})
    assert bool(ignored) == (name == "deepseek v3") and any(
        ".experts." in name_in_peft for name_in_peft in read
    )


def _is_adapted(name: str) -> bool:
    return name.split(".")[-2] in ("o_proj", "gate_proj", "up_proj", "down_proj")
