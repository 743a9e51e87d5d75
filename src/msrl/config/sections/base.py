"""Value types of configuration keys and the base class of all sections."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from msrl import registry
from msrl.limits import whole_number


@dataclass(frozen=True, slots=True)
class OneOf:
    """Choices of a text value that are known only at run time, such as names of plugins."""

    names: tuple[str, ...]
    takes_file: bool = False  # whether path/file.py:NAME is a value, too

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        choices = core_schema.literal_schema(list(self.names))
        if not self.takes_file:
            return choices
        file = core_schema.str_schema(pattern=r"\.py:[^:]+$", strict=True)
        return core_schema.union_schema([choices, file])


def _day(value: str) -> str:
    """Return a day in the form YYYY-MM-DD. Raises an error of pydantic for other texts."""
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise PydanticCustomError("day_form", "must be a day") from None


Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1)]
Size = Annotated[int, Strict(), Field(ge=0)]
Seed = Annotated[int, Strict(), Field(ge=0, le=2**32 - 1)]  # numpy seeds have 32 bits
Text = Annotated[str, Strict(), Field(min_length=1)]
Day = Annotated[str, Strict(), AfterValidator(_day)]
Seconds = Annotated[float, Strict(), Field(gt=0)]
Positive = Annotated[float, Strict(), Field(gt=0)]
NonNegative = Annotated[float, Strict(), Field(ge=0)]
Fraction = Annotated[float, Strict(), Field(gt=0, le=1)]
UpToOne = Annotated[float, Strict(), Field(ge=0, le=1)]
BelowOne = Annotated[float, Strict(), Field(ge=0, lt=1)]
Port = Annotated[int, Strict(), Field(ge=1, le=65535)]
SleepLevel = Annotated[int, Strict(), Field(ge=0, le=2)]
TopK = Annotated[int, Strict(), Field(ge=-1)]


def _split(value: object) -> object:
    """Return `11,13,19,21`, Megatron's notation, as a list. Return other values for validation."""
    if isinstance(value, str):
        words = [word.strip() for word in value.split(",")]
        numbers = [whole_number(word) for word in words]
        return [
            word if number is None else number for word, number in zip(words, numbers, strict=True)
        ]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return value


LayerNumbers = Annotated[tuple[Size, ...], BeforeValidator(_split)]

DeviceNumbers = Annotated[tuple[Size, ...], Field(min_length=1)]
Platform = Annotated[str, OneOf(("auto", *registry.names(registry.PLATFORMS)))]
Dtype = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
ConvertCommand = Literal[
    "hf2mcore", "mcore2hf", "reshard", "hf2hf", "hf2gguf", "gguf2hf", "lora2hf", "inspect"
]


class Section(BaseModel):
    """Section of the configuration: frozen, without unknown keys, infinities and NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )
