"""Scheduler of the job queue: rules one by one, and what holds for every sequence of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster.jobqueue.scheduler import (
    Action,
    Amount,
    Cancelled,
    Ended,
    Found,
    JobRequest,
    Pool,
    Refuse,
    Scheduler,
    Start,
    Stop,
    Submitted,
)


def _job(id: int, cores: int = 1, *, user: str = "", priority: int = 0, hosts: int = 1) -> JobRequest:
    return JobRequest(id=id, need=Amount(cores=cores), user=user, priority=priority, hosts=hosts)


def _two_cores() -> Scheduler:
    return Scheduler(Pool(hosts={"": Amount(cores=2)}))


def test_a_job_that_finds_no_room_is_not_overtaken_by_a_smaller_one() -> None:
    scheduler = _two_cores()
    assert scheduler.handle(Submitted(_job(1))) == [Start(1, ("",))]
    assert scheduler.handle(Submitted(_job(2, 2))) == []
    assert scheduler.handle(Submitted(_job(3))) == []
    assert scheduler.waits_for(2) == "2 cores to be free"
    assert scheduler.waits_for(3) == "job 2, which is before it"
    assert scheduler.handle(Ended(1)) == [Start(2, ("",))]
    assert scheduler.handle(Ended(2)) == [Start(3, ("",))]


def test_the_higher_priority_starts_first() -> None:
    scheduler = _two_cores()
    scheduler.handle(Submitted(_job(1, 2)))
    scheduler.handle(Submitted(_job(2, 2)))
    scheduler.handle(Submitted(_job(3, 2, priority=5)))
    assert scheduler.handle(Ended(1)) == [Start(3, ("",))]


def test_a_job_over_its_users_quota_keeps_nobody_else_waiting() -> None:
    pool = Pool(hosts={"": Amount(cores=2)}, quotas={"": Amount(cores=1)})
    scheduler = Scheduler(pool)
    assert scheduler.handle(Submitted(_job(1, user="ann"))) == [Start(1, ("",))]
    assert scheduler.handle(Submitted(_job(2, user="ann"))) == []
    assert scheduler.waits_for(2) == "the quota of ann"
    assert scheduler.handle(Submitted(_job(3, user="ben"))) == [Start(3, ("",))]
    assert scheduler.handle(Ended(1)) == [Start(2, ("",))]


def test_what_could_never_run_is_refused_with_both_numbers() -> None:
    pool = Pool(hosts={"": Amount(cores=2, memory=8 << 30)}, quotas={"ann": Amount(cores=1)})
    scheduler = Scheduler(pool)
    assert scheduler.handle(Submitted(_job(1, 64))) == [
        Refuse(1, "it asks for 64 cores, and the queue has 2 cores, 8 GB of memory")
    ]
    assert scheduler.handle(Submitted(_job(2, 2, user="ann"))) == [
        Refuse(2, "it asks for 2 cores, and the quota of ann is 1 core")
    ]


def test_a_cancelled_job_frees_its_cores_when_it_has_ended() -> None:
    scheduler = _two_cores()
    scheduler.handle(Found(_job(1, 2), ("",)))
    assert scheduler.handle(Submitted(_job(2))) == []
    assert scheduler.handle(Cancelled(1)) == [Stop(1)]
    assert scheduler.handle(Ended(1)) == [Start(2, ("",))]
    scheduler.handle(Submitted(_job(3, 2)))
    assert scheduler.handle(Cancelled(3)) == []
    assert scheduler.handle(Ended(2)) == []


AMOUNTS = st.builds(Amount, cores=st.integers(1, 4), gpus=st.integers(0, 2), memory=st.integers(0, 3))
REQUESTS = st.tuples(AMOUNTS, st.integers(1, 2), st.sampled_from("ab"), st.integers(0, 2))


@settings(max_examples=300)
@given(
    hosts=st.lists(AMOUNTS, min_size=1, max_size=3),
    quota=st.none() | AMOUNTS,
    events=st.lists(REQUESTS | st.integers(0, 30), max_size=40),
)
def test_no_sequence_goes_over_capacity_or_quota_and_none_starves_within_a_priority(
    hosts: list[Amount], quota: Amount | None, events: list[tuple[Amount, int, str, int] | int]
) -> None:
    pool = Pool(
        hosts={str(number): amount for number, amount in enumerate(hosts)},
        quotas={"": quota} if quota is not None else {},
    )
    scheduler, jobs = Scheduler(pool), dict[int, JobRequest]()
    waiting, running = dict[int, JobRequest](), dict[int, tuple[str, ...]]()

    def used(user: str) -> Amount:
        return sum((jobs[id].total for id in running if jobs[id].user == user), Amount())

    def carry_out(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Refuse):
                del waiting[action.id]
                continue
            assert isinstance(action, Start)
            job = waiting.pop(action.id)
            assert len(set(action.hosts)) == job.hosts
            for other in waiting.values():  # whom it overtook
                is_before = (-other.priority, other.id) < (-job.priority, job.id)
                over = quota is not None and not (used(other.user) + other.total).fits(quota)
                assert not is_before or over, f"{job} overtook {other}"
            running[action.id] = action.hosts
        for name, amount in pool.hosts.items():
            there = sum((jobs[id].need for id, names in running.items() if name in names), Amount())
            assert there.fits(amount)
        for user in "ab":
            assert quota is None or used(user).fits(quota)

    for event in events:
        if isinstance(event, tuple):
            need, num_hosts, user, priority = event
            job = JobRequest(id=len(jobs), need=need, hosts=num_hosts, user=user, priority=priority)
            jobs[job.id] = waiting[job.id] = job
            carry_out(scheduler.handle(Submitted(job)))
        elif running:
            ended = sorted(running)[event % len(running)]
            del running[ended]
            carry_out(scheduler.handle(Ended(ended)))
    while running:  # all that was let in comes to run
        ended = min(running)
        del running[ended]
        carry_out(scheduler.handle(Ended(ended)))
    assert not waiting
