"""Formats of tool calls in the text of an answer, one file each.

Each file defines `parse(text, tools) -> ParsedAnswer` and `render(calls) -> str`.
"""
