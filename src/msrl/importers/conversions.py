"""Conversions from a value of another system to the value of the native key.

Each conversion raises ValueError with the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, cast

from msrl.importers.placeholders import is_placeholder


def same_value(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def negated(value: Any) -> bool:
    """Return the opposite of a switch: `no_shuffle: true` is `shuffle: false`."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return not value


def sleep_level(value: Any) -> int:
    """Return the sleep level of an engine that sleeps or not."""
    return int(not negated(value))


def no_sleep_level(value: Any) -> int:
    """Return the sleep level for a switch that disables sleep."""
    return int(negated(value))


def zero_is_off(value: Any) -> Any:
    """Return None for 0, where 0 switches a feature off."""
    return None if value in (0, 0.0) else value


def fraction(value: Any) -> Any:
    """Return a fraction of all updates as a float, because an integer is a number of updates."""
    return (
        float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    )


def top_k(value: Any) -> Any:
    """Return -1 for 0: both disable top-k."""
    return -1 if value == 0 else value


def seconds(value: Any) -> Any:
    """Return an integer number of seconds as a float."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def text(value: Any) -> str:
    """Return the text of an environment variable."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def text_list(value: Any) -> list[Any]:
    """Return a list of texts; a single text becomes a list of length 1."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def int_list(value: Any) -> list[int]:
    """Return the integers of a list, or of Megatron's form `11,13,19,21`."""
    try:
        items = (
            cast("list[Any]", value)
            if isinstance(value, list)
            else str(value).replace(" ", "").strip(",").split(",")
        )
        return [int(str(item)) for item in items]
    except ValueError:
        raise ValueError("must be integers separated by commas") from None


def weights_by_prefix(value: Any) -> dict[str, float]:
    """Return the weights of data prefixes; the weights of a repeated prefix add up.

    Raises:
        ValueError: the items are neither one prefix nor pairs of a weight and a prefix.

    >>> weights_by_prefix("0.3,a,0.7,b"), weights_by_prefix(["1", "c"])
    ({'a': 0.3, 'b': 0.7}, {'c': 1.0})
    """
    if is_placeholder(value):
        return {str(value): 1.0}
    problem = "must be one prefix, or pairs of a weight and a prefix"
    if value is None or isinstance(value, (bool, dict)):
        raise ValueError(problem)
    is_list = isinstance(value, (list, tuple))
    values = cast("list[Any]", value) if is_list else str(value).replace(",", " ").split()
    items = [str(item).strip(",") for item in values]
    if len(items) == 1:
        items = ["1", *items]
    if len(items) % 2:
        raise ValueError(problem)
    weights: dict[str, float] = {}
    for weight, prefix in zip(items[::2], items[1::2], strict=True):
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{problem}; {weight} is not a weight")
        weights[prefix] = weights.get(prefix, 0.0) + number
    return weights


def one_path(value: Any) -> str:
    """Return the only data prefix. `Translation.apply` reads mixtures (`0.3 a 0.7 b`)."""
    (prefix,) = weights_by_prefix(value)
    return prefix


def recompute(value: Any) -> str:
    """Return the recompute granularity of a switch that recomputes every layer."""
    return "full" if value else "none"


def inverse_recompute(value: Any) -> str:
    """Return the recompute granularity of a switch that disables recomputation."""
    return "none" if value else "full"


def routing_replay(value: Any) -> str:
    """Return the native name of a mode of routing replay, from a section with the key `mode`."""
    section = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if unknown := set(section) - {"mode"}:
        raise ValueError(f"must have the key mode only, not {', '.join(sorted(unknown))}")
    mode = section.get("mode", "disable")
    names = {"disable": "none", "R2": "trainer", "R3": "engine"}
    return _look_up(names, mode)


def some_right(value: Any) -> list[float] | None:
    """Return the bounds of LightRFT's dynamic_sampling: it masks rewards of all 0 or all 1."""
    return [0.0, 1.0] if value else None


def _look_up(names: Mapping[Any, str], value: Any) -> str:
    if not isinstance(value, Hashable) or value not in names:
        allowed = [str(name).lower() if isinstance(name, bool) else str(name) for name in names]
        raise ValueError(f"must be one of {', '.join(allowed)}")
    return names[value]


def _renamed(*groups: str, **names: str) -> dict[Any, str]:
    """Return the native names of values: the same ones of `groups`, and others."""
    return {name: name for group in groups for name in group.split()} | names


_NAMES: Mapping[str, Mapping[Any, str]] = {
    "bf16": {True: "bfloat16", False: "float32"},
    "dtype": {
        **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
        **dict.fromkeys(("fp32", "float32", "float"), "float32"),
    },
    "convert_dtype": {
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **dict.fromkeys(("fp16", "float16"), "fp16"),
        **dict.fromkeys(("fp32", "float32"), "fp32"),
    },
    "legacy_names": {True: "legacy"},  # from before megatron-core
    "schedule": _renamed(
        "constant linear cosine",
        WSD="wsd",
        cosine_with_min_lr="cosine",
        constant_with_warmup="constant",
        warmup_stable_decay="wsd",
    ),
    # With d = policy minus reference log-probability, mse is d^2 / 2, low_var_kl exp(-d) - 1 + d.
    "kl_estimator": _renamed("k1 k2 k3 abs full", kl="k1", mse="k2", low_var_kl="k3"),
    "cp_algo": _renamed(
        ulysses_cp_algo="ulysses",
        megatron_cp_algo="ring",
        hybrid_cp_algo="hybrid",
        adaptive_cp_algo="ring",
        hybrid_adaptive_cp_algo="hybrid",
    ),
    "token_level": {True: "token-mean", False: "seq-mean-token-mean"},  # DAPO's token_level_loss
    "aggregate": {  # ROLL's loss_agg_mode; sum-norm divides by the constant padded length
        **_renamed("token-mean seq-mean-token-sum seq-mean-token-mean"),
        "seq-mean-token-sum-norm": "seq-sum-over-constant",
    },
    "estimator": {
        **_renamed("group_norm gae reinforce rloo cpgd reinforce_baseline gigpo step_reinforce"),
        **_renamed("agentic_reinforce", grpo="group_norm"),
        "reinforce++": "reinforce_pp",
    },
    "ratio": {"token": "token", "seq": "sequence", "sequence": "sequence"},
}
_FUNCTIONS: tuple[Callable[[Any], Any], ...] = (
    negated,
    sleep_level,
    no_sleep_level,
    zero_is_off,
    fraction,
    top_k,
    seconds,
    text,
    text_list,
    int_list,
    one_path,
    recompute,
    inverse_recompute,
    routing_replay,
    some_right,
)
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": same_value,
    **{function.__name__: function for function in _FUNCTIONS},
    **{name: partial(_look_up, names) for name, names in _NAMES.items()},
}
