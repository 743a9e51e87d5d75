"""MindSpeed-RL's rl_config: batches, clipping, KL and rewards, as grpo, dapo and ppo each read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msrl import registry
from msrl.config.sources import wrap
from msrl.errors import nearest
from msrl.importers.critic import say_dead
from msrl.importers.megatron import converted
from msrl.importers.native_keys import refusal
from msrl.importers.sections import Keys, as_list
from msrl.importers.translation import Fate, Translation


@dataclass(frozen=True)
class Algorithm:
    """`in_samples`: mini_batch_size counts samples, as in the first generation; else prompts."""

    translation: Translation
    rl: Keys
    prompts: object
    max_tokens: object
    in_samples: bool

    @property
    def name(self) -> str:
        return self.translation.algorithm

    def apply(self) -> None:
        self._mini_batch()
        self._shuffle()
        self._tokens()
        self._clip()
        self._values()
        self._kl()
        self._sources()
        self._overlong()
        self._filter()

    def _mini_batch(self) -> None:
        mini, samples = self.rl.number("mini_batch_size") or 1, self.rl.number("n_samples_per_prompt")
        given = self.rl.get("mini_batch_size")
        if given is not None and not isinstance(given.value, int):
            return self.translation.mistake(given, "must be a whole number")
        if self.in_samples:
            return self.rl.take("mini_batch_size", ["train.updates.samples_per_update"], mini, why="samples, as in the first generation")
        if samples is None:
            return self.rl.say("mini_batch_size", Fate.OFF, "n_samples_per_prompt is not a number")
        why = f"{mini} prompts of {samples} samples"
        return self.rl.take("mini_batch_size", ["train.updates.samples_per_update"], mini * samples, why=why)

    def _shuffle(self) -> None:
        given = [one for one in (self.rl.get("shuffle_mini_batch"), self.rl.get("shuffle_minibatch")) if one is not None]
        if not given:
            return self.translation.set_default("train.updates.shuffle", False)
        for one in given:
            if one.value != given[0].value:
                self.translation.mistake(one, f"the other spelling in {given[0].origin} says {str(given[0].value).lower()}")
            self.translation.take(one, ["train.updates.shuffle"], one.value)
        return None

    def _tokens(self) -> None:
        packing = ("max_packing_token_size", "update_max_packing_token_size")
        if self.rl.value("use_dynamic_bsz") is not True:
            for key in packing:
                self.rl.say(key, Fate.DEAD, "read beside use_dynamic_bsz: true only")
            return
        chosen = self.rl.get(*reversed(packing))
        value = chosen.value if chosen is not None else 4096
        for key in (*packing, "use_dynamic_bsz"):
            self.rl.take(key, ["train.max_tokens_per_micro_batch"], value)

    def _clip(self) -> None:
        higher = self.rl.value("clip_higher_enable") is True and self.name == "dapo"
        if not higher:
            self.rl.take("clip_ratio", ["algo.clip.low", "algo.clip.high"], self.rl.value("clip_ratio"))
            for key in ("clip_ratio_low", "clip_ratio_high"):
                self.rl.say(key, Fate.DEAD, "read by dapo with clip_higher_enable: true only")
            text = "clip_ratio counts on both sides" if self.name == "dapo" else "read by dapo only"
            return self.rl.say("clip_higher_enable", Fate.OFF if self.name == "dapo" else Fate.DEAD, text)
        self.rl.say("clip_ratio", Fate.DEAD, "clip_higher_enable: true takes clip_ratio_low and clip_ratio_high")
        self.rl.take("clip_ratio_low", ["algo.clip.low"], self.rl.value("clip_ratio_low"))
        self.rl.take("clip_ratio_high", ["algo.clip.high"], self.rl.value("clip_ratio_high"))
        return self.rl.say("clip_higher_enable", Fate.TOOK, "algo.clip.low and algo.clip.high: clip_ratio_low and clip_ratio_high")

    def _values(self) -> None:
        """The critic's numbers; advantages of gae are whitened, whatever advantage_whiten says."""
        if self.name != "ppo":
            return None
        own = {"lam": "algo.advantage.lambda", "cliprange_value": "algo.value.clip"}
        if self.rl.value("adv_estimator") != "gae":
            return say_dead(self.translation, [given for key in own if (given := self.rl.get(key)) is not None])
        for key, native in own.items():
            self.rl.take(key, [native], self.rl.value(key))
        return self.translation.set_default("algo.advantage.whiten", True)

    def _kl(self) -> None:
        controller = self.rl.value("kl_ctrl_type")
        if controller not in (None, "fixed", "adaptive"):
            self.rl.mistake("kl_ctrl_type", "must be fixed or adaptive; the estimator is kl_penalty")
        self.rl.say("kl_ctrl_type", Fate.DEAD if controller == "adaptive" else Fate.OFF, "the coefficient stays as it is")
        where = {"grpo": "loss", "dapo": "", "ppo": "reward"}[self.name]
        if self.name == "ppo":
            used = self.rl.value("use_kl_in_reward") is True
            self.rl.say("use_kl_in_reward", Fate.TOOK if used else Fate.OFF, "algo.kl.reward: init_kl_coef" if used else "")
            where = where if used else ""
        else:
            self.rl.say("use_kl_in_reward", Fate.DEAD, "read by ppo only")
        if not where:
            reason = "dapo has no KL term" if self.name == "dapo" else "ppo has a KL term with use_kl_in_reward: true only"
            for key in ("init_kl_coef", "kl_penalty"):
                self.rl.say(key, Fate.DEAD, reason)
            return None
        self.rl.take("init_kl_coef", [f"algo.kl.{where}.coef"], self.rl.value("init_kl_coef"))
        if self.rl.value("kl_penalty") == "full":
            return self.rl.mistake("kl_penalty", "the original raises NotImplementedError; one of kl, abs, mse, low_var_kl")
        return self.rl.take("kl_penalty", [f"algo.kl.{where}.estimator"], converted(self.rl, "kl_penalty", "kl_estimator"))

    def _sources(self) -> None:
        keys = ("verifier_function", "verifier_weight")
        if self.rl.value("rule_reward") is False:
            for key in keys:
                self.rl.say(key, Fate.DEAD, "rule_reward: false leaves scoring to the reward model")
            return self.rl.say("rule_reward", Fate.TOOK, "reward.sources: the model in reward_config.load")
        names, weights = map(as_list, map(self.rl.value, keys))
        if len(names) != len(weights):
            return self.rl.mistake(
                "verifier_weight", f"must have as many numbers as verifier_function has names: {len(names)}, not {len(weights)}"
            )
        put_sources(self.translation, self.rl, names, weights)
        return self.rl.say("rule_reward", Fate.TOOK, "reward.sources: verifier_function with verifier_weight")

    def _overlong(self) -> None:
        on = self.rl.value("overlong_buffer_enable") is True and self.name == "dapo"
        keys = ("overlong_buffer", "overlong_buffer_penalty_factor")
        if not on:
            why = "read by dapo with overlong_buffer_enable: true only"
            for key in (*keys, "rollout_max_tokens"):
                self.rl.say(key, Fate.DEAD, why)
            return self._off_or_dead("overlong_buffer_enable")
        for key, native in zip(keys, ("buffer", "factor"), strict=True):
            value = self.rl.value(key)
            self.rl.take(key, [f"reward.overlong.{native}"], 0 if value is None else value)
        limit = self.rl.value("rollout_max_tokens")
        if self.rl.get("rollout_max_tokens") and limit != self.max_tokens:
            self.rl.mistake("rollout_max_tokens", f"must be sampling_config.max_tokens={self.max_tokens}")
        self.rl.say("rollout_max_tokens", Fate.SAME, "rollout.max_response_tokens is the length that counts")
        return self.rl.say("overlong_buffer_enable", Fate.TOOK, "reward.overlong: overlong_buffer and overlong_buffer_penalty_factor")

    def _off_or_dead(self, key: str) -> None:
        """A switch of dapo's that is off, or that another algorithm never reads."""
        if self.name == "dapo":
            return self.rl.say(key, Fate.OFF, "")
        return self.rl.say(key, Fate.DEAD, "read by dapo only")

    def _metric(self) -> None:
        """The verifier whose scores are compared, which must be one of the run's."""
        metric, names = self.rl.value("filter_groups_metric"), [str(name) for name in as_list(self.rl.value("verifier_function"))]
        if metric not in names:
            return self.rl.mistake("filter_groups_metric", f"must be one of verifier_function: {', '.join(names)}")
        return self.rl.take("filter_groups_metric", ["rollout.filter.source"], metric)

    def _filter(self) -> None:
        on = self.rl.value("filter_groups_enable") is True and self.name == "dapo"
        rest = ("filter_groups_metric", "filter_groups_max_batches", "filter_groups_train_batch_size")
        if not on:
            for key in rest:
                self.rl.say(key, Fate.DEAD, "read by dapo with filter_groups_enable: true only")
            return self._off_or_dead("filter_groups_enable")
        self.rl.take("filter_groups_enable", ["rollout.filter.kind"], "all_equal")
        self._metric()
        batches = self.rl.value("filter_groups_max_batches")
        if isinstance(batches, int) and batches > 0:  # the first batch is one of them
            why = "the original ends the run then; here the step goes on with the groups that are left"
            self.rl.take("filter_groups_max_batches", ["rollout.filter.max_refills"], batches - 1, why=why)
        else:
            self.rl.take("filter_groups_max_batches", ["rollout.filter.max_refills"], None)
        if self.rl.value("filter_groups_train_batch_size") != self.prompts:
            return self.rl.mistake(
                "filter_groups_train_batch_size", f"must be global_batch_size={self.prompts}: a step trains what it asked for"
            )
        return self.rl.take("filter_groups_train_batch_size", ["rollout.filter.refill"], True)


def put_sources(translation: Translation, keys: Keys, names: list[Any], weights: list[Any]) -> None:
    """reward.sources from parallel lists; a name that is there twice counts with both weights."""
    if any(isinstance(weight, bool) or not isinstance(weight, int | float) for weight in weights):
        return keys.mistake("verifier_weight", "must be numbers, one for each name of verifier_function")
    total: dict[str, float] = {}
    for name, weight in zip(names, weights, strict=True):
        total[str(name)] = total.get(str(name), 0) + weight
    for name in total:
        said = refusal("reward.sources.verifier", name)
        if said:
            return keys.mistake("verifier_function", f"{name}: {_verifier_message(name)}")
    sources = [{"verifier": name, "weight": weight} for name, weight in total.items()]
    translation.set("reward.sources", wrap(sources, keys.origin("verifier_function")))
    told = ", ".join(f"{name} x {weight:g}" for name, weight in total.items())
    for key in ("verifier_function", "verifier_weight"):
        keys.say(key, Fate.TOOK, f"reward.sources: {told}")
    return None


def _verifier_message(name: str) -> str:
    return f"no verifier of this name is in this version; {nearest(name, registry.names('msrl.rewards.verifiers'))}"
