"""Import of ROLL files, RLVR and agentic: the keys of the pipeline, and one section per worker.

Engines and reference share the devices of actor_train unless all of theirs are others. An update
has per_device_train_batch_size * gradient_accumulation_steps * data parallel size samples.
rollout_batch_size counts prompts, or trajectories in agentic runs. Source: ROLL 8eb27cc2,
roll/configs and roll/pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from msrl.config.messages import node_at
from msrl.config.sources import Node, wrap
from msrl.importers.critic import assign_critic_optimizer, report_other_batches
from msrl.importers.megatron import convert_value
from msrl.importers.roll.corrections import put_correction
from msrl.importers.roll.devices import Devices, device_count
from msrl.importers.roll.environments import (
    ENVIRONMENTS,
    GROUPINGS,
    NORM_TYPES,
    group_size,
    manager_keys,
    norm_scopes,
    put_environments,
    reads_turns,
    reward_scopes,
)
from msrl.importers.roll.images import put_images
from msrl.importers.roll.losses import Losses, grpo_estimator
from msrl.importers.roll.pipelines import refuse, unsupported_environment, unsupported_pipeline
from msrl.importers.roll.rewards import put_filter, put_rewards
from msrl.importers.roll.run import put_run, put_variables
from msrl.importers.roll.supervised import (
    add_misspelt_kinds,
    is_supervised,
    translate_supervised,
)
from msrl.importers.roll.training import put_data, put_engine_dtype, put_training_args
from msrl.importers.roll.tree import resolve_tree
from msrl.importers.roll.validation import put_validation
from msrl.importers.roll.weights import put_weights
from msrl.importers.roll.worker import SECTIONS, Worker
from msrl.importers.sections import Keys
from msrl.importers.table import load_table
from msrl.importers.translation import KeyStatus, SourceKey, Translation
from msrl.rollout.engine_arguments import engine_argument_names, option_problem

_ENVIRONMENTS = ("train_env_manager", "custom_envs", "env_manager_cls")
_CLIP_KEYS = ("pg_clip", "use_pg_clip_range", "pg_clip_low", "pg_clip_high", "dual_clip_loss")
_RLVR_KEYS = (  # that agentic runs never read
    "importance_sampling",
    "rl_loss_coef",
    "difficulty_loss_weight",
    "length_loss_weight",
    "difficulty_mask",
    "difficulty_low_threshold",
    "difficulty_high_threshold",
    "max_len_mask",
    "error_max_len_clip",
    "error_max_len_threshold",
    "query_filter_config",
    "is_use_additional_prompts",
    "max_additional_running_prompts",
)
_INFER_BATCH = 16  # infer_batch_size of the original
_ESTIMATORS = {"reinforce": "reinforce", "gae": "gae"}


def _translate_forwarded(translation: Translation, entry: SourceKey) -> None:
    """Translate a key that the original passes to its engine or to Megatron."""
    name = entry.path.rpartition(".")[2]
    is_argument = entry.path.startswith("actor_infer.") and name in (engine_argument_names() or ())
    problem = option_problem(name, weights_change=True) if is_argument else None
    if is_argument and problem is None:
        return translation.assign(entry, [f"rollout.engine.options.{name}"], entry.value)
    problem = problem or (
        "the original passes it to the engine or to Megatron, msrl does not. Remove it if the run "
        "does not need it."
    )
    return translation.errors.append(f"{entry}: not supported: {problem}")


def translate(tree: Node, file: Path) -> Translation:
    """Return the translation of one file, which includes errors and unsupported keys."""
    translation = Translation("ROLL", load_table("roll"), str(file))
    translation.ignores_unknown = True
    translation.forwarded = {"strategy_config": _translate_forwarded}
    if feature := unsupported_pipeline(tree):
        return refuse(translation, f"{file}: not supported: {feature}")
    tree, translation.variables = resolve_tree(tree, file, translation.errors)
    if is_supervised(tree):
        return translate_supervised(translation, tree)
    add_misspelt_kinds(translation, tree)
    if error := unsupported_environment(tree, ENVIRONMENTS):
        return refuse(translation, error)
    return _RollFile(translation, tree).translate()


class _RollFile:
    def __init__(self, translation: Translation, tree: Node) -> None:
        self.translation = translation
        self.tree = tree
        self.top = Keys.read(translation, "top", tree, "")
        self.train, self.infer, self.reference = (
            Worker.of(self.top, name) for name in ("actor_train", "actor_infer", "reference")
        )
        self.is_agentic = self.top.get(*_ENVIRONMENTS) is not None
        if self.is_agentic:
            self.top.discard(_RLVR_KEYS, "read by rlvr only")
            self.manager = manager_keys(self.top)
            self.group_size = group_size(self.manager)
        is_normalized = reward_scopes(self.top) != ("none", "none") if self.is_agentic else None
        self.losses = Losses(self.top, self.train.own, self._num_domains(), is_normalized)
        translation.algorithm = str(self.top.value("adv_estimator"))
        translation.mode = "agentic" if self.is_agentic else "rlvr"
        if self.is_agentic and self.infer.own.get("generating_args") is None:
            self._use_sampling_of_manager()

    def _use_sampling_of_manager(self) -> None:
        """Take `generating_args` of the training's environments in place of actor_infer's."""
        manager = self.top.get("train_env_manager")
        nodes = manager.node.value if manager is not None else None
        if isinstance(nodes, dict) and "generating_args" in nodes:
            path = "train_env_manager.generating_args"
            entries = self.translation.entries(nodes["generating_args"], "generating_args", path)
            self.infer.sections["generating_args"] = Keys(
                self.translation, "generating_args", entries
            )

    def _num_domains(self) -> int:
        rewards = self.top.get("rewards")
        domains = rewards.node.value if rewards is not None else None
        return len(domains) if isinstance(domains, dict) else 0

    def translate(self) -> Translation:
        devices = Devices.from_keys(self.top, self.train, self.infer)
        devices.apply()
        self._batches(devices)
        self._lengths()
        self._model_length()
        self._algorithm()
        self._kl()
        put_run(self.top)
        put_rewards(self.translation, self.top)
        put_filter(self.translation, self.top)
        self._additional_prompts()
        self._asynchronous()
        devices.put_reference(self.reference)
        put_weights(self.top, self.train, self.infer, self.reference)
        if self.is_agentic:
            self.infer.sections["generating_args"].record(
                "max_new_tokens", KeyStatus.APPLIED, "environment.max_turn_tokens"
            )
        self._worker_args()
        self._critic(devices)
        self._validation()
        self._environments()
        self.top.apply_remaining()
        for section in ("training_args", "generating_args"):
            keys = (
                self.train.sections[section]
                if section == "training_args"
                else self.infer.sections[section]
            )
            self.translation.fill_defaults((section,), keys)
        self.translation.fill_defaults(("top",), self.top)
        return self.translation

    def _batches(self, devices: Devices) -> None:
        args = self.train.sections["training_args"]
        micro, steps = (
            args.number("per_device_train_batch_size"),
            args.number("gradient_accumulation_steps"),
        )
        if micro is not None and steps is not None and devices.data_parallel is not None:
            why = f"{micro} * {steps} * data parallel {devices.data_parallel}"
            samples = micro * steps * devices.data_parallel
            self._put_update(args, samples, why, devices.data_parallel)
        batch = self.top.number("rollout_batch_size")
        if not self.is_agentic:
            return self.top.assign("rollout_batch_size", ["rollout.prompts_per_step"], batch)
        group = self.group_size
        if batch is not None and batch % group == 0:
            why = f"{batch} trajectories in groups of {group}"
            return self.top.assign(
                "rollout_batch_size", ["rollout.prompts_per_step"], batch // group, why=why
            )
        return self.top.add_error(
            "rollout_batch_size", f"must be a multiple of train_env_manager.group_size={group}"
        )

    def _put_update(self, args: Keys, samples: int, why: str, data_parallel: int) -> None:
        """Set the number of samples of an update: at most the samples of a step.

        Agentic runs of the original repeat trajectories of the step until updates, and passes
        without an update, are complete. If all count twice, only variances differ.
        """
        key, batch = "gradient_accumulation_steps", self.top.number("rollout_batch_size")
        native, entry = "train.updates.samples_per_update", args.get(key)
        if not self.is_agentic or entry is None or not batch:
            return args.assign(key, [native], samples, why=why)
        complete = math.lcm(samples, *self._pass_sizes(data_parallel))
        total = -(-batch // complete) * complete
        if total == batch:
            return args.assign(key, [native], samples, why=why)
        size = min(samples, batch)
        if total == 2 * batch == samples and self._reads_correction():
            self.translation.set("algo.advantage.correction", wrap(0.5, entry.origin))
            why = f"the original counts each of {batch} trajectories twice"
            return args.assign(key, [native], size, why=why)
        text = f"the original repeats {total - batch} random trajectories to have {total}"
        return self.translation.approximate(entry, native, size, text)

    def _pass_sizes(self, data_parallel: int) -> list[int]:
        """Return the trajectories of a pass of the policy and of the reference without an update.

        The number of ranks of the reference divides its devices.
        """
        own = self.train.own.number("infer_batch_size") or _INFER_BATCH
        other = self.reference.own.number("infer_batch_size") or _INFER_BATCH
        mapping = self.reference.own.get("device_mapping")
        devices = device_count(mapping.value) if mapping is not None else None
        return [own * data_parallel, other * devices if devices else 1]

    def _reads_correction(self) -> bool:
        """Return True if all statistics of a step read algo.advantage.correction."""
        is_mean = self.top.value("loss_agg_mode") != "seq-mean-token-sum-norm"
        is_grpo = self.top.value("adv_estimator") == "grpo"
        return (
            is_mean
            and is_grpo
            and grpo_estimator(self.top, reward_scopes(self.top)) == ("group_norm")
        )

    def _lengths(self) -> None:
        """Set the response length: sequence_length minus prompt_length, else response_length."""
        total, prompt = self.top.number("sequence_length"), self.top.number("prompt_length")
        if self.is_agentic and self.top.get("prompt_length") is None and total and prompt:
            prompt = min(prompt, total // 2)  # agentic runs limit the sequence only
            origin = self.top.origin("sequence_length")
            self.translation.set("rollout.max_prompt_tokens", wrap(prompt, origin))
        if self.top.get("sequence_length") and total is not None and prompt is not None:
            why = f"sequence_length minus prompt_length={prompt}"
            self.top.assign(
                "sequence_length", ["rollout.max_response_tokens"], total - prompt, why=why
            )
            return self.top.record(
                "response_length", KeyStatus.DEAD, "overridden by sequence_length"
            )
        if self.top.get("response_length"):
            return self.top.put("response_length", "rollout.max_response_tokens")
        return self.translation.errors.append(
            f"{self.translation.name}: response_length: missing. "
            "Set the maximum response length in tokens."
        )

    def _model_length(self) -> None:
        """Raise the limit of the engine to prompt plus response, which msrl always generates."""
        config = self.infer.sections["strategy_config"]
        entry, limit = config.get("max_model_len"), config.number("max_model_len")
        prompt = self.top.number("prompt_length") or 0
        response = node_at(self.translation.tree, ["rollout", "max_response_tokens"])
        total = prompt + (response.value if response and isinstance(response.value, int) else 0)
        if entry is not None and limit is not None and limit < total:
            text = f"the original truncates at {limit} tokens, fewer than prompt plus response"
            key = "rollout.engine.max_model_len"
            self.translation.approximate(entry, key, total, text)

    def _algorithm(self) -> None:
        top, name = self.top, str(self.top.value("adv_estimator"))
        estimator = _ESTIMATORS.get(name) or convert_value(top, "adv_estimator", "estimator")
        if name == "grpo":
            scopes = reward_scopes(top) if self.is_agentic else ("group", "group")
            estimator = grpo_estimator(top, scopes)
            if estimator == "reinforce" and not self.is_agentic:
                for native in ("reward.norm.center", "reward.norm.scale"):
                    self.translation.set(native, wrap("group", top.origin("adv_estimator")))
        if self.is_agentic and estimator in ("reinforce", "gae", "agentic_reinforce"):
            self.translation.set("environment.reward_at", wrap("end", top.origin("adv_estimator")))
        discount = top.get("gamma")
        if self.is_agentic and estimator in ("reinforce", "gae") and discount is not None:
            self._report_discount(discount)
        why = "the return of the normalized reward" if estimator == "reinforce" else ""
        top.assign("adv_estimator", ["algo.advantage.estimator"], estimator, why=why)
        self.losses.apply()
        self._clip()
        self.losses.put_reward_clip()
        put_correction(top)
        self._difficulty_mask()
        for key, native in (("norm_mean_type", "center"), ("norm_std_type", "scale")):
            if self.is_agentic:
                top.record(key, KeyStatus.DEAD, "agentic runs read reward_normalization")
            elif name == "grpo":
                top.record(key, KeyStatus.DEAD, "grpo always normalizes by group")
            elif top.value(key):
                top.assign(key, [f"reward.norm.{native}"], self.losses.scope(top.value(key)))
                self.losses.report_running(top.get(key))
            top.record(key, KeyStatus.OFF, "")

    def _report_discount(self, discount: SourceKey) -> None:
        if discount.value not in (None, 1):
            text = "the original also discounts over the tokens of environments"
            self.translation.report_difference(discount, text)

    def _clip(self) -> None:
        if not self.losses.has_clip():
            for key in _CLIP_KEYS:
                self.top.record(key, KeyStatus.DEAD, "this policy loss has its own bounds")
            return
        top = self.top
        has_range = top.value("use_pg_clip_range") is True
        low, high = ("pg_clip_low", "pg_clip_high") if has_range else ("pg_clip", "pg_clip")
        for key, native in ((low, "algo.clip.low"), (high, "algo.clip.high")):
            top.put(key, native)
            if top.get(key):
                self.translation.set(native, wrap(top.value(key), top.origin(key)))
        reason = "use_pg_clip_range selects pg_clip, or pg_clip_low and pg_clip_high"
        for key in ("pg_clip", "pg_clip_low", "pg_clip_high"):
            top.record(key, KeyStatus.DEAD, reason)
        if has_range:
            text = "algo.clip: pg_clip_low and pg_clip_high"
            top.record("use_pg_clip_range", KeyStatus.APPLIED, text)
        top.record("use_pg_clip_range", KeyStatus.OFF, "")
        if top.value("dual_clip_loss") is True:
            width = top.value("pg_clip")
            dual = 1 + 2 * width if isinstance(width, int | float) else None
            top.assign("dual_clip_loss", ["algo.clip.dual"], dual, why="1 + 2 * pg_clip")
        top.record("dual_clip_loss", KeyStatus.OFF, "")

    def _difficulty_mask(self) -> None:
        top = self.top
        is_on = top.value("difficulty_mask") is True
        defaults = {"difficulty_low_threshold": 0.0, "difficulty_high_threshold": 1.0}
        if is_on:
            bounds = [float(top.real(key, default)) for key, default in defaults.items()]
            top.assign("difficulty_mask", ["algo.mask.difficulty"], bounds)
        status = KeyStatus.APPLIED if is_on else KeyStatus.DEAD
        for key in defaults:
            top.record(key, status, "algo.mask.difficulty")
        top.record("difficulty_mask", KeyStatus.OFF, "")

    def _kl(self) -> None:
        """Translate the KL terms of reward and loss; the loss always uses k3."""
        top = self.top
        if top.value("add_token_level_kl") is True:
            self._reward_kl()
        if top.value("use_kl_loss") is True:
            top.put("kl_loss_coef", "algo.kl.loss.coef")
            self.translation.set("algo.kl.loss.estimator", wrap("k3", top.origin("use_kl_loss")))
            top.record("use_kl_loss", KeyStatus.APPLIED, "algo.kl.loss, k3")
        for key in ("add_token_level_kl", "use_kl_loss"):
            top.record(key, KeyStatus.OFF, "")
        if top.value("add_token_level_kl") is True:
            top.record("kl_horizon", KeyStatus.DEAD, "read with target_kl only")
        for key in ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon"):
            top.record(key, KeyStatus.DEAD, "read with add_token_level_kl only")
        top.record("kl_loss_coef", KeyStatus.DEAD, "read with use_kl_loss only")

    def _reward_kl(self) -> None:
        top = self.top
        top.record("add_token_level_kl", KeyStatus.APPLIED, "algo.kl.reward")
        top.put("init_kl_coef", "algo.kl.reward.coef")
        estimator = convert_value(top, "kl_penalty", "kl_estimator")
        top.assign("kl_penalty", ["algo.kl.reward.estimator"], estimator)
        target = top.value("target_kl")
        if target is None:
            return
        top.assign("target_kl", ["algo.kl.controller.target"], target, why="adaptive")
        kind = wrap("adaptive", top.origin("target_kl"))
        self.translation.set("algo.kl.controller.kind", kind)
        if top.get("kl_horizon"):
            horizon = top.value("kl_horizon")
            top.assign("kl_horizon", ["algo.kl.controller.horizon"], horizon)

    def _asynchronous(self) -> None:
        """Translate the number of steps that generation may be ahead of training."""
        entry = self.top.get("async_generation_ratio")
        ratio = self.top.real("async_generation_ratio", 0.0)
        if entry is None or ratio <= 0:
            return
        text = "the original counts the steps since a group was created, msrl policy versions"
        key = "rollout.async.max_staleness"
        self.translation.approximate(entry, key, math.ceil(ratio), text)
        self.translation.set("rollout.async.on_stale", wrap("drop", entry.origin))
        self.translation.set("rollout.async.allow_uncorrected", wrap(True, entry.origin))

    def _additional_prompts(self) -> None:
        """Translate the replacement of filtered groups."""
        top = self.top
        if top.value("is_use_additional_prompts") is not True:
            return top.record(
                "max_additional_running_prompts",
                KeyStatus.DEAD,
                "read with is_use_additional_prompts only",
            )
        if node_at(self.translation.tree, ["rollout", "filter"]) is None:
            for key in ("is_use_additional_prompts", "max_additional_running_prompts"):
                top.record(
                    key, KeyStatus.SAME, "without query_filter_config, no groups are filtered"
                )
            return None
        return self.translation.set_default("rollout.filter.max_refills", None)

    def _worker_args(self) -> None:
        """Translate the remaining keys of the workers actor_train, actor_infer and reference."""
        train, infer = self.train, self.infer
        args, model = train.sections["training_args"], train.sections["model_args"]
        put_images(self.tree, self.top, model, args, self.train.sections["data_args"])
        put_training_args(args, model)
        put_engine_dtype(infer.sections["model_args"], model)
        put_data(train.sections["data_args"])
        if train.own.get("infer_batch_size"):
            train.own.put("infer_batch_size", "train.forward_micro_batch")
        for keys in (args, model):
            keys.apply_remaining()
        infer.sections["generating_args"].apply_remaining()
        for worker in (train, infer):
            for section in (*SECTIONS, "strategy_config"):
                worker.own.record(section, KeyStatus.APPLIED, "key by key")
        put_variables(train.own)
        for entry in train.own:
            if not self.translation.is_recorded(entry):
                self.translation.apply(entry)
        infer.record_all(KeyStatus.SAME, "read from the training settings, or chosen by the engine")
        self.reference.record_all(KeyStatus.SAME, "the reference has the settings of actor_train")
        train.record_all(KeyStatus.SAME, "implementation detail of training in the original")

    def _critic(self, devices: Devices) -> None:
        """Translate the initial weights and the learning rate of the critic, which only gae has.

        The critic has all other settings of the actor.
        """
        entry = self.top.get("critic")
        if entry is None or self.translation.algorithm != "gae":
            return
        critic = Worker.of(self.top, "critic")
        devices.put_model("critic", critic)
        weights = critic.sections["model_args"].get("model_name_or_path")
        if weights is not None:
            self.translation.assign(weights, ["cluster.roles.critic.load"], weights.value)
            self.top.record(
                "reward_pretrain",
                KeyStatus.DEAD,
                "overridden by critic.model_args.model_name_or_path",
            )
        args = critic.sections["training_args"]
        sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
        report_other_batches(args, self.train.sections["training_args"], sizes)
        assign_critic_optimizer(self.translation, args, self.train.sections["training_args"])
        if args.get("learning_rate") is None:
            self.translation.set_default(
                "cluster.roles.critic.optimizer.lr", args.value("learning_rate")
            )
        critic.record_all(
            KeyStatus.SAME, "the critic has the parallel layout and training settings of the actor"
        )

    def _validation(self) -> None:
        """Translate evaluation during training; agentic runs evaluate in environments."""
        if self.is_agentic:
            return None
        worker = Worker.of(self.top, "validation")
        if not put_validation(self.translation, self.top, worker.sections):
            return worker.record_all(
                KeyStatus.DEAD,
                "no evaluation without eval_steps and validation.data_args.file_name",
            )
        for section in ("data_args", "generating_args"):
            worker.own.record(section, KeyStatus.APPLIED, "key by key")
        return worker.record_all(
            KeyStatus.DEAD, "only data_args and generating_args of validation are read"
        )

    def _environments(self) -> None:
        """Translate environments and the normalization of rewards, which agentic runs have."""
        if not self.is_agentic:
            for name in ("train_env_manager", "reward_normalization"):
                self.top.record(name, KeyStatus.DEAD, "read by agentic only")
            return
        sampling = self.infer.sections["generating_args"]
        self.is_early = put_environments(self.translation, self.top, self.manager, sampling)
        norm = self.top.get("reward_normalization")
        if norm is not None:
            name = "reward_normalization"
            self._agentic_norm(Keys.read(self.translation, name, norm.node, name))
            self.translation.record(norm, KeyStatus.APPLIED, "key by key")
        self.translation.set(
            "rollout.samples_per_prompt",
            wrap(self.group_size, self.top.origin("train_env_manager")),
        )
        self.top.record(
            "num_return_sequences_in_group",
            KeyStatus.DEAD,
            "overridden by train_env_manager.group_size",
        )

    def _agentic_norm(self, keys: Keys) -> None:
        """Translate the normalization of rewards; asym_clip clips to [-1, 3] in v0.1.0."""
        center, scale = norm_scopes({entry.key: entry.value for entry in keys})
        names = ("grouping", "method", "norm_mean_type", "norm_std_type")
        entry = keys.get(*names)
        if keys.get("grouping") is not None and keys.value("grouping") not in GROUPINGS:
            keys.add_error("grouping", f"not supported: msrl has {', '.join(GROUPINGS)}")
        elif wrong := self._wrong_norm_type(keys):
            keys.add_error(wrong, f"must be {' or '.join(NORM_TYPES)}")
        elif entry is not None and reads_turns(self.top):
            self._record_turn_norm(keys, entry, names)
        elif entry is not None and (center, scale) == ("none", "none"):
            for name in names:
                keys.record(name, KeyStatus.OFF, "")
        elif entry is not None:
            texts = {"reward.norm.center": center, "reward.norm.scale": scale}
            for native, scope in texts.items():
                self.translation.set(native, wrap(scope, entry.origin))
            self._asymmetric_clip(keys)
            for name in names:
                text = ", ".join(f"{native}: {scope}" for native, scope in texts.items())
                keys.record(name, KeyStatus.APPLIED, text)
        keys.apply_remaining()

    def _asymmetric_clip(self, keys: Keys) -> None:
        """Set the bounds of asym_clip, which only the first versions have."""
        entry = keys.get("method")
        if entry is None or entry.value != "asym_clip":
            return
        if self.is_early:
            self.translation.set("reward.norm.clip", wrap([-1.0, 3.0], entry.origin))
            if self.translation.algorithm == "grpo":  # group_norm has no bounds
                key, origin = "algo.advantage.estimator", self.top.origin("adv_estimator")
                self.translation.set(key, wrap("reinforce", origin))
                self.translation.set("environment.reward_at", wrap("end", origin))
        else:
            text = (
                "asym_clip is mean_std, as in versions from v0.1.3 on; earlier ones clip to [-1, 3]"
            )
            self.translation.remarks.append(f"{entry}: {text}")

    def _wrong_norm_type(self, keys: Keys) -> str:
        """Return the key of a type that the original does not have; empty if there is none."""
        names = ("norm_mean_type", "norm_std_type")
        known = (None, *NORM_TYPES)
        return next((name for name in names if keys.value(name) not in known), "")

    def _record_turn_norm(self, keys: Keys, entry: SourceKey, names: Sequence[str]) -> None:
        """Record keys that `put_environments` has translated to options of the estimator."""
        name = self.translation.algorithm
        has_types = keys.get("norm_mean_type", "norm_std_type") is not None
        if name == "gigpo" and has_types:
            self.translation.difference(entry, "gigpo of msrl reads grouping and method only")
        method = keys.get("method")
        if self.is_early and method is not None and method.value == "asym_clip":
            self.translation.report_difference(method, f"{name} of msrl does not clip to [-1, 3]")
        for key in names:
            keys.record(key, KeyStatus.APPLIED, "algo.options")
