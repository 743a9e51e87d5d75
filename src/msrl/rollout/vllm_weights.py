"""Transfer of new weights to vLLM's workers.

Weights are passed directly inside this process, or through shared memory to other processes. vLLM
imports `WeightReceiver` by its name and adds it to the bases of its worker class; nothing here
imports vllm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.models.entries import stack_sizes
from msrl.models.families import load_shape
from msrl.platforms import bind_stores
from msrl.rollout.engine import checked_weights, expected_weights
from msrl.rollout.images.processors import prepare_process
from msrl.rollout.vllm_products import ProductChanges
from msrl.rollout.vllm_recording import ForwardRecorder
from msrl.rollout.vllm_routes import RouteRecorder
from msrl.rollout.vllm_sampler import SamplerChanges
from msrl.rollout.weights.assembly import Assembler
from msrl.rollout.weights.buckets import Shard
from msrl.rollout.weights.channel import ChannelAddress, WeightChannel, receive
from msrl.rollout.weights.digest import TensorDigest, record_digests

if TYPE_CHECKING:
    from torch import Tensor

_VERSION = 0  # of a channel between an engine and its own workers


class WeightReceiver(ForwardRecorder, ProductChanges, RouteRecorder, SamplerChanges):
    """Methods that vLLM adds to its worker (`worker_extension_cls`); `self` is that worker."""

    model_runner: Any
    _loaded_digests: dict[str, TensorDigest]
    _awake_parameters: tuple[tuple[Any, str, Any], ...]
    _awake_dispatchers: tuple[tuple[Tensor, Tensor], ...]
    _addresses: dict[str, tuple[int, tuple[int, ...]]]

    def record_addresses(self) -> None:
        """Remember the addresses of the model's tensors, which captured graphs read."""
        self._addresses = _addresses(self.model_runner.get_model())

    def moved_tensors(self) -> list[str]:
        """Return the names of the tensors that are no longer where `record_addresses` saw them."""
        current = _addresses(self.model_runner.get_model())
        return [name for name, place in self._addresses.items() if current.get(name) != place]

    def keep_parameters(self) -> None:
        """Remember the parameters of the model before its memory is released."""
        self._awake_dispatchers = tuple(
            (tensor, tensor.to("cpu", copy=True)) for tensor in _dispatcher_tensors()
        )
        self._awake_parameters = tuple(
            (module, name, parameter)
            for module in self.model_runner.get_model().modules()
            for name, parameter in module.named_parameters(recurse=False)
        )

    def restore_parameters(self) -> None:
        """Put back parameters that were replaced when the memory returned at the same addresses.

        `NPUWorker.wake_up` of vllm-ascend 0.23 replaces the weights of experts by transposed views
        (vllm-ascend issue 12226). Neither generation nor `reload_weights` can use them.
        """
        for module, name, parameter in self._awake_parameters:
            if getattr(module, name, None) is not parameter:
                setattr(module, name, parameter)
        # Level 2 discards them, and no load of weights brings them back (vllm-ascend pull request
        # 12651: `expert_ids_per_ep_rank`).
        for tensor, values in self._awake_dispatchers:
            tensor.copy_(values)
        self._awake_parameters, self._awake_dispatchers = (), ()

    def receive_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load Hugging Face weights in place and post-process them as at startup."""
        _unpack_experts(self.model_runner.get_model())
        self.model_runner.reload_weights(weights_iterator=tensors)
        _repack_tied_head(self.model_runner.get_model())

    def load_channel(
        self, address: tuple[str, str], model_dir: str, timeout_s: float, verify: bool
    ) -> dict[str, TensorDigest]:
        """Load the weights that another process of this machine sends under their file names.

        Returns:
            Their digests, if requested.
        """
        shape = load_shape(Path(model_dir))
        buckets = receive(ChannelAddress(*address), _VERSION, timeout_s)
        tensors = Assembler(shape).assemble(buckets, _VERSION)
        return self.load_tensors(tensors, model_dir, verify)

    def load_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], model_dir: str, verify: bool
    ) -> dict[str, TensorDigest]:
        """Load Hugging Face weights; return their digests, if requested."""
        shape = load_shape(Path(model_dir))
        digests = dict[str, TensorDigest]()
        checked = checked_weights(tensors, expected_weights(shape))
        recorded = record_digests(checked, stack_sizes(shape), digests)
        self.receive_weights(recorded if verify else checked)
        return digests

    def begin_digests(self, model_dir: str) -> None:
        """Begin to compute digests of all weights that are loaded into the model.

        vLLM's weight transfer engines pass received tensors to `model.load_weights`.
        """
        model, shape = self.model_runner.get_model(), load_shape(Path(model_dir))
        digests = self._loaded_digests = dict[str, TensorDigest]()
        load = model.load_weights
        stacks = stack_sizes(shape)
        # An attribute of the instance: `end_digests` deletes it, and the method is visible again.
        model.load_weights = lambda weights: load(record_digests(weights, stacks, digests))

    def end_digests(self) -> dict[str, TensorDigest]:
        """Return the digests since `begin_digests`."""
        del self.model_runner.get_model().load_weights  # the method of the class remains
        return self._loaded_digests


def send_to_workers(
    channel: WeightChannel, tensors: Iterable[tuple[str, Tensor]], num: int
) -> None:
    """Send tensors under their file names to `num` workers that call `load_channel`."""
    shards = (Shard(name, 0, 1, tensor) for name, tensor in tensors)
    channel.send(shards, _VERSION, num)


def _addresses(model: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return address and strides of all tensors of a model, by name.

    These are parameters, buffers, and tensors that are attributes of modules and of their attention
    backends (`impl`), such as the absorbed matrices of latent attention.
    """
    import torch

    addresses = dict[str, tuple[int, tuple[int, ...]]]()
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers, **vars(module)}
        backend = getattr(module, "impl", None)
        own |= {f"impl.{name}": value for name, value in getattr(backend, "__dict__", {}).items()}
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                addresses[f"{path}.{name}".lstrip(".")] = value.data_ptr(), value.stride()
    return addresses


def _dispatcher_tensors() -> list[Tensor]:
    """Return the tensors with which vllm-ascend dispatches tokens to experts.

    They are no part of the model. Reads `_MoECommMethods` of vllm-ascend 0.23 and later
    (ops/fused_moe/moe_comm_method.py), which has one dispatcher for each way to communicate.
    """
    import torch

    module = sys.modules.get("vllm_ascend.ops.fused_moe.moe_comm_method")
    if module is None:
        return []
    methods = [method for method in module._MoECommMethods.values() if method is not None]
    owners = [owner for method in methods for owner in (method, method.token_dispatcher)]
    return [value for owner in owners for value in vars(owner).values() if torch.is_tensor(value)]


def _unpack_experts(model: Any) -> None:
    """Discard the CPU kernel of experts, so that a reload creates it again.

    The kernel's creation packs the experts' weights. A reload with an existing kernel would treat
    unpacked weights as packed.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if (
            getattr(method, "moe_kernel", None) is not None
            and next(module.parameters()).device.type == "cpu"
        ):
            method.moe_kernel = None


def _repack_tied_head(model: Any) -> None:
    """Repack the output layer's weight on CPU if the embedding is tied.

    The CPU layer multiplies by a packed copy of its weight, which a reload does not update in that
    case. The model may be the language model of another one.
    """
    # A tied head has the embedding's name too, under which it would be listed first.
    modules = model.named_modules(remove_duplicate=False)
    for head in [module for name, module in modules if name.rpartition(".")[2] == "lm_head"]:
        if hasattr(head, "cpu_linear") and head.weight.numel():
            head.quant_method.process_weights_after_loading(head)


if "torch" in sys.modules:  # in a process of vLLM, which creates its groups after this import
    bind_stores()
    prepare_process()
