"""Workflow of `msrl convert-ckpt`: convert a checkpoint, merge an adapter, verify the result."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from msrl.checkpoint.adapters.megatron import adapted_base, read_adapter, read_mcore_lora
from msrl.checkpoint.adapters.merge import Adapter, MergedSource
from msrl.checkpoint.adapters.peft import dropped_by_peft, read_peft, write_peft
from msrl.checkpoint.atomic_folder import require_free_path, require_space
from msrl.checkpoint.convert import hf_specs, mcore_plan, write_hf, write_mcore
from msrl.checkpoint.dtypes import CHOICES, same_bits
from msrl.checkpoint.gguf.folder import open_gguf
from msrl.checkpoint.gguf.write import GgufModel
from msrl.checkpoint.hf.folder import sidecar_files
from msrl.checkpoint.hf.pass_through import pass_through_bytes, pass_through_tensors
from msrl.checkpoint.hf.weight_files import has_weights
from msrl.checkpoint.integrity import adapter_checks, hf_checks, mcore_checks
from msrl.checkpoint.mcore.files import SIDECAR
from msrl.checkpoint.source import HfSource, ShardedSource, WeightSource, open_mcore
from msrl.config.schema import Config, ConvertConfig
from msrl.errors import MsrlError, VerificationError
from msrl.limits import print_line
from msrl.models.families import load_shape, num_parameters
from msrl.models.shape import Shape
from msrl.plan.derived import layout_from
from msrl.temporary import owned_folder
from msrl.tracking.progress import amount_text, duration_text, progress
from msrl.verification import report
from msrl.verification.bits import require_equal_copies
from msrl.workflows.convert.inspection import (
    inspect,
    print_table,
    training_state,
    verify_checkpoint,
)
from msrl.workflows.convert.plan import target_from
from msrl.workflows.training.integrity import UNVERIFIED, verify_files

FROM_HF, TO_HF = ("hf2mcore", "hf2hf", "hf2gguf"), ("mcore2hf", "hf2hf", "gguf2hf")
FROM_MCORE, FROM_GGUF, TO_GGUF = ("mcore2hf", "reshard"), "gguf2hf", "hf2gguf"


def run(config: Config) -> None:
    """Run the conversion or inspection that `config.convert.command` selects.

    Raises:
        MsrlError: The user made a mistake.
        VerificationError: The result is not exact.
    """
    convert = config.convert
    if convert.load is None or (convert.save is None and convert.command != "inspect"):
        raise MsrlError(
            "convert.load and convert.save: both are required. "
            "Name the checkpoint to read and the folder to write."
        )
    if convert.command == "inspect":
        inspect(Path(convert.load), verify=convert.verify)
    elif convert.command == "lora2hf":
        hf_config = Path(convert.hf_config) if convert.hf_config else None
        _export_adapter(Path(convert.load), Path(convert.save or ""), hf_config)
    else:
        _convert(config, Path(convert.load), Path(convert.save or ""))


def check(config: Config) -> None:
    """Read and check the checkpoint of a conversion without writing anything.

    Raises:
        MsrlError: The conversion would be refused.
    """
    convert = config.convert
    assert convert.load is not None, "checked with the configuration"
    load = Path(convert.load)
    if convert.command == "inspect":
        verify_checkpoint(load, verify=convert.verify)
    elif convert.command == "lora2hf":
        _read_adapter(load, Path(convert.hf_config) if convert.hf_config else None)
    else:
        with _open_source(convert, load) as source:
            _check_conversion(config, source, load, Path(convert.save or ""))


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Conversion that is ready to be written."""

    num_bytes: int
    write: Callable[[Callable[[int], None]], object]
    dropped: tuple[str, ...]
    """Descriptions of the contents that are not converted."""


def _check_conversion(config: Config, source: WeightSource, load: Path, save: Path) -> _Conversion:
    """Check that the result can be written and verified."""
    convert = config.convert
    sidecar_files(source.hf_dir)  # refuses links to other files, which would be copied
    if convert.verify:
        in_memory = convert.command in (FROM_GGUF, TO_GGUF)
        report.require_memory(source.shape, in_memory=in_memory)
    # Read before anything is written, because the training state may be damaged too.
    dropped = training_state(load) if convert.command in FROM_MCORE else []
    require_free_path(save)
    require_free_path(_result(convert, save))
    num_bytes, write = _prepare(convert, source, _result(convert, save))
    require_space(save, num_bytes)
    return _Conversion(num_bytes, write, tuple(dropped))


def _convert(config: Config, load: Path, save: Path) -> None:
    """Convert with a progress bar, then verify."""
    torch.set_num_threads(1)  # the conversion has a thread per file
    with _open_source(config.convert, load) as source:
        _convert_opened(config, source, load, save)


def _convert_opened(config: Config, source: WeightSource, load: Path, save: Path) -> None:
    convert = config.convert
    conversion = _check_conversion(config, source, load, save)
    num_bytes, write = conversion.num_bytes, conversion.write
    start = time.perf_counter()
    with progress(f"{convert.command} {load} -> {save}", total=num_bytes, unit="B") as bar:
        write(bar.advance)
    elapsed = time.perf_counter() - start
    layout = "" if convert.command in (*TO_HF, TO_GGUF) else f"{layout_from(convert)}, "
    print_line(
        f"Wrote {_result(convert, save)}: {layout}{num_parameters(source.shape):,} parameters, "
        f"{amount_text(num_bytes, 'B')} in {duration_text(elapsed)}"
    )
    _print_pass_through(source)
    if source.shape.reward_head:
        print_line(
            f"Reward model ({source.shape.architecture}): "
            "score.weight of Hugging Face is rm_head.weight of Megatron"
        )
    if conversion.dropped:
        print_line(f"Not converted (only weights are): {', '.join(conversion.dropped)}")
    if convert.verify:
        _verify(config, source, load, save)
        print_line(f"Moved the verified result to {save}")
    else:
        print_line("Not verified: neither the files nor the logits were compared with the source")


def _result(convert: ConvertConfig, save: Path) -> Path:
    """Return the folder to write: the result has its name only after a requested verification."""
    return _unverified_folder(save) if convert.verify else save


def _unverified_folder(save: Path) -> Path:
    target = save.resolve()  # a link to an empty folder stays
    return target.with_name(f"{target.name}{UNVERIFIED[0]}")


def _publish(written: Path, save: Path) -> None:
    """Give a verified result its name."""
    require_free_path(save)
    written.rename(save.resolve())


def _reject(written: Path) -> Path:
    """Rename a result that is not exact, and return its path."""
    rejected = written.with_suffix(UNVERIFIED[1])
    shutil.rmtree(rejected, ignore_errors=True)
    return written.rename(rejected)


@contextlib.contextmanager
def _open_source(convert: ConvertConfig, load: Path) -> Iterator[WeightSource]:
    """Verify the files to convert, and open the weights."""
    if convert.command == FROM_GGUF:
        with owned_folder("msrl-gguf-") as folder:  # for its config and tokenizer
            yield open_gguf(load, folder)
        return
    _verify_source(convert, load)
    yield _open(convert, load)


def _open(convert: ConvertConfig, load: Path) -> WeightSource:
    """Open the weights to convert, with the adapter, if any, merged into them."""
    lora = Path(convert.lora) if convert.lora else None
    if convert.command in FROM_HF:
        base: WeightSource = HfSource(load)
    else:
        # Merging another adapter would silently drop the one in `load`.
        is_adapter_in_load = lora is not None and lora.resolve() == load.resolve()
        hf_config = Path(convert.hf_config) if convert.hf_config else None
        base = open_mcore(load, hf_config, beside_adapter=is_adapter_in_load)
        if convert.verify and isinstance(base, ShardedSource):
            _compare_copies(base, load)
    if lora is None:
        return base
    merged = MergedSource(base, read_adapter(lora, base.shape), dtype=CHOICES.get(convert.dtype))
    print_line(f"Merging {lora}: {merged.adapter.summary()}")
    return merged


def _verify_source(convert: ConvertConfig, load: Path) -> None:
    """Verify the files to convert.

    `--no-verify` skips the manifest's checksums, but a damaged archive is always refused.
    """
    depth = "checksums" if convert.verify else "archives"
    checks = (hf_checks if convert.command in FROM_HF else mcore_checks)(load, depth=depth)
    if convert.lora is not None and Path(convert.lora).resolve() != load.resolve():
        checks += adapter_checks(Path(convert.lora), depth)
    verify_files(checks)


def _compare_copies(source: ShardedSource, load: Path) -> None:
    """Compare the copies of tensors that several ranks hold.

    In a mixture of experts, the copies may be most of the data.
    """
    num_bytes = sum(copy.other.nbytes for copy in source.copies())
    if num_bytes:
        with progress(f"comparing copies on ranks of {load}", total=num_bytes, unit="B") as bar:
            require_equal_copies(source, load, bar.advance)


def _export_adapter(load: Path, save: Path, hf_config: Path | None) -> None:
    """Write an mcore checkpoint's adapter as a PEFT folder, and compare it bit for bit."""
    adapter, shape, hf_dir = _read_adapter(load, hf_config)
    recorded = None if hf_config else adapted_base(load)
    base = (recorded if recorded is not None and has_weights(recorded) else hf_dir).absolute()
    folder = _unverified_folder(save)
    require_free_path(save)
    write_peft(adapter, folder, str(base))
    written = read_peft(folder)
    different = sorted(
        name for name, delta in adapter.deltas.items() if not delta.equals(written.deltas[name])
    )
    different += [
        name
        for name, weight in adapter.replaced.items()
        if not same_bits(weight, written.replaced[name])
    ]
    if different:
        raise VerificationError(
            f"{save}: {len(different)} adapters differ from those in {load}, first {different[0]}. "
            f"The result was moved to {_reject(folder)}."
        )
    _publish(folder, save)
    content = f"{adapter.summary()}, for base model {base}"
    print_line(f"Wrote {save}: {content}; read back equal bit for bit")
    dropped = dropped_by_peft(adapter, shape)
    if dropped:
        print_line(
            f"PEFT 0.21 silently ignores adapters of {', '.join(dropped)} outside of experts. "
            "Merge this adapter with --lora."
        )
    if not has_weights(base):
        print_line(
            f"{base}: no weights found, so PEFT cannot load the base model. "
            "Name its Hugging Face folder with --hf-config."
        )


def _read_adapter(load: Path, hf_config: Path | None) -> tuple[Adapter, Shape, Path]:
    """Return an mcore checkpoint's adapter, and the shape and the folder of its model."""
    verify_files(mcore_checks(load))
    hf_dir = hf_config or load / SIDECAR
    if not (hf_dir / "config.json").is_file():
        raise MsrlError(
            f"{hf_dir}: no config.json found. "
            "Name the model's Hugging Face folder with --hf-config."
        )
    shape = load_shape(hf_dir)
    return read_mcore_lora(load, shape), shape, hf_dir


def _prepare(
    convert: ConvertConfig, source: WeightSource, save: Path
) -> tuple[int, Callable[[Callable[[int], None]], object]]:
    """Return the size in bytes of the result, and a function that writes it."""
    if convert.command == TO_GGUF:
        model = GgufModel(source, convert.dtype)
        return model.num_bytes, lambda advance: model.write(save, advance)
    dtype = CHOICES[convert.dtype]
    if convert.command in TO_HF:
        num_bytes = sum(spec.num_bytes for spec in hf_specs(source, dtype).values())
        return num_bytes, lambda advance: write_hf(source, save, dtype, advance)
    target = target_from(convert)
    return mcore_plan(source, target)[1], lambda advance: write_mcore(source, save, target, advance)


def _print_pass_through(source: WeightSource) -> None:
    """Print the tensors that passed through unchanged, if any."""
    tensors = pass_through_tensors(source.hf_dir, source.shape)
    if tensors:
        names = ", ".join(f"{prefix}*" for prefix in source.shape.pass_through)
        print_line(
            f"Passed through unchanged, neither sharded nor trained: {len(tensors)} tensors "
            f"{names}, "
            f"{amount_text(pass_through_bytes(tensors), 'B')}"
        )


def _verify(config: Config, source: WeightSource, load: Path, save: Path) -> None:
    """Print the verification report of a conversion, and give the result its name.

    A result that is not exact has another name, and VerificationError is raised.
    """
    start, written = time.perf_counter(), _result(config.convert, save)
    try:
        checks = report.checks(config.convert, config.cluster.platform, source, load, written)
    except BaseException:
        print_line(f"{written} is complete but not verified: the verification was interrupted")
        raise
    print_line(f"Verified in {duration_text(time.perf_counter() - start)}:")
    rows = [(check.name, check.result, check.compared) for check in checks]
    print_table([("check", "result", "compared"), *rows])
    if all(check.passed for check in checks):
        return _publish(written, save)
    rejected = _reject(written)
    failed = "; ".join(f"{check.name}: {check.result}" for check in checks if not check.passed)
    raise VerificationError(
        f"{save}: the conversion is not exact ({failed}). The result was moved to {rejected}."
    )
