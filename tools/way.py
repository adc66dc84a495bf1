"""The way of the data through the code: what runs between an episode's end and its packing.

`earl train` runs one iteration of a run file. Every process notes which functions of EARL it runs
(`sys.setprofile`, set by a `sitecustomize` on PYTHONPATH), and the table counts those between the
end of the first episode and the end of the first packed microbatch: in the controller, the rollout
worker and the update rank; engines and environments are left out. `lines of files` are lines of
code of the files that these functions are in, `lines of functions` of the functions alone; neither
has blank lines, comments or docstrings.
"""

from __future__ import annotations

import ast
import tempfile
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from tools.harness import REPOSITORY, Report, Row, parser, publish
from tools.process_tree import train
from tools.size import code_lines

FINISHED, PACKED = "EpisodePlayer._finish", "pack"
ROLES = {
    "controller": "flows/train.py",
    "rollout worker": "RolloutWorker.",
    "update rank": "LearnerWorker.",
}
"""Roles by the file or the class whose functions only that process runs."""
LEFT_OUT = ("earl_core/rollout/engines/", "earl_core/environments/")

# A function that is called all the time is noted every two milliseconds.
_HOOK = """
import os, sys, threading, time
root, out = os.environ["EARL_WAY"].split(os.pathsep)
ours = tuple(root + each for each in ("earl_core/", "tasks/", "flows/"))
noted, own = {}, []

def note(frame, event, argument):
    if event[1] == "_" or not frame.f_code.co_filename.startswith(ours):
        return
    code, now = frame.f_code, time.monotonic()
    # Bodies of modules and classes are not optimised; only functions are.
    if code.co_flags & 1 and now - noted.get((code, event), 0.0) > 0.002:
        noted[code, event] = now
        fields = now, event, code.co_filename[len(root):], code.co_firstlineno, code.co_qualname
        if not own:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            own.append(os.open(f"{out}/{os.getpid()}", flags, 0o600))
        os.write(own[0], ("\\t".join(map(str, fields)) + "\\n").encode())

if not any("prefect" in word for word in sys.orig_argv):  # its server runs nothing of ours
    os.register_at_fork(after_in_child=own.clear)
    threading.setprofile(note)
    sys.setprofile(note)
"""


Place = tuple[str, int, str]
"""A function: its file, its first line and its name."""


class Step(NamedTuple):
    """A call of a function, or a return from it; `line` is where the function begins."""

    time: float
    event: str
    file: str
    line: int
    name: str


def main() -> None:
    made = parser(str(__doc__).partition("\n")[0])
    made.add_argument("--list", action="store_true", help="print the functions of each process too")
    made.add_argument("config", nargs="?", default="tictactoe_tiny", help="a run file or recipe")
    options = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="earl-way-") as name:
        processes = record(options.config, Path(name))
    report = Report("way", "From an episode's end to the first packed microbatch")
    ways = {role: _window(_process(processes, role), processes) for role in ROLES}
    ways["all three"] = set().union(*ways.values())
    report.rows = [_row(role, functions) for role, functions in ways.items()]
    last = report.rows[-1]
    report.headline = {f"way_{key.replace(' ', '_')}": float(last[key]) for key in list(last)[1:]}
    publish(report, options)
    for role, functions in ways.items() if options.list else ():
        places = (f"{file}:{line} {name}" for file, line, name in sorted(functions))
        print(f"{role}:", *places, sep="\n  ")


def record(config: str, scratch: Path) -> list[list[Step]]:
    """One iteration of a run; what each of its processes did."""
    for name in ("hook", "steps"):
        (scratch / name).mkdir()
    (scratch / "hook" / "sitecustomize.py").write_text(_HOOK, encoding="utf-8")
    settings = {
        "name": "way", "runs_directory": scratch / "runs", "model.path": scratch / "model",
        "iterations": 1, "evaluation.every": 0, "rollout.prompts_per_iteration": 8,
        "model.builder_options.warm_start_steps": 10,
    }  # fmt: skip
    environment = {
        "PYTHONPATH": f"{scratch / 'hook'}:{REPOSITORY}",
        "EARL_WAY": f"{REPOSITORY}/:{scratch / 'steps'}",
    }
    given = (f"{name}={value}" for name, value in settings.items())
    train(config, given, scratch, environment=environment)
    found = []
    for path in (scratch / "steps").iterdir():
        fields = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
        found.append([Step(float(t), event, f, int(n), name) for t, event, f, n, name in fields])
    return found


def _process(processes: list[list[Step]], role: str) -> list[Step]:
    """The process of a role."""
    for steps in processes:
        if any(step.file == ROLES[role] or step.name.startswith(ROLES[role]) for step in steps):
            return steps
    raise SystemExit(f"no process has run {ROLES[role]}: has it another name now?")


def _window(steps: list[Step], processes: list[list[Step]]) -> set[Place]:
    """The functions, by file and line, that ran between the two ends of the way."""
    begin = min(step.time for every in processes for step in every if step.name == FINISHED)
    rank = _process(processes, "update rank")
    packed = (step.time for step in rank if (step.name, step.event) == (PACKED, "return"))
    end = min(time for time in packed if time > begin)
    return {
        (step.file, step.line, step.name)
        for step in steps
        if begin <= step.time <= end and not step.file.startswith(LEFT_OUT)
    }


def _row(role: str, functions: set[Place]) -> Row:
    by_file: dict[str, list[int]] = defaultdict(list)
    for file, line, _ in functions:
        by_file[file].append(line)
    counts = [_lines(file, begins) for file, begins in by_file.items()]
    whole, functions_run, own = (sum(each) for each in zip(*counts, strict=True))
    return {
        "process": role, "files": len(by_file), "lines of files": whole,
        "functions": functions_run, "lines of functions": own,
    }  # fmt: skip


def _lines(file: str, begins: Collection[int]) -> tuple[int, int, int]:
    """Lines of code of a file, how many of its functions begin at these lines, and their lines."""
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    code = code_lines(text)
    own: set[int] = set()
    functions = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first in begins:
                functions += 1
                own |= set(range(first, (node.end_lineno or 0) + 1))
    return len(code), functions, len(code & own)


if __name__ == "__main__":
    main()
