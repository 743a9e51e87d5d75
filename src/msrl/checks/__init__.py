"""Checks that need several sections, a model or files: all mistakes of a configuration at once."""
