"""Translation of MindSpeed-RL's rl_config (grpo, dapo, ppo): batches, clipping, KL and rewards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from msrl import registry
from msrl.config.sources import wrap
from msrl.errors import nearest
from msrl.importers.critic import record_unused
from msrl.importers.megatron import convert_value
from msrl.importers.micro_batches import MicroBatches, put_aggregation
from msrl.importers.native_keys import refusal
from msrl.importers.sections import Keys
from msrl.importers.table import as_list, is_number
from msrl.importers.translation import KeyStatus, SourceKey, Translation

# Default of update_max_packing_token_size, which max_packing_token_size does not change.
_PACKED_TOKENS = 4096
_LONG_METRIC = re.compile(r"(?:grpo|dapo)/(\w+)_rewards/mean")


@dataclass(frozen=True)
class Algorithm:
    """Rules for the keys of rl_config that depend on each other.

    With `in_samples`, mini_batch_size counts samples, as in the first generation; else prompts.
    `ranks` is the data-parallel size, `micro_batch` the key micro_batch_size.
    """

    translation: Translation
    rl: Keys
    prompts: object
    max_tokens: object
    in_samples: bool
    ranks: int | None
    micro_batch: SourceKey | None

    @property
    def name(self) -> str:
        return self.translation.algorithm

    def apply(self) -> None:
        self._mini_batch()
        self._shuffle()
        self._tokens()
        self._aggregation()
        self._clip()
        self._values()
        self._kl()
        self._sources()
        self._overlong()
        self._filter()

    def _mini_batch(self) -> None:
        mini, samples = (
            self.rl.number("mini_batch_size") or 1,
            self.rl.number("n_samples_per_prompt"),
        )
        entry = self.rl.get("mini_batch_size")
        if entry is not None and not isinstance(entry.value, int):
            return self.translation.add_error(entry, "must be an integer")
        total = self.prompts * samples if isinstance(self.prompts, int) and samples else None
        update = self._samples_per_update()
        if entry is not None and update is not None and total is not None and update > total:
            key, why = "train.updates.samples_per_update", "all samples of a step, which has fewer"
            return self.rl.assign("mini_batch_size", [key], total, why=why)
        if self.in_samples:
            return self.rl.assign(
                "mini_batch_size",
                ["train.updates.samples_per_update"],
                mini,
                why="samples, as in the first generation",
            )
        if samples is None:
            return self.rl.record(
                "mini_batch_size", KeyStatus.OFF, "n_samples_per_prompt is not a number"
            )
        why = f"{mini} prompts of {samples} samples"
        return self.rl.assign(
            "mini_batch_size", ["train.updates.samples_per_update"], mini * samples, why=why
        )

    def _shuffle(self) -> None:
        spellings = ("shuffle_mini_batch", "shuffle_minibatch")
        entries = [entry for key in spellings if (entry := self.rl.get(key)) is not None]
        if not entries:
            self.translation.set_default("train.updates.shuffle", False)
        for entry in entries:
            if entry.value != entries[0].value:
                other = f"{str(entries[0].value).lower()} in {entries[0].origin}"
                self.translation.add_error(entry, f"conflicts with the other spelling: {other}")
            self.translation.assign(entry, ["train.updates.shuffle"], entry.value)

    def _tokens(self) -> None:
        packing = ("max_packing_token_size", "update_max_packing_token_size")
        if self.rl.value("use_dynamic_bsz") is not True:
            for key in packing:
                self.rl.record(key, KeyStatus.DEAD, "read with use_dynamic_bsz: true only")
            return
        chosen = self.rl.get(*reversed(packing))
        value = chosen.value if chosen is not None else 4096
        self.rl.record(
            "actor_forward_micro_batch_size",
            KeyStatus.DEAD,
            "use_dynamic_bsz splits micro-batches by tokens",
        )
        for key in (*packing, "use_dynamic_bsz"):
            self.rl.assign(key, ["train.max_tokens_per_micro_batch"], value)

    def _aggregation(self) -> None:
        """Set the aggregation of the loss. dapo without token_level_loss averages sequences."""
        if self.name == "dapo" and self.rl.value("token_level_loss") is False:
            return None
        samples = self._samples_per_update()
        if samples is not None and isinstance(self.prompts, int):
            samples = min(samples, self.prompts * (self.rl.number("n_samples_per_prompt") or 1))
        micro_batches = self._micro_batches(samples)
        has_critic = self.name == "ppo" and self.rl.value("adv_estimator") == "gae"
        put_aggregation(self.translation, micro_batches, samples, has_critic=has_critic)
        is_dynamic = self.rl.value("use_dynamic_bsz") is True
        status = KeyStatus.APPLIED if is_dynamic else KeyStatus.DEAD
        reason = "algo.aggregate" if is_dynamic else "read with use_dynamic_bsz: true only"
        self.rl.record("update_dynamic_max_batch_size", status, reason)
        text = f"with micro-batches of {micro_batches.samples or 'several'} samples"
        if self.name != "dapo":
            return self.rl.record("token_level_loss", KeyStatus.DEAD, "read by dapo only")
        return self.rl.record("token_level_loss", KeyStatus.APPLIED, f"algo.aggregate.mode: {text}")

    def _micro_batches(self, samples: int | None) -> MicroBatches:
        """Return the micro-batches of an update, whose size dynamic batches limit by tokens.

        Args:
            samples: samples of an update. One with all samples of a step is not shuffled.
        """
        keys = ("shuffle_mini_batch", "shuffle_minibatch")
        per_prompt = self.rl.number("n_samples_per_prompt")
        total = self.prompts * per_prompt if isinstance(self.prompts, int) and per_prompt else None
        shuffles = any(self.rl.value(key) is True for key in keys if self.rl.get(key))
        is_shuffled = shuffles and samples != total
        if self.rl.value("use_dynamic_bsz") is True:
            return MicroBatches(
                self.rl.get("use_dynamic_bsz"),
                self.rl.number("update_dynamic_max_batch_size") if self._has_limit() else None,
                self.rl.number("update_max_packing_token_size") or _PACKED_TOKENS,
                self.ranks,
                is_shuffled,
            )
        entry = self.micro_batch
        size = entry.value if entry is not None and isinstance(entry.value, int) else None
        return MicroBatches(entry, size, None, self.ranks, is_shuffled)

    def _has_limit(self) -> bool:
        """Return True if the file limits the samples of dynamic batches of the update."""
        return self.rl.get("update_dynamic_max_batch_size") is not None

    def _samples_per_update(self) -> int | None:
        mini = self.rl.number("mini_batch_size") or 1
        samples = self.rl.number("n_samples_per_prompt")
        if self.in_samples or samples is None:
            return mini if self.in_samples else None
        return mini * samples

    def _clip(self) -> None:
        is_dapo = self.name == "dapo"
        if is_dapo and self.rl.value("clip_higher_enable") is True:
            return self._clip_higher()
        self.rl.put("clip_ratio", "algo.clip.low", "algo.clip.high")
        for key in ("clip_ratio_low", "clip_ratio_high"):
            reason = "read by dapo with clip_higher_enable: true only"
            self.rl.record(key, KeyStatus.DEAD, reason)
        if is_dapo:
            reason = "clip_ratio is used on both sides"
            return self.rl.record("clip_higher_enable", KeyStatus.OFF, reason)
        return self.rl.record("clip_higher_enable", KeyStatus.DEAD, "read by dapo only")

    def _clip_higher(self) -> None:
        reason = "clip_higher_enable: true reads clip_ratio_low and clip_ratio_high"
        self.rl.record("clip_ratio", KeyStatus.DEAD, reason)
        self.rl.put("clip_ratio_low", "algo.clip.low")
        self.rl.put("clip_ratio_high", "algo.clip.high")
        text = "algo.clip.low and algo.clip.high: clip_ratio_low and clip_ratio_high"
        self.rl.record("clip_higher_enable", KeyStatus.APPLIED, text)

    def _values(self) -> None:
        """Translate the keys of the critic; gae always whitens, despite advantage_whiten."""
        if self.name != "ppo":
            return None
        natives = {"lam": "algo.advantage.lambda", "cliprange_value": "algo.value.clip"}
        if self.rl.value("adv_estimator") != "gae":
            entries = [entry for key in natives if (entry := self.rl.get(key)) is not None]
            return record_unused(self.translation, entries)
        for key, native in natives.items():
            self.rl.put(key, native)
        return self.translation.set_default("algo.advantage.whiten", True)

    def _kl(self) -> None:
        self._kl_controller()
        target = self._kl_target()
        if not target:
            reason = "ppo has a KL term with use_kl_in_reward: true only"
            if self.name == "dapo":
                reason = "dapo has no KL term"
            for key in ("init_kl_coef", "kl_penalty"):
                self.rl.record(key, KeyStatus.DEAD, reason)
            return None
        self.rl.put("init_kl_coef", f"algo.kl.{target}.coef")
        if self.rl.value("kl_penalty") == "full":
            message = "the original raises NotImplementedError. Use kl, abs, mse or low_var_kl."
            return self.rl.add_error("kl_penalty", message)
        estimator = convert_value(self.rl, "kl_penalty", "kl_estimator")
        return self.rl.assign("kl_penalty", [f"algo.kl.{target}.estimator"], estimator)

    def _kl_controller(self) -> None:
        controller = self.rl.value("kl_ctrl_type")
        if controller not in (None, "fixed", "adaptive"):
            message = "must be fixed or adaptive. The estimator is set by kl_penalty."
            self.rl.add_error("kl_ctrl_type", message)
        status = KeyStatus.DEAD if controller == "adaptive" else KeyStatus.OFF
        self.rl.record("kl_ctrl_type", status, "the coefficient does not change")

    def _kl_target(self) -> str:
        """Return the section of the KL term, `loss` or `reward`; empty if there is none."""
        if self.name != "ppo":
            self.rl.record("use_kl_in_reward", KeyStatus.DEAD, "read by ppo only")
            return "loss" if self.name == "grpo" else ""
        if self.rl.value("use_kl_in_reward") is True:
            text = "algo.kl.reward: init_kl_coef"
            self.rl.record("use_kl_in_reward", KeyStatus.APPLIED, text)
            return "reward"
        self.rl.record("use_kl_in_reward", KeyStatus.OFF, "")
        return ""

    def _sources(self) -> None:
        keys = ("verifier_function", "verifier_weight")
        if self.rl.value("rule_reward") is False:
            for key in keys:
                self.rl.record(
                    key, KeyStatus.DEAD, "with rule_reward: false, the reward model scores"
                )
            return self.rl.record(
                "rule_reward", KeyStatus.APPLIED, "reward.sources: the model in reward_config.load"
            )
        names, weights = map(as_list, map(self.rl.value, keys))
        if len(names) != len(weights):
            return self.rl.add_error(
                "verifier_weight",
                "must have one number per verifier of verifier_function: "
                f"{len(names)}, not {len(weights)}",
            )
        put_sources(self.translation, self.rl, names, weights)
        return self.rl.record(
            "rule_reward",
            KeyStatus.APPLIED,
            "reward.sources: verifier_function with verifier_weight",
        )

    def _overlong(self) -> None:
        on = self.rl.value("overlong_buffer_enable") is True and self.name == "dapo"
        keys = ("overlong_buffer", "overlong_buffer_penalty_factor")
        if not on:
            why = "read by dapo with overlong_buffer_enable: true only"
            for key in (*keys, "rollout_max_tokens"):
                self.rl.record(key, KeyStatus.DEAD, why)
            return self._off_or_dead("overlong_buffer_enable")
        for key, native in zip(keys, ("buffer", "factor"), strict=True):
            value = self.rl.value(key)
            self.rl.assign(key, [f"reward.overlong.{native}"], 0 if value is None else value)
        limit = self.rl.value("rollout_max_tokens")
        if self.rl.get("rollout_max_tokens") and limit != self.max_tokens:
            self.rl.add_error(
                "rollout_max_tokens", f"must be sampling_config.max_tokens={self.max_tokens}"
            )
        self.rl.record(
            "rollout_max_tokens",
            KeyStatus.SAME,
            "the length is set by rollout.max_response_tokens",
        )
        return self.rl.record(
            "overlong_buffer_enable",
            KeyStatus.APPLIED,
            "reward.overlong: overlong_buffer and overlong_buffer_penalty_factor",
        )

    def _off_or_dead(self, key: str) -> None:
        """Record a dapo switch that is off, or that another algorithm never reads."""
        if self.name == "dapo":
            return self.rl.record(key, KeyStatus.OFF, "")
        return self.rl.record(key, KeyStatus.DEAD, "read by dapo only")

    def _metric(self) -> None:
        """Translate the verifier whose scores the filter compares, which the run must have."""
        metric, names = (
            self.rl.value("filter_groups_metric"),
            [str(name) for name in as_list(self.rl.value("verifier_function"))],
        )
        long_name = _LONG_METRIC.fullmatch(str(metric))
        metric = long_name[1] if long_name else metric
        if metric not in names:
            return self.rl.add_error(
                "filter_groups_metric", f"must be one of verifier_function: {', '.join(names)}"
            )
        return self.rl.assign("filter_groups_metric", ["rollout.filter.source"], metric)

    def _filter(self) -> None:
        on = self.rl.value("filter_groups_enable") is True and self.name == "dapo"
        settings = (
            "filter_groups_metric",
            "filter_groups_max_batches",
            "filter_groups_train_batch_size",
        )
        if not on:
            for key in settings:
                self.rl.record(
                    key, KeyStatus.DEAD, "read by dapo with filter_groups_enable: true only"
                )
            return self._off_or_dead("filter_groups_enable")
        self.rl.assign("filter_groups_enable", ["rollout.filter.kind"], "all_equal")
        self._metric()
        batches = self.rl.value("filter_groups_max_batches")
        if isinstance(batches, int) and batches > 0:  # the count includes the first batch
            why = (
                "after that, the step trains on the groups that passed, while the original ends "
                "the run"
            )
            self.rl.assign(
                "filter_groups_max_batches", ["rollout.filter.max_refills"], batches - 1, why=why
            )
        else:
            self.rl.assign("filter_groups_max_batches", ["rollout.filter.max_refills"], None)
        if self.rl.value("filter_groups_train_batch_size") != self.prompts:
            return self.rl.add_error(
                "filter_groups_train_batch_size",
                f"not supported: msrl trains on as many prompts as it samples, which is "
                f"global_batch_size={self.prompts}. Set both to one number.",
            )
        return self.rl.assign("filter_groups_train_batch_size", ["rollout.filter.refill"], True)


def put_sources(translation: Translation, keys: Keys, names: list[Any], weights: list[Any]) -> None:
    """Set reward.sources from parallel lists; the weights of a repeated verifier add up."""
    if not all(is_number(weight) for weight in weights):
        return keys.add_error(
            "verifier_weight", "must be numbers, one per verifier of verifier_function"
        )
    total: dict[str, float] = {}
    for name, weight in zip(names, weights, strict=True):
        total[str(name)] = total.get(str(name), 0) + weight
    for name in total:
        if refusal("reward.sources.verifier", name):
            return keys.add_error("verifier_function", f"{name}: {_verifier_message(name)}")
    sources = [_source(name, weight) for name, weight in total.items()]
    translation.set("reward.sources", wrap(sources, keys.origin("verifier_function")))
    weighted = ", ".join(f"{name} x {weight:g}" for name, weight in total.items())
    for key in ("verifier_function", "verifier_weight"):
        keys.record(key, KeyStatus.APPLIED, f"reward.sources: {weighted}")
    return None


def _source(name: str, weight: float) -> dict[str, Any]:
    """Return the source with the options that give MindSpeed-RL's scores."""
    source = {"verifier": name, "weight": weight}
    return {**source, "options": {"numbers": "response"}} if name == "step" else source


def _verifier_message(name: str) -> str:
    return (
        "unknown verifier in this version; "
        f"{nearest(name, registry.names('msrl.rewards.verifiers'))}"
    )
