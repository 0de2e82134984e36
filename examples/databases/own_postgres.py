"""A PostgreSQL server for as long as one script runs, if the programs for it are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator


def is_installed() -> bool:
    return all(shutil.which(name) for name in ("initdb", "pg_ctl", "postgres"))


@contextlib.contextmanager
def server(folder: str) -> Iterator[str]:
    """The URL of a server whose data and socket are in the folder. It refuses to be root's: then it is another user's."""
    user = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    if user:
        shutil.chown(folder, **user)

    def run(*command: str) -> None:
        subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL, **user)

    run("initdb", "-D", f"{folder}/pg", "-U", "me", "--auth=trust", "--no-sync")
    run("pg_ctl", "-D", f"{folder}/pg", "-w", "-l", f"{folder}/pg.log", "-o", f"-h '' -k {folder}", "start")
    try:
        yield f"postgresql:///postgres?host={folder}&user=me"
    finally:
        run("pg_ctl", "-D", f"{folder}/pg", "-m", "fast", "-w", "stop")
