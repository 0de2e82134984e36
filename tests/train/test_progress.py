from __future__ import annotations

import pytest

from shoal.train.progress import History


def test_a_history_is_a_list_per_value_and_reads_like_a_dict() -> None:
    history = History([{"loss": 2.0}])
    history.append({"loss": 1.0, "val_loss": 3.0})
    assert dict(history) == {"loss": [2.0, 1.0], "val_loss": [3.0]}
    assert (len(history), list(history)) == (2, ["loss", "val_loss"])
    assert repr(history) == "History({'loss': [2.0, 1.0], 'val_loss': [3.0]})"
    with pytest.raises(KeyError, match="accuracy"):
        history["accuracy"]


def test_what_is_added_later_does_not_change_what_was_given() -> None:
    given = [{"loss": 2.0}]
    history = History(given)
    logs = {"loss": 1.0}
    history.append(logs)
    logs["loss"] = 9.0
    assert given == [{"loss": 2.0}]
    assert history["loss"] == [2.0, 1.0]
