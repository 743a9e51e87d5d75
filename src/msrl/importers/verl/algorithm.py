"""Translation of verl's advantages, losses, KL terms and rollout correction.

Losses are normalized over all samples of an update, as in msrl. Source: verl 1dda0392,
verl/trainer/ppo (core_algos.py, rollout_corr_helper.py) and verl/workers/utils/losses.py.
"""

from __future__ import annotations

from typing import Any

from msrl.config.sources import wrap
from msrl.importers.sections import Keys
from msrl.importers.table import is_number
from msrl.importers.translation import KeyStatus, SourceKey, Translation
from msrl.importers.verl.batches import samples_per_prompt
from msrl.importers.verl.sections import ACTOR, CORRECTION, LOSS, ROLLOUT, Sections

_SAME_GRADIENT = "+"  # suffix of estimators with the gradient of k2
_ESTIMATORS = {
    "gae": "gae",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "opo": "opo",
    "grpo_passk": "pass_at_k",
    "gpg": "gpg",
    "optimal_token_baseline": "optimal_token_baseline",
}
_GROUP_ESTIMATORS = ("grpo", "grpo_vectorized")
_DISCOUNTED = ("gae", "reinforce_plus_plus")
_UNSUPPORTED = {
    "gdpo": "normalizes each reward source by group before it adds them up",
    "tir_optimal_token_baseline": "a baseline over the turns of tool calls",
}
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3"}
_KL["k3"] = "k3"
# Policy losses with the options of msrl by verl's keys.
_OPTIONS: dict[str, dict[str, str]] = {
    "clip_cov": {"clip_cov_ratio": "share", "clip_cov_lb": "low", "clip_cov_ub": "high"},
    "kl_cov": {"kl_cov_ratio": "share", "ppo_kl_coef": "coef"},
}
_LOSSES = {
    "vanilla": "ppo",
    "gspo": "ppo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    **{name: name for name in ("cispo", "sapo", "gpg", "clip_cov", "kl_cov")},
}
_UNCLIPPED = ("gpg", "sapo", "kl_cov")
_RATIOS = ("vanilla", "gspo", "cispo", "clip_cov")  # the clip bounds a ratio
_BY_SEQUENCE = ("gspo", "sapo")  # always averaged by seq-mean-token-mean
OWN_MEANS = (*_BY_SEQUENCE, "geo_mean")  # ignore loss_agg_mode
MEANS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")  # modes of msrl, too
SUMS = ("token-sum", "seq-mean-token-sum-norm")
_FILTERS = {"token_k1": "token", "seq_sum_k1": "sequence-product", "seq_mean_k1": "sequence"}


def put_algorithm(sections: Sections) -> None:
    """Translate advantages, the policy loss and its corrections."""
    _put_estimator(sections)
    _put_kl(sections)
    _put_policy_loss(sections)
    _put_aggregation(sections)
    _put_correction(sections)
    _put_earlier_correction(sections)
    _put_filter(sections)


# --- Advantages ---


def _put_estimator(sections: Sections) -> None:
    keys, name = sections["algorithm"], str(sections["algorithm"].value("adv_estimator"))
    keys.translation.algorithm = name
    by_std = keys.switch("norm_adv_by_std_in_grpo", default=True)
    native = _ESTIMATORS.get(name)
    if name in _GROUP_ESTIMATORS:
        native = "group_norm" if by_std else "dr_grpo"
    if native is None:
        reason = _UNSUPPORTED.get(name, f"msrl has {', '.join((*_GROUP_ESTIMATORS, *_ESTIMATORS))}")
        keys.add_error("adv_estimator", f"not supported: {reason}")
    else:
        keys.assign("adv_estimator", ["algo.advantage.estimator"], native)
        _put_estimator_options(sections, name, by_std=by_std)
    for key in ("gamma", "lam"):
        reads = name in _DISCOUNTED if key == "gamma" else name == "gae"
        if reads:
            native_key = {"gamma": "gamma", "lam": "lambda"}[key]
            keys.put(key, f"algo.advantage.{native_key}")
        keys.record(key, KeyStatus.DEAD, f"not read with {name}")
    reads_std = name in (*_GROUP_ESTIMATORS, "grpo_passk")
    status = KeyStatus.APPLIED if reads_std else KeyStatus.DEAD
    text = "algo.advantage.estimator" if reads_std else f"not read with {name}"
    keys.record("norm_adv_by_std_in_grpo", status, text)


def _put_estimator_options(sections: Sections, name: str, *, by_std: bool) -> None:
    keys, translation = sections["algorithm"], sections.translation
    options: dict[str, object] = {}
    if name == "gae":
        translation.set_default("algo.advantage.whiten", True)
    elif name == "gpg":
        options["count"] = "rewards"
    elif name == "grpo_passk":
        options["normalize"] = by_std
    for option, value in options.items():
        translation.set(f"algo.options.{option}", wrap(value, keys.origin("adv_estimator")))


# --- KL terms ---


def _put_kl(sections: Sections) -> None:
    keys, control = sections["algorithm"], sections["algorithm.kl_ctrl"]
    if keys.switch("use_kl_in_reward", default=False):
        keys.record("use_kl_in_reward", KeyStatus.APPLIED, "algo.kl.reward")
        control.put("kl_coef", "algo.kl.reward.coef")
        name = str(keys.value("kl_penalty")).removesuffix(_SAME_GRADIENT)  # rewards have none
        _put_kl_kind(keys, "kl_penalty", "algo.kl.reward.estimator", _KL.get(name))
        _put_controller(control)
    keys.record("use_kl_in_reward", KeyStatus.OFF, "")
    for section in (keys, control):
        for key in ("kl_penalty", "type", "kl_coef", "horizon", "target_kl"):
            section.record(key, KeyStatus.DEAD, "read with use_kl_in_reward only")
    actor = sections[ACTOR]
    if actor.switch("use_kl_loss", default=False):
        actor.record("use_kl_loss", KeyStatus.APPLIED, "algo.kl.loss")
        actor.put("kl_loss_coef", "algo.kl.loss.coef")
        name = str(actor.value("kl_loss_type"))
        base = _KL.get(name.removesuffix(_SAME_GRADIENT))
        if name.endswith(_SAME_GRADIENT) and base is not None and base != "k2":
            base = f"{base}+" if base in ("k1", "k3") else None
        _put_kl_kind(actor, "kl_loss_type", "algo.kl.loss.estimator", base)
    actor.record("use_kl_loss", KeyStatus.OFF, "")
    for key in ("kl_loss_coef", "kl_loss_type"):
        actor.record(key, KeyStatus.DEAD, "read with use_kl_loss only")


def _put_kl_kind(keys: Keys, key: str, native: str, value: str | None) -> None:
    if value is None:
        reason = "the original does not implement it either" if keys.value(key) == "full" else ""
        known = f"must be one of {', '.join(_KL)}; in the loss also k1+ and k3+"
        return keys.add_error(key, f"not supported: {reason or known}")
    return keys.assign(key, [native], value)


def _put_controller(control: Keys) -> None:
    kind = control.get("type")
    if kind is None or kind.value == "fixed":
        return control.record("type", KeyStatus.OFF, "")
    if kind.value != "adaptive":
        return control.add_error("type", "must be fixed or adaptive")
    text = "the original measures the mean over responses of their means, msrl that of all tokens"
    control.translation.approximate(kind, "algo.kl.controller.kind", "adaptive", text)
    for key, native in (("target_kl", "target"), ("horizon", "horizon")):
        control.put(key, f"algo.kl.controller.{native}")
    return None


# --- Policy loss ---


def _put_policy_loss(sections: Sections) -> None:
    actor, loss = sections[ACTOR], sections[LOSS]
    mode = str(loss.value("loss_mode"))
    native = _LOSSES.get(mode)
    if native is None:
        known = ", ".join(_LOSSES)
        loss.add_error("loss_mode", f"not supported: msrl has {known}")
        return
    loss.assign("loss_mode", ["algo.policy_loss"], native)
    if mode == "gspo":
        sections.translation.set("algo.ratio", wrap("sequence", loss.origin("loss_mode")))
    if mode == "geo_mean":
        text = "the original adds up the means of micro-batches"
        _report(loss, "loss_mode", text)
    if mode in _OPTIONS:
        text = f"{loss.translation.name}: {mode} selects tokens of a micro-batch in both systems"
        loss.translation.remarks.append(text)
    _put_clip(actor, mode)
    _put_loss_options(sections, mode)


def _report(keys: Keys, key: str, text: str) -> None:
    entry = keys.get(key)
    if entry is not None:
        keys.translation.report_difference(entry, text)


def _put_clip(actor: Keys, mode: str) -> None:
    """Translate the clip range: its two keys, or clip_ratio in place of null."""
    names = (("clip_ratio_low", "algo.clip.low"), ("clip_ratio_high", "algo.clip.high"))
    if mode in _UNCLIPPED:
        for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            actor.record(key, KeyStatus.DEAD, f"not read with loss_mode={mode}")
    else:
        for key, native in names:
            source = key if actor.value(key) is not None else "clip_ratio"
            _put_bound(actor, source, native, mode)
            actor.record(key, KeyStatus.APPLIED, f"{native}: clip_ratio")
        text = "clip_ratio_low and clip_ratio_high, which are 0.2 unless they are set"
        actor.record("clip_ratio", KeyStatus.DEAD, text)
    bound = actor.value("clip_ratio_c")
    if mode == "vanilla":
        actor.assign("clip_ratio_c", ["algo.clip.dual"], bound)
    elif mode in ("dppo_tv", "dppo_kl"):
        actor.assign("clip_ratio_c", ["algo.options.cap"], bound)
        kind = mode.removeprefix("dppo_")
        actor.translation.set_default("algo.options.divergence", kind)
    actor.record("clip_ratio_c", KeyStatus.DEAD, f"not read with loss_mode={mode}")


def _put_bound(actor: Keys, key: str, native: str, mode: str) -> None:
    """Set a bound; a lower one above 1 has no effect, since ratios are positive."""
    value = actor.value(key)
    is_open = native == "algo.clip.low" and mode in _RATIOS and is_number(value) and value > 1
    actor.assign(key, [native], 1.0 if is_open else value, why="no bound" if is_open else "")


def _put_loss_options(sections: Sections, mode: str) -> None:
    loss, actor = sections[LOSS], sections[ACTOR]
    for key, option in _OPTIONS.get(mode, {}).items():
        loss.put(key, f"algo.options.{option}")
    if mode == "sapo":
        for key, option in (("tau_pos", "tau_positive"), ("tau_neg", "tau_negative")):
            keys = loss if loss.get(key) else actor
            keys.put(key, f"algo.options.{option}")
    unread = [key for keys in _OPTIONS.values() for key in keys]
    for key in (*unread, "tau_pos", "tau_neg"):
        for keys in (loss, actor):
            keys.record(key, KeyStatus.DEAD, f"not read with loss_mode={mode}")


def _put_aggregation(sections: Sections) -> None:
    """Translate the reduction of token losses, which gspo and sapo choose themselves."""
    actor, mode = sections[ACTOR], str(sections[LOSS].value("loss_mode"))
    name, translation = str(actor.value("loss_agg_mode")), sections.translation
    native = "algo.aggregate.mode"
    has_terms = actor.value("use_kl_loss") is True or bool(actor.value("entropy_coeff"))
    if mode in OWN_MEANS:
        translation.set_default(native, "seq-mean-token-mean")
        if has_terms and name != "seq-mean-token-mean":
            entry = actor.get("loss_agg_mode", "use_kl_loss", "entropy_coeff")
            text = f"with {mode}, the original averages KL and entropy by {name}"
            translation.approximate(entry, native, "seq-mean-token-mean", text)
        text = f"{mode} averages by seq-mean-token-mean"
        actor.record("loss_agg_mode", KeyStatus.DEAD, text)
    elif name in MEANS:
        actor.assign("loss_agg_mode", [native], name)
    elif name in SUMS:
        _put_constant(sections, name)
    else:
        actor.add_error("loss_agg_mode", "not a mode of the original")
    text = "read with loss_agg_mode=seq-mean-token-sum-norm only"
    actor.record("loss_scale_factor", KeyStatus.DEAD, text)


def _put_constant(sections: Sections, name: str) -> None:
    """Set the divisor of the sum over all tokens."""
    actor, native = sections[ACTOR], "algo.aggregate.constant"
    actor.assign("loss_agg_mode", ["algo.aggregate.mode"], "seq-sum-over-constant")
    origin = actor.origin("loss_agg_mode")
    if name == "token-sum":
        return actor.translation.set(native, wrap(1.0, origin))
    mini, samples = actor.number("ppo_mini_batch_size"), samples_per_prompt(sections)
    factor, length = (
        actor.value("loss_scale_factor"),
        sections["data"].number("max_response_length"),
    )
    if not is_number(factor):
        if length is not None and mini is not None:
            text = "the original divides by the longest response of a micro-batch"
            entry = actor.get("loss_agg_mode")
            actor.translation.approximate(entry, native, float(mini * samples * length), text)
        return actor.record("loss_scale_factor", KeyStatus.OFF, "")
    if mini is None:
        return None
    why = f"{mini * samples} samples of an update times loss_scale_factor"
    return actor.assign("loss_scale_factor", [native], float(mini * samples * factor), why=why)


# --- Corrections for the engine ---


def _put_correction(sections: Sections) -> None:
    keys = sections[CORRECTION]
    level = keys.value("rollout_is")
    if keys.switch("bypass_mode", default=False):
        _put_bypass(sections)
    elif level in ("token", "sequence"):
        _put_weight(keys, str(level))
    elif level is not None:
        keys.add_error("rollout_is", "must be token or sequence")
    _put_rejection(keys)
    keys.record("bypass_mode", KeyStatus.OFF, "")
    for key in ("rollout_is", "rollout_rs"):
        keys.record(key, KeyStatus.OFF, "")
    for key in ("rollout_is_threshold", "rollout_is_batch_normalize"):
        keys.record(key, KeyStatus.DEAD, "read with rollout_is only")
    keys.record("rollout_rs_threshold", KeyStatus.DEAD, "read with rollout_rs only")
    keys.record("loss_type", KeyStatus.DEAD, "read with bypass_mode only")


def _put_bypass(sections: Sections) -> None:
    """Translate the ratio to the engine, which has the loss of vanilla."""
    keys, mode = sections[CORRECTION], sections[LOSS].value("loss_mode")
    if keys.value("loss_type") != "ppo_clip":
        text = "not supported: without a clip, msrl has algo.policy_loss: tis"
        return keys.add_error("loss_type", text)
    keys.assign("bypass_mode", ["algo.old_logprobs"], "behavior")
    keys.record("loss_type", KeyStatus.SAME, "the loss of vanilla")
    keys.record("rollout_is", KeyStatus.DEAD, "the ratio to the engine is the weight")
    if mode != "vanilla":
        _report(
            sections[LOSS], "loss_mode", "with bypass_mode, the original has the loss of vanilla"
        )
    return None


def _put_weight(keys: Keys, level: str) -> None:
    """Translate the importance weights, truncated or 0 outside of two bounds."""
    keys.assign("rollout_is", ["algo.mismatch.weight"], level)
    low, high = _bounds(keys.value("rollout_is_threshold"))
    if high is None:
        return keys.add_error("rollout_is_threshold", "must be a number or LOW_HIGH")
    keys.assign("rollout_is_threshold", ["algo.mismatch.upper"], high)
    origin = keys.origin("rollout_is_threshold")
    if low is not None:
        filters = {"token": "token", "sequence": "sequence-product"}
        values = {"filter": filters[level], "low": low, "high": high}
        for name, value in values.items():
            keys.translation.set(f"algo.mismatch.{name}", wrap(value, origin))
    if keys.switch("rollout_is_batch_normalize", default=False):
        if low is not None:
            text = "the original divides by the mean of the weights within the bounds"
            _report(keys, "rollout_is_batch_normalize", text)
        keys.assign("rollout_is_batch_normalize", ["algo.mismatch.normalize"], True)
    return keys.record("rollout_is_batch_normalize", KeyStatus.OFF, "")


def _bounds(value: object) -> tuple[float | None, float | None]:
    """Return the bounds of `HIGH` or `LOW_HIGH`; None for a missing one."""
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError:
        return None, None
    if len(numbers) == 1:
        return None, numbers[0]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (None, None)


def _put_rejection(keys: Keys) -> None:
    """Translate the filter, which bounds the inverse ratio."""
    entry = keys.get("rollout_rs")
    if entry is None or entry.value in (None, "null"):
        return None
    name = str(entry.value)
    if name not in _FILTERS:
        several = "several filters" if "," in name else name
        text = f"not supported: {several}. msrl has one of {', '.join(_FILTERS)}"
        return keys.add_error("rollout_rs", text)
    low, high = _bounds(keys.value("rollout_rs_threshold"))
    low = 1.0 / high if low is None and high else low
    if not low or not high or low < 0 or high < low:
        return keys.add_error("rollout_rs_threshold", "must be HIGH or LOW_HIGH, above 0")
    if keys.value("rollout_is") is not None and "_" in str(keys.value("rollout_is_threshold")):
        return keys.add_error("rollout_rs", "not supported with bounds in rollout_is_threshold")
    text = "averages of the original do not count rejected tokens, those of msrl do"
    keys.translation.approximate(entry, "algo.mismatch.filter", _FILTERS[name], text)
    for native, value in (("low", 1.0 / high), ("high", 1.0 / low)):
        key = f"algo.mismatch.{native}"
        keys.translation.set(key, wrap(value, keys.origin("rollout_rs_threshold")))
    return keys.record("rollout_rs_threshold", KeyStatus.APPLIED, "algo.mismatch.low and high")


def _put_earlier_correction(sections: Sections) -> None:
    """Translate the keys of v0.5 and v0.6: tis_imp_ratio_cap, rollout_is_*."""
    actor, keys = sections[ACTOR], sections["algorithm"]
    cap = actor.get("tis_imp_ratio_cap")
    if cap is not None and is_number(cap.value) and cap.value > 0:
        actor.assign("tis_imp_ratio_cap", ["algo.mismatch.upper"], cap.value)
        sections.translation.set("algo.mismatch.weight", wrap("token", cap.origin))
    actor.record("tis_imp_ratio_cap", KeyStatus.OFF, "")
    names = ("rollout_is", "rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower")
    if keys.value("rollout_is") is True:
        level, mode = keys.get("rollout_is_level"), keys.get("rollout_is_mode")
        if (level and level.value not in ("token", "sequence")) or (
            mode and mode.value != "truncate"
        ):
            keys.add_error("rollout_is", "not supported: the mode or level of its weights")
        native = str(level.value) if level else "token"
        keys.assign("rollout_is", ["algo.mismatch.weight"], native)
        if keys.value("rollout_is_threshold") is not None:
            threshold = keys.value("rollout_is_threshold")
            keys.assign("rollout_is_threshold", ["algo.mismatch.upper"], threshold)
        _put_veto(sections.translation, keys.get("rollout_is_veto_threshold"))
    for key in (*names, "rollout_is_threshold", "rollout_is_veto_threshold"):
        keys.record(key, KeyStatus.OFF, "" if key == "rollout_is" else "read with rollout_is only")


def _put_veto(translation: Translation, entry: SourceKey | None) -> None:
    if entry is not None and entry.value is not None:
        translation.difference(entry, "msrl has no veto by the ratio of a single token")


# --- Filter of groups ---


def _put_filter(sections: Sections) -> None:
    """Translate DAPO's dynamic sampling, which discards the surplus of a batch."""
    keys, data = sections["algorithm.filter_groups"], sections["data"]
    if not keys.switch("enable", default=False):
        keys.record("enable", KeyStatus.OFF, "")
        for key in ("metric", "max_num_gen_batches"):
            keys.record(key, KeyStatus.DEAD, "read with enable only")
        return data.record("gen_batch_size", KeyStatus.DEAD, "read with filter_groups.enable only")
    entry = keys.get("enable")
    text = "the original discards the surplus groups of a batch, msrl samples what is missing"
    keys.translation.approximate(entry, "rollout.filter.kind", "all_equal", text)
    origin = keys.origin("enable")
    batches = keys.number("max_num_gen_batches") or 0
    values: dict[str, Any] = {"refill": True, "max_refills": batches - 1 if batches > 0 else None}
    for name, value in values.items():
        keys.translation.set(f"rollout.filter.{name}", wrap(value, origin))
    keys.record("max_num_gen_batches", KeyStatus.APPLIED, "rollout.filter.max_refills")
    size, prompts = data.number("gen_batch_size"), data.number("train_batch_size")
    if size is not None and prompts is not None and size > prompts:
        why = "gen_batch_size minus train_batch_size"
        data.assign("gen_batch_size", ["rollout.filter.extra_prompts"], size - prompts, why=why)
    data.record("gen_batch_size", KeyStatus.SPEED, "refills sample what is missing")
    metric = keys.value("metric")
    known = ("acc", "score", "seq_reward", "seq_final_reward")
    if metric not in known:
        return keys.add_error("metric", f"must be one of {', '.join(known)}")
    return None


def filters_by_score(sections: Sections) -> bool:
    """Return True if the filter compares scores, and not rewards with their penalties."""
    keys = sections["algorithm.filter_groups"]
    return keys.value("enable") is True and keys.value("metric") in ("acc", "score")


def reads_log_probs(sections: Sections) -> None:
    """Record that log-probabilities of the engine are always there."""
    text = "log-probabilities of the engine are always recorded"
    sections[ROLLOUT].record("calculate_log_probs", KeyStatus.SAME, text)
