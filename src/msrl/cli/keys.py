"""Mapping of options to configuration keys, which depends on the command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

_ALL_COMMANDS = {
    "platform": "cluster.platform",
    "resume": "checkpoint.resume",
    "devices": "cluster.devices_per_node",
}
_TRAINING = {
    "model": "model.path",
    "data": "data.train",
    "name": "run.name",
    "steps": "train.steps",
    "lr": "train.optimizer.lr",
    "tp": "train.parallel.tp",
    "pp": "train.parallel.pp",
}
_ENGINE = {"tp": "rollout.engine.tp"}
_EVALUATION = {
    **_ENGINE,
    "data": "data.eval",
    "prompts": "eval.prompts",
    "num_samples": "eval.samples_per_prompt",
    "max_tokens": "eval.max_response_tokens",
    **{
        name: f"eval.sampling.{name}"
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")
    },
}
_KEYS = {
    "train-sft": _TRAINING,
    "train-dpo": _TRAINING,
    "train-rm": _TRAINING,
    "train-grpo": _TRAINING,
    "train-distill": _TRAINING,
    "generate": _ENGINE,
    "chat": _ENGINE,
    "serve": _ENGINE,
    "eval": _EVALUATION,
}
_SECTIONS = {
    "convert-ckpt": "convert",
    "preprocess": "preprocess",
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "eval": "evaluate",
}
_NO_KEYS = frozenset(
    {
        "config",
        "config_name",
        "sets",
        "dry_run",
        "verbose",
        "json",
        "imports",
        "approximate",
        "force",
        "new_token",
        "command",
        "folder",
        "more_input",
        "model_argument",
        "more_models",
        "help",
    }
)
ANY_COMMAND = ("config", "doctor")  # --for selects the command whose options they accept


def option_key(command: str, parameter: str) -> str | None:
    """Return the dotted key that a parameter of a command sets, or None if it sets no key."""
    if parameter in _NO_KEYS:
        return None
    if parameter in _ALL_COMMANDS:
        return _ALL_COMMANDS[parameter]
    key = _KEYS.get(command, {}).get(parameter)
    section = _SECTIONS.get(command)
    return key or (f"{section}.{parameter}" if section else None)


def reads_section(command: str, section: str) -> bool:
    """Return True if a command may read a section.

    Trainings and `eval` read all common ones, and that of `preprocess` for data in rows.
    """
    own = _SECTIONS.get(command)
    is_common = section == "preprocess" or section not in _SECTIONS.values()
    is_training = command in _KEYS and own in (None, "evaluate")
    return section == own or (is_training and is_common)


def top_command(ctx: typer.Context) -> str:
    """Return the name of the command below `msrl` of this call; empty for `msrl` itself."""
    name = ""
    node: Any = ctx
    while node is not None and node.parent is not None:
        name = node.info_name or ""
        node = node.parent
    return name


def configured_command(ctx: typer.Context) -> str:
    """Return the command whose settings the options set: `train-sft` in `msrl train-sft`.

    For `config` and `doctor`, this is the command of --for.
    """
    command = top_command(ctx)
    if command not in ANY_COMMAND:
        return command
    target = ctx.params.get("command") or "train-sft"
    # The parameter is an enum in some versions of typer and text in others.
    return str(getattr(target, "value", target))
