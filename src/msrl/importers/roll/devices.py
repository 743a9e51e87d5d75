"""ROLL's device_mapping and strategies: devices, the cut of training, and the engines."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msrl.config.sources import wrap
from msrl.importers.roll.training import put_virtual_stages
from msrl.importers.sections import Keys
from msrl.importers.translation import Fate

if TYPE_CHECKING:
    from msrl.importers.roll.files import Worker

_TRAINERS = ("megatron_train", "deepspeed_train", "fsdp2_train")


def device_count(mapping: object) -> int | None:
    """How many devices `[0, 1]` or `list(range(0, 8)) + [9]` names; None where it is neither. Nothing is evaluated.

    >>> device_count("list(range(0,16))"), device_count([0, 1]), device_count("exit()")
    (16, 2, None)
    """
    if isinstance(mapping, list):
        return len(mapping)  # pyright: ignore[reportUnknownArgumentType]
    try:
        return _length(ast.parse(str(mapping), mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def _length(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _length(node.left) + _length(node.right)
    if isinstance(node, ast.List):
        return len(node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "list" and len(node.args) == 1:
            return _length(node.args[0])
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            return len(range(*(ast.literal_eval(argument) for argument in node.args)))
    raise ValueError


@dataclass(frozen=True)
class Devices:
    """`world`: devices of actor_train, which every role shares; `sizes`: tensor, pipeline and context parallel."""

    top: Keys
    train: Worker
    infer: Worker
    world: int | None
    sizes: tuple[int, int, int]

    @staticmethod
    def of(top: Keys, train: Worker, infer: Worker) -> Devices:
        given = train.own.get("device_mapping")
        world = device_count(given.value) if given else None
        if given is not None and world is None:
            train.own.mistake("device_mapping", "must be a list of devices, such as list(range(0,16))")
        config = train.parts["strategy_config"]
        keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        tp, pp, cp = (config.number(key) or 1 for key in keys)
        return Devices(top, train, infer, world, (tp, pp, cp))

    @property
    def data_parallel(self) -> int | None:
        tp, pp, cp = self.sizes
        return self.world // (tp * pp * cp) if self.world is not None and self.world % (tp * pp * cp) == 0 else None

    def apply(self) -> None:
        self._world()
        self._cut()
        self._engines()

    def _world(self) -> None:
        own, top = self.train.own, self.top
        if self.world is None:
            return top.translation.errors.append(f"{top.translation.name}: actor_train.device_mapping: is missing: the devices of training")
        if self.data_parallel is None:
            tp, pp, cp = self.sizes
            return own.mistake("device_mapping", f"names {self.world} devices, no multiple of {tp} * {pp} * {cp} (tp, pp, cp)")
        node = top.number("num_gpus_per_node")
        nodes = self.world // node if node and self.world > node and self.world % node == 0 else 1
        own.take("device_mapping", ["cluster.devices_per_node"], self.world // nodes, why="all roles share them")
        if nodes > 1:
            top.translation.set("cluster.nodes", wrap(nodes, own.origin("device_mapping")))
        return top.say("num_gpus_per_node", Fate.TOOK, f"cluster.nodes: {nodes}")

    def _cut(self) -> None:
        args, config = self.train.parts["strategy_args"], self.train.parts["strategy_config"]
        name = args.value("strategy_name")
        if args.get("strategy_name") and name not in _TRAINERS:
            args.mistake("strategy_name", f"must be one of {', '.join(_TRAINERS)}: Megatron trains in each case")
        args.say("strategy_name", Fate.SAME, "megatron-core trains")
        args.say("strategy_config", Fate.TOOK, "key by key")
        for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            row = config.translation.table.row("strategy_config", key)
            assert row is not None
            config.take(key, row.to, config.value(key))
        sequence = config.get("sequence_parallel")
        if sequence is not None and self.sizes[0] == 1:
            config.say("sequence_parallel", Fate.OFF, "spreads over tensor-parallel ranks, of which there is one")
        put_virtual_stages(config, self.sizes[1], self.top.value("pretrain"))
        config.apply_rest()

    def _engines(self) -> None:
        """Engines stand on the devices of training; SGLang's are vLLM's here."""
        own, config, args = self.infer.own, self.infer.parts["strategy_config"], self.infer.parts["strategy_args"]
        args.say("strategy_name", Fate.TOOK if args.value("strategy_name") == "vllm" else Fate.SAME, "vLLM generates")
        args.say("strategy_config", Fate.TOOK, "key by key")
        tp = own.number("num_gpus_per_worker") or config.number("tensor_parallel_size") or 1
        key, keys = ("num_gpus_per_worker", own) if own.get("num_gpus_per_worker") else ("tensor_parallel_size", config)
        keys.take(key, ["rollout.engine.tp"], tp) if keys.get(key) else None
        named = device_count(own.value("device_mapping")) if own.get("device_mapping") else None
        if self.world is not None:
            engines = max(1, min(named or self.world, self.world) // tp)
            why = "engines share the devices of training"
            own.take("device_mapping", ["rollout.engine.dp"], engines, why=why) if own.get("device_mapping") else None
        config.apply_rest()
