from __future__ import annotations

import pickle
import random
import threading

import numpy as np
import pytest
import torch

from shoal.data import randomness
from shoal.data.randomness import PrivateGenerators, ReadAhead


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_outside_the_global_generators_are_as_they_were() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    undisturbed = [draw() for _ in range(4)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    disturbed = []
    for _ in range(4):
        disturbed.append(draw())
        with PrivateGenerators(5):
            draw()
    assert disturbed == undisturbed


def test_outside_they_are_as_they_were_also_after_an_exception() -> None:
    torch.manual_seed(1)
    expected = torch.rand(()).item()
    torch.manual_seed(1)
    try:
        with PrivateGenerators(5):
            draw()
            raise KeyError
    except KeyError:
        pass
    assert torch.rand(()).item() == expected


def test_inside_the_draws_are_a_function_of_the_seed() -> None:
    draws = []
    for seed in (5, 5, 6):
        draw()
        with PrivateGenerators(seed):
            draws.append(draw())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[1], draws[2], strict=True))


def test_entered_again_they_go_on_where_they_left() -> None:
    with PrivateGenerators(5):
        in_one_go = [draw() for _ in range(3)]
    generators = PrivateGenerators(5)
    in_turns = []
    for _ in range(3):
        draw()
        with generators:
            in_turns.append(draw())
    assert in_turns == in_one_go


def test_any_of_the_three_generators_is_seen_to_be_used() -> None:
    uses = [lambda: None, random.random, np.random.rand, lambda: torch.rand(1), lambda: np.random.seed(3)]
    seen = []
    for use in uses:
        with PrivateGenerators(0) as generators:
            use()
            seen.append(generators.were_used())
    assert seen == [False, True, True, True, True]


def test_a_thread_that_reads_ahead_leaves_the_global_generators_alone() -> None:
    def read() -> None:
        with PrivateGenerators(5) as generators:
            generators.reseed(7)
            used.append(generators.were_used())

    used: list[bool] = []
    torch.manual_seed(1)
    expected = torch.rand(()).item()
    torch.manual_seed(1)
    thread = ReadAhead(target=read)
    thread.start()
    thread.join()
    assert torch.rand(()).item() == expected
    assert used == [False]


def test_one_that_was_entered_can_be_sent_to_another_process() -> None:
    generators = PrivateGenerators(1)
    with generators:
        pass
    pickle.loads(pickle.dumps(generators))


def test_a_thread_that_is_waited_for_by_who_has_them_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "EXCHANGE_TIMEOUT_S", 0.01)
    seen = []

    def other() -> None:
        with PrivateGenerators(2) as generators, PrivateGenerators(3):
            generators.reseed(5)
            seen.append(generators.were_used())

    with PrivateGenerators(1) as mine:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not mine.were_used()
    assert seen == [False]
