"""Registry of engines: name, module, what has to be installed. An engine's package is imported when it is asked for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, cast

from shoal.config.extras import install_command
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.engines.protocol import Engine, Ticket


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as the command line knows it."""

    module: str
    help: str
    package: str = ""
    """Python package of the engine, in shoal's extra of the engine's name."""

    oldest: str = ""
    """Version of the package that is needed at least."""

    program: str = ""
    """Program that has to be there, and where it comes from."""

    source: str = ""

    counts_resources: bool = True
    """The engine itself refuses more cores and memory than there are; else a machine that it runs on alone is looked at."""

    hosts_join: bool = False
    """Hosts are not asked for: they run `shoal join` with a key that they were given before the job started."""


ENGINES = {
    "ray": EngineSpec("ray", "actors in a placement group", package="ray", oldest="2.40"),
    "spark": EngineSpec(
        "spark",
        "tasks in executors",
        package="pyspark",
        oldest="4.0",
        program="java",
        source="apt install openjdk-17-jre-headless",
        counts_resources=False,  # a local master has as many cores as its name says
    ),
    "kubernetes": EngineSpec(
        "join", "pods of a JobSet, which `shoal kubernetes render` writes", hosts_join=True
    ),
    "join": EngineSpec(
        "join",
        "processes that run `shoal join` by themselves; the head runs no worker",
        hosts_join=True,
    ),
    "torchrun": EngineSpec("torchrun", "inside the processes that torchrun started"),
    "slurm": EngineSpec(
        "slurm",
        "jobs of an array",
        package="submitit",
        oldest="1.5",
        program="sbatch",
        source="apt install slurm-client",
    ),
    "mpi": EngineSpec(
        "mpi", "mpirun here", program="mpirun", source="apt install openmpi-bin", counts_resources=False
    ),
}

ELSEWHERE = {
    "cloud": "a cloud is no engine of --on: `shoal cloud render` writes a task file that starts the job there",
}


def parse(said: str) -> tuple[str, str]:
    """`ray:auto`: name and detail. ConfigError for an engine that shoal does not know."""
    name, _, detail = said.partition(":")
    if name not in ENGINES:
        if name in ELSEWHERE:
            raise ConfigError(
                f"--on {said}: {ELSEWHERE[name]}. Nothing was started; the engines of --on are {', '.join(ENGINES)}."
            )
        guess = get_close_matches(name, ENGINES, n=1)
        meant = f" Did you mean {guess[0]}?" if guess else ""
        raise ConfigError(
            f"--on {said}: there is no engine '{name}'.{meant} Nothing was started; there are {', '.join(ENGINES)}."
        )
    return name, detail


def load(name: str) -> ModuleType:
    """Module of an engine. ConfigError where the engine is not installed."""
    spec = ENGINES[name]
    if spec.package and not (found := _version(spec.package)):
        raise ConfigError(
            f"--on {name} needs the Python package {spec.package}, which is not installed here. Nothing was started; install it "
            f"with {install_command(name)}."
        )
    if spec.package and _release(found) < _release(spec.oldest):
        raise ConfigError(
            f"--on {name} needs {spec.package} {spec.oldest} or newer, and {found} is installed here. Nothing was started; install it "
            f"with {install_command(name)}."
        )
    if spec.program and shutil.which(spec.program) is None:
        raise ConfigError(
            f"--on {name} needs the program {spec.program}, which is not on PATH. Nothing was started; install it "
            f"({spec.source})."
        )
    return importlib.import_module(f"shoal.engines.{spec.module}")


def _version(package: str) -> str:
    """Version of a package; empty where it is not installed."""
    if importlib.util.find_spec(package) is None:
        return ""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # Spark's own Python on PYTHONPATH, or a folder of that name
        with contextlib.suppress(ImportError):
            return str(getattr(importlib.import_module(package), "__version__", ""))
        return ""


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def is_local(said: str) -> bool:
    """Whether all slots of an engine are on this machine. ConfigError where it is not installed or not reachable."""
    name, detail = parse(said)
    return bool(load(name).is_local(detail))


def open_engine(said: str, ticket: Ticket) -> Engine:
    name, detail = parse(said)
    return cast("Engine", load(name).open_engine(detail, ticket))
