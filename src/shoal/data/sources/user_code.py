"""Functions of the user's that are applied to samples: what is said when one of them raises.

The error stays the user's own, with their traceback; a note says which stage,
which sample and which line of theirs.
"""

from __future__ import annotations

import traceback
from typing import Any

from shoal.data.slice import Slice
from shoal.data.sources.source import name_of
from shoal.errors import BadSample


def blame(stage: str, fn: Any, error: Exception, index: Any, epoch: int, extra: str = "") -> None:
    """Note on an error of `fn` for which sample it was raised, and where."""
    where = f" at {place}" if (place := line_of(error, fn)) else ""
    error.add_note(
        f"raised by {stage}({name_of(fn)}) for the sample with index {index}, in epoch {epoch}{where}{extra}"
    )


def blame_batch(stage: str, fn: Any, error: Exception, part: Slice) -> None:
    """Note on an error of `fn` for which batch it was raised, and where."""
    where = f" at {place}" if (place := line_of(error, fn)) else ""
    first, last = part.start, part.start + part.num_global - 1
    mine = (
        f", for the {part.num_local} of them that are this worker's"
        if part.num_local < part.num_global
        else ""
    )
    error.add_note(
        f"raised by {stage}({name_of(fn)}) for the batch of samples {first} to {last} of epoch {part.epoch}{mine}{where}"
    )


def bad_sample(stage: str, fn: Any, error: Exception, index: Any) -> BadSample:
    """The sample that `fn` raised for, as one that may be skipped."""
    where = f", at {place}" if (place := line_of(error, fn)) else ""
    what = traceback.format_exception_only(error)[-1].strip()
    return BadSample(where=f"{stage}({name_of(fn)})", reason=f"it raised {what}{where}", index=int(index))


def line_of(error: BaseException, fn: Any) -> str | None:
    """The line of the user's own that raised: the last one in the function's file, else the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own_file = getattr(getattr(fn, "__code__", None), "co_filename", None)
    frame = next((frame for frame in reversed(frames) if frame.filename == own_file), None)
    if frame is None:
        frame = frames[-1] if len(frames) > 1 else None  # the first is the call itself, in shoal
    if frame is None:
        return None
    code = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}, line {frame.lineno}{code}"
