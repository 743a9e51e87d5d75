"""Questions with the tools of an MCP server, which is a program or an address.

A program is started for every episode. The reward comes from the reward sources. Client: the
official package mcp, 2.x (https://github.com/modelcontextprotocol/python-sdk).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from msrl.environments.base import Environment
from msrl.environments.builtin._prompts import row_prompt
from msrl.environments.tools import LostError
from msrl.errors import MsrlError
from msrl.types import JsonObject, Message


class McpTools(Environment):
    """Environment with the tools of a server."""

    def __init__(
        self, server: Any, tool_names: Sequence[str], prompt_column: str, system: str
    ) -> None:
        self._server, self._tool_names = server, frozenset(tool_names)
        self._prompt_column, self._system = prompt_column, system
        self._stack = ExitStack()
        self._tools: list[JsonObject] = []

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Connect to the server and return the question of the row."""
        anyio = import_module("anyio.from_thread")
        portal = self._stack.enter_context(anyio.start_blocking_portal())
        client = import_module("mcp").Client(self._server)
        self._client = self._stack.enter_context(portal.wrap_async_context_manager(client))
        self._portal = portal
        listed = portal.call(self._client.list_tools).tools
        self._tools = [_schema(tool) for tool in listed if self._has(tool.name)]
        missing = self._tool_names - {tool.name for tool in listed}
        if missing:
            raise MsrlError(f"environment.options.tools: the server has no {', '.join(missing)}")
        return row_prompt(row, self._prompt_column, self._system)

    def external_tools(self) -> list[JsonObject]:
        """Return the tools of the server."""
        return self._tools

    def call_external(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the server.

        Raises:
            LostError: The server has ended.
            RuntimeError: The server reports an error.
        """
        try:
            result = self._portal.call(self._client.call_tool, name, dict(arguments))
        except import_module("mcp").MCPError as error:
            if error.code != import_module("mcp.types").CONNECTION_CLOSED:
                raise
            raise LostError("the MCP server has ended") from error
        text = "\n".join(_content_text(block) for block in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        """Disconnect, which ends a program."""
        self._stack.close()

    def _has(self, name: str) -> bool:
        return not self._tool_names or name in self._tool_names


def prepare(**_: Any) -> None:
    """Check that the client is installed."""
    _package()


def environment(
    *,
    command: list[str] | None = None,
    url: str = "",
    env: dict[str, str] | None = None,
    tools: list[str] | None = None,
    prompt_column: str = "",
    system: str = "",
) -> Environment:
    """Return a new environment.

    Args:
        command: Program that serves over standard input and output, with its arguments.
        url: Address of a server, instead of a program.
        env: Environment variables of the program.
        tools: Names of the tools to show; all by default.
        prompt_column: Column with the question. Empty keeps the prompt of the row, which must show
            the tools.
        system: System text; empty for none.
    """
    if bool(command) == bool(url):
        raise MsrlError("environment.options: mcp needs either command or url")
    package = _package()
    server: Any = url
    if command:
        server = package.StdioServerParameters(command=command[0], args=command[1:], env=env)
    return McpTools(server, tools or (), prompt_column, system)


def _schema(tool: Any) -> JsonObject:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _content_text(block: Any) -> str:
    """Return a content block as text; images and audio only by their type."""
    return block.text if block.type == "text" else f"[{block.type}]"


def _package() -> Any:
    """Return the package mcp; this module has the same name."""
    try:
        return import_module("mcp")
    except ImportError as error:
        raise MsrlError(
            "environment.name=mcp: the package mcp is not installed. Install msrl[mcp]."
        ) from error
