"""Detection of preference data (DPO, reward models, KTO), which must not become SFT targets.

Sources of the column names: LLaMA-Factory's dpo_en_demo and kto_en_demo, TRL's dataset formats,
Anthropic's hh-rlhf, StackExchange paired, PKU-SafeRLHF and AlpacaFarm.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
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


def refuse_preference(row: Any) -> None:
    """Raise MsrlError if a row holds a preference pair."""
    if not isinstance(row, dict):
        return
    names = tuple(row)
    pair = _pair_of_names(names)
    if pair and all(row[name] is not None for name in pair):
        raise MsrlError(f"columns {' and '.join(pair)}: preference pairs (DPO). {_PAIRS_ADVICE}")


def has_preference_columns(row: Any) -> bool:
    """Return True if a row has the columns of preference data, whatever their values are."""
    if not isinstance(row, dict):
        return False
    columns: dict[str, Any] = {str(k): v for k, v in row.items() if v is not None}
    return bool(_pair_of_names(tuple(columns))) or any(name in columns for name in _LABELS)


def refuse_preference_columns(map_keys: Mapping[str, str]) -> None:
    """Raise MsrlError if `map_keys` names one side of a preference pair as a field."""
    for name, path in map_keys.items():
        if not name.startswith("extra.") and _is_side(path.rpartition(".")[2]):
            raise MsrlError(
                f"map_keys.{name}={path}: one side of a preference pair. {_PAIRS_ADVICE}"
            )


@lru_cache(maxsize=1024)
def _pair_of_names(names: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the columns that hold a preference pair, or ()."""
    texts = [name for name in names if isinstance(name, str)]
    for name in texts:
        other = name.replace("chosen", "rejected")
        if other != name and other in texts:
            return name, other
    return next((pair for pair in _PAIRS if all(name in texts for name in pair)), ())


def _is_side(name: str) -> bool:
    return "chosen" in name or "rejected" in name
