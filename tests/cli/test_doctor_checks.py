from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli import doctor
from shoal.cli.doctor import Level


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_every_test_machine_has_is_found() -> None:
    checks = [doctor.memory(), doctor.shared_memory(), doctor.loopback(), doctor.runtime_directory()]
    assert [finding.what for finding in checks if finding.level is Level.FAIL] == []


def test_checks_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    doctor.runtime_directory()
    doctor.disk(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_few_descriptors_are_a_warning_with_a_cure(few_descriptors: None) -> None:
    finding = doctor.descriptors()
    assert finding.level is Level.WARN
    assert "ulimit -n" in finding.cure


def test_a_run_directory_that_cannot_be_written_is_a_failure() -> None:
    # Not even root can make files in /proc.
    finding = doctor.disk(Path("/proc/runs"))
    assert finding.level is Level.FAIL
    assert "--run-dir" in finding.cure


def test_a_run_directory_that_is_not_there_yet_is_asked_of_its_parent(tmp_path: Path) -> None:
    assert doctor.disk(tmp_path / "not" / "yet").level is not Level.FAIL


def test_no_directory_for_sockets_is_a_failure_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    finding = doctor.runtime_directory()
    assert finding.level is Level.FAIL
    assert "TMPDIR" in finding.cure


def test_torch_is_asked_in_another_process() -> None:
    answer = doctor.ask_torch()
    assert isinstance(answer, dict), answer
    assert answer["gloo"] is True
    assert answer["import_s"] > 0


def test_a_python_without_torch_answers_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = doctor.ask_torch()
    assert answer == "ImportError: libtorch is broken"
