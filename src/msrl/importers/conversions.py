"""Conversions from a value of another system to the value of the native key.

Each conversion raises ValueError with the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
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


def bf16(value: Any) -> str:
    """Return the dtype that the switch selects."""
    return _look_up({True: "bfloat16", False: "float32"}, value)


def dtype(value: Any) -> str:
    """Return the dtype of training."""
    names = {
        "bf16": "bfloat16",
        "bfloat16": "bfloat16",
        "fp32": "float32",
        "float32": "float32",
        "float": "float32",
    }
    return _look_up(names, value)


def convert_dtype(value: Any) -> str:
    """Return the dtype of a converted checkpoint."""
    return _look_up(
        {
            "bf16": "bf16",
            "bfloat16": "bf16",
            "fp16": "fp16",
            "float16": "fp16",
            "fp32": "fp32",
            "float32": "fp32",
        },
        value,
    )


def legacy_names(value: Any) -> str:
    """Return the name of the parameter naming that Megatron used before megatron-core."""
    return _look_up({True: "legacy"}, value)


def schedule(value: Any) -> str:
    """Return the learning-rate schedule."""
    names = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
    variants = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
    return _look_up({**names, **variants, "warmup_stable_decay": "wsd"}, value)


def kl_estimator(value: Any) -> str:
    """Return the KL estimator.

    With d = policy minus reference log-probability, mse is d^2 / 2 and low_var_kl is exp(-d) - 1 +
    d.
    """
    names = {name: name for name in ("k1", "k2", "k3", "abs", "full")}
    return _look_up({**names, "kl": "k1", "mse": "k2", "low_var_kl": "k3"}, value)


def cp_algo(value: Any) -> str:
    """Return the algorithm of context parallelism."""
    names = {"ulysses_cp_algo": "ulysses", "megatron_cp_algo": "ring", "hybrid_cp_algo": "hybrid"}
    adaptive = {"adaptive_cp_algo": "ring", "hybrid_adaptive_cp_algo": "hybrid"}
    return _look_up({**names, **adaptive}, value)


def token_level(value: Any) -> str:
    """Return the aggregation mode of DAPO's token_level_loss."""
    return _look_up({True: "token-mean", False: "seq-mean-token-mean"}, value)


def aggregate(value: Any) -> str:
    """Return the mode of ROLL's loss_agg_mode; sum-norm divides by the constant padded length."""
    names = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
    return _look_up({**names, "seq-mean-token-sum-norm": "seq-sum-over-constant"}, value)


def estimator(value: Any) -> str:
    """Return the native name of an advantage estimator."""
    same_names = (
        "group_norm gae reinforce rloo cpgd reinforce_baseline gigpo step_reinforce "
        "agentic_reinforce"
    )
    names = {name: name for name in same_names.split()}
    return _look_up({**names, "grpo": "group_norm", "reinforce++": "reinforce_pp"}, value)


def ratio(value: Any) -> str:
    """Return the level of the importance ratio."""
    return _look_up({"token": "token", "seq": "sequence", "sequence": "sequence"}, value)


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
    bf16,
    dtype,
    convert_dtype,
    legacy_names,
    schedule,
    kl_estimator,
    cp_algo,
    token_level,
    aggregate,
    estimator,
    ratio,
    recompute,
    inverse_recompute,
    routing_replay,
    some_right,
)
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": same_value,
    **{function.__name__: function for function in _FUNCTIONS},
}
