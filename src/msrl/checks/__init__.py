"""Checks of a configuration that need several sections, a model or files."""
