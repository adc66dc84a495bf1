"""The shop as a server of tools (Model Context Protocol), over its pipes."""

import shop
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")


@server.tool()
def price(item: str) -> str:
    """Says what an item of the shop costs."""
    try:
        return shop.price(item)
    except ValueError as error:
        raise ToolError(str(error)) from error


if __name__ == "__main__":
    server.run()
