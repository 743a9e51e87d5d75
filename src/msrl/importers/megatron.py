"""The keys of Megatron's training that MindSpeed's files of every generation share: batches, checkpoints, optimizer, the cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from msrl.config.sources import Node
from msrl.errors import MsrlError, nearest
from msrl.importers.conversions import CONVERSIONS
from msrl.importers.sections import Keys, same_path
from msrl.importers.table import canonical
from msrl.importers.translation import Fate, Given, Translation
from msrl.models.families import load_shape
from msrl.models.shape import Shape


def with_model(keys: list[Given], models: Mapping[str, Node], translation: Translation, section: str = "megatron") -> list[Given]:
    """The keys over those of the model file that their `model` names, which are of the same section of the table."""
    chosen = next((given for given in reversed(keys) if given.key == "model"), None)
    if chosen is None:
        return keys
    name = canonical(str(chosen.value))
    if name not in models:
        if models:
            translation.mistake(chosen, f"no file of `defaults` describes it; {nearest(name, models)}")
        else:
            translation.say(chosen, Fate.SAME, "config.json of the model says all that its file would")
        return keys
    translation.say(chosen, Fate.SAME, "its facts are checked against config.json of the model")
    return [*translation.given(models[name], section, name), *keys]


class MegatronKeys:
    """What of these keys hangs together."""

    def __init__(self, translation: Translation, keys: Keys) -> None:
        self.translation = translation
        self.keys = keys

    def apply(self, *, by_tokens: bool) -> None:
        """`by_tokens`: micro-batches are cut by tokens, and micro_batch_size is not read."""
        self._required()
        self._checkpoint()
        self._tokenizer()
        self._optimizer()
        self._parallel()
        self._dropout()
        if by_tokens:
            self.keys.say("micro_batch_size", Fate.DEAD, "use_dynamic_bsz cuts by tokens")
        else:
            given = self.keys.get("micro_batch_size")
            if given is not None:
                self.translation.take(given, ["train.micro_batch"], given.value)
        self._lora()

    def apply_supervised(self) -> None:
        """The same, for a supervised training's flags."""
        self._required()
        self._checkpoint()
        self._tokenizer()
        self._optimizer()
        self._parallel()
        self._warmup()
        self._dropout()
        self._lora()
        self.apply_shapes()

    def _required(self) -> None:
        """What the original has no default for, and msrl would have one."""
        for key, meaning in (("lr", "the highest learning rate"), ("global_batch_size", "how many rows a step takes")):
            if self.keys.value(key) is None:
                where = given.origin if (given := self.keys.get(key)) is not None else self.translation.name
                self.translation.errors.append(f"{where}: {key}: is missing: {meaning}")

    def _checkpoint(self) -> None:
        """Resume is Megatron's load without finetune and with the optimizer; else load is weights alone."""
        keys = self.keys
        load, no_optim, no_rng = keys.get("load"), keys.value("no_load_optim"), keys.value("no_load_rng")
        resumes = load is not None and keys.value("finetune") is False and no_optim is not True
        if resumes and no_rng is True:
            keys.mistake("no_load_rng", "a resumed run goes on with its random state; set it to false, or no_load_optim to true")
        if load is not None:
            self.translation.take(load, ["checkpoint.resume" if resumes else "checkpoint.load"], load.value)
        save = keys.get("save")
        if save is not None and load is not None and not resumes and same_path(save.value, load.value):
            self.translation.say(save, Fate.SAME, "checkpoints go into the folder of the run: this one holds what it starts from")
        for key in ("finetune", "no_load_optim", "no_load_rng"):
            text = "checkpoint.resume: load, with its optimizer" if resumes else "checkpoint.load: weights alone, step 0"
            keys.say(key, Fate.TOOK, text if load is not None else "nothing is loaded")

    def _tokenizer(self) -> None:
        given = self.keys.get("tokenizer_name_or_path")
        if given is None:
            return
        self.translation.take(
            given, ["model.tokenizer", "model.path"], given.value, why="config.json and tokenizer; weights come from load"
        )

    def _optimizer(self) -> None:
        betas = [self.keys.value("adam_beta1"), self.keys.value("adam_beta2")]
        given = [one for one in (self.keys.get("adam_beta1"), self.keys.get("adam_beta2")) if one is not None]
        if not given:
            return self.translation.set_default("train.optimizer.betas", betas)
        for one in given:
            self.translation.take(one, ["train.optimizer.betas"], betas)
        return None

    def _warmup(self) -> None:
        """A share of the updates, or their number: Megatron takes one of both."""
        share, number = self.keys.get("lr_warmup_fraction"), self.keys.get("lr_warmup_iters")
        if share is None or number is None or share.value is None:
            return
        if number.value:
            self.translation.mistake(number, "stands beside lr_warmup_fraction; give one of both")
        self.translation.say(number, Fate.OFF, "lr_warmup_fraction counts")

    def _parallel(self) -> None:
        sequence = self.keys.get("sequence_parallel")
        if sequence is None:
            return
        if self.keys.value("tensor_model_parallel_size") == 1 and sequence.value is True:
            self.translation.say(sequence, Fate.OFF, "spreads over tensor-parallel ranks, of which there is one")
        else:
            self.translation.take(sequence, ["train.parallel.sp"], sequence.value)

    def _dropout(self) -> None:
        for key in ("attention_dropout", "hidden_dropout"):
            given = self.keys.get(key)
            if given is not None and given.value not in (0, 0.0):
                self.translation.mistake(given, "must be 0: msrl trains without dropout, by which log-probabilities of one text differ")

    def _lora(self) -> None:
        if self.keys.value("lora_target_modules") in (None, []):
            for key in ("lora_r", "lora_alpha"):
                self.keys.say(key, Fate.DEAD, "no lora_target_modules are given")
            return
        for key, native in (("lora_r", "train.lora.rank"), ("lora_alpha", "train.lora.alpha")):
            self.keys.take(key, [native], self.keys.value(key))

    def apply_shapes(self) -> None:
        """Facts of the model that a file repeats must be those of its config.json, where that can be read."""
        shape = self._shape()
        for given in self.keys:
            name = self.translation.row(given).shape
            if not name:
                continue
            found = None if shape is None else getattr(shape, name)
            if name == "ffn_hidden_size" and shape is not None and shape.moe is not None and all(shape.moe.layers):
                self.translation.say(given, Fate.DEAD, "every layer has experts, of moe_ffn_hidden_size")
            elif found is None:
                self.translation.say(given, Fate.SAME, "config.json of the model says it")
            elif given.value == found:
                self.translation.say(given, Fate.SAME, "config.json of the model says the same")
            else:
                self.translation.mistake(given, f"config.json of the model says {found}; take the line away, or name another model")

    def _shape(self) -> Shape | None:
        for path in self._config_dirs():
            if (path / "config.json").is_file():
                try:
                    return load_shape(path)
                except MsrlError:
                    return None  # said by the checks of the native configuration
        return None

    def _config_dirs(self) -> Iterator[Path]:
        for key in ("load", "tokenizer_name_or_path"):
            value = self.keys.value(key)
            if isinstance(value, str):
                yield from (Path(value), Path(value) / "hf")


def data_parallel(keys: Keys, world: int | None) -> int | None:
    """Copies of the model on the devices of training; None where the sizes are not known or do not divide."""
    copy = 1
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        copy *= keys.number(key) or 1
    return world // copy if world is not None and world % copy == 0 else None


def converted(keys: Keys, key: str, via: str) -> object:
    """A value, given or default, as its conversion has it; None and a mistake where it is not allowed."""
    try:
        return CONVERSIONS[via](keys.value(key))
    except ValueError as error:
        keys.mistake(key, str(error))
        return None
