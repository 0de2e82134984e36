"""Seats of a running job: homes that stay, hosts that are let in, requests that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.hosts import joining, seats
from shoal.cluster.hosts.authority import Authority
from shoal.cluster.hosts.files import FileService
from shoal.cluster.hosts.joining import Admission, Door, JobFacts
from shoal.cluster.launch.elastic import Elastic
from shoal.config.hosts import HostsConfig
from shoal.config.launch import LaunchConfig
from shoal.errors import ConfigError, HostNotAdmitted
from shoal.runtime.transport import tls


def job(
    hosts: HostsConfig | None, cluster: object = "one", **options: Any
) -> tuple[Elastic, list[HostsConfig]]:
    """Elastic of a job of four workers, and what its hosts are told."""
    told: list[HostsConfig] = []

    class Hosts:
        def __init__(self) -> None:
            self.cluster = cluster
            self.num_hosts = hosts.num_hosts if hosts is not None else 1

        def cores(self) -> dict[int, int]:
            return dict.fromkeys(range(self.num_hosts), 2)

        def open_seats(self, config: HostsConfig) -> None:
            told.append(config)
            self.num_hosts = config.num_hosts

    class Described:
        exchange_rule, seed, script, cwd = "", 0, "train.py", "."

    config = LaunchConfig(script="train.py", workers=4, hosts=hosts, **options)
    return Elastic(config, Described(), "job", Hosts()), told  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [(), (3, 1)])
def test_seats_that_are_added_leave_every_home_where_it_is(workers: tuple[int, ...]) -> None:
    before = HostsConfig(num_hosts=2, bind="10.0.0.1", workers=workers, servers=(0, 1))
    after = before.with_seats(4, 4)
    assert [after.host_of(rank, 4) for rank in range(4)] == [before.host_of(rank, 4) for rank in range(4)]
    assert (after.workers[2:], after.servers) == ((0, 0), (0, 1, 0, 0))
    assert after.most_workers(4) == before.most_workers(4)


def test_workers_come_to_hosts_that_joined_after_the_launch() -> None:
    elastic, told = job(HostsConfig(num_hosts=2, bind="10.0.0.1"))
    with pytest.raises(ConfigError, match="its hosts have 4 cores, and each of 6 workers needs one"):
        elastic.with_workers(6)
    elastic.open_seats(3)
    assert [(each.num_hosts, each.workers) for each in told] == [(3, (2, 2, 0))]
    resized = elastic.with_workers(6).config
    assert resized.hosts is not None
    assert (resized.workers, resized.hosts.workers) == (6, (2, 2, 2))


@pytest.mark.parametrize(
    ("hosts", "cluster", "options", "why"),
    [
        (None, None, {}, "it was started without --hosts and --bind"),
        (HostsConfig(num_hosts=3, bind="10.0.0.1"), "one", {}, "it may have 3 hosts already"),
        (HostsConfig(num_hosts=3, bind="10.0.0.1", on="ray"), "one", {}, "its hosts are slots of ray"),
        (HostsConfig(num_hosts=1, bind="10.0.0.1"), "one", {"exchange": "shm"}, "they are on 2 hosts"),
    ],
)
def test_seats_that_cannot_be_added_change_nothing(
    hosts: HostsConfig | None, cluster: object, options: dict[str, Any], why: str
) -> None:
    elastic, told = job(hosts, cluster, **options)
    before = elastic.current
    with pytest.raises(ConfigError, match=why):
        elastic.open_seats(2)
    assert (told, elastic.current) == ([], before)


# ---- the door -------------------------------------------------------------------------------------

KEY = "a-key-of-more-than-twenty-characters"


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    """For host 1, which has a name."""
    script = tmp_path / "train.py"
    script.touch()
    facts = JobFacts(
        job="job",
        script=str(script),
        script_hash=joining.file_hash(str(script)),
        run_dir=str(tmp_path),
        run_dir_mark=joining.make_mark(tmp_path),
        is_shipped=False,
    )
    names = {1: "one.invalid"}
    listener, files = tls.listen("127.0.0.1"), FileService(tmp_path, None)
    made = Door(listener, Authority("job"), KEY, facts, [1], files, names)
    yield made
    made.close()


@pytest.fixture
def join(door: Door, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Admission]:
    """Join as a machine of this name."""
    address = f"shoal://127.0.0.1:{door._listener.getsockname()[1]}"

    def join(name: str) -> Admission:
        monkeypatch.setattr(joining.platform, "node", lambda: name)
        return joining.join(address, KEY, timeout_s=10.0)

    return join


def test_a_host_without_a_name_takes_a_seat_that_was_added_to_named_ones(
    door: Door, join: Callable[[str], Admission]
) -> None:
    with pytest.raises(HostNotAdmitted, match=r"is none of the hosts of this job: one\.invalid"):
        join("two")
    door.open_seats(3)
    assert [join(name).number for name in ("two", "one.invalid")] == [2, 1]


def test_a_machine_that_was_lost_before_its_agent_came_joins_anew(
    door: Door, join: Callable[[str], Admission], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert join("one.invalid").credentials.incarnation == 0
    monkeypatch.setattr(seats, "AGENT_TIMEOUT_S", 0.0)
    assert join("one.invalid").credentials.incarnation == 1
    assert door.seats.keys() == {1}
