"""Configuration that both trainings share: run, model, data, cluster, checkpoints and logs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, create_model

from msrl import registry
from msrl.config.sections.base import (
    BelowOne,
    Bool,
    Count,
    Dtype,
    NonNegative,
    OneOf,
    Platform,
    Port,
    Positive,
    Seconds,
    Section,
    Seed,
    Size,
    Text,
)
from msrl.config.sections.roles import RolesConfig
from msrl.config.templates import template_names

RolloutFormat = Literal["jsonl", "parquet"]

Sampler = Annotated[str, OneOf(registry.names(registry.SAMPLERS))]
Tracker = Annotated[str, OneOf(registry.names(registry.TRACKERS))]


class RunConfig(Section):
    """Name, folder and seed of a run. All its files are in the folder `run.dir/run.name`."""

    name: Text = Field(
        default="run",
        description="Name of the run. Its files are written to the folder of this name in run.dir, "
        "which is runs by default.",
    )
    seed: Seed = Field(
        default=0,
        description="Seed of initialization, shuffling and sampling, unless a more specific seed "
        "is set.",
    )
    deterministic: Bool = Field(
        default=False,
        description="Make repeated trainings equal bit by bit. Operations without a "
        "deterministic implementation raise an error.",
    )
    dir: Text = Field(default="runs", description="Parent folder of the folders of all runs.")
    differences: tuple[Text, ...] = Field(
        default=(),
        description="Differences from the file of another system that `--approximate` accepted. "
        "The report of the run lists them.",
    )


class ModelConfig(Section):
    """Model to train."""

    path: Text | None = Field(
        default=None,
        description="Initial weights: a Hugging Face folder, an mcore checkpoint folder, or the "
        "name of a model on a hub (ORG/NAME or ORG/NAME@REVISION).",
    )
    init: Literal["checkpoint", "random"] = Field(
        default="checkpoint",
        description="Initial weights: those of the checkpoint, or random ones for a folder with "
        "only a config.json (train-sft only). run.seed determines them for every parallel layout.",
    )
    tokenizer: Text | None = Field(
        default=None,
        description="Folder of the tokenizer, or the name of a model on a hub. Default: the "
        "tokenizer of model.path.",
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description="Data type of weights and activations. bfloat16 keeps fp32 master weights.",
    )
    logits_dtype: Literal["float32"] | None = Field(
        default=None,
        description="Data type in which training ranks and engines compute the product of the "
        "output layer. float32 rounds no logits, which brings their log-probabilities closer. "
        "Default: model.dtype.",
    )
    template: Text | None = Field(
        default=None,
        description="Prompt template that the data must have been rendered with. "
        "Default: any template.",
        examples=[*template_names()],
    )


class CurriculumConfig(Section):
    """Choice of prompts by their measured success rates.

    The success rate of a prompt is the share of right responses in its newest group. Which
    responses are right follows from eval.source and eval.right_from.
    """

    sampler: Sampler | None = Field(
        default=None,
        description="Sampler of the prompts: mostly those whose success rate is in a range "
        "(success_range), or new ones and informative ones again (replay). Default: all prompts "
        "once per epoch, in the order of data.shuffle.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Additional options of the sampler, by name.",
    )
    level_column: Text | None = Field(
        default=None,
        description="Name of a column extra.NAME, such as a level of difficulty. Prompts with the "
        "same value share a success rate. Default: each prompt has its own.",
    )
    initial_difficulty: Bool = Field(
        default=False,
        description="Start with 1 minus the difficulty in the column extra.difficulty as success "
        "rate, from 0 (easy) to 1 (hard). Default: nothing is measured at the start.",
    )
    momentum: BelowOne = Field(
        default=0.0,
        description="Weight of the earlier success rate in a new one. 0 takes the newest step "
        "with a group alone.",
    )


class DataConfig(Section):
    """Data: prefixes that `msrl preprocess` wrote, or rows that the run preprocesses itself.

    Rows are a data file, a folder, a glob, or a dataset on a hub. The section `preprocess` has
    their settings.
    """

    train: Text | None = Field(
        default=None,
        description="Training data: the output prefix of `msrl preprocess`, or rows: a file, "
        "folder, glob, a dataset on a hub (ORG/NAME, ORG/NAME:PATTERN), or a task "
        "(PACKAGE:TASK?KEY=VALUE, as in preprocess.input).",
    )
    handler: Literal["pretrain"] | None = Field(
        default=None,
        description="pretrain trains on plain text in rows of data.seq_length tokens "
        "(train-sft only). Default: examples or prompts.",
    )
    blend: dict[Text, Positive] = Field(
        default_factory=dict[str, float],
        description="Weights of several datasets by prefix or rows, instead of data.train.",
        examples=[{"PREFIX": 0.7, "OTHER_PREFIX": 0.3}],
    )
    eval: Text | None = Field(
        default=None,
        description="Held-out data: the output prefix of `msrl preprocess`, or rows.",
    )
    eval_fraction: BelowOne = Field(
        default=0.0,
        description="Fraction of data.train to hold out instead of setting data.eval. "
        "run.seed selects the rows.",
    )
    eval_rows: Literal["random", "last"] = Field(
        default="random",
        description="Rows that data.eval_fraction holds out: random ones, or the last ones, "
        "rounded to the nearest number, as Megatron's --split does.",
    )
    seq_length: Count | None = Field(
        default=None,
        description="Maximum row length in tokens. Default: the length of the preprocessed data.",
    )
    too_long: Literal["refuse", "drop", "truncate"] = Field(
        default="refuse",
        description="Action of train-sft on rows longer than data.seq_length. "
        "The number of dropped and truncated rows is reported.",
    )
    pack: Bool = Field(
        default=False, description="Pack several examples into rows of data.seq_length tokens."
    )
    shuffle: Bool = Field(
        default=True, description="Shuffle the rows again in every epoch, seeded by run.seed."
    )
    curriculum: CurriculumConfig = Field(
        default=CurriculumConfig(),
        description="Choice of prompts by their success rates (train-grpo only).",
    )


class TlsConfig(Section):
    """Certificates of this machine for TLS between the processes of a Ray cluster.

    All three files are PEM. Every machine of the cluster needs them.
    """

    cert: Text | None = Field(
        default=None,
        description="Certificate of this machine. It must name its IP address. Default: no TLS.",
    )
    key: Text | None = Field(
        default=None, description="Private key of the certificate, readable by its owner only."
    )
    ca: Text | None = Field(
        default=None, description="Certificate of the authority that signed all certificates."
    )


class ClusterConfig(Section):
    """Devices and communication between workers."""

    platform: Platform = Field(
        default="auto",
        description="Kind of device. auto selects the first of npu, cuda and cpu that the "
        "machine has.",
    )
    address: Text | None = Field(
        default=None,
        description="Address (HOST:PORT) of a cluster that `msrl cluster up` started. "
        "Default: this machine only.",
    )
    nodes: Count = Field(
        default=1,
        description="Number of machines of the cluster to use, with the same number of devices "
        "on each.",
    )
    devices_per_node: Count | None = Field(
        default=None,
        description="Number of training ranks per machine, one per device. "
        "Default: the number that one model replica needs.",
    )
    rpc_timeout_s: Seconds = Field(
        default=600.0,
        description="Maximum time in seconds to wait for a worker or a collective before the run "
        "ends with an error.",
    )
    ports: Text | None = Field(
        default=None,
        description="Range FIRST-LAST of the ports of each machine for Ray, rendezvous and "
        "engines (docs/clusters.md). Default: free ports.",
    )
    max_restarts: Size = Field(
        default=3,
        description="Number of times that lost training ranks or engines are restarted before the "
        "next step. 0 ends the run when a worker is lost.",
    )
    wait_for_nodes_s: NonNegative = Field(
        default=60.0,
        description="Maximum time in seconds to wait for the devices of a cluster, at the start "
        "and after a machine was lost, and of `cluster join` for the head.",
    )
    env: dict[str, Annotated[str, Strict()]] = Field(
        default_factory=dict[str, str], description="Environment variables of all workers."
    )
    tls: TlsConfig = Field(
        default=TlsConfig(), description="Certificates for TLS in a cluster of machines."
    )
    roles: RolesConfig = Field(
        default=RolesConfig(), description="Devices and models of the roles besides training."
    )


_ASYNC = Field(
    default=False,
    description="Write checkpoints in the background while the training continues. "
    "This needs host memory for a copy.",
)
# `async` is a Python keyword, so a class body cannot declare this field.
_KEYWORD: dict[str, Any] = {"async": (Bool, _ASYNC)}
_WithAsync: type[Section] = create_model("_WithAsync", __base__=Section, **_KEYWORD)


class CheckpointConfig(_WithAsync):
    """Loading, saving and resuming."""

    load: Text | None = Field(
        default=None,
        description="mcore checkpoint whose weights replace those of model.path. Default: none.",
    )
    save: Text | None = Field(
        default=None,
        description="Folder of the run's checkpoints. "
        "Default: the folder checkpoints in the folder of the run.",
    )
    every_steps: Count | None = Field(
        default=None,
        description="Number of steps between two checkpoints. Default: only after the last step.",
    )
    keep: Count | None = Field(
        default=None,
        description="Number of newest checkpoints to keep. Default: keep all checkpoints.",
    )
    max_gb: Positive | None = Field(
        default=None,
        description="Maximum size of all checkpoints in gigabytes (10^9 bytes). The oldest are "
        "deleted first, the newest is always kept. Default: no limit.",
    )
    keep_best: Bool = Field(
        default=False,
        description="Save a checkpoint after every evaluation with a new best result, and keep "
        "the best one in addition to the newest.",
    )
    resume: Text = Field(
        default="none",
        description="Checkpoint to resume from: none starts a new training, auto uses the newest "
        "complete checkpoint of the run, if any, and a path selects a checkpoint.",
    )
    export_hf: Bool = Field(
        default=False,
        description="Write the final model (with keep_best, the best one) as a Hugging Face folder "
        "named hf in the folder of the run, and a critic as hf_critic.",
    )

    @property
    def in_background(self) -> bool:
        """Value of the key `async`."""
        return getattr(self, "async")


class ProfileConfig(Section):
    """Traces of operations on training ranks, with the profiler of PyTorch or of torch_npu."""

    steps: tuple[Count, ...] = Field(
        default=(),
        description="Steps to trace, from 1. The traces are in profile/ in the folder of the run.",
        examples=[[5, 6]],
    )
    ranks: tuple[Size, ...] = Field(
        default=(0,), description="Training ranks to trace, from 0. An empty list traces all ranks."
    )


class LogConfig(Section):
    """Output during training."""

    every_steps: Count = Field(
        default=1,
        description="Number of steps between two lines on the terminal. "
        "metrics.jsonl has every step.",
    )
    trackers: tuple[Tracker, ...] = Field(
        default=("tensorboard",),
        description="Trackers that receive the metrics in addition to metrics.jsonl. The variables "
        "WANDB_PROJECT, WANDB_MODE etc. configure wandb.",
    )
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict[str, dict[str, Any]],
        description="Options of the trackers by name. wandb: project, entity, group, name, tags, "
        "notes, id, dir and mode. swanlab: project, workspace, group, name, tags, notes, dir and "
        "mode. mlflow: uri, experiment, group, name, tags, notes and dir. clearml: project, group, "
        "name, tags, notes, dir and mode. trackio: project, group, name, space, server and dir. "
        "tensorboard: dir.",
        examples=[{"wandb": {"project": "math"}}],
    )
    save_rollouts: Bool = Field(
        default=True,
        description="Write all prompts and responses with their rewards to rollouts/ and eval/ in "
        "the folder of the run.",
    )
    rollouts: RolloutFormat = Field(
        default="jsonl",
        description="Format of the files in rollouts/: one line of text per response, or the "
        "rollout record, which also has the values of every token.",
    )
    tokens: Literal["none", "sampled", "all"] = Field(
        default="none",
        description="Samples whose tokens get values that the step does not compute anyway, before "
        "its first update: the trainer's log-probabilities and entropies, and log-probabilities of "
        "the reference. sampled takes one of 16 groups. Needs log.rollouts=parquet and further "
        "forward passes.",
    )
    tokens_max_gb: Positive = Field(
        default=10.0,
        description="Size of the folder rollouts/ in gigabytes (10^9 bytes) from which log.tokens "
        "adds no more values.",
    )
    prometheus: Port | None = Field(
        default=None,
        description="Port on 127.0.0.1 at which Prometheus reads the metrics of the last step "
        "(/metrics). Engine N serves vLLM's metrics at the port plus 1 + N on its machine. "
        "Default: none.",
    )
    profile: ProfileConfig = Field(
        default=ProfileConfig(), description="Traces of operations on training ranks."
    )
    length_plot_every: Count | None = Field(
        default=None,
        description="Number of steps between two plots of the distributions of response lengths "
        "and rewards in distributions/ in the folder of the run (train-grpo). Default: none.",
    )
