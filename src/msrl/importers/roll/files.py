"""ROLL's YAML, RLVR and agentic: the pipeline's keys, and a section per worker.

All roles share the devices of actor_train. Samples of an update are per_device_train_batch_size * gradient_accumulation_steps * data
parallel; rollout_batch_size counts prompts, in agentic runs trajectories. Source: ROLL 8eb27cc2, roll/configs and roll/pipeline.
"""

from __future__ import annotations

from pathlib import Path

from msrl.config.messages import node_at
from msrl.config.sources import Node, plain, wrap
from msrl.config.templates import template_names
from msrl.importers.critic import put_optimizer
from msrl.importers.megatron import converted
from msrl.importers.roll.devices import Devices
from msrl.importers.roll.rewards import put_filter, put_rewards
from msrl.importers.roll.training import put_lora, put_warmup
from msrl.importers.roll.tree import resolved
from msrl.importers.roll.validation import put_validation
from msrl.importers.sections import Keys
from msrl.importers.table import load_table
from msrl.importers.translation import Fate, Translation

PARTS = ("model_args", "training_args", "data_args", "generating_args", "strategy_args")
_ENVIRONMENTS = ("train_env_manager", "custom_envs", "env_manager_cls")
_ESTIMATORS = {"grpo": "group_norm", "reinforce": "reinforce", "gae": "gae"}


class Worker:
    """The keys of one worker, section by section."""

    def __init__(self, translation: Translation, name: str, node: Node | None) -> None:
        self.name = name
        self.own = Keys(translation, "worker", translation.given(node, "worker", name))
        self.parts = {part: self._part(translation, self.own, part) for part in PARTS}
        self.parts["strategy_config"] = self._part(translation, self.parts["strategy_args"], "strategy_config")

    def _part(self, translation: Translation, keys: Keys, part: str) -> Keys:
        given = keys.get(part)
        path = f"{self.name}.{part}" if given is None else given.path
        return Keys(translation, part, translation.given(given.node if given else None, part, path))

    def say_all(self, fate: Fate, text: str) -> None:
        for keys in (self.own, *self.parts.values()):
            for given in keys:
                keys.translation.say(given, fate, text)


def translate(tree: Node, file: Path) -> Translation:
    """The native configuration of one file; mistakes and what is not built yet are in the result."""
    translation = Translation("ROLL", load_table("roll"), str(file))
    return _File(translation, resolved(tree, file, translation)).translate()


class _File:
    def __init__(self, translation: Translation, tree: Node) -> None:
        self.translation = translation
        self.top = Keys(translation, "top", translation.given(tree, "top", ""))
        self.train, self.infer, self.reference = (self._worker(name) for name in ("actor_train", "actor_infer", "reference"))
        self.is_agentic = self.top.get(*_ENVIRONMENTS) is not None
        translation.algorithm = str(self.top.value("adv_estimator"))
        translation.mode = "agentic" if self.is_agentic else "rlvr"

    def _worker(self, name: str) -> Worker:
        given = self.top.get(name)
        if given is not None:
            self.translation.say(given, Fate.TOOK, "key by key")
        return Worker(self.translation, name, given.node if given else None)

    def translate(self) -> Translation:
        devices = Devices.of(self.top, self.train, self.infer)
        devices.apply()
        self._batches(devices)
        self._lengths()
        self._algorithm()
        self._kl()
        self._run()
        put_rewards(self.translation, self.top)
        put_filter(self.translation, self.top)
        self._additional_prompts()
        self._worker_args()
        self._critic()
        self._validation()
        self._environments()
        self.top.apply_rest()
        for section in ("training_args", "generating_args"):
            keys = self.train.parts[section] if section == "training_args" else self.infer.parts[section]
            self.translation.laid_in((section,), keys)
        self.translation.laid_in(("top",), self.top)
        return self.translation

    def _batches(self, devices: Devices) -> None:
        args = self.train.parts["training_args"]
        micro, steps = args.number("per_device_train_batch_size"), args.number("gradient_accumulation_steps")
        if micro is not None and steps is not None and devices.data_parallel is not None:
            why = f"{micro} * {steps} * data parallel {devices.data_parallel}"
            samples = micro * steps * devices.data_parallel
            args.take("gradient_accumulation_steps", ["train.updates.samples_per_update"], samples, why=why)
        batch = self.top.number("rollout_batch_size")
        if not self.is_agentic:
            return self.top.take("rollout_batch_size", ["rollout.prompts_per_step"], batch)
        group = self._group_size()
        if batch is not None and batch % group == 0:
            why = f"{batch} trajectories in groups of {group}"
            return self.top.take("rollout_batch_size", ["rollout.prompts_per_step"], batch // group, why=why)
        return self.top.mistake("rollout_batch_size", f"must be a multiple of train_env_manager.group_size={group}")

    def _group_size(self) -> int:
        manager = self.top.get("train_env_manager")
        size = plain(manager.node).get("group_size", 1) if manager and isinstance(manager.node.value, dict) else 1
        return size if isinstance(size, int) and size > 0 else 1

    def _lengths(self) -> None:
        """sequence_length, where it is given, leaves the response what the prompt does not take."""
        whole, prompt = self.top.number("sequence_length"), self.top.number("prompt_length")
        if self.top.get("sequence_length") and whole is not None and prompt is not None:
            why = f"sequence_length minus prompt_length={prompt}"
            self.top.take("sequence_length", ["rollout.max_response_tokens"], whole - prompt, why=why)
            return self.top.say("response_length", Fate.DEAD, "sequence_length wins")
        if self.top.get("response_length"):
            return self.top.take("response_length", ["rollout.max_response_tokens"], self.top.value("response_length"))
        return self.translation.errors.append(f"{self.translation.name}: response_length: is missing: the longest response in tokens")

    def _algorithm(self) -> None:
        top, name = self.top, str(self.top.value("adv_estimator"))
        top.take("adv_estimator", ["algo.advantage.estimator"], _ESTIMATORS.get(name) or converted(top, "adv_estimator", "estimator"))
        clipped = top.value("use_pg_clip_range") is True
        low, high = ("pg_clip_low", "pg_clip_high") if clipped else ("pg_clip", "pg_clip")
        for key, native in ((low, "algo.clip.low"), (high, "algo.clip.high")):
            top.take(key, [native], top.value(key))
            if top.get(key):
                self.translation.set(native, wrap(top.value(key), top.origin(key)))
        for key in ("pg_clip", "pg_clip_low", "pg_clip_high"):
            top.say(key, Fate.DEAD, "use_pg_clip_range says which of pg_clip and pg_clip_low, pg_clip_high are read")
        top.say("use_pg_clip_range", Fate.TOOK if clipped else Fate.OFF, "algo.clip: pg_clip_low and pg_clip_high" if clipped else "")
        if top.value("dual_clip_loss") is True:
            width = top.value("pg_clip")
            top.take("dual_clip_loss", ["algo.clip.dual"], 1 + 2 * width if isinstance(width, int | float) else None, why="1 + 2 * pg_clip")
        top.say("dual_clip_loss", Fate.OFF, "")
        if top.value("difficulty_mask") is True:
            bounds = [top.value("difficulty_low_threshold"), top.value("difficulty_high_threshold")]
            both = [float(bound) if isinstance(bound, (int, float)) else default for bound, default in zip(bounds, (0.0, 1.0), strict=True)]
            top.take("difficulty_mask", ["algo.mask.difficulty"], both)
        for key in ("difficulty_low_threshold", "difficulty_high_threshold"):
            top.say(key, Fate.TOOK if top.value("difficulty_mask") is True else Fate.DEAD, "algo.mask.difficulty")
        top.say("difficulty_mask", Fate.OFF, "")
        for key, native in (("norm_mean_type", "center"), ("norm_std_type", "scale")):
            if name == "grpo":
                top.say(key, Fate.DEAD, "grpo normalises by group itself")
            elif top.value(key):
                top.take(key, [f"reward.norm.{native}"], top.value(key))
            top.say(key, Fate.OFF, "")

    def _kl(self) -> None:
        """Reward and loss have coefficients of their own; the loss is always k3."""
        top = self.top
        in_reward, in_loss = top.value("add_token_level_kl") is True, top.value("use_kl_loss") is True
        if in_reward:
            top.take("init_kl_coef", ["algo.kl.reward.coef"], top.value("init_kl_coef"))
            top.take("kl_penalty", ["algo.kl.reward.estimator"], converted(top, "kl_penalty", "kl_estimator"))
        if in_loss:
            top.take("kl_loss_coef", ["algo.kl.loss.coef"], top.value("kl_loss_coef"))
            self.translation.set("algo.kl.loss.estimator", wrap("k3", top.origin("use_kl_loss")))
        if in_reward and top.value("target_kl") is not None:
            top.take("target_kl", ["algo.kl.controller.target"], top.value("target_kl"), why="adaptive")
            self.translation.set("algo.kl.controller.kind", wrap("adaptive", top.origin("target_kl")))
            top.take("kl_horizon", ["algo.kl.controller.horizon"], top.value("kl_horizon")) if top.get("kl_horizon") else None
        top.say("add_token_level_kl", Fate.TOOK if in_reward else Fate.OFF, "algo.kl.reward" if in_reward else "")
        top.say("use_kl_loss", Fate.TOOK if in_loss else Fate.OFF, "algo.kl.loss, k3" if in_loss else "")
        for key in ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon"):
            top.say(key, Fate.DEAD, "read beside add_token_level_kl only")
        top.say("kl_loss_coef", Fate.DEAD, "read beside use_kl_loss only")

    def _run(self) -> None:
        top = self.top
        resume = top.get("resume_from_checkpoint")
        if resume is not None:
            value = {True: "auto", False: "none"}.get(resume.value) if isinstance(resume.value, bool) else resume.value
            self.translation.take(resume, ["checkpoint.resume"], value)
        tracker = top.value("track_with")
        if tracker == "stdout":
            top.take("track_with", ["log.trackers"], [])
        else:
            top.take("track_with", ["log.trackers"], [tracker], same="metrics.jsonl has all that it would show")
        config = top.get("checkpoint_config")
        if config is not None:
            folder = plain(config.node).get("output_dir") if isinstance(config.node.value, dict) else None
            if folder:
                self.translation.take(config, ["checkpoint.save"], folder)
            self.translation.say(config, Fate.SAME, "checkpoints are not uploaded")
        variables = top.get("system_envs")
        if variables is not None:
            values = plain(variables.node)
            self.translation.take(variables, ["cluster.env"], {str(key): str(value) for key, value in dict(values or {}).items()})

    def _additional_prompts(self) -> None:
        """What takes the place of filtered groups, if any are."""
        top = self.top
        if top.value("is_use_additional_prompts") is not True:
            return top.say("max_additional_running_prompts", Fate.DEAD, "read beside is_use_additional_prompts only")
        if node_at(self.translation.tree, ["rollout", "filter"]) is None:
            for key in ("is_use_additional_prompts", "max_additional_running_prompts"):
                top.say(key, Fate.SAME, "no query_filter_config leaves groups out")
            return None
        return self.translation.set_default("rollout.filter.max_refills", None)

    def _worker_args(self) -> None:
        """What is left of the workers: actor_train trains, actor_infer samples, the reference follows the actor."""
        train, infer = self.train, self.infer
        args = train.parts["training_args"]
        betas = [args.value("adam_beta1"), args.value("adam_beta2")]
        for key in ("adam_beta1", "adam_beta2"):
            args.take(key, ["train.optimizer.betas"], betas)
        model = train.parts["model_args"]
        if model.get("dtype"):
            model.take("dtype", ["model.dtype"], converted(model, "dtype", "dtype"))
        put_lora(model)
        put_warmup(args)
        self._data(train.parts["data_args"])
        if train.own.get("infer_batch_size"):
            train.own.take("infer_batch_size", ["train.forward_micro_batch"], train.own.value("infer_batch_size"))
        for keys in (args, model):
            keys.apply_rest()
        infer.parts["generating_args"].apply_rest()
        for worker in (train, infer):
            for part in (*PARTS, "strategy_config"):
                worker.own.say(part, Fate.TOOK, "key by key")
        for given in train.own:
            if not self.translation.is_said(given):
                self.translation.apply(given)
        infer.say_all(Fate.SAME, "the engine takes it from the training, or decides by itself")
        self.reference.say_all(Fate.SAME, "the reference is cut, and computes, like the actor")
        train.say_all(Fate.SAME, "how the original trains the same")

    def _critic(self) -> None:
        """The critic's worker, where the estimator is gae: where it starts, its learning rate; the rest as the actor's."""
        given = self.top.get("critic")
        if given is None or self.translation.algorithm != "gae":
            return
        critic = self._worker("critic")
        start = critic.parts["model_args"].get("model_name_or_path")
        if start is not None:
            self.translation.take(start, ["cluster.roles.critic.load"], start.value)
            self.top.say("reward_pretrain", Fate.DEAD, "critic.model_args.model_name_or_path counts")
        args = critic.parts["training_args"]
        put_optimizer(self.translation, args, self.train.parts["training_args"])
        if args.get("learning_rate") is None:
            self.translation.set_default("cluster.roles.critic.optimizer.lr", args.value("learning_rate"))
        critic.say_all(Fate.SAME, "the critic is cut, and trained, like the actor")

    def _validation(self) -> None:
        """Evaluations while training; agentic runs have environments for that."""
        if self.is_agentic:
            return None
        worker = self._worker("validation")
        if not put_validation(self.translation, self.top, worker.parts):
            return worker.say_all(Fate.DEAD, "nothing is evaluated without eval_steps and validation.data_args.file_name")
        for part in ("data_args", "generating_args"):
            worker.own.say(part, Fate.TOOK, "key by key")
        return worker.say_all(Fate.DEAD, "of validation data_args and generating_args are read")

    def _data(self, data: Keys) -> None:
        data.say("file_name", Fate.SAME, "rows are preprocessed first: `msrl preprocess`, then --set data.train=PREFIX")
        name = str(data.value("template"))
        if data.get("template") and name in template_names():
            data.take("template", ["model.template"], name)
        data.say("template", Fate.SAME, "the template of the data is that of `msrl preprocess --template`")
        data.say("domain_interleave_probs", Fate.SAME, "shares of several domains are made by preprocessing")
        data.apply_rest()

    def _environments(self) -> None:
        """Agentic runs: environments are not there yet, and every key of theirs is refused by name."""
        for name, section in (("train_env_manager", "env_manager"), ("reward_normalization", "reward_normalization")):
            given = self.top.get(name)
            if given is None:
                continue
            if not self.is_agentic:
                self.translation.say(given, Fate.DEAD, "read by agentic only")
                continue
            keys = Keys(self.translation, section, self.translation.given(given.node, section, name))
            if section == "reward_normalization":
                self._agentic_norm(keys)
            keys.say("group_size", Fate.TOOK, "rollout.samples_per_prompt") if section == "env_manager" else None
            keys.apply_rest()
            self.translation.say(given, Fate.TOOK, "key by key")
        if self.is_agentic:
            self.translation.set("rollout.samples_per_prompt", wrap(self._group_size(), self.top.origin("train_env_manager")))
            self.top.say("num_return_sequences_in_group", Fate.DEAD, "train_env_manager.group_size counts")

    def _agentic_norm(self, keys: Keys) -> None:
        """grouping with method: identity, mean, mean_std; asym_clip is mean_std at this commit."""
        group = {"batch": "batch", "traj_group_id": "group"}.get(str(keys.value("grouping")), str(keys.value("grouping")))
        method = str(keys.value("method"))
        if method == "identity" or keys.get("method") is None:
            return keys.say("grouping", Fate.OFF, "") or keys.say("method", Fate.OFF, "")
        keys.take("grouping", ["reward.norm.center"], group)
        return keys.take("method", ["reward.norm.scale"], "none" if method == "mean" else group)
