"""Fault injection as an API: a plan of kills, pauses and delays for tests, demos and `shoal chaos`.

    Faults().kill("worker-1", at_step=30).pause("worker-0", at_step=50, for_s=3).kill("coordinator", at_step=20)

A worker injects its own faults, at a failpoint, so a step is met exactly. The supervisor injects
faults by the clock, and all faults of coordinator and servers by step, when the step is reported;
`Injector` tells it what is due.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shoal.errors import ConfigError

POINTS = {
    "worker: not joined": "it is there, and the coordinator has not heard of it",
    "worker: before forward": "a step begins",
    "worker: before commit": "forward and backward are done, nothing is updated",
    "worker: exchange begun": "an exchange is about to be finished",
    "worker: exchange finished, not committed": "all sums are there, the weights are the old ones",
    "worker: committed, not counted": "the weights are new, the exchange is not in the log",
    "worker: committed": "a step is over but for what the loop counts and writes",
    "worker: larger memory mapped": "memory for sums of sparse rows that ranks divide is mapped, the others not told",
    "worker: view left": "the group is left, the next view not entered",
    "worker: before taking state": "a donor is about to send",
    "worker: after taking state": "everything was received, nothing is confirmed",
    "worker: a call begins": "before the other ranks are asked",
    "worker: a call ended": "its result is kept",
    "worker: evaluating": "after a batch of evaluate, or of a validation",
    "worker: predicting": "after a batch of predict",
    "worker: epoch ended": "all steps are done, nothing is measured",
    "worker: checkpoint not written": "decided, on all ranks",
    "worker: part of a checkpoint written": "in the files of this rank, the checkpoint not whole",
    "worker: checkpoint written": "whole on disk, nobody was told",
    "worker: script ended": "before the other ranks are asked",
    "coordinator: before writing a call": "agreed, not in the journal",
    "coordinator: after writing a call": "in the journal, not answered",
    "coordinator: before writing a view": "formed, not in the journal",
    "coordinator: after writing a view": "in the journal, not answered",
}
"""Every failpoint there is, and what holds at it."""

BEFORE_FORWARD = "worker: before forward"


_SENTENCE = re.compile(
    r"(?P<act>[a-z]+)\s+(?P<process>\S+)"
    r"(?:\s+at\s+step\s+(?P<step>\d+)|\s+after\s+(?P<after>\d+(?:\.\d+)?)\s*s)"
    r"(?:\s+by\s+(?P<by>\d+(?:\.\d+)?)\s*s)?"
    r"(?:\s+for\s+(?P<for>\d+(?:\.\d+)?)\s*s)?"
)
_ACTS = ("kill", "pause", "slow", "exit", "raise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, injected once."""

    act: str
    """"kill" (SIGKILL), "pause" (SIGSTOP), "slow", "exit" or "raise"."""

    process: str
    """"worker-1", "server-0", or "coordinator"."""

    at: str = BEFORE_FORWARD
    """The failpoint. Not looked at where `after_s` is set."""

    step: int | None = None
    """The first step in which the failpoint counts, from 1; None for the first time it is reached."""

    after_s: float | None = None
    """Instead of a failpoint: so long after the first worker was started, by the supervisor's hand."""

    for_s: float = 0.0
    """How long a pause or a slowness lasts; 0 for ever."""

    by_s: float = 0.0
    """Slowness: how much longer every pass of the failpoint takes."""

    incarnation: int = 0
    """Incarnation: 0 the first process, 1 its first replacement; -1 every one."""

    def __str__(self) -> str:
        when = f"at step {self.step}" if self.step is not None else ""
        if self.after_s is not None:
            when = f"after {self.after_s:g} s"
        elif self.at != BEFORE_FORWARD or not when:
            when = f"{when} at '{self.at}'".strip()
        much = f" by {self.by_s:g} s" if self.by_s else ""
        lasting = f" for {self.for_s:g} s" if self.for_s else ""
        return f"{self.act} {self.process} {when}{much}{lasting}"


@dataclass(frozen=True, slots=True)
class Faults:
    """A plan of faults. Every method returns a longer one."""

    planned: tuple[Fault, ...] = ()
    """Faults in the order in which they were written."""

    def kill(
        self,
        process: str,
        *,
        at_step: int | None = None,
        at: str | None = None,
        after_s: float | None = None,
        incarnation: int = 0,
    ) -> Faults:
        """SIGKILL: no handler, no last word."""
        return self._and("kill", process, at_step, at=at, after_s=after_s, incarnation=incarnation)

    def pause(
        self,
        process: str,
        *,
        at_step: int | None = None,
        at: str | None = None,
        after_s: float | None = None,
        for_s: float = 0.0,
        incarnation: int = 0,
    ) -> Faults:
        """SIGSTOP: it lives and does nothing, for `for_s` seconds, or until it is killed for it."""
        return self._and(
            "pause", process, at_step, at=at, after_s=after_s, for_s=for_s, incarnation=incarnation
        )

    def slow(
        self, process: str, *, by_s: float, at_step: int = 1, for_s: float = 0.0, incarnation: int = 0
    ) -> Faults:
        """From a step on, each of a worker's steps takes `by_s` seconds longer: for `for_s` seconds, or for good."""
        return self._and("slow", process, at_step, for_s=for_s, incarnation=incarnation, by_s=by_s)

    def exit(
        self, process: str, *, at_step: int | None = None, at: str | None = None, incarnation: int = 0
    ) -> Faults:
        """Leave at once with exit code 70, as after a call of `os._exit` in a library."""
        return self._and("exit", process, at_step, at=at, incarnation=incarnation)

    def fail(
        self, process: str, *, at_step: int | None = None, at: str | None = None, incarnation: int = 0
    ) -> Faults:
        """Raise an exception, which ends the job: exceptions are not retried."""
        return self._and("raise", process, at_step, at=at, incarnation=incarnation)

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Faults from words: "kill worker-1 at step 60; pause worker-0 after 3 s for 2 s"."""
        faults = cls()
        for sentence in filter(None, (part.strip() for part in text.split(";"))):
            said = _SENTENCE.fullmatch(sentence)
            if said is None or said["act"] not in _ACTS:
                raise ConfigError(
                    f"'{sentence}' is no fault. Write, with ; between several: 'kill worker-1 at step 60', "
                    "'pause worker-0 at step 50 for 3 s', 'slow worker-2 at step 5 by 0.2 s', 'kill coordinator after 10 s'. "
                    "Nothing was started."
                )
            faults = faults._and(
                said["act"],
                said["process"],
                int(said["step"]) if said["step"] else None,
                after_s=float(said["after"]) if said["after"] else None,
                for_s=float(said["for"] or 0.0),
                by_s=float(said["by"] or 0.0),
            )
        return faults

    @classmethod
    def random(
        cls, *, seed: int, num_workers: int, every_s: float, for_s: float, num_servers: int = 0
    ) -> Faults:
        """Faults at random moments, one in `every_s` seconds on average; the same for the same arguments."""
        import random

        draw = random.Random(seed)
        faults, at_s = cls(), draw.expovariate(1 / every_s)
        while at_s < for_s:
            act = draw.choices(
                ("kill worker", "kill coordinator", "pause worker", "kill server", "pause server"),
                weights=(6, 2, 2, 4 if num_servers else 0, 2 if num_servers else 0),
            )[0]
            process = act.split()[1]
            if process != "coordinator":
                process += f"-{draw.randrange(num_workers if process == 'worker' else num_servers)}"
            pause_s = round(draw.uniform(0.2, 2.0), 2) if "pause" in act else 0.0
            faults = faults._and(
                act.split()[0], process, after_s=round(at_s, 3), for_s=pause_s, incarnation=-1
            )
            at_s += draw.expovariate(1 / every_s)
        return faults

    def check(self, *, num_workers: int, num_servers: int = 0) -> None:
        """Refuse what names a worker or server that the job does not have."""
        counts = {"worker": num_workers, "server": num_servers}
        for fault in self.planned:
            kind, _, number = fault.process.partition("-")
            if kind in counts and int(number) >= counts[kind]:
                last = f"{kind}-0 to {kind}-{counts[kind] - 1}" if counts[kind] else "none"
                raise ConfigError(
                    f"a fault is planned for {fault.process}, and a job with {counts[kind]} {kind}s has {last}. Nothing was "
                    "started."
                )

    def __str__(self) -> str:
        return "; ".join(map(str, self.planned))

    def _and(
        self, act: str, process: str, step: int | None = None, *, at: str | None = None, **how: Any
    ) -> Faults:
        fault = Fault(act=act, process=process, at=at or BEFORE_FORWARD, step=step, **how)
        after_s, for_s, by_s = fault.after_s, fault.for_s, fault.by_s
        if not re.fullmatch(r"(worker|server)-\d{1,4}|coordinator", process):
            raise ConfigError(
                f"'{process}' is no process of a job: write 'worker-0', 'server-0' or 'coordinator'."
            )
        if at is not None and at not in POINTS:
            from difflib import get_close_matches

            close = get_close_matches(at, POINTS, n=1)
            guess = f" Did you mean '{close[0]}'?" if close else f" There are: {', '.join(POINTS)}."
            raise ConfigError(f"there is no failpoint '{at}'.{guess}")
        if at is not None and not at.startswith(process.partition("-")[0]):
            raise ConfigError(f"{process} never comes to the failpoint '{at}'.")
        if step is not None and step < 1:
            raise ConfigError(f"a fault at step {step} never happens: steps count from 1.")
        if after_s is not None and not 0 <= after_s < 1e9:
            raise ConfigError(f"a fault cannot happen after {after_s} s.")
        if (act == "slow") != (by_s > 0) or not by_s < 1e6:
            raise ConfigError(f"say by how much to slow {process}, in seconds a step: by_s=0.2; got {by_s}.")
        if act == "slow" and (after_s is not None or not process.startswith("worker")):
            raise ConfigError(f"a worker can be slowed from a step on; {process} was asked for.")
        if not 0 <= for_s < 1e9:
            raise ConfigError(f"a pause cannot last {for_s} s; leave for_s out for one without an end.")
        if after_s is not None and (step is not None or at is not None):
            raise ConfigError("a fault happens after some seconds, or at a step or failpoint: not both.")
        if after_s is None and step is None and at is None:
            raise ConfigError(f"say when to {act} {process}: at_step=30, after_s=10.0, or at='a failpoint'.")
        if process == "coordinator" and act != "kill":
            raise ConfigError(f"the coordinator can be killed; to {act} it is not offered.")
        if process == "coordinator" and at is not None and step is not None:
            raise ConfigError(
                "the coordinator does not count steps: give it a step or a failpoint, not both."
            )
        if process.startswith("server") and act in ("exit", "raise") and at is None:
            raise ConfigError(f"a server can {act} at a failpoint of its own: write at='server: ...'.")
        return Faults((*self.planned, fault))


class Injector:
    """Faults that the supervisor causes, and when each is due. Pure: the time comes as an argument."""

    def __init__(self, faults: Faults) -> None:
        self._waiting = [
            fault
            for fault in faults.planned
            if fault.after_s is not None
            or (
                not fault.process.startswith("worker")
                and fault.step is not None
                and fault.at == BEFORE_FORWARD
            )
        ]
        self.pauses = {
            fault.process: fault.for_s for fault in faults.planned if fault.act == "pause" and fault.for_s
        }
        """How long each process that is paused stays so."""
        self._paused_at: dict[int, float] = {}  # by pid

    def due(self, *, since_start_s: float, step: int) -> list[Fault]:
        """Faults that are due now; each is returned once."""
        due = [
            fault
            for fault in self._waiting
            if (fault.after_s is not None and since_start_s >= fault.after_s)
            or (fault.step is not None and step >= fault.step)
        ]
        self._waiting = [fault for fault in self._waiting if fault not in due]
        return due

    def is_to_wake(self, process: str, pid: int, is_stopped: bool, now: float) -> bool:
        """Whether a pause of this process has lasted as long as it should."""
        lasts_s = self.pauses.get(process)
        if lasts_s is None or not is_stopped:
            self._paused_at.pop(pid, None)
            return False
        return now - self._paused_at.setdefault(pid, now) >= lasts_s

    def wait_s(self, since_start_s: float) -> float | None:
        """After how many seconds something is due by the clock alone."""
        times = [fault.after_s for fault in self._waiting if fault.after_s is not None]
        return max(0.0, min(times) - since_start_s) if times else None
