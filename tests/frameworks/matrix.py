"""The frameworks that are tried, what is installed for each, and what its model says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.frameworks.agents import PEOPLE


def call(tool: str, /, **arguments: Any) -> str:
    """A call of a tool, as the chat template writes it."""
    written = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def fields(**values: str) -> str:
    """An answer of dspy's form."""
    parts = [f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()]
    return "\n\n".join([*parts, "[[ ## completed ## ]]"])


def code(text: str) -> str:
    """An answer of smolagents' form."""
    return f"Thought: I go on.\n<code>\n{text}\n</code>"


FIND = call("capital", country="Switzerland")
COUNT = call("population", city="Bern")
TOLD = f"{PEOPLE} people live in Bern."
TOOLS = (FIND, COUNT, TOLD)
HAND_OFF = (FIND, call("transfer_to_counter"), COUNT, TOLD)


@dataclass(frozen=True)
class Tried:
    """One framework and one form of its agent.

    requirements: for pip, the framework first. agent: in `agents`. says: the model's answers in an
    episode. samples: of an episode, several where the framework does not just append messages.
    locked: file of `locks/` whose versions `make test-slow` tries.
    """

    requirements: tuple[str, ...]
    agent: str
    says: tuple[str, ...]
    samples: int = 1
    locked: str = ""
    options: dict[str, Any] = field(default_factory=dict)


_SMOLAGENTS = ("smolagents[openai]",)
_OPENAI = ("openai-agents",)
MATRIX = {
    "smolagents, CodeAgent": Tried(
        _SMOLAGENTS,
        "smolagents_code",
        (
            code('city = capital(country="Switzerland")\nprint(city)'),
            code('final_answer(population(city="Bern"))'),
        ),
        samples=2,
    ),
    "smolagents, ToolCallingAgent": Tried(
        _SMOLAGENTS,
        "smolagents_tools",
        (FIND, COUNT, call("final_answer", answer=TOLD)),
        samples=3,
    ),
    "instructor": Tried(
        ("instructor",),
        "instructor",
        (call("City", name="Bern", people="many"), call("City", name="Bern", people=PEOPLE)),
    ),
    "pydantic-ai": Tried(
        ("pydantic-ai-slim[openai]",),
        "pydantic_ai",
        (FIND, COUNT, call("final_result", name="Bern", people=PEOPLE)),
    ),
    "langgraph": Tried(
        ("langgraph", "langchain", "langchain-openai"), "langgraph", TOOLS, locked="langgraph.txt"
    ),
    "openai-agents, Responses": Tried(
        _OPENAI,
        "openai_agents",
        HAND_OFF,
        2,
        locked="openai-agents.txt",
        options={"api": "responses"},
    ),
    "openai-agents, chat": Tried(_OPENAI, "openai_agents", HAND_OFF, 2, options={"api": "chat"}),
    "dspy": Tried(
        ("dspy",),
        "dspy",
        (
            fields(
                next_thought="The city first.",
                next_tool_name="capital",
                next_tool_args='{"country": "Switzerland"}',
            ),
            fields(
                next_thought="Now the people.",
                next_tool_name="population",
                next_tool_args='{"city": "Bern"}',
            ),
            fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
            fields(reasoning="It was told.", answer=TOLD),
        ),
        samples=4,
    ),
    "crewai": Tried(("crewai",), "crewai", TOOLS),
    "autogen": Tried(("autogen-agentchat", "autogen-ext[openai]"), "autogen", TOOLS),
    "strands": Tried(("strands-agents[openai]",), "strands", TOOLS),
    "llama-index": Tried(
        ("llama-index-core", "llama-index-llms-openai-like"), "llama_index", TOOLS
    ),
    "litellm": Tried(("litellm",), "litellm", TOOLS),
}
