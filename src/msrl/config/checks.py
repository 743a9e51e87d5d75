"""What can be known wrong before any device is asked for, per command: missing keys and files, unknown names, sizes that do not fit.

Each check is a generator of lines; all of them run, so that one pass names every mistake.
"""

from __future__ import annotations

import glob
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from msrl.config import derived
from msrl.config.algorithm_checks import algorithm as _algorithm
from msrl.config.loader import Resolved
from msrl.config.messages import description
from msrl.config.plugins import plugin as _plugin
from msrl.config.reward_checks import rewards as _rewards
from msrl.config.templates import find_template
from msrl.errors import ManyErrors, MsrlError
from msrl.models.cut import Cut
from msrl.models.families import all_rules, load_shape
from msrl.models.select import check_layers, chosen
from msrl.models.shape import Shape

Check = Callable[[Resolved], Iterator[str]]
TRACKER = "latest_checkpointed_iteration.txt"


def check(resolved: Resolved, command: str) -> None:
    """Raises ManyErrors with one line for everything that `command` cannot do with this configuration."""
    lines = [line for one in CHECKS.get(command, ()) for line in one(resolved)]
    if lines:
        raise ManyErrors(list(dict.fromkeys(lines)))


def guess(resolved: Resolved) -> str | None:
    """The command that a configuration is meant for, by the sections that it sets."""
    for key, command in _TELLTALE.items():
        if resolved.is_set(key):
            return command
    return None


_TELLTALE = {
    "reward.sources": "train-grpo",
    "rollout": "train-grpo",
    "convert": "convert-ckpt",
    "preprocess": "preprocess",
    "generate": "generate",
    "chat": "chat",
    "data.train": "train-sft",
    "train": "train-sft",
}


def _value(resolved: Resolved, key: str) -> object:
    value: object = resolved.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _needed(resolved: Resolved, *keys: str) -> Iterator[str]:
    """A line for each key without a value."""
    for key in keys:
        if _value(resolved, key) in (None, ()):
            section, name = key.split(".", 1)
            flag = f"give --{name.replace('_', '-')}" if section in ("convert", "preprocess", "generate", "chat") else f"set {key}"
            yield f"{key}: is missing; {flag}: {description(key.split('.'))}"


def _folder(resolved: Resolved, key: str) -> Iterator[str]:
    path = _value(resolved, key)
    if isinstance(path, str) and not Path(path).is_dir():
        yield resolved.mistake(key, "there is no such folder")


def _checkpoint(resolved: Resolved, key: str) -> Iterator[str]:
    """A line when the path is neither a Hugging Face folder nor an mcore checkpoint."""
    yield from _folder(resolved, key)
    path = _value(resolved, key)
    if isinstance(path, str) and Path(path).is_dir() and not _is_hf(path) and not _is_mcore(path):
        yield resolved.mistake(key, f"holds neither config.json (Hugging Face) nor {TRACKER} (mcore)")


def _is_hf(path: str) -> bool:
    return (Path(path) / "config.json").is_file()


def _is_mcore(path: str) -> bool:
    return (Path(path) / TRACKER).is_file()


def _template(resolved: Resolved, key: str) -> Iterator[str]:
    name = _value(resolved, key)
    if isinstance(name, str):
        try:
            find_template(name)
        except MsrlError as error:
            yield resolved.mistake(key, str(error))


# --- training -------------------------------------------------------------------------------------------------------------------


def _training_inputs(resolved: Resolved) -> Iterator[str]:
    config = resolved.config
    if config.model.path is None and config.checkpoint.load is None:
        yield from _needed(resolved, "model.path")
    if not config.data.blend:
        yield from _needed(resolved, "data.train")
    yield from _checkpoint(resolved, "model.path")
    yield from _checkpoint(resolved, "checkpoint.load")
    yield from _folder(resolved, "model.tokenizer")
    yield from _template(resolved, "model.template")
    for key in ("data.train", "data.eval"):
        yield from _prefix(resolved, key)
    if config.checkpoint.resume not in ("none", "auto") and not Path(config.checkpoint.resume).is_dir():
        yield resolved.mistake("checkpoint.resume", "must be none, auto, or the folder of a checkpoint; there is no such folder")


def _prefix(resolved: Resolved, key: str) -> Iterator[str]:
    """A line when no preprocessed data has this prefix."""
    prefix = _value(resolved, key)
    if isinstance(prefix, str) and not any(Path(prefix).parent.glob(f"{glob.escape(Path(prefix).name)}_*.idx")):
        yield resolved.mistake(key, f"there is no preprocessed data of this prefix ({prefix}_*.idx); write it with `msrl preprocess`")


def _kind(resolved: Resolved, wanted: str, how: str) -> Iterator[str]:
    """A line for data of another kind; data of other systems has no manifest, and its kind is not known."""
    for key in ("data.train", "data.eval"):
        manifest = Path(f"{_value(resolved, key)}_manifest.json")
        if not manifest.is_file():
            continue
        try:
            found = json.loads(manifest.read_text(encoding="utf-8")).get("kind", wanted)
        except (ValueError, AttributeError):
            continue  # said when the data is opened
        if found != wanted:
            yield resolved.mistake(key, f"holds {found} data, and {wanted} is needed; preprocess it {how}")


def _examples(resolved: Resolved) -> Iterator[str]:
    if resolved.config.data.handler == "pretrain":
        yield from _text(resolved)
        return
    yield from _kind(resolved, "sft", "with a handler of demonstrations, or --kind sft")
    if resolved.config.data.blend:
        yield resolved.mistake("data.blend", "mixes datasets of text; set data.handler to pretrain, or name one dataset in data.train")


def _text(resolved: Resolved) -> Iterator[str]:
    """Lines for what does not fit continued pretraining."""
    yield from _kind(resolved, "pretrain", "with handler pretrain")
    data = resolved.config.data
    if data.blend and data.train is not None:
        yield resolved.mistake("data.blend", "stands beside data.train; name all prefixes here, or only data.train")
    if data.blend and resolved.config.train.steps is None:
        yield "train.steps: is missing; a blend of datasets has no epochs, so the number of steps must be set"
    if data.seq_length is None or data.seq_length < 2:
        yield f"data.seq_length={data.seq_length}: data.handler=pretrain cuts documents into rows of so many tokens; set 2 or more"
    for key, is_set in (("pack", data.pack), ("eval_fraction", data.eval_fraction > 0), ("too_long", data.too_long != "refuse")):
        if is_set:
            yield resolved.mistake(f"data.{key}", "means nothing for data.handler=pretrain, whose rows are cut from text; leave it out")


def _prompts(resolved: Resolved) -> Iterator[str]:
    for key, is_set in (("data.handler", resolved.config.data.handler is not None), ("data.blend", bool(resolved.config.data.blend))):
        if is_set:
            yield resolved.mistake(key, "is of train-sft alone; leave it out")
    yield from _kind(resolved, "prompts", "with a handler of prompts such as r1, or --kind prompts")


def _length_of_training(resolved: Resolved) -> Iterator[str]:
    train = resolved.config.train
    if train.steps is None and train.epochs is None:
        yield "train.steps: is missing; set train.steps or train.epochs"
    if train.steps is not None and train.epochs is not None:
        yield resolved.mistake("train.epochs", f"stands beside train.steps={train.steps}; set only one of them, the other to null")
    if train.optimizer.min_lr > train.optimizer.lr:
        yield resolved.mistake("train.optimizer.min_lr", f"must be at most train.optimizer.lr={train.optimizer.lr}")
    yield from _evaluation(resolved)
    if train.max_tokens_per_micro_batch is not None and resolved.is_set("train.micro_batch"):
        yield resolved.mistake("train.micro_batch", "has no effect beside train.max_tokens_per_micro_batch; set only one of them")


def _evaluation(resolved: Resolved) -> Iterator[str]:
    config = resolved.config
    is_held_out = config.data.eval is not None or config.data.eval_fraction > 0
    if config.eval.every_steps is not None and not is_held_out:
        yield resolved.mistake("eval.every_steps", "needs data.eval, the prefix of the held-out data")
    if config.data.eval is not None and config.data.eval_fraction > 0:
        yield resolved.mistake("data.eval_fraction", "stands beside data.eval; set only one of them")
    for key, is_set in (("eval.patience", config.eval.patience is not None), ("checkpoint.keep_best", config.checkpoint.keep_best)):
        if is_set and config.eval.every_steps is None:
            yield resolved.mistake(key, "looks at evaluations; set eval.every_steps")


def _sft_only(resolved: Resolved) -> Iterator[str]:
    """Lines for what train-grpo does not read."""
    for key in ("data.eval_fraction", "data.too_long", "data.pack", "eval.patience", "checkpoint.keep_best"):
        if resolved.is_set(key) and _value(resolved, key) not in (None, False, 0.0, "refuse"):
            yield resolved.mistake(key, "is for train-sft; train-grpo does not read it")


def _memory(resolved: Resolved) -> Iterator[str]:
    recompute, shape = resolved.config.train.recompute, _shape_or_none(resolved)
    used = {"none": (), "full": ("method", "layers"), "selective": ("modules",)}[recompute.granularity]
    for name in ("method", "layers", "modules"):
        if name not in used and resolved.is_set(f"train.recompute.{name}"):
            yield resolved.mistake(f"train.recompute.{name}", f"has no effect with train.recompute.granularity={recompute.granularity}")
    if shape is not None and recompute.granularity == "selective":
        if shape.mla is not None and "core_attn" in recompute.modules:
            yield resolved.mistake("train.recompute.modules", "core_attn is not for latent attention; name mlp or moe, or set full")
        if shape.moe is None and "moe" in recompute.modules:
            yield resolved.mistake("train.recompute.modules", "the model has no mixture of experts; leave moe out")


def _lora(resolved: Resolved) -> Iterator[str]:
    lora, shape = resolved.config.train.lora, _shape_or_none(resolved)
    if lora.rank is None:
        for name in ("alpha", "targets", "dropout"):
            if resolved.is_set(f"train.lora.{name}"):
                yield resolved.mistake(f"train.lora.{name}", "has no effect without train.lora.rank; set it")
        return
    if resolved.config.train.freeze:
        yield resolved.mistake("train.freeze", "stands beside train.lora, which freezes the whole model; set only one of them")
    if shape is not None:
        try:
            check_layers(shape, lora.targets, key="train.lora.targets")
        except MsrlError as error:
            yield str(error)


def _rollout_offload(resolved: Resolved) -> Iterator[str]:
    for kind in ("grads", "params"):
        if getattr(resolved.config.train.offload, kind):
            yield resolved.mistake(f"train.offload.{kind}", "rests while train-grpo generates; train-sft needs it all the time")


def _frozen(resolved: Resolved) -> Iterator[str]:
    shape = _shape_or_none(resolved)
    if shape is not None and resolved.config.train.freeze:
        try:
            names = chosen(shape, resolved.config.train.freeze, key="train.freeze")
        except MsrlError as error:
            yield str(error)
            return
        if len(names) == len(all_rules(shape)):
            yield resolved.mistake("train.freeze", "leaves nothing to train")


def _devices(resolved: Resolved) -> Iterator[str]:
    config, parallel = resolved.config, resolved.config.train.parallel
    world, needed = derived.world_size(config), derived.replica_size(config)
    if world % needed:
        cut = f"{derived.cut_of(parallel)}" + (f", cp {parallel.cp}" if parallel.cp > 1 else "")
        needs = f"must be a multiple of the {needed} ranks that train.parallel ({cut}) makes of one model"
        yield resolved.mistake("cluster.devices_per_node", needs)
    if config.cluster.nodes > 1 and config.cluster.address is None:
        yield resolved.mistake("cluster.nodes", "needs cluster.address, the cluster that `msrl cluster up` and `join` made")
    if parallel.sp and parallel.tp == 1:
        yield resolved.mistake("train.parallel.sp", "spreads over tensor-parallel ranks; set train.parallel.tp above 1, or false")


def _one_node(resolved: Resolved) -> Iterator[str]:
    if resolved.config.cluster.nodes > 1:
        yield resolved.mistake("cluster.nodes", "train-sft runs on one machine in this version; set 1")


def _model(resolved: Resolved) -> Iterator[str]:
    """Whether the model can be cut as asked, and is long enough."""
    paths = [path for path in (resolved.config.checkpoint.load, resolved.config.model.path) if path is not None]
    if not paths or not all(_is_hf(path) or _is_mcore(path) for path in paths):
        return  # said by _training_inputs
    try:
        shape = derived.model_shape(resolved.config)
    except MsrlError as error:
        yield str(error)
        return
    if shape is None:
        return
    yield from _cuts(resolved, shape, "train.parallel", derived.cut_of(resolved.config.train.parallel))
    seq_length = resolved.config.data.seq_length
    if seq_length is not None and seq_length > shape.max_position_embeddings:
        yield resolved.mistake("data.seq_length", f"the model takes at most {shape.max_position_embeddings} tokens")


def _cuts(resolved: Resolved, shape: Shape, section: str, cut: Cut) -> Iterator[str]:
    """Lines for what does not fit the model in a section that asks for `cut`."""
    for field, message in cut.problems(shape):
        yield resolved.mistake(f"{section}.{field}", message)


def _sft_batches(resolved: Resolved) -> Iterator[str]:
    config, train = resolved.config, resolved.config.train
    yield from _batch(resolved, "train.global_batch", train.global_batch)
    limit, longest = train.max_tokens_per_micro_batch, config.data.seq_length
    if limit is not None and longest is not None and limit < longest:
        yield resolved.mistake("train.max_tokens_per_micro_batch", f"must hold at least one row: data.seq_length={longest}")


def _batch(resolved: Resolved, key: str, batch: int) -> Iterator[str]:
    """A line when a batch does not spread evenly over ranks and micro-batches."""
    dp = max(derived.dp_size(resolved.config), 1)
    by_tokens = resolved.config.train.max_tokens_per_micro_batch is not None
    micro = 1 if by_tokens else resolved.config.train.micro_batch
    if batch % (dp * micro):
        factors = f"data parallel {dp}" + ("" if by_tokens else f" * train.micro_batch {micro}")
        message = f"must be a multiple of {dp * micro} ({factors})"
        yield resolved.mistake(key, message) if _value(resolved, key) is not None else f"{key}: {batch} samples {message}"


# --- train-grpo -----------------------------------------------------------------------------------------------------------------


def _grpo_batches(resolved: Resolved) -> Iterator[str]:
    config = resolved.config
    total, update = derived.samples_per_step(config), derived.samples_per_update(config)
    if total % update:
        product = f"{config.rollout.prompts_per_step} prompts * {config.rollout.samples_per_prompt} samples = {total}"
        yield resolved.mistake("train.updates.samples_per_update", f"must divide the samples of a step: {product}")
    yield from _batch(resolved, "train.updates.samples_per_update", update)


def _grpo_lengths(resolved: Resolved) -> Iterator[str]:
    config, rollout = resolved.config, resolved.config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    both = f"max_prompt_tokens {rollout.max_prompt_tokens} + max_response_tokens {rollout.max_response_tokens} = {longest}"
    engine = rollout.engine.max_model_len
    if engine is not None and engine < longest:
        yield resolved.mistake("rollout.engine.max_model_len", f"must hold rollout.{both} tokens")
    limit = config.train.max_tokens_per_micro_batch
    if limit is not None and limit < longest:
        yield resolved.mistake("train.max_tokens_per_micro_batch", f"must hold one sequence: rollout.{both} tokens")
    shape = _shape_or_none(resolved)
    if shape is not None and longest > shape.max_position_embeddings:
        message = f"rollout.{both} tokens, and the model takes at most {shape.max_position_embeddings}"
        yield resolved.mistake("rollout.max_response_tokens", message)


def _engines(resolved: Resolved) -> Iterator[str]:
    engine, world = resolved.config.rollout.engine, derived.world_size(resolved.config)
    if engine.tp * engine.dp > world:
        needs = f"{engine.dp} engines of {engine.tp} devices need {engine.tp * engine.dp}, and training has {world}"
        yield resolved.mistake("rollout.engine.tp" if engine.tp > world else "rollout.engine.dp", f"{needs}; set cluster.devices_per_node")
    shape = _shape_or_none(resolved)
    if shape is not None and shape.num_attention_heads % engine.tp:
        yield resolved.mistake("rollout.engine.tp", f"must divide the model's {shape.num_attention_heads} attention heads")


def _shape_or_none(resolved: Resolved) -> Shape | None:
    """The model's shape; None where `_model` says why it cannot be read."""
    try:
        return derived.model_shape(resolved.config)
    except MsrlError:
        return None


# --- the other commands -----------------------------------------------------------------------------------------------------------


def _convert(resolved: Resolved) -> Iterator[str]:
    convert = resolved.config.convert
    yield from _needed(resolved, "convert.command", "convert.load")
    yield from _folder(resolved, "convert.hf_config")
    yield from _folder(resolved, "convert.lora")
    yield from _convert_source(resolved)
    if convert.command != "inspect":
        yield from _needed(resolved, "convert.save")
        if convert.save is not None and Path(convert.save).exists() and (Path(convert.save).is_file() or any(Path(convert.save).iterdir())):
            yield resolved.mistake("convert.save", "exists and is not an empty folder; name another, or remove it")


def _convert_source(resolved: Resolved) -> Iterator[str]:
    """Whether the checkpoint to read is of the right kind and can be cut as asked."""
    convert = resolved.config.convert
    if convert.load is None:
        return
    folder = list(_folder(resolved, "convert.load"))
    yield from folder
    from_hf = convert.command in ("hf2mcore", "hf2hf")
    if not folder and from_hf and not _is_hf(convert.load):
        yield resolved.mistake("convert.load", "holds no config.json; give the folder of a Hugging Face model")
    elif not folder and not from_hf and not _is_mcore(convert.load):
        yield resolved.mistake("convert.load", f"holds no {TRACKER}; give the folder of an mcore checkpoint")
    elif not folder and convert.command in ("hf2mcore", "reshard"):
        where = derived.config_dir(convert.load, None if from_hf else convert.hf_config)
        try:
            yield from _cuts(resolved, load_shape(where), "convert", derived.cut_of(convert))
        except MsrlError as error:
            yield str(error)


def _preprocess(resolved: Resolved) -> Iterator[str]:
    preprocess = resolved.config.preprocess
    yield from _needed(resolved, "preprocess.input", "preprocess.tokenizer", "preprocess.handler", "preprocess.output_prefix")
    for i, name in enumerate(preprocess.input):
        if not Path(name).exists() and not glob.glob(name):  # noqa: PTH207  (pathlib takes no absolute patterns)
            yield resolved.mistake(f"preprocess.input.{i}", "there is no such file or folder")
    yield from _folder(resolved, "preprocess.tokenizer")
    yield from _template(resolved, "preprocess.template")
    if preprocess.handler is not None:
        package = "msrl.data.handlers"
        aliases: dict[str, str] = getattr(importlib.import_module(package), "ALIASES", {})
        yield from _plugin(resolved, "preprocess.handler", package, preprocess.handler, aliases)
        if aliases.get(preprocess.handler, preprocess.handler) != "pretrain":
            yield from _needed(resolved, "preprocess.template")
    if preprocess.pack:
        yield from _needed(resolved, "preprocess.seq_length")


def _generate(resolved: Resolved) -> Iterator[str]:
    generate = resolved.config.generate
    yield from _needed(resolved, "generate.model")
    yield from _checkpoint(resolved, "generate.model")
    yield from _template(resolved, "generate.template")
    if (generate.prompt is None) == (generate.input is None):
        yield "generate.prompt: give either --prompt TEXT or --input FILE, one of the two"
    if generate.input is not None and not Path(generate.input).is_file():
        yield resolved.mistake("generate.input", "there is no such file")
    if generate.raw and (generate.template is not None or generate.system is not None):
        yield resolved.mistake("generate.raw", "takes prompts as they are; leave out template and system")
    if generate.num_samples > 1 and generate.temperature == 0:
        yield resolved.mistake("generate.num_samples", "all samples would be the same at temperature 0; set a temperature above 0")


def _chat(resolved: Resolved) -> Iterator[str]:
    yield from _needed(resolved, "chat.model")
    yield from _checkpoint(resolved, "chat.model")
    yield from _template(resolved, "chat.template")


_TRAINING: tuple[Check, ...] = (_training_inputs, _length_of_training, _devices, _model, _frozen, _memory, _lora)

CHECKS: dict[str, tuple[Check, ...]] = {
    "train-sft": (*_TRAINING, _examples, _one_node, _sft_batches, _rollout_offload),
    "train-grpo": (*_TRAINING, _prompts, _sft_only, _rewards, _algorithm, _grpo_batches, _grpo_lengths, _engines),
    "convert-ckpt": (_convert,),
    "preprocess": (_preprocess,),
    "generate": (_generate,),
    "chat": (_chat,),
    "cluster": (),
}
