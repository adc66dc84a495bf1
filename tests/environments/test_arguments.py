"""Schemas of tools that would keep a host for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from earl_core.environments.tools import arguments
from earl_core.environments.tools.functions import Tool
from earl_core.environments.tools.toolbox import Toolbox
from earl_core.system.errors import EarlError
from tests.environments.test_tools import call

LONG = "a" * 40 + "!"
DOUBLED: dict[str, Any] = {
    f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)
}
DOUBLED["a40"] = {"type": "object"}

SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a pattern": (
        {"properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}}, {"x": LONG}, "takes over"
    ),
    "a pattern of names": (
        {"properties": {"x": {}}, "patternProperties": {"^(a+)+$": {}}}, {LONG: 1}, "takes over"
    ),
    "references that double": (
        {"properties": {"x": {}}, "$ref": "#/$defs/a0", "$defs": DOUBLED}, {"x": 1}, "takes over"
    ),
    "objects that must differ": (
        {"properties": {"x": {"uniqueItems": True}}}, {"x": [{"n": n} for n in range(2000)]},
        "takes over"
    ),
    "a reference to itself": ({"properties": {"x": {}}, "$ref": "#"}, {"x": 1}, "refers to itself"),
    "a good pattern": (
        {"properties": {"x": {"pattern": "^b$"}}}, {"x": "a"}, "'a' does not match '^b$' of x"
    ),
    "what fits": ({"properties": {"x": {"pattern": "^a$"}}}, {"x": "a"}, ""),
}  # fmt: skip


@pytest.mark.timeout(120)
def test_a_schema_has_a_bound_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "SECONDS", 0.5)

    async def use(name: str, schema: dict[str, Any], given: dict[str, Any]) -> str:
        async def tool(**_: Any) -> str:
            return "done"

        about = {"name": "tool", "description": "", "parameters": {"type": "object", **schema}}
        box = Toolbox([Tool({"type": "function", "function": about}, tool)], 5.0)
        made = call("tool")
        made["function"]["arguments"] = given

        async def here(function: Any) -> Any:
            return function()

        result = await box.use([made], here)
        return str(result.messages[0]["content"])

    async def all_of_them() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.05)
                ticks += 1

        ticking = asyncio.create_task(tick())
        for name, (schema, given, message) in SCHEMAS.items():
            begun = time.monotonic()
            said = await use(name, schema, given)
            assert message in said if message else said == "done", (name, said)
            assert time.monotonic() - begun < 60
        ticking.cancel()
        assert ticks > 10

    asyncio.run(all_of_them())


def test_a_check_outlives_the_thread_that_asked_first() -> None:
    """The kernel ends the process with that thread: the next call begins another."""
    check, said = arguments.ArgumentCheck(), []
    schema = {"properties": {"x": {"pattern": "^b$"}}}

    def ask() -> None:
        said.append(check.misfit("tool", schema, {"x": "a"}))

    for _ in range(3):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        time.sleep(0.1)
    ask()
    assert said == ["'a' does not match '^b$' of x"] * 4


@pytest.mark.parametrize("answered", ["", "print('\"half an answ', end='', flush=True)"])
def test_a_schema_that_ends_the_process_each_time_is_told(
    answered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that fills the memory of a container; the next schema has a process again."""
    program = f"import os; print(flush=True); input(); {answered or 'pass'}; os._exit(137)"
    schema = {"properties": {"x": {"pattern": "^b$"}}}
    check = arguments.ArgumentCheck()
    with monkeypatch.context() as patched:
        patched.setattr(arguments, "_PROGRAM", program)
        for _ in range(2):
            with pytest.raises(EarlError, match="compares arguments of tool ended twice"):
                check.misfit("tool", schema, {"x": "a"})
    assert check.misfit("tool", schema, {"x": "a"}) == "'a' does not match '^b$' of x"


@pytest.mark.timeout(120)
def test_threads_side_by_side_have_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of them takes too long, or the process is killed between two questions."""
    monkeypatch.setattr(arguments, "SECONDS", 2.0)
    check = arguments.ArgumentCheck()

    def ask(number: int) -> str:
        if number == 13:
            schema, given = {"properties": {"x": {"pattern": "^(a+)+$"}}}, LONG
        else:
            schema, given = {"properties": {"x": {"pattern": f"^{number}$"}}}, f"{number % 2}"
        if number == 7 and (process := check._process):
            process.kill()
        try:
            return check.misfit(f"tool{number}", schema, {"x": given})
        except EarlError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(ask, range(40)))
    for number, each in enumerate(said):
        if number == 13:
            assert "tool13 has a schema that takes over" in each
        elif number < 2:
            assert each == ""
        else:
            assert each == f"'{number % 2}' does not match '^{number}$' of x"
