"""The job queue on disk: one runner, states that survive, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cluster.jobqueue.queue import JobState, Queue
from shoal.cluster.jobqueue.scheduler import Amount, JobRequest, Pool
from shoal.errors import ConfigError

REQUEST = JobRequest(id=0, need=Amount(cores=2, memory=1 << 30), user="ann", priority=3)


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path / "queue")


def test_jobs_and_pool_are_there_for_the_next_process(queue: Queue) -> None:
    id = queue.submit(REQUEST, ["-n", "2", "train.py"], "/somewhere")
    queue.pool = pool = Pool(hosts={"": Amount(cores=4)}, quotas={"ann": Amount(cores=2)})
    queue.close()
    again = Queue(queue.folder)
    assert again.pool == pool
    job = again.job(id)
    assert (job.words, job.state, job.request.need) == (
        ["-n", "2", "train.py"],
        JobState.WAITING,
        REQUEST.need,
    )
    again.close()


def test_a_second_runner_is_refused_and_told_the_first(queue: Queue) -> None:
    other = Queue(queue.folder)
    assert not queue.has_runner
    other.claim()
    assert queue.has_runner
    with pytest.raises(ConfigError, match=r"has a runner already, process \d+\. Nothing was started"):
        queue.claim()
    other.close()
    queue.claim()
    queue.close()


def test_a_job_that_was_cancelled_while_it_waited_is_not_begun(queue: Queue) -> None:
    id = queue.submit(REQUEST, ["train.py"], "/")
    assert queue.cancel(id).state is JobState.WAITING
    assert not queue.begin(id, {})
    assert queue.job(id).state is JobState.CANCELLED
    with pytest.raises(ConfigError, match="has no job 7; it has 1 to 1"):
        queue.cancel(7)
    queue.close()
