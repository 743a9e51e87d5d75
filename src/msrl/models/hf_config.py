"""Validated access to a Hugging Face `config.json`.

A missing or invalid value and an unsupported feature are refused with the key. Both of
transformers' keys for the dtype of the weights are read, `dtype` and `torch_dtype`. `rope.py` reads
the rotary embedding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from msrl.errors import MsrlError
from msrl.files import read_text_within
from msrl.strict_json import loads

DTYPES = ("bfloat16", "float16", "float32")

# Limits on sizes, far above the sizes of existing models. Tables of all layers and experts are
# built before weights are read, so a larger size could take all memory.
MAX_FILE_BYTES = 32 << 20
_MAX_SHOWN = 200  # characters of a value in a message
MAX_LAYERS = 10_000
MAX_EXPERTS = 65_536  # of a layer
MAX_TOTAL_EXPERTS = 1 << 18  # of all layers
_MAX_SIZE = (1 << 31) - 1
_LIMITS = {
    "num_hidden_layers": MAX_LAYERS,
    "num_layers": MAX_LAYERS,
    "num_mtp_layers": MAX_LAYERS,
    "num_nextn_predict_layers": MAX_LAYERS,
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
    "n_routed_experts": MAX_EXPERTS,
}


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The values of a config.json, and its path for messages."""

    values: Mapping[str, Any]
    where: str

    def fail(self, key: str, reason: str) -> NoReturn:
        """Raise MsrlError with the file, the key, the start of its value and the reason."""
        text = json.dumps(self.values[key]) if key in self.values else ""
        text = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
        setting = f"{key}={text}" if text else key
        raise MsrlError(f"{self.where}: {setting}: {reason}.")

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; `default` is used if the key is absent or null.

        Raises:
            MsrlError: The value is missing, not positive or beyond the limit of its key.
        """
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "is missing. Set it to a positive whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(key, "must be a positive whole number")
        limit = _LIMITS.get(key, _MAX_SIZE)
        if value > limit:
            self.fail(key, f"exceeds the limit of {limit}. Restore the file")
        return value

    def positive(self, key: str, default: float) -> float:
        """Return a finite number above zero; `default` is used if the key is absent or null."""
        return self.checked_positive(key, self.values.get(key), default)

    def checked_positive(self, key: str, value: object, default: float | None) -> float:
        """Return `value` as a finite number above zero; a None is replaced by `default`.

        `key` may be nested, as in `rope_scaling.factor`. Fails if both are None.
        """
        if value is None:
            value = default
        if value is None:
            self.fail(key, "is missing. Set it to a number above 0")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
            self.fail(key, "must be a number above 0")
        return float(value)

    def cap(self, key: str, default: float | None = None) -> float | None:
        """Return a limit. Null means no limit, an absent key means `default`."""
        value = self.values.get(key, default)
        return None if value is None else self.checked_positive(key, value, None)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return value

    def refuse(self, key: str, *allowed: object) -> None:
        """Refuse any value of `key` other than null and the `allowed` ones.

        An unsupported feature is never ignored.
        """
        value = self.values.get(key)
        if value is not None and value not in allowed:
            supported = ", ".join(json.dumps(choice) for choice in allowed)
            self.fail(
                key, f"is not supported. Supported: {supported or 'no value; remove the key'}"
            )

    def check_quantization(self, method: str = "fp8") -> None:
        """Refuse weights that are quantized by another method than `method`.

        The methods are block-wise fp8 (see `checkpoint/hf/fp8.py`) and mxfp4.
        """
        if self._quantization() not in (None, method):
            block_size = " with a weight_block_size" if method == "fp8" else ""
            self.fail(
                "quantization_config",
                f"is not supported. Supported: quant_method {method}{block_size}, or no "
                "quantization_config",
            )

    def _quantization(self) -> object:
        value: object = self.values.get("quantization_config")
        return (
            cast("dict[str, object]", value).get("quant_method", "")
            if isinstance(value, dict)
            else value
        )

    def architecture(self) -> str:
        names = self.values.get("architectures")
        if (
            not isinstance(names, list)
            or len(cast("list[object]", names)) != 1
            or not isinstance(names[0], str)
        ):
            self.fail(
                "architectures",
                "must be a list with the name of the model's class, for example "
                "['Qwen2ForCausalLM']",
            )
        return names[0]

    def dtype(self) -> str:
        """Return the dtype of the weights.

        A config without one means bfloat16 for MXFP4 weights and float32 otherwise, as in
        transformers.
        """
        key = "dtype" if self.values.get("dtype") is not None else "torch_dtype"
        value = self.values.get(key)
        if value is None:
            return "bfloat16" if self._quantization() == "mxfp4" else "float32"
        if not isinstance(value, str) or value not in DTYPES:
            self.fail(key, f"is not supported. Supported: {', '.join(DTYPES)}")
        return value


ReadConfig = Callable[[Path], HfConfig]
"""Function that returns the config.json of a folder; it raises MsrlError as `read_hf_config`."""


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Return `eos_token_id` of a folder's generation_config.json: the tokens that end a response.

    Raises:
        MsrlError: The file is not JSON.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        values: Any = loads(read_text_within(file, MAX_FILE_BYTES))
        token_ids: Any = values.get("eos_token_id")
    except (ValueError, RecursionError, AttributeError) as error:
        raise MsrlError(f"{file}: not a JSON object ({error}). Restore the file.") from error
    listed = cast("list[Any]", token_ids) if isinstance(token_ids, list) else [token_ids]
    return tuple(
        token for token in listed if isinstance(token, int) and not isinstance(token, bool)
    )


def read_hf_config(path: Path) -> HfConfig:
    """Read `path`, a config.json or a folder that contains one.

    Raises:
        MsrlError: The file is absent or not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise MsrlError(f"{path}: no config.json found. Pass the folder of a Hugging Face model.")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise MsrlError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB. Restore the file.")
    try:
        values = loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{file}: not valid JSON ({error}). Restore the file.") from error
    if not isinstance(values, dict):
        raise MsrlError(f"{file}: must contain a JSON object.")
    return HfConfig(cast("dict[str, Any]", values), str(file))
