"""Paths inside model folders: Hugging Face folders and Megatron checkpoints."""

from __future__ import annotations

from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "msrl_manifest.json"  # of checksums, in Hugging Face folders and Megatron checkpoints
IRREGULAR = "is no file, but a pipe, a device, a folder or a link to nothing. Copy it again."
_MAX_SIDE_FILE_BYTES = 256 << 20
OVERSIZED = (
    f"has more than {_MAX_SIDE_FILE_BYTES >> 20} MiB, unlike the configuration or tokenizer of any "
    "model. Remove it, or copy it again."
)
_SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt")


def is_hf(path: str) -> bool:
    """Return True for a Hugging Face folder, which contains config.json."""
    return (Path(path) / "config.json").is_file()


def is_mcore(path: str) -> bool:
    """Return True for a Megatron checkpoint, which contains Megatron's tracker file."""
    return (Path(path) / TRACKER).is_file()


def is_adapter_folder(path: str) -> bool:
    """Return True for a LoRA adapter in PEFT's format, which contains adapter_config.json."""
    return (Path(path) / "adapter_config.json").is_file() and not is_hf(path)


def is_iteration(path: str) -> bool:
    """Return True for the folder of one iteration of a Megatron checkpoint: iter_0000010."""
    folder = Path(path)
    is_named = folder.name.startswith("iter_") and folder.name[5:].isdecimal()
    return is_named and folder.is_dir() and is_mcore(str(folder.absolute().parent))


def run_checkpoints(path: str) -> Path | None:
    """Return the folder of the checkpoints of a run, or None if `path` is no folder of a run."""
    folder = Path(path) / "checkpoints"
    return folder if is_mcore(str(folder)) and not is_hf(path) and not is_mcore(path) else None


def has_weight_files(folder: Path) -> bool:
    """Return True if a Hugging Face or Megatron folder has any file or folder of weights.

    They may be incomplete.
    """
    patterns = ("*.safetensors*", "pytorch_model*", "iter_*", "release")
    return any(path for pattern in patterns for path in folder.glob(pattern))


def config_dir(path: str, hf_config: str | None = None) -> Path:
    """Return the folder of the config.json that belongs to a Hugging Face or Megatron folder."""
    if hf_config is not None:
        return Path(hf_config)
    folder = Path(path)
    return folder if (folder / "config.json").is_file() else folder / "hf"


def runs_on_ranks(model: str | None, engine: str | None) -> bool:
    """Return True if the training ranks hold and run a reward source's model.

    That is the case if the engine is `megatron`, or by default for a Megatron checkpoint.
    """
    return model is not None and (engine == "megatron" or (engine is None and is_mcore(model)))


def irregular_file(folder: Path) -> Path | None:
    """Return the first file of a model that is a pipe, a device, a folder or a link to nothing.

    Readers would take it for a missing file, and some files of a model are optional.
    """
    suffixes = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin")
    files = sorted(path for path in folder.glob("*") if path.name.endswith(suffixes))
    return next((path for path in files if not path.is_file()), None)


def oversized_file(folder: Path) -> Path | None:
    """Return the first file of a model beside its weights that is too large to be one.

    A file with a hole has any size on a disk with little space.
    """
    files = sorted(path for pattern in _SIDE_FILES for path in folder.glob(pattern))
    return next((path for path in files if is_oversized(path)), None)


def is_oversized(path: Path) -> bool:
    """Return True for a file that is too large for a configuration or tokenizer."""
    return path.is_file() and path.stat().st_size > _MAX_SIDE_FILE_BYTES
