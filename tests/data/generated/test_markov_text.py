from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.generated import ALPHABET, MarkovRule, best_loss, decode, text
from shoal.errors import ConfigError

RULE = MarkovRule(0)
CHARACTERS, FOLLOWING = RULE.samples(np.arange(20_000), 8)


@settings(max_examples=30)
@given(indices=st.lists(st.integers(0, 19_999), min_size=1, max_size=70))
def test_a_sequence_is_the_same_whatever_is_read_with_it(indices: list[int]) -> None:
    characters, following = RULE.samples(np.array(indices), 8)
    assert torch.equal(characters, CHARACTERS[indices])
    assert torch.equal(following, FOLLOWING[indices])


def test_a_longer_sequence_begins_like_the_shorter_one() -> None:
    characters, _ = RULE.samples(np.arange(100), 20)
    assert torch.equal(characters[:, :8], CHARACTERS[:100])


def test_the_dataset_holds_the_sequences() -> None:
    piece = next(text(6, 12, seed=4).batch(6).slices(epoch=0, start=0, rank=0, num_workers=1))
    characters, following = MarkovRule(4).samples(np.arange(6), 12)
    assert torch.equal(piece.inputs, characters)
    assert torch.equal(piece.target, following)


def test_the_target_is_the_next_character() -> None:
    assert torch.equal(CHARACTERS[:, 1:], FOLLOWING[:, :-1])
    assert CHARACTERS.dtype == FOLLOWING.dtype == torch.int64


def test_another_seed_is_another_language() -> None:
    characters, _ = MarkovRule(1).samples(np.arange(1000), 8)
    assert (characters == CHARACTERS[:1000]).float().mean() < 0.2


def test_every_position_of_a_sequence_has_the_statistics_of_endless_text() -> None:
    expected = RULE.pairs.sum(axis=0)
    for place in (0, 1, 7):
        share = np.bincount(CHARACTERS[:, place].numpy(), minlength=len(ALPHABET)) / len(CHARACTERS)
        assert np.abs(share - expected).max() < 0.01


def test_a_model_that_knows_the_rule_scores_the_best_loss() -> None:
    before, last, following = CHARACTERS[:, :-1].numpy(), CHARACTERS[:, 1:].numpy(), FOLLOWING[:, 1:].numpy()
    after_two = -np.log(RULE.following[before, last, following])
    joint = np.einsum("ab,abc->bc", RULE.pairs, RULE.following)
    bigram = joint / joint.sum(axis=1, keepdims=True)
    after_one = -np.log(bigram[CHARACTERS[:, 0].numpy(), FOLLOWING[:, 0].numpy()])
    measured = np.concatenate([after_one[:, None], after_two], axis=1).mean()
    assert abs(measured - best_loss(8)) < 0.01


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_two_characters_tell_more_than_one_and_one_more_than_none(seed: int) -> None:
    rule = MarkovRule(seed)
    assert 1.0 < rule.entropy_after_two < rule.entropy_after_one - 0.3
    assert rule.entropy_after_one < np.log(len(ALPHABET)) - 0.3


def test_best_loss_falls_towards_the_entropy_rate_as_sequences_grow() -> None:
    assert best_loss(1) == RULE.entropy_after_one
    assert best_loss(1) > best_loss(8) > best_loss(64) > RULE.entropy_after_two


def test_decode_writes_the_alphabet() -> None:
    assert decode(range(len(ALPHABET))) == ALPHABET
    assert len(decode(CHARACTERS[0].tolist())) == 8


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="length"):
        text(10, 0)
