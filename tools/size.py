"""The size of the package: lines of code, docstrings, exception classes, import circles.

    python -m tools.size [DIRECTORY ...]

Each directory is a checkout (`git worktree add OTHER REVISION` makes one of another revision);
without one, this checkout. Lines of code are those that hold a token of Python other than a
comment or a docstring, over all modules that the wheel holds.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import graphlib
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("earl_core", "tasks", "flows")
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A source file, parsed."""

    def __init__(self, path: Path, root: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        names = path.relative_to(root).with_suffix("").parts
        self.name = ".".join(names[:-1] if names[-1] == "__init__" else names)

    def definitions(self) -> Iterator[Definition]:
        """The module itself, its classes and its functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, Definition):
                yield node

    def imports(self, names: set[str]) -> set[str]:
        """Return those of these modules that it imports when it is imported itself."""
        found: set[str] = set()
        for node in self._at_import(self.tree):
            if isinstance(node, ast.Import):
                found.update(each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                # From a package a module, else something that the module itself holds.
                inner = {f"{node.module}.{each.name}" for each in node.names}
                found |= inner & names or {node.module}
        return (found & names) - {self.name}

    def _at_import(self, node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
                yield from self._at_import(child)


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        # Those below a constant or a type are docstrings too.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - texts


def modules_of(root: Path) -> list[Module]:
    """All modules of the wheel, by path."""
    return [Module(path, root) for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]


def exception_classes(modules: list[Module]) -> set[str]:
    """Names of classes that are Python's exceptions, or come from one of these."""
    classes = [each for module in modules for each in module.definitions()]
    bases = {
        each.name: {base.id for base in each.bases if isinstance(base, ast.Name)}
        for each in classes
        if isinstance(each, ast.ClassDef)
    }
    known = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    found: set[str] = set()
    while grown := {n for n, of in bases.items() if n not in found and of & (known | found)}:
        found |= grown
    return found


def circle(modules: list[Module]) -> list[str]:
    """Modules that import each other in a circle; empty when there is none."""
    names = {module.name for module in modules}
    graph = {module.name: module.imports(names) for module in modules}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def measure(root: Path) -> dict[str, str]:
    """Every figure of a checkout, as text."""
    modules = modules_of(root)
    definitions = [each for module in modules for each in module.definitions()]
    public = [each for each in definitions if not getattr(each, "name", "").startswith("_")]
    documented = sum(ast.get_docstring(each) is not None for each in public)
    return {
        "modules": str(len(modules)),
        "lines of code": f"{sum(len(code_lines(module.text)) for module in modules):,}",
        "public definitions with a docstring": f"{documented / len(public):.1%}",
        "exception classes": str(len(exception_classes(modules))),
        "import circle": " → ".join(circle(modules)) or "none",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directories", nargs="*", type=Path, default=[Path()])
    for directory in parser.parse_args().directories:
        print(directory.resolve().name)
        for name, value in measure(directory).items():
            print(f"  {name}: {value}")


if __name__ == "__main__":
    main()
