"""What the arguments in a Megatron checkpoint file tell of its cut and its origin;
`mcore.namespace` writes ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from msrl.errors import MsrlError
from msrl.models.parallel_layout import ParallelLayout


def num_local_experts(path: Path, args: argparse.Namespace) -> int:
    count = getattr(args, "num_experts", None) or getattr(args, "num_moe_experts", None)
    if not count:
        raise MsrlError(
            f"{path}: holds grouped experts, but its args do not say how many experts a layer has (num_experts)"
        )
    return count // cut_of_args(args).num_expert_groups


def cut_of_args(args: argparse.Namespace) -> ParallelLayout:
    """The cut that a file's arguments tell; Megatron's and MindSpeed's defaults stand in for what
    they do not.

    Raises MsrlError for an argument that is no number where one belongs.
    """
    said = vars(args)
    tp = _count(said, "tensor_model_parallel_size") or 1
    etp, extended = _count(said, "expert_tensor_parallel_size"), bool(said.get("moe_tp_extend_ep"))
    return ParallelLayout(
        tp=tp,
        pp=_count(said, "pipeline_model_parallel_size") or 1,
        vpp=_count(said, "num_layers_per_virtual_pipeline_stage"),
        num_layer_list=_numbers(said, "num_layer_list") or None,
        noop_layers=tuple(sorted(_numbers(said, "noop_layers"))),
        ep=_count(said, "expert_model_parallel_size") or 1,
        etp=None if extended or etp in (None, tp) else etp,
        moe_tp_extend_ep=extended,
    )


def _count(said: Mapping[str, object], name: str) -> int | None:
    """A number of an argument's; None where it is not set."""
    value = said.get(name)
    if value is not None and not isinstance(value, int):
        raise MsrlError(
            f"the checkpoint's arguments say {name}={value!r}, which is no whole number"
        )
    return value


def _numbers(said: Mapping[str, object], name: str) -> tuple[int, ...]:
    """Layer numbers as arguments hold them: text before Megatron has parsed it, a collection after.
    """
    value = said.get(name)
    parts = value.split(",") if isinstance(value, str) and value else value
    try:
        return (
            tuple(int(part) for part in parts)
            if isinstance(parts, list | tuple | set | frozenset)
            else ()
        )
    except (TypeError, ValueError) as error:
        raise MsrlError(
            f"the checkpoint's arguments say {name}={value!r}, which are no layers"
        ) from error


def refuse_schedule(path: Path, args: argparse.Namespace) -> None:
    """Raises MsrlError where a stage holds other layers than its number tells: MindSpeed's
    dualpipev gives it one block of each half.
    """
    schedule = getattr(args, "schedules_method", None)
    if schedule == "dualpipev":
        message = "its stages hold the layers of a V (one block from the front and one from the back), which is not read"
        raise MsrlError(
            f"{path}: was saved with --schedules-method dualpipev: {message}; convert it with MindSpeed to one without"
        )


def loaded_from(save: Path, args: argparse.Namespace) -> Path | None:
    """The folder that the training which wrote the checkpoint `save` took its weights from
    (Megatron's `--load`), if it is still there.
    """
    said = getattr(args, "load", None)
    folder = Path(said) if isinstance(said, str) and said else None
    return (
        folder
        if folder is not None and folder.is_dir() and folder.resolve() != save.resolve()
        else None
    )
