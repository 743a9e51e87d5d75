"""What the proof of a conversion measures, and that it comes out the same layer by layer as whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from msrl.checkpoint.source import open_weights
from msrl.models.families import num_parameters
from msrl.workflows import convert_layerwise, convert_logits, convert_proof
from msrl.workflows.convert_agreement import compare_logits
from test_convert import run, save_real


def test_agreement_by_hand() -> None:
    """Two positions over three tokens; the second one's first choice changes: KL of (1/2, 1/4, 1/4) against (1/4, 1/2, 1/4) is ln 2 / 4."""
    left = torch.tensor([[3.0, 1.0, 2.0], [2.0, 1.0, 1.0]]).log()
    right = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 1.0]]).log()
    found = compare_logits([left], [right], 3, tie=1e-4)
    assert (found.num_sequences, found.num_positions, found.same_choice) == (1, 2, 1)
    assert found.largest == pytest.approx(0.6931472) and found.divergence == pytest.approx(0.6931472 / 4)
    assert compare_logits([left], [right], 3, tie=1.0).same_choice == 2  # a tie may change places
    padded = torch.cat([left, torch.full((2, 1), 9.0)], 1)
    assert compare_logits([padded], [left], 3, tie=0.0).largest == 0.0


def test_what_is_not_a_number_agrees_with_nothing() -> None:
    broken = torch.tensor([[0.0, float("nan")]])
    found = compare_logits([torch.zeros(1, 2)], [broken], 2, tie=1e-4)
    assert found.largest == float("inf") and found.divergence == float("inf")


def test_the_largest_part_is_a_layer_or_the_vocabulary(tmp_path: Path) -> None:
    save_real(tmp_path / "hf", "qwen2", tied=False)
    shape = open_weights(tmp_path / "hf").shape
    table, layers = 99 * 64, num_parameters(shape) - 2 * 99 * 64 - 64
    assert convert_layerwise.largest_part(shape) == max(table, layers // 4)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False), ("llama", True)])
def test_transformers_computes_the_same_layer_by_layer(tmp_path: Path, family: str, tied: bool) -> None:
    save_real(tmp_path / "hf", family, tied=tied)
    source, tokens = open_weights(tmp_path / "hf"), [[0, 5, 98, 7], [3, 1]]
    whole, parts = convert_logits._pretrained(tmp_path / "hf", tokens), convert_layerwise.transformers_logits(source, tokens, None)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_larger_than_memory_is_proven_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tied: bool
) -> None:
    save_real(tmp_path / "hf", "qwen2", tied=tied)
    monkeypatch.setattr(convert_proof, "fits_whole", lambda shape: False)
    run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "mcore", tp=2, pp=2)
    run(command="mcore2hf", load=tmp_path / "mcore", save=tmp_path / "back", dtype="bf16")
    said = capsys.readouterr().out
    assert said.count("logits are computed layer by layer") == 2 and said.count("verified in") == 2
    assert said.count("transformers, Megatron: 0 texts and 2 rows of random tokens, 64 positions x 99") == 2
    assert said.count("same likeliest token 64/64") == 2
