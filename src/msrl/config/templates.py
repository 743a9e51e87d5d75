"""Location of prompt templates.

They are in `templates/` of the source tree or of the installed package, or in a user's file.
"""

from __future__ import annotations

from pathlib import Path

import msrl
from msrl.errors import MsrlError, nearest

SUFFIX = ".yaml"


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
    if name in template_names():
        return template_dir() / f"{name}{SUFFIX}"
    if name.endswith((".yaml", ".yml")):
        if Path(name).is_file():
            return Path(name)
        raise MsrlError("this template file does not exist")
    hint = nearest(name, template_names())
    raise MsrlError(f"neither the name of a template nor the path of a YAML file; {hint}")
