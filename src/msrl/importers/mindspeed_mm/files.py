"""Import of MindSpeed-MM's data files, and of the freeze keys of its model files.

Files of data (JSON) have `dataset_param`, files of models (JSON) `text_decoder`, and files of
trainings (YAML) have both in the sections `data` and `model`. Source: MindSpeed-MM 57069cd5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msrl.config.messages import node_at
from msrl.config.sources import Node, plain, wrap
from msrl.errors import MsrlError
from msrl.importers.sections import PROJECTOR, TOWER, Keys
from msrl.importers.table import as_list, load_table
from msrl.importers.translation import KeyStatus, SourceKey, Translation

MARKS = ("dataset_param", "image_encoder", "evaluation_model")
_OTHERS = ("generation_config", "evaluation_model")
_TEMPLATE = re.compile(r"qwen\d?(_\d)?_?(vl|5)|qwen3_5", re.I)
_TAGS = {
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"),
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
_TRAINING = {  # keys of `training` and `gpt_args`
    "lr": "train.optimizer.lr",
    "train_iters": "train.steps",
    "weight_decay": "train.optimizer.weight_decay",
    "micro_batch_size": "train.micro_batch",
    "global_batch_size": "train.global_batch",
    "seed": "run.seed",
}
_ROOT = re.compile(r"^(model\.)?visual(\.|$)")
_BLOCKS = frozenset({"blocks", "patch_embed"})
_PROJECTOR = frozenset({"merger", "merger_list", "deepstack_merger_list"})


def is_file(tree: Node) -> bool:
    """Return True if a file is one of MindSpeed-MM: of data, of a model, or of a training."""
    entries = _entries(tree)
    is_model = "text_decoder" in entries and "model_id" in entries
    is_training = "dataset_param" in _entries(entries.get("data"))
    return is_model or is_training or any(mark in entries for mark in MARKS)


def translate(tree: Node, file: Path) -> Translation:
    """Return the translation of one file, which includes errors and unsupported keys."""
    entries = _entries(tree)
    if any(name in entries for name in _OTHERS):
        raise MsrlError(
            f"{file}: not supported: a file of inference or evaluation. Use `msrl generate` or "
            "`msrl eval`"
        )
    if feature := _unsupported(tree):
        raise MsrlError(f"{file}: not supported: {feature}")
    translation = Translation("MindSpeed-MM", load_table("mindspeed_mm"), str(file))
    translation.variables = frozenset(name for name in entries if name.isupper())
    is_model = "data" not in entries and "dataset_param" not in entries
    if is_model:
        return _Model(translation, tree, None).translate()
    top = Keys.read(translation, "top", tree, "")
    rows = top.get("dataset_param")
    data = top.get("data")
    if data is not None:
        translation.record(data, KeyStatus.APPLIED, "key by key")
        keys = Keys.read(translation, "data", data.node, "data")
        rows = keys.get("dataset_param")
        keys.apply_remaining()
    if rows is not None:
        _Data(translation, rows).translate()
    model = top.get("model")
    if model is not None:
        translation.record(model, KeyStatus.APPLIED, "key by key")
        _Model(translation, model.node, _training(tree, "lr"), "model").translate()
    for key, native in _TRAINING.items():
        node = _training(tree, key)
        if node is not None and node.value is not None:
            translation.set(native, node)
    top.apply_remaining()
    return translation


def _entries(node: Node | None) -> Mapping[str, Node]:
    return node.value if node is not None and isinstance(node.value, dict) else {}


def _unsupported(tree: Node) -> str:
    """Return the feature that a file needs and msrl does not have; empty if there is none."""
    model = _entries(tree).get("model", tree)
    data = node_at(tree, ["data", "dataset_param"]) or node_at(tree, ["dataset_param"])
    columns = _entries(_entries(data).get("attr"))
    encoders = [_entries(model).get(name) for name in ("audio_encoder", "video_encoder")]
    others = [*encoders, *(columns.get(name) for name in ("videos", "audios"))]
    name = str(plain(_entries(model).get("model_id", Node(None, tree.origin))))
    frozen = str(plain(_entries(model).get("freeze", Node(None, tree.origin))))
    if (
        "omni" in name
        or "audio" in frozen
        or any(node is not None and node.value for node in others)
    ):
        return "training on videos or sounds"
    kind = _entries(data).get("dataset_type")
    if kind is not None and kind.value != "huggingface":
        return f"rows of dataset_type={kind.value}; msrl reads those of huggingface"
    template = node_at(data, ["basic_parameters", "template"]) if data is not None else None
    if template is not None and not _TEMPLATE.search(str(template.value)):
        return f"template={template.value}. Remove it, and use `msrl preprocess --template`"
    return ""


def _training(tree: Node, key: str) -> Node | None:
    """Return a setting of a file of a training."""
    paths = (["training", key], ["gpt_args", key])
    return next((node for path in paths if (node := node_at(tree, path)) is not None), None)


class _Data:
    """Rows, their columns and the limits of their images."""

    def __init__(self, translation: Translation, rows: SourceKey) -> None:
        self.translation = translation
        translation.record(rows, KeyStatus.APPLIED, "key by key")
        self.rows = Keys.read(translation, "dataset_param", rows.node, rows.path)
        self.sections = {
            name: self._section(name)
            for name in ("preprocess_parameters", "basic_parameters", "attr")
        }

    def _section(self, name: str) -> Keys:
        entry = self.rows.get(name)
        self.rows.record(name, KeyStatus.APPLIED, "key by key")
        path = entry.path if entry is not None else name
        return Keys.read(self.translation, name, entry.node if entry else None, path)

    def translate(self) -> None:
        self.rows.record("dataset_type", KeyStatus.APPLIED, "preprocess.handler: sharegpt")
        origin = self.rows.origin("dataset_type")
        self.translation.set("preprocess.handler", wrap("sharegpt", origin))
        self._pixels(self.sections["preprocess_parameters"])
        self._rows(self.sections["basic_parameters"])
        self._template(self.sections["basic_parameters"])
        self._columns(self.sections["attr"])
        for keys in (*self.sections.values(), self.rows):
            keys.apply_remaining()

    def _pixels(self, keys: Keys) -> None:
        """Translate the limits of pixels, by which the original resizes images in two steps."""
        keys.put("image_max_pixels", "preprocess.max_pixels")
        limit = keys.number("image_min_pixels")
        if limit is not None and limit <= 1:
            keys.assign("image_min_pixels", ["preprocess.min_pixels"], 1, why="no limit")
        else:
            keys.put("image_min_pixels", "preprocess.min_pixels")
        remark = (
            f"{self.translation.name}: the original first resizes images to the limits of pixels "
            "and then to sides of full squares, msrl once: their sizes and pixels differ a little"
        )
        self.translation.remarks.append(remark)

    def _rows(self, keys: Keys) -> None:
        """Translate the files of rows: a list, or a text with commas."""
        entry = keys.get("dataset")
        if entry is not None and entry.value is not None:
            names = [name.strip() for item in as_list(entry.value) for name in str(item).split(",")]
            self.translation.assign(entry, ["preprocess.input"], names)

    def _template(self, keys: Keys) -> None:
        """Translate the template; those of the vision-language models are their tokenizers'."""
        entry = keys.get("template")
        if entry is None:
            return
        self.translation.assign(entry, ["preprocess.template"], "native")
        if str(entry.value).endswith("_nothink") and keys.get("enable_thinking") is None:
            self.translation.set("preprocess.enable_thinking", wrap(False, entry.origin))

    def _columns(self, keys: Keys) -> None:
        """Translate the names of columns, and check the names of roles."""
        columns = {
            name: str(entry.value)
            for name in ("messages", "images", "system", "tools")
            if (entry := keys.get(name)) is not None and entry.value not in (None, name)
        }
        if columns:
            self.translation.set("preprocess.map_keys", wrap(columns, keys.origin("messages")))
        for name in ("messages", "images", "system", "tools"):
            text = "preprocess.map_keys" if name in columns else ""
            keys.record(name, KeyStatus.APPLIED if text else KeyStatus.OFF, text)
        for name, values in _TAGS.items():
            entry = keys.get(name)
            if entry is not None and entry.value not in (None, *values):
                text = f"not supported: msrl reads {' and '.join(values)}. Rename it in the rows"
                self.translation.add_error(entry, text)
            keys.record(name, KeyStatus.SAME, "a name that msrl reads")


class _Model:
    """Parts of a model: the vision tower, its projector, and the language model."""

    def __init__(
        self, translation: Translation, tree: Node, rate: Node | None, path: str = ""
    ) -> None:
        self.translation = translation
        self.rate = rate
        self.keys = Keys.read(translation, "model", tree, path)
        self.trained: list[str] = []

    def translate(self) -> Translation:
        encoder = self._part("image_encoder")
        owner = encoder if encoder.get("vision_encoder") is not None else self.keys
        parts = {TOWER: "vision_encoder", PROJECTOR: "vision_projector"}
        names = self.keys.get("freeze")
        for native, name in parts.items():
            if owner.get(name) is not None:
                self._rate(native, self._part(name, owner))
        if names is not None and names.value:
            self._modules(names)
        elif all(owner.get(name) is None for name in parts.values()):
            self._train(TOWER, PROJECTOR)
        decoder = self._part("text_decoder")
        frozen = decoder.get("freeze")
        if frozen is not None and frozen.value is True:
            text = "not supported: set train.freeze to patterns of parameter names"
            self.translation.add_error(frozen, text)
        decoder.record("freeze", KeyStatus.OFF, "")
        for keys in (encoder, decoder, self.keys):
            keys.apply_remaining()
        self._report()
        return self.translation

    def _part(self, name: str, owner: Keys | None = None) -> Keys:
        entry = (owner or self.keys).get(name)
        if entry is None:
            return Keys(self.translation, "part", ())
        self.translation.record(entry, KeyStatus.APPLIED, "key by key")
        return Keys.read(self.translation, "part", entry.node, entry.path)

    def _rate(self, native: str, part: Keys) -> None:
        """Train a part of the tower unless it is frozen."""
        if part.value("freeze") is True:
            part.record("freeze", KeyStatus.SAME, f"frozen, as without {native}")
        else:
            self._train(native)
            part.record("freeze", KeyStatus.APPLIED, native)
        part.apply_remaining()

    def _modules(self, entry: SourceKey) -> None:
        """Translate a list of the names of frozen modules."""
        names = [str(name) for name in plain(entry.node)]
        parts = {_ROOT.sub("", name).partition(".")[0] for name in names}
        if not all(map(_ROOT.match, names)):
            text = "not supported: set train.freeze to patterns of parameter names"
            return self.translation.add_error(entry, text)
        if "" not in parts and not parts >= _BLOCKS:
            self._train(TOWER)
        if "" not in parts and not parts & _PROJECTOR:
            self._train(PROJECTOR)
        return self.translation.record(entry, KeyStatus.APPLIED, "train.vision")

    def _train(self, *natives: str) -> None:
        self.trained += natives

    def _report(self) -> None:
        """Set the rates of the trained parts, or say that the file has none."""
        for native in self.trained:
            if self.rate is not None:
                self.translation.set(native, self.rate)
            else:
                text = f"{self.translation.name}: trains a part of the vision tower. Set {native}"
                self.translation.remarks.append(f"{text} to the learning rate of the training")
