"""Import of MindSpeed-LLM RL files (ray_gpt.py).

Their sections are training, actor_rollout_ref, reward, algorithm and resource_pool.

Source: MindSpeed-LLM 324a9d6d, tasks/posttrain/rlxf. A mini-batch counts samples of one
data-parallel rank, responses have seq_length minus max_prompt_length tokens, GRPO has a k3 KL term
in the loss, and advantages are normalized per group with eps 1e-8 and then whitened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msrl.config.sources import Node, Origin, wrap
from msrl.errors import nearest
from msrl.importers.critic import (
    assign_critic_optimizer,
    record_unused,
    report_other_batches,
    report_other_ranks,
)
from msrl.importers.hydra import Override, compose_file
from msrl.importers.megatron import MegatronKeys, data_parallel, with_model
from msrl.importers.micro_batches import MicroBatches, put_aggregation
from msrl.importers.mindspeed_rl.algorithm import put_sources
from msrl.importers.model_roles import needs_reference, put_layout, put_reference_weights
from msrl.importers.sections import Keys, hydra_layers, same_path
from msrl.importers.table import Table, as_list, canonical, load_table
from msrl.importers.translation import KeyStatus, Translation

SECTIONS = ("megatron", "actor_rollout", "algorithm")
_OTHER_DEFAULTS = {
    "bf16": False,
    "moe_aux_loss_coeff": 0.0,
    "lora_r": 16,
    "lora_alpha": 32,
}  # defaults that differ from the defaults of MindSpeed-RL


def is_ray_file(tree: Node) -> bool:
    """Return True for a file of ray_gpt.py; verl's have a section `actor_rollout_ref` too."""
    nodes = tree.value if isinstance(tree.value, dict) else {}
    sections = {canonical(key): node for key, node in nodes.items()}
    roles = sections.get("actor_rollout_ref")
    names = roles.value if roles is not None and isinstance(roles.value, dict) else {}
    return "resource_pool" in sections or (
        roles is not None and ("training" in sections or "actor_rollout" in names)
    )


def table() -> Table:
    """Return the table of MindSpeed-LLM with the Megatron keys that MindSpeed-RL shares."""
    shared = {
        key: row for key, row in load_table("mindspeed_rl").rows.items() if key[0] == "megatron"
    }
    return Table("mindspeed_llm", {**shared, **load_table("mindspeed_llm").rows})


def translate(tree: Node, file: Path, overrides: Sequence[Override] = ()) -> Translation:
    """Return the translation of one file, which includes errors and unsupported keys."""
    errors: list[str] = []
    tree = compose_file(tree, file, errors, groups=("model",), overrides=overrides)
    translation = _RayGptFile(tree, file).translate()
    translation.errors[:0] = errors
    return translation


class _RayGptFile:
    """Translation of the sections of one file."""

    def __init__(self, tree: Node, file: Path) -> None:
        self.file = file
        self.translation = Translation("MindSpeed-LLM", table(), str(file), algorithm="grpo")
        self.translation.ignored_sections = ("top",)
        self.translation.other_defaults = {
            ("megatron", key): value for key, value in _OTHER_DEFAULTS.items()
        }
        self.top = {entry.key: entry for entry in self.translation.entries(tree, "top", "")}
        self.models = hydra_layers(self._section("defaults"), file, self.translation)
        roles = self._roles()
        training = list(
            self.translation.entries(
                self._section("training"), "megatron", "training", also=("actor_rollout",)
            )
        )
        path = "actor_rollout_ref.actor_rollout"
        actor = list(
            self.translation.entries(
                roles.get("actor_rollout"), "actor_rollout", path, also=("megatron",)
            )
        )
        both = with_model([*training, *actor], self.models, self.translation)
        self.megatron = Keys(
            self.translation, "megatron", [entry for entry in both if entry.section == "megatron"]
        )
        self.actor = Keys(
            self.translation,
            "actor_rollout",
            [entry for entry in both if entry.section == "actor_rollout"],
        )
        self.ref = self._role("ref", roles.get("ref"), "actor_rollout_ref.ref")
        self.reward = self._role("reward", self._section("reward"), "reward")
        self.critic = self._role("critic", self._section("critic"), "critic")
        self.algorithm = self._plain("algorithm")
        self.pool = self._plain("resource_pool")
        control = self.algorithm.get("kl_ctrl")
        self.kl = Keys.read(
            self.translation, "kl_ctrl", control.node if control else None, "algorithm.kl_ctrl"
        )

    def _section(self, name: str) -> Node | None:
        return self.top[name].node if name in self.top else None

    def _roles(self) -> dict[str, Node]:
        node = self._section("actor_rollout_ref")
        entries = node.value if node is not None and isinstance(node.value, dict) else {}
        for name, child in entries.items():
            if name not in ("actor_rollout", "ref"):
                hint = nearest(name, ("actor_rollout", "ref"))
                self.translation.errors.append(
                    f"{child.origin}: actor_rollout_ref.{name}: unknown key of MindSpeed-LLM; "
                    f"{hint}"
                )
        return dict(entries)

    def _role(self, name: str, node: Node | None, path: str) -> Keys:
        return Keys.read(self.translation, name, node, path, also=("megatron",))

    def _plain(self, name: str) -> Keys:
        return Keys.read(self.translation, name, self._section(name), name)

    def translate(self) -> Translation:
        translation = self.translation
        self._stage()
        world = self.actor.number("num_gpus_for_train")
        megatron = MegatronKeys(translation, self.megatron)
        megatron.apply(by_tokens=False)
        megatron.apply_shapes()
        self._batches(world)
        self._aggregation(world)
        self._lengths()
        self._engines(world)
        self._kl()
        self._rewards()
        self._other_roles()
        for keys in (self.megatron, self.actor, self.algorithm):
            keys.apply_remaining()
        translation.set_default("algo.advantage.eps", 1e-8)
        translation.set("run.name", wrap(self.file.stem, Origin(translation.name)))
        translation.fill_defaults(SECTIONS, (*self.megatron, *self.actor, *self.algorithm))
        return translation

    def _stage(self) -> None:
        stage = self.megatron.get("stage")
        if stage is not None and stage.value == "ray_grpo":
            return self.translation.record(
                stage, KeyStatus.APPLIED, "keys are translated as GRPO reads them"
            )
        if stage is not None and stage.value == "ray_ppo":
            self.translation.algorithm = "ppo"
            return self.translation.assign(stage, ["algo.preset"], "ppo")
        if stage is not None:
            return self.translation.add_error(
                stage, "must be ray_grpo or ray_ppo. For supervised stages, use `msrl train-sft`."
            )
        return None

    def _batches(self, world: int | None) -> None:
        """Translate ppo_mini_batch_size, which counts the samples of one data-parallel rank."""
        mini, ranks = self.actor.number("ppo_mini_batch_size"), data_parallel(self.megatron, world)
        if world is None:
            self.translation.errors.append(
                f"{self.translation.name}: actor_rollout.num_gpus_for_train: missing. "
                "Set the number of training devices."
            )
        elif ranks is None:
            self.actor.add_error(
                "num_gpus_for_train",
                "must be a multiple of tensor parallel size * pipeline parallel size",
            )
        elif mini is not None:
            why = f"{mini} samples on each of {ranks} data-parallel ranks"
            self.actor.assign("num_gpus_for_train", ["cluster.devices_per_node"], world)
            self.actor.assign(
                "ppo_mini_batch_size", ["train.updates.samples_per_update"], mini * ranks, why=why
            )

    def _aggregation(self, world: int | None) -> None:
        entry = self.megatron.get("micro_batch_size")
        size = entry.value if entry is not None and isinstance(entry.value, int) else None
        mini, ranks = self.actor.number("ppo_mini_batch_size"), data_parallel(self.megatron, world)
        is_shuffled = self.actor.value("shuffle_minibatch") is True
        micro_batches = MicroBatches(entry, size, None, ranks, is_shuffled)
        samples = mini * ranks if mini is not None and ranks is not None else None
        put_aggregation(self.translation, micro_batches, samples, has_critic=self._has_critic())

    def _lengths(self) -> None:
        longest, prompt = self.megatron.number("seq_length"), self.actor.number("max_prompt_length")
        if longest is None or prompt is None:
            return self.translation.errors.append(
                f"{self.translation.name}: training.seq_length: missing. "
                "Set the length of prompt plus response in tokens."
            )
        if longest <= prompt:
            return self.megatron.add_error(
                "seq_length",
                f"must be above max_prompt_length={prompt}: the difference is the response length",
            )
        why = f"seq_length minus max_prompt_length={prompt}"
        return self.megatron.assign(
            "seq_length", ["rollout.max_response_tokens"], longest - prompt, why=why
        )

    def _engines(self, world: int | None) -> None:
        if self.actor.value("do_sample") is not True:
            self.actor.add_error(
                "do_sample", "must be true: greedy samples of a prompt are identical"
            )
        self.actor.record("do_sample", KeyStatus.SAME, "msrl always samples")
        devices = self._engine_devices(world)
        tp = self.megatron.number("tensor_model_parallel_size")
        if tp and devices is not None and devices % tp == 0:
            origin = self.megatron.origin("tensor_model_parallel_size")
            self.translation.set("rollout.engine.tp", wrap(tp, origin))
            self.translation.set("rollout.engine.dp", wrap(devices // tp, origin))

    def _engine_devices(self, world: int | None) -> int | None:
        """Return the number of devices of the engines, and translate separate ones.

        They are separate unless the pool of actor_rollout has room for only one of both.
        """
        num_infer, pool = self.actor.number("num_gpus_for_infer"), self._pool_size("actor_rollout")
        entry = self.actor.get("num_gpus_for_infer")
        if entry is None or num_infer is None or world is None:
            return world
        if pool is not None and pool < world + num_infer:
            why = f"resource_pool.actor_rollout={pool}: engines share the devices of training"
            self.translation.record(entry, KeyStatus.PLACEMENT, why)
            return min(world, num_infer)
        self.translation.assign(entry, ["cluster.roles.rollout.devices"], num_infer)
        return num_infer

    def _pool_size(self, key: str) -> int | None:
        """Return the number of devices in a resource pool, such as [4]."""
        value = self.pool.value(key)
        items = as_list(value)
        if value is None or not all(type(item) is int for item in items):
            return None
        return sum(items)

    def _kl(self) -> None:
        """Translate kl_ctrl of algorithm, or kl_coef of the actor in the oldest files.

        GRPO never adapts the coefficient.
        """
        section, key = (self.kl, "kl_coef") if self.kl.get("kl_coef") else (self.actor, "kl_coef")
        if self.translation.algorithm == "ppo" and section.value(key):
            section.record(
                key,
                KeyStatus.UNSUPPORTED,
                "ppo subtracts the KL term from the rewards. "
                "Set it to 0 and use --set algo.kl.reward.coef=NUMBER.",
            )
        elif section.get(key):
            section.assign(key, ["algo.kl.loss.coef"], section.value(key), why="k3, in the loss")
            self.translation.set("algo.kl.loss.estimator", wrap("k3", section.origin(key)))
        if self.kl.value("type") not in (None, "fixed", "adaptive"):
            self.kl.add_error("type", "must be fixed or adaptive")
        for entry in self.kl:
            self.translation.record(entry, KeyStatus.DEAD, "GRPO never adapts the coefficient")
        self.actor.record("kl_coef", KeyStatus.DEAD, "overridden by algorithm.kl_ctrl.kl_coef")
        self.algorithm.record("kl_ctrl", KeyStatus.APPLIED, "key by key")

    def _rewards(self) -> None:
        if self.reward.value("verifier") is True:
            names, weights = (
                as_list(self.algorithm.value(key))
                for key in ("verifier_function", "verifier_weight")
            )
            if len(names) != len(weights):
                return self.algorithm.add_error(
                    "verifier_weight",
                    f"must have {len(names)} numbers, one per verifier of verifier_function",
                )
            put_sources(self.translation, self.algorithm, names, weights)
            self.reward.record(
                "verifier",
                KeyStatus.APPLIED,
                "reward.sources: verifier_function with verifier_weight",
            )
            return self.reward.record(
                "load", KeyStatus.DEAD, "with verifier: true, the verifiers score"
            )
        load = self.reward.get("load")
        for key in ("verifier_function", "verifier_weight"):
            self.algorithm.record(key, KeyStatus.DEAD, "read with reward.verifier: true only")
        if load is not None:
            return self.translation.assign(
                load, ["reward.sources"], [{"model": load.value, "engine": "megatron"}]
            )
        return None

    def _other_roles(self) -> None:
        """Translate the reference, the critic and the placement of roles."""
        load = self.ref.get("load")
        if load is not None and same_path(load.value, self.megatron.value("load")):
            self.translation.record(
                load, KeyStatus.APPLIED, "the reference starts from checkpoint.load"
            )
        elif load is not None:
            put_reference_weights(self.translation, load, load.value)
        self._separate("ref", "reference", self.ref, is_used=needs_reference(self.translation))
        has_model = (
            self.reward.value("verifier") is not True and self.reward.get("load") is not None
        )
        self._separate("reward", "reward", self.reward, is_used=has_model)
        _record_all(self.ref, KeyStatus.SAME, "the reference has the settings of the actor")
        _record_all(self.reward, KeyStatus.SAME, "the reward model has the settings of the actor")
        self._separate("critic", "critic", self.critic, is_used=self._has_critic())
        self._critic()
        self.pool.record(
            "actor_rollout",
            KeyStatus.PLACEMENT,
            "num_gpus_for_train and num_gpus_for_infer are the devices of training and rollout",
        )
        _record_all(self.pool, KeyStatus.PLACEMENT, "the model shares the devices of training")
        for keys in (self.actor, self.algorithm):
            entry = keys.get("missing_eos_penalty")
            if entry is not None:
                is_read = self.translation.algorithm == "ppo" and entry.value not in (0, 0.0)
                self.translation.record(
                    entry,
                    KeyStatus.UNSUPPORTED if is_read else KeyStatus.DEAD,
                    "read by ppo only, which subtracts it from the score",
                )

    def _separate(self, pool: str, role: str, keys: Keys, *, is_used: bool) -> None:
        """Translate the devices and the layout of a model with a separate resource pool."""
        size, entry = self._pool_size(pool), self.pool.get(pool)
        if entry is None or not is_used:
            return self.pool.record(pool, KeyStatus.PLACEMENT, "the run has no such model")
        if size is None:
            return self.translation.add_error(entry, "must be a list of numbers of devices, as [4]")
        self.translation.assign(entry, [f"cluster.roles.{role}.devices"], size)
        if role == "critic":
            report_other_ranks(self.translation, entry)
        return put_layout(self.translation, role, keys, self.megatron)

    def _has_critic(self) -> bool:
        is_ppo = self.translation.algorithm == "ppo"
        return is_ppo and self.algorithm.value("adv_estimator") == "gae"

    def _critic(self) -> None:
        """Translate weights, learning rate, lambda and value clip of the critic of ppo."""
        if not self._has_critic():
            record_unused(
                self.translation,
                [*self.critic, *([lam] if (lam := self.algorithm.get("lam")) else [])],
            )
            return
        self.algorithm.put("lam", "algo.advantage.lambda")
        for key in ("cliprange_value", "load"):
            if key == "cliprange_value" or self.critic.get(key):
                native = (
                    "algo.value.clip" if key == "cliprange_value" else "cluster.roles.critic.load"
                )
                self.critic.put(key, native)
        for key, policy_key in (
            ("critic_mini_batch_size", "ppo_mini_batch_size"),
            ("critic_update_epochs", "ppo_epochs"),
        ):
            entry = self.critic.get(key)
            if entry is not None:
                is_alike = entry.value == self.actor.value(policy_key)
                reason = "the critic has the mini-batches and epochs of the policy"
                self.translation.record(
                    entry, KeyStatus.SAME if is_alike else KeyStatus.UNSUPPORTED, reason
                )
        report_other_batches(self.critic, self.megatron, ("micro_batch_size",))
        assign_critic_optimizer(
            self.translation,
            (entry for entry in self.critic if entry.section == "megatron"),
            self.megatron,
        )
        _record_all(
            self.critic,
            KeyStatus.SAME,
            "the critic has the parallel layout and training settings of the actor",
        )


def _record_all(keys: Keys, status: KeyStatus, text: str) -> None:
    for entry in keys:
        keys.translation.record(entry, status, text)
