"""Readers for the arguments in a Megatron checkpoint file: parallel layout and origin.

`files.namespace` creates the arguments that msrl writes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from msrl.checkpoint.mcore.argument_table import contradictions
from msrl.errors import ManyErrors, MsrlError
from msrl.limits import whole_number
from msrl.models.hf_config import MAX_EXPERTS
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.shape import Shape

MAX_RANKS = 1 << 20


def num_local_experts(path: Path, args: argparse.Namespace) -> int:
    """Return the number of experts of a layer on one rank.

    Raises:
        MsrlError: The arguments do not record the number.
    """
    count = getattr(args, "num_experts", None) or getattr(args, "num_moe_experts", None)
    if not count:
        raise MsrlError(f"{path}: contains grouped experts, but its arguments lack num_experts")
    groups = layout_from_args(args).num_expert_groups
    is_valid = isinstance(count, int) and 0 < count <= MAX_EXPERTS and count % groups == 0
    if not is_valid:
        raise MsrlError(
            f"{path}: num_experts={count!r}: must be a multiple of the {groups} groups of experts, "
            f"at most {MAX_EXPERTS}"
        )
    return count // groups


def layout_from_args(args: argparse.Namespace) -> ParallelLayout:
    """Return the parallel layout recorded in a file's arguments.

    Missing arguments have the defaults of Megatron and MindSpeed.

    Raises:
        MsrlError: An argument has the wrong type.
    """
    arguments = vars(args)
    tp = _count(arguments, "tensor_model_parallel_size") or 1
    etp, extended = (
        _count(arguments, "expert_tensor_parallel_size"),
        bool(arguments.get("moe_tp_extend_ep")),
    )
    return ParallelLayout(
        tp=tp,
        pp=_count(arguments, "pipeline_model_parallel_size") or 1,
        vpp=_count(arguments, "num_layers_per_virtual_pipeline_stage"),
        num_layer_list=_numbers(arguments, "num_layer_list") or None,
        noop_layers=tuple(sorted(_numbers(arguments, "noop_layers"))),
        ep=_count(arguments, "expert_model_parallel_size") or 1,
        etp=None if extended or etp in (None, tp) else etp,
        moe_tp_extend_ep=extended,
    )


def _count(arguments: Mapping[str, object], name: str) -> int | None:
    """Return the value of a size, or None if it is not set."""
    value = arguments.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise MsrlError(
            f"checkpoint arguments: {name}={value!r}: must be an integer from 1 to {MAX_RANKS}"
        )
    return value


def _numbers(arguments: Mapping[str, object], name: str) -> tuple[int, ...]:
    """Return layer numbers of an argument, which is text until Megatron has parsed it."""
    value = arguments.get(name)
    if value is None or value == "":
        return ()
    numbers = value.split(",") if isinstance(value, str) else value
    if isinstance(numbers, list | tuple | set | frozenset):
        layers = [_layer_number(number) for number in numbers]
        if None not in layers:
            return tuple(layer for layer in layers if layer is not None)
    raise MsrlError(f"checkpoint arguments: {name}={value!r}: must be layer numbers")


def _layer_number(value: object) -> int | None:
    """Return a whole number or the number of a text; None for other values."""
    if isinstance(value, str):
        return whole_number(value.strip())
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def refuse_contradictions(
    path: Path, arguments: Mapping[str, object], shape: Shape, config: Path
) -> None:
    """Check that the arguments in file `path` agree with the model in `config`.

    Raises:
        MsrlError: An argument contradicts the config.
        ManyErrors: Several arguments do.
    """
    messages = [
        f"{path}: {entry.argument}={entry.recorded} contradicts {entry.key}={entry.expected} in "
        f"{config}. Name the config of this checkpoint's model (--hf-config) or correct it."
        for entry in contradictions(arguments, shape)
    ]
    if messages:
        raise ManyErrors(messages) if len(messages) > 1 else MsrlError(messages[0])


def refuse_schedule(path: Path, args: argparse.Namespace) -> None:
    """Raise MsrlError for MindSpeed's dualpipev schedule.

    A stage then holds two blocks of layers, one from the first half of the model and one from the
    second, instead of the layers of its stage number.
    """
    schedule = getattr(args, "schedules_method", None)
    if schedule == "dualpipev":
        raise MsrlError(
            f"{path}: --schedules-method dualpipev: this order of layers over stages is not "
            "supported. "
            "Convert the checkpoint to another schedule with MindSpeed."
        )


def load_folder(save: Path, args: argparse.Namespace) -> Path | None:
    """Return the folder that the training behind checkpoint `save` loaded (Megatron's `--load`).

    Return None if it no longer exists.
    """
    arguments = getattr(args, "load", None)
    folder = Path(arguments) if isinstance(arguments, str) and arguments else None
    if folder is None or not folder.is_dir() or folder.resolve() == save.resolve():
        return None
    return folder
