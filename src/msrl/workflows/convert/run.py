"""msrl convert-ckpt: convert a checkpoint, merge a LoRA adapter, then prove the result bit for bit
and by what it computes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from msrl.checkpoint.adapters.megatron import adapted_base, read_adapter, read_mcore_lora
from msrl.checkpoint.adapters.merge import MergedSource
from msrl.checkpoint.adapters.peft import dropped_by_peft, read_peft, write_peft
from msrl.checkpoint.atomic_folder import require_free_path, require_space
from msrl.checkpoint.convert import hf_specs, mcore_plan, write_hf, write_mcore
from msrl.checkpoint.dtypes import CHOICES
from msrl.checkpoint.hf.pass_through import pass_through_bytes, pass_through_tensors
from msrl.checkpoint.hf.weight_files import has_weights
from msrl.checkpoint.integrity import adapter_checks, hf_checks, mcore_checks
from msrl.checkpoint.mcore.files import SIDECAR
from msrl.checkpoint.source import HfSource, ShardedSource, WeightSource, open_mcore
from msrl.config.schema import Config, ConvertConfig
from msrl.errors import MsrlError, VerificationError
from msrl.models.families import load_shape, num_parameters
from msrl.plan.derived import layout_from
from msrl.tracking.progress import amount_text, duration_text, progress
from msrl.verification import report as proof
from msrl.verification.bits import require_equal_copies
from msrl.workflows.convert.inspection import inspect, print_left_out, print_table
from msrl.workflows.convert.plan import target_of
from msrl.workflows.training.integrity import verify_files

FROM_HF, TO_HF = ("hf2mcore", "hf2hf"), ("mcore2hf", "hf2hf")


def run(config: Config) -> None:
    """Do what `config.convert.command` says. Raises MsrlError for the user's mistakes,
    VerificationError for a result that is not exact.
    """
    convert = config.convert
    if convert.load is None or (convert.save is None and convert.command != "inspect"):
        raise MsrlError(
            "convert.load and convert.save: name the checkpoint to read and the folder to write"
        )
    if convert.command == "inspect":
        inspect(Path(convert.load), verify=convert.verify)
    elif convert.command == "lora2hf":
        _export_adapter(
            Path(convert.load),
            Path(convert.save or ""),
            Path(convert.hf_config) if convert.hf_config else None,
        )
    else:
        _convert(config, Path(convert.load), Path(convert.save or ""))


def _convert(config: Config, load: Path, save: Path) -> None:
    """Convert with a progress bar, then verify."""
    torch.set_num_threads(1)  # the conversion has a thread per file
    convert = config.convert
    _verify_source(convert, load)
    source = _open(convert, load)
    if convert.verify:
        proof.refuse_without_memory(source.shape)
    start = time.perf_counter()
    num_bytes, work = _work(convert, source, save)
    require_free_path(save)
    require_space(save, num_bytes)
    with progress(f"{convert.command} {load} -> {save}", total=num_bytes, unit="B") as bar:
        work(bar.advance)
    elapsed = time.perf_counter() - start
    layout = "" if convert.command in TO_HF else f"{layout_from(convert)}, "
    print(
        f"wrote {save}: {layout}{num_parameters(source.shape):,} parameters, {amount_text(num_bytes, 'B')} in {duration_text(elapsed)}"
    )
    _print_carried(source)
    if source.shape.reward_head:
        print(
            f"reward model ({source.shape.architecture}): score.weight of Hugging Face is rm_head.weight of Megatron"
        )
    if convert.command not in FROM_HF:
        print_left_out(load)
    if convert.verify:
        _verify(config, source, load, save)
    else:
        print(
            "not verified: neither the files nor what the model computes have been compared with the source"
        )


def _open(convert: ConvertConfig, load: Path) -> WeightSource:
    """The weights to convert, with the adapter merged into them if one is named."""
    lora = Path(convert.lora) if convert.lora else None
    if convert.command in FROM_HF:
        base: WeightSource = HfSource(load)
    else:
        is_own = (
            lora is not None and lora.resolve() == load.resolve()
        )  # another one would leave out the adapter in `load`
        base = open_mcore(
            load, Path(convert.hf_config) if convert.hf_config else None, beside_adapter=is_own
        )
        if convert.verify and isinstance(base, ShardedSource):
            _compare_copies(base, load)
    if lora is None:
        return base
    merged = MergedSource(base, read_adapter(lora, base.shape))
    print(f"merging {lora}: {merged.adapter.summary()}")
    return merged


def _verify_source(convert: ConvertConfig, load: Path) -> None:
    """Verify the files that are converted. `--no-verify` trusts the manifest's checksums, but never
    a damaged archive.
    """
    depth = "checksums" if convert.verify else "archives"
    checks = (hf_checks if convert.command in FROM_HF else mcore_checks)(load, depth=depth)
    if convert.lora is not None and Path(convert.lora).resolve() != load.resolve():
        checks += adapter_checks(Path(convert.lora), depth)
    verify_files(checks)


def _compare_copies(source: ShardedSource, load: Path) -> None:
    """Refuse what ranks hold copies of and differ in; of a mixture the copies may be most of what
    is there to read.
    """
    num_bytes = sum(copy.other.nbytes for copy in source.copies())
    if num_bytes:
        with progress(
            f"comparing what several ranks of {load} hold", total=num_bytes, unit="B"
        ) as bar:
            require_equal_copies(source, load, bar.advance)


def _export_adapter(load: Path, save: Path, hf_config: Path | None) -> None:
    """An mcore checkpoint's adapter as a PEFT folder, read back and compared bit for bit."""
    verify_files(mcore_checks(load))
    hf_dir = hf_config or load / SIDECAR
    if not (hf_dir / "config.json").is_file():
        raise MsrlError(
            f"{hf_dir}: there is no config.json; name the model's Hugging Face folder with --hf-config"
        )
    shape = load_shape(hf_dir)
    adapter = read_mcore_lora(load, shape)
    recorded = None if hf_config else adapted_base(load)
    base = (recorded if recorded is not None and has_weights(recorded) else hf_dir).absolute()
    write_peft(adapter, save, str(base))
    back = read_peft(save)
    wrong = sorted(
        name for name, delta in adapter.deltas.items() if not delta.equals(back.deltas[name])
    )
    if wrong:
        raise VerificationError(
            f"{save}: {len(wrong)} adapters are not what {load} holds, {wrong[0]} first"
        )
    print(
        f"wrote {save}: {adapter.summary()}, for the base model {base}; read back equal bit for bit"
    )
    left_out = dropped_by_peft(adapter, shape)
    if left_out:
        print(
            f"PEFT 0.21 leaves out adapters of {', '.join(left_out)} outside of experts, without a word: merge this adapter with --lora"
        )
    if not has_weights(base):
        print(
            f"{base} has no weights, so PEFT cannot load the base model from there: name its Hugging Face folder with --hf-config"
        )


def _work(
    convert: ConvertConfig, source: WeightSource, save: Path
) -> tuple[int, Callable[[Callable[[int], None]], object]]:
    """The bytes that will be written, and the function that writes them and tells how far it is."""
    dtype = CHOICES[convert.dtype]
    if convert.command in TO_HF:
        num_bytes = sum(spec.num_bytes for spec in hf_specs(source, dtype).values())
        return num_bytes, lambda advance: write_hf(source, save, dtype, advance)
    target = target_of(convert)
    return mcore_plan(source, target)[1], lambda advance: write_mcore(source, save, target, advance)


def _print_carried(source: WeightSource) -> None:
    """What went through beside the language model, if anything."""
    tensors = pass_through_tensors(source.hf_dir, source.shape)
    if tensors:
        names = ", ".join(f"{prefix}*" for prefix in source.shape.carried)
        print(
            f"carried as they came, neither cut nor trained: {len(tensors)} tensors {names}, {amount_text(pass_through_bytes(tensors), 'B')}"
        )


def _verify(config: Config, source: WeightSource, load: Path, save: Path) -> None:
    """Print what was compared. A result that is not exact is put aside under another name and
    raises VerificationError.
    """
    start = time.perf_counter()
    try:
        checks = proof.checks(config, source, load, save)
    except BaseException:
        print(f"{save} is written, but not proven: its verification did not come to an end")
        raise
    print(f"verified in {duration_text(time.perf_counter() - start)}:")
    print_table(
        [
            ("check", "compared", "result"),
            *((check.name, check.compared, check.result) for check in checks),
        ]
    )
    if all(check.passed for check in checks):
        return
    rejected = save.with_name(f"{save.name}.failed-verification")
    shutil.rmtree(rejected, ignore_errors=True)
    save.rename(rejected)
    failed = "; ".join(f"{check.name}: {check.result}" for check in checks if not check.passed)
    raise VerificationError(
        f"the conversion is not exact ({failed}); what was written is in {rejected}"
    )
