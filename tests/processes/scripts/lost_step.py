"""everything.py, in which rank 1 once knows of a step that counts, and has nothing left of what it pushed to it: OUT [VARIANT].

As it is where a worker and a server die within one step; whoever meets that in real life meets it by chance.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from shoal.config import job
from shoal.parallel.ps import exact as ps
from shoal.parallel.ps.session import ps_session
from shoal.ps.client.step import Decision

AT_STEP = 6
about_to_run = ps.Ps.about_to_run


def with_a_lost_step(self: ps.Ps) -> None:
    me = job.current()
    if (me.rank, me.incarnation, ps_session().updates) == (1, 0, AT_STEP):
        ps_session().updates += 1
        ps_session().commit_again(Decision(1.0, True))
        raise AssertionError("a step was committed that nobody has run")
    about_to_run(self)


ps.Ps.about_to_run = with_a_lost_step  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("everything.py")), run_name="__main__")
