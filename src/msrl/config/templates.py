"""Where prompt templates lie: `templates/` of the source tree, the same folder inside the installed package, or a file of the user's."""

from __future__ import annotations

from pathlib import Path

import msrl
from msrl.errors import MsrlError, nearest

SUFFIX = ".yaml"


def template_dir() -> Path:
    """The folder of the templates that come with msrl."""
    package = Path(msrl.__file__).parent
    installed = package / "templates"
    return installed if installed.is_dir() else package.parents[1] / "templates"


def template_names() -> tuple[str, ...]:
    """The names that `template:` takes, sorted."""
    return tuple(sorted(file.stem for file in template_dir().glob(f"*{SUFFIX}")))


def find_template(name: str) -> Path:
    """The file of a template given by name or by path. Raises MsrlError when there is none."""
    if name in template_names():
        return template_dir() / f"{name}{SUFFIX}"
    if name.endswith((".yaml", ".yml")):
        if Path(name).is_file():
            return Path(name)
        raise MsrlError("there is no such template file")
    raise MsrlError(f"there is no template of this name; {nearest(name, template_names())}; or give the path of a YAML file")
