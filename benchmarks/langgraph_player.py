"""A LangGraph agent that plays tic-tac-toe, as one would write it for any model behind a URL: one
node asks the model, the other one is the referee. It knows nothing of EARL but the rules of its
game."""

from __future__ import annotations

from functools import cache
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from earl_core.environments.registry import create


class State(MessagesState):  # type: ignore[misc]
    """A game: its messages, the game itself and the model, and what came out."""

    game: Any
    model: Any
    reward: float
    outcome: str


async def move(state: State) -> dict[str, Any]:
    """Ask the model for the next move."""
    return {"messages": [await state["model"].ainvoke(state["messages"])]}


def referee(state: State) -> dict[str, Any]:
    """Carry the move out, and the opponent's."""
    result = state["game"].step(str(state["messages"][-1].content))
    told: dict[str, Any] = {"messages": [dict(each) for each in result.messages]}
    told["reward"] = state["reward"] + result.reward
    return {**told, "outcome": result.info["outcome"]} if result.done else told


def goes_on(state: State) -> str:
    """The next node."""
    return END if state["outcome"] else "move"


@cache
def graph() -> Any:
    """The agent."""
    made = StateGraph(State)
    made.add_node("move", move)
    made.add_node("referee", referee)
    made.add_edge(START, "move")
    made.add_edge("move", "referee")
    made.add_conditional_edges("referee", goes_on, ["move", END])
    return made.compile()


async def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """One game. task: `game` has the options of the built-in one."""
    game = create("tic_tac_toe", task["game"])
    begin = [dict(each) for each in game.reset(task["index"], task["seed"])]
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    state = {"messages": begin, "game": game, "model": model, "reward": 0.0, "outcome": ""}
    ended = await graph().ainvoke(state)
    return {"reward": ended["reward"], "outcome": ended["outcome"]}
