"""Options of all commands, declared once.

An option sets the configuration key of the same meaning, or nothing if it is absent. The help reads
defaults, ranges and choices of configuration keys from the schema.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from msrl.cli import completion as complete

CONFIGURATION = "Configuration"
SETTINGS = "Common settings"
CHECKPOINT = "Checkpoint"
PARALLEL = "Parallel layout"
FORMAT = "Format"
INPUT = "Input"
ROWS = "Rows"
OUTPUT = "Output"
MODEL = "Model"
PROMPTS = "Prompts"
SAMPLING = "Sampling"
NETWORK = "Network"


class SystemName(str, Enum):
    """Systems whose files `config import` reads."""

    mindspeed_rl = "mindspeed-rl"
    mindspeed_llm = "mindspeed-llm"
    roll = "roll"
    lightrft = "lightrft"
    verl = "verl"


class CommandName(str, Enum):
    """Commands that read a configuration."""

    sft = "train-sft"
    dpo = "train-dpo"
    rm = "train-rm"
    grpo = "train-grpo"
    distill = "train-distill"
    convert = "convert-ckpt"
    preprocess = "preprocess"
    generate = "generate"
    chat = "chat"
    serve = "serve"
    eval = "eval"


def _option(*names: str, panel: str | None = None, values: Any = None, **settings: Any) -> Any:
    """Return a typer option in a panel of the help, whose values `values` completes."""
    return typer.Option(
        *names, rich_help_panel=panel, autocompletion=values, show_default=False, **settings
    )


# Shared by all commands.
Files = Annotated[
    list[str] | None,
    _option(
        "--config", "-c", metavar="FILE", panel=CONFIGURATION, values=complete.config_files,
        help="YAML file, or the name of a packaged configuration. "
        "Repeat it to merge several: later files override earlier ones.",
    ),
]  # fmt: skip
ConfigName = Annotated[
    str | None,
    _option(
        "--config-name", metavar="NAME", panel=CONFIGURATION, values=complete.config_names,
        help="Configuration by name, from ./configs or packaged with msrl. "
        "It is merged before the files of -c.",
    ),
]  # fmt: skip
Sets = Annotated[
    list[str] | None,
    _option(
        "--set", metavar="KEY=VALUE", panel=CONFIGURATION, values=complete.assignments,
        help="Set one configuration key, as in train.steps=10. Repeatable. Overrides files.",
    ),
]  # fmt: skip
DryRun = Annotated[
    bool,
    _option(
        "--dry-run",
        help="Check the configuration and all inputs as the command does, and print the plan "
        "without starting or writing anything.",
    ),
]
Platform = Annotated[
    str | None,
    _option(
        "--platform",
        metavar="NAME",
        values=complete.choices("cluster.platform"),
        help="Kind of device to run on.",
    ),
]
Verbose = Annotated[
    bool, _option("--verbose", "-v", help="Print the logs of Megatron, vLLM and Ray too.")
]
Json = Annotated[bool, _option("--json", help="Print JSON.")]

# Settings of the trainings, and of several commands.
TrainModel = Annotated[
    str | None,
    _option(
        "--model",
        metavar="DIR",
        panel=SETTINGS,
        help="Model to train: a Hugging Face folder, an mcore checkpoint, or a name on a hub.",
    ),
]
Data = Annotated[
    str | None,
    _option(
        "--data",
        metavar="DATA",
        panel=SETTINGS,
        help="Training data: the output prefix of `msrl preprocess`, or rows: a file, folder, glob "
        "or name on a hub.",
    ),
]
Name = Annotated[
    str | None,
    _option(
        "--name",
        metavar="NAME",
        panel=SETTINGS,
        help="Name of the run. Its files are written to runs/NAME.",
    ),
]
Steps = Annotated[
    int | None, _option("--steps", metavar="N", panel=SETTINGS, help="Number of training steps.")
]
LearningRate = Annotated[
    float | None, _option("--lr", metavar="X", panel=SETTINGS, help="Peak learning rate.")
]
Tp = Annotated[
    int | None,
    _option(
        "--tp", "--tensor-model-parallel-size", "--target-tensor-parallel-size", metavar="N",
        panel=PARALLEL,
        help="Tensor-parallel size, in devices.",
    ),
]  # fmt: skip
Pp = Annotated[
    int | None,
    _option(
        "--pp", "--pipeline-model-parallel-size", "--target-pipeline-parallel-size", metavar="N",
        panel=PARALLEL,
        help="Pipeline-parallel size, in stages.",
    ),
]  # fmt: skip
Resume = Annotated[
    str | None,
    _option(
        "--resume", metavar="auto|none|PATH", values=complete.resume,
        help="Resume from a checkpoint: the newest complete one of the run (auto), or the one "
        "in the folder PATH.",
    ),
]  # fmt: skip

# Conversion.
Load = Annotated[
    str | None,
    _option(
        "--load",
        "--load-dir",
        metavar="DIR",
        panel=CHECKPOINT,
        help="Checkpoint to read: a folder, or a name on a hub. Required here or in a file.",
    ),
]
Save = Annotated[
    str | None,
    _option(
        "--save",
        "--save-dir",
        metavar="DIR",
        panel=CHECKPOINT,
        help="New or empty folder to write. Required here or in a file.",
    ),
]
InspectDir = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR",
        help="Checkpoint to inspect: an mcore or Hugging Face folder.",
        show_default=False,
    ),
]
Vpp = Annotated[
    int | None,
    _option(
        "--vpp", "--num-layers-per-virtual-pipeline-stage", metavar="N", panel=PARALLEL,
        help="Layers per virtual pipeline stage. Default: no virtual stages.",
    ),
]  # fmt: skip
LayerList = Annotated[
    str | None,
    _option(
        "--num-layer-list",
        metavar="N,N,...",
        panel=PARALLEL,
        help="Number of layers of each pipeline stage. Default: equal stages.",
    ),
]
NoopLayers = Annotated[
    str | None,
    _option(
        "--noop-layers",
        metavar="N,N,...",
        panel=PARALLEL,
        help="Pipeline positions that hold no layer, from 0. Default: none.",
    ),
]
Ep = Annotated[
    int | None,
    _option(
        "--ep", "--expert-model-parallel-size", "--target-expert-parallel-size", metavar="N",
        panel=PARALLEL,
        help="Expert-parallel size, in devices.",
    ),
]  # fmt: skip
Etp = Annotated[
    int | None,
    _option(
        "--etp", "--expert-tensor-parallel-size", metavar="N", panel=PARALLEL,
        help="Tensor-parallel size of each expert, in devices. Default: the value of --tp.",
    ),
]  # fmt: skip
GroupedGemm = Annotated[
    bool | None,
    _option(
        "--moe-grouped-gemm/--no-moe-grouped-gemm", panel=FORMAT,
        help="Write the experts of a rank as one tensor, for grouped matrix products.",
    ),
]  # fmt: skip
TpExtendEp = Annotated[
    bool | None,
    _option(
        "--moe-tp-extend-ep/--no-moe-tp-extend-ep", panel=PARALLEL,
        help="Distribute unsplit experts over EP * TP ranks, in MindSpeed's order.",
    ),
]  # fmt: skip
Dtype = Annotated[
    str | None,
    _option(
        "--dtype", "--params-dtype", metavar="TYPE", panel=FORMAT,
        values=complete.choices("convert.dtype"),
        help="Data type of the written tensors.",
    ),
]  # fmt: skip
CheckpointFormat = Annotated[
    str | None,
    _option(
        "--format", metavar="NAME", panel=FORMAT, values=complete.choices("convert.format"),
        help="Checkpoint format: one file per rank (mindspeed) or Megatron's distributed format "
        "(dist).",
    ),
]  # fmt: skip
Names = Annotated[
    str | None,
    _option(
        "--names", metavar="NAME", panel=FORMAT, values=complete.choices("convert.names"),
        help="Tensor names: Megatron's local layers, Transformer Engine's as in training (te) or "
        "as in MindSpeed-LLM's converter, or those before megatron-core (legacy).",
    ),
]  # fmt: skip
PadVocab = Annotated[
    int | None,
    _option(
        "--pad-vocab-to-multiple", metavar="N", panel=FORMAT,
        help="Pad the vocabulary to a multiple of this many tokens. Default: the value of --tp.",
    ),
]  # fmt: skip
HfConfig = Annotated[
    str | None,
    _option(
        "--hf-config", "--hf-cfg-dir", metavar="DIR", panel=CHECKPOINT,
        help="Folder with config.json and tokenizer. Default: those in the folder of --load.",
    ),
]  # fmt: skip
Lora = Annotated[
    str | None,
    _option(
        "--lora", "--lora-load", metavar="DIR", panel=CHECKPOINT,
        help="LoRA adapter to merge, in PEFT or mcore format. It may be the folder of --load.",
    ),
]  # fmt: skip
Orm = Annotated[
    bool | None,
    _option(
        "--orm/--no-orm", panel=CHECKPOINT,
        help="Accept only a reward model. Reward models are recognized without it too.",
    ),
]  # fmt: skip
Verify = Annotated[
    bool | None,
    _option(
        "--verify/--no-verify",
        panel=FORMAT,
        help="Verify the result: bitwise round trip, and logits in fp32.",
    ),
]

# Preprocessing.
Input = Annotated[
    list[str] | None,
    _option(
        "--input", metavar="FILE...", panel=INPUT,
        help="JSON, JSONL, CSV, Parquet, Arrow or text files, folders or globs, or a dataset on a "
        "hub. Required here or in a file.",
    ),
]  # fmt: skip
MoreInput = Annotated[list[str] | None, typer.Argument(metavar="FILE", hidden=True)]
Tokenizer = Annotated[
    str | None,
    _option(
        "--tokenizer", "--tokenizer-name-or-path", metavar="DIR", panel=INPUT,
        help="Folder of the Hugging Face tokenizer, or a name on a hub. Required here or in a "
        "file.",
    ),
]  # fmt: skip
Handler = Annotated[
    str | None,
    _option(
        "--handler", "--handler-name", metavar="NAME", panel=INPUT,
        values=complete.choices("preprocess.handler"),
        help="Dataset handler, which reads a row as a conversation: one of the names below, or "
        "path/file.py:NAME. Required here or in a file.",
    ),
]  # fmt: skip
Kind = Annotated[
    str | None,
    _option(
        "--kind", metavar="KIND", panel=OUTPUT, values=complete.choices("preprocess.kind"),
        help="Data to write: examples for train-sft (sft), prompts for train-grpo (prompts), text "
        "for pretraining (pretrain), pairs or labeled answers for train-dpo (pairs, labeled), "
        "pairs or labeled steps for train-rm (pairs, steps). Default: the first kind of the "
        "handler.",
    ),
]  # fmt: skip
Template = Annotated[
    str | None,
    _option(
        "--template", "--prompt-type", metavar="NAME", panel=ROWS, values=complete.template_names,
        help="Prompt template: a name, a YAML file, or FILE.json:NAME.",
    ),
]  # fmt: skip
OutputPrefix = Annotated[
    str | None,
    _option(
        "--output-prefix", metavar="PREFIX", panel=OUTPUT,
        help="Path that all written file names start with, as in data/sft. "
        "Required here or in a file.",
    ),
]  # fmt: skip
SeqLength = Annotated[
    int | None,
    _option(
        "--seq-length",
        metavar="N",
        panel=ROWS,
        help="Maximum row length in tokens. Default: no limit.",
    ),
]
Pack = Annotated[
    bool | None,
    _option(
        "--pack/--no-pack",
        panel=ROWS,
        help="Pack several examples into rows of --seq-length tokens.",
    ),
]
MapKeys = Annotated[
    str | None,
    _option(
        "--map-keys",
        metavar="JSON",
        panel=INPUT,
        help='Column names of the input, as in {"prompt": "question"}.',
    ),
]
Split = Annotated[
    str | None,
    _option(
        "--split", metavar="NAME", panel=INPUT,
        help="Split to read of a folder that has several, such as train.",
    ),
]  # fmt: skip
Keep = Annotated[
    list[str] | None,
    _option(
        "--keep",
        metavar="COLUMN",
        panel=INPUT,
        help="Unread column that prompts keep for reward functions, or all. Can be repeated.",
    ),
]
Ignore = Annotated[
    list[str] | None,
    _option(
        "--ignore", metavar="KEY", panel=INPUT,
        help="Key of rows and turns that is not read, even if it has a meaning. Can be repeated.",
    ),
]  # fmt: skip
TooLongRows = Annotated[
    str | None,
    _option(
        "--too-long", metavar="ACTION", panel=ROWS, values=complete.choices("preprocess.too_long"),
        help="Action on rows longer than --seq-length.",
    ),
]  # fmt: skip
OnBadRow = Annotated[
    str | None,
    _option(
        "--on-bad-row", metavar="ACTION", panel=ROWS,
        values=complete.choices("preprocess.on_bad_row"),
        help="Action on rows that cannot be read: refuse (default) or drop, which counts them by "
        "reason and writes them to PREFIX_bad_rows.jsonl.",
    ),
]  # fmt: skip
Date = Annotated[
    str | None,
    _option(
        "--date", metavar="YYYY-MM-DD", panel=ROWS,
        help="Fixed day for a chat template with the current date. Default: today.",
    ),
]  # fmt: skip
Thinking = Annotated[
    bool | None,
    _option(
        "--enable-thinking/--no-enable-thinking", panel=ROWS,
        help="For templates with thinking: --no-enable-thinking gives the model an empty thought. "
        "Default: the template's.",
    ),
]  # fmt: skip
Workers = Annotated[
    int | None, _option("--workers", metavar="N", panel=OUTPUT, help="Number of worker processes.")
]
Overwrite = Annotated[
    bool | None,
    _option(
        "--overwrite/--no-overwrite", panel=OUTPUT, help="Replace existing data of the same prefix."
    ),
]
AppendEod = Annotated[
    bool | None,
    _option(
        "--append-eod/--no-append-eod", panel=ROWS,
        help="End every pretraining document with the end-of-text token.",
    ),
]  # fmt: skip
Show = Annotated[
    int | None,
    _option(
        "--show", panel=ROWS, metavar="N",
        help="Show the first N rows as they are rendered, and write nothing.",
    ),
]  # fmt: skip

# Generation.
Model = Annotated[
    str | None,
    _option(
        "--model",
        metavar="DIR",
        panel=MODEL,
        help="Hugging Face folder, mcore checkpoint, or a name on a hub. Required here or in a "
        "file.",
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
]
EngineTp = Annotated[
    int | None,
    _option(
        "--tp",
        "--tensor-model-parallel-size",
        metavar="N",
        panel=MODEL,
        help="Tensor-parallel size of the engine, in devices.",
    ),
]
ChatTemplate = Annotated[
    str | None,
    _option(
        "--template", "--prompt-type", metavar="NAME", panel=MODEL, values=complete.template_names,
        help="Prompt template: a name, a YAML file, or FILE.json:NAME. "
        "Default: the tokenizer's chat template.",
    ),
]  # fmt: skip
PromptText = Annotated[
    list[str] | None,
    _option(
        "--prompt",
        metavar="TEXT",
        panel=PROMPTS,
        help="Prompt. Give it or --input. Repeatable: several prompts are answered as JSONL.",
    ),
]
InputFile = Annotated[
    str | None,
    _option(
        "--input",
        metavar="FILE",
        panel=PROMPTS,
        help="JSONL file with prompt or messages in every row.",
    ),
]
OutputFile = Annotated[
    str | None,
    _option(
        "--output",
        metavar="FILE",
        panel=PROMPTS,
        help="JSONL file to write. Default: standard output.",
    ),
]
Engine = Annotated[
    str | None,
    _option(
        "--engine",
        metavar="NAME",
        panel=MODEL,
        values=complete.choices("generate.engine"),
        help="Inference engine.",
    ),
]
System = Annotated[
    str | None,
    _option(
        "--system", metavar="TEXT", panel=PROMPTS, help="System message. Default: the template's."
    ),
]
Raw = Annotated[
    bool | None,
    _option("--raw/--no-raw", panel=PROMPTS, help="Use prompts as they are, without a template."),
]
ComputeDtype = Annotated[
    str | None,
    _option(
        "--dtype", metavar="TYPE", panel=MODEL, values=complete.choices("generate.dtype"),
        help="Data type of weights and activations. Default: the checkpoint's.",
    ),
]  # fmt: skip
MaxTokens = Annotated[
    int | None,
    _option("--max-tokens", metavar="N", panel=SAMPLING, help="Maximum response length in tokens."),
]
Temperature = Annotated[
    float | None,
    _option(
        "--temperature",
        metavar="X",
        panel=SAMPLING,
        help="Sampling temperature. 0 decodes greedily.",
    ),
]
TopP = Annotated[
    float | None,
    _option(
        "--top-p",
        metavar="X",
        panel=SAMPLING,
        help="Sample from the smallest set of tokens with this probability. 1 disables it.",
    ),
]
TopK = Annotated[
    int | None,
    _option(
        "--top-k",
        metavar="N",
        panel=SAMPLING,
        help="Sample from this many of the likeliest tokens. -1 disables it.",
    ),
]
MinP = Annotated[
    float | None,
    _option(
        "--min-p", metavar="X", panel=SAMPLING,
        help="Drop tokens below this fraction of the likeliest token's probability. 0 disables it.",
    ),
]  # fmt: skip
NumSamples = Annotated[
    int | None,
    _option("--num-samples", metavar="N", panel=SAMPLING, help="Number of responses per prompt."),
]
Seed = Annotated[
    int | None,
    _option(
        "--seed",
        metavar="N",
        panel=SAMPLING,
        help="Seed of sampling. Default: run.seed, which is 0.",
    ),
]
Stop = Annotated[
    list[str] | None,
    _option(
        "--stop",
        metavar="TEXT",
        panel=SAMPLING,
        help="Text that ends a response. Repeatable. Default: the template's.",
    ),
]

# Serving.
_SERVED = (
    "Hugging Face folder, mcore checkpoint, LoRA adapter, or a name on a hub. Required here or in "
    "a file."
)
ServedModel = Annotated[str | None, _option("--model", metavar="DIR", panel=MODEL, help=_SERVED)]
ServerHost = Annotated[
    str | None,
    _option(
        "--host", metavar="HOST", panel=NETWORK,
        help="Address to listen on. Any other than one of this machine only needs an API key.",
    ),
]  # fmt: skip
ServerPort = Annotated[
    int | None,
    _option(
        "--port", metavar="N", panel=NETWORK, help="Port to listen on. 0 selects a free one."
    ),
]  # fmt: skip
ApiKeyFile = Annotated[
    str | None,
    _option(
        "--api-key-file", metavar="FILE", panel=NETWORK,
        help="File with the API key that requests must have. "
        "Default: the environment variable MSRL_API_KEY.",
    ),
]  # fmt: skip
ServedName = Annotated[
    str | None,
    _option(
        "--name", "--served-model-name", metavar="NAME", panel=MODEL,
        help="Name of the model in requests. Default: the name of its folder, or of the run.",
    ),
]  # fmt: skip
ToolParser = Annotated[
    str | None,
    _option(
        "--tools", "--tool-call-parser", metavar="NAME", panel=MODEL,
        values=complete.choices("serve.tools"),
        help="Parser of tool calls in vLLM, or none. Default: the parser for the template.",
    ),
]  # fmt: skip
Adapters = Annotated[
    list[str] | None,
    _option(
        "--lora", metavar="[NAME=]DIR", panel=MODEL,
        help="LoRA adapter to serve besides the model, unmerged. Repeatable.",
    ),
]  # fmt: skip
ModelCache = Annotated[
    str | None,
    _option(
        "--cache", metavar="DIR", panel=MODEL,
        help="Folder of converted checkpoints. Default: msrl/serve in the user's cache.",
    ),
]  # fmt: skip

# Evaluation.
EvaluatedModels = Annotated[
    list[str] | None,
    _option(
        "--model", metavar="DIR", panel=MODEL,
        help="Hugging Face folder, mcore checkpoint, LoRA adapter, or run folder for all its "
        "checkpoints. Repeatable. Required here or in a file.",
    ),
]  # fmt: skip
MoreModels = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL...", help="The same as --model.", show_default=False),
]
EvaluationData = Annotated[
    str | None,
    _option(
        "--data", metavar="DATA", panel=PROMPTS,
        help="Held-out prompts: the output prefix of `msrl preprocess`, or rows. Required here or "
        "in a file.",
    ),
]  # fmt: skip
NumPrompts = Annotated[
    int | None,
    _option(
        "--prompts", metavar="N", panel=PROMPTS,
        help="Number of prompts to use, from the start of the data. Default: all.",
    ),
]  # fmt: skip
EvaluationTokens = Annotated[
    int | None,
    _option(
        "--max-tokens", metavar="N", panel=SAMPLING,
        help="Maximum response length in tokens. Default: rollout.max_response_tokens.",
    ),
]  # fmt: skip
EvaluationSeed = Annotated[
    int | None,
    _option(
        "--seed", metavar="N", panel=SAMPLING,
        help="Seed of sampling. Default: that of evaluations during training.",
    ),
]  # fmt: skip
EvaluationFolder = Annotated[
    str | None,
    _option(
        "--output", "-o", metavar="DIR", panel=OUTPUT,
        help="Folder of samples, results and the curve. An existing one is continued.",
    ),
]  # fmt: skip
EvaluateAgain = Annotated[
    bool | None,
    _option(
        "--overwrite/--no-overwrite", panel=OUTPUT,
        help="Evaluate checkpoints again whose results are in the folder already.",
    ),
]  # fmt: skip

# Cluster.
NewToken = Annotated[
    bool,
    _option(
        "--new-token",
        panel=NETWORK,
        help="Replace the token of earlier clusters. Copy it to the other machines again.",
    ),
]
Machines = Annotated[
    int | None,
    _option(
        "--wait",
        metavar="N",
        min=1,
        panel=NETWORK,
        help="Wait until N machines, this one included, have joined, for at most "
        "cluster.wait_for_nodes_s seconds. Default: do not wait.",
    ),
]
Force = Annotated[
    bool,
    _option("--force", help="Do not ask, even if a run uses the devices."),
]
RunFolder = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Folder of a run, such as runs/sft.", show_default=False),
]
RunFolders = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="Folders of runs, such as runs/grpo.", show_default=False
    ),
]
ViewOutput = Annotated[
    str | None,
    _option(
        "--output",
        metavar="PATH",
        help="Folder or, with --single-file, file to write. "
        "Default: view or view.html in the folder of the first run.",
    ),
]
SingleFile = Annotated[bool, _option("--single-file", help="Write one HTML file, for small runs.")]
Serve = Annotated[
    bool,
    _option(
        "--serve",
        help="Serve the pages on 127.0.0.1 and update them while the runs continue, until Ctrl-C.",
    ),
]
DiagnosedTarget = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN",
        help="Hugging Face folder, mcore checkpoint, or folder of a run, such as runs/grpo.",
        show_default=False,
    ),
]
DiagnosedTemplate = Annotated[
    str | None,
    _option(
        "--template",
        metavar="NAME",
        values=complete.choices("model.template"),
        help="Template of the prompts that a model is trained on. "
        "Default: the tokenizer's chat template.",
    ),
]
ViewPort = Annotated[
    int,
    _option("--port", metavar="N", min=0, max=65535, help="Port of --serve. 0 selects a free one."),
]
NoToken = Annotated[
    bool, _option("--no-token", help="Let all users of this machine open the pages of --serve.")
]
Address = Annotated[
    str,
    typer.Argument(
        metavar="HOST:PORT", help="Address that `msrl cluster up` printed.", show_default=False
    ),
]
Host = Annotated[
    str,
    _option(
        "--host",
        metavar="HOST",
        panel=NETWORK,
        help="Address of this machine for the other machines.",
    ),
]
NodeHost = Annotated[
    str | None,
    _option(
        "--host", metavar="HOST", panel=NETWORK,
        help="Address of this machine for the other machines. "
        "Default: the one that reaches the head node.",
    ),
]  # fmt: skip
Port = Annotated[
    int,
    _option(
        "--port",
        metavar="N",
        min=1,
        max=65535,
        panel=NETWORK,
        help="Port for nodes and runs, from 1 to 65535.",
    ),
]
DashboardHost = Annotated[
    str,
    _option(
        "--dashboard-host",
        metavar="HOST",
        panel=NETWORK,
        help="Address that the dashboard listens on.",
    ),
]
DashboardPort = Annotated[
    int,
    _option(
        "--dashboard-port",
        metavar="N",
        min=1,
        max=65535,
        panel=NETWORK,
        help="Port of the dashboard, from 1 to 65535.",
    ),
]
Devices = Annotated[
    int | None,
    _option("--devices", metavar="N", min=1, help="Number of devices to offer. Default: all."),
]

# Configuration and doctor.
For = Annotated[
    CommandName | None,
    _option(
        "--for", metavar="COMMAND", panel=CONFIGURATION,
        help=f"Command to check for: {', '.join(CommandName)}. "
        "Default: the one that the configured sections suggest.",
    ),
]  # fmt: skip
From = Annotated[
    SystemName,
    _option(
        "--from",
        metavar="SYSTEM",
        help=f"System that the file or the flags belong to: {', '.join(SystemName)}. Required.",
    ),
]
Foreign = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE|FLAGS...",
        help="YAML file, shell script with its arguments, or the words of a command.",
        show_default=False,
    ),
]
NativeFile = Annotated[
    str | None,
    _option("--output", "-o", metavar="FILE", help="YAML file to write. Default: standard output."),
]
Approximate = Annotated[
    bool,
    _option(
        "--approximate",
        help="Accept the nearest setting if msrl has no equal one in a file of another system. "
        "The report names each of them. Default: refuse such files.",
    ),
]
Imports = Annotated[
    bool,
    _option(
        "--imports/--no-imports",
        help="Import every library in a separate process. Default: --imports.",
    ),
]
