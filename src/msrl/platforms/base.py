"""What a device is to msrl: one contract, one file per platform. Device names appear in this package and nowhere else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

# Versions of what every platform needs besides; pyproject's extra `engine`.
COMMON_STACK = {"ray": ">=2.54,<2.61", "datasets": ">=3,<6", "math-verify": ">=0.8,<0.10", "safetensors": ">=0.4.5"}


class VarlenAttention(Protocol):
    """Causal attention over packed sequences in one kernel, differentiable.

    query [Q, h, d] and key, value [K, g, d] hold the sequences end to end, up to `query_ends` and `key_ends` (cumulative lengths). The
    queries of a sequence are its last ones: each sees the keys up to its own, of which the newest `window`, where that is set.
    """

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: tuple[int, ...], key_ends: tuple[int, ...],
        scale: float, window: int | None,
    ) -> torch.Tensor: ...  # fmt: skip


class Platform(ABC):
    """One kind of device. `prepare` is the first line of every worker process, before any import of Megatron or vLLM."""

    name: str
    collective_backend: str  # of torch.distributed
    ray_resource: str  # the logical resource that an actor asks for, one per device
    deterministic_environment: ClassVar[Mapping[str, str]] = {}  # what a process needs before it starts for `run.deterministic`
    visible_devices_variable: str  # the environment variable that hides devices from a process; "" where there is none
    overlap_communication: bool  # whether overlapping gradient reduction with the backward pass gains anything
    elements_at_once: int = 1 << 26  # of a temporary tensor that is made piece by piece: small enough to be nothing beside the logits
    upcast_attention: bool = False  # whether torch's own attention computes halves faster as float32
    reduction_dtype: str = "float64"  # the widest type that the back end sums over ranks
    shares_main_memory: bool = False  # whether the device's memory is the machine's own
    stack: ClassVar[Mapping[str, str]] = (
        COMMON_STACK  # packages and the versions that are known to fit together, as the README's table has them
    )
    libraries: tuple[str, ...] = ("torch", "transformers", "ray", "megatron.core", "vllm")  # what the workers import
    engine_head_dims: tuple[int, ...] = ()  # sizes of a head that vLLM has attention kernels for; empty where it decides by itself

    @abstractmethod
    def missing(self) -> str | None:
        """What this machine lacks for the platform, as one sentence with the cure; None when nothing is missing. Imports nothing heavy."""

    @abstractmethod
    def device_count(self) -> int:
        """How many devices this machine offers. On CPU a device is a process: as many as there are cores."""

    def memory_bytes(self) -> int | None:
        """Memory of one device, in bytes; where devices share the machine's, all of it. None where it cannot be told."""
        return None

    def peak_flops(self, dtype: str) -> float | None:
        """Operations per second of one device in dense matrix products of that type, by its data sheet; None where it is not known."""
        return None

    @abstractmethod
    def prepare(self) -> None:
        """Make this process ready to import Megatron. Raises MsrlError that says what is missing."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of a rank; selects it for the process."""

    def worker_environment(self, num_local_ranks: int, *, spans_machines: bool = False) -> Mapping[str, str]:
        """Environment of a training process, to be set before it starts; so many of them are on its machine, and on others too or not."""
        return {}

    def engine_environment(self, num_local_devices: int = 1) -> Mapping[str, str]:
        """Environment that vLLM needs before it is imported, where so many devices of a machine generate at once."""
        return {}

    def engine_arguments(self) -> Mapping[str, Any]:
        """Arguments that `vllm.LLM` needs on this platform."""
        return {}

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> VarlenAttention | str:
        """The platform's fused attention for such heads; or why it has none, "" where that is as it should be."""
        return ""

    def token_multiple(self, dtype: torch.dtype) -> int:
        """What counts of tokens are padded to a multiple of: where kernels are compiled for each shape, few shapes should come again and
        again. 1 where they are not."""
        return 1

    def seed(self, seed: int) -> None:
        """Seed every generator of torch in this process."""
        import torch

        torch.manual_seed(seed)

    def count_of_updates(self, updates: int) -> int | torch.Tensor:
        """How a fused AdamW of the platform's libraries, which counts them once for all parameters, wants the count: Apex and Transformer
        Engine a number."""
        return updates

    def random_state(self) -> torch.Tensor | None:
        """The state of the generator of this process's device, bytes on the host; None where torch's own is that of the device."""
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Go on from what `random_state` gave on a device of this kind."""
        raise NotImplementedError

    def synchronize(self) -> None:  # noqa: B027 - a platform without queues has nothing to wait for
        """Wait until the device has done what it was given, so that a clock can be read."""
