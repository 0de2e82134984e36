"""Script made from a notebook's function: its source, and the notebook's names that it uses.

By source and not by pickle: workers are forked before the notebook's objects exist, a run directory
must show what ran, and `shoal resume` runs it again. Modules that the function names are imported,
functions and classes of the notebook are copied with their own dependencies, plain values are
written out. Everything else (tensors, models, data) is refused by name: the function must create
it.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from shoal.errors import ConfigError

_PLAIN = (bool, int, float, str, bytes, type(None))


def write_script(function: Callable[..., Any], run_dir: Path, *, call: str = "{}()", given: int = 0) -> str:
    """Write the script that calls a function, named by a hash of its contents; return its path.

    `call` is the call expression, with braces for the function's name and the `given` arguments.
    """
    text = script_of(function, call=call, given=given)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = run_dir / "functions" / digest / f"{function.__name__}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def script_of(function: Callable[..., Any], *, call: str = "{}()", given: int = 0) -> str:
    """Text of a script that calls a function; ConfigError if it depends on something a script cannot have."""
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise ConfigError(
            f"shoal.run takes the path of a script or a function that was written with def, got {function!r}. Nothing was started."
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(needed) > given:
        raise ConfigError(
            f"{function.__name__} has arguments without a default ({', '.join(needed)}), and shoal.run calls it with "
            f"{given or 'none'}. Nothing was started; give the others defaults."
        )
    lines: dict[str, str] = {}
    _collect(function, lines)
    return "\n\n".join(
        ['"""Written by shoal.run."""', *lines.values(), call.replace("{}", function.__name__) + "\n"]
    )


def _collect(thing: Any, lines: dict[str, str]) -> None:
    """Add the source of a function or class to `lines`, after its dependencies."""
    name = thing.__name__
    if getattr(thing, "__closure__", None):
        raise ConfigError(
            f"{name} uses variables of the function around it ({', '.join(thing.__code__.co_freevars)}), which its workers do not "
            "have. Nothing was started; define it in a cell of its own."
        )
    try:
        source = _source(thing)
    except (OSError, SyntaxError, TypeError):
        raise ConfigError(
            f"the source of {name} cannot be found. Nothing was started; write it into a file, and give its path to shoal.run."
        ) from None
    functions = [thing] if isinstance(thing, FunctionType) else [
        each for each in vars(thing).values() if isinstance(each, FunctionType)
    ]  # fmt: skip
    lines[name] = ""  # placeholder: the function may refer to itself
    outside = inspect.getmodule(thing)
    around = functions[0].__globals__ if functions else vars(outside) if outside else {}
    named = {each for function in functions for each in _names(function.__code__)}
    if isinstance(thing, type):
        named |= {base.__name__ for base in thing.__bases__}
    for each in sorted(named):
        if each in around and each not in lines and not hasattr(builtins, each):
            _define(each, around[each], name, lines)
    del lines[name]
    lines[name] = source.rstrip()


def _source(thing: Any) -> str:
    if isinstance(thing, FunctionType):
        return textwrap.dedent(inspect.getsource(thing))
    # For a class defined in a notebook only its methods know the cell.
    first = next((each for each in vars(thing).values() if isinstance(each, FunctionType)), None)
    if first is None:
        raise OSError
    text = "".join(linecache.getlines(first.__code__.co_filename))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef) or node.name != thing.__name__:
            continue
        if node.lineno <= first.__code__.co_firstlineno <= (node.end_lineno or 0):
            return ast.unparse(node)
    raise OSError


def _define(name: str, value: Any, user: str, lines: dict[str, str]) -> None:
    if isinstance(value, ModuleType):
        lines[name] = f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else "")
    elif isinstance(value, (FunctionType, type)) and value.__module__ == "__main__":
        _collect(value, lines)
    elif (
        hasattr(value, "__module__")
        and hasattr(value, "__qualname__")
        and value.__module__ not in (None, "__main__")
    ):
        renamed = f" as {name}" if value.__name__ != name else ""
        lines[name] = f"from {value.__module__} import {value.__name__}{renamed}"
    elif _is_plain(value):
        lines[name] = f"{name} = {value!r}"
    else:
        raise ConfigError(
            f"{user} uses '{name}', a {type(value).__name__} of this notebook, which its workers do not have. Nothing was started; "
            f"make it inside {user}."
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in _PLAIN


def _names(code: CodeType) -> Iterator[str]:
    """Global names that a function, or one inside of it, may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
