"""Schema of the configuration: every key with its type, bounds, default and description.

The configuration is frozen, and unknown keys are errors. `unsupported.py` lists known keys that
this version refuses. Every section has a default, so `Config()` is valid; the package `checks`
validates the keys that a command requires. Paths are the user's text, relative to the working
directory.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, PrivateAttr

from msrl.config.sections.algo import AlgoConfig
from msrl.config.sections.base import Section
from msrl.config.sections.commands import (
    ChatConfig,
    ConvertConfig,
    EvaluateConfig,
    GenerateConfig,
    PreprocessConfig,
    ServeConfig,
)
from msrl.config.sections.environment import EnvironmentConfig
from msrl.config.sections.evaluation import EvalConfig
from msrl.config.sections.general import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    RunConfig,
)
from msrl.config.sections.reward import (
    LengthConfig,
    OverlongConfig,
    RewardConfig,
    RewardNormConfig,
    RewardSource,
)
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
    "EnvironmentConfig",
    "EvalConfig",
    "EvaluateConfig",
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
    "ServeConfig",
    "TrainConfig",
]


class Config(Section):
    """Complete configuration. Each command reads the sections that it needs."""

    run: RunConfig = Field(default=RunConfig(), description="Name, folder and seed of the run.")
    model: ModelConfig = Field(default=ModelConfig(), description="Model to train.")
    data: DataConfig = Field(default=DataConfig(), description="Preprocessed data, or rows.")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Devices and workers.")
    rollout: RolloutConfig = Field(
        default=RolloutConfig(), description="Generation of responses in train-grpo."
    )
    environment: EnvironmentConfig = Field(
        default=EnvironmentConfig(), description="Environment of the episodes of train-grpo."
    )
    reward: RewardConfig = Field(
        default=RewardConfig(), description="Rewards of responses in train-grpo."
    )
    algo: AlgoConfig = Field(default=AlgoConfig(), description="Advantages and losses.")
    train: TrainConfig = Field(default=TrainConfig(), description="Optimization of the model.")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="Loading, saving and resuming."
    )
    log: LogConfig = Field(default=LogConfig(), description="Output during training.")
    eval: EvalConfig = Field(default=EvalConfig(), description="Evaluation during training.")
    convert: ConvertConfig = Field(
        default=ConvertConfig(), description="Settings of `msrl convert-ckpt`."
    )
    preprocess: PreprocessConfig = Field(
        default=PreprocessConfig(),
        description="Settings of `msrl preprocess`, and of trainings that read rows.",
    )
    generate: GenerateConfig = Field(
        default=GenerateConfig(), description="Settings of `msrl generate`."
    )
    chat: ChatConfig = Field(default=ChatConfig(), description="Settings of `msrl chat`.")
    evaluate: EvaluateConfig = Field(
        default=EvaluateConfig(), description="Settings of `msrl eval`."
    )
    serve: ServeConfig = Field(default=ServeConfig(), description="Settings of `msrl serve`.")

    _references: dict[str, str] = PrivateAttr(default_factory=dict[str, str])

    @property
    def references(self) -> Mapping[str, str]:
        """References such as `${env:NAME}` by the dotted key whose value comes from them."""
        return self._references

    def with_references(self, references: Mapping[str, str]) -> Config:
        """Return the configuration with these references of its values."""
        copy = self.model_copy()
        copy._references = dict(references)
        return copy
