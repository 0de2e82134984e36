"""Source files: one idea, a docstring that names it, and settings that explain themselves."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from parsed import Module

MAX_EXAMPLE_LINES = 100
MAX_FILES_PER_FOLDER = 20
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "tools"}
CONFIG_ENDINGS = ("Config", "Plan", "Job")


def test_no_file_or_folder_is_named_after_nothing(modules: list[Module]) -> None:
    vague = [
        module.where
        for module in modules
        if VAGUE_NAMES & {part.strip("_") for part in module.name.split(".")}
    ]
    assert not vague, (
        f"{vague}: such a name says nothing about what is inside. Name the idea, or move the code to it."
    )


def test_no_class_name_occurs_twice(modules: list[Module]) -> None:
    places: dict[str, list[str]] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{module.where}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, f"one word for one thing: a search for a class finds one place. Rename one of {twice}"


def test_no_folder_is_a_drawer(modules: list[Module]) -> None:
    sizes = Counter(str(module.path.parent) for module in modules if module.path.name != "__init__.py")
    large = {folder: files for folder, files in sizes.items() if files > MAX_FILES_PER_FOLDER}
    assert not large, f"a folder past {MAX_FILES_PER_FOLDER} files wants a subfolder: {large}"


def test_every_file_says_what_it_is(modules: list[Module], root: Path) -> None:
    silent = [module.where for module in modules if not ast.get_docstring(module.tree)]
    for folder in ("examples", "benchmarks"):
        silent += [
            str(path.relative_to(root))
            for path in sorted((root / folder).rglob("*.py"))
            if not ast.get_docstring(ast.parse(path.read_text()))
        ]
    assert not silent, (
        "every file begins with a docstring: what it decides, what it does not touch. Missing in:\n"
        + "\n".join(silent)
    )


def test_every_example_fits_on_two_screens(root: Path) -> None:
    sizes = {
        path.name: len(path.read_text().splitlines()) for path in sorted((root / "examples").glob("*.py"))
    }
    assert sizes, "examples/ is empty"
    large = {name: lines for name, lines in sizes.items() if lines >= MAX_EXAMPLE_LINES}
    assert not large, f"an example stays under {MAX_EXAMPLE_LINES} lines, or nobody reads it: {large}"


def test_every_setting_has_a_doc_line(modules: list[Module]) -> None:
    silent, num_seen = [], 0
    for module in modules:
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.ClassDef)
                and node.name.endswith(CONFIG_ENDINGS)
                and _is_frozen_dataclass(node)
            ):
                fields = _undocumented_fields(node)
                num_seen += 1
                silent += [f"{module.where}:{line} {node.name}.{field}" for field, line in fields]
    assert num_seen > 0, (
        "no frozen dataclass named *Config, *Plan or *Job was found: this policy looks in the wrong place"
    )
    assert not silent, (
        "every field of a frozen *Config, *Plan or *Job has a string under it that says what it means, with its "
        "unit. Missing under:\n" + "\n".join(silent)
    )


def _is_frozen_dataclass(node: ast.ClassDef) -> bool:
    return any(
        "dataclass" in ast.unparse(mark) and "frozen=True" in ast.unparse(mark)
        for mark in node.decorator_list
    )


def _undocumented_fields(node: ast.ClassDef) -> list[tuple[str, int]]:
    followers = [*node.body[1:], None]
    return [
        (ast.unparse(field.target), field.lineno)
        for field, follower in zip(node.body, followers, strict=True)
        if isinstance(field, ast.AnnAssign) and not _is_text(follower)
    ]


def _is_text(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def test_optional_abilities_of_strategies_are_protocols(modules: list[Module]) -> None:
    asked = [
        f"{module.where}:{node.lineno}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and ast.unparse(node.args[0]).endswith("strategy")
        and isinstance(node.args[1], ast.Constant)
        and not str(node.args[1].value).startswith("__")
    ]
    assert not asked, f"declare a Protocol in shoal/parallel/protocol.py and ask with isinstance: {asked}"


def test_state_of_a_trainer_is_written_by_its_own_methods(modules: list[Module]) -> None:
    written = [
        f"{module.where}:{node.lineno}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in ("trainer", "self._trainer", "self.trainer")
    ]
    assert not written, f"a method of Trainer says what is changed and why: {written}"
