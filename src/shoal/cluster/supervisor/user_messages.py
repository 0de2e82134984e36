"""What the supervisor tells its user, and writes down, of deaths and servers: facts in, words and figures out."""

from __future__ import annotations

from shoal.cluster.supervisor import job_events as fate_events
from shoal.cluster.supervisor.outcome import how_it_ended, lost_state
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.messages.supervisor import Saved


def replacing(died: fate_events.Died, max_restarts: int) -> str:
    """A worker died."""
    why = f": {died.why}" if died.why else ""
    return f"worker {died.rank} {how_it_ended(died.code)}{why}; replacing it ({died.num_times} of {max_restarts} times)"


def begins_anew(checkpoint: Saved | None) -> str:
    """All workers died at once."""
    where = (
        f"the checkpoint of step {checkpoint.step:,}, {checkpoint.path}"
        if checkpoint is not None
        else "where this launch began: it has written no checkpoint yet"
    )
    return f"no worker is left that has what was trained; all begin anew from {where}"


def replacing_server(died: fate_events.ServerDied, max_restarts: int) -> str:
    """A server died."""
    why = f": {died.why}" if died.why else ""
    how = how_it_ended(died.code, finished=True)
    return f"server {died.number} {how}{why}; replacing it ({died.num_times} of {max_restarts} times)"


def going_back(lost: fate_events.StateLost, checkpoint: Saved | None, reached: int) -> str:
    """Everybody begins anew; the steps that are repeated."""
    what = lost_state(lost)
    if checkpoint is None:
        return f"{what}. No checkpoint was written by this launch: the job begins anew" + (
            f", and repeats up to {reached} steps" if reached else ""
        )
    steps = (
        f"steps {checkpoint.step + 1} to {reached} are" if reached > checkpoint.step + 1 else "one step is"
    )
    return (
        f"{what}; going back to {checkpoint.path}: "
        f"{steps if reached > checkpoint.step else 'no step is'} repeated"
    )


def slots_by_server(view: ServerView) -> dict[str, dict[str, int]]:
    """Of each server its incarnation, and how many slots it answers for, keeps, and is being filled with."""
    counts = {
        number: {"incarnation": incarnation, "primary": 0, "replica": 0, "filling": 0}
        for number, incarnation in view.incarnations.items()
    }
    for holders in view.holders:
        for index, number in enumerate(holders):
            counts[number]["replica" if index else "primary"] += 1
    for joining in view.joining.values():
        for number in joining:
            counts[number]["filling"] += 1
    return {str(number): count for number, count in counts.items()}
