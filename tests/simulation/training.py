"""A toy script with exact arithmetic: what the simulated workers train, and what must come out.

Weights are integers and every sum depends on the order of its parts, so any
step that is left out, run twice, or run on other weights changes the result.
The script is a generator: it asks for calls and exchanges like a user's
script does through shoal, and can be started again at any anchor.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from shoal.recovery.replay_log import ExchangeLog

PRIME = (1 << 61) - 1


class Weights(NamedTuple):
    """Two pieces that only make sense together: the parameters and the optimizer's state."""

    parameters: int
    moments: int


FIRST_WEIGHTS = Weights(1, 0)


class Call(NamedTuple):
    """One call of the script into shoal."""

    kind: str  # fit, loop, evaluate, save
    num_epochs: int = 0
    num_steps: int = 0  # per epoch

    @property
    def detail(self) -> str:
        return f"epochs={self.num_epochs}, steps={self.num_steps}"


class Label(NamedTuple):
    """What an exchange is for; two ranks that meet in one must mean the same."""

    call: int
    what: str
    number: int


# ---- what the script asks for ---------------------------------------------------------------------


class Compute(NamedTuple):
    """Some work of its own."""

    weight: float = 1.0


class Begin(NamedTuple):
    number: int
    call: Call


class Exchange(NamedTuple):
    label: Label
    contribution: int


class End(NamedTuple):
    num_calls: int


class Checkpoint(NamedTuple):
    """Rank 0 writes down where all are: weights, and this place in this call."""

    anchor: tuple[int, Any]


Request = Compute | Begin | Exchange | End | Checkpoint
Script = Generator[Request, Any, None]


# ---- what a worker holds --------------------------------------------------------------------------


@dataclass
class Life:
    """Everything of a worker that training changes: what a replacement needs, and nothing else."""

    log_class: ClassVar[type[ExchangeLog]] = ExchangeLog

    rank: int
    weights: Weights = FIRST_WEIGHTS
    finished_calls: list[int] = field(default_factory=list)
    anchor: tuple[int, Any] = (
        0,
        None,
    )  # the call and the place in it from which a replacement can run forward
    has_state: bool = (
        False  # False: it was just born and must take another's state, or begin from a checkpoint
    )

    def __post_init__(self) -> None:
        self.log = self.log_class()

    def at_anchor(self, number: int, place: Any) -> None:
        self.log.anchor()
        self.anchor = (number, place)

    def export_state(self) -> dict[str, Any]:
        """All that another rank may lack, as of now."""
        return {
            "weights": self.weights,
            "results": self.log.results_since(),
            "anchored_at": self.log.anchored_at,
            "anchor": self.anchor,
            "finished_calls": list(self.finished_calls),
        }

    def import_state(self, package: dict[str, Any]) -> None:
        """Take over a donor's state, all at once. Who was there before stays where it is in its script."""
        if self.has_state:
            self.log.inherit(package["results"])
        else:
            self.log.inherit(package["results"], starts_at=package["anchored_at"])
            self.anchor = package["anchor"]
            self.finished_calls = list(package["finished_calls"])
        self.weights = package["weights"]
        self.has_state = True

    def interrupted(self, package: dict[str, Any] | None) -> None:
        """The donor died while it gave its state; what had come of it is thrown away."""

    def begin(self, checkpoint: dict[str, Any] | None) -> None:
        """Nobody has state: begin at the newest checkpoint, or at the beginning. Exchanges count from 0 again."""
        if checkpoint is not None:
            self.weights, self.anchor = checkpoint["weights"], checkpoint["anchor"]
            self.finished_calls = list(checkpoint["finished_calls"])
        self.has_state = True

    @property
    def standing(self) -> int:
        """What it says when it enters a view."""
        return self.log.num_known if self.has_state else -1

    def place_in(self, number: int) -> Any:
        """Where in call `number` to begin; None: at its begin."""
        return self.anchor[1] if self.anchor[0] == number else None


# ---- arithmetic -----------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
def contribution(rank: int, label: Label, weights: Weights) -> int:
    """A rank's part: a function of rank, step and weights, as a gradient is."""
    return (rank + 3) * (label.number + 7) * weights.parameters % PRIME + label.call + len(label.what)


def summed(parts: Sequence[int]) -> int:
    """In rank order: another order gives another sum, as it would in floating point."""
    total = 0
    for part in parts:
        total = (total * 31 + part) % PRIME
    return total


def updated(weights: Weights, result: int) -> Weights:
    moments = (weights.moments * 7 + result) % PRIME
    return Weights((weights.parameters * 5 + moments + 1) % PRIME, moments)


# ---- the script -----------------------------------------------------------------------------------


def script(calls: Sequence[Call], life: Life) -> Script:
    """From the top, for whoever runs it: calls that `life` knows the result of are not run again."""
    for number, call in enumerate(calls, start=1):
        yield Compute(0.5)
        yield Begin(number, call)
        if number <= len(life.finished_calls):
            continue
        place = life.place_in(number)
        if place is None:
            life.at_anchor(number, None)
        result = yield from _RUN[call.kind](number, call, life, place)
        life.finished_calls.append(result)
        life.at_anchor(number, "end")
    yield End(len(calls))


def _fit(number: int, call: Call, life: Life, place: Any) -> Generator[Request, Any, int]:
    epoch, step, total = place or (0, 0, 0)
    while epoch < call.num_epochs:
        while step < call.num_steps:
            life.at_anchor(number, (epoch, step, total))
            total = (total + (yield from _commit(number, epoch * call.num_steps + step, life))) % PRIME
            step += 1
            if step % 3 == 0:
                yield Checkpoint((number, (epoch, step, total)))
        life.at_anchor(number, (epoch, step, total))
        total = (total * 3 + (yield from _ask_all(number, "metrics", epoch, life))) % PRIME
        total = (total * 3 + (yield from _ask_all(number, "validation", epoch, life))) % PRIME
        epoch, step = epoch + 1, 0
    return total


def _loop(number: int, call: Call, life: Life, place: Any) -> Generator[Request, Any, int]:
    """A loop of the user's own: no anchor between its begin and its end."""
    total = 0
    for step in range(call.num_steps):
        total = (total + (yield from _commit(number, step, life))) % PRIME
    return total


def _evaluate(number: int, call: Call, life: Life, place: Any) -> Generator[Request, Any, int]:
    total = 0
    for batch in range(call.num_steps):
        total = (total * 3 + (yield from _ask_all(number, "evaluate", batch, life))) % PRIME
    return total


def _save(number: int, call: Call, life: Life, place: Any) -> Generator[Request, Any, int]:
    yield Compute()
    yield Checkpoint((number, None))
    return life.weights.parameters


_RUN = {"fit": _fit, "loop": _loop, "evaluate": _evaluate, "save": _save}


def _commit(number: int, step: int, life: Life) -> Generator[Request, Any, int]:
    yield Compute()
    label = Label(number, "step", step)
    result, is_live = yield Exchange(label, contribution(life.rank, label, life.weights))
    if is_live:  # else the weights that were given stand after it
        life.weights = updated(life.weights, result)
    return int(result)


def _ask_all(number: int, what: str, index: int, life: Life) -> Generator[Request, Any, int]:
    yield Compute(0.3)
    label = Label(number, what, index)
    result, _ = yield Exchange(label, contribution(life.rank, label, life.weights))
    return int(result)


# ---- what must come out ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The undisturbed run."""

    results: dict[Label, int]
    after_step: dict[Label, Weights]
    weights: Weights
    finished_calls: tuple[int, ...]


@lru_cache(maxsize=4096)
def undisturbed(calls: tuple[Call, ...], num_workers: int) -> Expected:
    """Run all ranks in turn, without a cluster: every exchange when all have asked for it."""
    lives = [Life(rank, has_state=True) for rank in range(num_workers)]
    scripts = [script(calls, life) for life in lives]
    answers: list[Any] = [None] * num_workers
    results: dict[Label, int] = {}
    after_step: dict[Label, Weights] = {}
    while True:
        requests = [each.send(answer) for each, answer in zip(scripts, answers, strict=True)]
        first = requests[0]
        answers = [None] * num_workers
        if isinstance(first, End):
            break
        if isinstance(first, Exchange):
            parts = [request.contribution for request in requests if isinstance(request, Exchange)]
            result = results[first.label] = summed(parts)
            for life in lives:
                life.log.finish(result)
            answers = [(result, True)] * num_workers
            if first.label.what == "step":
                after_step[first.label] = updated(lives[0].weights, result)
    assert all(life.weights == lives[0].weights for life in lives)
    return Expected(results, after_step, lives[0].weights, tuple(lives[0].finished_calls))
