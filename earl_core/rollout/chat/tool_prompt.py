"""Tools for chat templates that know none: told in words, in the form of the Hermes models.

The system message describes the tools, calls stand in the assistant's text, and their results in a
message of the user.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from earl_core.environments.base import Message
from earl_core.rollout.chat.tool_calls import Tools

_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

WRITTEN = f"{_PROMPT}<tool_response></tool_response>"
"""All that stands around texts of others below."""


def in_words(messages: Sequence[Message], tools: Tools, system: bool) -> list[Message]:
    """The conversation with roles and texts alone.

    system: whether the template knows system messages; else the first user's is the longer.
    """
    said: list[Message] = []
    for number, message in enumerate(messages):
        role, text = message["role"], message["content"]
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if number and messages[number - 1]["role"] == "tool":
                said[-1]["content"] += f"\n{text}"
                continue
        for call in message.get("tool_calls", ()):
            written = json.dumps(call["function"], ensure_ascii=False)
            text += ("\n" if text else "") + f"<tool_call>\n{written}\n</tool_call>"
        said.append({"role": role, "content": text})
    if not tools:
        return said
    schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in tools.schemas)
    prompt = _PROMPT.format(schemas=schemas)
    if said and said[0]["role"] == ("system" if system else "user"):
        first = said[0]["content"]
        told = f"{first}\n\n{prompt}" if system else f"{prompt}\n\n{first}"
        return [{"role": said[0]["role"], "content": told}, *said[1:]]
    return [{"role": "system" if system else "user", "content": prompt}, *said]
