"""Prompt templates: one YAML file each, with the fields documented in `templates/README.md`.

`config/templates.py` locates the files. Templates that MindSpeed-RL also has use the same texts
(`configs/model/templates.json`), so that prompts are identical.
"""

from __future__ import annotations

import reprlib
from dataclasses import fields
from pathlib import Path
from typing import Any

from msrl.config.sources import parse, plain
from msrl.config.templates import find_template, json_entry, template_names
from msrl.data.templates.form import Template
from msrl.data.templates.json_files import read_template
from msrl.errors import ManyErrors, MsrlError, nearest
from msrl.files import read_user_text

__all__ = ["Template", "load_template", "template_names"]


def load_template(name: str) -> Template:
    """Return a template: a packaged one, a YAML file (.yaml or .yml), or `FILE.json:NAME`.

    The last form names a template in a templates.json file of MindSpeed.

    Raises:
        MsrlError: the name or a field is unknown, the file is missing, or a field has the wrong
            type.
    """
    try:
        path = find_template(name)
    except MsrlError as error:
        raise MsrlError(f"template={name}: {error}") from None
    if entry := json_entry(name):
        template = read_template(*entry)
        _check(path, template)
        return template
    return _read(path)


def _read(path: Path) -> Template:
    """Return the template in a file."""
    try:
        loaded: Any = plain(parse(read_user_text(path), str(path)))
    except ManyErrors as error:
        raise ManyErrors([f"template {message}" for message in error.messages]) from None
    except MsrlError as error:
        raise MsrlError(f"template {error}") from None
    if not isinstance(loaded, dict):
        raise MsrlError(f"template {path}: must be a mapping of fields. See templates/README.md.")
    values = {str(key): _field(path, str(key), value) for key, value in loaded.items()}
    template = Template(name=path.stem, **values)
    _check(path, template)
    return template


def _field(path: Path, key: str, value: Any) -> Any:
    """Return the value of a field, checked against the type of its default."""
    defaults = {f.name: f.default for f in fields(Template) if f.name != "name"}
    if key not in defaults:
        raise MsrlError(f"template {path}: {key}: unknown field; {nearest(key, defaults)}")
    default = defaults[key]
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise MsrlError(
                f"template {path}: {key}={reprlib.repr(value)}: must be a list of strings"
            )
        return tuple(value)
    if not isinstance(value, type(default)):
        expected = "true or false" if isinstance(default, bool) else "text"
        raise MsrlError(f"template {path}: {key}={reprlib.repr(value)}: must be {expected}")
    return value


def _check(path: Path, template: Template) -> None:
    """Raise MsrlError if the fields contradict each other."""
    if template.native:
        if template != Template(name=template.name, native=True):
            raise MsrlError(
                f"template {path}: native=true: the tokenizer's chat template replaces all other "
                "fields. Set no other field."
            )
        return
    for key in ("user", "assistant", "system", "tool"):
        text = getattr(template, key)
        is_absent = key == "tool" and not text
        if "{{content}}" not in text and not is_absent:
            raise MsrlError(f"template {path}: {key}={text!r}: must contain {{{{content}}}}")
    if template.control_tokens not in ("text", "keep", "refuse"):
        raise MsrlError(
            f"template {path}: control_tokens={template.control_tokens}: must be text, keep or "
            "refuse"
        )
    if template.tools and "{{tools}}" not in template.tools:
        raise MsrlError(f"template {path}: tools: must contain {{{{tools}}}}")
    if template.replace_eos and not template.stop:
        raise MsrlError(f"template {path}: replace_eos=true: needs a stop token. Set stop.")
    if bool(template.thought_start) != bool(template.thought_end):
        raise MsrlError(f"template {path}: thought_start and thought_end must be set together")
