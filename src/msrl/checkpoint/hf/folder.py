"""Reader for Hugging Face folders: weights checked against the config, and all other files.

`writer` writes such folders.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from msrl.checkpoint.dtypes import hf_name
from msrl.checkpoint.hf import fp8, mxfp4
from msrl.checkpoint.hf.expert_stacks import published_experts, unstack
from msrl.checkpoint.hf.weight_files import StoredTensor, open_weight_files, some
from msrl.errors import ManyErrors, MsrlError
from msrl.files import utf8
from msrl.models.entries import stack_sizes
from msrl.models.families import all_rules, load_shape
from msrl.models.hf_config import end_tokens, read_hf_config
from msrl.models.paths import IRREGULAR, OVERSIZED, is_oversized
from msrl.models.reward_head import has_classifier, is_scoring, scoring_config
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.models.vision.tensors import published_names
from msrl.types import ChatFormat

_DTYPE_KEYS = frozenset({"dtype", "torch_dtype"})
_SIDECARS = ("*.json", "*.model", "*.jinja", "merges.txt", "*.py", "*.tiktoken")
_NAMED_TEMPLATES = "additional_chat_templates"  # folder of transformers 5
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Buffers that old checkpoints contain and every model computes itself.
_DERIVED = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")


class HfCheckpoint:
    """Tensors of a Hugging Face folder by name.

    Opening it checks that all tensors exist, are complete and have the shapes of the config.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor] | None = None) -> None:
        """Open and check the tensors of the folder, or `tensors` that are stored elsewhere.

        Raises:
            MsrlError: A tensor is missing, unexpected, truncated or has another shape.
            ManyErrors: Several such problems.
        """
        if not folder.is_dir():
            raise MsrlError(f"{folder}: folder does not exist")
        self.where = next((tensor.file for tensor in (tensors or {}).values()), folder)
        self.shape: Shape = load_shape(folder)
        config = read_hf_config(folder)
        stored = fp8.dequantize_tensors(
            mxfp4.dequantize_tensors(
                open_weight_files(folder) if tensors is None else tensors, config
            ),
            config,
        )
        if self.shape.vision is not None:
            stored = published_names(stored, self.shape.vision)
        unstacked = unstack(stored, stack_sizes(self.shape))
        self._stored = published_experts(unstacked, all_rules(self.shape))
        self.has_published_experts = self._stored == unstacked
        self.specs = {name: stored.spec for name, stored in self._stored.items()}
        self._check_against(self.shape)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor; its data is loaded from disk on use."""
        return self._stored[name].read()

    def _check_against(self, shape: Shape) -> None:
        rules = all_rules(shape)
        expected = {
            name: size for rule in rules for name, size in zip(rule.hf, rule.shapes, strict=True)
        }
        tied = {"lm_head.weight"} if shape.tie_word_embeddings else set[str]()
        missing = sorted(set(expected) - set(self.specs))
        unknown = set(self.specs) - set(expected) - tied
        unexpected = sorted(
            name
            for name in unknown
            if not name.endswith(_DERIVED) and not name.startswith(shape.pass_through)
        )
        problems = [
            self._shape_message(name, size)
            for name, size in expected.items()
            if name in self.specs and self.specs[name].shape != size
        ]
        if missing:
            rule = next(rule for rule in rules if missing[0] in rule.hf)
            problems.append(
                f"{self.where}: {len(missing)} tensors are missing: {some(missing)}. "
                f"The first is part of {rule.mcore}."
            )
        if unexpected:
            hint = _nearest_rule(unexpected[0], rules)
            problems.append(
                f"{self.where}: {len(unexpected)} tensors are not part of {shape.architecture}: "
                f"{some(unexpected)} ({hint})"
            )
        if problems:
            raise ManyErrors(problems) if len(problems) > 1 else MsrlError(problems[0])
        self._check_tied_head(tied)

    def _shape_message(self, name: str, size: tuple[int, ...]) -> str:
        stored = self._stored[name]
        return (
            f"{stored.file}: tensor {name} has shape {list(stored.spec.shape)}, "
            f"but config.json needs {list(size)}"
        )

    def _check_tied_head(self, tied: set[str]) -> None:
        """Check that the output layer of a tied model, if stored, equals the embedding."""
        embedding = all_rules(self.shape)[0].hf[0]
        for name in tied & set(self.specs):
            if not torch.equal(self.tensor(name), self.tensor(embedding)):
                raise MsrlError(
                    f"{self.where}: tie_word_embeddings=true, but {name} differs from the embedding"
                )


def _nearest_rule(name: str, rules: Iterable[Rule]) -> str:
    """Return a hint with the rule of the most similar Hugging Face name, ignoring layer numbers."""
    known = {_NUMBER.sub("*", hf): _NUMBER.sub("*", rule.mcore) for rule in rules for hf in rule.hf}
    close = difflib.get_close_matches(_NUMBER.sub("*", name), known, n=1, cutoff=0.0)[0]
    return f"nearest rule: {close} -> {known[close]}"


def _resolved(file: Path) -> Path:
    """Return the file that a link leads to. Raises MsrlError for a link that leads to itself."""
    try:
        return file.resolve()
    except (OSError, RuntimeError):
        raise MsrlError(f"{file}: is a link that leads to itself. Remove it.") from None


def sidecar_files(folder: Path) -> list[Path]:
    """Return the files other than weights that a model needs: config, tokenizer and code.

    Named chat templates are in a folder of their own.

    Raises:
        MsrlError: A link leads to another folder than the model's. The files are copied to
            results, which may be published. Or a file is no regular file.
    """
    own, shared = folder.resolve(), _resolved(folder / "config.json").parent  # in hub caches
    patterns = (*_SIDECARS, f"{_NAMED_TEMPLATES}/*.jinja")
    files = {file for pattern in patterns for file in folder.glob(pattern)}
    for file in sorted(files):
        if not file.is_file():
            raise MsrlError(f"{file}: {IRREGULAR}")
        if is_oversized(file):
            raise MsrlError(f"{file}: {OVERSIZED}")
        target = _resolved(file)
        if own not in target.parents and target.parent != shared:
            raise MsrlError(
                f"{file}: is a link to {target}, outside of the folder of the model. Copy the file "
                "if it belongs to the model, or remove the link."
            )
    return sorted(
        file
        for file in files
        if not file.name.endswith(".index.json") and file.name != "msrl_manifest.json"
    )


def record_score_head(folder: Path) -> None:
    """Turn the config.json of a decoder into one of a sequence classifier with one label.

    The config of a reward model, or of a class without such a counterpart, is unchanged.
    """
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    architecture = str((config.get("architectures") or [""])[0])
    if is_scoring(architecture) or not has_classifier(architecture):
        return
    text = json.dumps(scoring_config(config), indent=2, ensure_ascii=False)
    path.write_bytes(utf8(f"{text}\n"))


def copy_sidecars(
    source: Path, target: Path, dtype: torch.dtype | None, chat: ChatFormat | None = None
) -> None:
    """Copy config and tokenizer files, and record `dtype` in config.json unless it is None.

    A `quantization_config` is removed, because FP8 and MXFP4 weights were dequantized on reading.
    `chat` replaces the chat template, and adds its stop tokens to the model's.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in sidecar_files(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    changed = {key: value for key, value in config.items() if key != "quantization_config"}
    if dtype is not None:
        changed = _with_dtype(changed, hf_name(dtype))
    if changed != config:
        path.write_bytes(utf8(json.dumps(changed, indent=2, ensure_ascii=False) + "\n"))
    if chat is not None:
        _write_chat(target, chat)


def _with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a config with another data type, wherever it names one.

    Configs of vision-language models may name it for the language model only (`text_config`).
    """
    changed = {key: name if key in _DTYPE_KEYS else value for key, value in config.items()}
    text = config.get("text_config")
    if isinstance(text, dict) and not _DTYPE_KEYS.isdisjoint(text):
        return {**changed, "text_config": _with_dtype(cast("dict[str, Any]", text), name)}
    return changed if not _DTYPE_KEYS.isdisjoint(config) else {**changed, "torch_dtype": name}


def _write_chat(folder: Path, chat: ChatFormat) -> None:
    """Write `chat_template.jinja` and `eos_token_id` of generation_config.json.

    A template in tokenizer_config.json and named templates are removed: they would replace it.
    """
    shutil.rmtree(folder / _NAMED_TEMPLATES, ignore_errors=True)
    (folder / "chat_template.jinja").write_bytes(utf8(chat.template))
    stop_tokens = list(dict.fromkeys((*chat.stop_token_ids, *end_tokens(folder))))
    for name, changes in (
        ("tokenizer_config.json", {}),
        ("generation_config.json", {"eos_token_id": stop_tokens}),
    ):
        path = folder / name
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        after = {key: value for key, value in before.items() if key != "chat_template"} | changes
        if after != before:
            path.write_bytes(utf8(json.dumps(after, indent=2, ensure_ascii=False) + "\n"))
