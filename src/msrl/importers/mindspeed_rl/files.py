"""Import of MindSpeed-RL files (megatron_training, actor_config, rl_config and others).

`defaults` names model files in model/*.yaml.

Two generations differ in mini_batch_size. It counts samples in the first generation (which has
ref_config or colocate_*, or a value above global_batch_size), and prompts in the second. Sources:
MindSpeed-RL 04aa0845 and 05a90d77, config_cls/rl_config.py and config_cls/validate_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msrl.config.messages import node_at
from msrl.config.sources import Node, Origin, plain, read, wrap
from msrl.importers.critic import (
    NOT_GAE,
    assign_critic_optimizer,
    record_unused,
    report_other_batches,
    report_other_ranks,
)
from msrl.importers.hydra import Override, compose_file
from msrl.importers.megatron import MegatronKeys, data_parallel, with_model
from msrl.importers.mindspeed_llm import data as mindspeed_data
from msrl.importers.mindspeed_rl import sft as mindspeed_sft
from msrl.importers.mindspeed_rl.algorithm import Algorithm
from msrl.importers.mindspeed_rl.tools import put_tools
from msrl.importers.model_roles import needs_reference, put_layout, put_reference_weights
from msrl.importers.sections import (
    Keys,
    hydra_layers,
    put_profile,
    put_tracker_options,
    same_path,
)
from msrl.importers.table import canonical, load_table
from msrl.importers.translation import KeyStatus, SourceKey, Translation

MARKS = (
    "megatron_training",
    "actor_config",
    "rl_config",
    "generate_config",
    *mindspeed_data.MARKS,
    *mindspeed_sft.MARKS,
)
SECTIONS = ("megatron", "rl_config", "generate_config", "sampling_config")
_STAGES = {"ray_grpo": "grpo", "ray_dapo": "dapo", "ray_ppo": "ppo"}


def translate(tree: Node, file: Path, overrides: Sequence[Override] = ()) -> Translation:
    """Return the translation of a file of training or preprocessing.

    The result includes errors and unsupported keys.
    """
    errors: list[str] = []
    tree = compose_file(tree, file, errors, groups=("model",), overrides=overrides)
    if mindspeed_sft.is_supervised(tree):
        translation = mindspeed_sft.translate(tree, file)
    elif mindspeed_data.is_preprocessing(tree):
        translation = mindspeed_data.translate(tree, file)
    else:
        translation = _RlFile(tree, file).translate()
    translation.errors[:0] = errors
    return translation


class _RlFile:
    """Translation of the sections of one file."""

    def __init__(self, tree: Node, file: Path) -> None:
        self.file = file
        self.translation = Translation("MindSpeed-RL", load_table("mindspeed_rl"), str(file))
        self.translation.ignored_sections = ("top",)
        self.top = {entry.key: entry for entry in self.translation.entries(tree, "top", "")}
        self.models = hydra_layers(self._section("defaults"), file, self.translation)
        self.megatron = self._megatron()
        self.rl, self.generate = self._keys("rl_config"), self._keys("generate_config")
        self._separate = set[str]()  # roles with separate devices
        sampling = self.generate.get("sampling_config")
        path = "" if sampling is None else sampling.path
        nested = self.translation.entries(
            None if sampling is None else sampling.node, "sampling_config", path
        )
        self.sampling = Keys(self.translation, "sampling_config", nested)
        self.generate.record("sampling_config", KeyStatus.APPLIED, "key by key")

    def _section(self, name: str) -> Node | None:
        return self.top[name].node if name in self.top else None

    def _keys(self, name: str) -> Keys:
        return Keys.read(self.translation, name, self._section(name), name)

    def _megatron(self) -> Keys:
        """Return the keys of actor_config, then megatron_training, then the model file."""
        layers = [
            self.translation.entries(self._section(name), "megatron", name)
            for name in ("megatron_training", "actor_config")
        ]
        return Keys(
            self.translation,
            "megatron",
            with_model(
                [entry for layer in layers for entry in layer], self.models, self.translation
            ),
        )

    def translate(self) -> Translation:
        translation = self.translation
        translation.algorithm = self._algorithm()
        if translation.is_refused:
            return translation
        if first := self._is_first_generation():
            translation.other_defaults = {
                ("rl_config", "entropy_coeff"): 0.001,
                ("rl_config", "kl_penalty"): "kl",
                ("megatron", "moe_aux_loss_coeff"): 0.0,
            }
        world = self._world()
        megatron = MegatronKeys(translation, self.megatron)
        megatron.apply(by_tokens=self.rl.value("use_dynamic_bsz") is True)
        megatron.apply_shapes()
        self._schedule()
        prompts, max_tokens = (
            self.megatron.value("global_batch_size"),
            self.sampling.value("max_tokens"),
        )
        Algorithm(
            translation,
            self.rl,
            prompts,
            max_tokens,
            in_samples=first,
            ranks=data_parallel(self.megatron, world),
            micro_batch=self.megatron.get("micro_batch_size"),
        ).apply()
        self._other_resources()
        self._integrated_reference()
        put_tools(translation, self.rl, self.sampling, self.file)
        self._engines(world)
        self._lengths()
        self._trackers()
        self._profiler()
        self._environment()
        for role in ("ref_config", "reward_config", "critic_config"):
            self._role(role)
        if "defaults" in self.top:
            translation.record(
                self.top["defaults"],
                KeyStatus.SAME,
                "model properties are checked against config.json",
            )
        for keys in (self.megatron, self.rl, self.generate, self.sampling):
            keys.apply_remaining()
        translation.fill_defaults(
            SECTIONS, (*self.megatron, *self.rl, *self.generate, *self.sampling)
        )
        return translation

    def _algorithm(self) -> str:
        """Return grpo, dapo or ppo, according to the stage; without a stage, gae means ppo."""
        stage = self.megatron.get("stage")
        if stage is None:
            return "ppo" if self.rl.value("adv_estimator") == "gae" else "grpo"
        name = _STAGES.get(str(stage.value))
        if name is None:
            self.translation.add_error(
                stage,
                f"not supported: a supervised stage. Must be one of {', '.join(_STAGES)}; "
                "for sft, use `msrl train-sft`.",
            )
            self.translation.refuse_as_one()
            return "grpo"
        self.translation.record(
            stage, KeyStatus.APPLIED, f"keys are translated as {name} reads them"
        )
        return name

    def _is_first_generation(self) -> bool:
        marks = (
            "ref_config" in self.top
            or self.rl.get("colocate_actor_ref", "colocate_all_models") is not None
        )
        mini, prompts = self.rl.number("mini_batch_size"), self.megatron.number("global_batch_size")
        return marks or (mini is not None and prompts is not None and mini > prompts)

    def _world(self) -> int | None:
        """Return the devices of training: actor_resource.num_npus."""
        resource = self.rl.get("actor_resource")
        if resource is None:
            return None
        entry = list(self.translation.entries(resource.node, "resource", resource.path))
        count = entry[0].value if entry else None
        if not isinstance(count, int) or isinstance(count, bool):
            if entry or resource.value in (
                None,
                {},
            ):  # else its key was unknown, which is an error already
                self.translation.add_error(
                    resource, "must be {num_npus: N}, the number of devices of training and rollout"
                )
            return None
        why = (
            "on one node; on two: --set cluster.nodes=2 --set "
            f"cluster.devices_per_node={count // 2}"
            if count > 8
            else ""
        )
        self.translation.assign(entry[0], ["cluster.devices_per_node"], count, why=why)
        self.translation.record(resource, KeyStatus.APPLIED, "key by key")
        return count

    def _other_resources(self) -> None:
        """Translate the devices of reference, critic and reward model, if they are separate."""
        for role in ("reference", "reward"):
            self._resource(f"{role}_resource", role, self._sharing(role))
        self._resource("critic_resource", "critic", self._sharing("critic"))
        self._resource("vit_resource", "", "used for images only")

    def _resource(self, name: str, role: str, sharing: str) -> None:
        """Translate the devices of a role, or record why it shares the training's devices."""
        resource = self.rl.get(name)
        if resource is None or resource.value is None:
            return
        for entry in self.translation.entries(resource.node, "resource", resource.path):
            if sharing or entry.value is None:
                reason = sharing or "no devices are set"
                self.translation.record(entry, KeyStatus.PLACEMENT, reason)
            else:
                self.translation.assign(entry, [f"cluster.roles.{role}.devices"], entry.value)
                self._separate.add(role)
        if role == "critic" and role in self._separate:
            report_other_ranks(self.translation, resource)
        self.translation.record(resource, KeyStatus.APPLIED, "key by key")

    def _has_critic(self) -> bool:
        return self.translation.algorithm == "ppo" and self.rl.value("adv_estimator") == "gae"

    def _sharing(self, role: str) -> str:
        """Return the reason why a role shares the devices of training; empty if it does not."""
        if role == "reference" and not needs_reference(self.translation):
            return "without a KL term, the run has no reference"
        if role == "critic" and not self._has_critic():
            return NOT_GAE
        if role == "reward" and self.rl.value("rule_reward") is not False:
            return "with rule_reward: true, no reward model scores"
        keys = ["colocate_all_models", *(["colocate_actor_ref"] if role == "reference" else [])]
        if any(self.rl.value(key) is True for key in keys):
            return "colocate_all_models or colocate_actor_ref shares the devices of training"
        is_integrated = self.rl.value("use_integrated_worker")
        if is_integrated is None:  # true by default in the second generation
            is_integrated = not self._is_first_generation()
        if is_integrated is True:
            return "with use_integrated_worker, the workers of training hold the model"
        return ""

    def _engines(self, world: int | None) -> None:
        """Set the number of engines: data_parallel_size, else one per tp devices."""
        self._experts()
        tp, entry = (
            self.generate.number("infer_tensor_parallel_size"),
            self.generate.get("data_parallel_size"),
        )
        if entry is not None and entry.value is not None:
            return self.translation.assign(entry, ["rollout.engine.dp"], entry.value)
        self.generate.record("data_parallel_size", KeyStatus.OFF, "")
        if tp is None or world is None:
            return None
        if tp < 1 or world % tp:
            return self.generate.add_error(
                "infer_tensor_parallel_size", f"must divide actor_resource.num_npus={world}"
            )
        engines = wrap(world // tp, self.generate.origin("infer_tensor_parallel_size"))
        return self.translation.set("rollout.engine.dp", engines)

    def _experts(self) -> None:
        """Translate the expert-parallel size of the engine, which in msrl is its number of devices.

        Another size changes only where the experts are.
        """
        size, tp = (
            self.generate.number(f"infer_{kind}_parallel_size") for kind in ("expert", "tensor")
        )
        if size not in (None, 1, tp):
            text = "the engine shards experts over its tensor-parallel devices"
            self.generate.record("infer_expert_parallel_size", KeyStatus.SPEED, text)

    def _lengths(self) -> None:
        """Check that max_model_len holds seq_length; a native check covers prompt and response."""
        limit, longest = self.generate.number("max_model_len"), self.megatron.number("seq_length")
        if limit is not None and longest is not None and limit < longest:
            self.generate.add_error(
                "max_model_len", f"must be at least megatron_training.seq_length={longest}"
            )
        self.megatron.record(
            "seq_length",
            KeyStatus.SAME,
            "lengths are set by rollout.max_prompt_tokens and rollout.max_response_tokens",
        )
        self._model_length()
        dtype = self.generate.get("dtype")
        bf16 = self.megatron.value("bf16")
        if dtype is not None and str(dtype.value) not in (
            ("bfloat16", "bf16") if bf16 else ("float32", "float")
        ):
            expected = "bfloat16" if bf16 else "float32"
            self.translation.add_error(
                dtype,
                f"must be {expected}, the dtype of training: weights are copied without conversion",
            )
        self.generate.record(
            "dtype", KeyStatus.SAME, "model.dtype sets the dtype of training and of the engine"
        )

    def _model_length(self) -> None:
        """Translate max_model_len, which also limits the responses to long prompts there."""
        entry, native = self.generate.get("max_model_len"), "rollout.engine.max_model_len"
        limit = self.generate.number("max_model_len")
        prompt, response = self.rl.number("max_prompt_length"), self.sampling.number("max_tokens")
        episode = node_at(self.translation.tree, ["rollout", "max_response_tokens"])
        if episode is not None and isinstance(episode.value, int):  # of several turns
            response = episode.value
        total = (prompt or 0) + (response or 0)
        if limit is None or limit >= total or self.sampling.get("max_tokens") is None:
            return self.generate.assign("max_model_len", [native], limit)
        text = f"the original truncates at {limit} tokens, fewer than prompt plus response"
        self.translation.approximate(entry, native, total, text)
        budget = node_at(self.translation.tree, ["train", "max_tokens_per_micro_batch"])
        if budget is not None and isinstance(budget.value, int) and budget.value < total:
            key = "train.max_tokens_per_micro_batch"
            self.translation.set(key, wrap(total, budget.origin))
        return None

    def _trackers(self) -> None:
        """Translate the trackers and the run name.

        wandb overrides TensorBoard; msrl always writes metrics.jsonl. The run has the name of
        wandb, else the file's.
        """
        on = {
            name: self.rl.value(f"use_{name}") is True
            for name in ("tensorboard", "wandb", "swanlab")
        }
        if on["wandb"] and self.rl.get("use_tensorboard"):
            self.rl.record("use_tensorboard", KeyStatus.DEAD, "overridden by use_wandb: true")
        names = [name for name in ("wandb", "swanlab") if on[name]] or (
            ["tensorboard"] if on["tensorboard"] else []
        )
        for name in names:
            self.rl.assign(
                f"use_{name}",
                ["log.trackers"],
                names,
                same="metrics.jsonl contains the same metrics",
            )
        if not names:
            self.translation.set_default("log.trackers", [])
        for name in on:
            self.rl.record(f"use_{name}", KeyStatus.OFF, "")
        put_tracker_options(
            self.rl,
            "wandb",
            {"wandb_project": "project", "wandb_save_dir": "dir"},
            is_on=on["wandb"],
        )
        put_tracker_options(
            self.rl,
            "swanlab",
            {"swanlab_project": "project", "swanlab_save_dir": "dir", "swanlab_exp_name": "name"},
            is_on=on["swanlab"],
        )
        self._swanlab_mode(is_on=on["swanlab"])
        experiment = self.rl.get("wandb_exp_name")
        if experiment is not None and experiment.value:
            return self.translation.assign(experiment, ["run.name"], experiment.value)
        self.rl.record("wandb_exp_name", KeyStatus.OFF, "")
        return self.translation.set("run.name", wrap(self.file.stem, Origin(self.translation.name)))

    def _swanlab_mode(self, *, is_on: bool) -> None:
        """Translate swanlab_mode, whose `cloud` is called `online` in later versions of SwanLab."""
        value = self.rl.value("swanlab_mode")
        mode = "online" if value == "cloud" else value
        if not is_on:
            return self.rl.record("swanlab_mode", KeyStatus.DEAD, "read with swanlab only")
        if mode in ("online", "local", "offline"):
            return self.rl.assign("swanlab_mode", ["log.options.swanlab.mode"], mode)
        return self.rl.record("swanlab_mode", KeyStatus.DROPPED, "not a mode of the tracker")

    def _profiler(self) -> None:
        """Translate the steps from profile_step_start up to, but not with, profile_step_end."""
        self._keys("msprobe_config").apply_remaining()
        sections = self._keys("profiler_config")
        inner = sections.get("integrated")
        path = "" if inner is None else inner.path
        node = None if inner is None else inner.node
        entries = self.translation.entries(node, "profiler", path)
        keys = Keys(self.translation, "profiler", entries)
        first, end = keys.number("profile_step_start"), keys.number("profile_step_end")
        last = None if end is None else end - 1
        put_profile(keys, is_on=keys.value("profile") is True, first=first, last=last)
        sections.apply_remaining()
        keys.apply_remaining()

    def _environment(self) -> None:
        """Translate the variables of runtime_env_path, by default envs/runtime_env.yaml.

        The default path is relative to the folder of the file.
        """
        entry = self.rl.get("runtime_env_path")
        path = (
            self._runtime_env(str(entry.value))
            if entry
            else self.file.parent / "envs" / "runtime_env.yaml"
        )
        if not path.is_file():
            if entry:
                self.translation.add_error(entry, "file not found")
            return
        tree = read(path, is_old=True)
        entries = tree.value if isinstance(tree.value, dict) else {}
        put_environment(self.translation, entries.get("env_vars", Node({}, tree.origin)))
        for name, node in entries.items():
            if name != "env_vars":
                text = "not supported: msrl reads env_vars only, where variables belong"
                self.translation.errors.append(f"{node.origin}: {name}: {text}")
        if entry:
            self.translation.record(
                entry, KeyStatus.APPLIED, "cluster.env: the variables of the file, listed below"
            )

    def _runtime_env(self, name: str) -> Path:
        """Return the path, relative to the working directory or else to the original's root."""
        beside = self.file.parent.parent / name
        return Path(name) if Path(name).is_file() or not beside.is_file() else beside

    def _role(self, name: str) -> None:
        """Translate the section of the reference, the reward model or the critic."""
        keys = Keys.read(self.translation, name, self._section(name), name, also=("megatron",))
        load = keys.get("load")
        if name == "ref_config" and load is not None:
            if same_path(load.value, self.megatron.value("load")):
                self.translation.record(
                    load, KeyStatus.APPLIED, "the reference starts from checkpoint.load"
                )
            else:
                put_reference_weights(self.translation, load, load.value)
        roles = {"ref_config": "reference", "reward_config": "reward", "critic_config": "critic"}
        role = roles[name]
        if role in self._separate:
            put_layout(self.translation, role, keys, self.megatron, self._shared_sizes())
        if name == "critic_config" and self.translation.algorithm == "ppo":
            self._critic(name, keys)
        why = {
            "ref_config": "the reference has the parallel layout and dtype of the actor",
            "reward_config": "with rule_reward: true, no reward model scores",
            "critic_config": "the critic has the layout and training settings of the actor",
        }[name]
        if name == "reward_config" and self.rl.value("rule_reward") is False:
            why = "the reward model has the parallel layout and dtype of the actor"
            self._reward_model(load)
        for entry in keys:
            unread = name == "critic_config" and self.translation.algorithm != "ppo"
            self.translation.record(
                entry,
                KeyStatus.DEAD if unread else KeyStatus.SAME,
                "read by ppo only" if unread else why,
            )

    def _shared_sizes(self) -> dict[str, int]:
        """Return the sizes that megatron_training sets for all roles."""
        node = self._section("megatron_training")
        entries = node.value if node is not None and isinstance(node.value, dict) else {}
        return {
            canonical(key): value.value
            for key, value in entries.items()
            if isinstance(value.value, int) and not isinstance(value.value, bool)
        }

    def _integrated_reference(self) -> None:
        """Translate integrated_mode_config.ref_model_load_path, the weights of the reference."""
        entry = self.rl.get("integrated_mode_config")
        if entry is None or entry.value is None:
            return None
        path = plain(entry.node).get("ref_model_load_path") if _is_mapping(entry) else None
        if not isinstance(path, str):
            return self.translation.add_error(entry, "must be {ref_model_load_path: PATH}")
        return put_reference_weights(self.translation, entry, path)

    def _reward_model(self, load: SourceKey | None) -> None:
        """Translate the reward model of rule_reward: false, which runs on the training ranks."""
        if load is None:
            return self.rl.add_error(
                "rule_reward",
                "needs a reward model. Set its checkpoint in reward_config.load.",
            )
        return self.translation.assign(
            load, ["reward.sources"], [{"model": load.value, "engine": "megatron"}]
        )

    def _schedule(self) -> None:
        """Report schedules, for which the original counts samples in a run of prompts.

        Source: models/base/base_training_engine.py, update: `increment` samples of each update, of
        train_iters * global_batch_size in Megatron's scheduler.
        """
        samples = self.rl.number("n_samples_per_prompt") or 1
        speed = samples * (self.rl.number("epochs") or 1)
        changes = self.megatron.value("lr_decay_style") != "constant"
        if speed > 1 and (changes or self.megatron.value("lr_warmup_fraction")):
            self.translation.remarks.append(
                f"{self.translation.name}: warm-up and decay of the original end {speed} times as "
                "early: its schedule counts samples and epochs in a run of prompts"
            )

    def _critic(self, name: str, keys: Keys) -> None:
        """Translate the weights and the learning rate of the critic, if the estimator needs one."""
        if self.rl.value("adv_estimator") != "gae":
            return record_unused(self.translation, keys)
        for entry in (entry for entry in keys if entry.section == name and entry.key != "model"):
            self.translation.apply(entry)
        if self.rl.value("use_dynamic_bsz") is not True:
            report_other_batches(keys, self.megatron, ("micro_batch_size",))
        return assign_critic_optimizer(
            self.translation,
            (entry for entry in keys if entry.section == "megatron"),
            self.megatron,
        )


def _is_mapping(entry: SourceKey) -> bool:
    return isinstance(entry.node.value, dict)


def put_environment(translation: Translation, variables: Node) -> None:
    """Translate environment variables: by their table rows, or unchanged if they have none."""
    values: Mapping[str, Node] = variables.value if isinstance(variables.value, dict) else {}
    for name, node in values.items():
        entry = SourceKey("runtime_env", name, f"env_vars.{name}", node)
        if isinstance(node.value, (dict, tuple)):
            translation.add_error(entry, "must be a text")
        elif translation.table.row("runtime_env", name) is not None:
            translation.apply(entry)
        else:
            value = plain(node)
            translation.assign(
                entry, [f"cluster.env.{name}"], node.text if node.text is not None else str(value)
            )
