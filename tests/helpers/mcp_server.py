"""MCP server with two tools, for the test of the environment `mcp`."""

from mcp.server import MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("broken")


@server.tool()
def hidden() -> str:
    """Return nothing of interest."""
    return ""


if __name__ == "__main__":
    server.run()
