"""Process that has imported torch and shoal, from which the `shoal` commands of namespaced hosts are forked.

Importing takes seconds per process and a job over three hosts has six that do
it; a fork takes milliseconds. Otherwise all is as at home: a supervisor or an
agent is a process of its host, its warm parent is a child of it, and workers
are children of that.

    zygote = Zygote()
    agent = zygote.start(host, ["join", "shoal://10.77.0.1:7070"], cwd=..., output=path)
    agent.kill(); agent.wait()
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from setproctitle import getproctitle

sys.path.insert(0, str(Path(__file__).parents[1]))

from large_pages import use_large_pages

_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "mnt": 0x00020000, "pid": 0x20000000}
_libc = ctypes.CDLL(None, use_errno=True)


class Started:
    """A command on a host, as its tester sees it."""

    def __init__(self, args: Sequence[str], pid: int, line: socket.socket) -> None:
        self.args, self.pid = list(args), pid
        self.returncode: int | None = None
        self._line = line

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Exit code; minus the signal that killed it."""
        code = self._look(timeout_s)
        if code is None:
            raise TimeoutError(f"shoal {' '.join(self.args)} has not ended after {timeout_s:g} s")
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._look(10.0)
        self._line.close()

    def _look(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], timeout_s)[0]:
            self.returncode = int(self._line.recv(100) or b"-9")
        return self.returncode


class Zygote:
    """The tester's handle on the process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1"},
            )

    def start(
        self, init: int, args: Sequence[str], *, cwd: Path, output: Path, env: Mapping[str, str]
    ) -> Started:
        """Run `shoal ARGS` in the namespaces of the host whose init this is; what it prints goes to a file."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = {"init": init, "args": list(args), "cwd": str(cwd), "env": dict(env)}
        with open(output, "ab") as file, theirs:
            socket.send_fds(self._line, [json.dumps(command).encode()], [file.fileno(), theirs.fileno()])
        if not select.select([ours], [], [], 300.0)[0]:
            raise TimeoutError("the zygote has not imported torch within 300 s")
        return Started(args, int(ours.recv(100)), ours)

    def close(self) -> None:
        self._line.close()
        self._process.wait(60.0)  # the teardown of torch on a busy machine


# ---- in the zygote ------------------------------------------------------------------------------


def _serve(line: socket.socket) -> None:
    from shoal.cluster.launch import roles
    from shoal.cluster.supervisor import warm_parent_main

    for name in ("shoal.cluster.hosts.opening", "shoal.cluster.launch.api", "shoal.cluster.hosts.authority"):
        importlib.import_module(name)
    # All that any warm parent would: it then imports, compiles and freezes nothing of its own.
    warm_parent_main.import_everything(
        [roles.PRELOAD_WITH_MESH, *roles.PRELOAD_WITH_SERVERS, "shoal.train.metrics", "shoal.cli"]
    )
    use_large_pages(os.getpid())
    getproctitle()  # while the environment is where the kernel put it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        said, fds, _, _ = socket.recv_fds(line, 1 << 20, 2)
        if not said:
            return
        if os.fork() == 0:
            line.close()
            _be_parent(json.loads(said), *fds)
        for fd in fds:
            os.close(fd)


def _be_parent(command: dict[str, Any], output: int, line_fd: int) -> None:
    """Between zygote and command: enters the namespaces, and tells how the command ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(fileno=line_fd) as line:
        opened = {name: os.open(f"/proc/{command['init']}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES}
        for name, fd in opened.items():
            if _libc.setns(fd, _NAMESPACES[name]) != 0:
                os._exit(1)
            os.close(fd)
        pid = os.fork()
        if pid == 0:
            line.close()
            _be_command(command, output)
        os.close(output)
        line.send(str(pid).encode())
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(OSError):
            line.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _be_command(command: dict[str, Any], output: int) -> None:
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.chdir(command["cwd"])
        os.environ.clear()
        os.environ.update(command["env"])
        platform._uname_cache = None  # type: ignore[attr-defined]  # the machine's name
        from shoal.cli import app
        from shoal.cluster.supervisor import warm_parent

        names = {
            name: getattr(subprocess, name)
            for name in ("DEVNULL", "TimeoutExpired", "_args_from_interpreter_flags")
        }
        warm_parent.subprocess = SimpleNamespace(Popen=_ForkedWarmParent, **names)  # type: ignore[assignment]
        app(command["args"], prog_name="shoal")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _ForkedWarmParent:
    """Popen of the warm parent: a fork instead of an interpreter that imports everything again."""

    def __init__(self, command: list[str], *, pass_fds: list[int], stdout: Any, **_: Any) -> None:
        arguments = command[command.index("-m") + 1 :]
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_DFL)
            os.setsid()
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in pass_fds:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            from shoal.cluster.supervisor import warm_parent_main

            arguments[2] = str(os.getppid())
            warm_parent_main.main(arguments)
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            pidfd = os.pidfd_open(self.pid)
            ended = select.select([pidfd], [], [], timeout)[0]
            os.close(pidfd)
            if not ended:
                raise subprocess.TimeoutExpired("warm parent", timeout or 0.0)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
