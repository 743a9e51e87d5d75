"""Import of MindSpeed-LLM and MindSpeed-RL command lines.

Supported programs: convert_ckpt.py, preprocess_data.py, posttrain_gpt.py, pretrain_gpt.py,
inference.py, ray_gpt.py and train_*.py. A script may contain several; each becomes the section of
its msrl command. Sources: MindSpeed-LLM b626d239 and c77308a1.
"""

from __future__ import annotations

from collections.abc import Sequence

from msrl.config.sources import Node, Origin, wrap
from msrl.errors import MsrlError, nearest
from msrl.importers.megatron import MegatronKeys
from msrl.importers.mindspeed_llm.data import put_preprocessing, put_text
from msrl.importers.sections import Keys, as_list
from msrl.importers.shell import Script, Word, flags, parse_script
from msrl.importers.table import load_table
from msrl.importers.translation import KeyStatus, SourceKey, Translation

_PROGRAMS = {
    "convert_ckpt": "convert",
    "convert_ckpt_v2": "convert",
    "preprocess_data": "preprocess",
    "posttrain_gpt": "train",
    "pretrain_gpt": "train",
    "inference": "inference",
    "ray_gpt": "ray",
    "train_grpo": "ray",
    "train_dapo": "ray",
    "train_ppo": "ray",
}
_COMMANDS = {("hf", "mg"): "hf2mcore", ("mg", "hf"): "mcore2hf", ("mg", "mg"): "reshard"}


def translate_script(text: str, name: str) -> Translation:
    """Return the translation of all supported commands of a script, including `ray start`.

    Raises:
        MsrlError: if the script has no supported command.
    """
    script = parse_script(text, name)
    translation = Translation("MindSpeed-LLM", load_table("mindspeed_llm"), name)
    commands = [(section, words) for words in script.commands if (section := _section(words))]
    if not commands:
        raise MsrlError(
            f"{name}: contains none of {', '.join(f'{program}.py' for program in _PROGRAMS)}"
        )
    for section, words in commands:
        _command(translation, section, words)
    _environment(translation, script)
    return translation


def translate_words(words: list[Word], name: str) -> Translation:
    """Return the translation of one command line, which includes the name of the program."""
    translation = Translation("MindSpeed-LLM", load_table("mindspeed_llm"), name)
    section = _section(words)
    if not section:
        programs = [f"{program}.py" for program in _PROGRAMS]
        raise MsrlError(
            f"{name}: must name a program of MindSpeed-LLM; "
            f"{nearest(words[0].text if words else '', programs)}"
        )
    _command(translation, section, words)
    return translation


def _section(words: Sequence[Word]) -> str:
    for before, word in zip([Word("", None), *words], words, strict=False):
        program = word.text.rpartition("/")[2].removesuffix(".py")
        if word.text.endswith(".py") and program in _PROGRAMS:
            return _PROGRAMS[program]
        if before.text == "ray" and word.text == "start":
            return "ray_start"
    return ""


def _command(translation: Translation, section: str, words: Sequence[Word]) -> None:
    start = next(
        (i for i, word in enumerate(words) if word.text.endswith(".py") or word.text == "start"), 0
    )
    also = ("train",) if section == "inference" else ()
    keys = Keys(
        translation,
        section,
        translation.entries(flags(words[start:], translation.name), section, "", also=also),
    )
    _launcher(translation, flags(words[:start], translation.name), is_training=section == "train")
    special = {
        "convert": _convert,
        "preprocess": put_preprocessing,
        "train": put_training,
        "inference": _inference,
    }
    special.get(section, _apply_rows)(translation, keys)
    keys.apply_remaining()
    if section == "convert" and _writes_legacy(words[start].text, keys):
        translation.set_default("convert.names", "legacy")
    translation.fill_defaults((section,), keys)


def _launcher(translation: Translation, tree: Node, *, is_training: bool) -> None:
    """Translate the flags of torchrun: they set the devices of a training."""
    for entry in translation.entries(tree, "torchrun", ""):
        to = translation.row(entry).to
        if not to:
            translation.apply(entry)
        elif not is_training:
            translation.record(entry, KeyStatus.SAME, "the command runs one engine or one process")
        elif isinstance(entry.value, int):
            translation.assign(entry, to, entry.value)
        else:
            translation.add_error(entry, f"must be an integer, the value of {to[0]}")


def _environment(translation: Translation, script: Script) -> None:
    """Pass exported variables to the workers of a training; other commands have no workers."""
    trains = any(outcome.entry.section in ("train", "ray") for outcome in translation.outcomes)
    for variable, word in script.exported.items():
        entry = SourceKey(
            "environment", variable, variable, wrap(word.text, Origin(translation.name, word.line))
        )
        if trains:
            translation.assign(entry, [f"cluster.env.{variable}"], word.text)
        else:
            translation.record(
                entry,
                KeyStatus.SAME,
                "this command starts no workers. To use it, export it before msrl starts.",
            )


def _model_types(keys: Keys) -> tuple[str, str]:
    """Return load_model_type and save_model_type, by default hf and mg."""
    source, target = keys.value("load_model_type"), keys.value("save_model_type")
    return str(source or "hf"), str(target or "mg")


def _writes_legacy(program: str, keys: Keys) -> bool:
    """Return True if the command converts Hugging Face weights to models from before megatron-core.

    convert_ckpt_v2.py never writes these.
    """
    is_to_megatron = _model_types(keys) == ("hf", "mg")
    is_mcore = keys.value("use_mcore_models") is True
    return program.endswith("convert_ckpt.py") and is_to_megatron and not is_mcore


def _convert(translation: Translation, keys: Keys) -> None:
    source, target = _model_types(keys)
    command = _COMMANDS.get((source, target))
    for key in ("load_model_type", "save_model_type"):
        if command is None:
            keys.add_error(
                key,
                f"msrl does not convert {source} to {target}. "
                "Choose hf to mg, mg to hf or mg to mg.",
            )
        else:
            keys.assign(key, ["convert.command"], command)
    save = keys.get("save_dir")
    if save is not None and command == "mcore2hf":
        why = "a new output folder, because the original writes into the folder of the model"
        translation.assign(save, ["convert.save"], f"{str(save.value).rstrip('/')}/mg2hf", why=why)
    elif save is not None:
        translation.assign(save, ["convert.save"], save.value)
    impl = keys.get("transformer_impl")
    if impl is not None:
        translation.assign(
            impl,
            ["convert.names"],
            {"local": "local", "transformer_engine": "te"}.get(str(impl.value), impl.value),
        )


def put_training(translation: Translation, keys: Keys) -> None:
    """Translate the keys of a supervised training that depend on each other."""
    if keys.value("fp16") is True:
        keys.add_error(
            "fp16",
            "msrl does not train in float16. Use --bf16 (with float32 master weights), or neither "
            "for float32.",
        )
    stage = keys.get("stage")
    if stage is not None and stage.value != "sft":
        translation.add_error(
            stage,
            "must be sft. For RL, use `msrl train-grpo`; preference training is not supported.",
        )
    if stage is None and keys.value("is_instruction_dataset") is not True:
        put_text(translation, keys)
    MegatronKeys(translation, keys).apply_supervised()
    _router(keys)
    _evaluation(translation, keys)


def _evaluation(translation: Translation, keys: Keys) -> None:
    iters, every = keys.get("eval_iters"), keys.get("eval_interval")
    if iters is None or iters.value == 0 or keys.value("eval_interval") is None:
        for entry in (iters, every):
            if entry is not None:
                translation.record(entry, KeyStatus.OFF, "no evaluation")
        return
    keys.assign("eval_interval", ["eval.every_steps"], keys.value("eval_interval"))
    batch = keys.number("global_batch_size") or 1
    rows = (keys.number("eval_iters") or 0) * batch
    keys.assign("eval_iters", ["eval.prompts"], rows, why="rows: eval_iters batches")


def _router(keys: Keys) -> None:
    """Translate the load balancing of experts.

    The keys are the coefficient of the auxiliary loss, its kind, and the update rate of the expert
    biases.
    """
    kind, name = keys.value("moe_router_load_balancing_type"), "moe_router_load_balancing_type"
    if kind not in ("aux_loss", "seq_aux_loss", "none"):
        keys.add_error(name, "must be aux_loss, seq_aux_loss or none")
    if kind == "none" or not keys.value("moe_aux_loss_coeff"):
        why = (
            "moe_router_load_balancing_type is none"
            if kind == "none"
            else "moe_aux_loss_coeff is 0"
        )
        for key in (name, "seq_aux", "moe_aux_loss_coeff"):
            keys.record(key, KeyStatus.OFF, why)
    else:
        over = (
            "sequence" if kind == "seq_aux_loss" or keys.value("seq_aux") is True else "micro_batch"
        )
        keys.assign(
            "moe_aux_loss_coeff", ["train.router.aux_loss_coef"], keys.value("moe_aux_loss_coeff")
        )
        for key in (name, "seq_aux"):
            keys.assign(key, ["train.router.aux_loss_over"], over)
    if keys.value("moe_router_enable_expert_bias") is True:
        for key in ("moe_router_enable_expert_bias", "moe_router_bias_update_rate"):
            keys.assign(
                key, ["train.router.bias_update_rate"], keys.value("moe_router_bias_update_rate")
            )
    for key in ("moe_router_enable_expert_bias", "moe_router_bias_update_rate"):
        keys.record(key, KeyStatus.OFF, "read with moe_router_enable_expert_bias only")


def _inference(translation: Translation, keys: Keys) -> None:
    """Translate the sampling of responses by task.

    Scripts repeat the training flags, which the checkpoint contains.
    """
    for entry in keys:
        if entry.section == "train":
            translation.record(
                entry, KeyStatus.SAME, "read from the checkpoint, or chosen by the engine"
            )
    tasks = [str(task) for task in as_list(keys.value("task"))]
    if any(task.startswith("beam") for task in tasks):
        return keys.add_error(
            "task", "beam search is not supported. Use greedy, do_sample or chat."
        )
    if tasks in (["greedy"], ["greedy_search"]):
        keys.assign("task", ["generate.temperature"], 0.0)
        for key in ("temperature", "top_p", "top_k"):
            keys.record(key, KeyStatus.DEAD, "greedy decoding takes the most likely token")
    return keys.record(
        "task", KeyStatus.SAME, "`msrl generate` and `msrl chat` are separate commands"
    )


def _apply_rows(translation: Translation, keys: Keys) -> None:
    """Leave the keys to their table rows, which name the msrl command that replaces the flag."""
    del translation, keys
