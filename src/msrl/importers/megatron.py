"""Megatron training keys that all generations of MindSpeed files share.

They cover batches, checkpoints, the optimizer and the parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msrl.config.sources import Node, wrap
from msrl.errors import MsrlError, nearest
from msrl.importers.conversions import CONVERSIONS, int_list
from msrl.importers.placeholders import is_placeholder
from msrl.importers.routers import WITHOUT_GROUPS, put_router
from msrl.importers.sections import Keys, same_path
from msrl.importers.table import canonical
from msrl.importers.translation import KeyStatus, SourceKey, Translation
from msrl.models.families import load_shape
from msrl.models.shape import Shape


def with_model(
    keys: list[SourceKey],
    models: Mapping[str, Node],
    translation: Translation,
    section: str = "megatron",
) -> list[SourceKey]:
    """Return the keys of the model file that `model` names, then `keys`, which override them.

    Both belong to the same section of the table.
    """
    chosen = next((entry for entry in reversed(keys) if entry.key == "model"), None)
    if chosen is None:
        return keys
    name = canonical(str(chosen.value))
    if name not in models:
        if models:
            translation.add_error(
                chosen, f"no file in `defaults` describes this model; {nearest(name, models)}"
            )
        else:
            translation.record(
                chosen,
                KeyStatus.SAME,
                "config.json of the model contains the properties of the model file",
            )
        return keys
    translation.record(
        chosen, KeyStatus.SAME, "its properties are checked against config.json of the model"
    )
    return [*translation.entries(models[name], section, name), *keys]


HYBRID_CP = ("hybrid_cp_algo", "hybrid_adaptive_cp_algo")


class MegatronKeys:
    """Rules for Megatron keys that depend on each other."""

    def __init__(self, translation: Translation, keys: Keys) -> None:
        self.translation = translation
        self.keys = keys

    def apply(self, *, by_tokens: bool) -> None:
        """Translate the keys of an RL training.

        With `by_tokens`, a token budget defines the micro-batches, and micro_batch_size is not
        read.
        """
        self._require_keys()
        self._checkpoint()
        self._tokenizer()
        self._optimizer()
        self._parallel()
        self._dropout()
        put_router(self.keys, has_experts=self._has_experts())
        if by_tokens:
            self.keys.record(
                "micro_batch_size", KeyStatus.DEAD, "use_dynamic_bsz splits micro-batches by tokens"
            )
        else:
            entry = self.keys.get("micro_batch_size")
            if entry is not None:
                self.translation.assign(entry, ["train.micro_batch"], entry.value)
        self._lora()

    def apply_supervised(self) -> None:
        """Translate the flags of a supervised training."""
        self._require_keys()
        self._checkpoint()
        self._tokenizer()
        self._optimizer()
        self._parallel()
        self._warmup()
        self._dropout()
        self._lora()
        self.apply_shapes()

    def _require_keys(self) -> None:
        """Require the keys that have a default in msrl but none in the original."""
        required = (
            ("lr", "the peak learning rate"),
            ("global_batch_size", "the number of rows per step"),
        )
        for key, meaning in required:
            if self.keys.value(key) is None:
                entry = self.keys.get(key)
                where = self.translation.name if entry is None else entry.origin
                self.translation.errors.append(f"{where}: {key}: missing. Set {meaning}.")

    def _checkpoint(self) -> None:
        """Translate load to a resume (without finetune, with the optimizer) or to weights only.

        With `lora_load`, the original resumes the training of these adapters, on the weights of
        `load`.
        """
        keys = self.keys
        load, save, adapters = keys.get("load"), keys.get("save"), loaded_adapters(keys)
        resumes = is_resumed(keys)
        if resumes and keys.value("no_load_rng") is True:
            keys.add_error(
                "no_load_rng",
                "a resumed run restores its random state. "
                "Set it to false, or set no_load_optim to true.",
            )
        resumed = (adapters or load) if resumes else None
        if load is not None and load is not resumed:
            self.translation.assign(load, ["checkpoint.load"], load.value)
            if save is not None and same_path(save.value, load.value):
                reason = "checkpoints are saved in the run folder, because save equals load"
                self.translation.record(save, KeyStatus.SAME, reason)
        text = "nothing is loaded"
        if load is not None:
            text = "checkpoint.load: weights only, from step 0"
        if resumed is not None:
            self.translation.assign(resumed, ["checkpoint.resume"], resumed.value)
            text = f"checkpoint.resume: {resumed.key}, with its optimizer"
        elif adapters is not None:
            self.translation.assign(adapters, ["train.lora.load"], adapters.value)
        for key in ("finetune", "no_load_optim", "no_load_rng"):
            keys.record(key, KeyStatus.APPLIED, text)

    def _tokenizer(self) -> None:
        entry = self.keys.get("tokenizer_name_or_path")
        files = self.keys.get("tokenizer_model")
        if entry is None:
            return self._tokenizer_model(files)
        if files is not None:
            reason = "tokenizer_name_or_path is the folder of the tokenizer"
            self.translation.record(files, KeyStatus.SAME, reason)
        return self.translation.assign(
            entry,
            ["model.tokenizer", "model.path"],
            entry.value,
            why="for config.json and tokenizer; weights come from load",
        )

    def _tokenizer_model(self, entry: SourceKey | None) -> None:
        """Translate the file of a tokenizer, as in Llama2Tokenizer, to its folder."""
        if entry is None:
            return
        path = Path(str(entry.value))
        is_file = path.suffix in (".model", ".json") or path.name.startswith("tokenizer")
        folder = str(path.parent if is_file and not is_placeholder(entry.value) else path)
        why = "the folder of the tokenizer file"
        self.translation.assign(entry, ["model.tokenizer", "model.path"], folder, why=why)

    def _optimizer(self) -> None:
        names = ("adam_beta1", "adam_beta2")
        betas = [self.keys.value(name) for name in names]
        entries = [entry for name in names if (entry := self.keys.get(name)) is not None]
        if not entries:
            self.translation.set_default("train.optimizer.betas", betas)
        for entry in entries:
            self.translation.assign(entry, ["train.optimizer.betas"], betas)
        for name in ("lr_warmup_fraction", "lr_warmup_iters"):
            entry = self.keys.get(name)
            if entry is not None and entry.value:  # Megatron begins at a learning rate of 0
                self.translation.set("train.optimizer.warmup_from_zero", wrap(True, entry.origin))

    def _warmup(self) -> None:
        """Check that warmup is either a fraction or a number of updates, as Megatron requires."""
        fraction, number = self.keys.get("lr_warmup_fraction"), self.keys.get("lr_warmup_iters")
        if fraction is None or number is None or fraction.value is None:
            return
        if number.value:
            self.translation.add_error(
                number, "conflicts with lr_warmup_fraction. Set only one of both."
            )
        self.translation.record(number, KeyStatus.OFF, "lr_warmup_fraction is used")

    def _parallel(self) -> None:
        if self.keys.value("context_parallel_algo") not in HYBRID_CP:
            reason = "context_parallel_algo does not exchange heads within smaller groups"
            self.keys.record("ulysses_degree_in_cp", KeyStatus.DEAD, reason)
        sequence = self.keys.get("sequence_parallel")
        if sequence is None:
            return
        if self.keys.value("tensor_model_parallel_size") == 1 and sequence.value is True:
            self.translation.record(
                sequence,
                KeyStatus.OFF,
                "sequence parallelism has no effect with one tensor-parallel rank",
            )
        else:
            self.translation.assign(sequence, ["train.parallel.sp"], sequence.value)

    def _dropout(self) -> None:
        for key in ("attention_dropout", "hidden_dropout"):
            entry = self.keys.get(key)
            if entry is None:
                self.translation.remarks.append(
                    f"{self.translation.name}: {key} is not set: the original trains with dropout "
                    "0.1, msrl without dropout"
                )
            elif entry.value not in (0, 0.0):
                text = "must be 0: msrl trains without dropout, which changes log-probabilities"
                self.translation.difference(entry, text)

    def _has_experts(self) -> bool:
        """Return True if the file or config.json of the model names experts."""
        if self.keys.value("num_experts"):
            return True
        shape = self._shape()
        return shape is not None and shape.moe is not None

    def _lora(self) -> None:
        if not has_adapters(self.keys):
            for key in ("lora_r", "lora_alpha", "lora_load"):
                self.keys.record(key, KeyStatus.DEAD, "lora_target_modules is not set")
            return
        for key, native in (("lora_r", "train.lora.rank"), ("lora_alpha", "train.lora.alpha")):
            self.keys.put(key, native)

    def apply_shapes(self) -> None:
        """Check that the model properties in the file equal a readable config.json."""
        shape = self._shape()
        for entry in self.keys:
            name = self.translation.row(entry).shape
            if not name:
                continue
            self._check_shape(entry, name, shape)

    def _check_shape(self, entry: SourceKey, name: str, shape: Shape | None) -> None:
        expected = _property(shape, name)
        empty = self._num_empty_layers() if name == "num_layers" else 0
        if empty and isinstance(expected, int):
            expected += empty
        kind = self.keys.value("moe_router_load_balancing_type")
        if name in ("moe.num_groups", "moe.num_chosen_groups") and kind in WITHOUT_GROUPS:
            reason = f"moe_router_load_balancing_type is {kind}, which has no groups"
            self.translation.record(entry, KeyStatus.DEAD, reason)
        elif name == "ffn_hidden_size" and shape is not None and all(shape.mixture_layers):
            reason = "every layer has experts, whose size is moe_ffn_hidden_size"
            self.translation.record(entry, KeyStatus.DEAD, reason)
        elif expected is None or self.translation.row(entry).is_off(entry.value):
            reason = "read from config.json of the model"
            self.translation.record(entry, KeyStatus.SAME, reason)
        elif entry.value == expected:
            reason = "equals config.json of the model"
            self.translation.record(entry, KeyStatus.SAME, reason)
        else:
            self.translation.add_error(
                entry,
                f"config.json of the model has {expected}{' with noop_layers' if empty else ''}. "
                "Remove the line or name another model.",
            )

    def _num_empty_layers(self) -> int:
        """Return the number of noop_layers, which num_layers of the original includes."""
        noop = self.keys.value("noop_layers")
        try:
            return 0 if noop is None else len(set(int_list(noop)))
        except (ValueError, TypeError):
            return 0  # the conversion of noop_layers reports it

    def _shape(self) -> Shape | None:
        for path in self._config_dirs():
            if (path / "config.json").is_file():
                try:
                    return load_shape(path)
                except MsrlError:
                    return None  # the checks of the native configuration report it
        return None

    def _config_dirs(self) -> Iterator[Path]:
        for key in ("load", "tokenizer_name_or_path"):
            value = self.keys.value(key)
            if isinstance(value, str):
                yield from (Path(value), Path(value) / "hf")


PROPERTIES = {
    "rope_theta": "rotary.theta",
    "linear_key_head_dim": "delta.key_head_dim",
    "linear_value_head_dim": "delta.value_head_dim",
    "linear_num_key_heads": "delta.num_key_heads",
    "linear_num_value_heads": "delta.num_value_heads",
    "linear_conv_kernel_dim": "delta.kernel_size",
}
"""Properties of a shape by their names in config.json, which the tables have."""


def _property(shape: Shape | None, name: str) -> object:
    """Return a property of a model such as `moe.num_experts`; None if the model has none."""
    if shape is None or (shape.mla and name in ("head_dim", "qk_norm", "rotary_share")):
        return None
    if name == "rotary_share":
        return shape.rotary.channels / shape.head_dim
    if name == "rope_scaling.kind":
        kind = type(shape.rotary.scaling).__name__
        return "none" if shape.rotary.scaling is None else kind.removesuffix("RopeScaling").lower()
    value: Any = shape
    for key in PROPERTIES.get(name, name.replace("rope_scaling", "rotary.scaling")).split("."):
        value = getattr(value, key, None)
    return value


def has_adapters(keys: Keys) -> bool:
    """Return True if the original trains adapters, which `lora_target_modules` enables."""
    return keys.value("lora_target_modules") not in (None, [])


def loaded_adapters(keys: Keys) -> SourceKey | None:
    """Return the key of the adapters that the training starts from; None without one."""
    entry = keys.get("lora_load")
    return entry if entry is not None and entry.value is not None and has_adapters(keys) else None


def is_resumed(keys: Keys) -> bool:
    """Return True if the original restores optimizer and step, and not the weights only."""
    restores_optimizer = keys.value("no_load_optim") is not True
    return keys.get("load") is not None and keys.value("finetune") is False and restores_optimizer


def data_parallel(keys: Keys, world: int | None) -> int | None:
    """Return the data-parallel size; None if a size is unknown or does not divide the devices."""
    replica_size = 1
    for key in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ):
        replica_size *= keys.number(key) or 1
    if world is None or world % replica_size:
        return None
    return world // replica_size


def convert_value(keys: Keys, key: str, via: str) -> object:
    """Return the converted value or default of a key; None, with an error, if it is invalid."""
    try:
        return CONVERSIONS[via](keys.value(key))
    except ValueError as error:
        keys.add_error(key, str(error))
        return None
