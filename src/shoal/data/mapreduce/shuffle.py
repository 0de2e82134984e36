"""Shuffle between hosts without a shared file system: each host runs its share of the tasks and fetches the rest.

Tasks have an owner, a host, by their number. Outputs of a host's map tasks stay there until the
host has the whole result; a reduce task fetches its partition from every owner, and at the end each
host fetches the parts that others reduced. A lost host loses its outputs: its ranks start again,
come to the same call and run its tasks again, or fetch the result from a host that has it. Inputs
of a task are equal and in the same order on any number of hosts, so the result is too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from shoal.data.remote.block_server import OwnBlockServer
from shoal.data.remote.peers import PeerHosts
from shoal.data.remote.runs import output_name
from shoal.errors import MapReduceStalled
from shoal.runtime.transport.messages.blocks import BlockKept, BlockRefused, FetchRun, ShareRun, ShuffleState
from shoal.runtime.transport.messages.message import Message

_PAUSES_S = (0.01, 0.25)
_NO_TASK = "map-99999"  # which no call has: the answer is the state of the run


class Shuffle:
    """One call of map_reduce, as a process of one host sees it."""

    def __init__(
        self, run: str, directory: Path, hosts: PeerHosts, *, num_partitions: int, timeout_s: float
    ) -> None:
        self._run, self._directory, self._hosts, self._timeout_s = run, directory, hosts, timeout_s
        self._server = OwnBlockServer(hosts, timeout_s=timeout_s)
        self._server.introduce(("run", run), ShareRun(run, str(directory), num_partitions))

    def share(self) -> None:
        """Publish outputs of this host to others, now and later."""
        self._server.ensure_connected()

    def own(self, names: list[str]) -> list[str]:
        """Tasks of this host, of all of one kind."""
        return [name for name in names if self._owner(name, len(names)) == self._hosts.mine]

    def has_result(self, part_names: list[str]) -> bool:
        """Fetch the result from a host that has all of it, and may have removed its map outputs."""
        for host in self._hosts.others:
            state = self._ask(host, _NO_TASK, -1)
            if isinstance(state, ShuffleState) and state.is_complete:
                answers = (self._ask(host, part, -1) for part in part_names)
                if all(isinstance(answer, BlockKept) for answer in answers):
                    return True
        return False

    def inputs(
        self, map_names: list[str], part: str, beat: Callable[[], None]
    ) -> list[tuple[Path, int]] | None:
        """Files with a partition of each map task's output, and its number in them; None where the part itself was fetched,
        from a host that has the whole result.
        """
        number = int(part[-5:])
        found = []
        for name in map_names:
            owner = self._owner(name, len(map_names))
            if owner == self._hosts.mine:
                found.append((self._directory / name, number))
            elif self._bring(owner, name, number, beat):
                found.append((self._directory / output_name(name, number), 0))
            else:
                self._bring(owner, part, -1, beat)
                return None
        return found

    def bring_part(self, part: str, num_parts: int, beat: Callable[[], None]) -> None:
        """Wait until a part that another host reduces has arrived."""
        self._bring(self._owner(part, num_parts), part, -1, beat)

    def close(self) -> None:
        self._server.close()

    def _owner(self, name: str, num_tasks: int) -> int:
        return self._hosts.all[int(name[-5:]) * len(self._hosts.all) // num_tasks]

    def _bring(self, host: int, task: str, partition: int, beat: Callable[[], None]) -> bool:
        """Wait until an output has arrived; False if its host only has the whole result now."""
        pause_s, longest_s = _PAUSES_S
        progress, reason, since = -1, "", time.monotonic()
        while True:
            beat()
            match self._ask(host, task, partition):
                case BlockKept():
                    return True
                case ShuffleState(newest, is_complete):
                    if is_complete and partition >= 0:
                        return False
                    reason = "it has not finished it"
                    if newest != progress:
                        progress, since = newest, time.monotonic()
                case BlockRefused(said):
                    reason = said
            if time.monotonic() - since > self._timeout_s:
                raise MapReduceStalled(
                    waited_s=time.monotonic() - since, holders={task: f"host {host}: {reason}"}
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)

    def _ask(self, host: int, task: str, partition: int) -> Message:
        return self._server.ask(FetchRun(self._run, host, task, partition))
