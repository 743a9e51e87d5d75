"""What a conversion to mcore would write, from the model's config alone: every file with its
parameters and bytes, and the padding.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from msrl.checkpoint.convert import ITERATION, McoreTarget, ruled_plan
from msrl.checkpoint.dist.write import file_of
from msrl.checkpoint.dtypes import BY_HF_NAME, CHOICES
from msrl.checkpoint.mcore.files import iteration_dir, rank_file
from msrl.checkpoint.mcore.names import Naming
from msrl.checkpoint.rank_shapes import Plan, RankPlan
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.config.schema import Config, ConvertConfig
from msrl.models.families import load_shape, num_parameters
from msrl.models.paths import config_dir
from msrl.models.shape import Shape
from msrl.plan.derived import layout_from
from msrl.tracking.progress import amount_text
from msrl.workflows.convert.inspection import print_table

_FROM_HF = "hf2mcore"


def target_of(convert: ConvertConfig) -> McoreTarget:
    """The mcore checkpoint that a conversion is to write."""
    naming = Naming(convert.names == "te", convert.moe_grouped_gemm, convert.names == "legacy")
    return McoreTarget(
        layout_from(convert),
        CHOICES[convert.dtype],
        naming,
        convert.pad_vocab_to_multiple,
        convert.format == "dist",
    )


def show(config: Config) -> None:
    """Print the plan of `hf2mcore` or `reshard`, for which `config.json` is enough. Raises
    MsrlError as the conversion does.
    """
    convert = config.convert
    assert convert.load is not None and convert.save is not None, "checked with the configuration"
    folder = config_dir(convert.load, None if convert.command == _FROM_HF else convert.hf_config)
    shape, target = load_shape(folder), target_of(convert)
    plan = ruled_plan(shape, target)
    files = dict(file_rows(shape, target, plan, Path(convert.save)))
    total = sum(spec.num_bytes for specs in files.values() for spec in specs)
    types = "types as config.json says" if target.dtype is None else f"as {convert.dtype}"
    print(
        f"would write {num_parameters(shape):,} parameters, {plan.cut}, in {len(files)} files: {amount_text(total, 'B')}, {types}"
    )
    print(f"vocabulary: {shape.vocab_size:,} rows, padded with zeros to {plan.padded_vocab:,}")
    if shape.carried:
        names = ", ".join(f"{prefix}*" for prefix in shape.carried)
        print(f"besides, carried as they came and not counted here: {names}")
    free = shutil.disk_usage(_existing(Path(convert.save))).free
    print(
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
    """Every file with weights, relative to `save`, and what it holds; in the type that the config
    names unless the target has another.
    """
    if not target.distributed:
        for rank in plan.ranks:
            yield (
                str(rank_file(save, ITERATION, target.cut, rank.at).relative_to(save)),
                list(_specs(shape, target, rank).values()),
            )
        return
    files: dict[str, list[TensorSpec]] = {}
    for name, spec in _specs(shape, target, plan.ranks[0]).items():
        files.setdefault(file_of(name, shape.num_layers), []).append(spec)
    yield from (
        (f"{iteration_dir(save, ITERATION).name}/{name}", specs) for name, specs in files.items()
    )


def _specs(shape: Shape, target: McoreTarget, rank: RankPlan) -> dict[str, TensorSpec]:
    usual = target.dtype or BY_HF_NAME[shape.dtype]
    types = {name: BY_HF_NAME[own] for name, own in rank.own_types.items()}
    return {name: TensorSpec(types.get(name, usual), size) for name, size in rank.tensors.items()}


def _row(name: str, specs: list[TensorSpec]) -> tuple[str, ...]:
    elements, num_bytes = (
        sum(getattr(spec, what) for spec in specs) for what in ("num_elements", "num_bytes")
    )
    return name, f"{len(specs)}", f"{elements:,}", amount_text(num_bytes, "B")


def _existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return path if path.exists() else _existing(path.absolute().parent)
