"""Migration pages, followed to the letter: from `pip install` to a trained model, and the lines that change.

Each page gets an environment and caches of its own, so that its first job
compiles what a first job compiles; only downloads may come from pip's cache.
`python -m benchmarks migration [--part PAGE ...]` needs a wheel in dist/ (`make release`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Report

ROOT = Path(__file__).parents[1]
PAGES, SCRIPTS = ROOT / "docs/migration", ROOT / "examples/migration"
TIMEOUT_S = 900.0


def commands(page: Path) -> list[str]:
    """The commands of a page: its first block."""
    lines = page.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("    "))
    block = []
    for line in lines[first:]:
        if not line.startswith("    "):
            break
        block.append(line.strip())
    return block


def follow(page: Path, wheel: Path) -> dict[str, float | str]:
    """Run the commands of a page in a fresh environment; seconds of the installation and of all."""
    # Loops are still being compiled beside the last job when its page is done.
    with tempfile.TemporaryDirectory(prefix="shoal-page-", ignore_cleanup_errors=True) as folder:
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/env"], check=True)
        env = {
            **{name: os.environ[name] for name in ("HOME", "LANG", "PIP_CONSTRAINT", "JAVA_HOME") if name in os.environ},
            "PATH": f"{folder}/env/bin:{os.environ['PATH']}",
            "XDG_CACHE_HOME": f"{folder}/cache",
            "PIP_CACHE_DIR": os.path.expanduser("~/.cache/pip"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }  # fmt: skip
        began, place, installed_s, said = time.perf_counter(), folder, 0.0, ""
        for command in commands(page):
            line = command.replace("/path/to/shoal", str(wheel))
            done = subprocess.run(
                ["bash", "-c", f"{line} && pwd > {folder}/where"],
                cwd=place,
                env=env,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise SystemExit(
                    f"{page.name}: `{command}` ended with {done.returncode}\n{done.stderr[-3000:]}"
                )
            place = Path(folder, "where").read_text().strip()
            if command.startswith("pip"):
                installed_s = time.perf_counter() - began
            said = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
        total_s = time.perf_counter() - began
    return {
        "install_s": round(installed_s, 1),
        "first_model_s": round(total_s, 1),
        "load": round(os.getloadavg()[1]),  # of the last five minutes
        "printed": said[-80:],
    }


def changed(old: Path, new: Path) -> int:
    """Lines of `new` that `old` does not have, blank ones and docstrings left out."""
    one, other = (
        Counter(
            line.strip()
            for line in path.read_text().splitlines()
            if line.strip() and not line.startswith('"""')
        )
        for path in (old, new)
    )
    return sum((other - one).values())


def lines(name: str) -> dict[str, int]:
    before, after = SCRIPTS / f"{name}_before.py", SCRIPTS / f"{name}_after.py"
    found = {"new_lines": changed(before, after), "lines_gone": changed(after, before)}
    plain = ROOT / "benchmarks/scripts/plain_loop.py"
    if name in ("ddp", "accelerate", "lightning", "horovod"):
        found |= {"from_plain_by_peer": changed(plain, before), "from_plain_by_shoal": changed(plain, after)}
    return found


def main(*, quick: bool = False, parts: Sequence[str] = ()) -> None:
    """One figure for each page. Quick: one page."""
    wheels = sorted((ROOT / "dist").glob("shoal-*.whl"))
    if not wheels:
        raise SystemExit("there is no wheel in dist/: run `make release`")
    report = Report("migration", keeps_others=True)
    pages = [page for page in sorted(PAGES.glob("*.md")) if page.stem != "index"]
    for page in pages[:1] if quick else [page for page in pages if not parts or page.stem in parts]:
        report.add(page.stem, {**lines(page.stem), **follow(page, wheels[-1])}, commands=commands(page))
        report.save()
