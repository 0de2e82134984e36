"""YAML of rendered files: maps, lists, and scalars as JSON writes them. No reader is needed, so no library is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_yaml(value: Any, indent: int = 0) -> str:
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        return "".join(
            f"{pad}{key if '/' not in key else json.dumps(key)}:{_below(each, indent + 1)}"
            for key, each in value.items()
        )
    assert isinstance(value, list)
    return "".join(
        f"{pad}- {to_yaml(each, indent + 1).lstrip() if _is_deep(each) else _scalar(each)}" for each in value
    )


def _below(value: Any, indent: int) -> str:
    if isinstance(value, str) and "\n" in value:
        return " |\n" + "".join(f"{'  ' * indent}{line}\n" for line in value.splitlines())
    return f"\n{to_yaml(value, indent)}" if _is_deep(value) else f" {_scalar(value)}"


def _is_deep(value: Any) -> bool:
    return isinstance(value, (Mapping, list)) and bool(value)


def _scalar(value: Any) -> str:
    return json.dumps(value) + "\n"
