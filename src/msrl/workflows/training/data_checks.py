"""Whether preprocessed data is of the model that is to learn from it: its tokenizer, its template, its lengths."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msrl.config.schema import Config
from msrl.data.dataset import PromptDataset, SftDataset, TextDataset
from msrl.data.integrity import recorded_bytes, refuse_damaged
from msrl.data.tokenizer import open_tokenizer, tokenizer_hash
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.tracking.progress import progress
from msrl.types import DatasetManifest
from msrl.workflows.training.integrity import SHOWN_BYTES
from msrl.workflows.training.settings import tokenizer_path


def check_data(manifest: DatasetManifest | None, config: Config, hf_dir: Path, prefix: str) -> None:
    """The data is of this model: its tokens are the model's, its template is the one that was asked for, its rows fit.

    Raises MsrlError. Data of other systems has no manifest; `verify_data` checks its tokens.
    """
    if manifest is None:
        return
    shape = load_shape(hf_dir)
    if manifest.num_examples == 0:
        raise MsrlError(f"data prefix {prefix}: it is empty")
    if manifest.vocab_size > shape.vocab_size:
        raise MsrlError(
            f"data prefix {prefix}: its tokenizer has {manifest.vocab_size} tokens, the model in {hf_dir} only {shape.vocab_size};"
            " preprocess with the tokenizer of the model"
        )
    _refuse_other_tokenizer(manifest, config, prefix)
    if config.model.template is not None and manifest.template != config.model.template:
        raise MsrlError(f"model.template={config.model.template}: {prefix} was preprocessed with template {manifest.template}")
    if manifest.kind == "pretrain":  # documents of any length are cut into rows
        longest = config.data.seq_length or 0
        if longest > shape.max_position_embeddings:
            raise MsrlError(f"data.seq_length={longest}: the model takes {shape.max_position_embeddings} tokens; lower it")
    elif not manifest.pack and manifest.max_tokens > shape.max_position_embeddings:
        raise MsrlError(
            f"data prefix {prefix}: its longest example has {manifest.max_tokens} tokens, the model takes {shape.max_position_embeddings};"
            " preprocess with a shorter seq_length"
        )


def verify_data(dataset: SftDataset | TextDataset | PromptDataset, hf_dir: Path) -> None:
    """Verify the checksums of a dataset, as far as it has some, and that its token ids are in the vocabulary of the model; reads all of it.

    Ranks that share the vocabulary would train on an id outside of it as if it had no embedding. Raises MsrlError.
    """
    prefix, num_bytes = dataset.prefix, recorded_bytes(dataset.manifest)
    if num_bytes < SHOWN_BYTES:
        refuse_damaged(prefix, dataset.manifest)
    else:
        with progress(f"verifying checksums of {prefix}", total=num_bytes, unit="B") as bar:
            refuse_damaged(prefix, dataset.manifest, bar.advance)
    vocab_size = load_shape(hf_dir).vocab_size
    stray = dataset.stray_token(vocab_size)
    if stray is not None:
        unit = "document" if isinstance(dataset, TextDataset) else "row"
        raise MsrlError(
            f"data prefix {prefix}: {stray.file}: {unit} {stray.row}: token {stray.token} at position {stray.position} is outside of the"
            f" vocabulary of {vocab_size} tokens of the model in {hf_dir}. Preprocess with the tokenizer of the model."
        )


def _refuse_other_tokenizer(manifest: DatasetManifest, config: Config, prefix: str) -> None:
    """Raises MsrlError where the data's ids mean other tokens than the model's. Of a model that brings no tokenizer nothing can be told."""
    folder = tokenizer_path(config)
    try:
        found = _hash_of(folder)
    except MsrlError:
        if config.model.tokenizer is not None:
            raise
        return
    if manifest.tokenizer_hash != found:
        raise MsrlError(
            f"data prefix {prefix}: was preprocessed with another tokenizer than that in {folder}, so its ids mean other tokens;"
            " preprocess it with that one, or name the data's in model.tokenizer"
        )


@cache
def _hash_of(folder: Path) -> str:
    return tokenizer_hash(open_tokenizer(folder))
