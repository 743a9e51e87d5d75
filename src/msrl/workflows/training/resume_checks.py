"""Resume checks: a resumed training has the model, adapters and data of its checkpoint.

Weights that checkpoints do not hold (the base of adapters, a reference) are compared by contents
too. A checkpoint stores these values beside the order of the rows. The learning rate schedule
may change; a change is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msrl.checkpoint.mcore.files import TRACKER, iteration_dir
from msrl.checkpoint.mcore.locate import latest_iteration
from msrl.config.messages import written
from msrl.config.schema import Config
from msrl.data.manifest import fingerprint
from msrl.data.order import BlendOrder, RowOrder
from msrl.errors import MsrlError
from msrl.files import digest_of_ends
from msrl.limits import print_note
from msrl.models.shape import Shape
from msrl.plan.derived import preference_plan
from msrl.plan.replay import recorded_files
from msrl.plan.run_plan import RunPlan
from msrl.registry import PREFERENCES
from msrl.registry.declarations import declaration
from msrl.trainer.checkpointing.resume import SavedTraining, check_room, resume_from
from msrl.trainer.schedule import Schedule

_SFT_KEYS = (
    "handler",
    "seq_length",
    "too_long",
    "pack",
    "eval_fraction",
    "eval_rows",
)  # keys of `data` that determine the rows
_TRAINING_DATA = ("data.train", "data.blend.")


def checkpoint_and_state(
    plan: RunPlan, order: RowOrder | BlendOrder, schedule: Schedule, num_steps: int
) -> tuple[SavedTraining | None, dict[str, Any]]:
    """Return the checkpoint to resume from and the state for the resume checks of later runs.

    Raises:
        MsrlError: The run cannot resume from the checkpoint, or cannot save into its folder.
    """
    resume, notes = resume_from(plan.config.checkpoint.resume, plan.checkpoint_dir)
    for note in notes:
        print_note(note)
    if resume and resume.step > num_steps:
        raise MsrlError(
            f"train.steps={num_steps}: the checkpoint in {resume.root} is at step {resume.step} "
            "already. Raise train.steps to resume."
        )
    state = {**order_state(order), **checked_values(plan, schedule)}
    if resume:
        if _was_replay(resume) == plan.is_replay:  # otherwise `check` reports it
            check_order(resume, order, _order_keys(plan))
        check(resume, state)
    check_room(plan.checkpoint_dir, resume)
    return resume, state


def order_state(order: RowOrder | BlendOrder) -> dict[str, Any]:
    """Return the data order for a checkpoint's state.

    With the step it determines the position in the data.
    """
    return {"order": asdict(order)}


def _was_replay(saved: SavedTraining) -> bool:
    """Return True if the run of a checkpoint trained from recorded rollouts."""
    keys = saved.state()["extra"].get("remembered", {}).get("keys", {})
    return keys.get("rollout.replay.path") is not None


def _order_keys(plan: RunPlan) -> dict[str, str]:
    """Return the keys that determine each value of the order of the rows."""
    return {
        "num_rows": "rollout.replay.path" if plan.is_replay else "data.train",
        "weights": "data.blend",
        "rows_per_step": "rollout.prompts_per_step" if plan.has_rollouts else "train.global_batch",
        "seed": "run.seed",
        "shuffle": "rollout.replay.order" if plan.is_replay else "data.shuffle",
    }


def check_order(
    saved: SavedTraining, order: RowOrder | BlendOrder, keys: Mapping[str, str]
) -> None:
    """Check that a resumed run reads the rows that the saved run would have read next.

    `keys` are the configuration keys of the values of the order.

    Raises:
        MsrlError: with every key that has changed.
    """
    current = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(order).items()
    }
    before = saved.state()["extra"].get("order", current)
    unit = {"num_rows": " rows", "rows_per_step": " rows"}
    changed = [
        f"{keys[name]} (was {written(before.get(name))}{unit.get(name, '')}, is {written(now)})"
        for name, now in current.items()
        if before.get(name) != now
    ]
    if changed:
        raise MsrlError(
            f"checkpoint.resume: cannot resume from step {saved.step} in {saved.root} with the "
            "same rows, because these have changed:"
            f" {', '.join(changed)}. Restore them, or start a new run with checkpoint.load."
        )


def checked_values(plan: RunPlan, schedule: Schedule) -> dict[str, Any]:
    """Return the values that a checkpoint of this run stores for later checks.

    Reads the beginning and end of data and weight files.
    """
    config = plan.config
    names = (
        {"data.train": config.data.train}
        if config.data.train
        else {f"data.blend.{name}": name for name in config.data.blend}
    )
    lora = config.train.lora
    keys: dict[str, Any] = {
        "model.path": _describe(plan.shape),
        "model.dtype": config.model.dtype,
        "train.lora.rank": lora.rank,
        **(
            {
                "train.lora.alpha": lora.alpha,
                "train.lora.targets": sorted(lora.targets),
                "train.lora.load": lora.load is not None,
            }
            if lora.rank is not None
            else {}
        ),
        **(
            {f"data.{name}": getattr(config.data, name) for name in _SFT_KEYS}
            if not plan.has_rollouts
            else {}
        ),
    }
    if plan.has_rollouts:
        keys["rollout.replay.path"] = "a record" if plan.is_replay else None
        for name in ("sampler", "level_column"):
            keys[f"data.curriculum.{name}"] = getattr(config.data.curriculum, name)
    if plan.command == "train-dpo":
        keys |= _preference_values(config)
    if plan.is_reward_model:
        model = config.algo.reward_model
        keys["algo.reward_model.kind"] = model.kind
        keys["algo.reward_model.center_coef"] = model.center_coef
        keys["algo.reward_model.reward_tokens"] = list(model.reward_tokens)
    if plan.needs_reference:
        keys["cluster.roles.reference.load"] = "set" if plan.has_own_reference else None
    teachers = config.algo.distill.teachers
    kinds = ["server" if teacher.model is None else "model" for teacher in teachers]
    keys["algo.distill.teachers"] = kinds or None
    if plan.critic is not None:
        is_separate = plan.separate_model("critic") is not None
        keys["cluster.roles.critic.devices"] = "separate" if is_separate else "shared"
    if plan.command in ("train-dpo", "train-rm") and config.data.eval is not None:
        names["data.eval"] = config.data.eval  # the best evaluation has the lowest loss
    contents = {key: fingerprint(plan.prefix(name)) for key, name in names.items()}
    if plan.is_replay:
        files = recorded_files(str(config.rollout.replay.path))
        contents["rollout.replay.path"] = digest_of_ends([(path.name, path) for path in files])
    contents |= _digests_of_models(plan)
    return {"remembered": {"keys": keys, "contents": contents, "schedule": asdict(schedule)}}


def _digests_of_models(plan: RunPlan) -> dict[str, str]:
    """Return the digests of weights that checkpoints do not hold, by key."""
    contents = dict[str, str]()
    if plan.train.lora.rank is not None or (plan.needs_reference and not plan.has_own_reference):
        contents["model.path"] = weights_digest(plan.model.weights)
    if plan.start_adapters is not None:
        contents["train.lora.load"] = weights_digest(plan.start_adapters)
    if plan.reference is not None and plan.has_own_reference:
        key = "cluster.roles.reference.load"
        contents[key] = weights_digest(plan.reference.weights)
    for number, section in enumerate(plan.config.algo.distill.teachers):
        if section.model is not None:
            weights = plan.teachers[section.model].weights
            contents[f"algo.distill.teachers.{number}.model"] = weights_digest(weights)
    return contents


def _preference_values(config: Config) -> dict[str, Any]:
    """Return the values that determine the loss of train-dpo."""
    preference = preference_plan(config)
    plugin = declaration(PREFERENCES, preference.name, key="algo.preference.loss")
    options = {**plugin.option_defaults("preference_loss"), **preference.options}
    return {
        "algo.preference.loss": preference.name,
        "algo.preference.beta": preference.beta,
        "algo.preference.sft_coef": preference.sft_coef,
        **{f"algo.preference.options.{name}": value for name, value in options.items()},
    }


def check(saved: SavedTraining, now: Mapping[str, Any]) -> None:
    """Compare a checkpoint with the values that `checked_values` returns for the resumed training.

    Raises:
        MsrlError: with every key that has changed.
    """
    before: Mapping[str, Any] = saved.state()["extra"].get(
        "remembered", {"keys": {}, "contents": {}}
    )
    keys, contents = now["remembered"]["keys"], now["remembered"]["contents"]
    contents_before = _by_position(before["contents"], contents)
    changed = [
        f"{key} (was {_text(before['keys'][key])}, is {_text(value)})"
        for key, value in keys.items()
        if key in before["keys"] and before["keys"][key] != value
    ]
    changed += [
        f"{key} (its contents have changed)"
        for key, value in contents.items()
        if contents_before.get(key, value) != value
    ]
    if changed:
        raise MsrlError(
            f"checkpoint.resume: cannot resume from step {saved.step} in {saved.root}, because "
            f"these have changed: {', '.join(changed)}."
            " Restore them, or start a new run with checkpoint.load."
        )


def _by_position(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return earlier contents in which datasets have the key of the one that replaces them now.

    A dataset may have moved, and the order of a blend's datasets determines its rows.
    """
    names = [key for key in now if key.startswith(_TRAINING_DATA)]
    values = [value for key, value in before.items() if key.startswith(_TRAINING_DATA)]
    return {**before, **dict(zip(names, values, strict=False))}


def report_schedule(saved: SavedTraining | None, schedule: Schedule, next_update: int) -> None:
    """Print a note if the schedule has changed since the checkpoint or does not fit the run.

    A run that is shorter than its warm-up does not fit.
    """
    if schedule.warmup_updates + schedule.decay_updates > schedule.num_updates:
        phases = "warm-up and decay take" if schedule.decay_updates else "warm-up takes"
        last = f"its last learning rate is {schedule.at(schedule.num_updates - 1):.1e}"
        print_note(
            f"train.optimizer: {phases} more than the {schedule.num_updates} updates of this "
            f"run; {last}"
        )
    before = saved.state()["extra"].get("remembered") if saved else None
    if before is None:
        return
    was, now = Schedule(**before["schedule"]).at(next_update), schedule.at(next_update)
    if was != now:
        print_note(
            f"The learning rate schedule has changed: the next update uses {now:.2e} instead of "
            f"{was:.2e}"
        )


def weights_digest(folder: Path) -> str:
    """Return a digest that distinguishes the weights in a folder from others."""
    return digest_of_ends(_weight_files(folder))


def _weight_files(folder: Path) -> list[tuple[str, Path]]:
    """Return the weight files of a model with their names.

    `folder` is a Hugging Face folder, or an mcore checkpoint whose latest iteration is used.
    """
    if (folder / TRACKER).is_file():
        folder = iteration_dir(folder, latest_iteration(folder))
        files = [path for path in folder.rglob("*") if path.is_file()]
    else:
        files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sorted((str(path.relative_to(folder)), path) for path in files)


def _describe(shape: Shape) -> str:
    sizes = f"{shape.num_layers} layers, {shape.hidden_size} channels and {shape.vocab_size} tokens"
    return f"{shape.architecture} of {sizes}"


def _text(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
