"""Hosts that come by themselves: `--on join`, and `--on kubernetes` for pods of somebody else's making that run `shoal join`."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config.hosts import Resources
from shoal.engines.protocol import Ticket


def is_local(detail: str) -> bool:
    return False


def open_engine(detail: str, ticket: Ticket) -> SelfJoining:
    return SelfJoining()


class SelfJoining:
    """Whoever starts the hosts also starts them again."""

    def start(self, hosts: Sequence[int], resources: Resources) -> None:
        pass

    def watch(self) -> dict[int, str]:
        return {}

    def stop(self) -> None:
        pass

    def logs(self, host: int) -> str:
        return ""
