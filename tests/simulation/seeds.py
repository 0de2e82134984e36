"""Seeds worth keeping: each broke a promise once, and finds the bug again where it is planted.

A seed is only as lasting as the draws of the simulator. When those change,
`python -m simulation --bug NAME` says which seed finds it now; until somebody
writes that down here the tests search for it themselves.
"""

from __future__ import annotations

FINDS: dict[str, int] = {
    "an anchor forgets the last result (once real)": 4,
    "a replacement does not hand on what it was given (once real)": 138,
    "a rank that catches up tells what it has finished, not what it knows (once real)": 384,
    "a rank that was behind updates on top of the weights it was given": 8,
    "results are copied without the weights": 0,
    "weights are copied without the results": 4,
    "state is taken in place, piece by piece": 91,
    "a replacement starts at the call's begin instead of the anchor": 0,
    "the end of a call is no anchor (once real)": 4,
    "a replacement begins from the checkpoint although there is a donor": 0,
    "a replacement that was given nothing enters as if it were new (once real)": 0,
    "scripts are said to differ while a rank catches up (once real)": 0,
    "parts are summed in the order of arrival": 0,
    "a view is formed while a rank is missing": 0,
    "the donor is one that is behind": 4,
    "a replacement without state counts as a survivor (once real)": 4,
    "an old incarnation is heard": 99,
    "nobody is told again of a view": 278,
    "a call is granted before all have come": 0,
    "who waits at a call is never called away to a view": 1,
    "who was called away from a call still counts there": 1,
    "a question that was overtaken is heard (once real)": 49,
    "a replacement that comes after the end is let in (once real)": 321,
    "answers before it writes": 40,
    "the journal has no views, so numbers are used again": 35,
    "the journal has no calls": 18,
    "the journal loses what was written last": 65,
    "granting a call again forgets those after it (once real)": 170,
    "a suspect is replaced before it is dead": 12,
    "a lease is returned twice": 2,
    "the leases of the dead stay with them": 10,
    "an epoch ends with a lease under way": 0,
    "a lease that is held is handed out again": 0,
    "who waits for a lease is forgotten": 0,
    "leases: answers before it writes": 10,
    "the journal has no leases": 1,
    "a push is acknowledged before it is replicated": 0,
    "a doubled push is acknowledged by its mark alone": 49,
    "a doubled push is applied twice": 0,
    "a push is acknowledged without the copy that is under way": 0,
    "a copy is taken before its view's map (once real)": 218,
    "a slot is switched before its copy has caught up": 0,
    "a restarted coordinator goes on with the old view (once real)": 34,
}
"""A planted bug: a seed that finds it."""
