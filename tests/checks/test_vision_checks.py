"""Keys of vision towers that have no effect, or cannot have one, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from config_inputs import QWEN2, make_configs
from families import QWEN2_5_VL
from msrl.cli.configuration import load_configuration as load
from msrl.errors import MsrlError
from support import mentions

TRAINED = "train.vision.tower_lr=1e-3"
KEPT = "train.vision.cache_gb=1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a text model and a vision-language model."""
    monkeypatch.chdir(tmp_path)
    return make_configs(tmp_path, {"text": QWEN2, "vl": QWEN2_5_VL})


def test_keys_of_a_vision_tower_that_fit_are_accepted(folder: Path) -> None:
    for keys in ([TRAINED], [KEPT]):
        config = load(["sft.yaml"], ["model.path=vl", *keys], command="train-sft").config
        assert config.train.vision.cache_gb in (1.0, 4.0)


@pytest.mark.parametrize(
    ("keys", "fragments"),
    [
        (["model.path=text", TRAINED], ("train.vision.tower_lr", "no vision tower")),
        (["model.path=text", KEPT], ("train.vision.cache_gb", "no vision tower")),
        (["model.path=vl", TRAINED, "train.lora.rank=2"], ("tower_lr", "train.lora")),
        (["model.path=vl", TRAINED, KEPT], ("train.vision.cache_gb", "trained tower")),
    ],
)
def test_keys_of_a_vision_tower_without_effect_are_refused(
    folder: Path, keys: list[str], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        load(["sft.yaml"], keys, command="train-sft")
