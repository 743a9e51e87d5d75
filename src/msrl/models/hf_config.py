"""A Hugging Face `config.json` read with care: a missing or nonsensical value is refused by key, an unsupported feature by name.

Both spellings of the type of the weights that transformers has used are read, `dtype` and `torch_dtype`; the rotary embedding is
read by `rope.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from msrl.errors import MsrlError

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
        """A finite number above zero; `default` stands in where the key is absent or null."""
        return self.checked_positive(key, self.values.get(key), default)

    def checked_positive(self, key: str, value: object, default: float | None) -> float:
        """`value`, which stands under `key` (however deep), as a finite number above zero; without a default it must be there."""
        if value is None:
            value = default
        if value is None:
            self.fail(key, "is missing; it must be a number above 0")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            self.fail(key, "must be a number above 0")
        return float(value)

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

    def check_quantisation(self, method: str = "fp8") -> None:
        """Refuses weights that are packed in another way than `method`: fp8 in blocks (see `checkpoint/fp8.py`) or mxfp4."""
        if self._quantisation() not in (None, method):
            needs = " with a weight_block_size" if method == "fp8" else ""
            self.fail("quantization_config", f"is not supported; supported: quant_method {method}{needs}, or leaving it out")

    def _quantisation(self) -> object:
        value: object = self.values.get("quantization_config")
        return cast("dict[str, object]", value).get("quant_method", "") if isinstance(value, dict) else value

    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(cast("list[object]", names)) != 1 or not isinstance(names[0], str):
            self.fail("architectures", "must be a list with the one name of the model's class, like ['Qwen2ForCausalLM']")
        return names[0]

    def dtype(self) -> str:
        """The type of the weights; where the config names none, bfloat16 if they are MXFP4, else float32, as in transformers."""
        key = "dtype" if self.values.get("dtype") is not None else "torch_dtype"
        value = self.values.get(key)
        if value is None:
            return "bfloat16" if self._quantisation() == "mxfp4" else "float32"
        if not isinstance(value, str) or value not in DTYPES:
            self.fail(key, f"is not supported; supported: {', '.join(DTYPES)}")
        return value


def end_tokens(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of a folder's generation_config.json: the tokens that end an answer; none where it names none.

    Raises MsrlError for a file that is not JSON.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
        found: Any = values.get("eos_token_id")
    except (ValueError, RecursionError, AttributeError) as error:
        raise MsrlError(f"{file}: not a JSON object: {error}") from error
    listed = cast("list[Any]", found) if isinstance(found, list) else [found]
    return tuple(one for one in listed if isinstance(one, int) and not isinstance(one, bool))


def read_hf_config(path: Path) -> HfConfig:
    """`path` (a config.json, or a folder that holds one). Raises MsrlError when it is absent or not a JSON object."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise MsrlError(f"{path}: there is no config.json here; give the folder of a Hugging Face model")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise MsrlError(f"{file}: must hold a JSON object")
    return HfConfig(cast("dict[str, Any]", values), str(file))
