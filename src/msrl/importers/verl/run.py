"""Translation of verl's trainer: the length of a run, its files and trackers, and the critic.

Source: verl 1dda0392, verl/trainer/ppo/v1/trainer_base.py and verl/trainer/config/critic.
"""

from __future__ import annotations

from msrl.config.sources import wrap
from msrl.importers.critic import NOT_GAE
from msrl.importers.native_keys import refusal
from msrl.importers.sections import Keys, settings_of
from msrl.importers.table import as_list
from msrl.importers.translation import KeyStatus, SourceKey
from msrl.importers.verl.algorithm import MEANS, OWN_MEANS, SUMS
from msrl.importers.verl.batches import CRITIC, put_optimizer
from msrl.importers.verl.sections import ACTOR, LOSS, Sections

# Options of msrl's trackers that are verl's project.
_PROJECTS = {
    "clearml": "project",
    "mlflow": "experiment",
    "swanlab": "project",
    "trackio": "project",
    "wandb": "project",
}
_VALUE_MODE = "algo.value.aggregate"
_CRITIC_OPTIM = "critic.optim"


def put_run(sections: Sections) -> None:
    """Translate the length of the run, its checkpoints and its trackers."""
    trainer = sections["trainer"]
    put_length(trainer)
    every = trainer.number("save_freq")
    if (every or 0) > 0:
        trainer.assign("save_freq", ["checkpoint.every_steps"], every)
    trainer.record("save_freq", KeyStatus.SAME, "msrl saves after the last step")
    put_resumption(trainer)
    if trainer.value("remove_previous_ckpt_in_save") is True:
        trainer.assign("remove_previous_ckpt_in_save", ["checkpoint.keep"], 1)
    put_trackers(trainer)
    mode = trainer.get("v1")
    kind = settings_of(mode).get("trainer_mode", "sync")
    if mode is not None and kind != "sync":
        text = f"trainer_mode={kind}: not supported: generation while the policy trains. Use "
        trainer.add_error("v1", text + "rollout.async (docs/asynchronous.md).")
    trainer.record("v1", KeyStatus.SAME, "generation and training alternate")
    _put_saving(sections)


def _put_saving(sections: Sections) -> None:
    entry = sections[ACTOR].get("checkpoint")
    if entry is None:
        return
    if settings_of(entry).get("async_save") is True:
        sections.translation.assign(entry, ["checkpoint.async"], True)
    text = "every checkpoint has weights, optimizer and random states"
    sections.translation.record(entry, KeyStatus.SAME, text)


def put_length(trainer: Keys) -> None:
    """Translate the length: steps if they are set, else epochs."""
    steps = trainer.get("total_training_steps")
    if steps is not None and steps.value is not None:
        trainer.translation.assign(steps, ["train.steps"], steps.value)
        text = "total_training_steps ends the run"
        return trainer.record("total_epochs", KeyStatus.SAME, text)
    return trainer.put("total_epochs", "train.epochs")


def put_resumption(trainer: Keys) -> None:
    """Translate the checkpoint that a run starts from."""
    mode, path = trainer.value("resume_mode"), trainer.get("resume_from_path")
    names = {"auto": "auto", "disable": "none"}
    if mode == "resume_path" and path is not None and path.value:
        text = "a checkpoint of msrl: those of the original are not read"
        trainer.translation.assign(path, ["checkpoint.resume"], path.value, why=text)
        trainer.record("resume_mode", KeyStatus.APPLIED, "checkpoint.resume")
    elif mode in names:
        trainer.assign("resume_mode", ["checkpoint.resume"], names[str(mode)])
    else:
        trainer.add_error("resume_mode", "must be auto, disable, or resume_path with a path")
    trainer.record("resume_from_path", KeyStatus.DEAD, "read with resume_mode=resume_path only")


def put_trackers(trainer: Keys) -> None:
    """Translate the trackers that msrl has; metrics.jsonl has the metrics of all."""
    names = [str(name) for name in as_list(trainer.value("logger"))]
    trackers = [name for name in names if not refusal("log.trackers", name)]
    missing = [name for name in names if name not in trackers and name != "console"]
    why = f"without {', '.join(missing)}: metrics.jsonl has all metrics" if missing else ""
    trainer.assign("logger", ["log.trackers"], trackers, why=why)
    project = trainer.value("project_name")
    projects = [name for name in trackers if name in _PROJECTS]
    natives = [f"log.options.{name}.{_PROJECTS[name]}" for name in projects]
    if natives and trainer.get("project_name"):
        trainer.assign("project_name", natives, project)
    trainer.record("project_name", KeyStatus.DEAD, "read by trackers that msrl does not use")


# --- The critic ---


def put_critic(sections: Sections) -> None:
    """Translate the critic, which gae has unless `critic.enable` says otherwise."""
    critic, model = sections["critic"], sections["critic.model"]
    is_gae = sections["algorithm"].value("adv_estimator") == "gae"
    enable = critic.get("enable")
    if enable is not None and enable.value is not None and enable.value is not is_gae:
        critic.add_error("enable", f"not supported: msrl has a critic with gae only, here {is_gae}")
    critic.record("enable", KeyStatus.OFF, "")
    engine = [keys for name, keys in sections if name.startswith("critic.") and keys is not model]
    if not is_gae:
        for keys in (critic, model, *engine):
            for entry in keys:
                keys.translation.record(entry, KeyStatus.DEAD, NOT_GAE)
        return
    put_optimizer(sections, _CRITIC_OPTIM, CRITIC)
    actor = sections[ACTOR]
    for key in ("ppo_mini_batch_size", "ppo_epochs", "shuffle"):
        entry = critic.get(key)
        if entry is not None and entry.value != actor.value(key):
            critic.add_error(
                key, f"not supported: the critic has that of the actor, {actor.value(key)}"
            )
        critic.record(key, KeyStatus.SAME, "that of the actor")
    _put_critic_loss(sections)
    warmup = sections["trainer"].number("critic_warmup")
    if warmup is not None and warmup > 1:
        why = "the original also trains the policy in that step"
        native = "algo.value.warmup_steps"
        sections["trainer"].assign("critic_warmup", [native], warmup - 1, why=why)
    sections["trainer"].record("critic_warmup", KeyStatus.OFF, "")
    text = "a new critic of msrl predicts 0, that of the original a random number"
    critic.translation.remarks.append(f"{critic.translation.name}: {text}")


def _put_critic_loss(sections: Sections) -> None:
    critic, actor = sections["critic"], sections[ACTOR]
    entry = critic.get("loss_agg_mode") or actor.get("loss_agg_mode")
    if entry is not None and entry.value in SUMS:
        _put_value_sum(sections, entry)
    elif entry is not None and entry.value in MEANS:
        critic.translation.set(_VALUE_MODE, wrap(entry.value, entry.origin))
    elif entry is not None and entry.section == "critic":
        critic.add_error("loss_agg_mode", "not a mode of the original")
    critic.record("loss_agg_mode", KeyStatus.APPLIED, _VALUE_MODE)
    text = "read with loss_agg_mode=seq-mean-token-sum-norm only"
    critic.record("loss_scale_factor", KeyStatus.DEAD, text)
    clip = critic.get("grad_clip")
    limit = sections[f"{ACTOR}.optim"].value("clip_grad")
    if clip is not None and clip.value != limit:
        critic.add_error("grad_clip", f"not supported: the critic has that of the policy, {limit}")
    critic.record("grad_clip", KeyStatus.SAME, "that of the policy")


def _put_value_sum(sections: Sections, entry: SourceKey) -> None:
    """Divide the value loss as the policy's loss, whose constant it shares."""
    critic, actor = sections["critic"], sections[ACTOR]
    own = critic.get("loss_scale_factor")
    factor = actor.value("loss_scale_factor")
    is_alike = entry.value == actor.value("loss_agg_mode") and (own is None or own.value == factor)
    if is_alike and sections[LOSS].value("loss_mode") not in OWN_MEANS:
        critic.translation.set(_VALUE_MODE, wrap("seq-sum-over-constant", entry.origin))
    else:
        text = "msrl divides the value loss by the constant of the policy's loss only"
        critic.translation.approximate(entry, _VALUE_MODE, "token-mean", text)
    critic.record("loss_scale_factor", KeyStatus.APPLIED, "algo.aggregate.constant")


def record_other_engines(sections: Sections) -> None:
    """Record the engines of reference and critic, which have the layout of the policy."""
    for name, keys in sections:
        role = name.partition(".")[2].partition(".")[0] if name.startswith("actor_") else "critic"
        if name.startswith(("actor_rollout_ref.ref.", "critic.")) and name not in ("critic.model",):
            text = f"the {'reference' if role == 'ref' else role} has the layout of the policy"
            for entry in keys:
                keys.translation.record(entry, KeyStatus.SPEED, text)


def put_reference(sections: Sections) -> None:
    """Translate other weights of the reference than the initial ones of the policy."""
    keys = sections["actor_rollout_ref.ref"]
    entry = keys.get("model")
    if entry is None:
        return None
    path = settings_of(entry).get("path")
    if path:
        keys.translation.set("cluster.roles.reference.load", wrap(path, entry.origin))
        text = "cluster.roles.reference.load"
        return keys.translation.record(entry, KeyStatus.APPLIED, text)
    return keys.translation.record(entry, KeyStatus.OFF, "")
