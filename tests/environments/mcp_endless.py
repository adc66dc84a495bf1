"""A server that always names a next page of tools: `python mcp_endless.py [same]`; with
`none` it has no tools."""

from __future__ import annotations

import itertools
import json
import sys

numbers = itertools.count()
for line in sys.stdin:
    asked = json.loads(line)
    result: dict[str, object] = {}
    if asked.get("method") == "initialize":
        version = asked["params"]["protocolVersion"]
        about = {"name": "endless", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    elif asked.get("method") == "tools/list":
        number = 0 if "same" in sys.argv else next(numbers)
        tool = {"name": f"t{number}", "inputSchema": {"type": "object"}}
        result = {"tools": [tool], "nextCursor": f"page {number}"}
        if "none" in sys.argv:
            result = {"tools": []}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
