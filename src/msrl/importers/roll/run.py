"""Keys of a run that every pipeline of ROLL has: trackers, checkpoints, variables.

Source: ROLL 8eb27cc2, roll/configs/base_config.py and roll/utils/tracking.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msrl.config.sources import plain, wrap
from msrl.importers.native_keys import refusal
from msrl.importers.roll.training import put_profile
from msrl.importers.secrets import is_secret
from msrl.importers.sections import Keys
from msrl.importers.table import as_list
from msrl.importers.translation import KeyStatus

_TRACKER_OPTIONS = {  # options of msrl's trackers by the original's arguments
    "swanlab": {
        "logdir": "dir",
        "experiment_name": "name",
        "description": "notes",
        **{key: key for key in ("project", "workspace", "tags")},
    },
    "tensorboard": {"log_dir": "dir"},
    "wandb": {"log_dir": "dir", **{k: k for k in ("project", "name", "tags", "notes", "mode")}},
}
_MODELSCOPE = "to load models of ModelScope, export MSRL_HUB=modelscope before msrl starts"


def put_run(top: Keys) -> None:
    """Translate resumption, trackers, profiles, checkpoints and variables of a run."""
    resume = top.get("resume_from_checkpoint")
    if resume is not None:
        value = resume.value
        if isinstance(value, bool):
            value = "auto" if value else "none"
        top.translation.assign(resume, ["checkpoint.resume"], value)
    _trackers(top)
    put_profile(top)
    config = top.get("checkpoint_config")
    if config is not None:
        is_section = isinstance(config.node.value, dict)
        settings: dict[str, Any] = plain(config.node) if is_section else {}
        if settings.get("output_dir"):
            top.translation.assign(config, ["checkpoint.save"], settings["output_dir"])
        top.translation.record(config, KeyStatus.SAME, "msrl does not upload checkpoints")
    put_variables(top)


def put_variables(keys: Keys) -> None:
    """Translate environment variables, which the original converts to text, without secrets."""
    entry = keys.get("system_envs")
    if entry is None or not isinstance(entry.node.value, dict):
        return
    values: dict[str, Any] = plain(entry.node)
    for name, value in values.items():
        if isinstance(value, (dict, list)):
            keys.translation.add_error(entry, f"{name} must be a text")
    secrets = [name for name, value in values.items() if is_secret(name, value)]
    texts = {str(key): str(value) for key, value in values.items() if key not in secrets}
    why = _MODELSCOPE if texts.get("USE_MODELSCOPE", "0") != "0" else ""
    if secrets:
        text = f"without {', '.join(secrets)}: secrets are not written to files. Export them"
        why = "; ".join(part for part in (text, why) if part)
        keys.translation.remarks.append(f"{entry}: {text} before msrl starts.")
    keys.translation.assign(entry, ["cluster.env"], texts, why=why)


def _trackers(top: Keys) -> None:
    """Translate the trackers that msrl has; metrics.jsonl has the metrics of all."""
    names = as_list(top.value("track_with"))
    trackers = [name for name in names if not refusal("log.trackers", name)]
    _tracker_options(top, trackers)
    if trackers or names == ["stdout"] or not top.get("track_with"):
        return top.assign("track_with", ["log.trackers"], trackers)
    top.translation.set("log.trackers", wrap([], top.origin("track_with")))
    text = "metrics.jsonl and the terminal have the same metrics"
    return top.record("track_with", KeyStatus.SAME, text)


def _tracker_options(top: Keys, trackers: Sequence[str]) -> None:
    """Translate tracker_kwargs, the arguments of the only tracker that the original has."""
    entry = top.get("tracker_kwargs")
    if entry is None or not isinstance(entry.node.value, dict):
        return None
    values: dict[str, Any] = plain(entry.node)
    if not trackers or not values:
        status = KeyStatus.DROPPED if values else KeyStatus.OFF
        text = "metrics.jsonl has the metrics of trackers that msrl does not have"
        return top.translation.record(entry, status, text if values else "")
    name = trackers[0]
    if name == "tensorboard" and values.get("log_dir"):
        values["log_dir"] = f"{values['log_dir']}/{top.value('exp_name')}"
    natives = {key: _TRACKER_OPTIONS[name].get(key, "") for key in values}
    options = {native: values[key] for key, native in natives.items() if native}
    ignored = sorted(key for key, native in natives.items() if not native)
    why = f"without {', '.join(ignored)}" if ignored else ""
    if not options:
        text = f"{', '.join(ignored)}: the environment configures {name}"
        return top.translation.record(entry, KeyStatus.DROPPED, text)
    return top.translation.assign(entry, [f"log.options.{name}"], options, why=why)
