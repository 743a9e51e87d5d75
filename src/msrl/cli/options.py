"""Every option of the command line, declared once. A flag overlays the configuration key of the same meaning; unset it changes nothing."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class PlatformName(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


class ConvertDtype(str, Enum):
    keep = "keep"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class ModelDtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class WeightNames(str, Enum):
    local = "local"
    te = "te"
    legacy = "legacy"


class CheckpointLayout(str, Enum):
    mindspeed = "mindspeed"
    dist = "dist"


class DataKind(str, Enum):
    pretrain = "pretrain"
    sft = "sft"
    prompts = "prompts"


class TooLong(str, Enum):
    drop = "drop"
    truncate = "truncate"


class EngineName(str, Enum):
    vllm = "vllm"


class SystemName(str, Enum):
    mindspeed_rl = "mindspeed-rl"
    mindspeed_llm = "mindspeed-llm"
    roll = "roll"
    lightrft = "lightrft"


class CommandName(str, Enum):
    sft = "train-sft"
    grpo = "train-grpo"
    convert = "convert-ckpt"
    preprocess = "preprocess"
    generate = "generate"
    chat = "chat"


# Shared by all commands.
Files = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration file; repeat it to lay others over."),
]
ConfigName = Annotated[
    str | None,
    typer.Option("--config-name", metavar="NAME", help="Configuration by name: from ./configs, else packaged."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One key of the configuration; repeatable."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, start nothing.")]
Platform = Annotated[PlatformName | None, typer.Option("--platform", help="Kind of device.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the logs of the libraries below too.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Training.
Resume = Annotated[str | None, typer.Option("--resume", metavar="auto|none|PATH", help="Go on from a checkpoint.")]

# Conversion.
Load = Annotated[str | None, typer.Option("--load", "--load-dir", metavar="DIR", help="Checkpoint to read.")]
Save = Annotated[str | None, typer.Option("--save", "--save-dir", metavar="DIR", help="Folder to write; must be new or empty.")]
InspectDir = Annotated[str | None, typer.Argument(metavar="DIR", help="Checkpoint to look at: mcore or Hugging Face.", show_default=False)]
Tp = Annotated[
    int | None,
    typer.Option("--tp", "--tensor-model-parallel-size", "--target-tensor-parallel-size", metavar="N", help="Tensor-parallel size."),
]
Pp = Annotated[
    int | None,
    typer.Option("--pp", "--pipeline-model-parallel-size", "--target-pipeline-parallel-size", metavar="N", help="Pipeline-parallel size."),
]
Vpp = Annotated[
    int | None, typer.Option("--vpp", "--num-layers-per-virtual-pipeline-stage", metavar="N", help="Layers per virtual pipeline stage.")
]
LayerList = Annotated[str | None, typer.Option("--num-layer-list", metavar="N,N,...", help="Layers of each pipeline stage; unset: equal.")]
NoopLayers = Annotated[str | None, typer.Option("--noop-layers", metavar="N,N,...", help="Positions in the pipeline that hold no layer.")]
Ep = Annotated[
    int | None,
    typer.Option("--ep", "--expert-model-parallel-size", "--target-expert-parallel-size", metavar="N", help="Expert-parallel size."),
]
Etp = Annotated[
    int | None, typer.Option("--etp", "--expert-tensor-parallel-size", metavar="N", help="Ranks that one expert is cut over; unset: TP.")
]
GroupedGemm = Annotated[bool | None, typer.Option("--moe-grouped-gemm/--no-moe-grouped-gemm", help="Write a rank's experts fused.")]
TpExtendEp = Annotated[
    bool | None,
    typer.Option("--moe-tp-extend-ep/--no-moe-tp-extend-ep", help="Spread whole experts over EP * TP ranks."),
]
Dtype = Annotated[ConvertDtype | None, typer.Option("--dtype", "--params-dtype", help="Type of the written tensors.")]
Layout = Annotated[CheckpointLayout | None, typer.Option("--layout", help="A file per rank, or Megatron's distributed format.")]
Names = Annotated[WeightNames | None, typer.Option("--names", help="Tensor names: local, Transformer Engine, or before megatron-core.")]
PadVocab = Annotated[int | None, typer.Option("--pad-vocab-to-multiple", metavar="N", help="Pad the vocabulary to a multiple; unset: TP.")]
HfConfig = Annotated[
    str | None, typer.Option("--hf-config", "--hf-cfg-dir", metavar="DIR", help="Folder with config.json and tokenizer, if not in --load.")
]
Lora = Annotated[
    str | None,
    typer.Option("--lora", "--lora-load", metavar="DIR", help="LoRA adapter to merge, PEFT's or mcore's; also --load itself."),
]
Orm = Annotated[bool | None, typer.Option("--orm/--no-orm", help="Refuse anything but a reward model, which is known without it too.")]
Verify = Annotated[bool | None, typer.Option("--verify/--no-verify", help="Prove the result bitwise and by logits. On by default.")]

# Preprocessing.
Input = Annotated[list[str] | None, typer.Option("--input", metavar="FILE...", help="JSON, JSONL or Parquet: files, folders, globs.")]
MoreInput = Annotated[list[str] | None, typer.Argument(metavar="FILE", hidden=True)]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", "--tokenizer-name-or-path", metavar="DIR", help="Folder of the Hugging Face tokenizer.")
]
Handler = Annotated[str | None, typer.Option("--handler", "--handler-name", metavar="NAME", help="How a row becomes a conversation.")]
Kind = Annotated[DataKind | None, typer.Option("--kind", help="What to write; unset: the handler's own.")]
Template = Annotated[str | None, typer.Option("--template", "--prompt-type", metavar="NAME", help="Prompt template, by name or path.")]
OutputPrefix = Annotated[str | None, typer.Option("--output-prefix", metavar="P", help="Beginning of the names of all files written.")]
SeqLength = Annotated[int | None, typer.Option("--seq-length", metavar="N", help="Longest row in tokens.")]
Pack = Annotated[bool | None, typer.Option("--pack/--no-pack", help="Lay examples end to end into rows of --seq-length.")]
MapKeys = Annotated[str | None, typer.Option("--map-keys", metavar="JSON", help='Column names, as in {"prompt": "question"}.')]
TooLongRows = Annotated[TooLong | None, typer.Option("--too-long", help="What happens to rows above --seq-length.")]
Thinking = Annotated[
    bool | None, typer.Option("--enable-thinking/--no-enable-thinking", help="For templates with thoughts; off gives an empty one.")
]
Workers = Annotated[int | None, typer.Option("--workers", metavar="N", help="Worker processes.")]
Overwrite = Annotated[bool | None, typer.Option("--overwrite/--no-overwrite", help="Replace data under the same prefix.")]
AppendEod = Annotated[bool | None, typer.Option("--append-eod/--no-append-eod", help="End every pretraining document with end-of-text.")]

# Generation.
Model = Annotated[str | None, typer.Option("--model", metavar="DIR", help="Hugging Face or mcore checkpoint folder.")]
PromptText = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="One prompt.")]
InputFile = Annotated[str | None, typer.Option("--input", metavar="FILE", help="JSONL with prompt or messages in every row.")]
OutputFile = Annotated[str | None, typer.Option("--output", metavar="FILE", help="JSONL to write; unset: standard output.")]
Engine = Annotated[EngineName | None, typer.Option("--engine", help="Engine that generates.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")]
Raw = Annotated[bool | None, typer.Option("--raw/--no-raw", help="Take prompts as they are, without a template.")]
ComputeDtype = Annotated[ModelDtype | None, typer.Option("--dtype", help="Type of weights and activations.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", metavar="N", help="Longest answer in tokens.")]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="X", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="X", help="Smallest set of this probability.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="N", help="The k likeliest tokens; -1 is off.")]
MinP = Annotated[float | None, typer.Option("--min-p", metavar="X", help="Fraction of the likeliest token.")]
NumSamples = Annotated[int | None, typer.Option("--num-samples", metavar="N", help="Answers per prompt.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of sampling.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Ends an answer; repeatable.")]

# Cluster.
Address = Annotated[str, typer.Argument(metavar="HOST:PORT", help="As `msrl cluster up` printed it.", show_default=False)]
Host = Annotated[str, typer.Option("--host", metavar="H", help="Address of this machine that others reach it by.")]
NodeHost = Annotated[str | None, typer.Option("--host", metavar="H", help="Address of this machine; unset: the one that faces HOST.")]
Port = Annotated[int, typer.Option("--port", metavar="N", min=1, max=65535, help="Port that nodes and runs connect to.")]
DashboardHost = Annotated[str, typer.Option("--dashboard-host", metavar="H", help="Address of the dashboard.")]
DashboardPort = Annotated[int, typer.Option("--dashboard-port", metavar="N", min=1, max=65535, help="Port of the dashboard.")]
Devices = Annotated[int | None, typer.Option("--devices", metavar="N", min=1, help="Devices to offer; unset: all.")]

# Configuration.
For = Annotated[CommandName | None, typer.Option("--for", help="Command to check for; unset: by the sections that are set.")]
From = Annotated[SystemName, typer.Option("--from", help="The system that the file or the flags are of.")]
Foreign = Annotated[list[str], typer.Argument(metavar="FILE|FLAGS...", help="A .yaml file, a shell script, or the words of a command.")]
NativeFile = Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="YAML to write; unset: standard output.")]

# Doctor.
Imports = Annotated[bool, typer.Option("--imports/--no-imports", help="Import every library in a process of its own.")]
