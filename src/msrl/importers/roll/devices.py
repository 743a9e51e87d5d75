"""Translation of ROLL's device_mapping and strategies to devices, parallel layout and engines."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msrl.config.sources import wrap
from msrl.importers.roll.training import put_recomputation, put_virtual_stages
from msrl.importers.sections import Keys
from msrl.importers.translation import KeyStatus

if TYPE_CHECKING:
    from msrl.importers.roll.files import Worker

_TRAINERS = ("megatron_train", "deepspeed_train", "fsdp2_train")


def device_count(mapping: object) -> int | None:
    """Return the number of devices in `[0, 1]` or `list(range(0, 8)) + [9]`; None for other values.

    The text is parsed, not evaluated.

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
    """Devices of a run.

    `world` is the number of devices of actor_train, which all roles share; `sizes` are the tensor,
    pipeline and context parallel sizes.
    """

    top: Keys
    train: Worker
    infer: Worker
    world: int | None
    sizes: tuple[int, int, int]

    @staticmethod
    def from_keys(top: Keys, train: Worker, infer: Worker) -> Devices:
        entry = train.own.get("device_mapping")
        world = device_count(entry.value) if entry else None
        if entry is not None and world is None:
            train.own.add_error(
                "device_mapping", "must be a list of devices, such as list(range(0,16))"
            )
        config = train.sections["strategy_config"]
        keys = (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
        tp, pp, cp = (config.number(key) or 1 for key in keys)
        cp *= train.sections["model_args"].number("ulysses_size") or 1
        return Devices(top, train, infer, world, (tp, pp, cp))

    @property
    def data_parallel(self) -> int | None:
        tp, pp, cp = self.sizes
        return (
            self.world // (tp * pp * cp)
            if self.world is not None and self.world % (tp * pp * cp) == 0
            else None
        )

    def apply(self) -> None:
        self._world()
        self._parallel_layout()
        self._engines()

    def _world(self) -> None:
        own, top = self.train.own, self.top
        if self.world is None:
            return top.translation.errors.append(
                f"{top.translation.name}: actor_train.device_mapping: missing. "
                "Set the devices of training."
            )
        if self.data_parallel is None:
            tp, pp, cp = self.sizes
            return own.add_error(
                "device_mapping",
                f"{self.world} devices are not a multiple of tp {tp} * pp {pp} * cp {cp}",
            )
        node = top.number("num_gpus_per_node")
        nodes = self.world // node if node and self.world > node and self.world % node == 0 else 1
        own.assign(
            "device_mapping",
            ["cluster.devices_per_node"],
            self.world // nodes,
            why="all roles share them",
        )
        if nodes > 1:
            top.translation.set("cluster.nodes", wrap(nodes, own.origin("device_mapping")))
        return top.record("num_gpus_per_node", KeyStatus.APPLIED, f"cluster.nodes: {nodes}")

    def _parallel_layout(self) -> None:
        args, config = self.train.sections["strategy_args"], self.train.sections["strategy_config"]
        name = args.value("strategy_name")
        if args.get("strategy_name") and name not in _TRAINERS:
            args.add_error(
                "strategy_name",
                f"must be one of {', '.join(_TRAINERS)}; msrl trains with Megatron in each case",
            )
        args.record("strategy_name", KeyStatus.SAME, "msrl trains with megatron-core")
        args.record("strategy_config", KeyStatus.APPLIED, "key by key")
        for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            row = config.translation.table.row("strategy_config", key)
            assert row is not None
            config.assign(key, row.to, config.value(key))
        sequence = config.get("sequence_parallel")
        if sequence is not None and self.sizes[0] == 1:
            config.record(
                "sequence_parallel",
                KeyStatus.OFF,
                "sequence parallelism has no effect with one tensor-parallel rank",
            )
        put_recomputation(config, args, self.train.sections["model_args"])
        put_virtual_stages(config, self.sizes[1], self.top.value("pretrain"))
        config.apply_remaining()

    def _engines(self) -> None:
        """Translate the engines, which share the training devices; vLLM replaces SGLang."""
        own, config, args = (
            self.infer.own,
            self.infer.sections["strategy_config"],
            self.infer.sections["strategy_args"],
        )
        args.record(
            "strategy_name",
            KeyStatus.APPLIED if args.value("strategy_name") == "vllm" else KeyStatus.SAME,
            "msrl generates with vLLM",
        )
        args.record("strategy_config", KeyStatus.APPLIED, "key by key")
        tp = own.number("num_gpus_per_worker") or config.number("tensor_parallel_size") or 1
        if own.get("num_gpus_per_worker"):
            text = "the engine has num_gpus_per_worker devices"
            config.record("tensor_parallel_size", KeyStatus.SAME, text)
        key, keys = (
            ("num_gpus_per_worker", own)
            if own.get("num_gpus_per_worker")
            else ("tensor_parallel_size", config)
        )
        if keys.get(key):
            keys.assign(key, ["rollout.engine.tp"], tp)
        mapping = own.get("device_mapping")
        if mapping is not None and self.world is not None:
            num_devices = device_count(mapping.value) or self.world
            engines = max(1, min(num_devices, self.world) // tp)
            why = "engines share the devices of training"
            own.assign("device_mapping", ["rollout.engine.dp"], engines, why=why)
        config.apply_remaining()
