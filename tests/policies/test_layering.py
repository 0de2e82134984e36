"""A folder may ask only the folders below it, and what answers quickly never loads torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
from parsed import PACKAGE, Module

LAYERS = (
    {"cli"},
    {"observe"},
    {"train"},
    {"parallel"},
    {"ps"},
    {"recovery"},
    {"cluster"},
    {"features"},
    {"collectives", "data", "embedding"},
    {"runtime", "engines"},
    {"config"},
    {"errors", "system"},
)
HEIGHT = {folder: -depth for depth, folders in enumerate(LAYERS) for folder in folders}
FACADES = {
    "shoal",
    "shoal.__main__",
    "shoal.callbacks",
    "shoal.collectives",
    "shoal.errors",
    "shoal.estimator",
    "shoal.keras",
    "shoal.memory",
    "shoal.nn",
    "shoal.spark",
    "shoal.system",
}

TORCH = ("torch", "torchmetrics", "safetensors.torch")
WITHOUT_TORCH = {"errors", "config", "engines", "runtime", "cluster", "observe", "cli"}
RUN_IN_WORKERS = {
    "shoal.cluster.worker.process",
    "shoal.recovery.rendezvous",
    "shoal.recovery.device_group",
}


def test_imports_point_downwards_only(modules: list[Module]) -> None:
    wrong = [line for module in modules if module.name not in FACADES for line in _upward(module)]
    order = " > ".join(", ".join(sorted(folders)) for folders in LAYERS)
    assert not wrong, (
        f"imports point downwards only, also inside functions ({order}). Move what is shared down, or pass it in "
        "as an argument:\n" + "\n".join(wrong)
    )


@pytest.mark.parametrize(
    "source",
    [
        "import shoal.train.trainer",
        "from shoal.train import trainer",
        "from shoal import Trainer",
        "from shoal import callbacks",
        "import shoal\nshoal.Trainer",
        "def f():\n    import shoal.cli.run",
        "import importlib\nimportlib.import_module('shoal.train.trainer')",
        "from . import trainer",
        "from shoal.collectives import gather",
    ],
)
def test_each_way_of_looking_up_is_seen(source: str) -> None:
    assert list(_upward(_in_data(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import shoal\nshoal.__version__",
        "from shoal import errors",
        "from shoal.data import tree",
        "import torch",
    ],
)
def test_looking_down_is_allowed(source: str) -> None:
    assert not list(_upward(_in_data(source)))


def _in_data(source: str) -> Module:
    return Module(PACKAGE / "data" / "imagined.py", "shoal.data.imagined", source, ast.parse(source))


def _upward(module: Module) -> Iterator[str]:
    for name, line in module.imports():
        parts = name.split(".")
        if name.startswith("."):
            yield f"{module.where}:{line} imports {name} relatively"
        # Anybody may ask the package itself for its __version__ or __file__.
        if parts[0] != "shoal" or len(parts) == 1 or parts[1].startswith("__") or parts[1] == module.folder:
            continue
        if HEIGHT.get(parts[1], 1) >= HEIGHT[module.folder]:
            yield f"{module.where}:{line} imports {name}"


def test_every_folder_has_its_place_among_the_layers(modules: list[Module]) -> None:
    unknown = {module.folder for module in modules} - HEIGHT.keys() - {""}
    beside = {module.name for module in modules if module.folder == ""} - FACADES
    assert not unknown | beside, (
        f"{sorted(unknown | beside)} under src/shoal stand in no layer. Put them in one, or give a new folder its "
        "place in tests/policies/test_layering.py and in docs/architecture.md."
    )


def test_nothing_that_answers_quickly_reaches_torch(modules: list[Module]) -> None:
    by_name = {module.name: module for module in modules}
    wrong = []
    for module in modules:
        if module.folder in WITHOUT_TORCH and module.name not in RUN_IN_WORKERS:
            path = _path_to_torch(module.name, by_name, seen=set())
            if path:
                wrong.append(" -> ".join(path))
    assert not wrong, (
        "core, wire, cluster and cli must not load torch when imported (seconds), or `shoal --help` and the "
        "supervisor would pay for it. Import it inside the function that needs it, or where the worker runs:\n"
        + "\n".join(wrong)
    )


def _path_to_torch(name: str, by_name: dict[str, Module], seen: set[str]) -> list[str]:
    """The chain of imports by which loading `name` loads torch; empty where it does not."""
    for imported, _ in by_name[name].imports(at_start_only=True):
        if any(f"{imported}.".startswith(f"{torch}.") for torch in TORCH):
            return [name, imported]
        parts = imported.split(".")
        # Loading a.b.c loads a and a.b first.
        for loaded in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
            if loaded in by_name and loaded not in seen:
                seen.add(loaded)
                if rest := _path_to_torch(loaded, by_name, seen):
                    return [name, *rest]
    return []


STARTS = {
    "import shoal": set(),
    "import shoal; shoal.rank(); shoal.num_workers()": {"shoal.config.own_rank", "shoal.config.launchers"},
    "import shoal; shoal.ShoalError": {"shoal.errors"},
    "import sys; sys.argv = ['shoal', '--help']; from shoal.cli import main; main()": {
        *("shoal.errors", "shoal.cli.verb", "typer", "annotated_doc", "shellingham"),
    },
}
"""Statements that must answer at once, and what they load beside Python's own modules and the packages above."""


@pytest.mark.parametrize("statement", STARTS)
def test_starting_loads_a_few_modules(statement: str) -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\n"
        f"try:\n    {statement}\n"
        "finally:\n    print('loaded', *sorted(set(sys.modules) - before))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = said.splitlines()[-1].split()[1:]
    own = {name for name in loaded if name.startswith("shoal.")}
    others = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"shoal"}
    allowed = STARTS[statement]
    packages = {name.rpartition(".")[0] for name in allowed} | {"shoal.cli"}
    surplus = (own | others) - allowed - packages
    assert not surplus, (
        f"`{statement}` loads {sorted(surplus)}. Names of shoal load when they are first used (_HOMES in "
        "src/shoal/__init__.py), a verb when it is typed (VERBS in src/shoal/cli/__init__.py)."
    )
    if "--help" not in statement:
        slow = {"typing", "dataclasses", "inspect"} & set(loaded)
        assert not slow - ({"typing"} if allowed else set()), f"`{statement}` loads {slow}"
