"""Draws faults from the source: an operator swapped, a constant changed, a call dropped, a condition negated,
arguments swapped.

In: a file's text, a seed. Out: faults, always the same ones for the same text and seed. Each place of the
source gets a number from the seed and the statement that it is in, and the smallest numbers are drawn: a
change elsewhere in the file leaves the others as they were.

Left out is what no test should look at: texts, messages of errors and asserts, logging, annotations,
decorators, class bodies.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.planted_faults.fault import Fault
from tests.planted_faults.moved import FIRST_NAMES

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_NOT_CALLED_FOR_EFFECT = ("logger", "logging", "warnings")


@dataclass(frozen=True, slots=True)
class Site:
    """A place of the source, in characters from its begin, and what would be put there."""

    function: str
    kind: str
    statement: str
    start: int
    stop: int
    replacement: str


def draw(path: str, source: str, seed: int, count: int, tests: tuple[str, ...]) -> list[Fault]:
    """`count` faults of a file, or all that it has room for; never two in one statement."""
    numbered = sorted(
        (
            (_number(FIRST_NAMES.get(path, path), seed, site, place), site)
            for place, site in _counted(sites(source))
        ),
        key=lambda pair: pair[0],
    )
    chosen: list[Fault] = []
    statements: set[tuple[str, str]] = set()
    for number, site in numbered:
        if len(chosen) == count:
            break
        if (site.function, site.statement) in statements:
            continue
        statements.add((site.function, site.statement))
        name = f"{path.removesuffix('.py').replace('/', '.')}.{site.function.split('.')[-1]}-{site.kind}-{number[:6]}"
        chosen.append(
            Fault(
                name,
                path,
                source[site.start : site.stop],
                site.replacement,
                tests,
                site.function,
                site.statement,
                site.start,
            )
        )
    return chosen


def _counted(found: list[Site]) -> Iterator[tuple[int, Site]]:
    """Each site with its place among those that look alike."""
    seen: dict[tuple[str, str, str], int] = {}
    for site in found:
        key = (site.function, site.kind, site.statement)
        seen[key] = seen.get(key, -1) + 1
        yield seen[key], site


def _number(path: str, seed: int, site: Site, place: int) -> str:
    text = "\n".join((path, str(seed), site.function, site.kind, site.statement, str(place)))
    return hashlib.sha256(text.encode()).hexdigest()


def sites(source: str) -> list[Site]:
    """Every place where a fault may be planted."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.found: list[Site] = []
        self._lines = [line + "\n" for line in source.split("\n")]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self._in_function = 0
        self._statement = ""

    # --- where faults may be
    # ------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                self.visit(child)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self._names.append(node.name)
        self._in_function += 1
        for child in node.body:
            self.visit(child)
        self._in_function -= 1
        self._names.pop()

    def visit_Assert(self, node: ast.Assert) -> None:
        """Not looked at, and so are the next ones."""

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._visit_statement(node, [node.value])

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip
            self.visit(node.value)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            before, self._statement = self._statement, _head(node)
            super().visit(node)
            self._statement = before
        else:
            super().visit(node)

    def _visit_statement(self, node: ast.stmt, parts: list[ast.expr]) -> None:
        for part in parts:
            self.visit(part)

    # --- the faults
    # ---------------------------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        if isinstance(value, ast.Constant):
            return
        if isinstance(value, ast.Call):
            if ast.unparse(value.func).split(".")[0] in _NOT_CALLED_FOR_EFFECT:
                return
            self._note(node, "call_dropped", "pass")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not (isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant)):  # a text with %
            self._swap(node, node.op, "op")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._swap(node, node.op, "op", parentheses=False)
        self.visit(node.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._swap(node, node.op, "op")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if type(node.ops[0]) in _OPERATORS:
            changed = copy.deepcopy(node)
            changed.ops[0] = _OPERATORS[type(node.ops[0])]()  # type: ignore[call-overload]
            self._note(node, "operator", f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._note(node, "constant", repr(not value))
        elif isinstance(value, int):
            self._note(node, "constant", repr(value + 1))
        elif isinstance(value, float):
            self._note(node, "constant", repr(value * 2 if value else 1.0))

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        first = node.args[:2]
        plain = len(first) == 2 and not any(
            isinstance(argument, (ast.Starred, ast.JoinedStr)) for argument in first
        )
        # Of different kinds they would end in an error at once.
        if plain and type(first[0]) is type(first[1]) and ast.dump(first[0]) != ast.dump(first[1]):
            changed = copy.deepcopy(node)
            changed.args[:2] = changed.args[1::-1]
            if ast.unparse(node.func) not in ("isinstance", "hasattr", "getattr", "setattr", "zip"):
                self._note(node, "arguments", ast.unparse(changed))
        self.generic_visit(node)

    def _swap(self, node: ast.AST, operator: ast.AST, member: str, *, parentheses: bool = True) -> None:
        if type(operator) in _OPERATORS:
            changed = copy.deepcopy(node)
            setattr(changed, member, _OPERATORS[type(operator)]())
            text = ast.unparse(changed)
            self._note(node, "operator", f"({text})" if parentheses else text)

    def _negate(self, test: ast.expr) -> None:
        self._note(test, "negated", f"(not ({ast.unparse(test)}))")

    def _note(self, node: ast.AST, kind: str, replacement: str) -> None:
        if self._in_function:
            start, stop = (
                self._place(node.lineno, node.col_offset),
                self._place(node.end_lineno, node.end_col_offset),
            )  # type: ignore
            self.found.append(Site(".".join(self._names), kind, self._statement, start, stop, replacement))

    def _place(self, line: int, column: int) -> int:
        """Columns of ast count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def _head(node: ast.stmt) -> str:
    """The statement without those within it, as text that does not depend on how it is laid out."""
    alone = copy.copy(node)
    for member in ("body", "orelse", "finalbody", "handlers", "cases"):
        if getattr(alone, member, None):
            setattr(alone, member, [ast.Pass()] if member == "body" else [])
    return ast.unparse(alone) if not isinstance(node, (ast.Match, ast.Try)) else type(node).__name__
