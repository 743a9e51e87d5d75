"""Import of the LightRFT command line.

It accepts the flag names of the guide and of the parser. If they differ in meaning, the parser
takes precedence.


Source: LightRFT 49e62cb, examples/gsm8k_geo3k/train_colocate.py and trainer/fast_exp_maker.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from msrl.config.sources import Node, plain, wrap
from msrl.errors import MsrlError
from msrl.importers.environment import put_exports
from msrl.importers.lightrft.images import put_images
from msrl.importers.megatron import convert_value
from msrl.importers.programs import put_left_out
from msrl.importers.sections import Keys, put_repeated, put_tracker_options
from msrl.importers.shell import Word, flags, parse_script, repeated_flags
from msrl.importers.table import as_list, load_table
from msrl.importers.translation import KeyStatus, Translation

# Names in the guide for group_norm with another ratio or loss.
# The first box of a response must follow its first thought.
_NO_BOX = r"(?:(?!\\boxed\{.*?\}).)*?"
_FORMAT = rf"^{_NO_BOX}<think>{_NO_BOX}</think>.*?\\boxed\{{.*?\}}"
_RULES = [
    {"verifier": "math_17k_acc", "weight": 0.9},
    {"verifier": "regex_match", "weight": 0.1, "options": {"pattern": _FORMAT}},
]
_NAMED_LOSSES = {"gspo": {"algo.ratio": "sequence"}, "gmpo": {"algo.policy_loss": "gmpo"}}


def translate_script(text: str, name: str, arguments: Sequence[str] = ()) -> Translation:
    """Return the translation of the only training command of a script called with arguments.

    Raises:
        MsrlError: if the script has no training command or several.
    """
    try:
        script = parse_script(text, name, arguments)
    except MsrlError:
        _refuse_programs(text, name)
        raise
    commands = [words for words in script.commands if _num_flags(words) > 1]
    programs = [words for words in commands if any(word.text.endswith(".py") for word in words)]
    commands = programs or commands  # a teacher's server is no training
    if len(commands) != 1:
        raise MsrlError(
            f"{name}: must contain one LightRFT command with flags, but has {len(commands)}"
        )
    translation = translate_words(commands[0], name)
    if translation.errors:
        _refuse_feature(commands[0], name)
    put_exports(translation, script)
    put_left_out(translation, script, {id(commands[0])}, _PROGRAMS)
    return translation


_PROGRAMS = {
    "test_reward_models": "a check of reward models. `--dry-run` opens those of a configuration",
    "ray start": "`msrl cluster up` starts Ray",
    "python -m sglang.launch_server": "a server of a teacher or a reward model. Start it with "
    "`msrl serve` or with vLLM, and set its address",
}
_WANDB_VALUE = (
    "the value is not written: the original logs in with it. Export WANDB_API_KEY; a project is "
    "set by wandb_project"
)
_FEATURES = {
    "--audio_key": "training on audio",
    "--audios_key": "training on audio",
    "on_policy_distillation": "on-policy distillation. Use `msrl train-distill`",
}


def _refuse_feature(words: list[Word], name: str) -> None:
    """Raise MsrlError if a script that msrl refuses needs a feature that msrl does not have."""
    for word in words:
        feature = _FEATURES.get(word.text.partition("=")[0])
        if feature:
            raise MsrlError(f"{name}: not supported: {feature}")


def _num_flags(words: list[Word]) -> int:
    return sum(word.text.startswith("--") for word in words)


def translate_words(words: list[Word], name: str) -> Translation:
    """Return the translation of the flags of one command."""
    translation = Translation("LightRFT", load_table("lightrft"), name)
    start = next((i for i, word in enumerate(words) if word.text.endswith(".py")), 0)
    program = words[start].text.rpartition("/")[2] if words else ""
    if feature := _unsupported_program(words[start].text if words else ""):
        raise MsrlError(f"{name}: {program}: not supported: {feature}")
    _launcher(translation, flags(words[:start], name, is_complete=False))
    keys = Keys.read(translation, "flags", flags(words[start:], name), "")
    for key, node in repeated_flags(words[start:], name):
        put_repeated(translation, "flags", key, node)
    return _Flags(translation, keys).translate()


def _launcher(translation: Translation, tree: Node) -> None:
    """Translate the flags of torchrun: the devices of the training."""
    for entry in translation.entries(tree, "torchrun", ""):
        to = translation.row(entry).to
        if to and not isinstance(entry.value, int):
            translation.record(entry, KeyStatus.PLACEMENT, f"placeholder: set {to[0]}")
        else:
            translation.apply(entry)


def _refuse_programs(text: str, name: str) -> None:
    """Raise MsrlError if a script that cannot be read names a program that msrl does not import."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for path in (word for line in lines for word in line.split() if word.endswith(".py")):
        program = path.rpartition("/")[2]
        feature = _unsupported_program(path) if program.startswith("train") else ""
        if feature:
            raise MsrlError(f"{name}: {program}: not supported: {feature}")


def _unsupported_program(path: str) -> str:
    """Return the feature that a program needs and msrl does not have; empty if it is imported."""
    folder, _, program = path.rpartition("/")
    if "aqa" in folder or "audio" in folder:
        return "training on audio"
    if "grm_vl_rl" in folder:
        return "reinforcement learning of generative reward models on images and videos"
    is_reward_model = "rm_training" in folder
    if not path.endswith(".py") or (program.startswith("train") and not is_reward_model):
        return ""
    if is_reward_model:
        return "training of reward models on images, video and audio"
    return "only the trainings of LightRFT (train_colocate.py) are imported"


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
        put_images(self.keys)
        self.keys.apply_remaining()
        self.translation.fill_defaults(("flags",), self.keys)
        return self.translation

    def _algorithm(self) -> None:
        keys, name = self.keys, str(self.keys.value("advantage_estimator"))
        estimator = (
            "group_norm"
            if name in _NAMED_LOSSES
            else convert_value(keys, "advantage_estimator", "estimator")
        )
        if estimator is None:
            return
        keys.assign("advantage_estimator", ["algo.advantage.estimator"], estimator)
        self._whitening(str(estimator))
        for native, value in _NAMED_LOSSES.get(name, {}).items():
            self.translation.set(native, wrap(value, keys.origin("advantage_estimator")))
        if keys.value("use_cpg_loss") is True:
            keys.assign("use_cpg_loss", ["algo.policy_loss"], "cpgd", why="without drift term")
            self.translation.set("algo.options.drift", wrap(0.0, keys.origin("use_cpg_loss")))
        keys.record("use_cpg_loss", KeyStatus.OFF, "")
        self.translation.set_default("algo.aggregate.mode", "seq-mean-token-mean")
        self._packing()
        self._betas()
        self.translation.set_default("train.optimizer.schedule", "cosine")
        if keys.value("lr_warmup_ratio"):  # the original begins at 0, as transformers does
            self.translation.set_default("train.optimizer.warmup_from_zero", True)
        lr = keys.value("actor_learning_rate")
        if isinstance(lr, float):
            self.translation.set_default("train.optimizer.min_lr", 0.1 * lr)
        if estimator == "gae":
            self.translation.set_default("algo.value.aggregate", "seq-mean-token-mean")
        critic_lr = keys.value("critic_learning_rate")
        if estimator == "gae" and isinstance(critic_lr, float):
            key = "cluster.roles.critic.optimizer.min_lr"
            self.translation.set_default(key, 0.1 * critic_lr)

    def _packing(self) -> None:
        """Report that the original averages over the tokens of a packed micro-batch.

        Source: trainer/ppo_trainer.py, whose packed samples have no mask.
        """
        packing = self.keys.get("packing_samples")
        if packing is None or packing.value is not True:
            return None
        if self.keys.value("micro_train_batch_size") == 1:
            text = "micro-batches of one sample; msrl always packs them"
            return self.translation.record(packing, KeyStatus.SAME, text)
        text = "the original averages the loss over the tokens of a packed micro-batch, msrl over "
        return self.translation.difference(packing, text + "samples")

    def _whitening(self, estimator: str) -> None:
        """Whiten gae and reinforce, which the original always does, and groups never."""
        if estimator in ("gae", "reinforce"):
            reason = f"{estimator} always normalizes the advantages of a step"
            self.translation.set_default("algo.advantage.whiten", True)
            self.keys.record("advantages_norm", KeyStatus.APPLIED, reason)
        elif estimator != "reinforce_pp":
            reason = f"not read with {self.keys.value('advantage_estimator')}"
            self.keys.record("advantages_norm", KeyStatus.DEAD, reason)

    def _betas(self) -> None:
        betas = self.keys.get("adam_betas")
        if betas is None:
            return self.translation.set_default("train.optimizer.betas", [0.9, 0.95])
        text = " ".join(str(item) for item in as_list(betas.value))
        for separator in ",()":
            text = text.replace(separator, " ")
        try:
            values = [float(number) for number in text.split()]
        except ValueError:
            message = "must be two numbers, as in --adam_betas 0.9 0.95"
            return self.translation.add_error(betas, message)
        return self.translation.assign(betas, ["train.optimizer.betas"], values)

    def _kl(self) -> None:
        keys = self.keys
        where = "loss" if keys.value("use_kl_loss") is True else "reward"
        keys.put("init_kl_coef", f"algo.kl.{where}.coef")
        keys.assign(
            "kl_estimator",
            [f"algo.kl.{where}.estimator"],
            convert_value(keys, "kl_estimator", "kl_estimator"),
        )
        keys.record(
            "use_kl_loss",
            KeyStatus.APPLIED if where == "loss" else KeyStatus.OFF,
            "algo.kl.loss: init_kl_coef" if where == "loss" else "",
        )
        target = keys.get("kl_target")
        if target is None or target.value is None:
            return keys.record("kl_horizon", KeyStatus.DEAD, "read with kl_target only")
        self.translation.assign(target, ["algo.kl.controller.target"], target.value, why="adaptive")
        self.translation.set("algo.kl.controller.kind", wrap("adaptive", target.origin))
        horizon = keys.get("kl_horizon")
        return (
            keys.assign("kl_horizon", ["algo.kl.controller.horizon"], horizon.value)
            if horizon
            else None
        )

    def _clip(self) -> None:
        keys = self.keys
        low = keys.get("clip_range", "eps_clip")
        for entry in (keys.get("clip_range"), keys.get("eps_clip")):
            if entry is not None and low is not None and entry.value != low.value:
                self.translation.add_error(
                    entry, f"conflicts with {low.path}={low.value}, which has the same meaning"
                )
            elif entry is not None:
                self.translation.assign(entry, ["algo.clip.low", "algo.clip.high"], entry.value)
        if low is None:
            for native in ("algo.clip.low", "algo.clip.high"):
                self.translation.set_default(native, 0.2)
        higher = keys.get("clip_range_higher")
        if higher is not None:
            self.translation.assign(
                higher,
                ["algo.clip.high"],
                higher.value,
                why="a flag of the guide that the parser does not have",
            )

    def _rewards(self) -> None:
        keys = self.keys
        self._sources()
        running = keys.value("reward_running_norm") is True
        if running:
            keys.assign("reward_running_norm", ["reward.norm.scale"], "running")
        if keys.value("reward_running_norm_minus_mean") is True and running:
            keys.assign("reward_running_norm_minus_mean", ["reward.norm.center"], "running")
        for key in ("reward_running_norm", "reward_running_norm_minus_mean"):
            keys.record(key, KeyStatus.OFF, "")
        settings = (
            ("overlong_buffer_len", "buffer", 1024),
            ("overlong_buffer_penalty_factor", "factor", 1.0),
        )
        for key, native, default in settings:
            if keys.value("overlong_buffer") is True:
                entry = keys.get(key)
                value = entry.value if entry is not None else default
                keys.assign(
                    key if entry is not None else "overlong_buffer",
                    [f"reward.overlong.{native}"],
                    value,
                )
            keys.record(key, KeyStatus.DEAD, "read with overlong_buffer only")
        keys.record("overlong_buffer", KeyStatus.OFF, "")

    def _sources(self) -> None:
        """Translate the source of rewards: a server, else a model, else the rules."""
        model, url = self.keys.get("reward_pretrain"), self.keys.get("remote_rm_url")
        if url is not None and url.value:
            self.translation.assign(url, ["reward.sources"], [{"url": url.value}])
            self.keys.record("reward_pretrain", KeyStatus.DEAD, "remote_rm_url scores")
        elif model is not None and str(model.value) in ("{}", ""):
            why = "rules of gsm8k_rule and geo3k_rule: 0.9 for the answer, 0.1 for the format"
            self.translation.assign(model, ["reward.sources"], _RULES, why=why)
        elif model is not None and model.value:
            self.translation.assign(model, ["reward.sources"], [{"model": model.value}])

    def _engine(self) -> None:
        keys = self.keys
        devices = plain(self.translation.tree).get("cluster", {})
        world = devices.get("devices_per_node", 0) * devices.get("nodes", 1)
        tp = keys.number("engine_tp_size") or 1
        if world and world % tp == 0:
            engines = wrap(world // tp, keys.origin("engine_tp_size"))
            self.translation.set("rollout.engine.dp", engines)
        if keys.value("engine_type") == "vllm":
            keys.assign("engine_type", ["rollout.engine.name"], "vllm")
        reason = "msrl generates with vLLM and does not support sglang"
        keys.record("engine_type", KeyStatus.SAME, reason)

    def _files(self) -> None:
        keys = self.keys
        keys.record(
            "prompt_data",
            KeyStatus.DROPPED,
            "preprocess the rows with `msrl preprocess`, then use --set data.train=PREFIX",
        )
        if keys.get("save_path"):
            why = "the folder hf of the run, not this one: set run.dir and run.name"
            keys.assign("save_path", ["checkpoint.export_hf"], True, why=why)
        ckpt = keys.get("ckpt_path")
        if ckpt is not None:
            self.translation.assign(ckpt, ["checkpoint.save"], ckpt.value)
        if keys.value("load_checkpoint") is True:
            keys.assign("load_checkpoint", ["checkpoint.resume"], "auto")
        keys.record("load_checkpoint", KeyStatus.OFF, "")
        samples = keys.get("max_eval_samples")
        if samples is not None and keys.value("eval_steps") not in (None, -1):
            self.translation.assign(samples, ["eval.prompts"], samples.value)
        keys.record("max_eval_samples", KeyStatus.DEAD, "read with eval_steps only")
        every = keys.get("save_interval")
        if every is not None:
            self.translation.record(
                every,
                KeyStatus.DEAD,
                "the parser reads save_steps. Use --set checkpoint.every_steps=N.",
            )
        trackers = [
            name
            for name, key in (("tensorboard", "use_tensorboard"), ("wandb", "use_wandb"))
            if keys.value(key)
        ]
        for name in trackers:
            keys.assign(
                f"use_{name}",
                ["log.trackers"],
                trackers,
                same="metrics.jsonl contains the same metrics",
                why=_WANDB_VALUE if name == "wandb" else "",
            )
        options = {"wandb_org": "entity", "wandb_group": "group", "wandb_project": "project"}
        put_tracker_options(keys, "wandb", options, is_on="wandb" in trackers)
        folder = keys.get("use_tensorboard")
        if "tensorboard" in trackers and folder is not None and isinstance(folder.value, str):
            name = keys.value("wandb_run_name")
            path = f"{folder.value}/{name}" if name else folder.value
            self.translation.set("log.options.tensorboard.dir", wrap(path, folder.origin))
        if not trackers:
            self.translation.set_default("log.trackers", [])
        for key in ("use_tensorboard", "use_wandb"):
            keys.record(key, KeyStatus.OFF, "")

    def _lora(self) -> None:
        rank = self.keys.value("lora_rank")
        if not rank:
            for key in ("lora_alpha", "lora_dropout", "target_modules"):
                self.keys.record(key, KeyStatus.DEAD, "read with lora_rank only")
            return
        names = (
            ("lora_alpha", "alpha"),
            ("lora_dropout", "dropout"),
            ("target_modules", "targets"),
        )
        for key, native in names:
            entry = self.keys.get(key)
            if entry is not None:
                value = as_list(entry.value) if native == "targets" else entry.value
                self.translation.assign(entry, [f"train.lora.{native}"], value)
