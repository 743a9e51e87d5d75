"""The kinds of values that keys have, and what all sections share: frozen and closed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1)]
Size = Annotated[int, Strict(), Field(ge=0)]
Seed = Annotated[int, Strict(), Field(ge=0, le=2**32 - 1)]  # numpy's own takes no larger ones
Text = Annotated[str, Strict(), Field(min_length=1)]
Seconds = Annotated[float, Strict(), Field(gt=0)]
Positive = Annotated[float, Strict(), Field(gt=0)]
NonNegative = Annotated[float, Strict(), Field(ge=0)]
Fraction = Annotated[float, Strict(), Field(gt=0, le=1)]
UpToOne = Annotated[float, Strict(), Field(ge=0, le=1)]
BelowOne = Annotated[float, Strict(), Field(ge=0, lt=1)]
TopK = Annotated[int, Strict(), Field(ge=-1)]


def _split(value: object) -> object:
    """`11,13,19,21`, as Megatron's users type it, as a list; anything else is left to be judged."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        return [int(part) if part.isdecimal() else part for part in parts]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


LayerNumbers = Annotated[tuple[Size, ...], BeforeValidator(_split)]

Platform = Literal["auto", "cpu", "cuda", "npu"]
Dtype = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
ConvertCommand = Literal["hf2mcore", "mcore2hf", "reshard", "hf2hf", "lora2hf", "inspect"]


class Section(BaseModel):
    """A part of the configuration: frozen, no other keys than its own, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
