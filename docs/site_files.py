"""Hook of mkdocs: examples and results belong to the site, decisions to its navigation, help texts to its reference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File
from typer.testing import CliRunner

from shoal.cli import VERBS, app, load

ROOT = Path(__file__).parents[1]
SHARED = ("examples", "benchmarks/results")
FIRST_DECISION = "adr/0001-step-commit-view-call.md"


def on_config(config: Any) -> Any:
    inside = next(part["Inside"] for part in config.nav if "Inside" in part)
    inside.append({"Decisions": [f"adr/{page.name}" for page in sorted((ROOT / "docs/adr").glob("*.md"))]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's files beside docs/, under the paths they have there."""
    for folder in SHARED:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".jsonl"):
                files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that leave docs/ lead to the same files within the site; a folder of decisions to its first page."""
    home = page.file.src_uri
    up = "../" * home.count("/")
    if not home.startswith(SHARED):
        for folder in SHARED:
            markdown = markdown.replace(f"](../{up}{folder}/", f"]({up}{folder}/")
        markdown = markdown.replace(f"](../{up}README.md", f"]({up}index.md")
    markdown = markdown.replace("<!-- lines of the scripts -->", "\n".join(_line_counts()))
    if home == "reference/commands.md":
        markdown += "".join(_help_texts())
    return re.sub(r"\]\((?:\.\./)*adr/?\)", f"]({up}{FIRST_DECISION})", markdown)


def _line_counts() -> Iterator[str]:
    """Length of every migrated script before and after, and how much of it is new."""
    for after in sorted((ROOT / "examples/migration").glob("*_after.py")):
        name = after.stem.removesuffix("_after")
        old, new = (
            [line.strip() for line in _code(path)] for path in (after.with_name(f"{name}_before.py"), after)
        )
        page = next(path for path in (ROOT / "docs/migration").glob("*.md") if path.stem == name)
        title = page.read_text().splitlines()[0].removeprefix("# Coming from ")
        num_new = sum((Counter(new) - Counter(old)).values())
        yield f"| [{title}]({name}.md) | {len(old)} | {len(new)} | {num_new} |"


def _code(path: Path) -> list[str]:
    """Lines of a script without blank ones and its docstring."""
    return [line for line in path.read_text().splitlines() if line.strip() and not line.startswith('"""')]


def _help_texts() -> Iterator[str]:
    """What `--help` prints, for every verb."""
    for name in VERBS:
        command = typer.main.get_command(load(name))
        for words in [[name, verb] for verb in getattr(command, "commands", ())] or [[name]]:
            shown = CliRunner().invoke(app, [*words, "--help"], prog_name="shoal", env={"COLUMNS": "110"})
            yield f"\n## shoal {' '.join(words)}\n\n```text\n{shown.output}\n```\n"
