"""Options of commands that set configuration keys.

This is a table beside the schema, because commands offer fields that several sections inherit.
Type, range, default, choices and help of an option are those of its key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TRAININGS = ("train-sft", "train-dpo", "train-rm", "train-grpo", "train-distill")
# Section that a command does not share with others.
SECTIONS = {
    "convert-ckpt": "convert",
    "preprocess": "preprocess",
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "eval": "evaluate",
}
_SHOWN = ("config show", "config validate")
_TO_MCORE = ("convert-ckpt hf2mcore", "convert-ckpt reshard")
_FROM_MCORE = ("convert-ckpt mcore2hf", "convert-ckpt reshard", "convert-ckpt lora2hf")
_WEIGHTS = (*_TO_MCORE, "convert-ckpt mcore2hf", "convert-ckpt hf2hf")
_VERIFYING = (*_WEIGHTS, "convert-ckpt gguf2hf", "convert-ckpt hf2gguf")
_WRITING = (*_VERIFYING, "convert-ckpt lora2hf")
_CLUSTER = ("cluster up", "cluster join")
_ON_DEVICES = (
    *(*TRAININGS, *_SHOWN, *_TO_MCORE, "convert-ckpt mcore2hf", "preprocess"),
    *("generate", "chat", "serve", "eval", *_CLUSTER, "diagnose mismatch", "doctor"),
)


@dataclass(frozen=True, slots=True)
class KeyOption:
    """Option that sets a configuration key.

    Attributes:
        key: Dotted key.
        names: First the name that the help shows. The help also shows names of one letter.
        metavar: Placeholder of the value; empty for that of the type.
        is_required: Whether the command needs the key.
        help: Text in place of the key's description, for a command that reads the key differently.
        commands: Commands that offer the option.
        panel: Title above the option in the help; empty for general options.
    """

    key: str
    names: tuple[str, ...]
    metavar: str
    is_required: bool
    help: str
    commands: tuple[str, ...]
    panel: str = ""


def _option(
    key: str,
    *aliases: str,
    name: str = "",
    metavar: str = "",
    is_required: bool = False,
    help: str = "",
    commands: tuple[str, ...] = (),
) -> KeyOption:
    """Return an option, which is named like the last part of its key if there is no `name`."""
    first = name or f"--{key.rpartition('.')[2].replace('_', '-')}"
    return KeyOption(key, (first, *aliases), metavar, is_required, help, commands)


def _panel(title: str, commands: tuple[str, ...], *options: KeyOption) -> tuple[KeyOption, ...]:
    """Return the options under a title, which `commands` offer unless an option names others."""
    return tuple(
        replace(option, panel=title, commands=option.commands or commands) for option in options
    )


def _layout(section: str) -> tuple[KeyOption, ...]:
    return tuple(
        _option(
            f"{section}.{name}", f"--{kind}-model-parallel-size", f"--target-{kind}-parallel-size"
        )
        for name, kind in (("tp", "tensor"), ("pp", "pipeline"))
    )


def _model(section: str) -> tuple[KeyOption, ...]:
    return (
        _option(f"{section}.model", metavar="DIR", is_required=True),
        _ENGINE_SIZE,
        _option(f"{section}.template", "--prompt-type"),
        _option(f"{section}.dtype", metavar="TYPE"),
    )


def _sampling(section: str) -> tuple[KeyOption, ...]:
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    return (
        *(_option(f"{section}.{name}") for name in names),
        _option(f"{section}.stop", metavar="TEXT"),
    )


_ENGINE_SIZE = _option("rollout.engine.tp", "--tensor-model-parallel-size")
_DAY = "YYYY-MM-DD"

OPTIONS = (
    *_panel(
        "Common settings",
        (*TRAININGS, *_SHOWN),
        _option("model.path", name="--model", metavar="DIR"),
        _option("data.train", name="--data", metavar="DATA"),
        _option("run.name", metavar="NAME"),
        _option("train.steps"),
        _option("train.optimizer.lr"),
    ),
    *_panel("Curriculum", ("train-grpo",), _option("data.curriculum.sampler")),
    *_panel(
        "Recorded rollouts",
        ("train-grpo",),
        _option("rollout.replay.path", name="--from-rollouts", metavar="RUN|FILE"),
    ),
    *_panel("Parallel layout", (*TRAININGS, *_SHOWN), *_layout("train.parallel")),
    *_panel(
        "Checkpoint",
        _WEIGHTS,
        _option(
            "convert.load",
            "--load-dir",
            metavar="DIR",
            is_required=True,
            commands=(*_WRITING, "convert-ckpt inspect"),
        ),
        _option("convert.save", "--save-dir", metavar="DIR", is_required=True, commands=_WRITING),
        _option("convert.hf_config", "--hf-cfg-dir", metavar="DIR", commands=_FROM_MCORE),
        _option("convert.lora", "--lora-load", metavar="DIR"),
        _option("convert.orm"),
    ),
    *_panel(
        "Parallel layout",
        _TO_MCORE,
        *_layout("convert"),
        _option("convert.vpp", "--num-layers-per-virtual-pipeline-stage"),
        _option("convert.num_layer_list"),
        _option("convert.noop_layers"),
        _option("convert.ep", "--expert-model-parallel-size", "--target-expert-parallel-size"),
        _option("convert.etp", "--expert-tensor-parallel-size"),
        _option("convert.moe_tp_extend_ep"),
    ),
    *_panel(
        "Format",
        _TO_MCORE,
        _option("convert.moe_grouped_gemm"),
        _option("convert.dtype", "--params-dtype", metavar="TYPE", commands=_VERIFYING),
        _option("convert.format"),
        _option("convert.names"),
        _option("convert.pad_vocab_to_multiple"),
        _option("convert.verify", commands=_VERIFYING),
    ),
    *_panel(
        "Input",
        ("preprocess",),
        _option("preprocess.input", metavar="FILE...", is_required=True),
        _option("preprocess.split", metavar="NAME"),
        _option(
            "preprocess.tokenizer", "--tokenizer-name-or-path", metavar="DIR", is_required=True
        ),
        _option("preprocess.handler", "--handler-name", is_required=True),
        _option("preprocess.map_keys"),
        _option("preprocess.keep", metavar="COLUMN"),
        _option("preprocess.ignore", metavar="KEY"),
    ),
    *_panel(
        "Output",
        ("preprocess",),
        _option("preprocess.kind", metavar="KIND"),
        _option("preprocess.output_prefix", metavar="PREFIX", is_required=True),
        _option("preprocess.workers"),
        _option("preprocess.overwrite"),
    ),
    *_panel(
        "Rows",
        ("preprocess",),
        _option("preprocess.template", "--prompt-type"),
        _option("preprocess.seq_length"),
        _option("preprocess.pack"),
        _option("preprocess.too_long", metavar="ACTION"),
        _option("preprocess.on_bad_row", metavar="ACTION"),
        _option("preprocess.enable_thinking"),
        _option("preprocess.date", metavar=_DAY),
        _option("preprocess.append_eod"),
        _option("preprocess.show"),
    ),
    *_panel(
        "Images",
        ("preprocess",),
        _option("preprocess.min_pixels"),
        _option("preprocess.max_pixels"),
        _option("preprocess.max_images"),
        _option("preprocess.image_root", metavar="DIR"),
        _option("preprocess.images", metavar="ACTION"),
        _option("preprocess.verify_images", metavar="CHECK"),
    ),
    *_panel("Model", ("generate",), *_model("generate"), _option("generate.engine")),
    *_panel(
        "Prompts",
        ("generate",),
        _option("generate.prompt", metavar="TEXT"),
        _option("generate.input", metavar="FILE"),
        _option("generate.output", metavar="FILE"),
        _option("generate.system", metavar="TEXT"),
        _option("generate.date", metavar=_DAY),
        _option("generate.raw"),
    ),
    *_panel(
        "Sampling",
        ("generate",),
        _option("generate.max_tokens"),
        *_sampling("generate"),
        _option("generate.num_samples"),
    ),
    *_panel("Model", ("chat",), *_model("chat")),
    *_panel(
        "Prompts",
        ("chat",),
        _option("chat.system", metavar="TEXT"),
        _option("chat.date", metavar=_DAY),
    ),
    *_panel("Sampling", ("chat",), _option("chat.max_tokens"), *_sampling("chat")),
    *_panel(
        "Model",
        ("serve",),
        *_model("serve"),
        _option("serve.name", "--served-model-name", metavar="NAME"),
        _option("serve.date", metavar=_DAY),
        _option("serve.tools", "--tool-call-parser"),
        _option("serve.lora", metavar="[NAME=]DIR"),
        _option("serve.cache", metavar="DIR"),
        _option("serve.max_images"),
        _option("serve.image_hosts", "--allowed-media-domains", metavar="HOST"),
    ),
    *_panel(
        "Network",
        ("serve",),
        _option("serve.host", metavar="HOST"),
        _option("serve.port"),
        _option("serve.api_key_file", metavar="FILE"),
    ),
    *_panel(
        "Model",
        ("eval",),
        _option("evaluate.models", name="--model", metavar="DIR", is_required=True),
        _ENGINE_SIZE,
    ),
    *_panel(
        "Prompts",
        ("eval",),
        _option("data.eval", name="--data", metavar="DATA"),
        _option("evaluate.benchmarks", name="--benchmark", metavar="NAME,..."),
        _option("evaluate.benchmark_data", metavar="DIR"),
        _option("evaluate.num_fewshot"),
        _option("evaluate.chat_template"),
        _option("evaluate.enable_thinking"),
        _option("eval.prompts", "--limit"),
    ),
    *_panel(
        "Output",
        ("eval",),
        _option("evaluate.output", "-o", metavar="DIR"),
        _option("evaluate.overwrite"),
    ),
    *_panel(
        "Sampling",
        ("eval",),
        _option("eval.samples_per_prompt", name="--num-samples"),
        _option("eval.max_response_tokens", name="--max-tokens"),
        *_sampling("eval.sampling"),
    ),
    *_panel(
        "",
        _ON_DEVICES,
        _option("checkpoint.resume", metavar="auto|none|PATH", commands=TRAININGS),
        _option(
            "model.template",
            help="Template of the prompts that a model is trained on. "
            "Default: the tokenizer's chat template.",
            commands=("diagnose mismatch",),
        ),
        _option(
            "cluster.devices_per_node",
            name="--devices",
            help="Number of devices to offer. Default: all.",
            commands=_CLUSTER,
        ),
        _option("cluster.platform"),
    ),
)


def options(command: str) -> tuple[KeyOption, ...]:
    """Return the options of a command such as `train-sft`, or of all commands of a group."""
    return tuple(
        option
        for option in OPTIONS
        if any(name == command or name.startswith(f"{command} ") for name in option.commands)
    )


def reads_section(command: str, section: str) -> bool:
    """Return True if a command may read a section.

    Trainings and `eval` read all common ones, and the section of `preprocess` for data in rows.
    """
    own = SECTIONS.get(command)
    is_common = section == "preprocess" or section not in SECTIONS.values()
    return section == own or (command in (*TRAININGS, "eval") and is_common)
