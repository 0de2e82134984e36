"""Failures of a script: from an exception in a worker to a message, and from the message to an error.

The user's own error is shown as without shoal: the traceback begins at their script, and shoal's
frames between their calls and their code are left out. shoal's errors are paragraphs; only their
class, text and plain attributes are sent.
"""

from __future__ import annotations

import json
import os
import re
import signal
import traceback

import shoal
from shoal import errors
from shoal.errors import (
    ConfigError,
    CoordinatorLost,
    Interrupted,
    PeerLost,
    ScriptExited,
    ScriptFailed,
    ShoalError,
)
from shoal.runtime.transport.messages.supervisor import Failed
from shoal.runtime.user_frames import hide_ours, last_user_line

MAX_TEXT_CHARS = 12_000
"""Limit for each text of a Failed, which must fit a packet. The middle is cut: in a recursion it repeats itself."""

_SIZES = re.compile(r"gloo.* (\d+) vs (\d+)\. Received data size doesn't match")
_SHOAL = os.path.dirname(os.path.abspath(shoal.__file__)) + os.sep


def describe(
    error: BaseException, *, rank: int, stop: str | None = None, meets_peers: bool = False
) -> Failed:
    """Failed message for an exception that ended the script. `stop`: the signal that asked it to leave."""
    kind, told, code = "script", error, 1
    if isinstance(error, KeyboardInterrupt):
        told = Interrupted(signal_name=stop or signal.SIGINT.name, step=None, checkpoint=None)
    if isinstance(error, SystemExit):
        code = exit_code_of(error)
    elif isinstance(told, ShoalError):
        kind, code = "shoal", told.exit_code
    if _came_from_a_peer(error) or (meets_peers and _came_from_a_backend(error)):
        kind, code = "peer", PeerLost.exit_code
    line = last_user_line(error) if isinstance(told, ConfigError) else None
    return Failed(
        rank=rank,
        kind=kind,  # type: ignore[arg-type]  # one of the three literals
        error=type(told).__name__,
        message=_cut(_words(told) + (f" It was said at {line}." if line is not None else "")),
        traceback=_cut(user_traceback(error)),
        exit_code=code,
        facts=_plain_facts(told),
    )


def exit_code_of(error: SystemExit) -> int:
    """Exit code with which python would have ended."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def to_error(failed: Failed, *, num_workers: int) -> ShoalError:
    """Error that a Failed message stands for, with its facts as attributes."""
    if failed.error == "SystemExit":
        return ScriptExited(rank=failed.rank, code=failed.exit_code)
    kind = _error_named(failed.error)
    if failed.kind == "script" or kind is None:
        return ScriptFailed(rank=failed.rank, traceback=failed.traceback, num_workers=num_workers)
    # Not through __init__: the paragraph is complete, and the parameters differ from class to class.
    error = kind.__new__(kind)
    error.args = (failed.message,)
    for name, value in json.loads(failed.facts).items():
        setattr(error, name, value)
    error.exit_code = failed.exit_code
    return error


def _error_named(name: str) -> type[ShoalError] | None:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, ShoalError) else None


def user_traceback(error: BaseException) -> str:
    """Traceback without the launcher, and without shoal where the user's own code comes after it."""
    hide_ours(error)
    return "".join(traceback.format_exception(error))


def without_launcher(lines: list[str]) -> list[str]:
    """Stack of a crashed interpreter without shoal's frames and the list of loaded modules."""
    launcher = ('  File "<frozen runpy>"', f'  File "{_SHOAL}cluster{os.sep}', "Extension modules:")
    return [line for line in lines if not line.startswith(launcher)]


def last_words(lines: list[str], num_lines: int) -> list[str]:
    """Newest lines of a log; where gloo ended the process, its message without the stack behind it."""
    kept = without_launcher(lines)
    for at, line in enumerate(kept):
        if "gloo::EnforceNotMet" in line:
            kept = kept[: at + 2]
            break
    return kept[-num_lines:]


def why_gloo_ended_it(lines: list[str]) -> str:
    """Explanation of gloo's abort for data of another size than expected; empty where there was none."""
    found = next((sizes for line in lines if (sizes := _SIZES.search(line))), None)
    if found is None:
        return ""
    return (
        f" (it was sent {found[1]} bytes within the model where it waited for {found[2]}: most likely a layer was used for one "
        "rank's part of a batch and not for another's, by a forward that decides by the length or the values of its part; "
        "have every rank run the same layers for every batch, or use --strategy ddp, which allows for that)"
    )


def _came_from_a_peer(error: BaseException) -> bool:
    """True where the error is, or was raised while handling, the loss of another process."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, PeerLost | CoordinatorLost):
            return True
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return False


def _came_from_a_backend(error: BaseException) -> bool:
    """Whether torch raises this error when a connection of a process group breaks. gloo's errors have
    no class of their own.
    """
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _plain_facts(error: BaseException) -> str:
    if not isinstance(error, ShoalError):
        return "{}"
    try:
        facts = json.dumps(vars(error))
    except (TypeError, ValueError):
        return "{}"
    return facts if len(facts) <= MAX_TEXT_CHARS else "{}"


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # the user's own __str__
        return f"<its text cannot be had: {type(broken).__name__}>"


def _cut(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # a file name in it need not be text
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
