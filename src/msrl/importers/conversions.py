"""From a value of another system to the value of the native key. Each raises ValueError that says what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast


def same_value(value: Any) -> Any:
    return value


def negated(value: Any) -> bool:
    """`no_shuffle: true` is `shuffle: false`."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return not value


def zero_is_off(value: Any) -> Any:
    """Where 0 switches something off, msrl has null."""
    return None if value in (0, 0.0) else value


def fraction(value: Any) -> Any:
    """A share of all updates; a whole number would be a count of them."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def top_k(value: Any) -> Any:
    """0 and -1 are both off."""
    return -1 if value == 0 else value


def text(value: Any) -> str:
    """The value of an environment variable."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def text_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def int_list(value: Any) -> list[int]:
    """`11,13,19,21`, as Megatron's flags have it, or a list."""
    try:
        parts = cast("list[Any]", value) if isinstance(value, list) else str(value).replace(" ", "").strip(",").split(",")
        return [int(part) for part in parts]
    except (TypeError, ValueError):
        raise ValueError("must be whole numbers parted by commas") from None


def one_path(value: Any) -> str:
    """One data prefix; Megatron's mixtures (`0.3 a 0.7 b`, `1,a,1,b`) are several."""
    parts = [str(part) for part in cast("list[Any]", value)] if isinstance(value, list) else str(value).replace(",", " ").split()
    if len(parts) == 2 and parts[0].replace(".", "", 1).isdigit():
        parts = parts[1:]
    if len(parts) != 1:
        raise ValueError("must be one prefix; mixtures of several are not in this version yet: preprocess them together")
    return parts[0]


def above_one(value: Any) -> bool:
    """A count of parts above one switches the feature on."""
    return isinstance(value, int) and value > 1


def bf16(value: Any) -> str:
    return _one_of({True: "bfloat16", False: "float32"}, value)


def dtype(value: Any) -> str:
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "float": "float32"}
    return _one_of(names, value)


def convert_dtype(value: Any) -> str:
    return _one_of({"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32"}, value)


def legacy_names(value: Any) -> str:
    """A switch for the form of Megatron's models from before megatron-core."""
    return _one_of({True: "legacy"}, value)


def schedule(value: Any) -> str:
    names = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    return _one_of({**names, "cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}, value)


def kl_estimator(value: Any) -> str:
    """d = policy minus reference log-probability; mse is d^2 / 2, low_var_kl is exp(-d) - 1 + d."""
    names = {name: name for name in ("k1", "k2", "k3", "abs", "full")}
    return _one_of({**names, "kl": "k1", "mse": "k2", "low_var_kl": "k3"}, value)


def cp_algo(value: Any) -> str:
    return _one_of({"ulysses_cp_algo": "ulysses", "megatron_cp_algo": "ring"}, value)


def token_level(value: Any) -> str:
    """DAPO's token_level_loss."""
    return _one_of({True: "token-mean", False: "seq-mean-token-mean"}, value)


def aggregate(value: Any) -> str:
    """ROLL's loss_agg_mode; its sum-norm divides by the padded length, a constant."""
    names = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
    return _one_of({**names, "seq-mean-token-sum-norm": "seq-sum-over-constant"}, value)


def estimator(value: Any) -> str:
    """Advantage estimators under their native names."""
    names = {"group_norm": "group_norm", "grpo": "group_norm", "gae": "gae", "reinforce": "reinforce", "rloo": "rloo", "cpgd": "cpgd"}
    more = {"reinforce_baseline": "reinforce_baseline", "reinforce++": "reinforce_pp", "gigpo": "gigpo", "step_reinforce": "step_reinforce"}
    return _one_of({**names, **more, "agentic_reinforce": "agentic_reinforce"}, value)


def ratio(value: Any) -> str:
    return _one_of({"token": "token", "seq": "sequence", "sequence": "sequence"}, value)


def recompute(value: Any) -> str | None:
    """A switch for recomputing every layer."""
    return "full" if value else None


def inverse_recompute(value: Any) -> str | None:
    return None if value else "full"


def some_right(value: Any) -> list[float] | None:
    """LightRFT's dynamic_sampling: groups whose rewards are all 0 or all 1 are left out of the loss."""
    return [0.0, 1.0] if value else None


def _one_of(names: Mapping[Any, str], value: Any) -> str:
    if value not in names:
        raise ValueError(f"must be one of {', '.join(str(name).lower() if isinstance(name, bool) else str(name) for name in names)}")
    return names[value]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    function.__name__: function
    for function in (
        negated, zero_is_off, fraction, top_k, text, text_list, int_list, one_path, above_one, bf16, dtype, convert_dtype, legacy_names,
        schedule, kl_estimator, cp_algo, token_level, aggregate, estimator, ratio, recompute, inverse_recompute, some_right,
    )
} | {"": same_value}  # fmt: skip
