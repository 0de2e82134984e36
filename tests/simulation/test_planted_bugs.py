"""The simulator is only worth what it finds: every planted bug is found by a bounded number of seeds."""

from __future__ import annotations

import pytest

from simulation.running import BUGS, Broken, first_broken, run
from simulation.seeds import FINDS

MAX_SEEDS = 3000


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    try:
        run(FINDS[bug], BUGS[bug])
    except Broken as broken:
        found: Broken | None = broken
    else:
        found = first_broken(BUGS[bug], num_seeds=MAX_SEEDS)
    assert found is not None, f"{MAX_SEEDS} seeds do not find it: {bug}"
    assert bug in str(found)


def test_a_broken_seed_tells_its_story_and_breaks_again_the_same_way() -> None:
    bug = BUGS["a view is formed while a rank is missing"]
    first = first_broken(bug, num_seeds=100)
    assert first is not None
    with pytest.raises(Broken) as again:
        run(first.seed, bug)
    assert str(again.value) == str(first)
    lines = str(first).splitlines()
    assert any("enters, left" in line for line in lines)
    assert f"seed {first.seed}, at" in lines[-1]
