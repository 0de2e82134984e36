"""Kafka brokers for tests, in processes of their own.

`apache_broker`: Apache Kafka 0.9.0.1 with its ZooKeeper, from `.engines/kafka` (`.ci/engines` fetches it), the one
    release that a package registry has. It is of 2016: no transactions, no timestamps, and clients must be told its version.
`librdkafka_broker`: the broker that librdkafka brings for its own tests. It speaks today's protocol over TCP, keeps records in
    memory, and drops the oldest of a partition past 5 MB.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from waiting import wait_until

LIBS = Path(__file__).parent.parent.parent / ".engines" / "kafka" / "libs"

_SERVE = """
import sys, time
import confluent_kafka
producer = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
[broker] = producer.list_topics(timeout=30).brokers.values()
print(f"{broker.host}:{broker.port}", flush=True)
sys.stdin.read()
"""


class Broker(NamedTuple):
    address: str
    options: dict[str, Any]
    """Settings of clients."""

    num_partitions: int
    """Of a topic that is made by writing to it."""

    def send(self, topic: str, records: Iterable[tuple[int, bytes | None]]) -> None:
        """Append (partition, value) to a topic."""
        import confluent_kafka

        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self.address, "log_level": 0, **self.options}
        )

        def is_made() -> bool:
            """A topic comes to be by being asked for, and its partitions a moment later."""
            with contextlib.suppress(confluent_kafka.KafkaException):
                return (
                    len(producer.list_topics(topic, timeout=30).topics[topic].partitions)
                    == self.num_partitions
                )
            return False

        assert wait_until(is_made, 60)
        for number, (partition, value) in enumerate(records):
            producer.produce(topic, value, partition=partition)
            if number % 1000 == 0:
                producer.poll(0)
        assert producer.flush(60) == 0

    def send_numbers(self, topic: str, numbers: Iterable[int]) -> None:
        self.send(topic, ((n % 3, json.dumps({"x": n, "y": 2.0 * n}).encode()) for n in numbers))

    def url(self, topic: str) -> str:
        return f"kafka://{self.address}/{topic}"


@contextlib.contextmanager
def librdkafka_broker(folder: Path) -> Iterator[Broker]:
    with (
        (folder / "broker.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        yield Broker(process.stdout.readline().strip(), {}, 4)
        process.stdin.close()


@contextlib.contextmanager
def apache_broker(folder: Path) -> Iterator[Broker]:
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    keeper, broker = ports
    (folder / "zookeeper").mkdir()
    (folder / "zookeeper.properties").write_text(
        f"dataDir={folder}/zookeeper\nclientPort={keeper}\nclientPortAddress=127.0.0.1\nmaxClientCnxns=0\n"
    )
    (folder / "kafka.properties").write_text(
        f"broker.id=0\nlisteners=PLAINTEXT://127.0.0.1:{broker}\nlog.dirs={folder}/kafka\nnum.partitions=3\n"
        f"zookeeper.connect=127.0.0.1:{keeper}\noffsets.topic.num.partitions=1\n"
    )
    java = ["java", "-Xmx256m", "-cp", f"{LIBS}/*"]
    commands = [
        [*java, "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(folder / "zookeeper.properties")],
        [*java, "kafka.Kafka", str(folder / "kafka.properties")],
    ]
    processes = []
    try:
        for command, port in zip(commands, ports, strict=True):
            with (folder / f"{port}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            assert wait_until(lambda port=port: _listens(port), 90), (folder / f"{port}.log").read_text()  # type: ignore[misc]
        options = {"api.version.request": False, "broker.version.fallback": "0.9.0.1", "log_level": 0}
        yield Broker(f"127.0.0.1:{broker}", options, 3)
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False
