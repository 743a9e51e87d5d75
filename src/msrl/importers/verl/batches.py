"""Translation of verl's data, batches, optimizers and adapters.

Batches count prompts in verl and samples in msrl. The learning rate changes once per step in verl,
and once per update in msrl. Source: verl 1dda0392, verl/workers/engine_workers.py and
verl/workers/engine.
"""

from __future__ import annotations

from typing import Any, cast

from msrl.config.sources import wrap
from msrl.importers.native_keys import has_key
from msrl.importers.sections import Keys, settings_of
from msrl.importers.table import as_list
from msrl.importers.translation import KeyStatus, SourceKey
from msrl.importers.verl.images import are_of_tower, has_images
from msrl.importers.verl.layout import data_parallel, shared_ranks
from msrl.importers.verl.sections import ACTOR, MODEL, OPTIM, ROLLOUT, Sections

_PREFIX = "data/train"
_TAG = "extra.tag"  # the column by which reward sources choose rows
POLICY, CRITIC = "train.optimizer", "cluster.roles.critic.optimizer"
_FROM_ZERO = "train.optimizer.warmup_from_zero"
_NO_BETAS = "Megatron of the original has [0.9, 0.999] whatever this is"
_CRITIC_LR = 1e-5  # default of the original, in which the policy's is 1e-6


def put_data(sections: Sections) -> None:
    """Translate the rows and their limits."""
    data = sections["data"]
    for key, native in (("train_files", "data.train"), ("val_files", "data.eval")):
        put_files(data, key, native, sections[MODEL].value("path"))
    _put_columns(data)
    truncation = data.get("truncation")
    drops = data.switch("filter_overlong_prompts", default=False)
    if truncation is not None and truncation.value not in ("error", None) and not drops:
        text = "the original truncates longer prompts, msrl drops them"
        data.translation.difference(truncation, text)
    text = "longer prompts are dropped, and their number is reported"
    data.record("truncation", KeyStatus.SAME, text)
    data.record("filter_overlong_prompts", KeyStatus.SAME, text)
    seed = data.get("seed")
    if seed is not None and seed.value is not None:
        data.translation.assign(seed, ["run.seed"], seed.value)
    _put_template(sections)


def put_files(data: Keys, key: str, native: str, model: object, kind: str = "prompts") -> None:
    """Translate files of rows, which the run preprocesses; several are written together first."""
    entry = data.get(key)
    files = [str(name) for name in as_list(entry.value)] if entry and entry.value else []
    if entry is None or not files:
        return data.record(key, KeyStatus.OFF, "")
    if len(files) == 1:
        return data.translation.assign(entry, [native], files[0])
    if native == "data.eval":
        text = f"several files: write them with `msrl preprocess` and set {native} to their prefix"
        return data.translation.record(entry, KeyStatus.DROPPED, text)
    settings: dict[str, object] = {
        "input": files,
        "kind": kind,
        "handler": "auto",
        "template": "native",
        "tokenizer": model,
        "output_prefix": _PREFIX,
    }
    for name, value in settings.items():
        data.translation.set(f"preprocess.{name}", wrap(value, entry.origin))
    data.translation.set(native, wrap(_PREFIX, entry.origin))
    text = f"preprocess.input, and {native}: {_PREFIX}"
    return data.translation.record(entry, KeyStatus.APPLIED, text)


def _put_columns(data: Keys) -> None:
    """Translate the names of columns: the data source's column is the tag of reward sources."""
    columns = {_TAG: str(data.value("reward_fn_key"))}
    prompt = data.value("prompt_key")
    if prompt != "prompt":
        columns["messages"] = str(prompt)
    data.translation.set("preprocess.map_keys", wrap(columns, data.origin("train_files")))
    for key in ("reward_fn_key", "prompt_key"):
        data.record(key, KeyStatus.APPLIED, "preprocess.map_keys")


def _put_template(sections: Sections) -> None:
    """Record how prompts are rendered, which preprocessing decides."""
    data, model = sections["data"], sections[MODEL]
    entry = data.get("apply_chat_template_kwargs")
    if entry is not None and entry.value:
        text = (
            "arguments of the chat template: choose a template of `msrl preprocess` that has them"
        )
        data.translation.difference(entry, text)
    entry = model.get("custom_chat_template")
    if entry is not None and entry.value:
        text = "a chat template in the configuration: use `msrl preprocess --template FILE`"
        data.translation.difference(entry, text)
    entry = model.get("override_config")
    keys = _model_changes(entry)
    names = [name for name, value in keys.items() if value and name not in _SAME_MODEL]
    if entry is not None and names:
        text = f"not supported: changes of the model ({', '.join(names)}). Change its config.json."
        data.translation.add_error(entry, text)
    elif entry is not None and keys.get(_POSITIONS):
        text = (
            f"{_POSITIONS}={keys[_POSITIONS]}: msrl reads it from the model's config.json, where "
            "it changes results only with a scaled rotary embedding"
        )
        data.translation.difference(entry, text)
    elif entry is not None:
        data.translation.record(entry, KeyStatus.SPEED, "implementation of attention")


_POSITIONS = "max_position_embeddings"
_SAME_MODEL = ("attn_implementation", _POSITIONS)


def _model_changes(entry: SourceKey | None) -> dict[str, object]:
    """Return the changes of a model's configuration; those for Megatron are in `model_config`."""
    keys = settings_of(entry)
    inner = keys.pop("model_config", None)
    return keys | cast(dict[str, object], inner) if isinstance(inner, dict) else keys


def samples_per_prompt(sections: Sections) -> int:
    """Return the number of responses to a prompt; 1 for a placeholder."""
    return sections[ROLLOUT].number("n") or 1


def updates_per_step(sections: Sections) -> int | None:
    """Return the number of updates of a step in the original; None for placeholders."""
    if sections.is_supervised:
        return 1
    minis, epochs = _mini_batches(sections), sections[ACTOR].number("ppo_epochs")
    return None if minis is None or epochs is None else minis * epochs


def _mini_batches(sections: Sections) -> int | None:
    """Return the number of mini-batches of a step; None for placeholders."""
    prompts = sections["data"].number("train_batch_size")
    mini = sections[ACTOR].number("ppo_mini_batch_size")
    return None if prompts is None or not mini else -(-prompts // mini)


def put_batches(sections: Sections) -> None:
    """Translate the samples of an update and of a pass."""
    actor, samples = sections[ACTOR], samples_per_prompt(sections)
    mini = actor.number("ppo_mini_batch_size")
    if mini is not None:
        why = f"{mini} prompts with {samples} samples"
        native = "train.updates.samples_per_update"
        actor.assign("ppo_mini_batch_size", [native], mini * samples, why=why)
    if (_mini_batches(sections) or 1) > 1:
        _put_order(sections)
    text = "how samples are distributed over ranks"
    sections["trainer"].record("balance_batch", KeyStatus.SPEED, text)
    if actor.switch("use_dynamic_bsz", default=False):
        _put_dynamic(sections)
    else:
        _put_fixed(sections)


def _put_order(sections: Sections) -> None:
    """Take the samples of each mini-batch as the data-parallel ranks of the original do.

    The trainer v1 does not read balance_batch: it always balances, and takes the prompts in the
    order of a set of random names (verl/trainer/ppo/v1/trainer_base.py and replay_buffer.py).
    """
    trainer, ranks = sections["trainer"], data_parallel(sections)
    is_balanced = trainer.value("balance_batch") is not False
    if trainer.value("use_v1") is not False:
        reason = "takes prompts in a random order, and balances lengths over ranks"
        trainer.record("balance_batch", KeyStatus.DEAD, "the trainer v1 always balances")
    elif is_balanced:
        reason = "balances lengths over ranks before it splits them"
    elif ranks is None:
        reason = "splits each data-parallel rank's part; their number is not known here"
    else:
        native = "train.updates.shards"
        trainer.assign("balance_batch", [native], ranks, why="the data-parallel ranks")
        return
    text = "the mini-batches of a step have other samples of it than in the original, which"
    trainer.translation.remarks.append(f"{trainer.translation.name}: {text} {reason}")


def _put_dynamic(sections: Sections) -> None:
    actor, key = sections[ACTOR], "ppo_max_token_len_per_gpu"
    tokens, ranks = actor.number(key), shared_ranks(sections)
    if tokens is not None:
        why = f"of {ranks} ranks that share a sequence" if ranks > 1 else ""
        native = "train.max_tokens_per_micro_batch"
        actor.assign(key, [native], tokens * ranks, why=why)
        actor.record("use_dynamic_bsz", KeyStatus.APPLIED, native)
    for name in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"):
        actor.record(name, KeyStatus.DEAD, "overridden by use_dynamic_bsz")
    text = "train.max_tokens_per_micro_batch applies to these passes too"
    sections[ROLLOUT].record("log_prob_micro_batch_size_per_gpu", KeyStatus.SPEED, text)


def _put_fixed(sections: Sections) -> None:
    actor, rollout = sections[ACTOR], sections[ROLLOUT]
    own, whole = actor.get("ppo_micro_batch_size_per_gpu"), actor.number("ppo_micro_batch_size")
    if own is not None and own.value is not None:
        actor.assign("ppo_micro_batch_size_per_gpu", ["train.micro_batch"], own.value)
    elif whole is not None:
        size = max(1, whole // (data_parallel(sections) or 1))
        why = "of all data-parallel ranks in the original"
        actor.assign("ppo_micro_batch_size", ["train.micro_batch"], size, why=why)
    for key in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"):
        actor.record(key, KeyStatus.OFF, "")
    actor.record("use_dynamic_bsz", KeyStatus.OFF, "")
    actor.record("ppo_max_token_len_per_gpu", KeyStatus.DEAD, "read with use_dynamic_bsz only")
    forward = rollout.get("log_prob_micro_batch_size_per_gpu")
    if forward is not None and forward.value is not None:
        rollout.translation.assign(forward, ["train.forward_micro_batch"], forward.value)


# --- Optimizers ---


def put_optimizer(sections: Sections, name: str, native: str) -> None:
    """Translate the optimizer of the policy or the critic to the keys below `native`."""
    keys = sections[name]
    if native == CRITIC and keys.get("lr") is None:
        keys.translation.set_default(f"{native}.lr", _CRITIC_LR)
    for key in ("lr", "weight_decay"):
        keys.put(key, f"{native}.{key}")
    _put_kind(keys)
    _put_schedule(sections, keys, native)
    _put_warmup(sections, keys, native)
    if native == POLICY:
        _put_betas(sections, keys)
        keys.translation.set_default("train.optimizer.eps", 1e-8)
        _put_clipping(sections)
    else:
        policy = sections[OPTIM]
        if sections.is_megatron:
            keys.record("betas", KeyStatus.DEAD, _NO_BETAS)
        elif _betas(keys) == _betas(policy):
            keys.record("betas", KeyStatus.SAME, "that of the policy")
        else:
            _require_equal(keys, "betas", policy.value("betas"))
        _require_equal(keys, "clip_grad", policy.value("clip_grad"))
    if not sections.is_megatron and keys.value("weight_decay"):
        text = f"{keys.translation.name}: the original also decays biases and norms, msrl matrices"
        if text not in keys.translation.remarks:
            keys.translation.remarks.append(text)


def _put_betas(sections: Sections, keys: Keys) -> None:
    """Translate the betas of Adam, a list or the text of one."""
    native, value = "train.optimizer.betas", _betas(keys)
    if sections.is_megatron:
        keys.record("betas", KeyStatus.DEAD, _NO_BETAS)
        return keys.translation.set_default(native, [0.9, 0.999])
    if value is None:
        return keys.add_error("betas", "must be a list of two numbers, such as [0.9, 0.999]")
    return keys.assign("betas", [native], value)


def _betas(keys: Keys) -> list[Any] | None:
    """Return the list of betas; None if it is none."""
    value: Any = keys.value("betas")
    if isinstance(value, str):
        try:
            return [float(number) for number in value.strip("[]() ").split(",")]
        except ValueError:
            return None
    return cast("list[Any]", value) if isinstance(value, list) else None


def _put_clipping(sections: Sections) -> None:
    """Translate the gradient norm; versions before v0.7 read the actor's norm with FSDP."""
    keys, actor = sections[OPTIM], sections[ACTOR]
    clip, earlier = keys.get("clip_grad"), actor.get("grad_clip")
    if clip is None and earlier is not None and not sections.is_megatron:
        return actor.assign("grad_clip", ["train.optimizer.grad_clip"], earlier.value)
    actor.record("grad_clip", KeyStatus.DEAD, "the original reads optim.clip_grad")
    return keys.put("clip_grad", "train.optimizer.grad_clip")


def _require_equal(keys: Keys, key: str, value: object) -> None:
    """Refuse another value of the critic than the policy's, which is used for both."""
    entry = keys.get(key)
    if entry is None:
        return
    if entry.value == value:
        keys.translation.record(entry, KeyStatus.SAME, "that of the policy")
    else:
        text = f"not supported: the critic has the value of the policy, {value}"
        keys.translation.add_error(entry, text)


def _put_kind(keys: Keys) -> None:
    """Refuse other optimizers than AdamW."""
    name, package = keys.get("optimizer"), keys.get("optimizer_impl")
    if name is not None and str(name.value).lower() in ("adamw", "adam"):
        keys.record("optimizer", KeyStatus.SAME, "AdamW")
    elif name is not None:
        keys.add_error("optimizer", "not supported: msrl trains with AdamW")
    if package is not None and package.value == "torch.optim":
        keys.record("optimizer_impl", KeyStatus.SAME, "the same optimizer")
    elif package is not None:
        keys.add_error("optimizer_impl", "not supported: an optimizer of another package")
    for key, neutral in (("num_cycles", 0.5), ("weight_decay_incr_style", "constant")):
        entry = keys.get(key)
        if entry is not None and entry.value == neutral:
            keys.record(key, KeyStatus.OFF, "")
        elif entry is not None:
            keys.add_error(key, f"not supported: msrl has {neutral}")


def _put_schedule(sections: Sections, keys: Keys, native: str) -> None:
    """Translate the schedule of the engine, and the rate at its end."""
    names = ("lr_decay_style",) if sections.is_megatron else ()
    names = names or ("warmup_style", "lr_scheduler", "lr_scheduler_type")
    key = next((name for name in names if keys.get(name) and keys.value(name)), names[-1])
    kind, known = keys.value(key), ("constant", "cosine", "linear")
    if kind not in known[: 3 if sections.is_megatron else 2]:
        keys.add_error(key, f"not supported: msrl has {', '.join(known)}")
    else:
        keys.assign(key, [f"{native}.schedule"], kind)
    for name in ("warmup_style", "lr_scheduler", "lr_scheduler_type", "lr_decay_style"):
        keys.record(name, KeyStatus.DEAD, f"the original reads {key}")
    lr = keys.real("lr", 1e-6)
    rate = "min_lr" if sections.is_megatron else "min_lr_ratio"
    lowest = keys.real(rate, 0.0)
    if kind != "constant":
        value = lowest if sections.is_megatron else lowest * lr
        keys.assign(rate, [f"{native}.min_lr"], value)
    for name in ("min_lr", "min_lr_ratio"):
        keys.record(name, KeyStatus.DEAD, "read by other schedules")
    steps = keys.get("lr_decay_steps")
    if steps is not None and steps.value is not None:
        keys.translation.difference(steps, "schedules of msrl end with the run")
    keys.record("lr_decay_steps", KeyStatus.OFF, "")
    updates = updates_per_step(sections)
    if kind in ("cosine", "linear") and updates is not None and updates > 1:
        entry = keys.get(key)
        text = f"the original changes the rate once per step, msrl {updates} times"
        if entry is not None:
            keys.translation.report_difference(entry, text)


def _put_warmup(sections: Sections, keys: Keys, native: str) -> None:
    """Translate the warm-up: steps if they are above 0, else a fraction of all steps."""
    steps, ratio = keys.number("lr_warmup_steps"), keys.real("lr_warmup_steps_ratio", 0.0)
    updates = updates_per_step(sections)
    is_fraction = steps is None or steps <= 0
    key = "lr_warmup_steps_ratio" if is_fraction else "lr_warmup_steps"
    value = float(ratio) if is_fraction else (steps or 0) * (updates or 1)
    entry = keys.get(key)
    if entry is not None and value and updates == 1 and not is_fraction and _has_zero(native):
        keys.translation.assign(entry, [f"{native}.warmup"], value)
        keys.translation.set(_FROM_ZERO, wrap(True, entry.origin))
    elif entry is not None and value:
        if _has_zero(native):
            keys.translation.set(_FROM_ZERO, wrap(True, entry.origin))
        text = "the original raises the rate from 0 once per step, msrl with every update"
        keys.translation.approximate(entry, f"{native}.warmup", value, text)
    for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"):
        keys.record(name, KeyStatus.OFF, f"overridden by {key}" if name != key else "")
    for name, neutral in (("lr_warmup_init", 0), ("init_lr_ratio", 0), ("zero_indexed_step", True)):
        first = keys.get(name)
        if first is not None and first.value not in (neutral, None):
            keys.translation.difference(first, "the first rate of a warm-up")
        keys.record(name, KeyStatus.OFF, "")


def _has_zero(native: str) -> bool:
    """Return True if a warm-up of this version can begin at a rate of 0."""
    return native == POLICY and has_key(_FROM_ZERO)


# --- Adapters ---


def put_adapters(sections: Sections) -> None:
    """Translate LoRA: keys of the model with FSDP, its section `lora` with Megatron."""
    flat, nested = sections[MODEL], sections[f"{MODEL}.lora"]
    pairs = (("lora_rank", "rank"), ("lora_alpha", "alpha"))
    uses_nested = sections.is_megatron or (not flat.number("lora_rank") and nested.number("rank"))
    keys, other = (nested, flat) if uses_nested else (flat, nested)
    names = [pair[1] if uses_nested else pair[0] for pair in pairs]
    unread = ("lora_rank", "lora_alpha", "target_modules") if uses_nested else ("rank", "alpha")
    other.discard(unread, "the adapters of the other engine")
    nested.record("type", KeyStatus.OFF, "") if nested.value("type") == "lora" else None
    rank = keys.number(names[0])
    if not rank:
        text = "without a rank, the model itself is trained"
        for name in (*names, "target_modules", "exclude_modules", "dropout", "type"):
            keys.record(name, KeyStatus.OFF, text)
        for section, name in ((flat, "lora_adapter_path"), (nested, "adapter_path")):
            _refuse_adapters(section, name)
        return
    keys.assign(names[0], ["train.lora.rank"], rank)
    keys.put(names[1], "train.lora.alpha")
    _put_targets(keys)
    if uses_nested and keys.value("dropout"):
        keys.put("dropout", "train.lora.dropout")
    keys.record("dropout", KeyStatus.OFF, "")
    excluded = keys.value("exclude_modules")
    if are_of_tower(excluded):
        text = "the vision tower has no adapters in msrl"
        keys.record("exclude_modules", KeyStatus.SAME, text)
    elif excluded:
        keys.add_error("exclude_modules", "not supported: name the layers in target_modules")
    _report_adapters_of_tower(sections, keys, names[0])
    keys.record("exclude_modules", KeyStatus.OFF, "")
    if keys.get("type") and keys.value("type") != "lora":
        keys.add_error("type", "not supported: msrl has lora")
    for section, name in ((flat, "lora_adapter_path"), (nested, "adapter_path")):
        _refuse_adapters(section, name)


def _report_adapters_of_tower(sections: Sections, keys: Keys, rank: str) -> None:
    """Report adapters in the vision tower, which the original has unless they are excluded."""
    data, entry = "sft.data" if sections.is_supervised else "data", keys.get(rank)
    if entry is None or are_of_tower(keys.value("exclude_modules")):
        return
    if has_images(sections, data):
        text = "the original also has adapters in the vision tower, msrl in the language model only"
        keys.translation.report_difference(entry, text)


def _refuse_adapters(keys: Keys, name: str) -> None:
    entry = keys.get(name)
    if entry is not None and entry.value:
        text = (
            "not supported: adapters of PEFT to start from. Merge them first: "
            "`msrl convert-ckpt hf2hf --lora FOLDER`."
        )
        return keys.add_error(name, text)
    return keys.record(name, KeyStatus.OFF, "")


def _put_targets(keys: Keys) -> None:
    targets = keys.value("target_modules")
    if targets in ("all-linear", ["all-linear"], None):
        text = "by default, msrl adapts all linear layers"
        return keys.record("target_modules", KeyStatus.SAME, text)
    names = targets.split(",") if isinstance(targets, str) else as_list(targets)
    return keys.assign("target_modules", ["train.lora.targets"], [str(n).strip() for n in names])
