"""The map_reduce example: the same counts in one process, in several, and by the workers of a job."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from examples_expected import FOLDER
from launched import Launched

from shoal.data import generated

SCRIPT = FOLDER / "map_reduce.py"
README = FOLDER.parent / "README.md"


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def said(launch_script: Callable[..., Launched], tmp_path: Path) -> Callable[..., str]:
    def said(*args: str, workers: int = 1) -> str:
        if workers > 1:
            launched = launch_script(SCRIPT, workers=workers, args=args, quiet=True)
            assert launched.exit_code == 0, launched.error
            return launched.stdout
        ran = subprocess.run(
            [sys.executable, str(SCRIPT), *args], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert not ran.stderr
        return ran.stdout

    return said


def test_words_are_counted(said: Callable[..., str]) -> None:
    found = Counter(word.strip('.,;:()`*"').lower() for word in README.read_text().split())
    output = said("words", str(README))
    assert f"{len(found)} different words, {found.total()} in all" in output
    for word, count in found.most_common(3):
        assert re.search(rf"^ *{count}  ", output, re.MULTILINE), (word, count, output)
    assert said("words", str(README), workers=2) == output


def test_ids_are_counted_and_found_again(said: Callable[..., str], tmp_path: Path) -> None:
    batch, _ = next(iter(generated.clicks(3000, num_ids=5000).batch(3000)))
    counts = np.unique(batch["ids"], return_counts=True)[1]
    expected = f"{(counts >= 10).sum()} ids occur ten times or more, the most frequent {counts.max()} times\n"
    assert said("ids", "--samples", "3000", "--workers", "2") == expected
    (entry,) = (tmp_path / "cache/shoal/map_reduce").iterdir()
    (before,) = (path.stat().st_mtime_ns for path in entry.glob("part-00000"))
    assert said("ids", "--samples", "3000", workers=3) == expected
    assert [path.stat().st_mtime_ns for path in entry.glob("part-00000")] == [before]


def test_customers_meet_their_orders(said: Callable[..., str]) -> None:
    draws = np.random.default_rng(0)
    customers, amounts = draws.integers(0, 600, 2000), draws.integers(1, 100, 2000)
    known = customers < 500
    spent = np.bincount(customers[known], amounts[known])
    best = f"customer {spent.argmax()} for {int(spent.max())}"
    expected = f"{(spent > 0).sum()} customers ordered {known.sum()} times; {best}\n"
    assert said("join") == expected
    assert said("join", workers=3) == expected
