"""Waits and keep-alives taken out one at a time, to see whether the double notices.

A mutant is a place in a file; `applied` puts the changed code into the functions that are already there, so that
whoever holds them runs it.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

# Methods -> what becomes of a call: "wait" and "synchronize" block the host, or order a stream behind an event.
KINDS = {"wait": "no wait", "synchronize": "no wait", "done": "done too early", "_keep": "not kept"}
KEEPERS = ("_used", "_held")  # what is assigned to, so that arrays live on
NOTES = ("copied", "_filling")  # where an event is noted that somebody waits for later


@dataclass(frozen=True)
class Mutant:
    """`kind`: "no wait" (the call is left out), "done too early" (True whatever the event says), "not kept", or "not
    noted" (None in place of the event)."""

    path: str
    line: int
    column: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line} {self.kind}: {self.text}"


def mutants(path: str | Path) -> list[Mutant]:
    """All places of a file."""
    found = []
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        kind = _kind(node)
        if kind is not None and isinstance(node, ast.expr | ast.stmt):
            found.append(Mutant(str(path), node.lineno, node.col_offset, kind, ast.unparse(node)))
    return found


def _kind(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return KINDS.get(node.func.attr)
    pairs = _pairs(node)
    if any(_noted(target) for target, _ in pairs):
        return "not noted"
    return "not kept" if any(_keeper(target) and _holds(value) for target, value in pairs) else None


def _pairs(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Targets and values of an assignment, those of tuples one by one."""
    if isinstance(node, ast.AugAssign):
        return [(node.target, node.value)]
    if not isinstance(node, ast.Assign):
        return []
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _holds(value: ast.expr) -> bool:
    return isinstance(value, ast.Name | ast.ListComp) or (isinstance(value, ast.List) and bool(value.elts))


def _keeper(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr in KEEPERS


def _noted(target: ast.expr) -> bool:
    place = target.value if isinstance(target, ast.Subscript) else target
    return isinstance(place, ast.Attribute) and place.attr in NOTES


class _Change(ast.NodeTransformer):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self.done = 0

    def visit(self, node: ast.AST) -> ast.AST:
        mutant = self._mutant
        here = (getattr(node, "lineno", 0), getattr(node, "col_offset", -1)) == (mutant.line, mutant.column)
        if here and _kind(node) == mutant.kind and ast.unparse(node) == mutant.text:
            self.done += 1
            return ast.copy_location(self._changed(node), node)
        return self.generic_visit(node)

    def _changed(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Call):  # evaluated but for the call, so that a function's variables stay the same
            parts = ast.Tuple([node.func, *node.args], ast.Load())
            value = ast.Constant(self._mutant.kind == "done too early")
            return ast.Subscript(ast.List([value, parts], ast.Load()), ast.Constant(0), ast.Load())
        if isinstance(node, ast.Assign) and self._mutant.kind == "not noted":
            node.value = ast.Subscript(
                ast.List([ast.Constant(None), node.value], ast.Load()), ast.Constant(0), ast.Load()
            )
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            node.value.elts = [_emptied(v) if _keeper(t) else v for t, v in _pairs(node)]
        elif isinstance(node, ast.Assign | ast.AugAssign):
            node.value = _emptied(node.value)
        return node


def _emptied(value: ast.expr) -> ast.expr:
    """An empty list in place of a list."""
    return ast.BinOp(value, ast.Mult(), ast.Constant(0))


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The mutant's code in every function of its file, and what was there again afterwards."""
    tree = ast.parse(Path(mutant.path).read_text(encoding="utf-8"))
    change = _Change(mutant)
    tree = ast.fix_missing_locations(change.visit(tree))
    assert change.done == 1, mutant
    codes = {(code.co_qualname, code.co_firstlineno): code for code in _codes(compile(tree, mutant.path, "exec"))}
    before: list[tuple[FunctionType, CodeType]] = []
    # By type(): isinstance asks an object for its class, which a weak proxy of something gone answers by an error.
    for function in [each for each in gc.get_objects() if type(each) is FunctionType]:
        old = function.__code__
        new = codes.get((old.co_qualname, old.co_firstlineno))
        if old.co_filename == mutant.path and new is not None and new.co_freevars == old.co_freevars:
            before.append((function, old))
            function.__code__ = new
    assert before, mutant
    try:
        yield
    finally:
        for function, old in before:
            function.__code__ = old


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
