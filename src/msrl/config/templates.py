"""Location of prompt templates.

They are in `templates/` of the source tree or of the installed package, or in a user's file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msrl
from msrl.errors import MsrlError, nearest
from msrl.files import read_user_text
from msrl.strict_json import loads

SUFFIX = ".yaml"
# Templates of MindSpeed without a counterpart, with the remedy.
REFUSED = {
    "deepseek4": "its text is in MindSpeed-LLM's code; msrl does not support the model DeepSeek "
    "V4. Use native with a tokenizer that has a chat template."
}


def template_dir() -> Path:
    """Return the folder of the packaged templates."""
    package = Path(msrl.__file__).parent
    installed = package / "templates"
    return installed if installed.is_dir() else package.parents[1] / "templates"


def template_names() -> tuple[str, ...]:
    """Return the names of the packaged templates, sorted."""
    return tuple(sorted(file.stem for file in template_dir().glob(f"*{SUFFIX}")))


def find_template(name: str) -> Path:
    """Return the file of a template, by name or by path.

    Raises:
        MsrlError: the file or the name does not exist.
    """
    if entry := json_entry(name):
        return _find_entry(*entry)
    if name in REFUSED:
        raise MsrlError(REFUSED[name])
    if name in template_names():
        return template_dir() / f"{name}{SUFFIX}"
    if name.endswith((".yaml", ".yml")):
        if Path(name).is_file():
            return Path(name)
        raise MsrlError("this template file does not exist")
    hint = nearest(name, template_names())
    raise MsrlError(f"neither the name of a template, nor a YAML file, nor FILE.json:NAME; {hint}")


def json_entry(name: str) -> tuple[Path, str] | None:
    """Return the file and the name of `FILE.json:NAME`, a template of a templates.json file.

    Return None for other forms.
    """
    file, colon, key = name.rpartition(":")
    if colon and file.endswith(".json"):
        return Path(file), key
    return (Path(name), "") if name.endswith(".json") else None


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """Return the templates in a templates.json file of MindSpeed by name.

    Raises:
        MsrlError: the file is not a list of templates.
    """
    try:
        loaded = loads(read_user_text(path))
    except MsrlError as error:
        raise MsrlError(f"template {error}") from None
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"template {path}: not JSON: {error}") from error
    entries = cast("list[object]", loaded if isinstance(loaded, list) else [])
    objects = [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]
    if not entries or len(objects) < len(entries) or any("name" not in item for item in objects):
        raise MsrlError(f"template {path}: must be a list of objects with name, as in MindSpeed")
    return {str(item["name"]): item for item in objects}


def _find_entry(path: Path, name: str) -> Path:
    """Return the file if it has a template of this name."""
    if not path.is_file():
        raise MsrlError("this template file does not exist")
    names = read_entries(path)
    if name not in names:
        raise MsrlError(f"name one template of this file as FILE.json:NAME; {nearest(name, names)}")
    return path
