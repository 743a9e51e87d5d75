"""A Hugging Face `config.json` read with care: a missing or nonsensical value is refused by key, an unsupported feature by name.

Both spellings that transformers has used are read: `dtype` and `torch_dtype`; `rope_theta` with `rope_scaling`, and
`rope_parameters` of transformers 5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from msrl.errors import MsrlError
from msrl.models.shape import Llama3RopeScaling

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The values of a config.json and where they come from, for messages."""

    values: Mapping[str, Any]
    where: str

    def fail(self, key: str, reason: str) -> NoReturn:
        """Raises MsrlError that names the file, the key, its value and the reason."""
        shown = f"{key}={json.dumps(self.values[key])}" if key in self.values else key
        raise MsrlError(f"{self.where}: {shown}: {reason}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; `default` stands in where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "is missing; it must be a positive whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(key, "must be a positive whole number")
        return value

    def positive(self, key: str, default: float) -> float:
        """A finite number above zero."""
        return _positive(self, self.values.get(key), key, default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return value

    def refuse(self, key: str, *allowed: object) -> None:
        """Refuses any value of `key` but null and the `allowed` ones: a feature that is not supported is never ignored."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            self.fail(key, f"is not supported; supported: {', '.join(json.dumps(a) for a in allowed) or 'leaving it out'}")

    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(cast("list[object]", names)) != 1 or not isinstance(names[0], str):
            self.fail("architectures", "must be a list with the one name of the model's class, like ['Qwen2ForCausalLM']")
        return names[0]

    def dtype(self) -> str:
        """The type of the weights; float32 where the config names none, as in transformers."""
        key = "dtype" if self.values.get("dtype") is not None else "torch_dtype"
        value = self.values.get(key)
        if value is None:
            return "float32"
        if not isinstance(value, str) or value not in DTYPES:
            self.fail(key, f"is not supported; supported: {', '.join(DTYPES)}")
        return value

    def rope(self, default_theta: float = 10000.0) -> tuple[float, Llama3RopeScaling | None]:
        """The base of the rotary embedding and its scaling. Refuses rope types other than `default` and `llama3`."""
        key = "rope_parameters" if self.values.get("rope_parameters") is not None else "rope_scaling"
        found: object = self.values.get(key) or {}
        if not isinstance(found, dict):
            self.fail(key, "must be a mapping")
        table = cast("dict[str, Any]", found)
        theta = _positive(self, table.get("rope_theta", self.values.get("rope_theta")), "rope_theta", default_theta)
        if _positive(self, table.get("partial_rotary_factor"), f"{key}.partial_rotary_factor", 1.0) != 1.0:
            self.fail(key, "partial_rotary_factor other than 1 is not supported")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            self.fail(key, f"rope type {kind!r} is not supported; supported: default, llama3")
        return theta, _llama3(self, key, table)


def _positive(config: HfConfig, value: object, key: str, default: float | None) -> float:
    if value is None:
        value = default
    if value is None:
        config.fail(key, "is missing; it must be a number above 0")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        config.fail(key, "must be a number above 0")
    return float(value)


def _llama3(config: HfConfig, key: str, table: dict[str, Any]) -> Llama3RopeScaling:
    """The four numbers of Llama 3's scaling; none of them has a default."""

    def number(name: str) -> float:
        return _positive(config, table.get(name), f"{key}.{name}", None)

    scaling = Llama3RopeScaling(
        factor=number("factor"),
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_max_position_embeddings=int(number("original_max_position_embeddings")),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        config.fail(key, "high_freq_factor must be above low_freq_factor")
    return scaling


def read_hf_config(path: Path) -> HfConfig:
    """`path` (a config.json, or a folder that holds one). Raises MsrlError when it is absent or not a JSON object."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise MsrlError(f"{path}: there is no config.json here; give the folder of a Hugging Face model")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise MsrlError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise MsrlError(f"{file}: must hold a JSON object")
    return HfConfig(cast("dict[str, Any]", values), str(file))
