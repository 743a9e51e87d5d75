"""Checks that preprocessed data fits the model: tokenizer, template, lengths and checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from msrl.config.schema import Config
from msrl.data.dataset import PromptDataset, SftDataset, TextDataset
from msrl.data.integrity import recorded_bytes, refuse_damaged
from msrl.data.preferences import PreferenceDataset
from msrl.data.tokenizer import open_tokenizer, tokenizer_hash
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.models.stages import has_deepstack_on_first_stage
from msrl.plan.run_plan import RunPlan
from msrl.tracking.progress import progress
from msrl.types import DatasetManifest
from msrl.vision.pixels import require_pillow
from msrl.vision.settings import from_json, read_vision_settings
from msrl.workflows.training.integrity import SHOWN_BYTES

# Commands that read the images of data
_READS_IMAGES = frozenset({"train-sft", "train-dpo", "train-grpo", "eval"})
_FREE_IMAGE_SETTINGS = ("min_pixels", "max_pixels", "min_tiles", "max_tiles")


def check_data(manifest: DatasetManifest | None, plan: RunPlan, prefix: str) -> None:
    """Check that tokenizer, template and row lengths of the data fit the model.

    Data of other systems has no manifest; `verify_data` checks its tokens.

    Raises:
        MsrlError: if they do not fit.
    """
    if manifest is None:
        return
    config, shape, hf_dir = plan.config, plan.shape, plan.model.hf_dir
    if manifest.num_examples == 0:
        raise MsrlError(
            f"data prefix {prefix}: the dataset is empty. Preprocess rows that pass the handler."
        )
    if manifest.vocab_size > shape.vocab_size:
        raise MsrlError(
            f"data prefix {prefix}: the tokenizer has {manifest.vocab_size} tokens, but the model "
            f"in {hf_dir} has {shape.vocab_size}."
            " Preprocess with the tokenizer of the model."
        )
    _refuse_other_tokenizer(manifest, plan, prefix)
    _check_images(manifest, plan, prefix)
    if config.model.template is not None and manifest.template != config.model.template:
        raise MsrlError(
            f"model.template={config.model.template}: {prefix} was preprocessed with template "
            f"{manifest.template}. Use that template, or preprocess again."
        )
    if manifest.kind == "pretrain":  # documents of any length are split into rows
        longest = config.data.seq_length or 0
        if longest > shape.max_position_embeddings:
            raise MsrlError(
                f"data.seq_length={longest}: the model supports at most "
                f"{shape.max_position_embeddings} tokens. Lower it."
            )
        return
    longest = manifest.max_tokens
    if config.data.seq_length is not None and config.data.too_long != "refuse":
        longest = min(longest, config.data.seq_length)  # longer rows are dropped or truncated
    if not manifest.pack and longest > shape.max_position_embeddings:
        raise MsrlError(
            f"data prefix {prefix}: the longest example has {longest} tokens, but the model "
            f"supports {shape.max_position_embeddings}. Preprocess with a shorter seq_length, or "
            "set data.seq_length, and data.too_long to drop or truncate."
        )


def _check_images(manifest: DatasetManifest, plan: RunPlan, prefix: str) -> None:
    """Check that the images of data, if it has any, are those that the model reads.

    The limits of pixels may differ: the data has the size of each image.

    Raises:
        MsrlError: The model reads other images or none, or the command reads none.
    """
    if not manifest.vision:
        return
    try:
        require_pillow()
        data, model = from_json(manifest.vision), read_vision_settings(plan.model.hf_dir)
    except (ValueError, MsrlError) as error:
        raise MsrlError(f"data prefix {prefix}: has images. {error}") from error
    others = [name for name in data.differences(model) if name not in _FREE_IMAGE_SETTINGS]
    if others:
        raise MsrlError(
            f"data prefix {prefix}: {others[0]}={getattr(data, others[0])}: the image processor of "
            f"{plan.model.hf_dir} has {getattr(model, others[0])}. Preprocess with the model's "
            "folder as tokenizer."
        )
    if plan.command not in _READS_IMAGES:
        raise MsrlError(
            f"data prefix {prefix}: has images, which {plan.command} does not read yet. Preprocess "
            "rows without images."
        )

    if plan.shape.vision is None:
        raise MsrlError(
            f"data prefix {prefix}: has images, but msrl reads text only with "
            f"{plan.shape.architecture}. Preprocess rows without images."
        )
    if not has_deepstack_on_first_stage(plan.shape, plan.layout):
        raise MsrlError(
            f"data prefix {prefix}: has images, whose features {plan.shape.architecture} adds "
            f"after its first {len(plan.shape.vision.deepstack)} layers. Put them on the first "
            "pipeline stage (train.parallel.num_layer_list, without train.parallel.vpp)."
        )


def check_image_keys(manifests: Iterable[DatasetManifest | None], plan: RunPlan) -> None:
    """Check that there are images if a key needs them.

    Without them, a trained tower would learn nothing, and weight decay would shrink it.

    Raises:
        MsrlError: No dataset has images.
    """
    train = plan.train
    values = {
        "train.vision.tower_lr": train.vision.tower_lr,
        "train.vision.projector_lr": train.vision.projector_lr,
        "train.max_patches_per_micro_batch": train.max_patches_per_micro_batch,
    }
    key = next((name for name, value in values.items() if value is not None), None)
    has_images = any(manifest is not None and manifest.vision for manifest in manifests)
    if key is not None and not has_images:
        raise MsrlError(f"{key}: the data has no images, so it has no effect. Remove it.")


def check_longest_row(config: Config, prefix: str, longest: int, size: str) -> None:
    """Raise MsrlError if the longest row of a dataset does not fit into a micro-batch.

    `longest` is its number of tokens, which `size` describes.
    """
    limit = config.train.max_tokens_per_micro_batch
    if limit is not None and limit < longest:
        raise MsrlError(
            f"train.max_tokens_per_micro_batch={limit}: the longest row of {prefix} has {size}. "
            "Raise it."
        )


def check_patches(config: Config, prefix: str, count_most: Callable[[], int]) -> None:
    """Raise MsrlError if the images of a row have too many patches for a micro-batch.

    `count_most` returns the largest number of patches of a row, which only a limit needs.
    """
    limit = config.train.max_patches_per_micro_batch
    if limit is not None and limit < (most := count_most()):
        raise MsrlError(
            f"train.max_patches_per_micro_batch={limit}: a row of {prefix} has images of {most} "
            "patches. Raise it, or preprocess with a smaller preprocess.max_pixels."
        )


def verify_data(
    dataset: SftDataset | TextDataset | PromptDataset | PreferenceDataset, plan: RunPlan
) -> None:
    """Verify the checksums of a dataset, and that its token ids are in the model's vocabulary.

    All data is read, except linked images, which must be there with their sizes. Ranks that share
    the vocabulary would silently train on an id outside it as a token without an embedding.

    Raises:
        MsrlError: with file, row or document, position and token.
    """
    prefix, num_bytes = dataset.prefix, recorded_bytes(dataset.manifest)
    if num_bytes < SHOWN_BYTES:
        refuse_damaged(prefix, dataset.manifest)
    else:
        with progress(f"verifying checksums of {prefix}", total=num_bytes, unit="B") as bar:
            refuse_damaged(prefix, dataset.manifest, bar.advance)
    images = None if isinstance(dataset, TextDataset) else dataset.images
    if images is not None:
        images.check_links()
    vocab_size, hf_dir = plan.shape.vocab_size, plan.model.hf_dir
    stray = dataset.stray_token(vocab_size)
    if stray is not None:
        unit = "document" if isinstance(dataset, TextDataset) else "row"
        raise MsrlError(
            f"data prefix {prefix}: {stray.file}: {unit} {stray.row}: token {stray.token} at "
            f"position {stray.position} is outside of the"
            f" vocabulary of {vocab_size} tokens of the model in {hf_dir}. Preprocess with the "
            "tokenizer of the model."
        )


def _refuse_other_tokenizer(manifest: DatasetManifest, plan: RunPlan, prefix: str) -> None:
    """Raise MsrlError if the data was made with another tokenizer.

    A model without a tokenizer cannot be checked.
    """
    folder = plan.tokenizer_dir
    try:
        model_hash = _tokenizer_hash(folder)
    except MsrlError:
        if plan.config.model.tokenizer is not None:
            raise
        print_note(
            f"warning: {folder} has no tokenizer, so {prefix} could not be compared with it, and "
            "`generate` and `chat` cannot use the result. Set model.tokenizer."
        )
        return
    if manifest.tokenizer_hash != model_hash:
        raise MsrlError(
            f"data prefix {prefix}: was preprocessed with another tokenizer than the one in "
            f"{folder}, so its ids mean other tokens."
            " Preprocess with that tokenizer, or set model.tokenizer to the tokenizer of the data."
        )


def check_teacher_tokenizers(plan: RunPlan) -> None:
    """Check that all teachers on the ranks have the tokenizer of the policy.

    Raises:
        MsrlError: A teacher has another tokenizer, or none.
    """
    for number, section in enumerate(plan.config.algo.distill.teachers):
        if section.model is None or section.is_self:
            continue
        folder = plan.teachers[section.model].hf_dir
        if _tokenizer_hash(folder) != _tokenizer_hash(plan.tokenizer_dir):
            raise MsrlError(
                f"algo.distill.teachers.{number}.model={section.model}: has another tokenizer "
                f"than {plan.tokenizer_dir}, so its probabilities belong to other tokens. Use a "
                "teacher with the same tokenizer."
            )


def check_reference_tokenizer(plan: RunPlan) -> None:
    """Check that a reference with other weights has the tokenizer of the policy.

    Models without a tokenizer cannot be compared, which is reported.

    Raises:
        MsrlError: The reference has another tokenizer.
    """
    reference = plan.reference
    if reference is None or reference.hf_dir == plan.model.hf_dir:
        return
    folders = (reference.hf_dir, plan.tokenizer_dir)
    hashes = {folder: _hash_or_none(folder) for folder in folders}
    for folder, number in hashes.items():
        if number is None:
            print_note(
                f"warning: {folder} has no tokenizer, so those of reference and policy could not "
                "be compared."
            )
            return
    if len(set(hashes.values())) > 1:
        raise MsrlError(
            f"cluster.roles.reference.load={plan.config.cluster.roles.reference.load}: has another "
            f"tokenizer than {plan.tokenizer_dir}, so its probabilities belong to other tokens. "
            "Use a reference with the same tokenizer."
        )


def _hash_or_none(folder: Path) -> str | None:
    """Return the hash of a tokenizer; None if the folder has none."""
    try:
        return _tokenizer_hash(folder)
    except MsrlError:
        return None


@cache
def _tokenizer_hash(folder: Path) -> str:
    return tokenizer_hash(open_tokenizer(folder))
