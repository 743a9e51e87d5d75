"""Configuration of the commands convert-ckpt, preprocess, generate and chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from msrl import registry
from msrl.config.sections.base import (
    Bool,
    ConvertCommand,
    Count,
    Day,
    Dtype,
    NonNegative,
    OneOf,
    Section,
    Size,
    Text,
)
from msrl.config.sections.rollout import SamplingConfig
from msrl.config.sections.train import LayoutConfig
from msrl.config.templates import template_names

Benchmark = Annotated[str, OneOf(registry.names(registry.BENCHMARKS))]


class ConvertConfig(LayoutConfig):
    """Settings of `msrl convert-ckpt`."""

    command: ConvertCommand | None = Field(
        default=None, description="Kind of conversion: the name of the subcommand."
    )
    load: Text | None = Field(
        default=None,
        description="Checkpoint to read: a Hugging Face folder or the name of a model on a hub "
        "(hf2mcore, hf2hf, hf2gguf), a GGUF file (gguf2hf), or an mcore folder.",
    )
    save: Text | None = Field(default=None, description="Folder to write. It must be new or empty.")
    hf_config: Text | None = Field(
        default=None,
        description="Hugging Face folder with config.json and tokenizer. "
        "Default: those of the checkpoint.",
    )
    moe_grouped_gemm: Bool = Field(
        default=False,
        description="Write the experts of a rank as one tensor, for grouped matrix products.",
    )
    moe_tp_extend_ep: Bool = Field(
        default=False,
        description="Distribute unsplit experts over ep * tp ranks, in MindSpeed's order.",
    )
    dtype: Literal["keep", "bf16", "fp16", "fp32", "q8_0"] = Field(
        default="keep",
        description="Data type of the written tensors. keep retains the types of the checkpoint. "
        "q8_0 has 8 bits per weight (hf2gguf only).",
    )
    format: Literal["mindspeed", "dist"] = Field(
        default="mindspeed",
        description="Checkpoint format: one file per rank (mindspeed) or Megatron's distributed "
        "format (dist).",
    )
    names: Literal["local", "te", "te-converter", "mindspeed", "legacy"] = Field(
        default="local",
        description="Tensor names: Megatron's local layers (local), Transformer Engine's (te), "
        "those that MindSpeed-LLM's converter gives to Transformer Engine's layers (te-converter), "
        "MindSpeed-LLM's of Qwen3-Next, which it does not shard (mindspeed), or those before "
        "megatron-core (legacy).",
    )
    pad_vocab_to_multiple: Count | None = Field(
        default=None,
        description="Pad the vocabulary to a multiple of this many tokens. Default: convert.tp.",
    )
    lora: Text | None = Field(
        default=None,
        description="Folder of a LoRA adapter to merge, in PEFT or mcore format. "
        "It may be the folder of convert.load. Default: none.",
    )
    orm: Bool = Field(
        default=False,
        description="Accept only a reward model. Reward models are recognized without it too.",
    )
    verify: Bool = Field(
        default=True,
        description="Verify the result: bitwise round trip, and equal logits in fp32.",
    )


class PreprocessConfig(Section):
    """Settings of `msrl preprocess`."""

    input: tuple[Text, ...] = Field(
        default=(),
        description="Data files (JSON, JSONL, Parquet, Arrow, CSV, text), folders or globs to "
        "read, datasets on a hub (ORG/NAME, ORG/NAME:PATTERN), or tasks that a package generates: "
        f"PACKAGE:TASK?KEY=VALUE&KEY=VALUE. Packages: {', '.join(registry.names(registry.TASKS))}.",
    )
    split: Text | None = Field(
        default=None,
        description="Split of a folder to read, such as train. Default: the only one.",
    )
    tokenizer: Text | None = Field(
        default=None,
        description="Folder of the Hugging Face tokenizer, or the name of a model on a hub.",
    )
    kind: Literal["pretrain", "sft", "prompts", "pairs", "labeled", "steps"] | None = Field(
        default=None,
        description="Data to write: text for pretraining (pretrain), examples for train-sft (sft), "
        "prompts for train-grpo (prompts), pairs or labeled answers for train-dpo (pairs, "
        "labeled), pairs or labeled steps for train-rm (pairs, steps). Default: the first kind of "
        "the handler.",
    )
    handler: Text | None = Field(
        default=None,
        description="Dataset handler, which reads a row as a conversation: a name, or "
        "path/file.py:NAME.",
        examples=[*registry.names(registry.HANDLERS)],
    )
    template: Text | None = Field(
        default=None,
        description="Prompt template: a name, a YAML file, or FILE.json:NAME for a templates.json "
        "of MindSpeed. pretrain and steps need none.",
        examples=[*template_names()],
    )
    output_prefix: Text | None = Field(
        default=None, description="Path that all written file names start with, as in data/sft."
    )
    seq_length: Count | None = Field(
        default=None,
        description="Maximum row length in tokens. preprocess.too_long decides what happens to "
        "longer rows. Default: no limit.",
    )
    pack: Bool = Field(
        default=False,
        description="Pack several examples into rows of preprocess.seq_length tokens.",
    )
    map_keys: dict[str, Annotated[str, Strict()]] = Field(
        default_factory=dict[str, str],
        description="Column names of the input by the handler's names, as in "
        '{"prompt": "question"}. Default: the same names.',
    )
    keep: tuple[Text, ...] = Field(
        default=(),
        description="Columns that the handler does not read and that prompts keep as extra values "
        "for reward functions, by name. The name all keeps every one.",
    )
    ignore: tuple[Text, ...] = Field(
        default=(),
        description="Keys of rows, turns and content blocks that are not read, by name. It allows "
        "keys that would be refused because they decide what is trained, shown or masked.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Additional options of the handler, by name.",
    )
    workers: Count = Field(
        default=1,
        description="Number of worker processes. Inputs below 64 MB for each worker are tokenized "
        "by the threads of one process.",
    )
    overwrite: Bool = Field(
        default=False, description="Replace data that an earlier run wrote under the same prefix."
    )
    append_eod: Bool = Field(
        default=False,
        description="End every pretraining document with the tokenizer's end-of-text token.",
    )
    too_long: Literal["drop", "truncate"] = Field(
        default="drop",
        description="Action on examples longer than preprocess.seq_length. "
        "Their number is reported.",
    )
    show: Count | None = Field(
        default=None,
        description="Show this many rendered rows, with their tokens and which of them are "
        "trained, and write nothing. Dry runs of trainings show this many rows of their data. "
        "Default: preprocess writes data, and dry runs show one row.",
    )
    on_bad_row: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="Action on rows that cannot be read: end the command with the first one, or "
        "drop them. Dropped rows are counted by reason and written to PREFIX_bad_rows.jsonl.",
    )
    date: Day | None = Field(
        default=None,
        description="Day that the tokenizer's chat template writes, as YYYY-MM-DD, if it writes "
        "the current date. Default: today.",
    )
    enable_thinking: Bool | None = Field(
        default=None,
        description="Thinking mode of templates that support it. Without it, the model gets an "
        "empty thought. Default: the mode of the template.",
    )
    min_pixels: Count | None = Field(
        default=None,
        description="Smallest number of pixels of a resized image. Default: that of the model's "
        "image processor.",
    )
    max_pixels: Count | None = Field(
        default=None,
        description="Largest number of pixels of a resized image. An image token represents a "
        "square of 28 x 28 or 32 x 32 pixels. Default: that of the model's image processor.",
    )
    max_images: Count | None = Field(
        default=None,
        description="Largest number of images of a row. Rows with more cannot be read. Default: "
        "no limit.",
    )
    image_root: Text | None = Field(
        default=None,
        description="Folder that relative paths of images begin in. Default: that of the data "
        "file.",
    )
    images: Literal["embed", "link"] = Field(
        default="embed",
        description="Copy images into the data, each distinct one once (embed), or keep the paths "
        "and checksums of their files (link).",
    )
    verify_images: Literal["full", "header"] = Field(
        default="full",
        description="Decode every image (full), or read its header and size only (header), which "
        "does not find truncated files.",
    )


class ResponseConfig(SamplingConfig):
    """Model, prompt format and sampling of `msrl generate` and `msrl chat`."""

    model: Text | None = Field(
        default=None,
        description="Hugging Face folder, mcore checkpoint folder, or the name of a model on a "
        "hub.",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Data type of weights and activations. Default: the type of the checkpoint.",
    )
    template: Text | None = Field(
        default=None,
        description="Prompt template: a name, a YAML file, or FILE.json:NAME. "
        "Default: the tokenizer's chat template, if it has one.",
        examples=[*template_names()],
    )
    lora: Text | None = Field(
        default=None,
        description="LoRA adapter in PEFT or mcore format, which is merged into the weights in "
        "memory.",
    )
    date: Day | None = Field(
        default=None,
        description="Day that the tokenizer's chat template writes, as YYYY-MM-DD, if it writes "
        "the current date. Default: today.",
    )
    enable_thinking: Bool | None = Field(
        default=None,
        description="Thinking mode of templates that support it. Without it, the model gets an "
        "empty thought. Default: the mode of the template.",
    )
    system: Annotated[str, Strict()] | None = Field(
        default=None, description="System message. Default: the message of the template."
    )
    max_tokens: Count = Field(default=256, description="Maximum response length in tokens.")
    temperature: NonNegative = Field(
        default=0.0, description="Sampling temperature. 0 decodes greedily."
    )


_Prompt = Annotated[str, Strict()]


class GenerateConfig(ResponseConfig):
    """Settings of `msrl generate`."""

    prompt: _Prompt | Annotated[tuple[_Prompt, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Prompt, or several, which are answered as JSONL. Set this or generate.input.",
    )
    input: Text | None = Field(
        default=None, description="JSONL file with prompt or messages in every row."
    )
    output: Text | None = Field(
        default=None, description="JSONL file to write. Default: standard output."
    )
    engine: Literal["vllm"] = Field(default="vllm", description="Inference engine.")
    num_samples: Count = Field(default=1, description="Number of responses per prompt.")
    raw: Bool = Field(default=False, description="Use prompts as they are, without a template.")


class ChatConfig(ResponseConfig):
    """Settings of `msrl chat`."""

    raw: Bool = Field(
        default=False,
        description="Send the plain text of all questions and responses, without a template.",
    )
    history_turns: Annotated[int, Strict(), Field(ge=0)] | None = Field(
        default=None,
        description="Number of earlier questions that the model sees with their responses. "
        "Default: all that fit.",
    )
    history_keeps: Literal["newest", "oldest"] = Field(
        default="newest", description="Turns that chat.history_turns keeps."
    )

    max_tokens: Count = Field(default=512, description="Maximum response length in tokens.")
    temperature: NonNegative = Field(
        default=0.7, description="Sampling temperature. 0 decodes greedily."
    )


class ServeConfig(Section):
    """Settings of `msrl serve`. `rollout.engine` has those of the engine."""

    model: Text | None = Field(
        default=None,
        description="Hugging Face folder, mcore checkpoint folder, LoRA adapter whose base model "
        "is on this machine, or the name of a model on a hub.",
    )
    name: Text | None = Field(
        default=None,
        description="Name of the model in requests. Default: the name of its folder, or of the "
        "run.",
    )
    host: Text = Field(
        default="127.0.0.1",
        description="Address to listen on. Any other than one of this machine only needs an API "
        "key.",
    )
    port: Annotated[int, Strict(), Field(ge=0, le=65535)] = Field(
        default=8000, description="Port to listen on. 0 selects a free one."
    )
    api_key_file: Text | None = Field(
        default=None,
        description="File with the API key that requests must have. "
        "Default: the environment variable MSRL_API_KEY.",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Data type of weights and activations. Default: the type of the checkpoint.",
    )
    template: Text | None = Field(
        default=None,
        description="Prompt template: a name, a YAML file, or FILE.json:NAME. "
        "Default: the tokenizer's chat template, if it has one.",
        examples=[*template_names()],
    )
    date: Day | None = Field(
        default=None,
        description="Day that the tokenizer's chat template writes, as YYYY-MM-DD, if it writes "
        "the current date. Default: today.",
    )
    tools: Text | None = Field(
        default=None,
        description="Parser of tool calls in vLLM, or none. Default: the parser for the template.",
        examples=["none", "hermes", "llama3_json", "mistral", "deepseek_v3", "glm45"],
    )
    lora: tuple[Text, ...] = Field(
        default=(),
        description="LoRA adapters to serve besides the model, in PEFT or mcore format, as DIR or "
        "NAME=DIR. They are not merged.",
    )
    cache: Text | None = Field(
        default=None,
        description="Folder of converted checkpoints. Default: msrl/serve in the user's cache.",
    )
    max_images: Size = Field(
        default=8,
        description="Maximum number of images of a request, for models that read images. 0 serves "
        "text only, without the vision tower.",
    )
    image_hosts: tuple[Text, ...] = Field(
        default=(),
        description="Hosts from which the server may download the images of requests. Default: "
        "none. Requests contain their images as data URLs.",
    )


class EvaluateConfig(Section):
    """Settings of `msrl eval`. `eval` and `reward` have those of prompts, sampling and scores."""

    models: tuple[Text, ...] = Field(
        default=(),
        description="Checkpoints to evaluate: Hugging Face folders, mcore checkpoints, LoRA "
        "adapters, and run folders, of which all checkpoints are evaluated.",
    )
    benchmarks: tuple[Benchmark, ...] = Field(
        default=(),
        description="Published suites to evaluate on, in place of data.eval, reward.sources and "
        "environment. Needs the extra benchmarks (lm-evaluation-harness).",
    )
    benchmark_data: Text | None = Field(
        default=None,
        description="Folder with the rows of the benchmarks: NAME/SPLIT.jsonl, or "
        "NAME/SUBJECT/SPLIT.jsonl. Default: the datasets of the Hugging Face hub.",
    )
    num_fewshot: Size | None = Field(
        default=None,
        description="Number of solved examples before each question. Default: that of the suite.",
    )
    chat_template: Bool | None = Field(
        default=None,
        description="Ask the questions through the chat template of the model, with the examples "
        "as earlier turns. Default: true for generated answers of models that have a chat "
        "template, false for suites that compare likelihoods.",
    )
    enable_thinking: Bool | None = Field(
        default=None,
        description="Thinking mode of the chat template, if it has one. "
        "Default: that of the template.",
    )
    output: Text = Field(
        default="evaluation",
        description="Folder of samples, results and the curve. An existing one is continued.",
    )
    overwrite: Bool = Field(
        default=False,
        description="Evaluate checkpoints again whose results are in the folder already.",
    )
    confidence: Annotated[float, Strict(), Field(gt=0, lt=1)] = Field(
        default=0.95, description="Confidence level of the intervals."
    )
