"""Types of these tests' fixtures."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from typer.testing import Result

Shoal = Callable[..., Result]
"""The command line, run in this process."""

Command = Callable[..., subprocess.CompletedProcess[str]]
"""The command line as a process of its own."""
