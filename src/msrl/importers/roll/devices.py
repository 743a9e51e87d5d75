"""Translation of ROLL's device_mapping and strategies to devices, parallel layout and engines."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msrl.config.sources import wrap
from msrl.importers.model_roles import needs_reference, put_layout
from msrl.importers.roll.training import put_recomputation, put_virtual_stages
from msrl.importers.sections import Keys
from msrl.importers.translation import KeyStatus

if TYPE_CHECKING:
    from msrl.importers.roll.worker import Worker

_NO_DEVICES = "must be a list of devices, such as list(range(0,16))"
_MAX_DEVICES = 1 << 20  # of a mapping, which is a list of their numbers
_TRAINERS = ("megatron_train", "deepspeed_train", "fsdp2_train")


def device_count(mapping: object) -> int | None:
    """Return the number of devices in `[0, 1]` or `list(range(0, 8)) + [9]`; None for other values.

    The text is parsed, not evaluated.

    >>> device_count("list(range(0,16))"), device_count([0, 1]), device_count("exit()")
    (16, 2, None)
    """
    devices = device_numbers(mapping)
    return None if devices is None else len(devices)


def device_numbers(mapping: object) -> list[int] | None:
    """Return the device numbers of a mapping; None for other values.

    >>> device_numbers("list(range(8,10)) + [3]")
    [8, 9, 3]
    """
    try:
        devices = _numbers(ast.parse(str(mapping), mode="eval").body)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return None
    return devices if len(devices) <= _MAX_DEVICES else None


def _numbers(node: ast.expr) -> list[int]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _numbers(node.left) + _numbers(node.right)
    if isinstance(node, ast.List):
        return [_number(item) for item in node.elts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "list" and len(node.args) == 1:
            return _numbers(node.args[0])
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            numbers = range(*(_number(argument) for argument in node.args))
            return list(numbers[: _MAX_DEVICES + 1])
    raise ValueError


def _number(node: ast.expr) -> int:
    value = ast.literal_eval(node)
    if not isinstance(value, int):
        raise ValueError
    return value


@dataclass(frozen=True)
class Devices:
    """Devices of a run.

    `world` is the number of devices of actor_train; `sizes` are the tensor, pipeline and context
    parallel sizes. Roles share the devices of actor_train, or have only other devices.
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
            train.own.add_error("device_mapping", _NO_DEVICES)
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
        self.put_training()
        self._engines()

    def put_training(self) -> None:
        """Translate the devices and the parallel layout of the trained model."""
        self._world()
        self._parallel_layout()

    def _world(self) -> None:
        own, top = self.train.own, self.top
        if self.world is None:
            return top.translation.errors.append(
                f"{top.translation.name}: {self.train.name}.device_mapping: missing. "
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
            why="the devices of training",
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
        """Translate the engines and their devices; vLLM replaces SGLang."""
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
        tp = own.number("num_gpus_per_worker")
        tp = (config.number("tensor_parallel_size") or 1) if tp is None else tp
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
        self._engine_devices(tp)
        config.apply_remaining()

    def _engine_devices(self, tp: int) -> None:
        """Translate the devices of actor_infer: separate ones, or some of the training's."""
        own = self.infer.own
        mapping = own.get("device_mapping")
        if mapping is None or self.world is None:
            return None
        num_devices = self.world if mapping.value is None else device_count(mapping.value)
        if num_devices is None:
            return own.add_error("device_mapping", _NO_DEVICES)
        if tp < 1:
            return own.add_error("num_gpus_per_worker", "must be 1 or more")
        if self.is_separate(self.infer):
            key, why = "cluster.roles.rollout.devices", "devices that training does not use"
            return own.assign("device_mapping", [key], num_devices, why=why)
        engines = max(1, min(num_devices, self.world) // tp)
        why = "engines share the devices of training"
        return own.assign("device_mapping", ["rollout.engine.dp"], engines, why=why)

    def is_separate(self, worker: Worker) -> bool:
        """Return True if a worker has devices that no other worker of the run has."""
        workers = {"actor_train": self.train, "actor_infer": self.infer}
        used_devices = {
            number
            for name, other in workers.items()
            if name != worker.name
            for number in device_numbers(_mapping(other)) or ()
        }
        devices = device_numbers(_mapping(worker))
        return bool(devices) and used_devices.isdisjoint(devices)

    def put_reference(self, reference: Worker) -> None:
        """Translate separate devices of the reference, if the run has one."""
        if needs_reference(self.top.translation):
            self.put_model("reference", reference)

    def put_model(self, role: str, worker: Worker) -> None:
        """Translate separate devices of a model, with its parallel layout."""
        translation, entry = self.top.translation, worker.own.get("device_mapping")
        if entry is None or not self.is_separate(worker):
            return
        count, policy = device_count(entry.value), self.train.sections["strategy_config"]
        translation.assign(entry, [f"cluster.roles.{role}.devices"], count)
        put_layout(translation, role, worker.sections["strategy_config"], policy)
        batch = worker.own.get("infer_batch_size")
        if batch is not None:
            translation.assign(batch, [f"cluster.roles.{role}.micro_batch"], batch.value)


def _mapping(worker: Worker) -> object:
    entry = worker.own.get("device_mapping")
    return None if entry is None else entry.value
