"""Kafka, for real: an Apache broker, and the one of librdkafka for today's protocol."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_jobs import EngineJob
from kafka_brokers import LIBS, Broker, apache_broker, librdkafka_broker

from shoal import Dataset
from shoal.data.batches import Batches
from shoal.errors import BadSample, ConfigError, StreamEnded, StreamRewound, StreamUnreachable

SCRIPT = Path(__file__).parent.parent / "processes" / "scripts" / "counted_records.py"
_topics = (f"clicks-{number}" for number in itertools.count())


@pytest.fixture(scope="module", params=["apache", "librdkafka"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("engines are started by `make test-engines` alone")
    pytest.importorskip("confluent_kafka")
    if request.param == "apache" and not LIBS.exists():
        pytest.skip(f"no Apache Kafka in {LIBS}: .ci/engines fetches it through npm, where there is one")
    started = apache_broker if request.param == "apache" else librdkafka_broker
    with started(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return next(_topics)


def numbers(data: Dataset) -> list[int]:
    return [int(x["x"]) for x, _ in data]


# The brokers differ in the protocol, which the tests below try on both; a job on one of them will do.
@pytest.mark.parametrize(
    "broker",
    [
        "apache",
        pytest.param("librdkafka", marks=[pytest.mark.matrix] if LIBS.exists() else []),
    ],
    indirect=True,
    scope="module",
)
def test_every_record_is_trained_once_through_a_killed_worker_a_failed_job_and_a_resume(
    broker: Broker, topic: str, start_job: Callable[..., EngineJob], tmp_path: Path
) -> None:
    broker.send_numbers(topic, range(40))
    folder = tmp_path / "0"
    args = [str(SCRIPT), broker.url(topic), "14", json.dumps({"options": broker.options})]
    job = start_job("-n", "2", *args)
    (folder / "kill").write_text("3")
    (folder / "fail").write_text("9")
    job.wait_for(lambda: (folder / "step-4").exists())
    broker.send_numbers(topic, range(40, 120))
    assert job.wait() == 1, job.output()
    assert "worker 1 was killed by SIGKILL; replacing it" in job.output()
    (folder / "fail").unlink()
    [run_dir] = (folder / "runs").iterdir()
    resumed = EngineJob(
        tmp_path / "resumed",
        [],
        {},
        program=[sys.executable, "-m", "shoal", "resume", "-n", "3", str(run_dir)],
    )
    assert resumed.wait() == 0, resumed.output()
    assert "step-000000008: step 8, epoch 1, sample 64" in resumed.output()
    [counted] = tmp_path.glob("*/counts")
    counts = json.loads(counted.read_text())
    assert sorted(set(counts)) == [0.0, 1.0]
    assert sum(counts) == 14 * 8
    assert sum(counts[:40]) == 40  # those that were there first
    resumed.close()


def test_what_is_there_now_is_a_table_and_more_comes_behind_a_position(broker: Broker, topic: str) -> None:
    broker.send_numbers(topic, range(9000))
    url, options = broker.url(topic), broker.options
    whole = Dataset.from_stream(url, label="y", until="now", options=options)
    assert len(whole) == 9000
    assert sorted(numbers(whole.shuffle(seed=0))) == list(range(9000))
    raw = Dataset.from_stream(url, records=5, format="bytes", options=options)[4]
    assert (raw["value"], int(raw["partition"]), int(raw["offset"])) == (b'{"x": 12, "y": 24.0}', 0, 4)

    def batches() -> Batches:
        return Dataset.from_stream(url, label="y", timeout_s=2, options=options).batch(500)

    read = batches().iterator()
    seen = [x for _ in range(18) for x in read.next()[0]["x"].tolist()]
    assert sorted(seen) == list(range(9000))
    position = json.loads(json.dumps(read.position))
    with pytest.raises(
        StreamEnded, match=r"has given 9,000 records and none more for 2 s .*0: 3,000, 1: 3,000"
    ):
        read.next()
    broker.send_numbers(topic, range(9000, 9500))
    again = batches().iterator(position)
    assert sorted(again.next()[0]["x"].tolist()) == list(range(9000, 9500))
    broker.send(topic, [(0, b"no json"), (1, None), (2, b'{"x": 9500, "y": 1.0}')])
    start, types = {0: 3167, 1: 3167, 2: 3166}, {"schema": {"x": "int64", "y": "float32"}, "columns": ["x"]}
    bad = Dataset.from_stream(url, label="y", start=start, until="now", options=options, **types)
    with pytest.raises(BadSample, match=rf"{topic}, partition 0, offset 3,167: the line is no JSON"):
        numbers(bad)
    kept = Dataset.from_stream(
        url, label="y", start=start, until="now", options=options, **types, on_error="skip"
    )
    assert numbers(kept) == [9500]


def test_bad_addresses_and_offsets_are_named(broker: Broker, topic: str) -> None:
    broker.send_numbers(topic, range(3))
    url, options = broker.url(topic), broker.options
    with pytest.raises(
        StreamRewound, match="went on at offset 50 of partition 1, and it ends at offset 1 now"
    ):
        Dataset.from_stream(url, start={1: 50}, options=options)
    with pytest.raises(ConfigError, match=r"start= names the partitions \[9\]"):
        Dataset.from_stream(url, start={9: 0}, options=options)
    with pytest.raises(ConfigError, match="options= of from_stream"):
        Dataset.from_stream(url, options={"no.such.setting": 1})
    with pytest.raises(StreamUnreachable, match=r"cannot be read after .*refused"):
        Dataset.from_stream("kafka://127.0.0.1:1/clicks", timeout_s=1)


def test_records_that_the_broker_has_deleted_are_named(broker: Broker, topic: str) -> None:
    if broker.options:
        pytest.skip("the Apache broker deletes by the minute; that of librdkafka past 5 MB")
    broker.send_numbers(topic, range(30))
    url = broker.url(topic)
    schema = {"x": "int64", "y": "float32"}

    def data() -> Batches:
        return Dataset.from_stream(url, label="y", columns=["x"], schema=schema, timeout_s=5).batch(10)

    read = data().iterator()
    read.next()
    position = read.position
    filler = b'{"x": 1, "y": 2.0, "z": "' + b"z" * 50_000 + b'"}'
    broker.send(topic, [(1, filler)] * 150)
    with pytest.raises(
        StreamRewound,
        match=r"at offset 0 of partition 1, and it begins at offset \d+ now: \d+ records were deleted",
    ):
        data().iterator(position).next()
