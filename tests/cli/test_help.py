from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
from invoking import Command, Shoal

from shoal import cli

QUIET = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
VERBS = ["run", "verify", "resume", "status", "doctor"]


def test_help_lists_every_verb_whole(command: Command) -> None:
    shown = command("--help")
    assert shown.returncode == 0
    for verb in VERBS:
        (line,) = [line for line in shown.stdout.splitlines() if line.startswith(f"  {verb} ")]
        assert line.endswith("."), f"the help of {verb} is too long for its line"


def test_the_line_of_a_verb_is_how_its_own_help_begins() -> None:
    for name, spec in cli.VERBS.items():
        module, _, function = spec.where.partition(":")
        own = getattr(importlib.import_module(f"shoal.cli.{module}"), function).__doc__
        assert spec.is_group or " ".join(own.split()).startswith(spec.about), name


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_documents_every_option(shoal: Shoal, verb: str) -> None:
    shown = shoal(verb, "--help")
    assert shown.exit_code == 0
    assert f"Usage: shoal {verb} [OPTIONS]" in shown.stdout
    options = [line for line in shown.stdout.splitlines() if line.startswith("  -")]
    assert options
    # A help text starts after two spaces, or on the next line where the names are long.
    assert all("  " in line.strip() for line in options), options


def test_no_verb_at_all_shows_the_help(shoal: Shoal) -> None:
    shown = shoal()
    assert shown.exit_code == 2
    assert "Usage: shoal" in shown.output


def test_help_imports_neither_torch_nor_anything_else_that_is_slow() -> None:
    code = (
        "import sys\n"
        "from shoal.cli import main\n"
        "sys.argv = ['shoal', *sys.argv[1:]]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print([name for name in ('torch', 'numpy', 'rich', 'msgspec', 'fsspec') if name in sys.modules])\n"
    )
    for args in (["run", "--help"], ["verify", "--help"]):
        shown = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
        )
        assert shown.stdout.splitlines()[-1] == "[]"


def test_help_answers_at_once() -> None:
    """Measured 0.14 s on two idle cores, and twice that where others share their caches; torch alone would take seconds."""

    def seconds() -> float:
        child = os.posix_spawn(
            sys.executable, [sys.executable, "-m", "shoal", "--help"], os.environ, file_actions=QUIET
        )
        _, status, used = os.wait4(child, 0)
        assert status == 0
        return used.ru_utime + used.ru_stime

    assert min(seconds() for _ in range(5)) < 0.6
