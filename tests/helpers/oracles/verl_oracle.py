"""Losses and advantages of verl as oracles, from a checkout that is not part of this project.

`MSRL_VERL` names the checkout (commit 1dda0392), by default `../verl`. Its configuration files give
the defaults. B responses of up to T tokens, padded at the end.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

import checkouts
from checkouts import import_from
from msrl.config.sources import scalar

_CORE = Path("verl", "trainer", "ppo", "core_algos.py")
_TRAINER = Path("verl", "trainer", "ppo", "ray_trainer.py")
_DEFAULTS = Path("verl", "trainer", "config", "_generated_ppo_trainer.yaml")
_SCORES = Path("verl", "utils", "reward_score")
_PACKAGES = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.workers", "verl.workers.utils")
# Modules of clusters, devices and files that the functions below never call.
_STAND_INS = (
    "omegaconf",
    "tensordict",
    "verl.protocol",
    "verl.plugin",
    "verl.plugin.platform",
    "verl.trainer.config",
    "verl.trainer.config.algorithm",
    "verl.utils.dataset",
    "verl.utils.dataset.dataset_utils",
    "verl.utils.device",
    "verl.utils.tensordict_utils",
    "verl.workers.config",
    "verl.workers.config.actor",
    "verl.workers.utils.padding",
)


class Section(dict[str, Any]):
    """Keys of a configuration, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class _StandIn(types.ModuleType):
    """Module whose names are classes of sections."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Section,), {})
        setattr(self, name, value)
        return value


def checkout() -> Path:
    """Return the checkout of verl, or skip the test.

    Stand-ins replace its packages, also those of an installed version that another oracle imports.
    """
    root = checkouts.checkout("verl", _CORE)
    if getattr(sys.modules.get("verl"), "has_stand_ins", False):
        return root
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    import_from(root, *_PACKAGES, "verl.utils")
    vars(sys.modules["verl"])["has_stand_ins"] = True
    for name in _STAND_INS:
        sys.modules[name] = _StandIn(name)
    vars(sys.modules["verl.utils.device"]).update(
        get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu
    )
    padding = sys.modules["verl.workers.utils.padding"]
    vars(padding)["no_padding_2_padding"] = lambda values, data: values
    data = sys.modules["verl.utils.tensordict_utils"]
    vars(data)["get_non_tensor_data"] = lambda data, key, default: default
    groups = importlib.import_module("verl.utils.groupwise")
    vars(sys.modules["verl.utils"]).update(
        as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std
    )
    return root


def core() -> Any:
    """Return the module of estimators and losses."""
    checkout()
    return importlib.import_module("verl.trainer.ppo.core_algos")


def config(changes: Mapping[str, Any]) -> Section:
    """Return verl's configuration with the values of dotted keys."""
    text = (checkout() / _DEFAULTS).read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    for path, value in changes.items():
        *names, last = path.lstrip("+").split(".")
        section = tree
        for name in names:
            section = section.setdefault(name, {})
        section[last] = value
    return _sections(tree)


def _sections(value: Any) -> Any:
    if isinstance(value, dict):
        return Section({key: _sections(child) for key, child in value.items()})
    return scalar(value) if isinstance(value, str) and value[:1].isdigit() else value


def changes(lines: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` words."""
    pairs = (line.split("=", 1) for line in lines)
    return {key: yaml.safe_load(value) for key, value in pairs} | {
        key: float(value) for key, value in (line.split("=", 1) for line in lines) if "e-" in value
    }


class Batch(dict[str, Any]):
    """Tensors by name with the interface of a TensorDict that the functions read."""

    @property
    def batch_size(self) -> tuple[int]:
        return (len(self["response_mask"]),)

    def select(self, *names: str) -> Batch:
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self) -> Batch:
        return self


def loss(
    settings: Section,
    batch: Batch,
    logprobs: Tensor,  # [B, T]
    entropy: Tensor,  # [B, T]
) -> Tensor:
    """Return the loss of the actor for an update of one micro-batch, with its KL and entropy."""
    checkout()
    module = importlib.import_module("verl.workers.utils.losses")
    actor_class = sys.modules["verl.workers.config"].ActorConfig
    actor = actor_class(settings.actor_rollout_ref.actor)
    actor["global_batch_info"] = {}
    data = Batch(batch)
    if not actor["use_kl_loss"]:
        data.pop("ref_log_prob")
    data |= {
        "dp_size": 1,
        "batch_num_tokens": batch["response_mask"].sum(),
        "global_batch_size": len(logprobs),
    }
    value, _ = module.ppo_loss(actor, {"log_probs": logprobs, "entropy": entropy}, data)
    return value


def correct(settings: Section, batch: Batch) -> Batch:
    """Return the batch with the weights of the rollout correction."""
    checkout()
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    correction = settings.algorithm.rollout_correction
    if correction.rollout_is is None:
        return batch
    weights, _ = helper.compute_rollout_correction_weights(
        log_ratio=batch["old_log_probs"] - batch["rollout_log_probs"],
        response_mask=batch["response_mask"].double(),
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
    )
    return Batch({**batch, "rollout_is_weights": weights})


@cache
def _trainer() -> Any:
    """Return functions of the trainer; the module around them needs a cluster."""
    module = core()
    names: dict[str, Any] = {
        "torch": torch,
        "core_algos": module,
        "AdvantageEstimator": module.AdvantageEstimator,
        "masked_mean": importlib.import_module("verl.utils.torch_functional").masked_mean,
        **dict.fromkeys(("DataProto", "AlgoConfig", "Optional"), Section),
    }
    tree = ast.parse((checkout() / _TRAINER).read_text(encoding="utf-8"))
    functions = ("apply_kl_penalty", "compute_advantage")
    tree.body = [node for node in tree.body if getattr(node, "name", "") in functions]
    for node in tree.body:
        assert isinstance(node, ast.FunctionDef)
        for argument in node.args.args:
            argument.annotation = None
        node.returns = None
    exec(compile(tree, str(_TRAINER), "exec"), names)
    return types.SimpleNamespace(**names)


def advantages(settings: Section, batch: Batch, labels: Any) -> Tensor:  # [B, T]
    """Return the advantages of a step from the scores of its responses and their prompts."""
    module, algorithm = _trainer(), settings.algorithm
    data = types.SimpleNamespace(batch=Batch(batch), non_tensor_batch={"uid": labels})
    if algorithm.use_kl_in_reward:
        controller = core().get_kl_controller(algorithm.kl_ctrl)
        data, _ = module.apply_kl_penalty(data, controller, algorithm.kl_penalty)
    else:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    data = module.compute_advantage(
        data,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=settings.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    return data.batch["advantages"]


def value_loss(settings: Section, predictions: Tensor, batch: Batch) -> Tensor:
    """Return the loss of the critic."""
    value, _ = core().compute_value_loss(
        vpreds=predictions,
        returns=batch["returns"],
        values=batch["values"],
        response_mask=batch["response_mask"].double(),
        cliprange_value=settings.critic.cliprange_value,
        loss_agg_mode=_of_actor(settings, "loss_agg_mode"),
        batch_num_tokens=batch["response_mask"].sum(),
        global_batch_size=len(predictions),
        loss_scale_factor=_of_actor(settings, "loss_scale_factor"),
    )
    return value


def _of_actor(settings: Section, key: str) -> Any:
    """Return a setting of the critic, by default the actor's."""
    value = settings.critic[key]
    assert not str(value).startswith("${") or f"actor.{key}" in value
    return settings.actor_rollout_ref.actor[key] if str(value).startswith("${") else value


def score_module(name: str) -> Any:
    """Return a module with the scores of a data source."""
    path = checkout() / _SCORES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
