"""Messages between a parameter server and the coordinator: membership, heartbeats, views, copies of slots.

One connection per server, on which nothing is asked and answered in turn: the
server says JoinServer first and SlotsFilled as it happens, and hears
ServerView, RankJoined, RankDead and PingServer as they happen.
"""

from __future__ import annotations

import msgspec

from shoal.runtime.transport.messages.message import Count, Incarnation, Message, Pid, Rank, Slot, Text

# ---- membership and heartbeats ------------------------------------------------------------------


class JoinServer(Message, frozen=True, tag="join-server"):
    """Server to coordinator: "I am this server", the first sentence of its line.

    Answered by JoinedServer, then RankJoined for every rank that is in, and
    ServerView as soon as there is one; or by JoinRefused, and the line ends.
    Repeating it on a new line is safe, and what a server does when the
    coordinator was killed. One that was being filled is then told of a new
    view: what it said on the old line may have reached nobody.
    """

    number: Rank
    incarnation: Incarnation
    pid: Pid
    address: Text = ""  # by which other hosts reach it; empty on one host


class JoinedServer(Message, frozen=True, tag="joined-server"):
    """Coordinator to server: "you are in"; the newest view there is, 0 where there is none."""

    view: Count


class PingServer(Message, frozen=True, tag="ping-server"):
    """Coordinator to server: "are you at work?" Answered by ServerAlive, between two turns."""

    number: Rank


class ServerAlive(Message, frozen=True, tag="server-alive"):
    """Server to coordinator: "I am". Any other sentence says so too."""

    number: Rank


class RankJoined(Message, frozen=True, tag="rank-joined"):
    """Coordinator to server: "this incarnation of the rank is in". Repeating it is safe."""

    rank: Rank
    incarnation: Incarnation


class RankDead(Message, frozen=True, tag="rank-dead"):
    """Coordinator to server: "this incarnation of the rank is dead, and its successor is on its way". Repeating is safe."""

    rank: Rank
    incarnation: Incarnation


# ---- slots --------------------------------------------------------------------------------------


class ServerView(Message, frozen=True, tag="server-view"):
    """Coordinator to servers and clients: which servers hold which slots from now on.

    `holders[slot]` are numbers of servers, the primary first; `incarnations`
    and `addresses` are by server, for those that are in.
    """

    view: Count
    holders: list[list[Rank]]
    incarnations: dict[Rank, Incarnation]
    joining: dict[Slot, list[Rank]] = msgspec.field(default_factory=dict)
    # By server, where there are several hosts.
    addresses: dict[Rank, str] = msgspec.field(default_factory=dict)


class SlotsFilled(Message, frozen=True, tag="slots-filled"):
    """Server to coordinator: "I have these slots and follow their updates"."""

    view: Count
    slots: list[Slot]


class StepLost(Message, frozen=True, tag="step-lost"):
    """Server to coordinator: "a step counts elsewhere and never will here": only a checkpoint brings all slots together.

    What `rank` contributed to it is gone with its worker and with the server that had it. Said again until the view is over.
    """

    view: Count
    rank: Rank
