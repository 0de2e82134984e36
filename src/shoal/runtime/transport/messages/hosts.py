"""Messages between a host agent and the head: joining, forking, output, heartbeats.

A docstring says who speaks and what answers. A child is named by the serial
number that the head gave it; its pid means something on its own host alone.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.runtime.transport.messages.message import Count, ExitCode, Incarnation, Message, Pid, Rank, Text

Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Serial = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
BytesPerSecond = Annotated[float, msgspec.Meta(ge=0, le=1e15)]

# ---- joining ------------------------------------------------------------------------------------


class JoinHost(Message, frozen=True, tag="join-host"):
    """Joiner to head, over TLS without a certificate of its own: "I have the key". Answered by HostChallenge."""

    nonce: Nonce


class HostChallenge(Message, frozen=True, tag="host-challenge"):
    """Head to joiner. Answered by HostProof."""

    nonce: Nonce


class HostProof(Message, frozen=True, tag="host-proof"):
    """Joiner to head: who it is, and the key's MAC over that, both nonces and the head's certificate.

    Answered by HeadProof or HostRefused.
    """

    mac: Nonce
    public_key: Annotated[bytes, msgspec.Meta(max_length=4096)]
    hostname: Text
    python: Text
    torch: Text
    shoal: Text
    protocol: Count
    clock: float  # seconds since 1970
    num_cores: Count
    machine: Nonce  # the same after a restart of the machine, and another one's is another
    # Number of the host it was started as; -1: any.
    wants: Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)] = -1
    role: Text = ""  # of a service, which has processes of one role; empty: a host, which has both


class HeadProof(Message, frozen=True, tag="head-proof"):
    """Head to joiner: the same from the head's side, and what the host has to have. Answered by HostFiles."""

    mac: Nonce
    job: Text
    script: Text  # absolute path
    run_dir: Text
    is_shipped: bool  # the head sends the script's folder, which need not be there
    launches: list[float]  # of the run, when each began: a copy of it on another host is known by them


class HostFiles(Message, frozen=True, tag="host-files"):
    """Joiner to head: what it found. Answered by HostAdmitted or HostRefused."""

    script_hash: Text  # empty: there is no such file
    run_dir_mark: Text  # empty: the head's run directory is not seen from here
    launches: list[float]  # of the run, by the copy of it that is there
    alive: Text  # path of the run where a supervisor is at work with it there; empty: none is


class HostAdmitted(Message, frozen=True, tag="host-admitted"):
    """Head to joiner: "you are host `number`", with its certificate."""

    number: Count
    incarnation: Incarnation
    authority: bytes
    certificate: bytes
    token_key: bytes  # with --plaintext
    sees_run_dir: bool  # the mark it found is that of the head's run directory
    journal: Text = (
        ""  # --journal with its password: where the next head is found when this one is lost; empty: nowhere
    )


class HostRefused(Message, frozen=True, tag="host-refused"):
    """Head to joiner: why not. The connection ends with it."""

    reason: Text


# ---- an agent at work ---------------------------------------------------------------------------


class AgentReady(Message, frozen=True, tag="agent-ready"):
    """Agent to head, with its certificate: "I can fork". Answered by AgentStart."""

    number: Count
    incarnation: Incarnation
    pid: Pid


class AgentStart(Message, frozen=True, tag="agent-start"):
    """Head to agent: what the job needs there. Answered by AgentListens."""

    heartbeat_interval_s: float
    dead_after_s: float
    servers: list[Rank]  # numbers that may run there


class AgentListens(Message, frozen=True, tag="agent-listens"):
    """Agent to head: the port at which each of its servers will be reached from other hosts."""

    address: Text  # of this host, as the others reach it
    ports: dict[Rank, Count]
    link: BytesPerSecond = 0.0  # from the head, as measured; 0: not known


class ForkChild(Message, frozen=True, tag="fork-child"):
    """Head to agent: "start this". Answered by ChildForked or ChildNotForked, and at its end by ChildEnded."""

    serial: Serial
    role: Text
    title: Text
    spec: bytes
    outputs: list[Text]  # names of its output pipes
    has_status: bool
    server: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] = -1  # whose listeners it takes over


class SignalChild(Message, frozen=True, tag="signal-child"):
    """Head to agent: "send this signal". No answer; a child that is gone is no error."""

    serial: Serial
    signum: Annotated[int, msgspec.Meta(ge=1, le=64)]


class EndAgent(Message, frozen=True, tag="end-agent"):
    """Head to agent: "the job is over: end your children and yourself"."""

    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    reason: Text


class AgentEnds(Message, frozen=True, tag="agent-ends"):
    """Agent to head: "I end my children and myself". Its last word, where the head did not say EndAgent."""

    reason: Text


class AgentLeaves(Message, frozen=True, tag="agent-leaves"):
    """Agent to head: "a signal asks me to leave". Answered by EndAgent, when its workers have gone on elsewhere."""

    signum: Annotated[int, msgspec.Meta(ge=1, le=64)]


class RunSaved(Message, frozen=True, tag="run-saved"):
    """Head to agent: "a checkpoint was written". No answer; a host without a shared file system copies it."""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Head to agent and back: "I am here". `stopped` are children that a signal or debugger has stopped."""

    stopped: list[Serial] = msgspec.field(default_factory=list)


class ChildForked(Message, frozen=True, tag="child-forked"):
    """Agent to head: the child lives."""

    serial: Serial
    pid: Pid


class ChildNotForked(Message, frozen=True, tag="child-not-forked"):
    """Agent to head: there is no child, and why."""

    serial: Serial
    reason: Text


class ChildOutput(Message, frozen=True, tag="child-output"):
    """Agent to head: bytes of one of a child's pipes. The head answers OutputTaken once somebody took them."""

    serial: Serial
    name: Text
    data: bytes


class OutputTaken(Message, frozen=True, tag="output-taken"):
    """Head to agent: so many bytes of that pipe were passed on; as many more may be sent."""

    serial: Serial
    name: Text
    nbytes: Count


class ChildStatus(Message, frozen=True, tag="child-status"):
    """Agent to head: one packet of a child's status socket."""

    serial: Serial
    packet: bytes


class ChildEnded(Message, frozen=True, tag="child-ended"):
    """Agent to head: the child was reaped, after all of its output and status was sent."""

    serial: Serial
    code: ExitCode


# ---- files of the head --------------------------------------------------------------------------


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a list."""

    path: Text  # relative, with slashes
    nbytes: Count
    sha256: Text = ""  # of files that are copied whenever it is another one
    mtime_ns: Count = 0  # of the others: they are copied when this or their size differs


class ListFiles(Message, frozen=True, tag="list-files"):
    """Host to head, first on a connection of its own: "which files are there?" Answered by FileList."""

    is_shipped: bool  # of the script's folder; else what the run has saved


class FileList(Message, frozen=True, tag="file-list"):
    """Head to host."""

    files: list[FileEntry]


class ReadFile(Message, frozen=True, tag="read-file"):
    """Host to head: "give me the next piece". Answered by FileData."""

    is_shipped: bool
    path: Text
    offset: Count


class MeasureLink(Message, frozen=True, tag="measure-link"):
    """Host to head, on such a connection: "send me so many bytes", to be timed. Answered by FileData."""

    nbytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class FileData(Message, frozen=True, tag="file-data"):
    """Head to host: a piece; empty at the end, and where the file is gone."""

    data: bytes
