"""Of ROLL's actor_train what hangs together: the warm-up, adapters, and virtual pipeline stages.

Source: ROLL 1d3b9ae2, roll/configs/model_args.py, and transformers' TrainingArguments.
"""

from __future__ import annotations

from pathlib import Path

from msrl.errors import MsrlError
from msrl.importers.sections import Keys
from msrl.importers.translation import Fate
from msrl.models.families import load_shape


def put_warmup(args: Keys) -> None:
    """warmup_steps, where it is above 0; else warmup_ratio."""
    if args.get("warmup_steps") and args.value("warmup_steps"):
        return args.say("warmup_ratio", Fate.DEAD, "warmup_steps counts")
    if args.get("warmup_ratio"):
        return args.say("warmup_steps", Fate.OFF, "warmup_ratio counts")
    return None


def put_lora(model: Keys) -> None:
    """Adapters are trained where lora_target names layers; alpha is twice the rank where it is not given."""
    targets = model.value("lora_target")
    if targets is None:
        for key in ("lora_rank", "lora_alpha", "lora_dropout"):
            model.say(key, Fate.DEAD, "no lora_target is given")
        return model.say("lora_target", Fate.OFF, "")
    rank = model.value("lora_rank")
    model.take("lora_rank", ["train.lora.rank"], rank)
    model.take("lora_alpha", ["train.lora.alpha"], model.value("lora_alpha") or (2 * rank if isinstance(rank, int) else None))
    if targets in ("all", "all-linear"):
        return model.say("lora_target", Fate.SAME, "adapters of all linear layers are msrl's own default")
    names = [name.strip() for name in targets.split(",")] if isinstance(targets, str) else targets
    return model.take("lora_target", ["train.lora.targets"], names)


def put_virtual_stages(config: Keys, stages: int, model: object) -> None:
    """A number of virtual stages becomes layers of one, where config.json of the model says how many layers there are."""
    key = "virtual_pipeline_model_parallel_size"
    virtual = config.number(key)
    if virtual is None or virtual == 1:
        return None
    try:
        num_layers = load_shape(Path(str(model))).num_layers
    except MsrlError:
        return config.mistake(key, "counts virtual stages, msrl the layers of one; take it away, and set train.parallel.vpp")
    if num_layers % (stages * virtual):
        return config.mistake(key, f"{num_layers} layers are not {stages} * {virtual} stages of as many")
    layers = num_layers // (stages * virtual)
    return config.take(key, ["train.parallel.vpp"], layers, why=f"{num_layers} layers in {stages} * {virtual} stages")
