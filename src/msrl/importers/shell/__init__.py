"""Interpretation of shell scripts without running their programs."""

from msrl.importers.shell.interpreter import Script, flags, parse_script, repeated_flags
from msrl.importers.shell.values import Word

__all__ = ["Script", "Word", "flags", "parse_script", "repeated_flags"]
