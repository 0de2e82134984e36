"""One environment a peer, under .peers/: made when missing, never with a build for CUDA.

A peer's requirements name every package with its version and are installed
without dependencies, so that nothing else can come along. What cannot be
installed is answered with the reason, and the comparison goes on without it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
INSTALL_TIMEOUT_S = 1200
CUDA_ONLY = ("nvidia-", "cuda-")

NOT_BY_PIP = {
    "ps-lite": "pip finds no package of that name; it would have to be built from source",
}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A side that cannot run here, and why."""

    reason: str


def environment(name: str) -> Path | Skipped:
    """The interpreter of a peer's environment, installed now where it is missing or out of date."""
    wanted = ROOT / "benchmarks" / "peers" / f"requirements-{name}.txt"
    folder = ROOT / ".peers" / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    digest = hashlib.sha256(wanted.read_bytes()).hexdigest()
    if ready.exists() and ready.read_text() == digest:
        return python
    print(f"installing {name} into .peers/{name}", file=sys.stderr)
    try:
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        pip += ["-r", str(wanted)]
        plan = json.loads(_run([*pip, "--dry-run", "--ignore-installed", "--report", "-"]))
        for package in plan["install"]:
            if brought := _cuda_packages(package["metadata"]):
                about = f"{package['metadata']['name']} {package['metadata']['version']}"
                return Skipped(f"pip would fetch {about}, a build for CUDA: it wants {brought[0]}")
        _run(pip)
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if line.strip()]
        return Skipped(f"pip failed: {said[-1][:300] if said else error}")
    except subprocess.TimeoutExpired:
        return Skipped(f"not installed within {INSTALL_TIMEOUT_S} s")
    ready.write_text(digest)
    return python


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=INSTALL_TIMEOUT_S)
    return done.stdout


def _cuda_packages(metadata: dict[str, Any]) -> list[str]:
    """What a build for CUDA gives itself away by: it is one of CUDA's packages, or wants one without being asked to."""
    wanted = map(Requirement, metadata.get("requires_dist", []))
    always = [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [name for name in (metadata["name"], *always) if name.lower().startswith(CUDA_ONLY)]
