"""Translation of the flags of a supervised training or a pretraining.

Source: MindSpeed-LLM b626d239 and c77308a1, posttrain_gpt.py and pretrain_gpt.py.
"""

from __future__ import annotations

import re

from msrl.config.sources import wrap
from msrl.importers.megatron import MegatronKeys, has_adapters
from msrl.importers.mindspeed_llm.data import put_rows, put_text
from msrl.importers.mindspeed_llm.preference import STAGES, put_preference
from msrl.importers.routers import put_router
from msrl.importers.sections import Keys, put_profile, put_tracker_options
from msrl.importers.translation import KeyStatus, SourceKey, Translation

_NO_CHECKPOINT = "None"  # in the scripts that pretrain gated delta networks


def put_training(translation: Translation, keys: Keys) -> None:
    """Translate the keys of a supervised training that depend on each other."""
    stage = keys.get("stage")
    if stage is not None and stage.value not in ("sft", *STAGES):
        _refuse_stage(translation, stage)
        return
    _dtype(keys)
    is_text = stage is None and keys.value("is_instruction_dataset") is not True
    if is_text:
        put_text(translation, keys)
    put_rows(translation, keys)
    put_preference(translation, keys, stage)
    _initial_weights(translation, keys, is_text=is_text)
    _decay(translation, keys)
    _split(translation, keys, is_text=is_text)
    MegatronKeys(translation, keys).apply_supervised()
    put_router(keys)
    _indexers(keys)
    _evaluation(translation, keys)
    _memory(translation, keys)
    _trackers(translation, keys)
    _profile(keys)
    if not is_text and (stage is None or stage.value == "sft"):
        _aggregation(translation, keys)
    _remarks(translation, keys, is_text=is_text)


def _aggregation(translation: Translation, keys: Keys) -> None:
    """Translate the mean of a loss: over all tokens, or over the means of micro-batches.

    The rows of pretraining have equal numbers of tokens, for which both are equal.
    """
    if keys.value("calculate_per_token_loss") is True:
        return keys.record("calculate_per_token_loss", KeyStatus.APPLIED, "algo.aggregate.mode")
    entry = keys.get("micro_batch_size")
    size = 1 if entry is None else entry.value
    if not isinstance(size, int):
        return None
    origin = keys.origin("micro_batch_size")
    translation.set("algo.aggregate.mode", wrap("micro-batch-mean", origin))
    translation.set("algo.aggregate.samples_per_group", wrap(size, origin))
    text = "algo.aggregate: the mean over micro-batches"
    return keys.record("calculate_per_token_loss", KeyStatus.APPLIED, text)


def _indexers(keys: Keys) -> None:
    """Translate the loss of indexers, which the original trains unless it trains adapters."""
    key = "indexer_loss_coeff"
    if keys.value("enable_dsa_indexer") is not True or has_adapters(keys):
        return keys.record(key, KeyStatus.DEAD, "read with enable_dsa_indexer, without adapters")
    return keys.put(key, "train.indexer_loss_coef")


def _remarks(translation: Translation, keys: Keys, *, is_text: bool) -> None:
    """Report what msrl computes differently by design, also where a flag is not set."""
    remarks: list[str] = []
    if translation.system == "MindSpeed-LLM" and keys.get("split") is None:
        remarks.append(
            "without --split, the original trains on 96.9% of the rows (969,30,1); msrl trains on "
            "all rows of data.train"
        )
    packs = is_text or keys.value("pack") is True
    if packs and keys.value("reset_attention_mask") is not True:
        remarks.append(
            "without --reset-attention-mask, tokens attend to earlier sequences of their row in "
            "the original; in msrl, they attend to their own sequence"
        )
    translation.remarks += [f"{translation.name}: {text}" for text in remarks]


def _refuse_stage(translation: Translation, stage: SourceKey) -> None:
    """Add the error of a stage, which is the only one of the command."""
    features = {
        "ray_grpo": "RL in this program",
        "ray_ppo": "RL in this program",
        "trl_ppo": "RL in this program",
    }
    feature = features.get(str(stage.value), "this stage")
    advice = f"It must be sft, {', '.join(STAGES)}. For RL, use `msrl train-grpo`."
    translation.add_error(stage, f"not supported: {feature}. {advice}")
    translation.refuse_as_one()


def _dtype(keys: Keys) -> None:
    if keys.value("fp16") is True:
        text = "msrl does not train in float16"
        keys.translation.approximate(keys.get("fp16"), "model.dtype", "bfloat16", text)


def _initial_weights(translation: Translation, keys: Keys, *, is_text: bool) -> None:
    """Start a pretraining without a checkpoint from random weights, and refuse other trainings."""
    if keys.value("load") == _NO_CHECKPOINT:
        keys.discard(["load"], "names no folder, so the original starts from random weights")
    if keys.get("load") is not None or keys.get("pretrained_checkpoint") is not None:
        return
    if is_text:
        translation.set("model.init", wrap("random", keys.origin("data_path")))
        return
    translation.errors.append(
        f"{translation.name}: load: missing. The original starts from random weights, which only "
        "a pretraining can use. Set it to a checkpoint."
    )


def _decay(translation: Translation, keys: Keys) -> None:
    """Check that the schedule ends with the training, which it always does in msrl."""
    entry = keys.get("lr_decay_iters")
    steps = keys.value("train_iters")
    if entry is None:
        return
    if entry.value == steps or keys.value("lr_decay_style") == "constant":
        translation.record(entry, KeyStatus.SAME, "the schedule ends with the training")
    else:
        text = f"the learning rate decays over {entry.value} steps of {steps}"
        translation.approximate(entry, "train.steps", steps, text)


def _split(translation: Translation, keys: Keys, *, is_text: bool) -> None:
    """Translate the part of the rows that the original does not train on: the last ones."""
    entry = keys.get("split")
    if entry is None or translation.row(entry).is_off(entry.value):
        return None
    values = str(entry.value).replace(" ", "").replace("/", ",").split(",")
    if not all(re.fullmatch(r"\d+(\.\d*)?", value) for value in values):
        translation.add_error(entry, "must be up to three numbers, such as 100,0,0")
    elif set(values[1:]) <= {"0", "0.0"}:
        translation.record(entry, KeyStatus.OFF, "all rows are training rows")
    elif is_text or not float(values[0] or 0):
        text = "msrl trains on all rows of data.train, and evaluates those of data.eval"
        translation.difference(entry, text)
    else:
        numbers = [float(value) for value in values]
        translation.set("data.eval_rows", wrap("last", entry.origin))
        if not sum(numbers[2:]):
            return translation.assign(entry, ["data.eval_fraction"], numbers[1] / sum(numbers))
        held_out = round(1 - numbers[0] / sum(numbers), 12)
        text = "the original tests the last of these rows after the training, msrl evaluates them"
        return translation.approximate(entry, "data.eval_fraction", held_out, text)
    return None


def _memory(translation: Translation, keys: Keys) -> None:
    """Translate chunks of logits and the timeout of collectives."""
    mode = keys.value("loss_compute_mode")
    if mode not in (None, "default", "chunk"):
        keys.add_error("loss_compute_mode", "must be default or chunk")
    chunks = mode == "chunk"
    size = keys.get("loss_chunk_size")
    if chunks and size is not None:
        translation.assign(size, ["train.chunk"], size.value, why="memory only")
    keys.record("loss_chunk_size", KeyStatus.OFF, "read with loss_compute_mode: chunk only")
    status = KeyStatus.SPEED if chunks else KeyStatus.OFF
    keys.record("loss_compute_mode", status, "train.chunk: loss_chunk_size" if chunks else "")
    timeout = keys.number("distributed_timeout_minutes")
    if timeout is not None and keys.get("distributed_timeout_minutes"):
        keys.assign("distributed_timeout_minutes", ["cluster.rpc_timeout_s"], 60.0 * timeout)


def _trackers(translation: Translation, keys: Keys) -> None:
    """Translate the trackers and their folders and projects."""
    names = [
        name
        for name, key in (("tensorboard", "tensorboard_dir"), ("wandb", "wandb_project"))
        if keys.value(key)
    ]
    folder = keys.get("tensorboard_dir")
    if folder is not None:
        translation.set("log.trackers", wrap(names, folder.origin))
        keys.assign("tensorboard_dir", ["log.options.tensorboard.dir"], folder.value)
    has_wandb = "wandb" in names
    if has_wandb:
        translation.set("log.trackers", wrap(names, keys.origin("wandb_project")))
    options = {"wandb_project": "project", "wandb_entity": "entity", "wandb_save_dir": "dir"}
    put_tracker_options(keys, "wandb", options, is_on=has_wandb)


def _profile(keys: Keys) -> None:
    """Translate Megatron's steps to trace, which it counts from 0 up to the last one."""
    first, last = keys.number("profile_step_start"), keys.number("profile_step_end")
    put_profile(
        keys,
        is_on=keys.value("profile") is True,
        first=None if first is None else first + 1,
        last=last,
    )


def _evaluation(translation: Translation, keys: Keys) -> None:
    iters, every = keys.get("eval_iters"), keys.get("eval_interval")
    if iters is None or iters.value == 0 or keys.value("eval_interval") is None:
        for entry in (iters, every):
            if entry is not None:
                translation.record(entry, KeyStatus.OFF, "no evaluation")
        return
    keys.put("eval_interval", "eval.every_steps")
    batch = keys.number("global_batch_size") or 1
    rows = (keys.number("eval_iters") or 0) * batch
    keys.assign("eval_iters", ["eval.prompts"], rows, why="rows: eval_iters batches")
