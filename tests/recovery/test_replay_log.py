from __future__ import annotations

from shoal.recovery.replay_log import ExchangeLog


def finished(*results: str) -> ExchangeLog:
    log = ExchangeLog()
    for result in results:
        log.finish(result)
    return log


def test_an_anchor_keeps_the_last_result_for_who_is_one_behind() -> None:
    donor, behind = finished("a", "b"), finished("a")
    donor.anchor()
    behind.inherit(donor.results_since())
    assert behind.num_known == donor.num_known == 2
    assert behind.recall() == (True, "b")
    assert behind.recall() == (False, None)


def test_an_anchor_forgets_what_nobody_can_need() -> None:
    log = finished("a", "b", "c")
    log.anchor()
    assert log.results_since() == {2: "c"}


def test_a_replacement_starts_at_the_anchor_and_recalls_what_came_after() -> None:
    donor = finished("a", "b")
    donor.anchor()
    donor.finish("c")
    replacement = ExchangeLog()
    replacement.inherit(donor.results_since(), starts_at=donor.anchored_at)
    assert (replacement.num_finished, replacement.num_known) == (2, 3)
    assert replacement.recall() == (True, "c")
    assert replacement.recall() == (False, None)


def test_a_rank_that_catches_up_can_be_donor_itself() -> None:
    donor = finished("a", "b", "c")
    second, third = ExchangeLog(), ExchangeLog()
    second.inherit(donor.results_since(), starts_at=donor.anchored_at)
    assert second.recall() == (True, "a")
    third.inherit(second.results_since(), starts_at=second.anchored_at)
    assert [third.recall() for _ in range(4)] == [(True, "a"), (True, "b"), (True, "c"), (False, None)]


def test_a_replacement_hands_on_the_result_from_before_its_anchor() -> None:
    donor, behind, replacement = finished("a", "b"), finished("a"), ExchangeLog()
    donor.anchor()
    replacement.inherit(donor.results_since(), starts_at=donor.anchored_at)  # and the donor dies
    behind.inherit(replacement.results_since())
    assert behind.recall() == (True, "b")


def test_a_second_donor_adds_to_what_is_still_to_be_recalled() -> None:
    log = ExchangeLog()
    log.inherit({0: "a", 1: "b"}, starts_at=0)
    log.inherit({2: "c"})
    assert log.num_known == 3
    assert [log.recall()[1] for _ in range(3)] == ["a", "b", "c"]


def test_what_a_rank_has_finished_itself_is_not_taken_again() -> None:
    log = finished("a", "b")
    log.inherit({0: "x", 1: "y"})
    assert not log.is_catching_up
    assert log.num_known == 2


def test_a_replay_knows_of_a_kind_until_its_last_result_is_recalled() -> None:
    log = ExchangeLog()
    log.inherit({0: "a", 1: 2.0, 2: "b"}, starts_at=0)
    known = [log.knows(float)]
    while log.recall()[0]:
        known.append(log.knows(float))
    assert known == [True, True, False, False]
