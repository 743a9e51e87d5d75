"""Import of the options of inference.py: generation and chat.

Sources: MindSpeed-LLM b626d239 and c77308a1, tasks/inference/infer_base.py and
inference/text_generation/tokenization.py. Without a template the model reads plain text; a chat
then remembers its first three turns. With one, it remembers the last `history_turns`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msrl.config.sources import Origin, wrap
from msrl.importers.conversions import top_k
from msrl.importers.megatron import has_adapters
from msrl.importers.mindspeed_llm.data import template_name
from msrl.importers.sections import Keys
from msrl.importers.table import as_list
from msrl.importers.translation import KeyStatus, Translation

_PROMPT = "how are you?"  # the only prompt of the original
_TASKS = {"greedy": "generate", "do_sample": "generate", "chat": "chat"}
_RAW_TURNS = 3
_SAMPLING = ("temperature", "top_p", "top_k")
_THOUGHTS = ("qwen3", "glm4_moe")  # templates whose prompts end with an empty thought by default


def put_inference(translation: Translation, keys: Keys) -> None:
    """Translate the options of generation and chat, by task."""
    commands = _commands(keys)
    put_engine_layout(translation, keys)
    _dtype(translation, keys, commands)
    _put(keys, "load", commands, "model", keys.value("load"))
    _adapter(keys, commands)
    put_shape(translation, keys)
    _put(keys, "max_new_tokens", commands, "max_tokens", keys.value("max_new_tokens"))
    _put(keys, "seed", commands, "seed", keys.value("seed"))
    _sampling(translation, keys, commands)
    _template(translation, keys, commands)
    _history(translation, keys, commands)
    _ends(keys, commands)


def put_shape(translation: Translation, keys: Keys) -> None:
    """Record the options of the model, which the checkpoint describes."""
    for entry in keys:
        row = translation.row(entry)
        if entry.section == "train" and row.speed:
            translation.record(entry, KeyStatus.SPEED, row.speed)
        elif entry.section == "train" and (not row.refuse or row.is_off(entry.value)):
            translation.record(entry, KeyStatus.SAME, "read from the checkpoint")


def _put(keys: Keys, key: str, sections: Iterable[str], name: str, value: object) -> None:
    """Assign a value to the same key of the sections of commands."""
    natives = [f"{section}.{name}" for section in sections]
    if natives and value is not None:
        keys.assign(key, natives, value)


def _commands(keys: Keys) -> list[str]:
    """Return the commands of the tasks. Without `task`, the original runs all of them."""
    tasks = [str(task) for task in as_list(keys.value("task"))] if keys.get("task") else []
    if any(task.startswith("beam") for task in tasks):
        keys.add_error("task", "beam search is not supported. Use greedy, do_sample or chat.")
    elif unknown := [task for task in tasks if task not in _TASKS]:
        keys.add_error("task", f"{unknown[0]} is not a task. Use greedy, do_sample or chat.")
    chosen = tasks or list(_TASKS)
    commands = list(dict.fromkeys(_TASKS.get(task, "generate") for task in chosen))
    text = " and ".join(f"`msrl {command}`" for command in commands)
    keys.record("task", KeyStatus.APPLIED, text)
    if not tasks:
        keys.translation.remarks.append(
            f"{keys.translation.name}: without --task, the original also decodes greedily and by "
            "beam search. For greedy decoding, set generate.temperature=0; msrl has no beam search"
        )
    elif {"greedy", "do_sample"} <= set(tasks):
        keys.translation.remarks.append(
            f"{keys.translation.name}: the original decodes greedily, then samples; this samples. "
            "For greedy decoding, set generate.temperature=0"
        )
    return commands


def _sampling(translation: Translation, keys: Keys, commands: list[str]) -> None:
    """Translate the sampling, and the prompt that the original generates from."""
    tasks = {str(task) for task in as_list(keys.value("task"))}
    is_greedy = "greedy" in tasks and "do_sample" not in tasks
    if "generate" in commands:
        translation.set("generate.prompt", wrap(_PROMPT, Origin("the prompt of the original")))
    if is_greedy:
        translation.set("generate.temperature", wrap(0.0, keys.origin("task")))
        translation.set_default("generate.top_p", 1.0)
        translation.set_default("generate.top_k", -1)
        commands = [command for command in commands if command != "generate"]
        if not commands:
            for key in _SAMPLING:
                keys.record(key, KeyStatus.DEAD, "greedy decoding takes the most likely token")
            return
    _put(keys, "temperature", commands, "temperature", keys.value("temperature"))
    top_p = keys.value("top_p")
    _put(keys, "top_p", commands, "top_p", 1.0 if top_p == 0 else top_p)
    _put(keys, "top_k", commands, "top_k", top_k(keys.value("top_k")))


def _template(translation: Translation, keys: Keys, commands: list[str]) -> None:
    """Translate the format of prompts: a template, the tokenizer's template, or plain text."""
    is_native = keys.value("hf_chat_template") is True
    name = keys.get("prompt_type")
    if is_native and name is not None:
        keys.add_error("prompt_type", "the original refuses it with hf_chat_template. Remove one.")
    if is_native:
        _put(keys, "hf_chat_template", commands, "template", "native")
    elif name is not None:
        _put(keys, "prompt_type", commands, "template", template_name(translation, keys))
    else:
        origin = "without --prompt-type and --hf-chat-template"
        for command in commands:
            translation.set(f"{command}.raw", wrap(True, Origin(origin)))
    keys.record("hf_chat_template", KeyStatus.OFF, "")
    _thinking(keys, commands, "" if name is None or is_native else str(name.value))


def _thinking(keys: Keys, commands: list[str], template: str) -> None:
    """Translate the mode of templates with thoughts; only `true` lets the model think."""
    mode = str(keys.value("enable_thinking")).lower()
    if template not in _THOUGHTS:
        return keys.record("enable_thinking", KeyStatus.DEAD, "the template has no thoughts")
    if mode not in ("true", "false", "none"):
        return keys.add_error("enable_thinking", "must be true, false or none")
    if mode != "true":
        return _put(keys, "enable_thinking", commands, "enable_thinking", False)
    return _put(keys, "enable_thinking", commands, "enable_thinking", True)


def _history(translation: Translation, keys: Keys, commands: list[str]) -> None:
    """Translate the earlier turns that a chat remembers."""
    if "chat" not in commands:
        return keys.record("history_turns", KeyStatus.DEAD, "read by chat only")
    if keys.value("hf_chat_template") is True or keys.get("prompt_type") is not None:
        return keys.put("history_turns", "chat.history_turns")
    reason = "without a template, the original remembers the first three turns"
    for name, value in (("history_turns", _RAW_TURNS), ("history_keeps", "oldest")):
        translation.set(f"chat.{name}", wrap(value, Origin("without a template")))
    return keys.record("history_turns", KeyStatus.DEAD, reason)


def _ends(keys: Keys, commands: list[str]) -> None:
    """Translate what ends a response."""
    tokens = keys.get("add_eos_token")
    if tokens is not None:
        natives = [f"{command}.stop" for command in commands]
        why = "as its help says; the original's code does not read it"
        keys.assign("add_eos_token", natives, [str(t) for t in as_list(tokens.value)], why=why)
    keys.record("max_length", KeyStatus.DEAD, "max_new_tokens limits the response")
    keys.record("use_kv_cache", KeyStatus.SPEED, "the engine always caches keys and values")


def _adapter(keys: Keys, commands: list[str]) -> None:
    """Translate the adapter, which the original adds to the weights of `load`."""
    adapter = keys.get("lora_load")
    if adapter is None or adapter.value is None:
        return
    if not has_adapters(keys):
        keys.record("lora_load", KeyStatus.DEAD, "read with lora_target_modules only")
        return
    natives = [f"{command}.lora" for command in commands]
    keys.assign("lora_load", natives, adapter.value, why="merged into the weights in memory")
    for key in ("lora_r", "lora_alpha", "lora_target_modules"):
        keys.record(key, KeyStatus.SAME, "read from the files of the adapter")


def _dtype(translation: Translation, keys: Keys, commands: list[str]) -> None:
    """Translate the type of the weights, which is float32 without bf16 and fp16."""
    if keys.value("fp16") is True:
        translation.remarks.append(
            f"{translation.name}: the original computes in float16; msrl computes in the type of "
            "the checkpoint"
        )
        return keys.record("fp16", KeyStatus.DROPPED, "msrl does not compute in float16")
    if keys.value("bf16") is True:
        return _put(keys, "bf16", commands, "dtype", "bfloat16")
    for command in commands:
        translation.set(f"{command}.dtype", wrap("float32", Origin("without --bf16 and --fp16")))
    return None


def put_engine_layout(translation: Translation, keys: Keys) -> None:
    """Translate the parallel sizes of inference to the devices of the engine.

    Pipeline stages are tensor-parallel ranks in msrl, if this size divides the attention heads.
    """
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    sizes = [keys.number(name) or 1 for name in names]
    heads, product = keys.number("num_attention_heads"), math.prod(sizes)
    size = product if not heads else _fitting(product, heads)
    for name in names:
        if keys.get(name) is None:
            continue
        why = "" if 1 in sizes else "tensor times pipeline parallel size"
        if size != product:
            why = f"not {product}: it must divide the {heads} attention heads"
        keys.assign(name, ["rollout.engine.tp"], size, why=why)


def _fitting(limit: int, heads: int) -> int:
    """Return the largest size up to `limit` that divides it and the attention heads."""
    return next(n for n in range(limit, 0, -1) if limit % n == 0 and heads % n == 0)
