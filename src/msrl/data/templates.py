"""Prompt templates as data: one YAML file each, the fields documented in `templates/README.md`.

Where they lie is `config/templates.py`'s to know. The texts of MindSpeed's templates of the same names are kept
(MindSpeed-RL `configs/model/templates.json`), so that prompts agree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from msrl.config.templates import find_template, template_names
from msrl.errors import MsrlError, nearest

__all__ = ["Template", "load_template", "template_names"]


@dataclass(frozen=True, slots=True)
class Template:
    """How a conversation becomes text. `name` is the file's name; the other fields are explained in `templates/README.md`."""

    name: str
    prefix: str = ""
    default_system: str = ""
    system: str = "{{content}}"
    system_in_user: bool = False
    tools: str = ""
    user: str = ""
    tool_start: str = ""
    tool: str = ""
    tool_end: str = ""
    assistant_start: str = ""
    assistant: str = ""
    after_assistant: str = ""
    thought_start: str = ""
    thought_end: str = ""
    special: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    replace_eos: bool = False
    native: bool = False


def load_template(name: str) -> Template:
    """The template `name`: a packaged one, or the path of a YAML file (ends in .yaml or .yml).

    Raises MsrlError for an unknown name, a missing file, an unknown field or a field of the wrong type.
    """
    try:
        path = find_template(name)
    except MsrlError as error:
        raise MsrlError(f"template={name}: {error}") from None
    return _read(path)


def _read(path: Path) -> Template:
    """The template in one file."""
    try:
        loaded: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MsrlError(f"template {path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MsrlError(f"template {path}: not a YAML file: {error}") from error
    if not isinstance(loaded, dict):
        raise MsrlError(f"template {path}: must be a mapping of fields; see templates/README.md")
    template = Template(name=path.stem, **{str(key): _field(path, str(key), value) for key, value in loaded.items()})
    _check(path, template)
    return template


def _field(path: Path, key: str, value: Any) -> Any:
    """One field, checked against the type of its default."""
    defaults = {f.name: f.default for f in fields(Template) if f.name != "name"}
    if key not in defaults:
        raise MsrlError(f"template {path}: {key}: there is no such field; {nearest(key, defaults)}")
    default = defaults[key]
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise MsrlError(f"template {path}: {key}={value!r}: must be a list of texts")
        return tuple(value)
    if not isinstance(value, type(default)):
        raise MsrlError(f"template {path}: {key}={value!r}: must be {'true or false' if isinstance(default, bool) else 'a text'}")
    return value


def _check(path: Path, template: Template) -> None:
    """What the fields need of each other."""
    if template.native:
        if template != Template(name=template.name, native=True):
            raise MsrlError(f"template {path}: native: the tokenizer's own template is used, so no other field may be set")
        return
    for key in ("user", "assistant", "system", "tool"):
        text = getattr(template, key)
        if "{{content}}" not in text and not (key == "tool" and not text):
            raise MsrlError(f"template {path}: {key}={text!r}: must contain {{{{content}}}}")
    if template.tools and "{{tools}}" not in template.tools:
        raise MsrlError(f"template {path}: tools: must contain {{{{tools}}}}")
    if template.replace_eos and not template.stop:
        raise MsrlError(f"template {path}: replace_eos: needs a stop token to replace it with; set stop")
    if bool(template.thought_start) != bool(template.thought_end):
        raise MsrlError(f"template {path}: thought_start and thought_end belong together; set both or none")
