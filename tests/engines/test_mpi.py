"""mpirun, for real: slots as hosts, a killed slot, and a script inside its world."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from engine_jobs import TRAINING, EngineJob, command_lines, differences, kill_host

from shoal.config.hosts import Resources
from shoal.engines import protocol
from shoal.engines.mpi import Mpi
from shoal.engines.protocol import Ticket
from waiting import wait_until

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
KEY = "a-key-for-tests-0123456789"


def test_a_killed_slot_of_mpirun_is_replaced_and_the_bits_are_those_of_this_machine_alone(
    installed: Callable[[str], None], start_job: Callable[..., EngineJob], undisturbed: Path, tmp_path: Path
) -> None:
    installed("mpi")
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "3", "--exchange", "native", "--on", "mpi", "--hosts", "3"]
    job = start_job(*options, str(TRAINING), str(out), "--gate", "5", env={**AS_ROOT, "SHOAL_JOIN_KEY": KEY})
    job.wait_for_gate(out, 3)
    assert KEY not in command_lines()
    kill_host(job.agent(2))
    (out / "go").touch()
    assert job.wait() == 0, job.output()
    assert [event["ranks"] for event in job.events("host-lost")] == [[1]]
    assert "mpi was asked for another" in job.output()
    assert differences(out, undisturbed) == []
    assert all(event["host"] > 0 for event in job.events("worker-started"))  # none on the head


def test_slots_that_share_a_machine_and_its_address_are_hosts_of_their_own(
    installed: Callable[[str], None], start_job: Callable[..., EngineJob], tmp_path: Path
) -> None:
    """As where an engine puts two of them on one node. In 127.0.0.0/8 each would have an address of its own; IPv6 has one."""
    installed("mpi")
    if "::1" not in {each.address for each in psutil.net_if_addrs()["lo"]}:
        pytest.skip("this machine has no IPv6")
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "2", "--on", "mpi", "--hosts", "2", "--bind", "[::1]"]
    job = start_job(*options, str(TRAINING), str(out), "--steps", "2", env=AS_ROOT)
    assert job.wait() == 0, job.output()
    assert {event["address"] for event in job.events("host-joined")} == {"::1"}
    assert {event["host"] for event in job.events("worker-started")} == {1, 2}


def test_a_slot_that_was_killed_comes_back_on_its_own_machine_of_the_hostfile(
    installed: Callable[[str], None], start_job: Callable[..., EngineJob], tmp_path: Path
) -> None:
    """Two machines by name, which a program in the place of ssh starts here."""
    installed("mpi")
    (tmp_path / "hosts").write_text("# machines\none slots=1\n\ntwo slots=1\n")
    # A folder of its own for each: where they start at the same moment, one's daemon finds the other's and ends.
    (tmp_path / "agent").write_text(
        f'#!/bin/sh\necho "$1" >> {tmp_path}/machines\nexport TMPDIR={tmp_path}/$1\nmkdir -p $TMPDIR\nshift\nexec sh -c "$*"\n'
    )
    (tmp_path / "agent").chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "2", "--on", f"mpi:{tmp_path}/hosts", "--hosts", "2", "--bind", "127.0.0.1"]
    env = {**AS_ROOT, "OMPI_MCA_plm_rsh_agent": str(tmp_path / "agent")}
    job = start_job(*options, str(TRAINING), str(out), "--gate", "5", env=env)
    job.wait_for_gate(out, 2)
    kill_host(job.agent(2))
    (out / "go").touch()
    assert job.wait() == 0, job.output()
    assert [event["ranks"] for event in job.events("host-lost")] == [[1]]
    assert sorted((tmp_path / "machines").read_text().split()) == ["one", "two", "two"]


def test_a_script_that_mpirun_starts_is_one_job_of_its_world(
    installed: Callable[[str], None], tmp_path: Path
) -> None:
    installed("mpi")
    out = tmp_path / "out"
    out.mkdir()
    program = ["mpirun", "--oversubscribe", "-n", "3", sys.executable]
    job = EngineJob(tmp_path / "job", [str(TRAINING), str(out)], AS_ROOT, program)
    try:
        assert job.wait() == 0, job.output()
    finally:
        job.close()
    assert "3 workers, ddp" in job.output()
    assert [path.name for path in (job.folder / "runs").iterdir()] == ["training-1"]
    assert job.output().count("rank 0 has ended") == 1


def test_a_python_that_the_machines_do_not_have_is_named(
    installed: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("mpi")
    for name, value in AS_ROOT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(protocol, "sys", SimpleNamespace(executable="/no/such/python"))
    ticket = Ticket(job="a", address="shoal://127.0.0.1:1", key="k" * 20, cores=1, folder=str(tmp_path))
    engine = Mpi("", ticket)
    engine.start([1, 2], Resources())
    try:
        assert wait_until(lambda: sorted(engine.watch()) == [1, 2], 60)
        assert "/no/such/python: not found" in engine.watch()[1]
    finally:
        engine.stop()


def test_a_program_that_mpirun_cannot_start_ends_the_job_with_its_words(
    installed: Callable[[str], None], start_job: Callable[..., EngineJob], tmp_path: Path
) -> None:
    installed("mpi")
    script = tmp_path / "train.py"
    script.write_text("import shoal\n")
    (tmp_path / "hosts").write_text("no-such-machine.invalid slots=1\n")
    job = start_job("--on", f"mpi:{tmp_path}/hosts", str(script), env=AS_ROOT)
    assert job.wait() == 3, job.output()
    assert "host 1 was lost during the start: mpirun ended with exit code" in job.output()
    assert "Nothing was trained" in job.output()
