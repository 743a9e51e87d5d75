"""Detection of preference data (DPO, reward models, KTO), which must not become SFT targets.

Sources of the column names: LLaMA-Factory's dpo_en_demo and kto_en_demo, TRL's dataset formats,
Anthropic's hh-rlhf, StackExchange paired, PKU-SafeRLHF and AlpacaFarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msrl.errors import MsrlError

_PAIRS = (
    ("response_j", "response_k"),
    ("response_0", "response_1", "better_response_id"),
    ("output_1", "output_2", "preference"),
)
_LABELS = ("label", "kto_tag")
_ADVICE = (
    "Preprocess them for train-dpo with handler {handler}, or remove these columns to train on the "
    "remaining answers."
)
_PAIRS_ADVICE = _ADVICE.format(handler="pairs, alpaca_pairs or sharegpt_pairs")


def refuse_preference(row: Any, passed: Iterable[str] = ()) -> None:
    """Raise MsrlError if a row holds preference data.

    Args:
        row: a row of the input.
        passed: columns that the output keeps as they are, so that they are not treated as labels.
    """
    if not isinstance(row, dict):
        return
    columns: dict[str, Any] = {str(k): v for k, v in row.items() if v is not None}
    if pair := _pair(columns):
        raise MsrlError(f"columns {' and '.join(pair)}: preference pairs (DPO). {_PAIRS_ADVICE}")
    labels = [name for name in _LABELS if name not in passed and _is_truth_value(columns.get(name))]
    if labels:
        raise MsrlError(
            f"column {labels[0]}={columns[labels[0]]}: answers labeled as desirable or not (KTO). "
            f"{_ADVICE.format(handler='labeled')}"
        )


def has_preference_columns(row: Any) -> bool:
    """Return True if a row has the columns of preference data, whatever their values are."""
    if not isinstance(row, dict):
        return False
    columns: dict[str, Any] = {str(k): v for k, v in row.items() if v is not None}
    return bool(_pair(columns)) or any(name in columns for name in _LABELS)


def refuse_preference_columns(map_keys: Mapping[str, str]) -> None:
    """Raise MsrlError if `map_keys` names one side of a preference pair as a field."""
    for name, path in map_keys.items():
        if not name.startswith("extra.") and _is_side(path.rpartition(".")[2]):
            raise MsrlError(
                f"map_keys.{name}={path}: one side of a preference pair. {_PAIRS_ADVICE}"
            )


def _pair(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that hold a preference pair, or ()."""
    for name in columns:
        other = name.replace("chosen", "rejected")
        if other != name and other in columns:
            return name, other
    return next((pair for pair in _PAIRS if all(name in columns for name in pair)), ())


def _is_side(name: str) -> bool:
    return "chosen" in name or "rejected" in name


def _is_truth_value(value: Any) -> bool:
    """Return True for a boolean, also in the text form of CSV files."""
    return isinstance(value, bool) or (
        isinstance(value, str) and value.strip().lower() in ("true", "false")
    )
