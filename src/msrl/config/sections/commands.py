"""The sections of single commands: convert-ckpt, preprocess, generate, chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from msrl.config.sections.base import (
    Bool,
    ConvertCommand,
    Count,
    Dtype,
    Fraction,
    LayerNumbers,
    NonNegative,
    Section,
    Size,
    Text,
    TopK,
    UpToOne,
)


class ConvertConfig(Section):
    """msrl convert-ckpt."""

    command: ConvertCommand | None = Field(default=None, description="What to do; the name of the subcommand")
    load: Text | None = Field(default=None, description="Checkpoint to read: Hugging Face folder (hf2mcore, hf2hf) or mcore folder")
    save: Text | None = Field(default=None, description="Folder to write; new or empty")
    hf_config: Text | None = Field(
        default=None, description="Hugging Face folder with config.json and tokenizer, where the checkpoint has none"
    )
    tp: Count = Field(default=1, description="Tensor-parallel size to write")
    pp: Count = Field(default=1, description="Pipeline-parallel size to write")
    vpp: Count | None = Field(default=None, description="Layers per virtual pipeline stage; unset: a stage is one block")
    num_layer_list: LayerNumbers | None = Field(default=None, description="Layers of each pipeline stage, as in 11,13,19,21; unset: equal")
    noop_layers: LayerNumbers = Field(default=(), description="Positions in the pipeline that hold no layer, as in 0,47")
    ep: Count = Field(default=1, description="Expert-parallel size to write")
    etp: Count | None = Field(default=None, description="Ranks that one expert is cut over; unset: tp")
    moe_grouped_gemm: Bool = Field(default=False, description="Write a rank's experts fused, for grouped matrix products")
    moe_tp_extend_ep: Bool = Field(default=False, description="Spread whole experts over ep * tp ranks, in MindSpeed's order")
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = Field(default="keep", description="Type of the written tensors")
    format: Literal["mindspeed", "dist"] = Field(
        default="mindspeed", description="Checkpoint format: one file per rank (mindspeed), or Megatron's distributed format (dist)"
    )
    names: Literal["local", "te", "legacy"] = Field(
        default="local", description="Tensor names: Megatron's local or Transformer Engine layer spec, or its models before megatron-core"
    )
    pad_vocab_to_multiple: Count | None = Field(default=None, description="Vocabulary is padded to a multiple of it; unset: tp")
    lora: Text | None = Field(default=None, description="Folder of a LoRA adapter (PEFT's or mcore's) to merge; it may be `load` itself")
    orm: Bool = Field(default=False, description="Refuse anything but a reward model; without it, one is known by its architecture")
    verify: Bool = Field(default=True, description="Prove the result: bitwise round trip, and equal logits in fp32")


class PreprocessConfig(Section):
    """msrl preprocess."""

    input: tuple[Text, ...] = Field(default=(), description="JSON, JSONL or Parquet files, folders or globs")
    tokenizer: Text | None = Field(default=None, description="Folder of the Hugging Face tokenizer")
    kind: Literal["pretrain", "sft", "prompts"] | None = Field(
        default=None, description="What to write: documents, examples to learn, or prompts with answers; unset: the handler's own"
    )
    handler: Text | None = Field(default=None, description="Name of the dataset handler: how a row becomes a conversation")
    template: Text | None = Field(default=None, description="Prompt template by name or path of a YAML file; pretrain needs none")
    output_prefix: Text | None = Field(default=None, description="Beginning of the names of all files written")
    seq_length: Count | None = Field(default=None, description="Longest row in tokens; longer ones are dropped and counted")
    pack: Bool = Field(default=False, description="Lay several examples end to end into rows of seq_length tokens")
    map_keys: dict[str, Annotated[str, Strict()]] = Field(
        default_factory=dict[str, str], description="The handler's name of a column: the file's name of it"
    )
    options: dict[str, Any] = Field(default_factory=dict[str, Any], description="Further options of the handler, by name")
    workers: Count = Field(default=1, description="Worker processes")
    overwrite: Bool = Field(default=False, description="Replace data that an earlier run wrote under the same prefix")
    append_eod: Bool = Field(default=False, description="End every pretraining document with the tokenizer's end-of-text token")
    too_long: Literal["drop", "truncate"] = Field(default="drop", description="What happens to examples above seq_length; it is counted")
    enable_thinking: Bool | None = Field(default=None, description="For templates with thoughts: false gives the model an empty one")


class GenerateConfig(Section):
    """msrl generate."""

    model: Text | None = Field(default=None, description="Hugging Face folder or mcore checkpoint folder")
    prompt: Annotated[str, Strict()] | None = Field(default=None, description="One prompt, as text")
    input: Text | None = Field(default=None, description="JSONL file with prompt or messages in every row")
    output: Text | None = Field(default=None, description="JSONL file to write; unset: standard output")
    engine: Literal["vllm"] = Field(default="vllm", description="Engine that generates")
    dtype: Dtype | None = Field(default=None, description="Type of weights and activations; unset: that of the checkpoint")
    template: Text | None = Field(default=None, description="Prompt template by name or path; unset: the tokenizer's own, if it has one")
    system: Annotated[str, Strict()] | None = Field(default=None, description="System message; unset: the template's own")
    max_tokens: Count = Field(default=256, description="Longest completion in tokens")
    temperature: NonNegative = Field(default=0.0, description="Logits are divided by it; 0 is greedy")
    top_p: Fraction = Field(default=1.0, description="Sample from the smallest set of tokens with this probability; 1 is off")
    top_k: TopK = Field(default=-1, description="Sample from the k likeliest tokens; -1 is off")
    min_p: UpToOne = Field(default=0.0, description="Leave out tokens below this fraction of the likeliest one's probability; 0 is off")
    num_samples: Count = Field(default=1, description="Completions of every prompt")
    seed: Size | None = Field(default=None, description="Seed of sampling; unset: run.seed")
    stop: tuple[Text, ...] = Field(default=(), description="Texts that end a completion, besides the template's own end of turn")
    raw: Bool = Field(default=False, description="Take prompts as they are, with no template")


class ChatConfig(Section):
    """msrl chat."""

    model: Text | None = Field(default=None, description="Hugging Face folder or mcore checkpoint folder")
    dtype: Dtype | None = Field(default=None, description="Type of weights and activations; unset: that of the checkpoint")
    template: Text | None = Field(default=None, description="Prompt template by name or path; unset: the tokenizer's own, if it has one")
    system: Annotated[str, Strict()] | None = Field(default=None, description="System message; unset: the template's own")
    max_tokens: Count = Field(default=512, description="Longest answer in tokens")
    temperature: NonNegative = Field(default=0.7, description="Logits are divided by it; 0 is greedy")
    top_p: Fraction = Field(default=1.0, description="Sample from the smallest set of tokens with this probability; 1 is off")
    top_k: TopK = Field(default=-1, description="Sample from the k likeliest tokens; -1 is off")
    min_p: UpToOne = Field(default=0.0, description="Leave out tokens below this fraction of the likeliest one's probability; 0 is off")
    seed: Size | None = Field(default=None, description="Seed of sampling; unset: run.seed")
    stop: tuple[Text, ...] = Field(default=(), description="Texts that end an answer, besides the template's own end of turn")
