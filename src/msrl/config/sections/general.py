"""What every training shares: the run, the model, data, the cluster, checkpoints, logs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, create_model

from msrl.config.sections.base import (
    BelowOne,
    Bool,
    Count,
    Dtype,
    NonNegative,
    Platform,
    Positive,
    Schedule,
    Seconds,
    Section,
    Seed,
    Size,
    Text,
)


class RunConfig(Section):
    """Everything that a run writes lives under `dir/name`."""

    name: Text = Field(default="run", description="Name of the run; its folder is run.dir/run.name")
    seed: Seed = Field(default=0, description="Seed of initialisation, shuffling and sampling where no other seed is given")
    deterministic: Bool = Field(default=False, description="Training's repeats are equal to the bit; operations that cannot be are refused")
    dir: Text = Field(default="runs", description="Folder that holds the folders of all runs")


class ModelConfig(Section):
    """The model that is trained."""

    path: Text | None = Field(default=None, description="Hugging Face folder or mcore checkpoint folder to start from")
    tokenizer: Text | None = Field(default=None, description="Folder of the tokenizer; unset: the one that comes with model.path")
    dtype: Dtype = Field(default="bfloat16", description="Type of weights and activations; bfloat16 keeps fp32 master weights")
    template: Text | None = Field(default=None, description="Prompt template that the data must have been rendered with; unset: any")


class DataConfig(Section):
    """Data that `msrl preprocess` wrote, named by its output prefix."""

    train: Text | None = Field(default=None, description="Prefix of the training data: examples for train-sft, prompts for train-grpo")
    handler: Literal["pretrain"] | None = Field(
        default=None,
        description="pretrain: train-sft learns text, cut into rows of data.seq_length tokens; unset: examples or prompts",
    )
    blend: dict[Text, Positive] = Field(
        default_factory=dict[str, float],
        description="Several prefixes of text with their weights, in place of data.train (pretrain alone)",
        examples=[{"PREFIX": 0.7, "OTHER_PREFIX": 0.3}],
    )
    eval: Text | None = Field(default=None, description="Prefix of the held-out data")
    eval_fraction: BelowOne = Field(default=0.0, description="Share of data.train that is held out instead of data.eval, drawn by run.seed")
    seq_length: Count | None = Field(default=None, description="Longest row in tokens; unset: as the data was preprocessed")
    too_long: Literal["refuse", "drop", "truncate"] = Field(
        default="refuse",
        description="What train-sft does with rows longer than data.seq_length; what is dropped or cut is counted and said",
    )
    pack: Bool = Field(default=False, description="Lay several examples end to end into rows of data.seq_length tokens")
    shuffle: Bool = Field(default=True, description="New order of the rows in every epoch, from run.seed")


class CriticOptimizerConfig(Section):
    """The critic's learning rate; everything else of its AdamW is the policy's."""

    lr: Positive | None = Field(default=None, description="Highest learning rate; unset: train.optimizer.lr")
    min_lr: NonNegative | None = Field(default=None, description="At the end of a schedule that goes down; unset: train.optimizer.min_lr")
    schedule: Schedule | None = Field(default=None, description="After the warm-up; unset: train.optimizer.schedule")
    warmup: Size | BelowOne | None = Field(default=None, description="Linear warm-up; unset: train.optimizer.warmup")
    weight_decay: NonNegative | None = Field(default=None, description="Of matrices; unset: train.optimizer.weight_decay")


class CriticConfig(Section):
    """The value model of algo.advantage.estimator=gae. It is trained by the policy's ranks, cut as the policy is."""

    load: Text | None = Field(
        default=None,
        description="Hugging Face or mcore folder that it starts from; a reward model keeps its score head, any other gets one of zeros; "
        "unset: the policy's weights",
    )
    optimizer: CriticOptimizerConfig = Field(default=CriticOptimizerConfig(), description="Its learning rate, where it has its own")


class RolesConfig(Section):
    """Who computes besides the policy; all share the devices of training."""

    critic: CriticConfig = Field(default=CriticConfig(), description="The value model of gae")


class ClusterConfig(Section):
    """The devices and how workers reach each other."""

    platform: Platform = Field(default="auto", description="Kind of device; auto: npu, else cuda, else cpu, by what the machine has")
    address: Text | None = Field(default=None, description="HOST:PORT of a cluster made by `msrl cluster up`; unset: this machine alone")
    nodes: Count = Field(default=1, description="Machines of the cluster that the run takes, as many devices of each")
    devices_per_node: Count | None = Field(default=None, description="Training ranks per node, one per device; unset: what one model needs")
    rpc_timeout_s: Seconds = Field(default=600.0, description="Seconds to wait for a worker, or a collective, before the run is ended")
    env: dict[str, Annotated[str, Strict()]] = Field(default_factory=dict[str, str], description="Environment variables of every worker")
    roles: RolesConfig = Field(default=RolesConfig(), description="Who computes besides the policy")


_ASYNC = Field(default=False, description="Write checkpoints while the training goes on, from copies in the machine's memory")
_KEYWORD: dict[str, Any] = {"async": (Bool, _ASYNC)}  # a word of Python's, so no class body can have it
_WithAsync: type[Section] = create_model("_WithAsync", __base__=Section, **_KEYWORD)


class CheckpointConfig(_WithAsync):
    """What is loaded, saved and resumed."""

    load: Text | None = Field(default=None, description="mcore checkpoint whose weights replace those of model.path")
    save: Text | None = Field(default=None, description="Folder of the run's checkpoints; unset: checkpoints in the folder of the run")
    every_steps: Count | None = Field(default=None, description="Steps between two checkpoints; unset: only after the last step")
    keep: Count | None = Field(default=None, description="Newest checkpoints that stay; unset: all")
    max_gb: Positive | None = Field(default=None, description="Gigabytes (1e9) that checkpoints may take; older ones go, the newest stays")
    keep_best: Bool = Field(default=False, description="Save after every evaluation that is the best so far, and keep that checkpoint too")
    resume: Text = Field(default="none", description="none: start anew; auto: go on from the newest checkpoint, if any; or the path of one")
    export_hf: Bool = Field(
        default=False,
        description="Write the final model, with keep_best the best one, as a Hugging Face folder, hf in the folder of the run "
        "(and a critic as hf_critic)",
    )

    @property
    def in_background(self) -> bool:
        """The key `async`."""
        return getattr(self, "async")


class LogConfig(Section):
    """What is written while training."""

    every_steps: Count = Field(default=1, description="Steps between two lines on the terminal; metrics.jsonl has every step")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=("tensorboard",),
        description="Where metrics go besides metrics.jsonl; wandb: as its own variables say (WANDB_PROJECT, WANDB_MODE)",
    )
    save_rollouts: Bool = Field(
        default=True, description="Write every prompt and completion with its rewards to rollouts/*.jsonl and eval/*.jsonl"
    )
