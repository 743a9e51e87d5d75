"""LightRFT's command line. Its guide's names and its parser's are both taken; where they mean different things, the parser's counts.

Source: LightRFT 49e62cb, examples/gsm8k_geo3k/train_colocate.py and trainer/fast_exp_maker.py.
"""

from __future__ import annotations

from msrl.config.sources import Origin, wrap
from msrl.errors import MsrlError
from msrl.importers.megatron import converted
from msrl.importers.sections import Keys, as_list
from msrl.importers.shell import Word, flags, parse_script
from msrl.importers.table import load_table
from msrl.importers.translation import Fate, Given, Translation

# group_norm with another ratio or loss, by the guide's names.
_NAMED_LOSSES = {"gspo": {"algo.ratio": "sequence"}, "gmpo": {"algo.policy_loss": "gmpo"}}


def translate_script(text: str, name: str) -> Translation:
    """The training command of a script. Raises MsrlError when there is none, or more than one."""
    script = parse_script(text, name)
    found = [words for words in script.commands if sum(word.text.startswith("--") for word in words) > 1]
    if len(found) != 1:
        raise MsrlError(f"{name}: must hold one command with flags of LightRFT's, found {len(found)}")
    translation = translate_words(found[0], name)
    for variable, word in script.exported.items():
        _environment(translation, variable, word)
    return translation


def translate_words(words: list[Word], name: str) -> Translation:
    """The flags of one command."""
    translation = Translation("LightRFT", load_table("lightrft"), name)
    tree = flags(words, name)
    keys = Keys(translation, "flags", translation.given(tree, "flags", ""))
    return _Flags(translation, keys).translate()


def _environment(translation: Translation, variable: str, word: Word) -> None:
    given = Given("environment", variable, variable, wrap(word.text, Origin(translation.name, word.line)))
    if variable == "CUDA_VISIBLE_DEVICES":
        return translation.say(given, Fate.SAME, "msrl shows every worker its devices; export it before msrl to hide some")
    return translation.take(given, [f"cluster.env.{variable}"], word.text)


class _Flags:
    def __init__(self, translation: Translation, keys: Keys) -> None:
        self.translation = translation
        self.keys = keys

    def translate(self) -> Translation:
        self.translation.algorithm = str(self.keys.value("advantage_estimator"))
        self._algorithm()
        self._kl()
        self._clip()
        self._rewards()
        self._engine()
        self._files()
        self._lora()
        self.keys.apply_rest()
        self.translation.laid_in(("flags",), self.keys)
        return self.translation

    def _algorithm(self) -> None:
        keys, name = self.keys, str(self.keys.value("advantage_estimator"))
        estimator = "group_norm" if name in _NAMED_LOSSES else converted(keys, "advantage_estimator", "estimator")
        if estimator is None:
            return
        keys.take("advantage_estimator", ["algo.advantage.estimator"], estimator)
        for native, value in _NAMED_LOSSES.get(name, {}).items():
            self.translation.set(native, wrap(value, keys.origin("advantage_estimator")))
        if keys.value("use_cpg_loss") is True:
            keys.take("use_cpg_loss", ["algo.policy_loss"], "cpgd")
        keys.say("use_cpg_loss", Fate.OFF, "")
        self.translation.set_default("algo.aggregate.mode", "seq-mean-token-mean")
        betas = keys.get("adam_betas")
        if betas is not None:
            parts = [str(part).strip("(), ") for part in as_list(betas.value)]
            numbers = [part for text in parts for part in text.replace(",", " ").split()]
            try:
                self.translation.take(betas, ["train.optimizer.betas"], [float(number) for number in numbers])
            except ValueError:
                self.translation.mistake(betas, "must be two numbers, as in --adam_betas 0.9 0.95")
        else:
            self.translation.set_default("train.optimizer.betas", [0.9, 0.95])
        self.translation.set_default("train.optimizer.schedule", "cosine")
        lr = keys.value("actor_learning_rate")
        if isinstance(lr, float):
            self.translation.set_default("train.optimizer.min_lr", 0.1 * lr)
        critic_lr = keys.value("critic_learning_rate")
        if estimator == "gae":
            self.translation.set_default("algo.advantage.whiten", True)  # over the batch, whatever advantages_norm says
            if isinstance(critic_lr, float):
                self.translation.set_default("cluster.roles.critic.optimizer.min_lr", 0.1 * critic_lr)

    def _kl(self) -> None:
        keys = self.keys
        where = "loss" if keys.value("use_kl_loss") is True else "reward"
        keys.take("init_kl_coef", [f"algo.kl.{where}.coef"], keys.value("init_kl_coef"))
        keys.take("kl_estimator", [f"algo.kl.{where}.estimator"], converted(keys, "kl_estimator", "kl_estimator"))
        keys.say("use_kl_loss", Fate.TOOK if where == "loss" else Fate.OFF, "algo.kl.loss: init_kl_coef" if where == "loss" else "")
        target = keys.get("kl_target")
        if target is None or target.value is None:
            return keys.say("kl_horizon", Fate.DEAD, "read beside kl_target only")
        self.translation.take(target, ["algo.kl.controller.target"], target.value, why="adaptive")
        self.translation.set("algo.kl.controller.kind", wrap("adaptive", target.origin))
        horizon = keys.get("kl_horizon")
        return keys.take("kl_horizon", ["algo.kl.controller.horizon"], horizon.value) if horizon else None

    def _clip(self) -> None:
        keys = self.keys
        low = keys.get("clip_range", "eps_clip")
        for given in (keys.get("clip_range"), keys.get("eps_clip")):
            if given is not None and low is not None and given.value != low.value:
                self.translation.mistake(given, f"is {low.path} too, which says {low.value}")
            elif given is not None:
                self.translation.take(given, ["algo.clip.low", "algo.clip.high"], given.value)
        if low is None:
            for native in ("algo.clip.low", "algo.clip.high"):
                self.translation.set_default(native, 0.2)
        higher = keys.get("clip_range_higher")
        if higher is not None:
            self.translation.take(higher, ["algo.clip.high"], higher.value, why="the guide's; the parser has no such flag")

    def _rewards(self) -> None:
        keys = self.keys
        for key, native in (("reward_pretrain", "model"), ("remote_rm_url", "url")):
            given = keys.get(key)
            if given is not None and given.value:
                self.translation.take(given, ["reward.sources"], [{native: given.value}])
        running = keys.value("reward_running_norm") is True
        keys.take("reward_running_norm", ["reward.norm.scale"], "running") if running else None
        if keys.value("reward_running_norm_minus_mean") is True and running:
            keys.take("reward_running_norm_minus_mean", ["reward.norm.center"], "running")
        for key in ("reward_running_norm", "reward_running_norm_minus_mean"):
            keys.say(key, Fate.OFF, "")
        parts = (("overlong_buffer_len", "buffer", 1024), ("overlong_buffer_penalty_factor", "factor", 1.0))
        for key, native, default in parts:
            if keys.value("overlong_buffer") is True:
                given = keys.get(key)
                value = given.value if given is not None else default
                keys.take(key if given is not None else "overlong_buffer", [f"reward.overlong.{native}"], value)
            keys.say(key, Fate.DEAD, "read beside overlong_buffer only")
        keys.say("overlong_buffer", Fate.OFF, "")

    def _engine(self) -> None:
        keys = self.keys
        if keys.value("engine_type") != "vllm":
            keys.say("engine_type", Fate.SAME, "vLLM generates; sglang is not an engine of msrl's")
        keys.take("engine_type", ["rollout.engine.name"], "vllm") if keys.value("engine_type") == "vllm" else None

    def _files(self) -> None:
        keys = self.keys
        keys.say("prompt_data", Fate.SAME, "rows are preprocessed first: `msrl preprocess`, then --set data.train=PREFIX")
        if keys.get("save_path"):
            keys.take("save_path", ["checkpoint.export_hf"], True)
        ckpt = keys.get("ckpt_path")
        if ckpt is not None:
            self.translation.take(ckpt, ["checkpoint.save"], ckpt.value)
        if keys.value("load_checkpoint") is True:
            keys.take("load_checkpoint", ["checkpoint.resume"], "auto")
        keys.say("load_checkpoint", Fate.OFF, "")
        every = keys.get("save_interval")
        if every is not None:
            self.translation.say(every, Fate.DEAD, "the parser has save_steps; write --set checkpoint.every_steps=N")
        trackers = [name for name, key in (("tensorboard", "use_tensorboard"), ("wandb", "use_wandb")) if keys.value(key)]
        for name in trackers:
            keys.take(f"use_{name}", ["log.trackers"], [name], same="metrics.jsonl has all that it would show")
        if not trackers:
            self.translation.set_default("log.trackers", [])

    def _lora(self) -> None:
        rank = self.keys.value("lora_rank")
        if not rank:
            for key in ("lora_alpha", "lora_dropout", "target_modules"):
                self.keys.say(key, Fate.DEAD, "read beside lora_rank only")
            return
        names = (("lora_alpha", "alpha"), ("lora_dropout", "dropout"), ("target_modules", "targets"))
        for key, native in names:
            given = self.keys.get(key)
            if given is not None:
                value = as_list(given.value) if native == "targets" else given.value
                self.translation.take(given, [f"train.lora.{native}"], value)
