"""Layers for multi-token prediction in Megatron checkpoints, which are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from msrl.errors import MsrlError

_PREDICTION = re.compile(r"(model\d+\.)?mtp\.")


def refuse_prediction_layers(where: Path, names: Iterable[str]) -> None:
    """Raise MsrlError for tensors of Megatron's layers for multi-token prediction.

    With them, the final norm has another name too.
    """
    layers = sorted(name for name in names if _PREDICTION.match(name))
    if layers:
        raise MsrlError(
            f"{where}: contains layers for multi-token prediction (--mtp-num-layers), first "
            f"{layers[0]}, which are not read from Megatron checkpoints. Convert or train it "
            "without --mtp-num-layers."
        )
