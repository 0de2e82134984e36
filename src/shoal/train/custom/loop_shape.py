"""Shape of a script's training loop, from its source: whether a replaced worker can enter it in the middle.

A `while` tests variables, and these can be transferred. A `for` holds an iterator that cannot be
reached: one over `range` is found again by its line, one over shoal's data knows its position. No
other loop can be entered.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from shoal.errors import ClusterError
from shoal.runtime.user_frames import is_ours

_STDLIB = sysconfig.get_path("stdlib")
_PROGRESS_BARS = ("tqdm",)
_DRAWS = re.compile(r"\b(np|numpy)\.random\b|(?<![\w.])random\.\w|from (numpy\.)?random import")
_HIDDEN_STATE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class CannotEnter(Exception):
    """Internal: a loop that has to be run from its beginning, with the line that is the reason."""


class RangeLoop(NamedTuple):
    """`for NAME in range(...)` around the place where data is taken."""

    depth: int
    """Index of the script's frame, from the innermost."""

    line: int
    name: str


class Shape(NamedTuple):
    """State to restore in a process that enters the loop."""

    ranges: tuple[RangeLoop, ...]
    carried: frozenset[str]
    """Names that an iteration reads before it writes them."""

    targets: frozenset[str]
    """Names in the innermost frame that the loop over the data writes with every batch, so they need no note."""

    asks: bool
    """Whether a `while` decides how often the data is iterated."""

    draws: bool
    """Whether the script draws from the global generators of Python or numpy."""


def script_frames() -> list[FrameType]:
    """The script's own frames on this stack, innermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_script(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames


@functools.cache  # called for every frame at every step
def _is_script(file: str) -> bool:
    return not is_ours(file) and not any(bar in file for bar in _PROGRESS_BARS)


def is_library(file: str | None) -> bool:
    """Whether a file is no part of the user's script."""
    return file is None or "site-packages" in file or file.startswith((_STDLIB, "<")) or is_ours(file)


def shape_of(frames: Sequence[FrameType], set_up_at: Sequence[tuple[CodeType, int]]) -> Shape:
    """Loops around the present position; those around `shoal.setup` are run from their beginning anyway."""
    ranges: list[RangeLoop] = []
    carried: set[str] = set()
    targets: set[str] = set()
    asks = False
    for depth, frame in enumerate(frames):
        code, line = frame.f_code, frame.f_lineno
        if is_library(code.co_filename):
            raise CannotEnter(f"the data is iterated by {code.co_filename}, which shoal cannot look into")
        if code.co_flags & _HIDDEN_STATE or code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>"):
            raise _at(frame, f"the data is iterated inside {code.co_name}, whose place cannot be handed over")
        around_setup = [at for where, at in set_up_at if where is code]
        loops = list(_loops_around(_function(frame), line))
        for loop in loops:
            if any(loop.lineno <= at <= (loop.end_lineno or 0) for at in around_setup):
                continue
            if isinstance(loop, ast.While):
                asks = True
                continue
            if not isinstance(loop, ast.For):
                raise _at(frame, "an asynchronous loop cannot be entered", loop.lineno)
            if _is_header(loop, line):
                if depth == 0:
                    _check_driver(frame, loop)
                    targets = _stored(loop.target)
                continue
            ranges.append(_range_loop(frame, depth, loop))
        if loops:
            # An outer loop carries the names of its inner ones.
            carried |= _carried(loops[0])
    draws = any(_DRAWS.search("".join(linecache.getlines(file))) for file in _files(frames))
    return Shape(tuple(ranges), frozenset(carried), frozenset(targets), asks, draws)


def check_for_loop(frames: Sequence[FrameType]) -> None:
    """Raise CannotEnter unless the data is iterated by a `for` over it, which ends at the end of the data or by `break`."""
    frame = frames[0]
    if is_library(frame.f_code.co_filename):
        raise CannotEnter(f"the data is iterated by {frame.f_code.co_filename}")
    headers = [
        loop
        for loop in _loops_around(_function(frame), frame.f_lineno)
        if isinstance(loop, ast.For) and _is_header(loop, frame.f_lineno)
    ]
    if not headers or frame.f_code.co_flags & _HIDDEN_STATE:
        raise _at(frame, "a batch is taken outside of a `for` over the data")
    try:
        _check_driver(frame, headers[-1])
    except CannotEnter:
        raise _at(frame, f"the data is inside of `{ast.unparse(headers[-1].iter)}`") from None


def is_left_by_break(frames: Sequence[FrameType]) -> bool:
    """Whether a `for` ends its iteration by `break` or `return`, and not by an exception.

    The first two drop the iterator by an instruction of their own. While an exception leaves the
    loop, the frame still stands at the instruction that raised it.
    """
    if not frames:
        return False
    code, at = frames[0].f_code.co_code, frames[0].f_lasti
    return 0 <= at < len(code) and dis.opname[code[at]] in ("POP_TOP", "POP_ITER")


def _files(frames: Sequence[FrameType]) -> set[str]:
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {frame.f_code.co_filename for frame in frames} | {f for f in modules if f and not is_library(f)}


def set_up_here() -> list[tuple[CodeType, int]]:
    """Lines of the script's call of `shoal.setup`, frame by frame."""
    return [(frame.f_code, frame.f_lineno) for frame in script_frames()]


# ---- in a replacement ---------------------------------------------------------------------------

_iterating: dict[tuple[CodeType, int], _Positioned] = {}


class Range:
    """`range`, in a replacement worker: its iterators can be set to a position."""

    def __init__(self, *args: int) -> None:
        self._range = builtins.range(*args)

    def __iter__(self) -> Iterator[int]:
        positioned, frame = _Positioned(self._range), script_frames()[0]
        _iterating[frame.f_code, frame.f_lineno] = positioned
        return positioned

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, at: Any) -> Any:
        return self._range[at]

    def __contains__(self, value: object) -> bool:
        return value in self._range

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._range)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._range, name)


class _Positioned(Iterator[int]):
    def __init__(self, numbers: range) -> None:
        self._numbers, self._next = numbers, 0

    def __next__(self) -> int:
        if self._next >= len(self._numbers):
            raise StopIteration
        self._next += 1
        return self._numbers[self._next - 1]

    def go_after(self, value: int) -> None:
        self._next = self._numbers.index(value) + 1


def use_enterable(frames: Sequence[FrameType], names: dict[str, Any]) -> None:
    """Make the script's files, and no library, use these instead of the builtins of the same names."""
    spaces = [frame.f_globals for frame in frames]
    spaces += [
        vars(module)
        for module in list(sys.modules.values())
        if not is_library(getattr(module, "__file__", None))
    ]
    for space in spaces:
        for name, value in names.items():
            space.setdefault(name, value)


def enter(frames: Sequence[FrameType], ranges: Sequence[RangeLoop]) -> None:
    """Set the `range` loops around this place to the transferred values of their variables."""
    for depth, line, name in ranges:
        frame = frames[depth]
        found = _iterating.get((frame.f_code, line))
        value = frame.f_locals.get(name)
        if found is None or not isinstance(value, int):
            raise ClusterError(
                f"a replaced worker did not come by `for {name} in range(...)` ({frame.f_code.co_filename}, line {line}), where "
                "the others are. Weights and what was saved are safe; start the job again."
            )
        found.go_after(value)


# ---- reading source -----------------------------------------------------------------------------


@functools.cache
def _tree(file: str) -> ast.Module | None:
    source = "".join(linecache.getlines(file))
    try:
        return ast.parse(source) if source else None
    except SyntaxError:
        return None


def _function(frame: FrameType) -> ast.AST:
    code = frame.f_code
    tree = _tree(code.co_filename)
    if tree is None:
        raise CannotEnter(f"the source of {code.co_filename} cannot be read")
    if code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise _at(frame, f"the source of {code.co_name} cannot be found")


def _loops_around(node: ast.AST, line: int) -> Iterator[ast.For | ast.While | ast.AsyncFor]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if not getattr(child, "lineno", line) <= line <= (getattr(child, "end_lineno", line) or line):
            continue
        if isinstance(child, (ast.For, ast.While, ast.AsyncFor)):
            yield child
        yield from _loops_around(child, line)


def _is_header(loop: ast.For, line: int) -> bool:
    return loop.iter.lineno <= line <= (loop.iter.end_lineno or loop.iter.lineno)


def _call_of(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "?")


def _check_driver(frame: FrameType, loop: ast.For) -> None:
    source, names = loop.iter, [*_PROGRESS_BARS, "enumerate"]
    while (called := _call_of(source)) and isinstance(source, ast.Call) and called in names and source.args:
        # A progress bar inside an enumerate would be counted from the bar's beginning.
        names = [] if called == "enumerate" else names
        source = source.args[0]
    if not isinstance(source, (ast.Name, ast.Attribute)):
        raise _at(frame, f"the place of `{ast.unparse(loop.iter)}` cannot be handed over", loop.lineno)


def _range_loop(frame: FrameType, depth: int, loop: ast.For) -> RangeLoop:
    source: ast.expr = loop.iter
    while _call_of(source) in _PROGRESS_BARS and isinstance(source, ast.Call) and source.args:
        source = source.args[0]
    if _call_of(source) != "range" or not isinstance(loop.target, ast.Name):
        raise _at(
            frame,
            f"the place of `for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}` cannot be handed over",
            loop.lineno,
        )
    name = loop.target.id
    if any(name in _stored(statement) for statement in loop.body):
        raise _at(frame, f"`{name}` is changed inside the loop that counts it", loop.lineno)
    return RangeLoop(depth, loop.iter.lineno, name)


def _carried(loop: ast.For | ast.While | ast.AsyncFor) -> set[str]:
    """Names that are read before they are written, by line order."""
    written = (
        set()
        if isinstance(loop, ast.While)
        else {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    )
    carried: set[str] = set()

    def visit(statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            inner = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
            if any(inner):
                heads = [n for n in ast.iter_child_nodes(statement) if not isinstance(n, ast.stmt)]
                for head in heads:
                    carried.update(_loaded(head) - written)
                    written.update(_stored(head))
                for part in inner:
                    visit(part if isinstance(part, list) else [])
                continue
            carried.update(_loaded(statement) - written)
            written.update(_stored(statement))

    visit(loop.body)
    every = set[str]().union(*(_stored(statement) for statement in loop.body))
    return carried & every


def _loaded(node: ast.AST) -> set[str]:
    loaded = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return loaded | {
        n.target.id for n in ast.walk(node) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)
    }


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _at(frame: FrameType, why: str, line: int | None = None) -> CannotEnter:
    return CannotEnter(f"{frame.f_code.co_filename}, line {line or frame.f_lineno}: {why}")
