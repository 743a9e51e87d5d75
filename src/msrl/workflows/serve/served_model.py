"""Model and LoRA adapters of `serve`: what the server loads, and from which folders.

vLLM loads Hugging Face folders and PEFT adapters. Checkpoints of Megatron are converted: weights
into the cache (`model_cache.py`), adapters into a temporary folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.checks.serve import model_name, split_adapter
from msrl.config.sections.commands import ServeConfig
from msrl.errors import MsrlError
from msrl.files import read_text_within
from msrl.models.paths import is_adapter_folder, is_hf, is_mcore
from msrl.models.shape import Shape
from msrl.rollout.server import MAX_LORA_RANK
from msrl.workflows.engine import open_model
from msrl.workflows.serve import model_cache

if TYPE_CHECKING:
    from msrl.checkpoint.adapters.merge import Adapter
    from msrl.checkpoint.source import WeightSource


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """A LoRA adapter. `adapter` has the tensors of one in mcore format, which must be converted."""

    name: str
    folder: Path
    rank: int
    adapter: Adapter | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to serve.

    Attributes:
        name: Name in requests.
        load: Folder of the weights, in any format.
        folder: Hugging Face folder for vLLM. It does not exist before the conversion.
        tokenizer_dir: Folder of tokenizer, chat template and generation_config.json.
        shape: Shape of the model.
        source: Opened weights to convert; None if `folder` is complete.
        adapters: LoRA adapters.
    """

    name: str
    load: Path
    folder: Path
    tokenizer_dir: Path
    shape: Shape
    source: WeightSource | None
    adapters: tuple[ServedAdapter, ...]


def open_served_model(section: ServeConfig) -> ServedModel:
    """Open and verify the model and the adapters without writing anything.

    If the model is an adapter, its base model is served too, under the name NAME-base.

    Raises:
        MsrlError: A folder is damaged, or the model or an adapter cannot be served.
    """
    load, name = Path(str(section.model)), section.name or model_name(str(section.model))
    adapters = [split_adapter(text) for text in section.lora]
    tokenizer_dir = None
    if has_only_adapter(load):
        adapters.insert(0, (name, str(load)))
        tokenizer_dir = load / "hf" if is_hf(str(load / "hf")) else None
        load, name = base_folder(load), f"{name}-base"
    folder, source, shape = _weights(load, model_cache.cache_folder(section.cache))
    if shape.reward_head:
        raise MsrlError(
            f"{load}: {shape.architecture} generates scores instead of text. "
            "Use it in reward.sources."
        )
    model_dir = source.hf_dir if source is not None else folder
    served = tuple(_adapter(adapter_name, Path(path), shape) for adapter_name, path in adapters)
    return ServedModel(name, load, folder, tokenizer_dir or model_dir, shape, source, served)


def _weights(load: Path, cache: Path) -> tuple[Path, WeightSource | None, Shape]:
    """Return the folder for vLLM, the weights to convert into it, and the shape of the model."""
    from msrl.models.families import load_shape

    if is_hf(str(load)):
        return load, None, open_model(str(load), "serve.model").shape
    if not is_mcore(str(load)):
        raise MsrlError(f"{load}: neither a Hugging Face folder nor an mcore checkpoint.")
    folder = cache / model_cache.checkpoint_digest(load)
    if model_cache.is_usable(folder):
        return folder, None, load_shape(folder)
    source = open_model(str(load), "serve.model")
    return folder, source, source.shape


def has_only_adapter(load: Path, iteration: int | str | None = None) -> bool:
    """Return True for a folder with an adapter only, in PEFT or mcore format.

    `iteration` defaults to the latest.
    """
    if not is_mcore(str(load)):
        return is_adapter_folder(str(load))
    from msrl.checkpoint.distributed.read import is_distributed
    from msrl.checkpoint.mcore.files import iteration_dir, read_rank_file
    from msrl.checkpoint.mcore.locate import find_checkpoint, latest_iteration
    from msrl.checkpoint.source import holds_only_adapter

    iteration = latest_iteration(load) if iteration is None else iteration
    if is_distributed(iteration_dir(load, iteration)):
        return False
    names = [
        name
        for path in find_checkpoint(load, iteration).files.values()
        for name in read_rank_file(path)["model"]
    ]
    return holds_only_adapter(names)


def base_folder(adapter: Path) -> Path:
    """Return the folder of the model that an adapter was trained on.

    Raises:
        MsrlError: The adapter names no model that is on this machine.
    """
    if is_mcore(str(adapter)):
        from msrl.checkpoint.adapters.megatron import adapted_base

        base = adapted_base(adapter)
    else:
        base = _peft_base(adapter)
    if base is None:
        raise MsrlError(
            f"{adapter}: is an adapter whose base model was not found. "
            f"Name both: msrl serve BASE --lora {adapter}"
        )
    return base


def _peft_base(adapter: Path) -> Path | None:
    """Return the folder that the config of a PEFT adapter names, if it is on this machine."""
    from msrl.checkpoint.adapters.peft import CONFIG

    config: Any = json.loads(read_text_within(adapter / CONFIG))
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return Path(name) if isinstance(name, str) and Path(name).is_dir() else None


def _adapter(name: str, path: Path, shape: Shape) -> ServedAdapter:
    """Read an adapter and check that it fits the model.

    Raises:
        MsrlError: The adapter is damaged, of another model, or of a kind that vLLM does not have.
    """
    from msrl.checkpoint.adapters.megatron import read_adapter
    from msrl.checkpoint.integrity import adapter_checks
    from msrl.models.families import all_rules
    from msrl.workflows.training.integrity import verify_files

    verify_files(adapter_checks(path))
    adapter = read_adapter(path, shape)
    adapter.check(all_rules(shape))
    if adapter.replaced:
        raise MsrlError(
            f"{path}: replaces {next(iter(adapter.replaced))}, which vLLM cannot serve unmerged. "
            f"Merge it: msrl convert-ckpt hf2hf --load MODEL --lora {path} --save FOLDER"
        )
    rank = max(delta.rank for delta in adapter.deltas.values())
    if rank > MAX_LORA_RANK:
        raise MsrlError(
            f"{path}: r={rank}: vLLM serves adapters of rank {MAX_LORA_RANK} at most. Merge it: "
            f"msrl convert-ckpt hf2hf --load MODEL --lora {path} --save FOLDER"
        )
    is_peft = is_adapter_folder(str(path))
    return ServedAdapter(name, path, rank, None if is_peft else adapter)


def write_adapters(adapters: Sequence[ServedAdapter], base: Path, folder: Path) -> dict[str, Path]:
    """Return the adapters as PEFT folders by name; Megatron's are written below `folder`."""
    from msrl.checkpoint.adapters.peft import write_peft

    folders: dict[str, Path] = {}
    for number, served in enumerate(adapters):
        folders[served.name] = served.folder.absolute()
        if served.adapter is not None:
            folders[served.name] = folder / f"adapter{number}"
            write_peft(served.adapter, folders[served.name], str(base))
    return folders
