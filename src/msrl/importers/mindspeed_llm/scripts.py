"""Command lines of MindSpeed-LLM and MindSpeed-RL: convert_ckpt.py, preprocess_data.py, posttrain_gpt.py and pretrain_gpt.py, inference.py,
ray_gpt.py and train_*.py.

A script may hold several; each becomes the section of its msrl command. Sources: MindSpeed-LLM b626d239 and c77308a1.
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
from msrl.importers.translation import Fate, Given, Translation

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
    """All commands of a script that msrl has, and `ray start`. Raises MsrlError when there is none."""
    script = parse_script(text, name)
    translation = Translation("MindSpeed-LLM", load_table("mindspeed_llm"), name)
    found = [(section, words) for words in script.commands if (section := _section(words))]
    if not found:
        raise MsrlError(f"{name}: holds none of {', '.join(f'{program}.py' for program in _PROGRAMS)}")
    for section, words in found:
        _command(translation, section, words)
    _environment(translation, script)
    return translation


def translate_words(words: list[Word], name: str) -> Translation:
    """The words of one command line, the program among them."""
    translation = Translation("MindSpeed-LLM", load_table("mindspeed_llm"), name)
    section = _section(words)
    if not section:
        programs = [f"{program}.py" for program in _PROGRAMS]
        raise MsrlError(f"{name}: must name one of MindSpeed-LLM's programs; {nearest(words[0].text if words else '', programs)}")
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
    start = next((i for i, word in enumerate(words) if word.text.endswith(".py") or word.text == "start"), 0)
    also = ("train",) if section == "inference" else ()
    keys = Keys(translation, section, translation.given(flags(words[start:], translation.name), section, "", also=also))
    _launcher(translation, flags(words[:start], translation.name), is_training=section == "train")
    special = {"convert": _convert, "preprocess": put_preprocessing, "train": put_training, "inference": _inference}
    special.get(section, _advised)(translation, keys)
    keys.apply_rest()
    if section == "convert" and _writes_legacy(words[start].text, keys):
        translation.set_default("convert.names", "legacy")
    translation.laid_in((section,), keys)


def _launcher(translation: Translation, tree: Node, *, is_training: bool) -> None:
    """torchrun's own flags: a training takes as many devices. Words before another program than torchrun are none."""
    for given in translation.given(tree, "torchrun", ""):
        to = translation.row(given).to
        if not to:
            translation.apply(given)
        elif not is_training:
            translation.say(given, Fate.SAME, "one engine, or one process, does the work")
        elif isinstance(given.value, int):
            translation.take(given, to, given.value)
        else:
            translation.mistake(given, f"must be a whole number, the value of {to[0]}")


def _environment(translation: Translation, script: Script) -> None:
    """Exported variables reach the workers of a training; other commands have none."""
    trains = any(one.given.section in ("train", "ray") for one in translation.outcomes)
    for variable, word in script.exported.items():
        given = Given("environment", variable, variable, wrap(word.text, Origin(translation.name, word.line)))
        if trains:
            translation.take(given, [f"cluster.env.{variable}"], word.text)
        else:
            translation.say(given, Fate.SAME, "no workers are started; export it before msrl if it is to hold there")


def _writes_legacy(program: str, keys: Keys) -> bool:
    """Whether Hugging Face weights become those of Megatron's models from before megatron-core, which its second converter never writes."""
    kinds = tuple(str(keys.value(key) or default) for key, default in (("load_model_type", "hf"), ("save_model_type", "mg")))
    return program.endswith("convert_ckpt.py") and kinds == ("hf", "mg") and keys.value("use_mcore_models") is not True


def _convert(translation: Translation, keys: Keys) -> None:
    kinds = tuple(str(keys.value(key) or default) for key, default in (("load_model_type", "hf"), ("save_model_type", "mg")))
    command = _COMMANDS.get((kinds[0], kinds[1]))
    for key in ("load_model_type", "save_model_type"):
        if command is None:
            keys.mistake(key, f"{kinds[0]} to {kinds[1]} is not a conversion of msrl's: hf to mg, mg to hf, mg to mg")
        else:
            keys.take(key, ["convert.command"], command)
    save = keys.get("save_dir")
    if save is not None and command == "mcore2hf":
        why = "the result's folder; give a new one, the original wrote into the model's own"
        translation.take(save, ["convert.save"], f"{str(save.value).rstrip('/')}/mg2hf", why=why)
    elif save is not None:
        translation.take(save, ["convert.save"], save.value)
    impl = keys.get("transformer_impl")
    if impl is not None:
        translation.take(impl, ["convert.names"], {"local": "local", "transformer_engine": "te"}.get(str(impl.value), impl.value))


def put_training(translation: Translation, keys: Keys) -> None:
    """A supervised training: what hangs together in its keys."""
    if keys.value("fp16") is True:
        keys.mistake("fp16", "float16 is not trained: bfloat16 with float32 masters, or float32; give --bf16")
    stage = keys.get("stage")
    if stage is not None and stage.value != "sft":
        translation.mistake(stage, "must be sft; RL is `msrl train-grpo`, preferences are not trained")
    if stage is None and keys.value("is_instruction_dataset") is not True:
        put_text(translation, keys)
    MegatronKeys(translation, keys).apply_supervised()
    _router(keys)
    iters, every = keys.get("eval_iters"), keys.get("eval_interval")
    if iters is None or iters.value == 0 or keys.value("eval_interval") is None:
        for given in (iters, every):
            if given is not None:
                translation.say(given, Fate.OFF, "no evaluation")
    else:
        keys.take("eval_interval", ["eval.every_steps"], keys.value("eval_interval"))
        batch = keys.number("global_batch_size") or 1
        keys.take("eval_iters", ["eval.prompts"], (keys.number("eval_iters") or 0) * batch, why="rows: eval_iters batches")


def _router(keys: Keys) -> None:
    """What balances experts: one coefficient, of the kind of loss that another flag names, and the rate of their biases."""
    kind, name = keys.value("moe_router_load_balancing_type"), "moe_router_load_balancing_type"
    if kind not in ("aux_loss", "seq_aux_loss", "none"):
        keys.mistake(name, "must be aux_loss, seq_aux_loss or none")
    if kind == "none" or not keys.value("moe_aux_loss_coeff"):
        why = "moe_router_load_balancing_type is none" if kind == "none" else "moe_aux_loss_coeff is 0"
        for key in (name, "seq_aux", "moe_aux_loss_coeff"):
            keys.say(key, Fate.OFF, why)
    else:
        over = "sequence" if kind == "seq_aux_loss" or keys.value("seq_aux") is True else "micro_batch"
        keys.take("moe_aux_loss_coeff", ["train.router.aux_loss_coef"], keys.value("moe_aux_loss_coeff"))
        for key in (name, "seq_aux"):
            keys.take(key, ["train.router.aux_loss_over"], over)
    if keys.value("moe_router_enable_expert_bias") is True:
        for key in ("moe_router_enable_expert_bias", "moe_router_bias_update_rate"):
            keys.take(key, ["train.router.bias_update_rate"], keys.value("moe_router_bias_update_rate"))
    for key in ("moe_router_enable_expert_bias", "moe_router_bias_update_rate"):
        keys.say(key, Fate.OFF, "read beside moe_router_enable_expert_bias")


def _inference(translation: Translation, keys: Keys) -> None:
    """How answers are drawn, by task. Scripts repeat the flags of the training, which the checkpoint knows."""
    for given in keys:
        if given.section == "train":
            translation.say(given, Fate.SAME, "the checkpoint says it, or the engine decides by itself")
    tasks = [str(task) for task in as_list(keys.value("task"))]
    if any(task.startswith("beam") for task in tasks):
        return keys.mistake("task", "samples are drawn, not searched: greedy, do_sample or chat")
    if tasks in (["greedy"], ["greedy_search"]):
        keys.take("task", ["generate.temperature"], 0.0)
        for key in ("temperature", "top_p", "top_k"):
            keys.say(key, Fate.DEAD, "greedy answers take the likeliest token")
    return keys.say("task", Fate.SAME, "`msrl generate` and `msrl chat` are commands of their own")


def _advised(translation: Translation, keys: Keys) -> None:
    """Commands that are msrl's own by other names: each flag says which."""
    del translation, keys
