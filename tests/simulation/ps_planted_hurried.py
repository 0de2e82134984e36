"""Bugs on purpose where steps do not wait for the slowest: each must be found by the oracle of ps_partial.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from shoal.ps.server.actions import Action, Request
from shoal.ps.server.core import ServerCore
from shoal.ps.server.progress import Slots
from shoal.ps.server.replication import Written
from shoal.ps.server.state import Counted, ServerState
from shoal.ps.server.steps import Contribution, Steps
from shoal.runtime.transport.messages.client_server import Committed, StepEnd
from simulation.ps_hurried import Hurried
from simulation.ps_planted import AcknowledgesFirst, LosesVersions, altered, plant

plant("acknowledged before it is replicated (hurried)", Hurried)(AcknowledgesFirst)
plant("versions are lost at a failover (hurried)", Hurried)(LosesVersions)


@plant("what came too late is told to count", Hurried)
class NeverTellsLate(ServerCore):
    def _partial(self, message: StepEnd) -> Committed:
        return msgspec.structs.replace(super()._partial(message), late=False)


@plant("only the last step knows who was in it", Hurried)
class AsksTheLastStep(ServerCore):
    def _partial(self, message: StepEnd) -> Committed:
        last = self._steps().last
        late = last is None or last.seq != message.seq or message.rank not in last.ranks
        return self._committed(self._high if late else message.seq, late=late)


@plant("what came too late gets into the next step", Hurried)
class TakesLateOnes(ServerCore):
    def _step_end(self, request: Request, message: StepEnd, name: str) -> list[Action]:
        steps = self._steps()
        if message.seq == self._low > 0 and message.rank not in steps.ended:
            staged = self.staging.take(request.peer, message)
            vector = np.frombuffer(request.frames[0]).copy()
            later = msgspec.structs.replace(message, seq=message.seq + 1)
            steps.ended[message.rank] = Contribution(later, vector, b"", staged)
        return super()._step_end(request, message, name)


class WaitsForTooFew(Steps):
    @property
    def waits_for(self) -> int:
        return max(super().waits_for - 1, 1)


plant("a step is summed with fewer than it must have", Hurried)(altered(steps=WaitsForTooFew))


class KeepsWhereItLies(Steps):
    def reused(self) -> dict[int, Contribution]:
        reused = super().reused()
        self._kept |= self.ended
        return reused


plant("what may be used once more stays in the worker's memory", Hurried)(altered(steps=KeepsWhereItLies))


class ReusesForEver(Steps):
    def reused(self) -> dict[int, Contribution]:
        reused = super().reused()
        self._kept = reused | self._kept
        return reused


plant("what stands in for a rank does so again and again", Hurried)(altered(steps=ReusesForEver))


class KeepsOverViews(Steps):
    def forget_kept(self) -> None:
        pass


plant("what was kept is used once more for slots that came since", Hurried)(altered(steps=KeepsOverViews))


class ReplicasForgetWho(ServerState):
    def write_counted(self, counted: Counted, slots: Slots) -> Written:
        return super().write_counted(replace(counted, seqs=()), slots)


plant("a replica does not know who was in a step", Hurried)(altered(state=ReplicasForgetWho))


class ReusedIsFree(Steps):
    """What stands in for a rank is added, and the mean is taken without it."""

    def sum(self, *arguments: Any, parts: dict[int, Contribution] | None = None, **others: Any) -> Any:
        summed = super().sum(*arguments, parts=parts, **others)
        for part in (parts or {}).values():
            if part not in self.ended.values():
                summed.vector[0] -= part.vector[0]
        return summed


plant("what is used once more is not counted", Hurried)(altered(steps=ReusedIsFree))


@plant("weights of a later step take the job back", Hurried)
class LosesSpoiltSteps(ServerCore):
    """As in an exact step: but here a server is ahead of another without any fault."""

    def _step_end(self, request: Request, message: StepEnd, name: str) -> list[Action]:
        if message.is_spoilt and message.seq > self._low:
            return self._lose_step(request, message.rank)
        return super()._step_end(request, message, name)


@plant("a replacement waits for a step that nobody makes", Hurried)
class WaitsLikeExact(ServerCore):
    def _is_visible(self, request: Request) -> bool:
        return self._low >= request.message.clock  # type: ignore[union-attr]
