"""Translation of verl's generation, its routing replay, and of evaluation on `data.val_files`.

Source: verl 1dda0392, verl/workers/config/rollout.py and verl/trainer/ppo/v1/trainer_base.py.
"""

from __future__ import annotations

from typing import Any

from msrl.config.sources import wrap
from msrl.importers.sections import Keys, refuse_unknown, settings_of
from msrl.importers.translation import KeyStatus, SourceKey
from msrl.importers.verl.batches import updates_per_step
from msrl.importers.verl.sections import ACTOR, FSDP, MEGATRON, ROLLOUT, VEOMNI, Sections
from msrl.rollout.engine_arguments import option_problem

_ENGINES = {"sglang": "SGLang", "hf": "transformers", "trtllm": "TensorRT-LLM"}
_AGENT = "single_turn_agent"


def put_rollout(sections: Sections) -> None:
    """Translate the engine and its sampling."""
    keys, data = sections[ROLLOUT], sections["data"]
    name = keys.get("name")
    if name is not None and name.value in _ENGINES:
        text = f"msrl generates with vLLM, not with {_ENGINES[str(name.value)]}"
        keys.translation.approximate(name, "rollout.engine.name", "vllm", text)
    elif name is not None and name.value != "vllm":
        keys.add_error("name", f"must be one of vllm, {', '.join(_ENGINES)}")
    else:
        keys.assign("name", ["rollout.engine.name"], "vllm")
    if keys.value("do_sample") is False:
        keys.add_error("do_sample", "not supported: a training needs samples")
    keys.record("do_sample", KeyStatus.OFF, "")
    for key, other in (
        ("prompt_length", "max_prompt_length"),
        ("response_length", "max_response_length"),
    ):
        entry = keys.get(key)
        if entry is not None and entry.value != data.value(other):
            keys.add_error(key, f"not supported: another length than data.{other}")
        keys.record(key, KeyStatus.SAME, f"data.{other}")
    _put_engine(sections)
    _put_agent(keys)
    top = sections["top"]
    recorded: dict[str, Any] = settings_of(top.get("skip")).get("rollout") or {}
    if recorded.get("enable") is True:
        top.add_error("skip", "not supported: recorded rollouts")
    top.record("skip", KeyStatus.OFF, "")


def _put_engine(sections: Sections) -> None:
    keys, data = sections[ROLLOUT], sections["data"]
    dtype, logprobs = keys.get("dtype"), keys.get("logprobs_mode")
    if dtype is not None and dtype.value not in ("bfloat16", "auto", "bf16"):
        text = "the engine has the dtype of training"
        keys.translation.difference(dtype, text)
    keys.record("dtype", KeyStatus.SAME, "the engine has the dtype of training")
    if logprobs is not None and logprobs.value != "processed_logprobs":
        keys.add_error("logprobs_mode", "not supported: msrl records those of the sampling")
    keys.record("logprobs_mode", KeyStatus.SAME, "log-probabilities of the sampling")
    tp, experts = keys.number("tensor_model_parallel_size"), keys.get("expert_parallel_size")
    if experts is not None and experts.value != 1 and experts.value == tp:
        keys.translation.assign(experts, ["rollout.engine.ep"], experts.value)
    text = "how the engine distributes experts"
    keys.record("expert_parallel_size", KeyStatus.SPEED, text)
    total = (data.number("max_prompt_length") or 0) + (data.number("max_response_length") or 0)
    limit, size = keys.get("max_model_len"), keys.number("max_model_len")
    if limit is not None and size is not None and size < total:
        text = f"the original truncates at {size} tokens, fewer than prompt plus response"
        keys.translation.approximate(limit, "rollout.engine.max_model_len", total, text)
    elif limit is not None and size is not None:
        keys.translation.assign(limit, ["rollout.engine.max_model_len"], size)
    if keys.value("free_cache_engine") is False:
        keys.assign("free_cache_engine", ["rollout.engine.sleep"], 0)
    keys.record("free_cache_engine", KeyStatus.SAME, "engines sleep while the policy trains")
    for name in ("skip_rollout", "skip"):
        entry = keys.get(name)
        is_on = settings_of(entry).get("enable") or (entry is not None and entry.value is True)
        if is_on:
            keys.add_error(name, "not supported: recorded rollouts")
        keys.record(name, KeyStatus.OFF, "")
    keys.record("skip_dump_dir", KeyStatus.DEAD, "read with skip_rollout only")
    _put_engine_options(sections[f"{ROLLOUT}.engine_kwargs"])


_SPEED_OPTIONS = ("mm_processor_cache_gb", "disable_mm_preprocessor_cache", "limit_mm_per_prompt")


def _put_engine_options(keys: Keys) -> None:
    """Translate arguments of vLLM: those of native keys, and those that change no weights."""
    entry = keys.get("vllm")
    options = {
        name: value for name, value in settings_of(entry).items() if name not in _SPEED_OPTIONS
    }
    if entry is None or not settings_of(entry):
        return keys.record("vllm", KeyStatus.OFF, "")
    if "max_model_len" in options:
        node = wrap(options.pop("max_model_len"), entry.origin)
        keys.translation.set("rollout.engine.max_model_len", node)
    problems = {name: option_problem(name, weights_change=True) for name in options}
    for name, problem in problems.items():
        if problem:
            keys.translation.errors.append(f"{entry}: {name}: {problem}")
    if options and not any(problems.values()):
        return keys.translation.assign(entry, ["rollout.engine.options"], options)
    return keys.record("vllm", KeyStatus.APPLIED, "rollout.engine")


def _put_agent(keys: Keys) -> None:
    """Refuse agent loops other than a single response."""
    entry = keys.get("agent")
    if entry is None:
        return None
    known = ("num_workers", "default_agent_loop", "agent_loop_config_path", "custom_async_server",
             "_target_", "agent_loop_manager_class")  # fmt: skip
    refuse_unknown(keys.translation, entry, known)
    settings = settings_of(entry)
    loop, config = settings.get("default_agent_loop"), settings.get("agent_loop_config_path")
    server: dict[str, Any] = settings.get("custom_async_server") or {}
    if loop not in (None, _AGENT) or config:
        text = f"not supported: the agent loop {loop or config}. Use environment.name"
        return keys.add_error("agent", f"{text} (docs/environments.md)")
    if any(value for name, value in server.items() if name != "_target_"):
        return keys.add_error("agent", "not supported: custom_async_server, an engine of one's own")
    return keys.record("agent", KeyStatus.SPEED, "how many processes generate")


# --- Evaluation ---


def put_evaluation(sections: Sections) -> None:
    """Translate evaluation: every test_freq steps, and before the first step."""
    trainer, keys = sections["trainer"], sections[f"{ROLLOUT}.val_kwargs"]
    every, at_start = trainer.number("test_freq"), trainer.value("val_before_train") is not False
    has_data = sections["data"].get("val_files") and sections["data"].value("val_files")
    is_on = bool(has_data) and (at_start or (every or 0) > 0)
    if not is_on:
        for key in ("test_freq", "val_before_train"):
            trainer.record(key, KeyStatus.OFF, "no evaluation")
        for entry in keys:
            keys.translation.record(entry, KeyStatus.DEAD, "no evaluation")
        return
    if (every or 0) > 0:
        trainer.assign("test_freq", ["eval.every_steps"], every)
    trainer.record("test_freq", KeyStatus.OFF, "")
    trainer.assign("val_before_train", ["eval.at_start"], at_start)
    keys.put("n", "eval.samples_per_prompt")
    _put_sampling(keys)


def _put_sampling(keys: Keys) -> None:
    samples = keys.switch("do_sample", default=False) and keys.value("temperature") != 0
    temperature = keys.value("temperature") if samples else 0.0
    source = "temperature" if samples else "do_sample"
    keys.assign(source, ["eval.sampling.temperature"], temperature)
    if samples:
        keys.put("top_p", "eval.sampling.top_p")
        top_k = keys.value("top_k")
        keys.assign("top_k", ["eval.sampling.top_k"], -1 if top_k == 0 else top_k)
    keys.record("do_sample", KeyStatus.APPLIED, "eval.sampling")
    for key in ("temperature", "top_p", "top_k"):
        keys.record(key, KeyStatus.SAME, "greedy decoding takes the most likely token")


_ROUTING = ("disabled", "R2", "R3")


def put_routing(sections: Sections) -> None:
    """Translate routing replay, which the actor, its engine or the rollout sets."""
    rollout = sections[ROLLOUT]
    if rollout.value("enable_rollout_routing_replay") is True:
        _put_engine_routing(rollout, rollout.get("enable_rollout_routing_replay"))
    rollout.record("enable_rollout_routing_replay", KeyStatus.OFF, "")
    for name in (ACTOR, FSDP, MEGATRON, VEOMNI):
        entry = sections[name].get("router_replay")
        if entry is None:
            continue
        mode = settings_of(entry).get("mode", "disabled")
        if mode not in _ROUTING:
            text = f"mode must be one of {', '.join(_ROUTING)}"
            sections.translation.add_error(entry, text)
        elif mode == "disabled":
            sections.translation.record(entry, KeyStatus.OFF, "")
        elif mode == "R3":
            _put_engine_routing(rollout, entry)
        elif updates_per_step(sections) == 1:
            text = "one update per step, whose experts are those of the old log-probabilities"
            sections.translation.record(entry, KeyStatus.SAME, text)
        else:
            sections.translation.assign(entry, ["train.router.replay"], "trainer")


def _put_engine_routing(rollout: Keys, entry: SourceKey | None) -> None:
    """Replay the experts of the engine, which msrl reads from layers that are not compiled."""
    if entry is not None:
        rollout.translation.assign(entry, ["train.router.replay"], "engine")
        rollout.translation.set("rollout.engine.eager", wrap(True, entry.origin))
        text = "true, because msrl reads the experts from layers that are not compiled"
        rollout.record("enforce_eager", KeyStatus.SPEED, text)
