"""Events of workers in events.jsonl, and removal of a job's scratch files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def test_what_a_worker_tells_is_written_down_and_its_scratch_is_gone(
    launch_script: Callable[..., Any],
) -> None:
    done = launch_script(
        """
        import threading, shoal
        from shoal.runtime import events; from shoal.runtime import scratch

        (scratch.directory("things") / f"of-{shoal.rank()}").write_text("x")
        threads = [
            threading.Thread(target=events.emit, args=("noticed",), kwargs={"number": number, "kind": "odd"})
            for number in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        """,
        workers=3,
    )
    assert done.exit_code == 0, done.error
    events = [json.loads(line) for line in (done.run_dir / "events.jsonl").read_text().splitlines()]
    told = [(each["rank"], each["number"]) for each in events if each["event"] == "noticed"]
    assert sorted(told) == [(rank, number) for rank in range(3) for number in range(20)]
    assert not (done.run_dir / "scratch").exists()
