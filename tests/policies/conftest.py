"""The project's own files, parsed once for all policies."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from parsed import PACKAGE, ROOT, Module


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text()
        found.append(Module(path, name, source, ast.parse(source)))
    return found
