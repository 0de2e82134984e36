"""Set-up of a job on several hosts: the head's door, and the agent behind `shoal join`."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from setproctitle import setproctitle

from shoal.cluster.coordinator import journal_reader
from shoal.cluster.hosts import agent, headship, joining
from shoal.cluster.hosts.authority import Authority
from shoal.cluster.hosts.engine_hosts import refuse_too_much
from shoal.cluster.hosts.files import (
    CONFIG,
    FileService,
    copy_shipped,
    is_dropped,
    measured_link,
    shippable,
)
from shoal.cluster.hosts.headship import Headship, Successor
from shoal.cluster.hosts.hosts import HEAD, Cluster
from shoal.cluster.hosts.joining import Admission
from shoal.cluster.hosts.run_copy import RunCopy, has_checkpoint, newest_step
from shoal.cluster.hosts.takeover import GiveUp, Head
from shoal.cluster.launch import api
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.launch.run_directory import RunDirectory, is_alive
from shoal.cluster.supervisor.supervisor import SignalInbox
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.config.hosts import SERVER, WORKER, HostsConfig, check_wait, parse_journal
from shoal.config.liveness import LivenessConfig
from shoal.engines import protocol, registry
from shoal.errors import ClusterError, ConfigError, RunDirectoryError, ShoalError, WireError
from shoal.runtime import scratch
from shoal.runtime.health import Health
from shoal.runtime.transport import interfaces, tls

JOIN_TRY_S = 2.0
"""Time between two reads of etcd while the recorded head does not answer."""

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a job that was asked to leave, for example when its coordinator is evicted: it may continue later."""

LAST_WORDS_BYTES = 4096
"""Of what ssh and the agent behind it printed, quoted if the host does not join."""

LOCK_S = 45.0
"""Time that a former head may still hold the run directory on a shared file system. Other hosts seek a head for 60 s."""


class SshStart:
    """`shoal join` started on another machine by ssh. The key goes through its standard input, never a command line."""

    def __init__(self, number: int, name: str, ssh: str, where: str, key: str) -> None:
        self.number, self.name = number, name
        join = [sys.executable, "-m", "shoal", "join", where, "--as-host", str(number)]
        there = f"read -r {joining.KEY_VARIABLE}; export {joining.KEY_VARIABLE}; cd {shlex.quote(os.getcwd())} 2>/dev/null; "
        there += f"exec {shlex.join(join)}"
        # No pipe: nobody reads it while the job runs, and a full one would stop the host's agent.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._process = subprocess.Popen(
            [*shlex.split(ssh), name, there],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._complaints,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{key}\n".encode())
            self._process.stdin.close()

    def problem(self) -> str | None:
        """Reason why it ended before its host joined."""
        if self._process.poll() is None:
            return None
        self._complaints.seek(max(self._complaints.seek(0, os.SEEK_END) - LAST_WORDS_BYTES, 0))
        said = self._complaints.read().decode(errors="replace").strip().splitlines()
        return (
            f"{self.name}: exit code {self._process.returncode}; {' '.join(said[-3:]) or 'it said nothing'}"
        )

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._complaints.close()


class Listening(NamedTuple):
    """The head's socket and key, opened before the run directory: an error in them leaves nothing behind."""

    listener: socket.socket
    key: str
    is_made: bool
    """The key was generated here, so only this process knows it."""


def listen(
    config: HostsConfig,
    *,
    script: str,
    successor: Successor | None = None,
    num_workers: int = 1,
    num_servers: int = 0,
) -> Listening:
    """Listen for the hosts of a job, which wait until the door opens; ConfigError if this is impossible."""
    refuse_address(config)
    refuse_too_much(config, num_workers, num_servers)
    key = successor.key if successor is not None else joining.read_key(config.key_file)
    is_made = key is None
    hosts_join = bool(config.on) and registry.ENGINES[registry.parse(config.on)[0]].hosts_join
    if is_made and hosts_join:
        raise ConfigError(
            f"the hosts of --on {config.on} join with a key that they were given, and this machine was given none. Nothing was "
            f"started; put the same random word of 20 characters or more into {joining.KEY_VARIABLE} here and on each host, or "
            "name a file of it with --join-key-file."
        )
    if config.ship:
        list(shippable(Path(script).parent))
    return Listening(tls.listen(config.bind, config.port), key or joining.new_join_key(), is_made)


def open_cluster(
    config: HostsConfig,
    listening: Listening,
    *,
    run: RunDirectory,
    script: str,
    note: Callable[[str], None],
    is_oversubscribed: bool = False,
    journal: str = "",
    successor: Successor | None = None,
    num_workers: int = 0,
    num_servers: int = 0,
) -> Cluster:
    """Admit the hosts, and print how they join."""
    listener, key, is_made = listening
    hosts_join = bool(config.on) and registry.ENGINES[registry.parse(config.on)[0]].hosts_join
    files = FileService(run.path, Path(script).parent if config.ship else None)
    authority = Authority(run.name, plaintext=config.plaintext)
    facts = joining.JobFacts(
        job=run.name,
        script=script,
        script_hash=joining.file_hash(script),
        run_dir=str(run.path),
        run_dir_mark=joining.make_mark(run.path),
        is_shipped=config.ship,
        launches=tuple(journal_reader.launch_times(run.path)),
        journal=journal,
    )
    others = [number for number in range(config.num_hosts) if number != HEAD]
    names = dict(enumerate(config.names)) if config.names else {}
    names.pop(HEAD, None)
    door = joining.Door(listener, authority, key, facts, others, files, names, config.roles)
    where = tls.join_address("shoal://", config.advertise or config.bind, listener.getsockname()[1])
    plural = "s" if len(others) > 1 else ""
    starters: list[SshStart] = []
    engine, slot = None, None
    if config.on:
        slot = config.resources(num_workers, num_servers)
        folder = run.path / "engine"
        folder.mkdir(exist_ok=True)
        ticket = protocol.Ticket(
            job=run.name, address=where, key=key, cores=max(1, round(slot.cpus)), folder=str(folder)
        )
        note(
            _awaited_services(config, where)
            if config.roles
            else f"waiting for {len(others)} host{plural}; on each: shoal join {where}"
            if hosts_join
            else f"asking {config.on} for {len(others)} host{plural}"
        )
        engine = registry.open_engine(config.on, ticket)
        try:
            engine.start(others, slot)
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error says more
                engine.stop()
            door.close()
            if isinstance(error, ShoalError) or not isinstance(error, Exception):
                raise
            raise ClusterError(
                f"{config.on} failed when it was asked for {len(others)} host{plural} ({protocol.words_of(error)}). Nothing was "
                f"trained; see that {config.on} is well, and start the job again."
            ) from error
    elif config.names and config.by_ssh:
        note(f"starting {len(others)} host{plural} by {config.ssh}: {', '.join(names.values())}")
        starters = [SshStart(number, name, config.ssh, where, key) for number, name in names.items()]
    else:
        note(
            f"waiting for {len(others)} more host{plural}; on each: shoal join {where}"
            if others
            else f"other hosts can join at {where} once `shoal scale {run.name} --hosts N` lets them"
        )
        if is_made:
            note(f"join key: {key}")
    if config.plaintext:
        note(
            "--plaintext: traffic between hosts is not encrypted; anyone on that network can read and change it"
        )
    return Cluster(
        config=config,
        authority=authority,
        door=door,
        starters=starters,
        join_address=where,
        is_oversubscribed=is_oversubscribed,
        is_takeover=successor is not None,
        engine=engine,
        slot=slot,
    )


def _awaited_services(config: HostsConfig, where: str) -> str:
    counts = {role: config.roles.count(role) for role in (WORKER, SERVER)}
    said = (
        f"{count} {role} service{'s' if count > 1 else ''} (shoal {role} --join {where})"
        for role, count in counts.items()
        if count
    )
    return f"waiting for {' and '.join(said)}"


def refuse_address(config: HostsConfig) -> None:
    """Refuse addresses that other hosts cannot use."""
    for number, name in enumerate(config.names):
        found = joining.resolved(name)
        is_loopback = bool(found) and all(
            ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found
        )
        # Many machines resolve their own name to a loopback address; the head listens at --bind anyway.
        if number == HEAD and not is_loopback and not joining.resolved(config.bind) & found:
            raise ConfigError(
                f"{name}, the first of the hosts, is not this machine ({config.bind}), which takes part as host 0. "
                "Nothing was started; name this machine first."
            )
        if number != HEAD and is_loopback:
            raise ConfigError(
                f"{name} is {min(found)} here, a loopback address, which is this machine and no other host. Nothing was started; "
                f"name host {number} by its address, or correct /etc/hosts."
            )
    for what, address in (("--bind", config.bind), ("--advertise", config.advertise)):
        if not address:
            continue
        try:
            first = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            raise ConfigError(
                f"{what} {address}: this machine knows no such address ({error.strerror}). Nothing was started; "
                "`ip -brief address` lists what it has."
            ) from None
        at = ipaddress.ip_address(str(first).partition("%")[0])
        if at.is_loopback and not config.on:
            raise ConfigError(
                f"{what} {address} is {at}, which no other host can reach. Nothing was started; name an address of this machine "
                "on the network that the hosts share."
            )
        if at.is_unspecified:
            raise ConfigError(
                f"{what} {address} is every address of this machine. Nothing was started; name the one on the network that "
                "the hosts share."
            )
        if config.plaintext and at.is_global:
            raise ConfigError(
                f"--plaintext is refused at {at}, a public address: anybody could read and change what the hosts exchange. "
                "Nothing was started; leave it out, and the connections are encrypted."
            )


def join(
    address: str,
    *,
    key_file: str | None,
    run_dir: Path,
    timeout_s: float,
    wants: int = -1,
    interface: str | None = None,
    advertise: str | None = None,
    cores: int | None = None,
    role: str = "",
    health: Health | None = None,
) -> tuple[int, ShoalError | None]:
    """`shoal join`: serve as a host of a job until it is over, also as its next head; returns the job's exit code.

    `interface` names network interfaces, the first of which leads to the head; `cores` are those it
    may use. `role` makes it a service, which outlives its coordinator: it joins again. An error is
    that of a job that this host has taken over.
    """
    health = health or Health(role or "host")
    check_wait("--timeout", timeout_s, "the coordinator" if role else "the head")
    tls.split_address(address)
    named = interfaces.named(interface) if interface else {}
    joiner = _Joiner(
        joining.read_key(key_file) or joining.ask_for_key(address), run_dir, named, advertise, cores, role
    )
    health.waits_for = f"it waits for the coordinator at {address}"
    admission = joiner.admitted(address, timeout_s=timeout_s, wants=wants)
    while True:
        code, run, may_return = _serve(address, admission, run_dir.absolute(), role, health)
        if role and may_return:
            health.waits_for = f"its coordinator at {address} is gone; it waits for it to come back"
            agent.say(f"the {role} waits for its coordinator to come back, up to {timeout_s:g} s")
            admission = joiner.admitted(address, timeout_s=timeout_s)
            continue
        if run is None:
            return code, None
        match joiner.seek(admission, run):
            case Headship() as won:
                return _take_over(admission, Successor(won, joiner.key), run)
            case GiveUp(why):
                agent.say(f"host {admission.number} ends: no head was found, because {why}")
                _tell_copy(run, admission)
                return code, None
            case (address, admission):
                pass  # go on to the next head


def _serve(
    address: str, admission: Admission, run_dir: Path, role: str, health: Health
) -> tuple[int, Path | None, bool]:
    """Serve as a host of the head at this address.

    Returns its exit code, the run directory if another head must be found, and whether the same
    head may come back.
    """
    facts = admission.facts
    setproctitle(f"shoal {f'{role} service, ' if role else ''}host-{admission.number} [{facts.job}]")
    agent.say(
        f"joined {facts.job} as {f'{role} service, ' if role else ''}host {admission.number} ({admission.own_address})"
    )
    health.waits_for = "it imports torch"
    head = tls.TLS + address.partition("://")[2]
    with contextlib.ExitStack() as stack:
        here, copy = Path(facts.run_dir), None
        if not admission.sees_run_dir:
            with _disk_problems(admission, run_dir):
                copy = RunCopy.claim(
                    run_dir, facts.job, facts.launches, lambda text: agent.localised_config(text, folder)
                )
            stack.callback(copy.close)
            here = copy.path
            shutil.rmtree(here / scratch.NAME, ignore_errors=True)  # left by an agent that was killed
            stack.callback(shutil.rmtree, here / scratch.NAME, ignore_errors=True)
        script, folder = facts.script, None
        if facts.is_shipped:
            folder = here / f"shipped-{admission.number}"
            with _disk_problems(admission, here):
                copy_shipped(head, admission.credentials, folder)
            script = str(folder / Path(script).name)
        link = measured_link(head, admission.credentials)  # before imports take the cores
        inbox = stack.enter_context(SignalInbox(signal.SIGUSR1, signal.SIGUSR2))
        preload = preload_for(script, with_servers=role == SERVER)
        warm = stack.enter_context(WarmParent(facts.job, preload=preload))
        host = agent.HostAgent(
            admission,
            head,
            warm,
            run_dir=here,
            folder=folder,
            copy=copy,
            role=role,
            link=link,
            health=health,
        )
        try:
            code = host.run(inbox)
        except (OSError, EOFError, WireError) as error:
            if not admission.journal:
                raise ClusterError(
                    f"host {admission.number} joined {facts.job}, and then its agent could not connect to the head at {address} "
                    f"({joining.in_words(error)}). Nothing was started here; look at the network between the hosts, and join again."
                ) from None
            # The head was lost before it sent an assignment.
            code, host.is_head_lost, host.reason = 3, True, f"the head could not be reached ({error})"
    if host.is_head_lost and admission.journal and not host.is_leaving:
        shown = parse_journal(admission.journal).shown
        agent.say(
            f"{host.reason}; its processes on this host were ended. Looking for the next head in {shown}"
        )
        return code, here, False
    agent.say(f"host {admission.number} ends: {host.reason}")
    if host.is_head_lost and copy is not None:
        _tell_copy(copy.path, admission)
    if role and host.leaving_code:
        # 0 means that the job is over: whatever supervises this service restarts it, or another in its
        # place.
        return host.leaving_code, None, False
    return code, None, host.is_head_lost or code in STOPPED


@contextlib.contextmanager
def _disk_problems(admission: Admission, folder: Path) -> Iterator[None]:
    """Turn disk errors of this host into one paragraph; other errors pass through."""
    try:
        yield
    except OSError as error:
        if is_dropped(error):
            raise
        raise RunDirectoryError(
            f"host {admission.number} cannot keep its files of the run {admission.facts.job} in {folder}: {error.strerror}. "
            "Nothing was started here, and the head waits; make room, or give another --run-dir, and join again.",
            path=str(folder),
        ) from None


def _tell_copy(run: Path, admission: Admission) -> None:
    if has_checkpoint(run):
        agent.say(
            f"a copy of the run is here: `shoal resume {run} --hosts N --bind {admission.own_address}` goes on with it on N "
            "hosts, this one among them"
        )


class _Joiner:
    """A host before it has a head, and after it lost one."""

    def __init__(
        self,
        key: str,
        run_dir: Path,
        named: Mapping[str, str],
        advertise: str | None,
        cores: int | None,
        role: str = "",
    ) -> None:
        """`named` are addresses by the names of the requested interfaces."""
        self.key = key
        self._run_dir, self._named, self._advertise, self._cores = run_dir, named, advertise, cores
        self._role = role
        self._told = ""

    def admitted(self, address: str, *, timeout_s: float, wants: int = -1) -> Admission:
        source = next(iter(self._named.values()), None)
        admission = joining.join(
            address,
            self.key,
            timeout_s=timeout_s,
            wants=wants,
            run_dir=self._run_dir,
            source=source,
            cores=self._cores,
            role=self._role,
            say=agent.say if timeout_s > JOIN_TRY_S else lambda told: None,
        )
        return admission._replace(
            interfaces=",".join(self._named), advertised=self._advertise or admission.own_address
        )

    def seek(self, lost: Admission, run: Path) -> Headship | GiveUp | tuple[str, Admission]:
        """Next head and its answer, or the headship if this host obtained it."""
        joined: list[tuple[str, Admission]] = []

        def try_join(head: Head) -> bool:
            try:
                joined.append((head.address, self.admitted(head.address, timeout_s=JOIN_TRY_S)))
            except ConfigError as error:
                if head.generation > 1 and str(error) != self._told:  # a lost head need not answer
                    self._told = str(error)
                    agent.say(str(error))
                return False
            agent.say(f"{head.host} ({head.address}) is the head of {head.job}")
            return True

        found = headship.seek(
            parse_journal(lost.journal),
            job=lost.facts.job,
            run_id=headship.job_id(lost.facts.launches),
            launches=journal_reader.launch_times(run) if (run / CONFIG).exists() else [],
            step=newest_step(run),
            liveness=LivenessConfig(),
            try_join=try_join,
            say=agent.say,
        )
        return found if found is not None else joined[0]


def _take_over(admission: Admission, successor: Successor, run: Path) -> tuple[int, ShoalError | None]:
    """Continue the run on this host, as its head."""
    facts, won = admission.facts, successor.headship
    step = newest_step(run)
    start = (
        f"from the checkpoint of step {step}"
        if step
        else "from its begin: no checkpoint was copied to this host"
    )
    agent.say(
        f"the head of {facts.job} was lost and its lease in etcd has ended: this host takes over, as head {won.generation} of the "
        f"job at {admission.own_address}, and goes on {start}. Its other hosts join by themselves; the former head can join as "
        "any host does"
    )
    try:
        deadline = time.monotonic() + LOCK_S
        while is_alive(run) and time.monotonic() < deadline:
            # On a shared file system the former head releases the directory once it has ended its processes.
            time.sleep(0.1)
        config = api.takeover_config(
            run,
            bind=admission.own_address,
            interfaces=tuple(filter(None, admission.interfaces.split(","))),
            advertise=admission.advertised if admission.advertised != admission.own_address else "",
            journal=admission.journal,
        )
    except BaseException:
        won.close(None)
        raise
    result = api.launch(config, set_title=True, successor=successor)
    return result.exit_code, result.error
