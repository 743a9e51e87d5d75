"""Import of MindSpeed-LLM and MindSpeed-RL command lines.

Supported programs: convert_ckpt.py, preprocess_data.py, posttrain_gpt.py, pretrain_gpt.py,
inference.py, evaluation.py, ray_gpt.py and train_*.py. A script may contain several; each becomes
the section of its msrl command. Sources: MindSpeed-LLM b626d239 and c77308a1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from msrl.config.sources import Node, Origin, wrap
from msrl.errors import MsrlError, nearest
from msrl.importers.environment import put_exports
from msrl.importers.hydra import Override
from msrl.importers.mindspeed.named_files import named_file, put_named_file, split_overrides
from msrl.importers.mindspeed_llm.data import put_preprocessing
from msrl.importers.mindspeed_llm.evaluation import put_evaluation
from msrl.importers.mindspeed_llm.inference import put_inference
from msrl.importers.mindspeed_llm.models import refuse_model
from msrl.importers.mindspeed_llm.training import put_training
from msrl.importers.placeholders import is_placeholder
from msrl.importers.programs import put_left_out
from msrl.importers.sections import Keys, put_repeated
from msrl.importers.shell import Word, flags, parse_script, repeated_flags
from msrl.importers.table import load_table
from msrl.importers.translation import KeyStatus, SourceKey, Translation
from msrl.models.unsupported import UNSUPPORTED

PROGRAMS = {
    "convert_ckpt": "convert",
    "convert_ckpt_v2": "convert",
    "preprocess_data": "preprocess",
    "posttrain_gpt": "train",
    "pretrain_gpt": "train",
    "inference": "inference",
    "evaluation": "evaluation",
    "ray_gpt": "ray",
    "train_grpo": "ray",
    "train_dapo": "ray",
    "train_ppo": "ray",
    "grpo_trainer": "ray",
    "train_sft": "ray",
    "train_dpo": "ray",
    "train_orm": "ray",
}
_ENTRY = "MindSpeed-LLM's entry to MindSpeed-RL. Import the file of MindSpeed-RL"
UNSUPPORTED_PROGRAMS = {
    "train_fsdp2": "MindSpeed-LLM's FSDP2 backend, whose files msrl does not read. Use the script "
    "of the model for Megatron",
    "merge_dcp_to_hf": "MindSpeed-LLM's FSDP2 checkpoints",
    "rlhf_gpt": _ENTRY,
    "preprocess_prompt": _ENTRY,
    "train_prm": "training of reward models",
    "pretrain_mamba": f"the model mamba2: {UNSUPPORTED['Mamba2ForCausalLM']}",
    "pretrain_deepseek4": f"the model deepseek4: {UNSUPPORTED['DeepseekV4ForCausalLM']}",
    "infer_vllm": "inference by torchrun. Use `msrl generate`",
    "eplb_generate_map_ds": "expert maps of the engine",
    "verifier": "scoring of files by verifiers",
    "trl_ppo_gpt": "the removed TRL PPO stage",
}
# Programs of MindSpeed-RL's folder cli, which MindSpeed-LLM does not have.
_RL_PROGRAMS = ("train_grpo", "train_dapo", "train_ppo", "train_sft", "train_dpo", "train_orm")
_COMMANDS = {("hf", "mg"): "hf2mcore", ("mg", "hf"): "mcore2hf", ("mg", "mg"): "reshard"}


def translate_script(text: str, name: str, arguments: Sequence[str] = ()) -> Translation:
    """Return the translation of all supported commands of a script, including `ray start`.

    The script reads its `arguments` as $1, $2 and so on.

    Raises:
        MsrlError: if the script has no supported command.
    """
    script = parse_script(text, name, arguments)
    translation = Translation(_system(script.commands), load_table("mindspeed_llm"), name)
    commands = [(section, words) for words in script.commands if (section := _section(words))]
    _refuse_different(commands, name)
    for section, words in commands:
        _command(translation, section, words)
    put_exports(translation, script)
    used = {id(words) for _, words in commands}
    put_left_out(translation, script, used, UNSUPPORTED_PROGRAMS)
    return translation


def _system(commands: Sequence[Sequence[Word]]) -> str:
    """Return the system whose programs a script runs."""
    programs = {_program(word) for words in commands for word in words}
    return "MindSpeed-RL" if programs & set(_RL_PROGRAMS) else "MindSpeed-LLM"


def _refuse_different(commands: Sequence[tuple[str, list[Word]]], name: str) -> None:
    """Raise MsrlError if several commands would set the same section to different values."""
    for section in dict.fromkeys(section for section, _ in commands if section != "ray_start"):
        same = {tuple(word.text for word in words) for other, words in commands if other == section}
        if len(same) > 1:
            lines = [words[0].line for other, words in commands if other == section]
            where = ", ".join(str(line) for line in dict.fromkeys(lines))
            raise MsrlError(
                f"{name}: lines {where}: {len(same)} different commands of one kind ({section}). "
                "Keep one of them in the file."
            )


def _program(word: Word) -> str:
    """Return the name of the Python program of a word, without folder and suffix."""
    is_program = word.text.endswith(".py")
    return word.text.rpartition("/")[2].removesuffix(".py") if is_program else ""


def translate_words(words: list[Word], name: str) -> Translation:
    """Return the translation of one command line, which includes the name of the program."""
    translation = Translation("MindSpeed-LLM", load_table("mindspeed_llm"), name)
    section = _section(words)
    if not section:
        programs = [f"{program}.py" for program in PROGRAMS]
        raise MsrlError(
            f"{name}: must name a program of MindSpeed-LLM; "
            f"{nearest(words[0].text if words else '', programs)}"
        )
    _command(translation, section, words)
    return translation


def _section(words: Sequence[Word]) -> str:
    """Return the section of the table for a command; empty for an unsupported one."""
    for before, word in zip([Word("", None), *words], words, strict=False):
        if _program(word) in PROGRAMS:
            return PROGRAMS[_program(word)]
        if before.text == "ray" and word.text == "start":
            return "ray_start"
    return ""


def _command(translation: Translation, section: str, words: Sequence[Word]) -> None:
    """Translate one command: its launcher, its flags and their defaults."""
    start = next(
        (i for i, word in enumerate(words) if word.text.endswith(".py") or word.text == "start"), 0
    )
    overrides: list[tuple[Override, Word]] = []
    if section == "ray":
        arguments, overrides = split_overrides(words[start + 1 :], translation.name)
        words = [*words[: start + 1], *arguments]
    if section == "preprocess" and not words[start + 1 :]:
        translation.errors.append(
            f"{Origin(translation.name, words[start].line)}: {words[start].text} has no arguments. "
            "Arguments of the script ($1, $2, ...) follow its name: config import ... SCRIPT NAME."
        )
    if section in ("ray", "preprocess") and _positional(words[start + 1 :]):
        first = _positional(words[start + 1 :])
        named_file(translation, section, first, words[start], overrides)
    also = ("train",) if section in ("inference", "evaluation") else ()
    is_launch = section in ("ray", "ray_start")
    tree = flags(words[start:], translation.name, is_complete=not is_launch)
    keys = Keys(translation, section, translation.entries(tree, section, "", also=also), also=also)
    for key, node in repeated_flags(words[start:], translation.name):
        put_repeated(translation, section, key, node)
    launcher = flags(words[:start], translation.name, is_complete=False)
    is_mindspore = words[0].text.rpartition("/")[2] == "msrun"
    _launcher(translation, launcher, section, "msrun" if is_mindspore else "torchrun")
    if section in ("convert", "train", "inference", "evaluation"):
        refuse_model(translation, keys)
    put_special_keys = {
        "convert": _convert,
        "preprocess": put_preprocessing,
        "train": put_training,
        "inference": put_inference,
        "evaluation": put_evaluation,
        "ray": partial(put_named_file, overrides=overrides),
    }
    put_special_keys.get(section, _apply_rows)(translation, keys)
    if translation.is_refused:
        return
    keys.apply_remaining()
    if section == "convert":
        _default_names(translation, keys, words[start].text)
    is_first_converter = words[start].text.endswith("convert_ckpt.py")
    if section == "convert" and is_first_converter and keys.get("params_dtype") is None:
        translation.remarks.append(
            f"{translation.name}: without --params-dtype, the original casts weights to float16; "
            "msrl keeps their dtype"
        )
    translation.fill_defaults((section,), keys)


def _positional(words: Sequence[Word]) -> str:
    """Return the first argument if it is not a flag: the name of a configuration file."""
    first = words[0].text if words else ""
    return "" if first.startswith("-") else first


def _launcher(translation: Translation, tree: Node, section: str, launcher: str) -> None:
    """Translate the flags of torchrun or of MindSpore's msrun: the devices of a training."""
    entries = list(translation.entries(tree, launcher, ""))
    if section == "train":
        _workers(translation, {entry.key: entry for entry in entries})
    for entry in (entry for entry in entries if not translation.is_recorded(entry)):
        to = translation.row(entry).to
        if not to:
            translation.apply(entry)
        elif section in ("inference", "evaluation"):
            text = "the engine has rollout.engine.tp devices of one machine"
            translation.record(entry, KeyStatus.PLACEMENT, text)
        elif section != "train":
            translation.record(entry, KeyStatus.PLACEMENT, "the command runs in one process")
        elif isinstance(entry.value, int):
            translation.assign(entry, to, entry.value)
        elif is_placeholder(entry.value) or "$" in str(entry.value):
            translation.record(entry, KeyStatus.PLACEMENT, f"placeholder: set {to[0]}")
        else:
            translation.add_error(entry, f"must be an integer, the value of {to[0]}")


def _workers(translation: Translation, keys: Mapping[str, SourceKey]) -> None:
    """Translate worker_num of msrun, the devices of all machines."""
    total, local = keys.get("worker_num"), keys.get("local_worker_num")
    if total is None:
        return
    workers, per_node = total.value, total.value if local is None else local.value
    if not (isinstance(workers, int) and isinstance(per_node, int) and min(workers, per_node) > 0):
        return  # the caller and the checks of the values report what they are instead
    if workers % per_node:
        translation.add_error(total, f"must be a multiple of local_worker_num={per_node}")
        return
    why = f"{workers} workers, {per_node} of each machine"
    translation.assign(total, ["cluster.nodes"], workers // per_node, why=why)
    if local is None:
        translation.set("cluster.devices_per_node", wrap(per_node, total.origin))


def _model_types(keys: Keys) -> tuple[str, str]:
    """Return load_model_type and save_model_type, by default hf and mg."""
    source, target = keys.value("load_model_type"), keys.value("save_model_type")
    return str(source or "hf"), str(target or "mg")


def _default_names(translation: Translation, keys: Keys, program: str) -> None:
    """Set the names of tensors that the converter writes without an option for them."""
    if keys.value("model_type_hf") == "qwen3-next" and _model_types(keys) == ("hf", "mg"):
        translation.set_default("convert.names", "mindspeed")
    if _writes_legacy(program, keys):
        translation.set_default("convert.names", "legacy")


def _writes_legacy(program: str, keys: Keys) -> bool:
    """Return True if the command converts Hugging Face weights to models from before megatron-core.

    convert_ckpt_v2.py never writes these.
    """
    is_to_megatron = _model_types(keys) == ("hf", "mg")
    is_mcore = keys.value("use_mcore_models") is True
    return program.endswith("convert_ckpt.py") and is_to_megatron and not is_mcore


def _convert(translation: Translation, keys: Keys) -> None:
    """Translate the formats, the output folder and the tensor names of a conversion."""
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
    if keys.value("orm") is True:
        keys.assign("orm", ["convert.orm"], True, why="refuses models without a score head")
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


def _apply_rows(translation: Translation, keys: Keys) -> None:
    """Leave the keys to their table rows, which name the msrl command that replaces the flag."""
    del translation, keys
