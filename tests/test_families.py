"""Every family on real Megatron ranks computes the logits of transformers (or of a forward pass written by hand for remote code)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import families
import parity_ranks
from families import FAMILIES
from msrl.models.families import families as registered
from msrl.trainer.settings import Layout
from parity_ranks import Case
from support import python_path

LAYOUTS = {"whole": Layout(), "tp2": Layout(tp=2), "tp2 sp pp2": Layout(tp=2, pp=2, sp=True)}


def test_every_registered_architecture_has_a_row() -> None:
    missing = set(registered()) - {family.architecture for family in FAMILIES.values()}
    assert not missing, f"add a row to tests/families.py for {', '.join(sorted(missing))}"


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


def _transformers(folder: Path, ids: list[np.ndarray]) -> np.ndarray:
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
    ids = parity_ranks.sequences(family.config["vocab_size"])
    expected = _transformers(folders[name], ids)
    assert expected.std() > 0.3, "logits so small that nothing is compared"
    for cut in LAYOUTS:
        found = megatron[f"{name}, {cut}"]
        assert np.abs(found - expected).max() < 1e-4, cut
