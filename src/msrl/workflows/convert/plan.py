"""Plan of a conversion to mcore, from the model's config: files, parameters, bytes and padding."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from msrl.checkpoint.atomic_folder import nearest_existing
from msrl.checkpoint.convert import ITERATION, McoreTarget, ruled_plan
from msrl.checkpoint.distributed.write import tensor_file
from msrl.checkpoint.dtypes import BY_HF_NAME, CHOICES
from msrl.checkpoint.mcore.files import iteration_dir, rank_file
from msrl.checkpoint.mcore.names import Naming
from msrl.checkpoint.rank_shapes import Plan, RankPlan
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.config.schema import Config, ConvertConfig
from msrl.limits import print_line
from msrl.models.families import load_shape, num_parameters
from msrl.models.paths import config_dir
from msrl.models.shape import Shape
from msrl.plan.derived import layout_from
from msrl.tracking.progress import amount_text
from msrl.workflows.convert.inspection import print_table

_FROM_HF = "hf2mcore"


def target_from(convert: ConvertConfig) -> McoreTarget:
    """Return the mcore checkpoint to write, from the options of the conversion."""
    naming = Naming(
        te=convert.names in ("te", "te-converter"),
        grouped=convert.moe_grouped_gemm,
        legacy=convert.names == "legacy",
        converter=convert.names == "te-converter",
        whole_mixers=convert.names == "mindspeed",
    )
    return McoreTarget(
        layout_from(convert),
        CHOICES[convert.dtype],
        naming,
        convert.pad_vocab_to_multiple,
        convert.format == "dist",
    )


def show(config: Config) -> None:
    """Print the plan of `hf2mcore` or `reshard`, for which `config.json` is enough.

    Raises the MsrlErrors of the conversion.
    """
    convert = config.convert
    assert convert.load is not None and convert.save is not None, "checked with the configuration"
    folder = config_dir(convert.load, None if convert.command == _FROM_HF else convert.hf_config)
    shape, target = load_shape(folder), target_from(convert)
    plan = ruled_plan(shape, target)
    files = dict(file_rows(shape, target, plan, Path(convert.save)))
    total = sum(spec.num_bytes for specs in files.values() for spec in specs)
    types = "data types of config.json" if target.dtype is None else f"as {convert.dtype}"
    print_line(
        f"Would write {num_parameters(shape):,} parameters, {plan.layout}, in {len(files)} "
        f"{'file' if len(files) == 1 else 'files'}: {amount_text(total, 'B')}, {types}"
    )
    if plan.padded_vocab != shape.vocab_size:
        padded = f"padded with zeros to {plan.padded_vocab:,}"
        print_line(f"Vocabulary: {shape.vocab_size:,} rows, {padded}")
    if shape.pass_through:
        names = ", ".join(f"{prefix}*" for prefix in shape.pass_through)
        print_line(f"Not counted here, as they pass through unchanged: {names}")
    free = shutil.disk_usage(nearest_existing(Path(convert.save))).free
    print_line(
        f"free on the disk: {amount_text(free, 'B')}"
        + (", which is not enough" if free < total else "")
    )
    print_table(
        [
            ("file", "tensors", "parameters", "size"),
            *(_row(name, specs) for name, specs in files.items()),
        ]
    )


def file_rows(
    shape: Shape, target: McoreTarget, plan: Plan, save: Path
) -> Iterator[tuple[str, list[TensorSpec]]]:
    """Yield every file with weights, relative to `save`, and its tensors.

    Their type is the dtype of the config unless the target has another.
    """
    if not target.distributed:
        for rank in plan.ranks:
            yield (
                str(rank_file(save, ITERATION, target.layout, rank.at).relative_to(save)),
                list(_specs(shape, target, rank).values()),
            )
        return
    files: dict[str, list[TensorSpec]] = {}
    for name, spec in _specs(shape, target, plan.ranks[0]).items():
        files.setdefault(tensor_file(name, shape.num_layers), []).append(spec)
    yield from (
        (f"{iteration_dir(save, ITERATION).name}/{name}", specs) for name, specs in files.items()
    )


def _specs(shape: Shape, target: McoreTarget, rank: RankPlan) -> dict[str, TensorSpec]:
    default = target.dtype or BY_HF_NAME[shape.dtype]
    types = {name: BY_HF_NAME[dtype] for name, dtype in rank.own_types.items()}
    return {name: TensorSpec(types.get(name, default), size) for name, size in rank.tensors.items()}


def _row(name: str, specs: list[TensorSpec]) -> tuple[str, ...]:
    elements = sum(spec.num_elements for spec in specs)
    num_bytes = sum(spec.num_bytes for spec in specs)
    return name, f"{len(specs)}", f"{elements:,}", amount_text(num_bytes, "B")
