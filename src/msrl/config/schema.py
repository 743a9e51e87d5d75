"""The one configuration: every key that a command reads, with its type, bounds, default and meaning.

Frozen and closed: an unknown key is a mistake. Only what this version does has a key here; what the design names beyond that is in
`not_yet.py`. Every section has a default, so that `Config()` is valid; what a command needs on top is checked by `checks.py`.
Paths are text as the user gave it, relative to the working directory.
"""

from __future__ import annotations

from pydantic import Field

from msrl.config.sections.algo import AlgoConfig
from msrl.config.sections.base import Section
from msrl.config.sections.commands import ChatConfig, ConvertConfig, GenerateConfig, PreprocessConfig
from msrl.config.sections.evaluation import EvalConfig
from msrl.config.sections.general import CheckpointConfig, ClusterConfig, DataConfig, LogConfig, ModelConfig, RunConfig
from msrl.config.sections.reward import LengthConfig, OverlongConfig, RewardConfig, RewardNormConfig, RewardSource
from msrl.config.sections.rollout import EngineConfig, FilterConfig, RolloutConfig
from msrl.config.sections.train import LoraConfig, OptimizerConfig, ParallelConfig, TrainConfig

__all__ = [
    "AlgoConfig",
    "ChatConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConvertConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "FilterConfig",
    "GenerateConfig",
    "LengthConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "ParallelConfig",
    "PreprocessConfig",
    "RewardConfig",
    "RewardNormConfig",
    "RewardSource",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "TrainConfig",
]


class Config(Section):
    """All sections; each command reads those that it needs."""

    run: RunConfig = Field(default=RunConfig(), description="Name, folder and seed of the run")
    model: ModelConfig = Field(default=ModelConfig(), description="The model that is trained")
    data: DataConfig = Field(default=DataConfig(), description="Preprocessed data")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Devices and workers")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="Generation of completions in train-grpo")
    reward: RewardConfig = Field(default=RewardConfig(), description="Scoring of completions in train-grpo")
    algo: AlgoConfig = Field(default=AlgoConfig(), description="Advantages and loss of train-grpo")
    train: TrainConfig = Field(default=TrainConfig(), description="The optimisation")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Loading, saving, resuming")
    log: LogConfig = Field(default=LogConfig(), description="What is written while training")
    eval: EvalConfig = Field(default=EvalConfig(), description="Evaluation while training")
    convert: ConvertConfig = Field(default=ConvertConfig(), description="msrl convert-ckpt")
    preprocess: PreprocessConfig = Field(default=PreprocessConfig(), description="msrl preprocess")
    generate: GenerateConfig = Field(default=GenerateConfig(), description="msrl generate")
    chat: ChatConfig = Field(default=ChatConfig(), description="msrl chat")
