"""Platform interface. Device names appear in this package only, in one module per platform."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from msrl.errors import MsrlError

if TYPE_CHECKING:
    import torch

# Versions of packages that every platform needs; pyproject's extra `engine`.
COMMON_STACK = {
    "ray": ">=2.54,<2.61",
    "datasets": ">=3,<6",
    "math-verify": ">=0.8,<0.10",
    "safetensors": ">=0.4.5",
}
# The extras install 0.16.1. `nox -s megatron-next` runs tests with a newer version.
MEGATRON_CORE = ">=0.16.1,<0.20,!=0.17.*"


def is_installed(package: str) -> bool:
    """Return whether `package` can be imported; a folder without `__init__.py` is no package.

    Python imports such a folder as a namespace package, so one of the same name in the working
    directory would pass for an installation.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the parent of a submodule is not installed
        return False
    return spec is not None and spec.origin is not None


# Level of a finding of `msrl doctor`.
Level = Literal["ok", "note", "wrong"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Finding about the platform's software; `text` has the state and, if it is wrong, a remedy."""

    level: Level
    what: str
    text: str


# Processes of a run that use collectives on the same device.
Role = Literal["trainer", "engine"]


@dataclass(frozen=True, slots=True)
class VariableOverride:
    """Environment variable whose inherited value an engine must not use, and its replacement."""

    name: str
    value: str
    reason: str


class VarlenAttention(Protocol):
    """Differentiable causal attention over packed sequences in one kernel.

    Q and K are the numbers of query and key tokens, h and g the numbers of query and key heads, d
    is the channels per head. The sequences are concatenated. The queries of a sequence are its last
    tokens: each query attends to the keys up to its position, or to the last `window` of them.
    """

    def __call__(
        self,
        query: torch.Tensor,  # [Q, h, d]
        key: torch.Tensor,  # [K, g, d]
        value: torch.Tensor,  # [K, g, d]
        query_ends: tuple[int, ...],  # cumulative lengths of the sequences in `query`
        key_ends: tuple[int, ...],  # cumulative lengths of the sequences in `key` and `value`
        scale: float,
        window: int | None,
    ) -> torch.Tensor: ...  # [Q, h, d]


class DeltaRule(Protocol):
    """Differentiable gated delta rule (arXiv:2412.06464) over packed sequences in one kernel.

    N is the number of tokens, g the number of key heads and r that of the value heads of each, k
    and v are the channels of a head. Every sequence starts with an empty state. The kernel scales
    queries and keys to length 1, and queries by 1 / sqrt(k).
    """

    def __call__(
        self,
        query: torch.Tensor,  # [N, g, k]
        key: torch.Tensor,  # [N, g, k]
        value: torch.Tensor,  # [N, g, r, v]
        strength: torch.Tensor,  # [N, g, r]
        log_decay: torch.Tensor,  # [N, g, r] float32
        ends: tuple[int, ...],  # cumulative lengths of the sequences
    ) -> torch.Tensor: ...  # [N, g, r, v]


@dataclass(frozen=True, slots=True)
class WeightEngine:
    """A weight transfer engine of vLLM, which moves weights from device to device.

    Attributes:
        name: Its name in vLLM's registry.
        module: Module of its classes.
        prefix: Prefix of the names of these classes.
    """

    name: str
    module: str
    prefix: str


class Platform(ABC):
    """One kind of device.

    Every worker process calls `prepare` before it imports Megatron or vLLM.
    """

    name: str
    collective_backend: str  # of torch.distributed
    ray_resource: str  # the logical resource that an actor requests, one per device
    # The environment variable that hides devices from a process, "" if there is none.
    visible_devices_variable: str
    # True if overlapping gradient reduction with the backward pass improves the speed.
    overlap_communication: bool
    # Environment variables that `run.deterministic` needs before a process starts.
    deterministic_environment: ClassVar[Mapping[str, str]] = {}
    # Size of temporary tensors in chunked computations: small compared to the logits.
    elements_at_once: int = 1 << 26
    upcast_attention: bool = False  # torch's attention is faster in float32 than in 16 bits
    reduction_dtype: str = "float64"  # the widest type that the back end can sum over ranks
    shares_main_memory: bool = False  # the device's memory is the main memory
    shows_routes: bool = False  # its engines run vLLM's first model runner
    is_eager: bool = False  # by default its engines neither capture graphs nor compile
    # Its engines may capture graphs of weights that change only if no load moves a tensor.
    checks_addresses: bool = False
    forks_ranks: bool = False  # a process that has imported Megatron may be forked into ranks
    # Packages with the versions that were tested together, as in the README's table.
    stack: ClassVar[Mapping[str, str]] = COMMON_STACK
    # Modules that the workers import.
    libraries: tuple[str, ...] = ("torch", "transformers", "ray", "megatron.core", "vllm")
    # Files of vLLM with the attention backends of this platform; "" if vLLM selects one at start.
    attention_backend: str = ""
    latent_attention_backend: str = ""  # of models with latent attention (MLA)
    has_sparse_attention: bool = True  # vLLM has kernels of attention to chosen keys
    groups_sigmoid_scores: bool = False  # vLLM scores experts by sigmoid only with groups of them
    # The dtype for which vLLM has kernels of gated delta networks; None: every dtype.
    delta_network_dtype: str | None = None
    # Head sizes of gated delta networks for which vLLM has kernels; (): every size.
    delta_head_sizes: tuple[int, ...] = ()
    # vLLM's weight transfer engines by the value of rollout.weights.transfer.
    weight_engines: ClassVar[Mapping[str, WeightEngine]] = {
        "ipc": WeightEngine("ipc", "vllm.distributed.weight_transfer.ipc_engine", "IPC"),
        "nccl": WeightEngine("nccl", "vllm.distributed.weight_transfer.nccl_engine", "NCCL"),
    }

    @abstractmethod
    def missing(self) -> str | None:
        """Return what this machine lacks for the platform and how to install it, in one line.

        Returns None if nothing is missing. Does not import large packages.
        """

    def diagnose(self) -> list[Diagnosis]:
        """Return findings about the platform's software below its Python packages."""
        return []

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices. On CPU a device is a process, one per core."""

    def memory_bytes(self) -> int | None:
        """Return the memory of one device in bytes, or None if it is unknown.

        For devices that use the main memory, this is the total main memory.
        """
        return None

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak FLOP/s of dense matrix products of one device, or None if unknown.

        The number comes from the data sheet of the device.
        """
        return None

    @abstractmethod
    def prepare(self) -> None:
        """Prepare this process for the import of Megatron.

        Raises:
            MsrlError: A package is missing.
        """

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Return the device of a rank and select it for the process."""

    def weight_engine(self, transfer: str) -> WeightEngine:
        """Return vLLM's weight transfer engine for a value of `rollout.weights.transfer`.

        Raises:
            MsrlError: The platform has none.
        """
        if transfer not in self.weight_engines:
            raise MsrlError(
                f"rollout.weights.transfer={transfer}: not supported on {self.name}. "
                "Set it to auto."
            )
        return self.weight_engines[transfer]

    def worker_environment(
        self, num_local_ranks: int, *, spans_machines: bool = False
    ) -> Mapping[str, str]:
        """Return the environment variables of a training process, to be set before it starts.

        Args:
            num_local_ranks: number of training processes on the machine.
            spans_machines: the ranks run on several machines.
        """
        return {}

    def network_environment(self, interface: str) -> Mapping[str, str]:
        """Return the environment variables that select the network interface of collectives.

        Without them, the libraries use the address of the host name, which on Debian is a loopback
        address.
        """
        return {"GLOO_SOCKET_IFNAME": interface}

    def engine_environment(
        self, num_local_devices: int = 1, *, is_eager: bool = True
    ) -> Mapping[str, str]:
        """Return the environment variables that vLLM needs before it is imported.

        Args:
            num_local_devices: number of devices of the machine that generate at the same time.
            is_eager: vLLM neither captures graphs nor compiles.
        """
        return {}

    def collective_environment(
        self, role: Role, *, timeout_s: float, variables: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Return the environment variables of a role's collectives: time limits and ports.

        Args:
            role: trainers and engines use the same devices, and must not use the same ports.
            timeout_s: time limit of a collective in seconds.
            variables: variables that the user has set, which may determine others.
        """
        return {}

    def engine_overrides(self, environment: Mapping[str, str]) -> tuple[VariableOverride, ...]:
        """Return the variables of `environment` that an engine must not inherit as they are."""
        return ()

    def engine_arguments(self, *, weights_change: bool = False) -> Mapping[str, Any]:
        """Return the arguments that `vllm.LLM` needs on this platform.

        Args:
            weights_change: the weights of the engine are updated during the run.
        """
        return {}

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> VarlenAttention | str:
        """Return the fused attention of the platform, or the reason why it is not available.

        The reason is "" if the platform has no fused attention at all.
        """
        return ""

    def delta_rule(self, dtype: torch.dtype, key_head_dim: int) -> DeltaRule | None:
        """Return the fused gated delta rule of the platform, or None."""
        return None

    def grouped_product(
        self,
        x: torch.Tensor,  # [n, i], n tokens sorted by expert
        matrices: Sequence[torch.Tensor],  # each [i, o]
        counts: Sequence[int],  # of the tokens of each expert, their sum is n
    ) -> torch.Tensor | None:  # [n, o]
        """Return the products of the tokens of each expert with its matrix in one kernel.

        Returns None if the platform has no kernel for these tensors. Gradients are not recorded.
        """
        return None

    def token_multiple(self, dtype: torch.dtype) -> int:
        """Return the multiple to which token counts are padded.

        It is larger than 1 where kernels are compiled per shape, so that few shapes occur.
        """
        return 1

    def seed(self, seed: int) -> None:
        """Seed all random generators of torch in this process."""
        import torch

        torch.manual_seed(seed)

    def count_of_updates(self, updates: int) -> int | torch.Tensor:
        """Return the update count in the type that the platform's fused AdamW expects.

        These optimizers have one count for all parameters. Apex and Transformer Engine use a
        number.
        """
        return updates

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's random generator as bytes on the host.

        Returns None if the device uses torch's default generator.
        """
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore a state that `random_state` returned on a device of this kind."""
        raise NotImplementedError

    def profiler(self, trace: Path) -> AbstractContextManager[Any]:
        """Return a profiler of the process that writes a trace to a path when it ends.

        The path has no suffix. torch.profiler writes one file, `trace.json`, for Perfetto and
        chrome://tracing.
        """
        from torch.profiler import ProfilerActivity, profile, supported_activities

        kinds = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
        return profile(
            activities=[kind for kind in kinds if kind in supported_activities()],
            record_shapes=True,
            on_trace_ready=lambda result: result.export_chrome_trace(f"{trace}.json"),
        )

    def synchronize(self) -> None:  # noqa: B027 - a platform without queues has nothing to wait for
        """Wait for all queued operations of the device, so that durations can be measured."""


class DevicePlatform(Platform):
    """Platform whose devices have memory and queues of their own, and a module in torch."""

    overlap_communication = True

    @abstractmethod
    def module(self) -> Any:
        """Return the module of the devices, such as `torch.cuda`."""

    def device_count(self) -> int:
        return int(self.module().device_count())

    def memory_bytes(self) -> int | None:
        if not self.device_count():
            return None
        return int(self.module().get_device_properties(0).total_memory)

    def device(self, local_rank: int) -> torch.device:
        import torch

        index = local_rank % self.device_count()
        self.module().set_device(index)
        return torch.device(self.name, index)

    def random_state(self) -> torch.Tensor | None:
        return self.module().get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        self.module().set_rng_state(state)

    def synchronize(self) -> None:
        self.module().synchronize()
