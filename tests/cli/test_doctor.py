from __future__ import annotations

from pathlib import Path

from invoking import Command


def test_the_doctor_goes_through_everything_and_finds_this_machine_fit(
    command: Command, tmp_path: Path
) -> None:
    seen = command("doctor")
    assert seen.returncode == 0, seen.stdout + seen.stderr
    lines = [line for line in seen.stdout.splitlines() if not line.startswith(" ")]
    assert {line.split()[0] for line in lines} <= {"ok", "warn"}
    for what in ("torch", "cores", "threads per worker", "memory", "loopback", "disk", "gpus", "processes"):
        assert any(line[6:].startswith(what) for line in lines), what
    assert "two workers begin and end in" in seen.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_makes_training_impossible_gives_exit_code_1_and_a_cure(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libtorch is broken')")
    seen = command("doctor", "--run-dir", "/proc/runs", PYTHONPATH=str(tmp_path / "broken"))
    assert seen.returncode == 1
    failed = [line for line in seen.stdout.splitlines() if line.startswith("fail")]
    assert [line.split()[1] for line in failed] == ["disk", "torch"]
    assert "libtorch is broken" in seen.stdout
    assert "→ choose another with --run-dir" in seen.stdout
    assert "Traceback" not in seen.stderr
