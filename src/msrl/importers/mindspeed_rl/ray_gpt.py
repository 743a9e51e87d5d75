"""MindSpeed-LLM's own RL files (ray_gpt.py): training, actor_rollout_ref, reward, algorithm, resource_pool.

Source: MindSpeed-LLM 324a9d6d, tasks/posttrain/rlxf: a mini-batch counts samples of one data-parallel rank, responses fill what
max_prompt_length leaves of seq_length, the KL of GRPO is k3 in the loss, advantages are group-normed with eps 1e-8 and then whitened.
"""

from __future__ import annotations

from pathlib import Path

from msrl.config.sources import Node, Origin, wrap
from msrl.errors import nearest
from msrl.importers.critic import put_optimizer, say_dead
from msrl.importers.megatron import MegatronKeys, data_parallel, with_model
from msrl.importers.mindspeed_rl.algorithm import put_sources
from msrl.importers.sections import Keys, as_list, hydra_layers, same_path
from msrl.importers.table import Table, load_table
from msrl.importers.translation import Fate, Translation

MARKS = ("actor_rollout_ref", "resource_pool")
SECTIONS = ("megatron", "actor_rollout", "algorithm")
_OTHERS = {"bf16": False, "lora_r": 16, "lora_alpha": 32}  # what MindSpeed-RL has other defaults for


def table() -> Table:
    """MindSpeed-LLM's own sections, and the Megatron keys that they share with MindSpeed-RL's."""
    shared = {key: row for key, row in load_table("mindspeed_rl").rows.items() if key[0] == "megatron"}
    return Table("mindspeed_llm", {**shared, **load_table("mindspeed_llm").rows})


def translate(tree: Node, file: Path) -> Translation:
    """The native configuration of one file; mistakes and what is not built yet are in the result."""
    return _File(tree, file).translate()


class _File:
    """The sections of one file."""

    def __init__(self, tree: Node, file: Path) -> None:
        self.file = file
        self.translation = Translation("MindSpeed-LLM", table(), str(file), algorithm="grpo")
        self.translation.other_defaults = {("megatron", key): value for key, value in _OTHERS.items()}
        self.top = {given.key: given for given in self.translation.given(tree, "top", "")}
        self.models = hydra_layers(self._section("defaults"), file, self.translation)
        roles = self._roles()
        training = list(self.translation.given(self._section("training"), "megatron", "training", also=("actor_rollout",)))
        path = "actor_rollout_ref.actor_rollout"
        actor = list(self.translation.given(roles.get("actor_rollout"), "actor_rollout", path, also=("megatron",)))
        both = with_model([*training, *actor], self.models, self.translation)
        self.megatron = Keys(self.translation, "megatron", [given for given in both if given.section == "megatron"])
        self.actor = Keys(self.translation, "actor_rollout", [given for given in both if given.section == "actor_rollout"])
        self.ref = self._role("ref", roles.get("ref"), "actor_rollout_ref.ref")
        self.reward = self._role("reward", self._section("reward"), "reward")
        self.critic = self._role("critic", self._section("critic"), "critic")
        self.algorithm = self._plain("algorithm")
        self.pool = self._plain("resource_pool")
        control = self.algorithm.get("kl_ctrl")
        self.kl = Keys(
            self.translation, "kl_ctrl", self.translation.given(control.node if control else None, "kl_ctrl", "algorithm.kl_ctrl")
        )

    def _section(self, name: str) -> Node | None:
        return self.top[name].node if name in self.top else None

    def _roles(self) -> dict[str, Node]:
        node = self._section("actor_rollout_ref")
        entries = node.value if node is not None and isinstance(node.value, dict) else {}
        for name, child in entries.items():
            if name not in ("actor_rollout", "ref"):
                hint = nearest(name, ("actor_rollout", "ref"))
                self.translation.errors.append(f"{child.origin}: actor_rollout_ref.{name}: there is no such key in MindSpeed-LLM; {hint}")
        return dict(entries)

    def _role(self, name: str, node: Node | None, path: str) -> Keys:
        return Keys(self.translation, name, self.translation.given(node, name, path, also=("megatron",)))

    def _plain(self, name: str) -> Keys:
        return Keys(self.translation, name, self.translation.given(self._section(name), name, name))

    def translate(self) -> Translation:
        translation = self.translation
        self._stage()
        world = self.actor.number("num_gpus_for_train")
        megatron = MegatronKeys(translation, self.megatron)
        megatron.apply(by_tokens=False)
        megatron.apply_shapes()
        self._batches(world)
        self._lengths()
        self._engines(world)
        self._kl()
        self._rewards()
        self._others()
        for keys in (self.megatron, self.actor, self.algorithm):
            keys.apply_rest()
        translation.set_default("algo.advantage.eps", 1e-8)
        translation.set("run.name", wrap(self.file.stem, Origin(translation.name)))
        translation.laid_in(SECTIONS, (*self.megatron, *self.actor, *self.algorithm))
        return translation

    def _missing(self, key: str, meaning: str) -> None:
        self.translation.errors.append(f"{self.translation.name}: {key}: is missing: {meaning}")

    def _stage(self) -> None:
        stage = self.megatron.get("stage")
        if stage is not None and stage.value == "ray_grpo":
            return self.translation.say(stage, Fate.TOOK, "what follows is read as its GRPO reads it")
        if stage is not None and stage.value == "ray_ppo":
            self.translation.algorithm = "ppo"
            return self.translation.take(stage, ["algo.preset"], "ppo")
        if stage is not None:
            return self.translation.mistake(stage, "must be ray_grpo or ray_ppo; supervised stages are `msrl train-sft`")
        return None

    def _batches(self, world: int | None) -> None:
        """ppo_mini_batch_size counts the samples of one of the data-parallel ranks of num_gpus_for_train."""
        mini, ranks = self.actor.number("ppo_mini_batch_size"), data_parallel(self.megatron, world)
        if world is None:
            self.translation.errors.append(
                f"{self.translation.name}: actor_rollout.num_gpus_for_train: is missing: the devices of training"
            )
        elif ranks is None:
            self.actor.mistake("num_gpus_for_train", "must be a multiple of the tensor- and pipeline-parallel sizes' product")
        elif mini is not None:
            why = f"{mini} samples of each of {ranks} data-parallel ranks"
            self.actor.take("num_gpus_for_train", ["cluster.devices_per_node"], world)
            self.actor.take("ppo_mini_batch_size", ["train.updates.samples_per_update"], mini * ranks, why=why)

    def _lengths(self) -> None:
        longest, prompt = self.megatron.number("seq_length"), self.actor.number("max_prompt_length")
        if longest is None or prompt is None:
            return self.translation.errors.append(
                f"{self.translation.name}: training.seq_length: is missing: prompt and response in tokens"
            )
        if longest <= prompt:
            return self.megatron.mistake("seq_length", f"must be above max_prompt_length={prompt}: responses fill the rest")
        why = f"seq_length minus max_prompt_length={prompt}"
        return self.megatron.take("seq_length", ["rollout.max_response_tokens"], longest - prompt, why=why)

    def _engines(self, world: int | None) -> None:
        if self.actor.value("do_sample") is not True:
            self.actor.mistake("do_sample", "must be true: greedy samples of one prompt are all the same")
        self.actor.say("do_sample", Fate.SAME, "samples are always drawn")
        tp = self.megatron.number("tensor_model_parallel_size")
        if tp is not None and world is not None and world % tp == 0:
            origin = self.megatron.origin("tensor_model_parallel_size")
            self.translation.set("rollout.engine.tp", wrap(tp, origin))
            self.translation.set("rollout.engine.dp", wrap(world // tp, origin))

    def _kl(self) -> None:
        """kl_ctrl of algorithm, or kl_coef of the actor in the oldest files; GRPO never moves an adaptive one."""
        section, key = (self.kl, "kl_coef") if self.kl.get("kl_coef") else (self.actor, "kl_coef")
        if self.translation.algorithm == "ppo" and section.value(key):
            section.say(key, Fate.NOT_YET, "of ppo it is taken off the rewards; set it to 0, and --set algo.kl.reward.coef")
        elif section.get(key):
            section.take(key, ["algo.kl.loss.coef"], section.value(key), why="k3, in the loss")
            self.translation.set("algo.kl.loss.estimator", wrap("k3", section.origin(key)))
        if self.kl.value("type") not in (None, "fixed", "adaptive"):
            self.kl.mistake("type", "must be fixed or adaptive")
        for given in self.kl:
            self.translation.say(given, Fate.DEAD, "GRPO never moves the coefficient")
        self.actor.say("kl_coef", Fate.DEAD, "algorithm.kl_ctrl.kl_coef counts")
        self.algorithm.say("kl_ctrl", Fate.TOOK, "key by key")

    def _rewards(self) -> None:
        if self.reward.value("verifier") is True:
            names, weights = (as_list(self.algorithm.value(key)) for key in ("verifier_function", "verifier_weight"))
            if len(names) != len(weights):
                return self.algorithm.mistake("verifier_weight", f"must have {len(names)} numbers, as verifier_function has names")
            put_sources(self.translation, self.algorithm, names, weights)
            self.reward.say("verifier", Fate.TOOK, "reward.sources: verifier_function with verifier_weight")
            return self.reward.say("load", Fate.DEAD, "verifier: true scores")
        load = self.reward.get("load")
        for key in ("verifier_function", "verifier_weight"):
            self.algorithm.say(key, Fate.DEAD, "read with reward.verifier: true only")
        if load is not None:
            return self.translation.take(load, ["reward.sources"], [{"model": load.value, "engine": "megatron"}])
        return None

    def _others(self) -> None:
        """The reference, the critic, and what concerns placement."""
        load = self.ref.get("load")
        if load is not None and same_path(load.value, self.megatron.value("load")):
            self.translation.say(load, Fate.TOOK, "the reference starts from checkpoint.load")
        elif load is not None:
            self.translation.take(load, ["cluster.roles.reference.load"], load.value)
        _say_all(self.ref, Fate.SAME, "the reference is cut, and computes, like the actor")
        _say_all(self.reward, Fate.SAME, "the reward model is cut, and computes, like the actor")
        self._critic()
        self.pool.say("actor_rollout", Fate.SAME, "num_gpus_for_train are the devices of training, which rollout shares")
        _say_all(self.pool, Fate.SAME, "all roles share the devices of training")
        for keys in (self.actor, self.algorithm):
            given = keys.get("missing_eos_penalty")
            if given is not None:
                is_read = self.translation.algorithm == "ppo" and given.value not in (0, 0.0)
                self.translation.say(given, Fate.NOT_YET if is_read else Fate.DEAD, "read by ppo only, where it lowers the score")

    def _critic(self) -> None:
        """Of ppo with gae alone: weights, learning rate, lambda and the clip of values."""
        if self.translation.algorithm != "ppo" or self.algorithm.value("adv_estimator") != "gae":
            say_dead(self.translation, [*self.critic, *([lam] if (lam := self.algorithm.get("lam")) else [])])
            return
        self.algorithm.take("lam", ["algo.advantage.lambda"], self.algorithm.value("lam"))
        for key in ("cliprange_value", "load"):
            if key == "cliprange_value" or self.critic.get(key):
                native = "algo.value.clip" if key == "cliprange_value" else "cluster.roles.critic.load"
                self.critic.take(key, [native], self.critic.value(key))
        for key, same in (("critic_mini_batch_size", "ppo_mini_batch_size"), ("critic_update_epochs", "ppo_epochs")):
            given = self.critic.get(key)
            if given is not None:
                is_alike = given.value == self.actor.value(same)
                told = "the critic takes the policy's mini-batches and epochs"
                self.translation.say(given, Fate.SAME if is_alike else Fate.NOT_YET, told)
        put_optimizer(self.translation, (given for given in self.critic if given.section == "megatron"), self.megatron)
        _say_all(self.critic, Fate.SAME, "the critic is cut, and trained, like the actor")


def _say_all(keys: Keys, fate: Fate, text: str) -> None:
    for given in keys:
        keys.translation.say(given, fate, text)
