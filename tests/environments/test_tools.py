"""Tools in environment hosts: calls, their faults, and what a bad one costs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.base import EnvironmentFailed, Message, StepResult
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.registry import create, host_tools
from earl_core.environments.tools.calculator import calculator
from earl_core.environments.tools.functions import Tool
from earl_core.environments.tools.toolbox import OUTPUT_CHARACTERS, Toolbox
from earl_core.system.errors import ConfigError

USER = "tests.environments.user_tools"
SHOP = f"{USER}:Shop"
FUNCTIONS = (
    *("add", "raising", "slow", "stuck", "huge", "dying", "unprintable"),
    *("decorated", "unwritable", "dozing"),
)
OWN = tuple(f"{USER}:{name}" for name in FUNCTIONS)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "id": "call00000",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def calling(*calls: Any) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def in_pool(
    scenario: Callable[[EnvironmentPool], Awaitable[None]],
    name: str = SHOP,
    tools: tuple[str, ...] = ("calculator", *OWN),
    **options: Any,
) -> None:
    async def run() -> None:
        options.setdefault("tool_timeout_seconds", 1.5)
        pool = EnvironmentPool(name, tools=tools, **options)
        await pool.start()
        try:
            await scenario(pool)
        finally:
            await pool.stop()

    asyncio.run(run())


async def opened(pool: EnvironmentPool, episode: int) -> int:
    """An episode that has begun."""
    await pool.reset(episode, 0, 0)
    return episode


def check(name: str, tools: list[str], mcp: list[dict[str, Any]] | None = None) -> None:
    """What a host does as it starts."""

    async def run() -> None:
        (await host_tools(tools, mcp or [], 1.0)).offered(create(name))

    asyncio.run(run())


def texts(result: StepResult) -> list[str]:
    return [message["content"] for message in result.messages]


def test_calls_are_answered_in_their_order_and_faults_are_told() -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        await faults_are_told(pool, await opened(pool, 0))
        await odd_results_are_written(pool, await opened(pool, 1))
        await what_is_returned_is_awaited_and_written(pool, await opened(pool, 2))

    in_pool(scenario)


async def faults_are_told(pool: EnvironmentPool, episode: int) -> None:
    result = await pool.use_tools(
        episode,
        calling(
            call("add", first=2, second=3),
            call("slow", seconds=0.01),
            call("calculator", expression="6 * 7"),
            call("nothing"),
            call("add", first=2),
            call("add", first="2", second=3),
            call("add", first=1, second=2, third=3),
            call("raising"),
            call("slow", seconds=60),
        ),
    )
    known = ", ".join(("calculator", *FUNCTIONS, "buy"))
    assert texts(result) == [
        "5",
        "slept",
        "42",
        f"Error: there is no tool 'nothing': use {known}",
        "Error: add cannot take these arguments: 'second' is a required property",
        "Error: add cannot take these arguments: '2' is not of type 'integer' of first",
        "Error: add has no argument third",
        "Error: ValueError: out of order",
        "Error: slow took over 1.5 s",
    ]
    assert result.info == {"tool_errors": 6}
    assert (result.reward, result.done) == (0.0, False)
    assert {message["role"] for message in result.messages} == {"tool"}


async def odd_results_are_written(pool: EnvironmentPool, episode: int) -> None:
    """Ten megabytes, and what cannot be encoded."""
    said = calling(call("huge"), call("unprintable"))
    huge, odd = texts(await pool.use_tools(episode, said))
    assert huge.startswith("x" * OUTPUT_CHARACTERS)
    assert huge.endswith("more characters are left out]")
    assert len(huge) < OUTPUT_CHARACTERS + 100
    assert odd == '{"text": "?"}'


async def what_is_returned_is_awaited_and_written(pool: EnvironmentPool, episode: int) -> None:
    """Or the model is told."""
    calls = (call(name) for name in ("decorated", "unwritable", "dozing"))
    result = await pool.use_tools(episode, calling(*calls))
    awaited, unwritten, dozed = texts(result)
    assert awaited == "awaited"
    assert unwritten.startswith("Error: TypeError: keys must be")
    assert dozed == "Error: dozing took over 1.5 s"
    assert result.info == {"tool_errors": 2}


def test_methods_of_the_environment_are_tools_with_its_state() -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        names = [schema["function"]["name"] for schema in pool.tools]
        assert names == ["calculator", "buy"]
        for episode in (0, 1):
            await pool.reset(episode, episode, 0)
        bought = await pool.use_tools(0, calling(call("buy", item="tea"), call("buy", item="milk")))
        assert texts(bought) == ["bought tea", "bought milk"]
        assert (await pool.step(0, "done")).info == {"bought": ["tea", "milk"], "told": 3}
        assert (await pool.step(1, "done")).info == {"bought": [], "told": 0}

    in_pool(scenario, tools=("calculator",))


def test_a_tool_that_never_returns_or_dies_costs_its_own_episode() -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        await opened(pool, 1)
        await pool.use_tools(1, calling(call("buy", item="tea")))
        for episode, name, reason in ((2, "stuck", "timeout"), (3, "dying", "host_died")):
            await opened(pool, episode)
            with pytest.raises(EnvironmentFailed) as raised:
                await pool.use_tools(episode, calling(call(name)))
            assert raised.value.reason == reason
        # The other episode was replayed each time, its tool calls with it.
        assert (await pool.step(1, "done")).info == {"bought": ["tea"], "told": 2}

    in_pool(scenario, step_timeout_seconds=3.0)


def test_python_runs_with_limits_and_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        await pool.reset(0, 0, 0)
        code = {
            "printed": "print(sum(range(10)))",
            "nothing": "1 + 1",
            "raised": "1 / 0",
            "network": "import socket; socket.create_connection(('192.0.2.1', 80), 2)",
            "memory": "x = bytearray(2 << 30)",
            "file": "open('f', 'wb').write(bytes(1 << 25))",
            "variables": "import os; print(sorted(os.environ))",
            "much": "print('y' * 10**7)",
        }
        said = calling(*(call("python", code=text) for text in code.values()))
        answers = dict(zip(code, texts(await pool.use_tools(0, said)), strict=True))
        assert answers["printed"] == "45\n"
        assert answers["nothing"] == "(nothing was printed)"
        assert "ZeroDivisionError" in answers["raised"]
        assert "unreachable" in answers["network"]
        assert "MemoryError" in answers["memory"]
        assert "File too large" in answers["file"]
        assert "EARL_TEST_VARIABLE" not in answers["variables"]
        assert len(answers["much"]) < OUTPUT_CHARACTERS + 100
        with pytest.raises(ValueError, match="is not open"):
            await pool.use_tools(99, said)

    monkeypatch.setenv("EARL_TEST_VARIABLE", "of the host")
    in_pool(scenario, tools=("python",), tool_timeout_seconds=20.0)


def test_python_that_does_not_end_is_ended() -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        await pool.reset(0, 0, 0)
        code = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', "
        code += "'import time; time.sleep(4321)'])\ntime.sleep(4321)"
        (text,) = texts(await pool.use_tools(0, calling(call("python", code=code))))
        assert text == "Error: python took over 1 s"
        found = subprocess.run(["pgrep", "-f", "sleep.4321"], capture_output=True, check=False)
        assert not found.stdout

    in_pool(scenario, tools=("python",), tool_timeout_seconds=1.0)


def test_what_python_does_not_hold_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = "it reads the files that your user may"
    module = "earl_core.environments.tools.python"
    monkeypatch.setattr(f"{module}._containment", lambda: (False, [lacking]))
    said = f"the tool 'python' is not wholly contained here: {lacking}"

    async def scenario(pool: EnvironmentPool) -> None:
        assert pool.notes == [said]

    in_pool(scenario, tools=("python",), here=True)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("abacus", "there is no tool 'abacus': use one of calculator, python, or the import path"),
        (f"{USER}:no_such", "cannot be imported"),
        (f"{USER}:undocumented", "give every argument a type, and a line in the docstring"),
        (f"{USER}:NUMBER", "is not a function"),
        (f"{USER}:paint", f"'colour' of the tool '{USER}:paint' is a Colour, which"),
        (f"{USER}:many", f"'numbers' of the tool '{USER}:many' cannot be given by name"),
    ],
)
def test_bad_tools_are_refused_before_work_starts(tool: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(SHOP, [tool])
    assert message in str(raised.value)


def test_a_pool_with_a_bad_tool_does_not_start() -> None:
    with pytest.raises(ConfigError, match="there is no tool 'abacus'"):
        in_pool(lambda pool: asyncio.sleep(0), tools=("abacus",))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools have the name 'calculator'"):
        check(SHOP, ["calculator", "calculator"])
    with pytest.raises(ConfigError, match="two tools have the name 'buy'"):
        check(SHOP, [f"{USER}:buy"])


def test_the_configuration_is_checked() -> None:
    with pytest.raises(ValueError, match="an agent has its own"):
        EnvironmentConfig(agent="a:b", tools=("calculator",))
    with pytest.raises(ValueError, match="raise the latter"):
        EnvironmentConfig(name="prompt", tools=("calculator",), tool_timeout_seconds=30.0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 ** 10", "1024"), ("-7 // 2", "-4"), (" sqrt(16) + pi * 0", "4.0"), ("max(3, 5)", "5")],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "import os", "__import__('os')", "a", "9 ** 9 ** 9 ** 9", "(1).real", "[1]", "True"),
        *("1 if 1 else 2", "1" * 2000, "(" * 900, "9**999*9**999*9**999*9**999", "exp(1000)"),
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        calculator(expression)


@given(
    st.recursive(
        st.integers(-1000, 1000).map(str),
        lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        max_leaves=20,
    )
)
@settings(max_examples=200, deadline=None)
def test_the_calculator_is_pythons_arithmetic(expression: str) -> None:
    assert calculator(expression) == str(eval(expression))


def test_hosts_import_no_torch_and_without_tools_no_transformers() -> None:
    code = (
        "import sys, earl_core.environments.hosting.host\n"
        "from earl_core.environments.tools.functions import load_tool\n"
        "heavy = 'transformers', 'jsonschema', 'torch'\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "print(load_tool('calculator').name, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["[]", "calculator False"]


def test_references_of_a_schema_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_: pytest.fail("it was fetched"))
    parameters = {"type": "object", "properties": {"a": {"$ref": "http://192.0.2.1/schema"}}}
    about = {"name": "f", "description": "", "parameters": parameters}
    toolbox = Toolbox([Tool({"type": "function", "function": about}, lambda a: a)], 1.0)

    async def in_thread(function: Callable[[], Any]) -> Any:
        return function()

    result = asyncio.run(toolbox.use([call("f", a=1)], in_thread))  # type: ignore[list-item]
    assert "Unresolvable" in texts(result)[0]


def test_a_schema_may_be_true() -> None:
    parameters = {"type": "object", "properties": {"a": True}}
    about = {"name": "f", "description": "", "parameters": parameters}
    toolbox = Toolbox([Tool({"type": "function", "function": about}, repr_of)], 1.0)

    async def in_thread(function: Callable[[], Any]) -> Any:
        return function()

    result = asyncio.run(toolbox.use([call("f", a=None)], in_thread))  # type: ignore[list-item]
    assert texts(result) == ["None"]


def repr_of(a: Any) -> str:
    return repr(a)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "function"}, "a tool is described by {'type': 'function'}"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": 7}}},
            "the parameters of the tool 'f' are no JSON schema: 7 is not valid",
        ),
    ],
)
def test_a_schema_that_is_none_is_refused_before_work_starts(
    schema: dict[str, Any], message: str
) -> None:
    """Such as a server of tools may tell."""
    with pytest.raises(ConfigError) as raised:
        Toolbox([Tool(schema, print)], 1.0)
    assert str(raised.value).startswith(message)
