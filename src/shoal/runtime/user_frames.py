"""User frames of a stack: the line that called shoal, and tracebacks without shoal's own frames.

A user whose function raises wants to see that function and the line that led to it, not the dozen
frames of shoal in between.
"""

from __future__ import annotations

import linecache
import os
import sys
from itertools import pairwise
from types import FrameType, TracebackType
from typing import NamedTuple

from shoal.errors import OtherLauncher, ShoalError
from shoal.runtime.hints import hint_for

_SHOAL = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNPY = "<frozen runpy>"
_LIBRARIES = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    os.path.dirname(os.__file__) + os.sep,
)


class UserLine(NamedTuple):
    """A line of the user's own. Its text is looked up when it is shown."""

    file: str
    number: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        return f"{self.file}, line {self.number}" + (f": {code}" if code else "")


class Elsewhere(Exception):
    """Internal: the traceback, from the process where it was raised, of the error that it is the cause of."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def is_ours(file: str) -> bool:
    """Whether a frame in this file does not interest a user: shoal, or a script's launcher."""
    return file == _RUNPY or file.startswith(_SHOAL)


def calling_line() -> UserLine | None:
    """The innermost line outside shoal on this thread's stack; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else UserLine(frame.f_code.co_filename, frame.f_lineno)


def last_user_line(error: BaseException) -> UserLine | None:
    """The innermost line of the user's own files that led to an error; None where there is none."""
    found, stack = None, error.__traceback__
    while stack is not None:
        file = stack.tb_frame.f_code.co_filename
        if not is_ours(file) and not file.startswith("<") and not any(part in file for part in _LIBRARIES):
            found = UserLine(file, stack.tb_lineno)
        stack = stack.tb_next
    return found


def hide_ours(error: BaseException) -> None:
    """Remove shoal's frames from the tracebacks of an error and of those that led to it.

    Frames behind the user's last line are kept if they may show a bug of shoal: not for shoal's own
    errors, which are paragraphs, nor for errors of another process.
    """
    seen: set[int] = set()
    chain = [error]
    while chain:
        at = chain.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        if not getattr(at, "__notes__", ()) and (hint := hint_for(at)) is not None:
            at.add_note(hint)
        is_told = isinstance(at, ShoalError) or isinstance(at.__cause__, Elsewhere)
        at.__traceback__ = _trimmed(at.__traceback__, keep_last=not is_told)
        inner = at.exceptions if isinstance(at, BaseExceptionGroup) else ()
        chain += [other for other in (at.__cause__, at.__context__, *inner) if other is not None]


def print_uncaught(kind: type[BaseException], error: BaseException) -> None:
    """Print an uncaught error under plain python, without shoal's frames."""
    if isinstance(error, OtherLauncher):
        # Every process of that launcher prints it: the paragraph, without a traceback. Python exits with
        # this code. torch's hook, installed with a process group, collects sys.stderr and would lose it by
        # the exit.
        print(f"error: {error}", file=sys.__stderr__)
        raise SystemExit(error.exit_code)
    hide_ours(error)
    sys.__excepthook__(kind, error, error.__traceback__)


def _trimmed(stack: TracebackType | None, *, keep_last: bool) -> TracebackType | None:
    frames: list[TracebackType] = []
    while stack is not None:
        frames.append(stack)
        stack = stack.tb_next
    ours = [is_ours(frame.tb_frame.f_code.co_filename) for frame in frames]
    last_outside = max((number for number, is_one in enumerate(ours) if not is_one), default=-1)
    if last_outside < 0 and any(frame.tb_frame.f_code.co_filename == _RUNPY for frame in frames):
        return None  # the script never ran, for example after a syntax error
    kept = [
        TracebackType(None, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        for number, frame in enumerate(frames)
        if not ours[number] or (keep_last and number > last_outside)
    ]
    for frame, inner in pairwise(kept):
        frame.tb_next = inner
    return kept[0] if kept else None
