"""Documentation that can be followed: code blocks parse, commands and their options exist, migrated scripts have their page."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from parsed import ROOT
from typer.core import TyperCommand, TyperGroup

import shoal
from shoal.cli import VERBS, load

PAGES = sorted([ROOT / "README.md", ROOT / "examples/README.md", *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^([ \t]*)```(\w*)\n(.*?)^\1```", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_parse(page: Path) -> None:
    for _, language, code in FENCED.findall(page.read_text()):
        if language == "python" and "--8<--" not in code:
            ast.parse(textwrap.dedent(code))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in _command_lines(page.read_text()):
        problem = _problem(line)
        assert problem is None, f"{page.relative_to(ROOT)}: `{line}`: {problem}"


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)", pages, re.M))
    modules = {name for name in shoal.__all__ if f"shoal.{name}" == shoal._HOMES[name]}
    wanted = {f"shoal.data.{name}" for name in shoal.data.__all__} | {
        f"shoal.{name}" for name in shoal.__all__
    }
    lacking = wanted - documented - {"shoal.data", "shoal.Dataset"}
    assert {name for name in lacking if name.removeprefix("shoal.") not in modules} == set()
    assert all(any(each.startswith(f"shoal.{name}") for each in documented) for name in modules)


NOT_OURS = re.compile(r"pip install (?:--?[\w-]+ )*'?shoal\b")
"""The name on the Python index, which is another project's."""


def test_nothing_installs_the_project_that_has_our_name_on_the_index() -> None:
    sources = [path for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (*PAGES, *sources)
        for line in path.read_text().splitlines()
        if NOT_OURS.search(line) and "installs another project" not in line
    ]
    assert not found


def test_every_migrated_script_has_a_page_and_a_counterpart() -> None:
    scripts = ROOT / "examples/migration"
    names = {path.stem.rpartition("_")[0] for path in scripts.glob("*.py")}
    assert names
    for name in names:
        assert (scripts / f"{name}_before.py").exists()
        assert (scripts / f"{name}_after.py").exists()
        page = (ROOT / f"docs/migration/{name}.md").read_text()
        for which in ("before", "after"):
            assert f'--8<-- "examples/migration/{name}_{which}.py"' in page


def test_a_command_with_a_misspelt_option_is_found() -> None:
    assert _problem("shoal run -n 2 --strategi ps train.py") is not None
    assert _problem("shoal rum train.py") is not None
    assert _problem("shoal run -n 2 --strategy ps train.py --anything") is None


def _command_lines(text: str) -> Iterator[str]:
    """Lines of blocks that begin with `shoal`, and inline code that is a whole command."""
    blocks = [code for _, _, code in FENCED.findall(text)]
    blocks += re.findall(r"(?m)^ {4}\S.*$", FENCED.sub("", text))
    for line in "\n".join(blocks).splitlines():
        line = line.strip().partition("  #")[0].partition("→")[0].strip().removesuffix("&").strip()
        if line.startswith("shoal ") and "`" not in line:
            yield line
    yield from re.findall(r"`(shoal [a-z-]+ [^`\[]*\S)`", text)


def _problem(line: str) -> str | None:
    try:
        words = shlex.split(line.split(" | ")[0].split(" > ")[0])[1:]
    except ValueError as error:
        return str(error)
    verb = words.pop(0) if words else "--help"
    if verb.startswith("-"):
        return None
    if verb not in VERBS:
        return f"there is no verb '{verb}'"
    command: TyperCommand | TyperGroup = typer.main.get_command(load(verb))
    if isinstance(command, TyperGroup):
        if not words or words[0] not in command.commands:
            return f"`shoal {verb}` has {', '.join(command.commands)}"
        command = command.commands[words.pop(0)]
    options = {name: each for each in command.params for name in each.opts + each.secondary_opts}
    while words:
        word = words.pop(0)
        name, has_value, _ = word.partition("=")
        if not word.startswith("-"):
            if not command.context_settings.get("allow_interspersed_args", True):
                return None  # the script; the rest is its own
            continue
        if word in ("--", "--help", "-h", "..."):
            return None
        if name not in options:
            return f"`shoal {command.name}` has no option {name}"
        option = options[name]
        if not has_value and not getattr(option, "is_flag", False) and words:
            words.pop(0)
    return None
