"""Every launch written in the launch layer, read from its text: which kernel, and which arguments by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cupaged.kernels.cuda.packing import PLANES

ATTENTION = ("paged_attention", "paged_attention_tensor")  # what a variant is of


@dataclass
class Launch:
    """``self._launch(source, kernel, grid, threads, defines, ..., name=value, **more)`` in a function of a file."""

    file: str
    call: ast.Call
    function: ast.FunctionDef
    tree: ast.Module

    def __repr__(self) -> str:
        return f"{self.file}:{self.call.lineno}"

    def calls(self) -> Iterator[tuple[str, str, set[str]]]:
        """(source, kernel, names of arguments) of every kernel that this launch is of."""
        source, kernel = self.call.args[:2]
        if isinstance(source, ast.Constant) and isinstance(kernel, ast.Constant):
            yield source.value, kernel.value, self._names(None)
        elif isinstance(source, ast.Attribute) and source.attr == "source":
            for name in ATTENTION:
                yield f"{name}.cu", name, self._names(None)
        else:  # a method that gets the kernel's name, and the rest of its arguments, from its callers
            assert isinstance(source, ast.Constant) and isinstance(kernel, ast.Name), self
            for caller in _calls_of(self.function.name, self.tree):
                (first, *_) = caller.args
                assert isinstance(first, ast.Constant), self
                yield source.value, first.value, self._names(caller)

    def _names(self, caller: ast.Call | None) -> set[str]:
        names: set[str] = set()
        for keyword in self.call.keywords:
            names |= {keyword.arg} if keyword.arg is not None else self._spread(keyword.value, caller)
        return names

    def _spread(self, value: ast.expr, caller: ast.Call | None) -> set[str]:
        """The keys of a dictionary that is given as ``**value``."""
        if isinstance(value, ast.Attribute):
            assert value.attr == "planes", self
            return set(PLANES)
        assert isinstance(value, ast.Name), self
        if self.function.args.kwarg is not None and self.function.args.kwarg.arg == value.id:
            assert caller is not None, self
            return {keyword.arg for keyword in caller.keywords if keyword.arg is not None}
        found = [
            node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == value.id
        ]
        assert len(found) == 1 and isinstance(found[0], ast.Dict), (self, value.id)
        return {key.value for key in found[0].keys if isinstance(key, ast.Constant)}


def launches(folder: Path) -> list[Launch]:
    """All of a folder's files."""
    found = []
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            for call in _calls_of("_launch", function):
                found.append(Launch(path.name, call, function, tree))
    return found


def _calls_of(name: str, tree: ast.AST) -> list[ast.Call]:
    """Calls of ``self.name(...)``."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == name]
