"""Prompt templates and the files that define them."""
