"""Jobs that read a stream of records: every record is trained once, whoever is killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import Launched

from flight_server import FlightProcess, add_endpoint
from shoal.cluster.launch.api import resume_config
from shoal.config.faults import Faults

Launch = Callable[..., Launched]
AtFile = Callable[[Path, Callable[[], object]], None]

SCRIPT = Path(__file__).parent / "scripts" / "counted_records.py"


@pytest.fixture
def flight(tmp_path: Path) -> Iterator[FlightProcess]:
    folder = tmp_path / "flight"
    folder.mkdir()
    for number in range(4):
        add_endpoint(folder, number, range(10 * number, 10 * number + 10))
    server = FlightProcess(folder)
    yield server
    server.close()


def test_an_endless_stream_is_trained_record_by_record_once_through_a_kill_and_a_resume(
    launch_script: Launch, at_file: AtFile, flight: FlightProcess, tmp_path: Path
) -> None:
    def more() -> None:
        for number in (4, 5):
            add_endpoint(flight.folder, number, range(10 * number, 10 * number + 10))

    at_file(tmp_path / "step-5", more)  # the stream has 40 records until then: it is waited for
    (tmp_path / "fail").write_text("7")
    faults = Faults().kill("worker-1", at_step=3, at="worker: before commit")
    cut = launch_script(SCRIPT, workers=2, name="cut", args=(flight.url, "7"), faults=faults)
    assert cut.exit_code == 1
    assert "as the test wants it" in str(cut.error)
    (tmp_path / "fail").unlink()
    [saved] = json.loads((tmp_path / "runs/cut/checkpoints/step-000000006/manifest.json").read_text())[
        "progress"
    ]["streams"]
    assert saved == {
        "begins": [10, 10, 10, 10, 0, 0],
        "ends": None,
        "base": 40,
        "rounds": [[4, 0, 10], [5, 0, 10]],
        "types": "",
    }

    config = resume_config(tmp_path / "runs" / "cut", workers=3)
    resumed = launch_script(SCRIPT, workers=3, name="cut", args=config.args, resume=True, seed=config.seed)
    assert resumed.exit_code == 0, resumed.stderr
    counts = json.loads((tmp_path / "counts").read_text())
    assert counts[:56] == [1.0] * 56
    assert not any(counts[56:])
