"""Worker process: from a fresh fork to the user's script, and an orderly exit.

Runs in the child. It sets up everything that `python train.py` would have found (environment,
folder, arguments, path) and the job's additions (a share of the cores, one seed, connections to
supervisor and coordinator), runs the script, and reports how it ended. The supervisor decides what
follows.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import random
import runpy
import signal
import sys
import threading
from dataclasses import replace
from types import FrameType

import msgspec

from shoal import system
from shoal.cluster.launch import threads
from shoal.cluster.supervisor import failure
from shoal.cluster.worker import session, torchrun
from shoal.cluster.worker.coordinator_client import CoordinatorAddressBook, CoordinatorClient, JobOver
from shoal.config import job as jobs
from shoal.config import placement
from shoal.config.job import Job
from shoal.runtime import failpoints, recorder
from shoal.runtime.transport import endpoint, interfaces, tls
from shoal.runtime.transport.tls import Credentials

_LEAVE = {signal.SIGUSR1: "SIGINT", signal.SIGINT: "SIGINT", signal.SIGTERM: "SIGTERM"}
"""Signal to a worker -> signal to its job. The supervisor forwards Ctrl-C as SIGUSR1."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker is started with."""

    job: Job
    env: dict[bytes, bytes]  # bytes: an environment need not be text
    cwd: str
    script: str  # absolute
    module: str = ""  # its name, where it is run as one
    args: list[str]
    num_threads: int
    master_port: int  # of torchrun's variables
    credentials: Credentials | None = None  # of a job on several hosts
    debug_rank: int | None = None  # has the supervisor's stdin, for breakpoint()


def encode_spec(spec: WorkerSpec) -> bytes:
    return msgspec.msgpack.encode(spec, enc_hook=str)  # only Path has to be converted to a str


def decode_spec(spec: bytes) -> WorkerSpec:
    return msgspec.msgpack.decode(spec, type=WorkerSpec, dec_hook=lambda kind, value: kind(value))


def main(spec_bytes: bytes, fds: dict[str, int]) -> int:
    """Run the script until it has ended on every rank; returns the exit code."""
    spec = decode_spec(spec_bytes)
    # The sockets of coordinator and servers have no name in the file system: these descriptors lead to
    # them. Those of other hosts have an address instead.
    ways = endpoint.ways(fds)
    num_servers = max(len(spec.job.servers), sum(name.startswith("server-") for name in fds))
    job = replace(
        spec.job,
        coordinator=ways.get("coordinator", spec.job.coordinator),
        servers=tuple(
            ways.get(f"server-{number}") or spec.job.servers[number] for number in range(num_servers)
        ),
    )
    tls.use(spec.credentials, _connections(job))
    # A replacement is silent until it has caught up: its output goes elsewhere until then, and later to
    # these.
    live_output = (fds["live_stdout"], fds["live_stderr"]) if "live_stdout" in fds else None
    session.attach(rank=job.rank, status=system.packet_socket(fds["status"]), live_output=live_output)
    try:
        _handle_signals()
        enter(spec, job)
        recorder.RECORDER.facts = session.progress_facts
        recorder.start(f"worker-{job.rank}", job.incarnation, run_dir=job.run_dir, send=session.activity)
        torchrun.watch(job, script=spec.script, port=spec.master_port, listener=fds.get("master"))
        # Kept to the end: the script's objects must outlive the exit handlers.
        _kept = _run_with_the_others(spec.script, spec.module, job)
        recorder.stop()
        session.finished()
        code = 0
    except BaseException as error:
        _ignore_signals()
        recorder.stop()
        code = _report_failure(error, job.rank)
    _ignore_signals()
    clean_up()
    return code


def _connections(job: Job) -> tls.Connections:
    """Connections to servers on other hosts. One keeps a core of each end busy with TLS, so a second
    one needs spare cores.
    """
    if not job.rank_hosts:
        return tls.Connections()
    own = job.rank_hosts.count(job.rank_hosts[job.rank]) + -(-job.num_servers // job.num_hosts)
    count = job.connections or (2 if len(system.cores()) > 2 * own else 1)
    there = interfaces.addresses()
    sources = [there[name] for name in job.interfaces.split(",") if name in there]
    return tls.Connections(count, tuple(sources))


def _report_failure(error: BaseException, rank: int) -> int:
    """Report to the supervisor what ended the script; returns the exit code that goes with it."""
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    told = failure.describe(
        error, rank=rank, stop=session.stop_requested(), meets_peers=session.meets_peers()
    )
    session.failed(told)
    return told.exit_code


def enter(spec: WorkerSpec, job: Job) -> None:
    if spec.env != dict(os.environb):
        os.environb.clear()
        os.environb.update(spec.env)
    os.environ.update(torchrun.environment(job, spec.master_port))
    os.chdir(spec.cwd)
    threads.use(spec.num_threads)
    jobs.enter(job)
    failpoints.arm(job.faults, process=f"worker-{job.rank}", incarnation=job.incarnation)
    _seed(job.seed)
    _take_device(job)
    # Line-buffered: a killed worker's prints are not lost.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # both are TextIOWrapper in a child
    faulthandler.enable()
    sys.argv = [spec.script, *spec.args]
    sys.path.insert(0, spec.cwd if spec.module else os.path.dirname(os.path.realpath(spec.script)))


def _take_device(job: Job) -> None:
    """Refuse a missing device before the script begins; make this rank's device the current one."""
    if job.device in (placement.AUTO, placement.CPU):
        return  # nothing to check: a script that needs a device finds it
    import torch

    placed = placement.of_job(job)
    mine = torch.device(placed.devices[job.rank])
    if mine.type != placement.CPU:
        torch.accelerator.set_device_index(mine.index)


def _seed(seed: int) -> None:
    """Seed every rank alike, so that ranks which build models at random build the same ones."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def _run_with_the_others(script: str, module: str, job: Job) -> dict[str, object]:
    """Join, run the script, and wait for the other ranks at its end. Returns the script's globals."""
    failpoints.failpoint("worker: not joined")
    try:
        client = CoordinatorClient(
            str(job.coordinator),
            job.rank,
            job.incarnation,
            num_workers=job.num_workers,
            liveness=job.liveness,
        )
    except JobOver:
        return {}
    session.agree_through(client)
    endpoint.use_address_book(CoordinatorAddressBook(job) if job.is_on_several_hosts else None)
    script_globals: dict[str, object] = {}
    has_left_early = False
    try:
        if module:
            script_globals = runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            script_globals = runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if failure.exit_code_of(left):
            raise  # sys.exit() without a reason is a normal end
        has_left_early = not torchrun.has_stepped()  # for example after --help
    if not has_left_early:
        torchrun.refuse_undivided(job, script)
    session.end_script()
    return script_globals


def _handle_signals() -> None:
    """Turn signals into a request to stop. Raise where no call would read the request."""

    def on_leave(signum: int, frame: FrameType | None) -> None:
        session.request_stop(_LEAVE[signal.Signals(signum)])
        if not session.is_inside_call():
            raise KeyboardInterrupt

    for signum in _LEAVE:
        signal.signal(signum, on_leave)
    # A DataLoader ends its own workers by SIGTERM, which is no request to the job.
    os.register_at_fork(after_in_child=_forget_signals)


def _forget_signals() -> None:
    for signum in _LEAVE:
        # Ignored signals stay ignored: the fork server of the readers ignores them for its children.
        if callable(signal.getsignal(signum)):
            with contextlib.suppress(ValueError):
                signal.signal(signum, signal.SIG_DFL)


def _ignore_signals() -> None:
    for signum in _LEAVE:
        signal.signal(signum, signal.SIG_IGN)


def clean_up() -> None:
    """Run exit handlers and flush, without finalizing the interpreter, which torch's threads would not survive."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()  # ends DataLoader workers, among others
    # Python would flush files that the script leaves open at finalization, which does not happen here.
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}
    for stream in (sys.stdout, sys.stderr, *(each for each in objects if type(each) in kinds)):
        with contextlib.suppress(Exception):  # a class of the script's own may raise anything
            stream.flush()
