"""index.html of the view: the front end in one file, with a Content-Security-Policy.

The policy allows the scripts and styles of this file by their SHA-256, and the data files beside
it. Nothing else can be loaded or executed, whatever a response contains.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from string import Template

from msrl.workflows.view.chunks import safe_json

# Modules in the order of their imports. They are joined into one script, because browsers refuse
# to import modules from disk.
MODULES = (
    "state.js",
    "dom.js",
    "text.js",
    "data.js",
    "images.js",
    "charts.js",
    "list.js",
    "overview.js",
    "runs.js",
    "steps.js",
    "rollouts.js",
    "sample.js",
    "evaluation.js",
    "live.js",  # only in pages of a server
    "main.js",
)
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def page(title: str, inline: Mapping[str, str] | None = None, *, is_live: bool = False) -> str:
    """Return index.html.

    Args:
        title: Title of the page.
        inline: JSON by name, for a view in a single file.
        is_live: True if the data may change while the page is open.
    """
    scripts = [_static("vendor/uPlot.iife.min.js"), _application(is_live=is_live)]
    styles = [_static("vendor/uPlot.min.css"), _static("style.css")]
    data = "\n".join(
        f'<script type="application/json" data-chunk="{_attribute(name)}">{text}</script>'
        for name, text in (inline or {}).items()
    )
    return Template(_static("index.html")).substitute(
        policy=content_security_policy(scripts, styles, has_files=inline is None, is_live=is_live),
        title=_attribute(title),
        options=safe_json({"live": is_live, "inline": inline is not None}),
        styles="\n".join(f"<style>{style}</style>" for style in styles),
        data=data,
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def content_security_policy(
    scripts: list[str], styles: list[str], *, has_files: bool, is_live: bool
) -> str:
    """Return the policy that allows these scripts and styles, and with `has_files` data files.

    On disk, some browsers do not count files beside the page as 'self', so that the scheme file: is
    allowed too. With `is_live`, the page may request answers of its own server.
    """
    allowed = [*(_hash(script) for script in scripts)]
    if has_files:
        allowed += ["'self'", "file:"]
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(allowed)}",
            f"style-src {' '.join(_hash(style) for style in styles)}",
            "connect-src 'self'" if is_live else "connect-src 'none'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _application(*, is_live: bool) -> str:
    names = [name for name in MODULES if is_live or name != "live.js"]
    modules = [_EXPORT.sub("", _IMPORT.sub("", _static(f"app/{name}"))) for name in names]
    return '"use strict";(() => {\n' + "\n".join(modules) + "})();"


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _static(name: str) -> str:
    return (files("msrl.workflows.view") / "static" / name).read_text(encoding="utf-8")


def _attribute(text: str) -> str:
    """Escape a text for an attribute or element."""
    for character, entity in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(character, f"&{entity};")
    return text
