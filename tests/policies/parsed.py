"""A file of src/shoal as the policies see it: parsed, with its place among the layers and its imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shoal"


@dataclass(frozen=True)
class Module:
    """One file of src/shoal."""

    path: Path
    name: str
    source: str = field(repr=False)
    tree: ast.Module = field(repr=False)

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def folder(self) -> str:
        """The layer: the folder directly under src/shoal; empty for the facades beside them."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else ""

    def imports(self, *, at_start_only: bool = False) -> Iterator[tuple[str, int]]:
        """(dotted name, line) of everything imported: `from a import b` gives a.b, and so does `shoal.b`.

        With `at_start_only`, what runs when the module is imported: not in functions, not under TYPE_CHECKING.
        """
        for node in _walk_start(self.tree) if at_start_only else ast.walk(self.tree):
            match node:
                case ast.Import(names=names):
                    yield from ((name.name, node.lineno) for name in names)
                case ast.ImportFrom(module=module, names=names, level=level):
                    start = "." * level + (module or "")
                    yield from ((f"{start}.{name.name}", node.lineno) for name in names)
                case ast.Attribute(value=ast.Name(id="shoal"), attr=attribute):  # loads it where it is lazy
                    yield f"shoal.{attribute}", node.lineno
                case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if _called(func) in (
                    "import_module",
                    "__import__",
                ):
                    yield name, node.lineno


def _called(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def _walk_start(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _walk_start(child)
