"""An agent of each framework, in the form that its own documentation begins with.

The interpreter that imports this has that framework alone.
"""

from __future__ import annotations

from typing import Any

QUESTION = "How many people live in the capital of Switzerland?"
PEOPLE = 134794

Task = dict[str, Any]


def capital(country: str) -> str:
    """Name the capital of a country.

    Args:
        country: The name of the country.
    """
    return {"Switzerland": "Bern"}[country]


def population(city: str) -> int:
    """Count the people of a city.

    Args:
        city: The name of the city.
    """
    return {"Bern": PEOPLE}[city]


TOOLS = [capital, population]


def judged(answer: Any) -> dict[str, Any]:
    """The reward of an answer."""
    right = str(PEOPLE) in str(answer)
    return {"reward": float(right), "outcome": "right" if right else f"wrong: {answer!r:.300}"}


def smolagents_code(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    from smolagents import CodeAgent, OpenAIModel, tool

    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = CodeAgent(tools=[*map(tool, TOOLS)], model=model, max_steps=4)
    return judged(agent.run(QUESTION))


def smolagents_tools(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[*map(tool, TOOLS)], model=model, max_steps=4)
    return judged(agent.run(QUESTION))


def instructor(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    client = instructor.from_openai(OpenAI(base_url=base_url, api_key=api_key))
    question: Any = [{"role": "user", "content": QUESTION}]
    city = client.chat.completions.create(
        model="policy", response_model=City, messages=question, max_retries=2
    )
    return judged(city.people)


async def pydantic_ai(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(BaseModel):
        name: str
        people: int

    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    model = OpenAIChatModel("policy", provider=provider)
    agent = Agent(model, output_type=City, tools=TOOLS)
    return judged((await agent.run(QUESTION)).output)


async def langgraph(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    agent = create_agent(model, tools=TOOLS)
    question: Any = {"messages": [{"role": "user", "content": QUESTION}]}
    return judged((await agent.ainvoke(question))["messages"][-1].content)


async def openai_agents(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    """A hand-off, with a tool on both sides."""
    from agents import Agent, RunConfig, Runner, function_tool
    from agents.models.openai_provider import OpenAIProvider

    counter = Agent(name="Counter", instructions="Count.", tools=[function_tool(population)])
    finder = Agent(
        name="Finder",
        instructions="Find the city and hand off.",
        tools=[function_tool(capital)],
        handoffs=[counter],
    )
    provider = OpenAIProvider(
        base_url=base_url, api_key=api_key, use_responses=task["api"] == "responses"
    )
    config = RunConfig(model="policy", model_provider=provider, tracing_disabled=True)
    return judged((await Runner.run(finder, QUESTION, run_config=config)).final_output)


def dspy(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    import dspy

    # Its cache would give the second episode what the first was answered.
    model = dspy.LM("openai/policy", api_base=base_url, api_key=api_key, cache=False)
    with dspy.context(lm=model):
        return judged(dspy.ReAct("question -> answer", tools=TOOLS)(question=QUESTION).answer)


def crewai(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    import os

    # Else it reports to its makers.
    os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"
    from crewai import LLM, Agent, Crew
    from crewai import Task as Work
    from crewai.tools import tool

    model = LLM(model="openai/policy", base_url=base_url, api_key=api_key)
    agent = Agent(
        role="Geographer",
        goal="Answer questions",
        backstory="You know cities.",
        tools=[tool(each) for each in TOOLS],
        llm=model,
    )
    work = Work(description=QUESTION, expected_output="A number", agent=agent)
    return judged(Crew(agents=[agent], tasks=[work]).kickoff())


async def autogen(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "family": "unknown",
        "structured_output": True,
    }
    client = OpenAIChatCompletionClient(
        model="policy", base_url=base_url, api_key=api_key, model_info=info
    )
    agent = AssistantAgent("assistant", model_client=client, tools=TOOLS, max_tool_iterations=3)
    return judged((await agent.run(task=QUESTION)).messages[-1].content)


async def strands(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": base_url, "api_key": api_key}, model_id="policy")
    agent = Agent(model=model, tools=[*map(tool, TOOLS)], callback_handler=None)
    return judged(await agent.invoke_async(QUESTION))


async def llama_index(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="policy",
        api_base=base_url,
        api_key=api_key,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    return judged(await FunctionAgent(tools=TOOLS, llm=model).run(QUESTION))


async def litellm(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    import json

    import litellm

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [
        {
            "type": "function",
            "function": {
                "name": each.__name__,
                "description": each.__doc__,
                "parameters": {
                    "type": "object",
                    "properties": {name: {"type": "string"}},
                    "required": [name],
                },
            },
        }
        for each, name in ((capital, "country"), (population, "city"))
    ]
    while True:
        reply = await litellm.acompletion(
            model="openai/policy",
            api_base=base_url,
            api_key=api_key,
            messages=messages,
            tools=tools,
        )
        said = reply.choices[0].message
        if not said.tool_calls:
            return judged(said.content)
        messages.append(said.model_dump())
        for call in said.tool_calls:
            run: Any = {each.__name__: each for each in TOOLS}[call.function.name]
            result = run(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
