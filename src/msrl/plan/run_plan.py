"""The plan of a run: everything that a training resolves once from its configuration.

`resolve` reads the config.json of every model and the manifest of every dataset once. Checks,
memory estimates and workflows take them from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msrl.cluster.placement import Placement, Role
from msrl.cluster.placement import plan as place
from msrl.config.options import TRAININGS
from msrl.config.schema import Config
from msrl.config.sections.algo import SELF, TeacherConfig
from msrl.config.sections.general import DataConfig
from msrl.config.sections.rollout import RolloutConfig
from msrl.config.sections.train import TrainConfig
from msrl.data.manifest import read_manifest
from msrl.errors import MsrlError
from msrl.models.families import shape_from_config
from msrl.models.hf_config import HfConfig, read_hf_config
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.paths import config_dir, is_hf, runs_on_ranks
from msrl.models.reward_head import with_score
from msrl.models.shape import Shape
from msrl.plan.derived import (
    accumulation,
    dp_size,
    has_engines,
    has_pairs,
    has_rollouts,
    is_replay,
    layout_from,
    max_model_len,
    needs_critic,
    needs_reference,
    num_engines,
    num_separate_devices,
    preference_plan,
    replica_size,
    samples_per_step,
    trains_steps,
    world_size,
)
from msrl.plan.distillation import distillation_config
from msrl.plan.replay import replay_config
from msrl.plan.roles import SeparateModel, placed_roles, separate_models
from msrl.types import DatasetManifest, SamplingParams


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model of a run.

    Attributes:
        weights: Absolute path of the weights.
        hf_dir: Absolute path of the folder with config.json.
        config: Content of config.json; None if it is unreadable.
        shape: Shape of the model; None if it is unreadable or not supported.
        error: Reason why `shape` is None; empty otherwise.
    """

    weights: Path
    hf_dir: Path
    config: HfConfig | None
    shape: Shape | None
    error: str = ""

    def require_shape(self) -> Shape:
        """Return the shape.

        Raises:
            MsrlError: config.json is unreadable or the model is not supported.
        """
        if self.shape is None:
            raise MsrlError(self.error)
        return self.shape


@dataclass(frozen=True, slots=True)
class DatasetPlan:
    """A preprocessed dataset. Data of other systems has no manifest.

    Attributes:
        prefix: Prefix of its files.
        manifest: Its manifest, if it has one.
        error: Reason why the manifest is unreadable; empty otherwise.
        source: Rows that the run preprocessed, for its record; empty for data that exists already.
    """

    prefix: str
    manifest: DatasetManifest | None
    error: str = ""
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Values that a training resolves once. Paths are absolute.

    Attributes:
        command: A name of `TRAININGS`.
        config: Configuration of the run.
        policy: Trained model; None if no model is set.
        critic: Value model; None for a run without one.
        reference: Model of the KL terms or of a preference loss; None for a run without one.
        reward_models: Models of the reward sources, by `model` of the source.
        teachers: Models to distill from on the ranks, by `model` of the teacher.
        datasets: Training and evaluation data, by the values of `data.train`, `data.eval` and
            `data.blend`: prefixes, or rows that the run preprocesses.
        run_dir: Folder of the run.
        checkpoint_dir: Folder of the run's checkpoints.
        layout: Parallel layout of the policy.
        world_size: Number of training ranks.
        dp_size: Data-parallel size; 0 if the devices do not hold one model replica.
        replica_size: Number of ranks of one model replica.
        roles: Workers to place on devices.
        separate_models: Models that have separate devices.
        sampling: Sampling of the rollouts of train-grpo.
        unread: Keys with a value that a replay of recorded rollouts does not read.
    """

    command: str
    config: Config
    policy: ModelPlan | None
    critic: ModelPlan | None
    reference: ModelPlan | None
    reward_models: Mapping[str, ModelPlan]
    teachers: Mapping[str, ModelPlan]
    datasets: Mapping[str, DatasetPlan]
    run_dir: Path
    checkpoint_dir: Path
    layout: ParallelLayout
    world_size: int
    dp_size: int
    replica_size: int
    roles: tuple[Role, ...]
    separate_models: tuple[SeparateModel, ...]
    sampling: SamplingParams
    unread: tuple[str, ...] = ()

    @property
    def is_training(self) -> bool:
        return self.command in TRAININGS

    @property
    def reads_data(self) -> bool:
        """True if the command reads the data of the section `data`."""
        return self.is_training or (self.command == "eval" and not self.config.evaluate.benchmarks)

    @property
    def has_rollouts(self) -> bool:
        """True if the training samples responses."""
        return has_rollouts(self.command)

    @property
    def is_replay(self) -> bool:
        """True if the training reads recorded rollouts and starts no engines."""
        return self.has_rollouts and is_replay(self.config)

    @property
    def has_engines(self) -> bool:
        """True if the training starts engines."""
        return has_engines(self.config, self.command)

    @property
    def scores_responses(self) -> bool:
        """True if the training calls reward sources."""
        is_computed = self.rollout.replay.rewards == "computed"
        return self.has_engines or (self.is_replay and is_computed)

    @property
    def is_distillation(self) -> bool:
        """True if rewards are only reported."""
        return self.command == "train-distill"

    @property
    def dtype(self) -> str:
        return self.config.model.dtype

    @property
    def logits_dtype(self) -> str:
        """Data type in which the product of the output layer is computed."""
        return self.config.model.logits_dtype or self.dtype

    @property
    def needs_reference(self) -> bool:
        return _needs_reference(self.config, self.command)

    @property
    def has_reference_on_ranks(self) -> bool:
        """True if the training ranks compute with the reference during the training."""
        is_precomputed = self.command == "train-dpo" and preference_plan(self.config).is_precomputed
        is_separate = self.separate_model("reference") is not None
        return self.needs_reference and not is_separate and not is_precomputed

    @property
    def sides(self) -> int:
        """Number of sequences of a row of data: 2 for pairs."""
        return 2 if has_pairs(self.config, self.command) else 1

    @property
    def is_reward_model(self) -> bool:
        """True if the trained model gives scores or labels steps."""
        return self.command == "train-rm"

    @property
    def trains_steps(self) -> bool:
        """True if the trained model is a process reward model."""
        return trains_steps(self.config, self.command)

    @property
    def has_own_reference(self) -> bool:
        """True if the reference has other weights than the policy starts from."""
        return self.reference is not None and self.reference is not self.policy

    @property
    def has_separate_engines(self) -> bool:
        """True if the engines have separate devices."""
        return num_separate_devices(self.config.cluster.roles.rollout) > 0

    @property
    def num_engines(self) -> int:
        return num_engines(self.config)

    @property
    def num_local_devices(self) -> int:
        """Number of devices that the run needs on this machine.

        In a cluster, these are the devices of its training ranks only.
        """
        separate = [role for role in self.roles if role.is_separate]
        num_separate = sum(role.num_workers * role.devices_per_worker for role in separate)
        num_shared = self.world_size // self.config.cluster.nodes
        return num_shared + (num_separate if self.config.cluster.address is None else 0)

    @property
    def has_images(self) -> bool:
        """True if a dataset has images."""
        manifests = [dataset.manifest for dataset in self.datasets.values()]
        return any(manifest is not None and manifest.vision for manifest in manifests)

    def prefix(self, name: str) -> str:
        """Return the prefix of the data that a value of the section `data` names."""
        return self.datasets[name].prefix

    def shown_name(self, name: str) -> str:
        """Return the name of data for files and messages: its name on a hub, or a reference."""
        references = self.config.references
        for key, value in (("data.train", self.data.train), ("data.eval", self.data.eval)):
            if value == name and key in references:
                return references[key]
        return name

    def with_datasets(self, datasets: Mapping[str, DatasetPlan]) -> RunPlan:
        """Return the plan with these datasets instead of those with the same names."""
        merged = {**self.datasets, **datasets}
        return replace(self, datasets=merged, sampling=_sampling(self.config, merged))

    def models(self, role: str) -> tuple[ModelPlan, ...]:
        """Return the models of a role: reference, critic or reward."""
        if role == "reward":
            return self.rank_models
        model = self.reference if role == "reference" else self.critic
        return () if model is None else (model,)

    def separate_model(self, role: str) -> SeparateModel | None:
        """Return the model of a role with separate devices; None if it has none."""
        return next((model for model in self.separate_models if model.role == role), None)

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt plus response in tokens."""
        return max_model_len(self.config)

    @property
    def samples_per_step(self) -> int:
        """Number of responses of one step with rollouts."""
        return samples_per_step(self.config)

    @property
    def accumulation(self) -> int | None:
        """Micro-batches of an optimizer update on a rank; None if tokens define them."""
        return accumulation(self.config, self.command)

    @property
    def train(self) -> TrainConfig:
        return self.config.train

    @property
    def rollout(self) -> RolloutConfig:
        return self.config.rollout

    @property
    def data(self) -> DataConfig:
        return self.config.data

    @property
    def model(self) -> ModelPlan:
        """The trained model.

        Raises:
            MsrlError: No model is set.
        """
        if self.policy is None:
            raise MsrlError(
                "model.path: not set. Name a Hugging Face folder or an mcore checkpoint."
            )
        return self.policy

    @property
    def shape(self) -> Shape:
        """Shape of the trained model.

        Raises:
            MsrlError: No model is set, or it is not supported.
        """
        return self.model.require_shape()

    @property
    def shape_or_none(self) -> Shape | None:
        return None if self.policy is None else self.policy.shape

    @property
    def tokenizer_dir(self) -> Path:
        """Folder of the tokenizer.

        Raises:
            MsrlError: Neither a tokenizer nor a model is set.
        """
        path = self.config.model.tokenizer
        return Path(path).absolute() if path else self.model.hf_dir

    @property
    def rank_models(self) -> tuple[ModelPlan, ...]:
        """Models of the reward sources that the training ranks run."""
        sources = self.config.reward.sources
        names = [source.model for source in sources if runs_on_ranks(source.model, source.engine)]
        return tuple(self.reward_models[str(name)] for name in names)

    @property
    def start_adapters(self) -> Path | None:
        """Checkpoint whose adapters the trained ones start from."""
        load = self.train.lora.load
        return None if load is None else Path(load).absolute()

    @property
    def rank_teachers(self) -> Mapping[str, ModelPlan]:
        """Teachers with a replica on the training ranks.

        The others have the weights that the policy starts from, and the ranks have these already:
        as the policy without its adapters, or as the reference. Adapters that start from others
        belong to the start, so that only the policy itself is such a teacher.
        """
        if self.start_adapters is not None:
            return {name: model for name, model in self.teachers.items() if name != SELF}
        has_start = self.train.lora.rank is not None or (
            self.has_reference_on_ranks and not self.has_own_reference
        )
        if not has_start:
            return self.teachers
        start = self.model.weights
        return {name: model for name, model in self.teachers.items() if model.weights != start}

    def hf_config(self, folder: Path) -> HfConfig:
        """Return the config.json of a model of this run, which is not read again.

        Raises:
            MsrlError: The file is absent or not a JSON object.
        """
        models = (
            *(self.policy, self.critic, self.reference),
            *self.reward_models.values(),
            *self.teachers.values(),
        )
        for model in models:
            if model is not None and model.hf_dir == folder.absolute():
                if model.config is None:
                    raise MsrlError(model.error)
                return model.config
        return read_hf_config(folder)

    def place(self, resource: str) -> Placement:
        """Return the placement of all workers on devices of Ray's logical `resource`."""
        nodes = self.config.cluster.nodes
        return place(self.roles, self.world_size // nodes, nodes, resource=resource)


def resolve(config: Config, command: str) -> RunPlan:
    """Return the plan of a training.

    Invalid models and manifests are recorded in the plan, because the checks report all errors of
    a configuration together.
    """
    if command == "train-distill":
        config = distillation_config(config)
    unread: tuple[str, ...] = ()
    if command == "train-grpo" and is_replay(config):
        config, unread = replay_config(config)
    models, samples = _ModelReader(), has_rollouts(command)
    has_score = command == "train-rm" and not trains_steps(config, command)
    policy = _policy(config, models, has_score=has_score)
    has_reference = _needs_reference(config, command)
    sources = config.reward.sources if samples else ()
    teachers = config.algo.distill.on_ranks if samples else ()
    names = [source.model for source in sources if source.model is not None]
    datasets = _datasets(config)
    return RunPlan(
        command=command,
        config=config,
        policy=policy,
        critic=_critic(config, policy, models) if samples and needs_critic(config) else None,
        reference=_reference(config, policy, models) if has_reference else None,
        reward_models={name: models.read(name, config_dir(name)) for name in names},
        teachers=_teachers(teachers, policy, models),
        datasets=datasets,
        run_dir=run_folder(config),
        checkpoint_dir=checkpoint_folder(config),
        layout=layout_from(config.train.parallel),
        world_size=world_size(config),
        dp_size=dp_size(config),
        replica_size=replica_size(config),
        roles=placed_roles(config, command),
        separate_models=separate_models(config) if samples else (),
        sampling=_sampling(config, datasets),
        unread=unread,
    )


def _needs_reference(config: Config, command: str) -> bool:
    """Return True if a training needs a reference model."""
    if command == "train-dpo":
        return preference_plan(config).needs_reference
    return has_rollouts(command) and needs_reference(config)


def run_folder(config: Config) -> Path:
    """Return the absolute path of the folder of a run."""
    return (Path(config.run.dir) / config.run.name).absolute()


def checkpoint_folder(config: Config) -> Path:
    """Return the absolute path of the folder of a run's checkpoints."""
    save = config.checkpoint.save
    return Path(save).absolute() if save else run_folder(config) / "checkpoints"


class _ModelReader:
    """Reader of models, which reads each config.json once."""

    def __init__(self) -> None:
        self._models: dict[Path, ModelPlan] = {}

    def read(self, weights: str, hf_dir: Path) -> ModelPlan:
        """Return the model with these weights and the config.json in `hf_dir`."""
        folder = hf_dir.absolute()
        known = self._models.get(folder)
        if known is None:
            known = self._models[folder] = _read_model(hf_dir)
        path = Path(weights).absolute()
        return ModelPlan(path, folder, known.config, known.shape, known.error)


def _read_model(hf_dir: Path) -> ModelPlan:
    config, folder = None, hf_dir.absolute()
    try:
        config = read_hf_config(hf_dir)
        return ModelPlan(folder, folder, config, shape_from_config(config))
    except (MsrlError, OSError) as error:
        return ModelPlan(folder, folder, config, None, str(error))


def _policy(config: Config, models: _ModelReader, *, has_score: bool) -> ModelPlan | None:
    """Return the trained model: the weights of `checkpoint.load`, or else of `model.path`.

    A checkpoint without config.json gets the file of `model.path`. With `has_score`, it is a reward
    model, or becomes one.
    """
    load, path = config.checkpoint.load, config.model.path
    weights = load or path
    if weights is None:
        return None
    owner = weights
    if path is not None and not is_hf(str(config_dir(weights))):
        owner = path
    model = models.read(weights, config_dir(owner))
    if has_score:
        return _with_score(model)
    if model.shape is not None and model.shape.reward_head:
        error = (
            f"{owner}: {model.shape.architecture} generates scores instead of text. "
            "Use it in reward.sources or convert it."
        )
        return ModelPlan(model.weights, model.hf_dir, model.config, None, error)
    return model


def _critic(config: Config, policy: ModelPlan | None, models: _ModelReader) -> ModelPlan | None:
    """Return the critic: its own model, or the policy's with a score head."""
    load = config.cluster.roles.critic.load
    model = policy if load is None else models.read(load, config_dir(load))
    return None if model is None else _with_score(model)


def _with_score(model: ModelPlan) -> ModelPlan:
    """Return the model with a score head instead of the output layer, if it has none."""
    if model.shape is None or model.shape.reward_head:
        return model
    shape = with_score(model.shape, model.shape.architecture)
    return ModelPlan(model.weights, model.hf_dir, model.config, shape)


def _reference(config: Config, policy: ModelPlan | None, models: _ModelReader) -> ModelPlan | None:
    """Return the reference: its own model, or the policy's initial weights.

    A checkpoint without config.json gets the file of the policy.
    """
    load = config.cluster.roles.reference.load
    if load is None:
        return policy
    owner = config_dir(load)
    if not is_hf(str(owner)) and policy is not None:
        return replace(policy, weights=Path(load).absolute())
    return models.read(load, owner)


def _teachers(
    sections: Sequence[TeacherConfig], policy: ModelPlan | None, models: _ModelReader
) -> dict[str, ModelPlan]:
    """Return the teachers by name. The policy is its own teacher before the training."""
    teachers: dict[str, ModelPlan] = {}
    for section in sections:
        name = section.name
        if not section.is_self:
            teachers[name] = models.read(name, config_dir(name))
        elif policy is not None:
            teachers[name] = policy
    return teachers


def _datasets(config: Config) -> dict[str, DatasetPlan]:
    prefixes = (config.data.train, *config.data.blend, config.data.eval)
    return {prefix: _dataset(prefix) for prefix in prefixes if prefix is not None}


def _dataset(prefix: str) -> DatasetPlan:
    try:
        return DatasetPlan(prefix, read_manifest(prefix))
    except (MsrlError, OSError) as error:
        return DatasetPlan(prefix, None, str(error))


def _sampling(config: Config, datasets: Mapping[str, DatasetPlan]) -> SamplingParams:
    """Return the sampling of the rollouts. Responses end with the tokens that end the data's."""
    sampling = config.rollout.sampling
    prefix = next(iter(config.data.blend), config.data.train)  # a blend has one template
    manifest = None if prefix is None else datasets[prefix].manifest
    return SamplingParams(
        max_tokens=config.rollout.max_response_tokens,
        num_samples=config.rollout.samples_per_prompt,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=sampling.stop,
        stop_token_ids=tuple(sorted(_end_tokens(manifest))),
        seed=config.run.seed if sampling.seed is None else sampling.seed,
        with_routes=config.train.router.replay == "engine",
    )


def _end_tokens(manifest: DatasetManifest | None) -> Iterable[int]:
    if manifest is None:
        return ()
    eos = () if manifest.eos_token_id is None else (manifest.eos_token_id,)
    return {*manifest.stop_token_ids, *eos}
