"""Losses and advantages of ROLL as oracles, from a checkout that is not part of this project.

`MSRL_ROLL` names the checkout (commit 8eb27cc2), by default `../ROLL`. B samples of S tokens, of
which the first P are a prompt.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import copy
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import pytest
import torch
from torch import Tensor

import checkouts
from checkouts import import_from

_FUNCTIONS = Path("roll", "utils", "functionals.py")
_AGENTIC = Path("roll", "pipeline", "agentic")
_CONFIGS = ("roll/configs/base_config.py", "roll/pipeline/rlvr/rlvr_config.py")
_PACKAGES = ("roll", "roll.utils", "roll.pipeline", "roll.pipeline.rlvr")
# Modules of clusters and files that the functions below never call.
_STAND_INS = (
    "tensordict",
    "roll.configs",
    "roll.configs.base_config",
    "roll.distributed",
    "roll.distributed.scheduler",
    "roll.distributed.scheduler.protocol",
    "roll.pipeline.base_worker",
    "roll.pipeline.rlvr.rlvr_config",
    "roll.platforms",
    "roll.utils.logging",
    "roll.utils.train_infer_corrections",
)


@cache
def checkout() -> Path:
    """Return the checkout of ROLL, or skip the test."""
    root = checkouts.checkout("ROLL", _FUNCTIONS)
    import_from(root, *_PACKAGES)
    for name in _STAND_INS:
        sys.modules[name] = _StandIn(name)
    vars(sys.modules["roll.utils.logging"])["get_logger"] = logging.getLogger
    return root


class _StandIn(types.ModuleType):
    """Module whose names are empty classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def functions() -> Any:
    checkout()
    return importlib.import_module("roll.utils.functionals")


@cache
def defaults() -> dict[str, Any]:
    """Return the defaults of the pipeline's configuration."""
    values: dict[str, Any] = {}
    for file in _CONFIGS:
        for node in ast.parse((checkout() / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in ("PPOConfig", "RLVRConfig"):
                values |= dict(_fields(node))
    return values


def _fields(node: ast.ClassDef) -> list[tuple[str, Any]]:
    fields: list[tuple[str, Any]] = []
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = statement.value
            if isinstance(value, ast.Call):
                named = {keyword.arg: keyword.value for keyword in value.keywords}
                value = named.get("default")
            try:
                fields.append((statement.target.id, ast.literal_eval(value or ast.Constant(None))))
            except ValueError:
                continue
    return fields


class Batch(dict[str, Tensor]):
    """Tensors by name with the interface of a TensorDict that the functions read."""

    device = torch.device("cpu")

    @property
    def batch_size(self) -> tuple[int]:
        return (len(next(iter(self.values()))),)


def pipeline_config(num_samples: int, **changes: Any) -> Any:
    """Return the configuration of a pipeline."""
    generating = types.SimpleNamespace(num_return_sequences=num_samples)
    correction = types.SimpleNamespace(is_weight=types.SimpleNamespace(enabled=False))
    values = {**defaults(), **changes}
    values |= {
        "actor_infer": types.SimpleNamespace(generating_args=generating),
        "train_infer_correction": correction,
        "enable_old_logprobs_recompute": True,
    }
    values["actor_train"] = types.SimpleNamespace(**changes.get("actor_train", {}))
    return types.SimpleNamespace(**values)


def loss(
    config: Any,
    batch: Batch,
    logprobs: Tensor,  # [B, S - 1]
    entropy: Tensor,  # [B, S - 1]
    *,
    is_pg_worker: bool,
) -> Tensor:
    """Return the loss of a worker's `loss_func` for a whole batch."""
    checkout()
    name = "actor_pg_worker" if is_pg_worker else "actor_worker"
    module = importlib.import_module(f"roll.pipeline.rlvr.{name}")
    worker = object.__new__(module.ActorPGWorker if is_pg_worker else module.ActorWorker)
    ones = torch.ones(len(logprobs))
    vars(worker).update(
        pipeline_config=config,
        worker_config=config.actor_train,
        logger=logging.getLogger("roll"),
        strategy=types.SimpleNamespace(
            op_compute_log_probs=lambda **arguments: logprobs,
            op_compute_entropy=lambda **arguments: entropy,
        ),
        get_old_log_probs_with_cache=lambda data, new: batch["old_log_probs"],
        compute_sample_weights=lambda data, mask: ones,
        _get_pg_metrics=lambda *arguments, **options: {},
        _pg_config_cache={},
        _pg_variant_logged=True,
        _topr_sample_logged=True,
        _cispo_config_logged=True,
        _kimi15_config_logged=True,
    )
    num_tokens = batch["response_mask"][:, 1:].sum()
    data = types.SimpleNamespace(
        batch=batch,
        meta_info={
            "batch_num_tokens": {"response_mask": num_tokens},
            "global_valid_samples": {"response_mask": len(logprobs)},
        },
    )
    total, _ = worker.loss_func(data, logprobs)
    return total


def advantages(config: Any, batch: Batch) -> Tensor:  # [B, S - 1]
    """Return the advantages of a step from the rewards of its responses."""
    module = functions()
    data = types.SimpleNamespace(batch=batch, meta_info={})
    running = importlib.import_module("roll.utils.kl_controller")
    controller = running.FixedKLController(config.init_kl_coef)
    data, _ = module.reward_postprocess(data, config, {})
    data, _ = module.compute_token_reward(data, config, controller)
    data = module.compute_advantage(
        data=data,
        gamma=config.gamma,
        lambd=config.lambd,
        adv_estimator=config.adv_estimator,
        advantage_clip=config.advantage_clip,
        whiten_advantages=config.whiten_advantages,
        whiten_rewards=config.whiten_rewards,
        pipeline_config=config,
    )
    return data.batch["advantages"]


class Trajectories:
    """Tensors of trajectories and their labels, with the interface of a DataProto."""

    def __init__(self, batch: dict[str, Tensor], labels: dict[str, np.ndarray]) -> None:
        self.batch, self.non_tensor_batch = Batch(batch), labels
        self.meta_info: dict[str, Any] = {}

    @staticmethod
    def from_dict(tensors: dict[str, Tensor]) -> Trajectories:
        return Trajectories(tensors, {})

    @staticmethod
    def concat(batches: Sequence[Trajectories]) -> Trajectories:
        names, labels = batches[0].batch, batches[0].non_tensor_batch
        return Trajectories(
            {name: torch.cat([item.batch[name] for item in batches]) for name in names},
            {
                key: np.concatenate([item.non_tensor_batch[key] for item in batches])
                for key in labels
            },
        )

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def group_by(self, keys: str) -> dict[str, Trajectories]:
        labels = self.non_tensor_batch[keys]
        return {name: self._rows(np.flatnonzero(labels == name)) for name in np.unique(labels)}

    def reorder(self, indices: Tensor) -> None:
        rows = self._rows(indices.numpy())
        self.batch, self.non_tensor_batch = rows.batch, rows.non_tensor_batch

    def pop(self, name: str) -> None:
        del self.batch[name]

    def rename(self, *, old_keys: str, new_keys: str) -> None:
        self.batch[new_keys] = self.batch.pop(old_keys)

    def _rows(self, rows: np.ndarray) -> Trajectories:
        return Trajectories(
            {name: values[rows] for name, values in self.batch.items()},
            {name: values[rows] for name, values in self.non_tensor_batch.items()},
        )


@cache
def _agentic() -> Any:
    """Return the functions of agentic rewards; the modules around them need a cluster."""
    module = functions()
    names: dict[str, Any] = {
        **vars(module),
        "np": np,
        "torch": torch,
        "Tensor": Tensor,
        "Any": Any,
        "Optional": Optional,
        "Dict": dict,
        "DataProto": Trajectories,
        "AgenticConfig": object,
        "Literal": Literal,
        "dataclass": dataclass,
        "field": field,
        "logger": logging.getLogger("roll.agentic"),
    }
    definitions = {
        "agentic_config.py": ("_resolve_reward_norm_defaults", "RewardNormalizationConfig"),
        "utils.py": (
            "agentic_reward_norm",
            "build_state_group",
            "compute_discounted_returns",
            "compute_agentic_reinforce_return",
            "compute_response_level_rewards",
            "agentic_compute_advantage",
        ),
    }
    for file, members in definitions.items():
        names = _definitions(_AGENTIC / file, members, names)
    return types.SimpleNamespace(**names)


def _definitions(file: Path, members: Sequence[str], names: dict[str, Any]) -> dict[str, Any]:
    """Return `names` with these functions and classes of a module that needs a cluster."""
    path = checkout() / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") in members]
    exec(compile(tree, str(path), "exec"), names)
    return names


def preference_loss(*logprobs: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Return the loss of pairs from the sums [P] of policy and reference, chosen and rejected."""
    file = Path("roll", "pipeline", "dpo", "actor_worker.py")
    loss = _definitions(file, ("loss_fn",), {"torch": torch})["loss_fn"]
    return loss(*logprobs, beta=beta, label_smoothing=label_smoothing)[0]


def turn_rewards(
    estimator: str, labels: dict[str, np.ndarray], norm: dict[str, str], gamma: float, omega: float
) -> np.ndarray:  # [K]
    """Return the rewards of the tokens of every turn from labels [K] of the turns."""
    module = _agentic()
    logging.getLogger("roll.agentic").setLevel(logging.ERROR)
    config = types.SimpleNamespace(
        adv_estimator=estimator,
        reward_normalization=module.RewardNormalizationConfig(**norm),
        episode_reward_weight=1.0,
        step_reward_weight=omega,
        reward_clip=None,
    )
    data = Trajectories({"scores": torch.zeros(len(labels["step"]), 1)}, labels)
    data = module.compute_discounted_returns(data, estimator, gamma)
    data, _ = module.compute_response_level_rewards(data, config)
    return data.batch["response_level_rewards"].numpy()


def episode_advantages(
    config: Any, batch: Batch, scores: Tensor, labels: dict[str, np.ndarray], norm: dict[str, str]
) -> Tensor:  # [B, S - 1]
    """Return the advantages of trajectories from their scores [B] and `reward_normalization`."""
    module = _agentic()
    logging.getLogger("roll.agentic").setLevel(logging.ERROR)
    config.reward_normalization = module.RewardNormalizationConfig(**norm)
    data = Trajectories({**batch, "scores": scores[:, None]}, labels)
    data, _ = module.compute_response_level_rewards(data, config)
    running = importlib.import_module("roll.utils.kl_controller")
    controller = running.FixedKLController(config.init_kl_coef)
    data, _ = module.compute_token_reward(data, config, controller)
    data = module.agentic_compute_advantage(
        data=data,
        gamma=config.gamma,
        lambd=config.lambd,
        adv_estimator=config.adv_estimator,
        advantage_clip=config.advantage_clip,
        whiten_advantages=config.whiten_advantages,
        whiten_rewards=config.whiten_rewards,
        pipeline_config=config,
    )
    return data.batch["advantages"]


_ENVIRONMENTS = ("roll.pipeline.agentic", "roll.pipeline.agentic.env")
_GYM = ("gym", "gym.utils", "gym.spaces", "gym.spaces.discrete", "gym_sokoban.envs.render_utils")


def frozen_lake(**options: Any) -> Any:
    """Return ROLL's environment of the frozen lake."""
    pytest.importorskip("gymnasium")
    return _environment("frozen_lake").FrozenLakeEnv(**options)


def sokoban(**options: Any) -> Any:
    """Return ROLL's environment of Sokoban, which draws no images here."""
    return _sokoban_class()(**options)


@cache
def _sokoban_class() -> Any:
    spec = importlib.util.find_spec("gym_sokoban")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gym-sokoban is not installed (pip install --no-deps gym-sokoban==0.0.6)")
    for name in _GYM:
        sys.modules[name] = _StandIn(name)
    [folder] = spec.submodule_search_locations
    import_from(Path(folder).parent, "gym_sokoban", "gym_sokoban.envs")
    class_ = _environment("sokoban").SokobanEnv
    class_.get_image = lambda self, *arguments, **named: None
    module = importlib.import_module("gym_sokoban.envs.sokoban_env")
    vars(module).update(Discrete=lambda count: None, Box=lambda **options: None)
    return class_


def rooms() -> Any:
    """Return the functions that make ROLL's rooms."""
    return _environment("sokoban", "utils")


def _environment(folder: str, module: str = "env") -> Any:
    """Return a module of an environment of ROLL."""
    root = checkout()
    import_from(root, *_ENVIRONMENTS, f"{_ENVIRONMENTS[1]}.{folder}")
    sys.modules["gem"] = types.ModuleType("gem")
    vars(sys.modules["gem"])["Env"] = type("Env", (), {"reset": lambda self, seed=None: None})
    return importlib.import_module(f"{_ENVIRONMENTS[1]}.{folder}.{module}")


class _Settings(dict[str, Any]):
    """Keys that are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class _Proto:
    """Tensors and their labels, as ROLL's environment managers make them."""

    def __init__(self, batch: dict[str, Any] | None = None, **named: Any) -> None:
        self.batch, self.meta_info = batch or {}, named.get("meta_info", {})
        self.non_tensor_batch: dict[str, Any] = {}


_MANAGER = ("format_messages", "make_decision", "step", "formulate_rollouts")
_REASONS = types.SimpleNamespace(FINISH="finish", MAX_LENGTH="max_length", ABORT="abort")


@cache
def _manager_class() -> type:
    """Return TrajEnvManager with the methods of one episode."""
    masks = _AGENTIC / "env_manager" / "token_mask_utils.py"
    tokens = ("compute_conversation_end_token_id", "custom_apply_chat_template")
    names = {"lru_cache": cache_of, "List": list, "Dict": dict, "PreTrainedTokenizer": object}
    names = _definitions(masks, tokens, names) | {
        "DataProto": _Proto,
        "TensorDict": lambda values, batch_size: values,
        "RolloutCache": object,
        "GenerateStopReason": _REASONS,
        "copy": copy,
        "np": np,
        "torch": torch,
        "pad_to_length": functions().pad_to_length,
        "aggregate_metrics": lambda **options: {},
        "contains_renderable_field": lambda text, name: f"{{{name}}}" in text,
    }
    file = _AGENTIC / "env_manager" / "traj_env_manager.py"
    return type(
        "Manager", (), {name: _method(file, "TrajEnvManager", name, names) for name in _MANAGER}
    )


def cache_of(maxsize: int) -> Any:
    return lambda function: function


class Trajectory:
    """An episode of ROLL's TrajEnvManager.

    Args:
        env: Environment of ROLL.
        tokenizer: Tokenizer of transformers.
        settings: Keys of the environment in `custom_envs`.
        answers: Function that returns the tokens of an answer from the tokens of its prompt and the
            largest number of new tokens.
    """

    def __init__(
        self,
        env: Any,
        tokenizer: Any,
        settings: dict[str, Any],
        sequence_length: int,
        answers: Callable[[list[int], int], list[int]],
    ) -> None:
        cached = {"history": [], "step": 0, "terminated": False, "truncated": False}
        labels = {"tag": "t", "env_id": 0, "group_id": 0}
        generating = types.SimpleNamespace(max_new_tokens=10**6, to_dict=dict)
        self.manager: Any = _manager_class()()
        vars(self.manager).update(
            env=env,
            tokenizer=tokenizer,
            env_config=_Settings(env_id=0, **settings),
            pipeline_config=types.SimpleNamespace(
                sequence_length=sequence_length, skip_mock_system_prompt=False
            ),
            worker_config=types.SimpleNamespace(generating_args=generating),
            agent_system_template=settings["agent_system_template"],
            agent_template=settings["agent_template"],
            rollout_cache=types.SimpleNamespace(**cached, **labels),
            thread_lock=contextlib.nullcontext(),
            env_step_limiter=contextlib.nullcontext(),
            logger=logging.getLogger("roll"),
            llm_proxy=types.SimpleNamespace(generate=self._generate),
        )
        self._answers = answers

    def _generate(self, messages: Any, lm_input: Any, generation_config: dict[str, Any]) -> _Proto:
        [prompt] = lm_input.batch["input_ids"].tolist()
        answer = self._answers(prompt, generation_config["max_new_tokens"])
        return _Proto({"responses": torch.tensor([answer])})

    def run(self, seed: int) -> tuple[list[int], list[bool], float]:
        """Return the tokens of the episode, which of them are trained, and its score."""
        manager, cached = self.manager, self.manager.rollout_cache
        observation, info = manager.env.reset(seed=seed)
        cached.history.append(
            {"observation": observation, "actions_left": manager.env_config.max_steps, **info}
        )
        reason = ""
        while not cached.terminated and reason != _REASONS.MAX_LENGTH:
            output = manager.make_decision(cached)
            reason = output.meta_info.pop("stop_reason")
            if reason == _REASONS.FINISH:
                manager.step(output)
        batch = manager.formulate_rollouts(cached).batch
        is_token = batch["attention_mask"][0].bool()
        tokens, mask = (batch[name][0][is_token] for name in ("input_ids", "response_mask"))
        return tokens.tolist(), mask.bool().tolist(), float(batch["scores"].sum())


@dataclass
class Conversation:
    """Messages of an episode, as ROLL's TrajEnvManager words them.

    `observation` and `instruction` come from its environment.
    """

    system: str
    template: str
    max_steps: int
    max_tokens: int
    history: list[dict[str, Any]] = field(default_factory=list)

    def add(self, observation: str, instruction: str | None = None) -> list[tuple[str, str]]:
        """Return the new messages of a turn."""
        step = len(self.history)
        entry = {"observation": observation, "actions_left": self.max_steps - step}
        if instruction is not None:
            entry["env_instruction"] = instruction
        self.history.append(entry)
        file = _AGENTIC / "env_manager" / "traj_env_manager.py"
        names = {
            "DataProto": types.SimpleNamespace,
            "TensorDict": lambda values, batch_size: values,
            "RolloutCache": object,
            "torch": torch,
            "contains_renderable_field": lambda text, name: f"{{{name}}}" in text,
            "custom_apply_chat_template": lambda **options: [0],
            "compute_conversation_end_token_id": lambda tokenizer: [],
        }
        method = _method(file, "TrajEnvManager", "format_messages", names)
        for previous in self.history[:-1]:
            previous |= {"prompt_ids": [0], "response_ids": [0]}
        manager = types.SimpleNamespace(
            rollout_cache=types.SimpleNamespace(history=self.history, step=step),
            env_config=_Settings(max_steps=self.max_steps, max_tokens_per_step=self.max_tokens),
            agent_system_template=self.system,
            agent_template=self.template,
            tokenizer=None,
            pipeline_config=types.SimpleNamespace(skip_mock_system_prompt=False),
        )
        method(manager, manager.rollout_cache)
        return [(message["role"], message["content"]) for message in entry["messages"]]


def _method(file: Path, owner: str, name: str, names: dict[str, Any]) -> Any:
    """Return a method of a class of a module that needs a cluster, as a function."""
    path = checkout() / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [class_] = [node for node in tree.body if getattr(node, "name", "") == owner]
    tree.body = [node for node in class_.body if getattr(node, "name", "") == name]
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags, dont_inherit=True), names)
    return names[name]
