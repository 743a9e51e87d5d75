"""MindSpeed-RL's files: `defaults` with model/*.yaml, megatron_training, actor_config, rl_config, generate_config and the others.

Two generations differ in mini_batch_size: in the first (ref_config or colocate_* are there, or it is above global_batch_size) it counts
samples, later prompts. Sources: MindSpeed-RL 04aa0845 and 05a90d77, config_cls/rl_config.py and config_cls/validate_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msrl.config.sources import Node, Origin, plain, read, wrap
from msrl.importers.critic import put_optimizer, say_dead
from msrl.importers.megatron import MegatronKeys, with_model
from msrl.importers.mindspeed_llm import data as mindspeed_data
from msrl.importers.mindspeed_rl import sft as mindspeed_sft
from msrl.importers.mindspeed_rl.algorithm import Algorithm
from msrl.importers.sections import Keys, hydra_layers, same_path
from msrl.importers.table import load_table
from msrl.importers.translation import Fate, Given, Translation

MARKS = ("megatron_training", "actor_config", "rl_config", "generate_config", *mindspeed_data.MARKS, *mindspeed_sft.MARKS)
SECTIONS = ("megatron", "rl_config", "generate_config", "sampling_config")
_STAGES = {"ray_grpo": "grpo", "ray_dapo": "dapo", "ray_ppo": "ppo"}


def translate(tree: Node, file: Path) -> Translation:
    """The native configuration of one file, of training or of preprocessing; mistakes and what is not built yet are in the result."""
    if mindspeed_sft.is_supervised(tree):
        return mindspeed_sft.translate(tree, file)
    return mindspeed_data.translate(tree, file) if mindspeed_data.is_preprocessing(tree) else _File(tree, file).translate()


class _File:
    """The sections of one file."""

    def __init__(self, tree: Node, file: Path) -> None:
        self.file = file
        self.translation = Translation("MindSpeed-RL", load_table("mindspeed_rl"), str(file))
        self.top = {given.key: given for given in self.translation.given(tree, "top", "")}
        self.models = hydra_layers(self._section("defaults"), file, self.translation)
        self.megatron = self._megatron()
        self.rl, self.generate = self._keys("rl_config"), self._keys("generate_config")
        sampling = self.generate.get("sampling_config")
        path = "" if sampling is None else sampling.path
        nested = self.translation.given(None if sampling is None else sampling.node, "sampling_config", path)
        self.sampling = Keys(self.translation, "sampling_config", nested)
        self.generate.say("sampling_config", Fate.TOOK, "key by key")

    def _section(self, name: str) -> Node | None:
        return self.top[name].node if name in self.top else None

    def _keys(self, name: str) -> Keys:
        return Keys(self.translation, name, self.translation.given(self._section(name), name, name))

    def _megatron(self) -> Keys:
        """actor_config over megatron_training over the model's file."""
        layers = [self.translation.given(self._section(name), "megatron", name) for name in ("megatron_training", "actor_config")]
        return Keys(self.translation, "megatron", with_model([given for layer in layers for given in layer], self.models, self.translation))

    def translate(self) -> Translation:
        translation = self.translation
        translation.algorithm = self._algorithm()
        if first := self._is_first_generation():
            translation.other_defaults = {("rl_config", "entropy_coeff"): 0.001, ("rl_config", "kl_penalty"): "kl"}
        world = self._world()
        self._other_resources()
        megatron = MegatronKeys(translation, self.megatron)
        megatron.apply(by_tokens=self.rl.value("use_dynamic_bsz") is True)
        megatron.apply_shapes()
        prompts, max_tokens = self.megatron.value("global_batch_size"), self.sampling.value("max_tokens")
        Algorithm(translation, self.rl, prompts, max_tokens, in_samples=first).apply()
        self._engines(world)
        self._lengths()
        self._trackers()
        self._environment()
        for role in ("ref_config", "reward_config", "critic_config"):
            self._role(role)
        if "defaults" in self.top:
            translation.say(self.top["defaults"], Fate.SAME, "facts of the model are checked against its config.json")
        for keys in (self.megatron, self.rl, self.generate, self.sampling):
            keys.apply_rest()
        translation.laid_in(SECTIONS, (*self.megatron, *self.rl, *self.generate, *self.sampling))
        return translation

    def _algorithm(self) -> str:
        """grpo, dapo or ppo: by stage; without one, gae means ppo."""
        stage = self.megatron.get("stage")
        if stage is None:
            return "ppo" if self.rl.value("adv_estimator") == "gae" else "grpo"
        name = _STAGES.get(str(stage.value))
        if name is None:
            self.translation.mistake(stage, f"must be one of {', '.join(_STAGES)}; supervised stages are `msrl train-sft`")
            return "grpo"
        self.translation.say(stage, Fate.TOOK, f"what follows is read as {name} reads it")
        return name

    def _is_first_generation(self) -> bool:
        marks = "ref_config" in self.top or self.rl.get("colocate_actor_ref", "colocate_all_models") is not None
        mini, prompts = self.rl.number("mini_batch_size"), self.megatron.number("global_batch_size")
        return marks or (mini is not None and prompts is not None and mini > prompts)

    def _world(self) -> int | None:
        """Devices of training: actor_resource.num_npus."""
        resource = self.rl.get("actor_resource")
        if resource is None:
            return None
        given = list(self.translation.given(resource.node, "resource", resource.path))
        count = given[0].value if given else None
        if not isinstance(count, int) or isinstance(count, bool):
            if given or resource.value in (None, {}):  # else the name of its key was a mistake
                self.translation.mistake(resource, "must be {num_npus: N}, the devices of training and rollout")
            return None
        why = f"on one node; on two: --set cluster.nodes=2 --set cluster.devices_per_node={count // 2}" if count > 8 else ""
        self.translation.take(given[0], ["cluster.devices_per_node"], count, why=why)
        self.translation.say(resource, Fate.TOOK, "key by key")
        return count

    def _other_resources(self) -> None:
        """Devices of roles that share those of training here."""
        for name in ("reference_resource", "reward_resource", "critic_resource", "vit_resource"):
            resource = self.rl.get(name)
            for given in self.translation.given(resource.node, "resource", resource.path) if resource is not None else ():
                self.translation.say(given, Fate.SAME, "all roles share the devices of training")

    def _engines(self, world: int | None) -> None:
        """As many engines as the devices hold, unless data_parallel_size says it."""
        tp, given = self.generate.number("infer_tensor_parallel_size"), self.generate.get("data_parallel_size")
        if given is not None and given.value is not None:
            return self.translation.take(given, ["rollout.engine.dp"], given.value)
        self.generate.say("data_parallel_size", Fate.OFF, "")
        if tp is None or world is None:
            return None
        if world % tp:
            return self.generate.mistake("infer_tensor_parallel_size", f"must divide actor_resource.num_npus={world}")
        engines = wrap(world // tp, self.generate.origin("infer_tensor_parallel_size"))
        return self.translation.set("rollout.engine.dp", engines)

    def _lengths(self) -> None:
        """max_model_len holds seq_length in the original; the native check looks at prompt and response."""
        limit, longest = self.generate.number("max_model_len"), self.megatron.number("seq_length")
        if limit is not None and longest is not None and limit < longest:
            self.generate.mistake("max_model_len", f"must hold megatron_training.seq_length={longest}")
        self.megatron.say("seq_length", Fate.SAME, "rollout.max_prompt_tokens and max_response_tokens are the lengths that count")
        self.generate.take("max_model_len", ["rollout.engine.max_model_len"], self.generate.value("max_model_len"))
        dtype = self.generate.get("dtype")
        bf16 = self.megatron.value("bf16")
        if dtype is not None and str(dtype.value) not in (("bfloat16", "bf16") if bf16 else ("float32", "float")):
            wanted = "bfloat16" if bf16 else "float32"
            self.translation.mistake(dtype, f"must be {wanted}, the type of training: weights are handed over as they are")
        self.generate.say("dtype", Fate.SAME, "model.dtype is the type of training and of the engine")

    def _trackers(self) -> None:
        """TensorBoard, unless wandb is on; metrics.jsonl is always written. The run has the file's name, or wandb's."""
        on = {name: self.rl.value(f"use_{name}") is True for name in ("tensorboard", "wandb", "swanlab")}
        if on["wandb"] and self.rl.get("use_tensorboard"):
            self.rl.say("use_tensorboard", Fate.DEAD, "use_wandb: true wins")
        names = [name for name in ("wandb", "swanlab") if on[name]] or (["tensorboard"] if on["tensorboard"] else [])
        for name in names:
            self.rl.take(f"use_{name}", ["log.trackers"], [name], same="metrics.jsonl has all that it would show")
        if not names:
            self.translation.set_default("log.trackers", [])
        for name in on:
            self.rl.say(f"use_{name}", Fate.OFF, "")
        named = self.rl.get("wandb_exp_name")
        if named is not None and named.value:
            return self.translation.take(named, ["run.name"], named.value)
        self.rl.say("wandb_exp_name", Fate.OFF, "")
        return self.translation.set("run.name", wrap(self.file.stem, Origin(self.translation.name)))

    def _environment(self) -> None:
        """The variables of runtime_env.yaml: the file that runtime_env_path names, else envs/runtime_env.yaml beside this one."""
        given = self.rl.get("runtime_env_path")
        path = self._runtime_env(str(given.value)) if given else self.file.parent / "envs" / "runtime_env.yaml"
        if not path.is_file():
            if given:
                self.translation.mistake(given, "there is no such file")
            return
        tree = read(path)
        entries = tree.value if isinstance(tree.value, dict) else {}
        put_environment(self.translation, entries.get("env_vars", Node({}, tree.origin)))
        if given:
            self.translation.say(given, Fate.TOOK, "cluster.env: its variables, below")

    def _runtime_env(self, name: str) -> Path:
        """The file as the original finds it, from its own root, or beside this file."""
        beside = self.file.parent.parent / name
        return Path(name) if Path(name).is_file() or not beside.is_file() else beside

    def _role(self, name: str) -> None:
        """The reference and the reward model. What they share with the actor needs no key of its own."""
        keys = Keys(self.translation, name, self.translation.given(self._section(name), name, name, also=("megatron",)))
        load = keys.get("load")
        if name == "ref_config" and load is not None:
            if same_path(load.value, self.megatron.value("load")):
                self.translation.say(load, Fate.TOOK, "the reference starts from checkpoint.load")
            else:
                self.translation.take(load, ["cluster.roles.reference.load"], load.value)
        if name == "critic_config" and self.translation.algorithm == "ppo":
            self._critic(name, keys)
        why = {
            "ref_config": "the reference is cut, and computes, like the actor",
            "reward_config": "no reward model scores: rule_reward is true",
            "critic_config": "the critic is cut, and trained, like the actor",
        }[name]
        if name == "reward_config" and self.rl.value("rule_reward") is False:
            why = "the reward model is cut, and computes, like the actor"
            self._reward_model(load)
        for given in keys:
            unread = name == "critic_config" and self.translation.algorithm != "ppo"
            self.translation.say(given, Fate.DEAD if unread else Fate.SAME, "read by ppo only" if unread else why)

    def _reward_model(self, load: Given | None) -> None:
        """What scores where rule_reward is false: a checkpoint of Megatron's, on the ranks of the training."""
        if load is None:
            return self.rl.mistake("rule_reward", "leaves scoring to a reward model; name its checkpoint in reward_config.load")
        return self.translation.take(load, ["reward.sources"], [{"model": load.value, "engine": "megatron"}])

    def _critic(self, name: str, keys: Keys) -> None:
        """The critic's weights and learning rate, where the estimator needs one."""
        if self.rl.value("adv_estimator") != "gae":
            return say_dead(self.translation, keys)
        for given in (given for given in keys if given.section == name and given.key != "model"):
            self.translation.apply(given)
        return put_optimizer(self.translation, (given for given in keys if given.section == "megatron"), self.megatron)


def put_environment(translation: Translation, variables: Node) -> None:
    """Environment variables: those that the table knows by their rows, all others as they are."""
    values: Mapping[str, Node] = variables.value if isinstance(variables.value, dict) else {}
    for name, node in values.items():
        given = Given("runtime_env", name, f"env_vars.{name}", node)
        if translation.table.row("runtime_env", name) is not None:
            translation.apply(given)
        else:
            value = plain(node)
            translation.take(given, [f"cluster.env.{name}"], node.text if node.text is not None else str(value))
