"""Hugging Face folders: weights read and checked against the config, and the files that make a
model besides them. `hf_writer` writes.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint.dtypes import hf_name
from msrl.checkpoint.hf import fp8, mxfp4
from msrl.checkpoint.hf.expert_stacks import taken_apart
from msrl.checkpoint.hf.weight_files import open_weight_files, some
from msrl.errors import ManyErrors, MsrlError
from msrl.models.entries import stack_sizes
from msrl.models.families import all_rules, load_shape
from msrl.models.hf_config import end_tokens, read_hf_config
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.types import ChatFormat

_SIDECARS = ("*.json", "*.model", "*.jinja", "merges.txt", "*.py", "*.tiktoken")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_DERIVED = (
    ".rotary_emb.inv_freq",
    ".rotary_pos_emb.inv_freq",
)  # buffers that old checkpoints carry and every model computes


class HfCheckpoint:
    """The tensors of a Hugging Face folder by name; opening it checks that all are there, whole,
    and shaped as the config says.
    """

    def __init__(self, folder: Path) -> None:
        """Raises MsrlError for anything missing, cut short, misshapen or left over, by file and
        tensor; ManyErrors for several.
        """
        if not folder.is_dir():
            raise MsrlError(f"{folder}: there is no such folder")
        self.folder = folder
        self.shape: Shape = load_shape(folder)
        config = read_hf_config(folder)
        stored = fp8.dequantised(mxfp4.dequantised(open_weight_files(folder), config), config)
        self._stored = taken_apart(stored, stack_sizes(self.shape))
        self.specs = {name: stored.spec for name, stored in self._stored.items()}
        self._check_against(self.shape)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is read from disk where it is used."""
        return self._stored[name].read()

    def _check_against(self, shape: Shape) -> None:
        rules = all_rules(shape)
        wanted = {
            name: size for rule in rules for name, size in zip(rule.hf, rule.shapes, strict=True)
        }
        tied = {"lm_head.weight"} if shape.tie_word_embeddings else set[str]()
        missing = sorted(set(wanted) - set(self.specs))
        unknown = set(self.specs) - set(wanted) - tied
        extra = sorted(
            name
            for name in unknown
            if not name.endswith(_DERIVED) and not name.startswith(shape.carried)
        )
        problems = [
            self._misshapen(name, size)
            for name, size in wanted.items()
            if name in self.specs and self.specs[name].shape != size
        ]
        if missing:
            rule = next(rule for rule in rules if missing[0] in rule.hf)
            problems.append(
                f"{self.folder}: {len(missing)} tensors are missing: {some(missing)}; the first one goes into {rule.mcore}"
            )
        if extra:
            hint = _nearest_rule(extra[0], rules)
            problems.append(
                f"{self.folder}: {len(extra)} tensors have no place in {shape.architecture}: {some(extra)}; {hint}"
            )
        if problems:
            raise ManyErrors(problems) if len(problems) > 1 else MsrlError(problems[0])
        self._check_tied_head(tied)

    def _misshapen(self, name: str, size: tuple[int, ...]) -> str:
        stored = self._stored[name]
        return f"{stored.file}: tensor {name} is {list(stored.spec.shape)}, but config.json makes it {list(size)}"

    def _check_tied_head(self, tied: set[str]) -> None:
        """A tied model may carry its output layer once more; it must be the embedding."""
        for name in tied & set(self.specs):
            if not torch.equal(self.tensor(name), self.tensor("model.embed_tokens.weight")):
                raise MsrlError(
                    f"{self.folder}: tie_word_embeddings=true, but {name} differs from the embedding"
                )


def _nearest_rule(name: str, rules: Iterable[Rule]) -> str:
    """A hint that names the rule whose Hugging Face name is most like `name`, numbers of layers
    aside.
    """
    known = {_NUMBER.sub("*", hf): _NUMBER.sub("*", rule.mcore) for rule in rules for hf in rule.hf}
    close = difflib.get_close_matches(_NUMBER.sub("*", name), known, n=1, cutoff=0.0)[0]
    return f"nearest rule: {close} -> {known[close]}"


def sidecar_files(folder: Path) -> list[Path]:
    """Config, tokenizer and code files: all that makes a model besides its weights."""
    found = {file for pattern in _SIDECARS for file in folder.glob(pattern) if file.is_file()}
    return sorted(
        file
        for file in found
        if not file.name.endswith(".index.json") and file.name != "msrl_manifest.json"
    )


def copy_sidecars(
    source: Path, target: Path, dtype: torch.dtype | None, chat: ChatFormat | None = None
) -> None:
    """Copy config and tokenizer files; config.json names `dtype` as the type of the weights unless
    it is None.

    A `quantization_config` is left out: weights that were read in FP8 or MXFP4 are what they stand
    for from then on. With `chat`, the model has that chat template from then on, and its tokens end
    an answer besides those that did.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in sidecar_files(source):
        shutil.copyfile(file, target / file.name)
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    changed = {key: value for key, value in config.items() if key != "quantization_config"}
    if dtype is not None:
        changed["dtype" if "dtype" in changed else "torch_dtype"] = hf_name(dtype)
    if changed != config:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if chat is not None:
        _write_chat(target, chat)


def _write_chat(folder: Path, chat: ChatFormat) -> None:
    """`chat_template.jinja`, in the place of a template in tokenizer_config.json, and
    `eos_token_id` of generation_config.json.
    """
    (folder / "chat_template.jinja").write_text(chat.template, encoding="utf-8")
    ends = list(dict.fromkeys((*chat.stop_token_ids, *end_tokens(folder))))
    for name, changes in (
        ("tokenizer_config.json", {}),
        ("generation_config.json", {"eos_token_id": ends}),
    ):
        path = folder / name
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        after = {key: value for key, value in before.items() if key != "chat_template"} | changes
        if after != before:
            path.write_text(
                json.dumps(after, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
