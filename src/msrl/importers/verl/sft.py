"""Translation of verl's supervised trainer: `verl.trainer.sft_trainer` and its earlier programs.

The loss is the mean over the trained tokens of an update on all ranks, as in msrl. Source: verl
1dda0392, verl/trainer/sft_trainer.py and verl/trainer/config/sft_trainer_engine.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence

from msrl.config.sources import Node, at, children, merge, wrap
from msrl.importers.hydra import Override
from msrl.importers.sections import Keys, settings_of
from msrl.importers.shell import Word, flags
from msrl.importers.translation import KeyStatus, Translation
from msrl.importers.verl.batches import (
    POLICY,
    put_adapters,
    put_files,
    put_optimizer,
)
from msrl.importers.verl.images import put_images, refused_media
from msrl.importers.verl.layout import put_layout, shared_ranks
from msrl.importers.verl.run import put_run
from msrl.importers.verl.sections import FSDP, MODEL, OPTIM, Sections, supervised_paths

PROGRAMS = ("sft_trainer", "sft_trainer_ray", "fsdp_sft_trainer")
_ENGINES = ("fsdp", "megatron", "veomni")
_GROUPS = ("engine", "optim", "model")
_DEFAULTS: dict[tuple[str, str], object] = {
    (OPTIM, "lr"): 1e-3,
    ("trainer", "total_epochs"): 4,
    ("trainer", "project_name"): "gsm8k-sft",
    ("trainer", "experiment_name"): "test",
    ("trainer", "n_gpus_per_node"): 1,
}


def chosen_engine(overrides: Sequence[Override]) -> tuple[str, list[Override]]:
    """Return the engine that `engine=NAME` chooses, and the other changes of keys."""
    names = {
        change.path: str(change.node.value)
        for change in overrides
        if change.path in _GROUPS and change.node is not None and isinstance(change.node.value, str)
    }
    return names.get("engine", "fsdp"), [c for c in overrides if c.path not in names]


def with_devices(tree: Node, launcher: Sequence[Word], name: str) -> Node:
    """Return a tree with the devices of torchrun, unless it names others."""
    texts = [word.text for word in launcher]
    end = texts.index("-m") if "-m" in texts else max(0, len(texts) - 1)
    settings = children(flags(launcher[:end], name, is_complete=False))
    for flag, key in (("nproc_per_node", "n_gpus_per_node"), ("nnodes", "nnodes")):
        node = settings.get(flag)
        if node is not None and isinstance(node.value, int):
            tree = merge(at(f"trainer.{key}", wrap(node.value, node.origin)), tree)
    return tree


def put_supervised(translation: Translation, tree: Node, engine: str) -> None:
    """Translate the keys of the supervised trainer."""
    translation.algorithm = "sft"
    translation.other_defaults = _DEFAULTS
    if engine not in _ENGINES:
        text = f"not supported: the engine {engine}. Import the script of one of "
        translation.errors.append(f"{translation.name}: {text}{', '.join(_ENGINES)}.")
        return
    sections = Sections.of(translation, tree, supervised_paths(engine))
    if feature := refused_media(sections, "sft.data"):
        translation.errors.append(f"{translation.name}: not supported: {feature}")
        return
    sections.is_supervised, sections.is_megatron = True, engine == "megatron"
    earlier = sections[MODEL].get("partial_pretrain")
    if earlier is not None:
        translation.assign(earlier, ["model.path"], earlier.value)
    put_layout(sections)
    put_optimizer(sections, OPTIM, POLICY)
    put_adapters(sections)
    put_images(sections, "sft.data")
    _put_data(sections)
    _put_batches(sections)
    put_run(sections)
    _put_evaluation(sections)
    top = sections["sft.top"]
    if settings_of(top.get("checkpoint")).get("async_save") is True:
        top.assign("checkpoint", ["checkpoint.async"], True)
    top.record("checkpoint", KeyStatus.SAME, "weights, optimizer and random states")
    for _, keys in list(sections):
        keys.apply_remaining()
    translation.fill_defaults(("sft.data",), sections["sft.data"])
    translation.fill_defaults(("trainer",), sections["trainer"])
    if engine == "fsdp":
        translation.fill_defaults((FSDP,), sections[FSDP])


def _put_data(sections: Sections) -> None:
    data, translation = sections["sft.data"], sections.translation
    path = sections[MODEL].value("path") if sections[MODEL].get("path") else None
    for key, native in (("train_files", "data.train"), ("val_files", "data.eval")):
        put_files(data, key, native, path, "sft")
    name = data.value("messages_key")
    if name != "messages":
        column = wrap({"messages": str(name)}, data.origin("messages_key"))
        translation.set("preprocess.map_keys", column)
    data.record("messages_key", KeyStatus.APPLIED, "preprocess.map_keys")
    _put_mask(data)
    kind, entry = data.value("truncation"), data.get("truncation")
    actions = {"error": "refuse", "right": "truncate"}
    if data.value("pad_mode") == "no_padding":
        actions["left"] = "truncate"  # the original reads left with pad_mode=right only
    if kind in actions:
        data.assign("truncation", ["data.too_long"], actions[str(kind)])
    elif entry is not None:
        text = "the original keeps the end of a long row"
        translation.approximate(entry, "data.too_long", "truncate", text)
    neutral = {
        "tools_key": "tools",
        "enable_thinking_key": "enable_thinking",
        "enable_thinking_default": "none",
    }
    for key, value in neutral.items():
        other = data.get(key)
        if other is not None and other.value not in (value, None):
            data.add_error(key, f"not supported: msrl reads {value}")
        data.record(key, KeyStatus.SAME, "the column of the rows")


def _put_mask(data: Keys) -> None:
    """Report the trained tokens that differ; the token ids equal the original's.

    MultiTurnSFTDataset trains all of a rendered answer, msrl up to its end-of-turn token.
    """
    entry = data.get("train_files")
    if entry is not None and entry.value:
        text = (
            "the original also trains what the chat template writes after an end-of-turn token, "
            "such as a line feed"
        )
        data.translation.report_difference(entry, text)


def _put_batches(sections: Sections) -> None:
    data, ranks = sections["sft.data"], shared_ranks(sections)
    tokens = data.number("max_token_len_per_gpu")
    micro = data.get("micro_batch_size_per_gpu", "micro_batch_size")
    native = "train.max_tokens_per_micro_batch"
    if data.switch("use_dynamic_bsz", default=True) and tokens is not None:
        data.assign("max_token_len_per_gpu", [native], tokens * ranks)
        data.record("use_dynamic_bsz", KeyStatus.APPLIED, native)
    elif micro is not None:
        sections.translation.assign(micro, ["train.micro_batch"], micro.value)
    data.record("use_dynamic_bsz", KeyStatus.OFF, "")
    for key in ("max_token_len_per_gpu", "micro_batch_size_per_gpu", "micro_batch_size"):
        data.record(key, KeyStatus.DEAD, "not read with this value of use_dynamic_bsz")


def _put_evaluation(sections: Sections) -> None:
    trainer, data = sections["trainer"], sections["sft.data"]
    every = trainer.number("test_freq")
    if data.get("val_files") and data.value("val_files") and (every or 0) > 0:
        trainer.assign("test_freq", ["eval.every_steps"], every)
    trainer.record("test_freq", KeyStatus.SAME, "msrl evaluates after the last step")
