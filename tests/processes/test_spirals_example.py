"""examples/README.md: its table is whole, its commands mean something, and of each kind one is run and prints what stands there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launched import Launched

from shoal.config.launch import LaunchConfig

FOLDER = Path(__file__).resolve().parents[2] / "examples"
LINE = re.compile(
    r"^    shoal run (?P<options>.*) spirals\.py +→ (?P<exact>= )?test loss (?P<loss>[\d.]+)", re.MULTILINE
)
NUMBERS = {"workers", "servers", "sync_every"}


class Shown(NamedTuple):
    """A command of the README and what it is said to print."""

    options: dict[str, Any]
    is_exact: bool
    loss: float


def shown() -> dict[str, Shown]:
    text = (FOLDER / "README.md").read_text()
    return {
        match["options"]: Shown(_options(match["options"]), bool(match["exact"]), float(match["loss"]))
        for match in LINE.finditer(text)
    }


def _options(text: str) -> dict[str, Any]:
    """As LaunchConfig has them."""
    words, options = shlex.split(text), dict[str, Any]()
    while words:
        name = {"-n": "workers"}.get(words[0], words[0].removeprefix("--").replace("-", "_"))
        del words[0]
        value = words.pop(0) if words and not words[0].startswith("-") else True
        options[name] = int(value) if name in NUMBERS else value
    return options


CHEAP = [
    "-n 4 --compress int8",
    "-n 2 --servers 2 --strategy ps",
    "-n 2 --strategy tp",
]


def test_every_command_is_one_that_can_be_started_and_every_example_is_in_the_table() -> None:
    for said in shown().values():
        LaunchConfig(script="spirals.py", **said.options)
    assert len(shown()) > 20
    strategies = {str(said.options.get("strategy", "ddp")).partition("=")[0] for said in shown().values()}
    assert strategies >= {
        "ddp",
        "ps",
        "ps:ssp",
        "ps:async",
        "ps:hybrid",
        "ps:drop",
        "ps:stale-ok",
        "fsdp",
        "tp",
        "pp",
        "dp",
    }
    text = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"^\| \[(\w+\.py)\]", text, re.MULTILINE)) == {
        path.name for path in FOLDER.glob("*.py")
    }


@pytest.mark.parametrize("command", CHEAP)
def test_the_command_prints_what_the_readme_says(
    launch_script: Callable[..., Launched], command: str
) -> None:
    said = shown()[command]
    ran = launch_script(FOLDER / "spirals.py", quiet=True, **said.options)
    assert ran.exit_code == 0, ran.error
    found = re.search(r"test loss ([\d.]+), accuracy", ran.stdout)
    assert found is not None, ran.stdout
    assert float(found[1]) == pytest.approx(said.loss, abs=0.005)
