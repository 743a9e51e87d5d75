"""What a training that goes on has in common with the one that saved: model, adapters, and the contents of its data; where weights that
are not in its checkpoints count (the base of adapters, a reference), the contents of these.

A checkpoint remembers it beside the order of the rows (`common.order_state`). What is not as it was would make another training of it
without a word; the schedule of learning rates may change, and that is said.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msrl.checkpoint.mcore.files import TRACKER, iteration_dir
from msrl.checkpoint.mcore.locate import latest_iteration
from msrl.config.schema import Config
from msrl.data.manifest import fingerprint
from msrl.errors import MsrlError
from msrl.files import digest_of_ends
from msrl.models.families import load_shape
from msrl.models.shape import Shape
from msrl.plan.derived import needs_reference
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.trainer.schedule import Schedule
from msrl.workflows.training.settings import hf_files, weights_path

_SFT_KEYS = ("handler", "seq_length", "too_long", "pack", "eval_fraction")  # of data: they make the rows


def remembered(config: Config, schedule: Schedule, *, command: str) -> dict[str, Any]:
    """What a checkpoint of a training by `command` has to hold; reads the beginnings and ends of its data, and of weights that count."""
    prefixes = {"data.train": config.data.train} if config.data.train else {f"data.blend.{prefix}": prefix for prefix in config.data.blend}
    lora = config.train.lora
    keys: dict[str, Any] = {
        "model.path": _described(load_shape(hf_files(config))),
        "model.dtype": config.model.dtype,
        "train.lora.rank": lora.rank,
        **({"train.lora.alpha": lora.alpha, "train.lora.targets": sorted(lora.targets)} if lora.rank is not None else {}),
        **({f"data.{name}": getattr(config.data, name) for name in _SFT_KEYS} if command == "train-sft" else {}),
    }
    contents = {key: fingerprint(prefix) for key, prefix in prefixes.items()}
    if lora.rank is not None or (command == "train-grpo" and needs_reference(config)):
        contents["model.path"] = digest_of_ends(_weight_files(weights_path(config)))
    return {"remembered": {"keys": keys, "contents": contents, "schedule": asdict(schedule)}}


def check(saved: SavedTraining, now: Mapping[str, Any]) -> None:
    """Raises MsrlError that names every key which is not as it was; `now` is what `remembered` says of the training that goes on."""
    before: Mapping[str, Any] = saved.state()["extra"].get("remembered", {"keys": {}, "contents": {}})
    keys, contents = now["remembered"]["keys"], now["remembered"]["contents"]
    changed = [
        f"{key} (was {_text(before['keys'][key])}, is {_text(value)})"
        for key, value in keys.items()
        if key in before["keys"] and before["keys"][key] != value
    ]
    changed += [f"{key} (its contents are others)" for key, value in contents.items() if before["contents"].get(key, value) != value]
    if changed:
        raise MsrlError(
            f"checkpoint.resume: step {saved.step} in {saved.root} is of another training, because of {', '.join(changed)};"
            " set it back, or start a new run with checkpoint.load"
        )


def say_schedule(saved: SavedTraining | None, schedule: Schedule, next_update: int) -> None:
    """Say where the next update's learning rate is not what the checkpoint's own schedule has there, and that a run is too short for its
    warm-up.
    """
    if schedule.warmup_updates + schedule.decay_updates > schedule.num_updates:
        parts = "warm-up" + (" and decay" if schedule.decay_updates else "")
        last = f"its last learning rate is {schedule.at(schedule.num_updates - 1):.1e}"
        print(f"train.optimizer: {parts} take more than the {schedule.num_updates} updates of this run; {last}", file=sys.stderr)
    before = saved.state()["extra"].get("remembered") if saved else None
    if before is None:
        return
    was, now = Schedule(**before["schedule"]).at(next_update), schedule.at(next_update)
    if was != now:
        print(f"the schedule of learning rates has changed: the next update has {now:.2e}, where it was to be {was:.2e}", file=sys.stderr)


def _weight_files(folder: Path) -> list[tuple[str, Path]]:
    """The weights of a Hugging Face folder, or of the latest iteration of an mcore checkpoint, by their names."""
    if (folder / TRACKER).is_file():
        folder = iteration_dir(folder, latest_iteration(folder))
        files = [path for path in folder.rglob("*") if path.is_file()]
    else:
        files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sorted((str(path.relative_to(folder)), path) for path in files)


def _described(shape: Shape) -> str:
    return f"{shape.architecture} of {shape.num_layers} layers, {shape.hidden_size} channels and {shape.vocab_size} tokens"


def _text(value: object) -> str:
    if value is None:
        return "unset"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)
