"""Interference from outside: noise on sockets, another user, a disk that fills, a foreign journal."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

from shoal.cluster.launch.api import resume_config
from shoal.errors import ClusterError, RunDirectoryError, ScriptFailed

Launch = Callable[..., Launched]

TRAINS = """
import os, pathlib, sys
import torch, shoal
from torch import nn
torch.manual_seed(0)
x = torch.randn(96, 4)
data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True)))
class Filler(shoal.callbacks.Callback):
    def on_step_end(self, trainer, *rest):
        if trainer.step == 9 and shoal.rank() == 0 and pathlib.Path("fill").exists():
            with open(trainer.run_dir / "filler", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
trainer = shoal.Trainer(
    nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
    callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=8), Filler()], seed=0,
)
trainer.fit(data.shuffle(seed=0).batch(16), epochs=2)
if pathlib.Path("fill").exists():
    for _ in range(400):
        trainer.evaluate(data.batch(96))
if shoal.rank() == 0:
    pathlib.Path(sys.argv[1]).write_text(repr([value.tolist() for value in trainer.model.parameters()]))
"""

NOISE = {
    "noise": repr(random.Random(3).randbytes(4000)),
    "nothing": "b''",
    "an oversized length": "struct.pack('<4sHHII', b'SHOL', 1, 0, 2**32 - 1, 0)",
    "more than fits": "b'x' * 60_000",
}


def test_what_a_script_writes_to_the_supervisors_socket_harms_nobody(launch_script: Launch) -> None:
    done = launch_script(
        f"""
        import contextlib, struct
        from shoal.cluster.worker import session
        session.begin_call("fit", "")
        for noise in [{", ".join(NOISE.values())}]:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    session._session.status.send(noise)
        session.begin_call("save", "")
        print("done")
        """,
        workers=2,
    )
    assert (done.exit_code, done.error) == (0, None)
    assert done.stdout == "done\n"


def test_an_empty_packet_does_not_end_the_conversation_with_the_supervisor(launch_script: Launch) -> None:
    done = launch_script(
        """
        from shoal.cluster.worker import session
        for _ in range(20):
            session._session.status.send(b"")
        raise ValueError("mine")
        """
    )
    assert isinstance(done.error, ScriptFailed)
    assert "ValueError: mine" in str(done.error)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_refused_and_the_job_goes_on(launch_script: Launch) -> None:
    done = launch_script(
        """
        import ctypes, os, socket
        from shoal.cluster.worker import session
        from shoal.config import job as jobs
        job = jobs.current()

        def as_another_user():
            pid = os.fork()
            if pid:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            code = 1
            try:
                os.setgroups([])
                os.setuid(65534)
                ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self stays open to it
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(10.0)
                    sock.connect(job.coordinator)
                    try:
                        sock.sendall(b"let me in")
                        code = 7 if sock.recv(100) == b"" else 8
                    except ConnectionError:
                        code = 7
            except PermissionError:
                code = 6
            finally:
                os._exit(code)

        session.begin_call("fit", "")
        if job.rank == 0:
            print(as_another_user())
            os.chmod(job.coordinator, 0o666)
            print(as_another_user())
        session.begin_call("save", "")
        """,
        workers=2,
    )
    assert (done.exit_code, done.error, done.stdout) == (
        0,
        None,
        "6\n7\n",
    )  # by the mode; by the kernel's word


def test_a_disk_that_fills_under_the_journal_ends_the_job_in_one_paragraph_and_nothing_is_lost(
    launch_script: Launch, small_disk: Callable[[Path, int], None], tmp_path: Path
) -> None:
    whole = launch_script(TRAINS, workers=2, args=("whole",))
    assert whole.exit_code == 0
    small_disk(tmp_path / "disk", 1024)
    disk = str(tmp_path / "disk")
    (tmp_path / "fill").touch()
    done = launch_script(TRAINS, workers=2, args=("cut",), name="mine", run_dir=disk)
    assert done.exit_code == 3
    assert isinstance(done.error, ClusterError), done.error
    message = str(done.error)
    assert "the coordinator cannot go on with its journal" in message
    assert "the disk is full" in message
    assert "\n" not in message
    assert not (tmp_path / "cut").exists()
    # With room again, it goes on from its checkpoint to the same weights.
    (tmp_path / "fill").unlink()
    (done.run_dir / "filler").unlink()
    config = resume_config(done.run_dir)
    again = launch_script(
        tmp_path / "script.py",
        workers=2,
        args=config.args,
        name="mine",
        run_dir=disk,
        resume=True,
        seed=config.seed,
    )
    assert (again.exit_code, again.error) == (0, None)
    assert "going on from" in again.stderr
    assert (tmp_path / "cut").read_text() == (tmp_path / "whole").read_text()


def truncated(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[: 4096 + 100])


def of_a_newer_version(journal: Path) -> None:
    with contextlib.closing(sqlite3.connect(journal)) as db, db:
        db.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("spoil", "reason"), [(truncated, "damaged"), (of_a_newer_version, "written by a newer shoal")]
)
def test_a_journal_that_cannot_be_used_is_refused_and_without_it_a_run_goes_on(
    launch_script: Launch, spoil: Callable[[Path], None], reason: str
) -> None:
    done = launch_script(TRAINS, workers=2, args=("first",), name="mine")
    spoil(done.run_dir / "journal.sqlite")
    content = (done.run_dir / "journal.sqlite").read_bytes()
    with pytest.raises(RunDirectoryError, match=reason) as refused:
        launch_script(TRAINS, workers=2, args=("first",), name="mine", resume=True)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert (done.run_dir / "journal.sqlite").read_bytes() == content
    (done.run_dir / "journal.sqlite").unlink()
    assert launch_script(TRAINS, workers=2, args=("first",), name="mine", resume=True).exit_code == 0


def test_the_journal_of_an_earlier_launch_is_not_taken_for_this_ones(
    launch_script: Launch, tmp_path: Path
) -> None:
    """As when somebody restores a backup under a job that runs."""
    earlier = launch_script("", name="mine")
    (tmp_path / "earlier.sqlite").write_bytes((earlier.run_dir / "journal.sqlite").read_bytes())
    done = launch_script(
        textwrap.dedent("""
        import os, signal, time
        import psutil
        from shoal.cluster.worker import session
        from shoal.config import job as jobs
        job = jobs.current()
        session.begin_call("fit", "")
        if job.rank == 0:
            warm = psutil.Process().parent()
            (victim,) = [each for each in warm.children() if "".join(each.cmdline()).startswith("shoal coordinator")]
            warm.suspend()  # nobody starts it again yet
            victim.kill()
            while victim.status() != "zombie":
                time.sleep(0.001)
            for path in job.run_dir.glob("journal.sqlite*"):
                path.unlink()
            (job.run_dir / "journal.sqlite").write_bytes(open("earlier.sqlite", "rb").read())
            warm.resume()
        session.begin_call("save", "")
        """),
        workers=2,
        name="mine",
        resume=True,
    )
    assert done.exit_code == 3
    assert "it belongs to launch 1 of this run, and this is launch 2" in str(done.error)
