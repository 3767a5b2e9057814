"""Draws small faults in the package's sources: a flipped comparison, a dropped call, a constant one too large.

A mutant is one such fault at one place. Places inside annotations, docstrings, messages of errors, f-strings and lines
of a log are left out, because no test of behaviour can see them.
"""

import ast
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("protocol", "core", "runtime", "transport")
TEXT_MAX = 80
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is, what it changes, and the statement that a test must reach to see it."""

    path: str
    line: int
    # Number of this place among all places of the file, in the order of `places`.
    place: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def mutate(tree: ast.Module, place: int) -> ast.Module:
    """Return the tree with the fault of one place; the tree itself is changed."""
    for number, (_, change) in enumerate(places(tree)):
        if number == place:
            change()
            return ast.fix_missing_locations(tree)
    raise ValueError(f"the file has no place {place}")


def probe(tree: ast.Module, numbers: Mapping[int, int]) -> set[int]:
    """Let the functions around some places note that they run; `numbers` maps places to the numbers that are noted.

    Returns the numbers whose place cannot be noted: compiled functions (Numba) take no note, and statements outside of
    functions run at import, for all tests.
    """
    nodes = {id(node): numbers[place] for place, (node, _) in enumerate(places(tree)) if place in numbers}
    # Inner functions come after the functions around them, so the innermost is the last that holds a node.
    holders = {
        nodes[id(node)]: function
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if id(node) in nodes
    }
    noted = set()
    for number, function in holders.items():
        if any(re.search("njit|intrinsic|compiled", ast.unparse(each)) for each in function.decorator_list):
            continue
        call = f"__import__('scripts.mutants.notes', fromlist=['note']).note({number})"
        first = 1 if ast.get_docstring(function) is not None else 0
        function.body[first:first] = ast.parse(call).body
        noted.add(number)
    ast.fix_missing_locations(tree)
    return set(numbers.values()) - noted


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, Callable[[], None]]]:
    """Yield each node that can carry a fault, and the function that puts it there."""
    for node in _behaviour(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield node, lambda node=node: node.ops.__setitem__(0, COMPARISONS[type(node.ops[0])]())
        elif isinstance(node, ast.BoolOp):
            yield node, lambda node=node: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
            yield node, lambda node=node: setattr(node, "op", ARITHMETIC[type(node.op)]())
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node, lambda node=node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            other = (not node.value) if isinstance(node.value, bool) else node.value + 1
            yield node, lambda node=node, other=other: setattr(node, "value", other)
        elif isinstance(node, ast.Expr | ast.Return) and isinstance(node.value, ast.expr):
            yield node, lambda node=node: setattr(node, "value", ast.Constant(None))


def _behaviour(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one, in the order of the source, without what no test of behaviour can see."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom
            ):
                continue
            if isinstance(child, ast.Expr) and re.match("log\\.|['\"]", ast.unparse(child)):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                continue
            yield child
            yield from _behaviour(child)


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """Return up to `count` mutants, the same number of each room, drawn by the seed over all places of the room."""
    drawn: list[Mutant] = []
    for index, room in enumerate(ROOMS):
        found = [
            (path, place)
            for path in sorted((root / "diloco_jax" / room).rglob("*.py"))
            if "_pb2" not in path.name
            for place, _ in enumerate(places(ast.parse(path.read_text())))
        ]
        number = count // len(ROOMS) + (index < count % len(ROOMS))
        drawn += [describe(root, *each) for each in random.Random(f"{seed} {room}").sample(found, number)]
    # A place such as `return None` may change nothing.
    return [mutant for mutant in drawn if mutant.before != mutant.after or len(mutant.before) == TEXT_MAX]


def describe(root: Path, path: Path, place: int) -> Mutant:
    """Return a mutant with its line and its text before and after, at most TEXT_MAX characters each."""
    tree = ast.parse(path.read_text())
    for number, (node, change) in enumerate(places(tree)):
        if number == place:
            before = _head(node)
            line = int(getattr(node, "lineno", 0))
            change()
            return Mutant(str(path.relative_to(root)), line, place, before, _head(node))
    raise ValueError(f"{path} has no place {place}")


def _head(node: ast.AST) -> str:
    shown = node.test if isinstance(node, ast.If | ast.While) else node
    text = " ".join(ast.unparse(ast.fix_missing_locations(shown)).split())
    return text if len(text) < TEXT_MAX else text[: TEXT_MAX - 3] + "..."
