"""Formats of tool calls in the text of an answer, one file each.

Each file defines:

- `parse(text, tools) -> ParsedAnswer`: calls that are complete, and malformed ones. A call that was
  truncated is malformed, unless only its end mark is missing after complete JSON.
- `render(calls) -> str`: the text of calls, as a model writes it.
- `MARKS`: texts of chat templates with this format. A template has the format if it contains all
  texts of one of the tuples.
- `VLLM_PARSERS`: vLLM's parsers of the format with the text that selects each; the first whose text
  is in the template is used by `serve`.
"""
