"""A folder may ask only the folders below it, and what answers quickly never loads torch."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from parsed import Module

LAYERS = (
    {"cli"},
    {"dashboard"},
    {"train"},
    {"perf"},
    {"strategies"},
    {"ps"},
    {"cluster"},
    {"collectives", "data", "memory", "nn"},
    {"wire"},
    {"core"},
)
HEIGHT = {folder: -depth for depth, folders in enumerate(LAYERS) for folder in folders}
FACADES = {"shoal", "shoal.__main__", "shoal.callbacks"}

TORCH = ("torch", "torchmetrics", "safetensors.torch")
WITHOUT_TORCH = {"core", "wire", "cluster", "cli"}
RUN_IN_WORKERS = {"shoal.cluster.worker", "shoal.cluster.store", "shoal.cluster.rendezvous"}


def test_imports_point_downwards_only(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        if module.name in FACADES:
            continue
        for name, line in module.imports():
            parts = name.split(".")
            if name.startswith("."):
                wrong.append(f"{module.where}:{line} imports {name} relatively")
            # Anybody may ask the package itself for its __version__ or __file__.
            if (
                parts[0] != "shoal"
                or len(parts) == 1
                or parts[1].startswith("__")
                or parts[1] == module.folder
            ):
                continue
            if HEIGHT.get(parts[1], 1) >= HEIGHT[module.folder]:
                wrong.append(f"{module.where}:{line} imports {name}")
    order = " > ".join(", ".join(sorted(folders)) for folders in LAYERS)
    assert not wrong, (
        f"imports point downwards only, also inside functions ({order}). Move what is shared down, or pass it in "
        "as an argument:\n" + "\n".join(wrong)
    )


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


@pytest.mark.parametrize("statement", ["import shoal", "import shoal; shoal.rank(); shoal.ShoalError"])
def test_importing_shoal_does_not_load_torch(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert loaded == "[]", (
        f"`{statement}` loaded {loaded}. Names of shoal load when they are first used (see _HOMES in "
        "src/shoal/__init__.py), so that help and the supervisor start at once."
    )
