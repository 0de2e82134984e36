from __future__ import annotations

import msgspec
import pytest

from shoal.runtime.transport.messages import MESSAGES
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.worker_coordinator import Join


def test_every_message_class_is_in_the_table_of_messages() -> None:
    ours = {each for each in Message.__subclasses__() if each.__module__.startswith("shoal.")}
    assert set(MESSAGES) == ours
    assert len(MESSAGES) == len(set(MESSAGES))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_frozen_strict_tagged_and_explained(kind: type[Message]) -> None:
    config = kind.__struct_config__
    assert config.frozen
    assert config.forbid_unknown_fields
    assert config.tag_field == "type"
    assert config.tag != kind.__name__  # the name on the wire was chosen, and survives a renamed class
    assert " to " in (kind.__doc__ or "")  # who speaks to whom


def test_a_message_cannot_be_changed() -> None:
    message = Join(rank=0, incarnation=0, pid=1, num_workers=1)
    with pytest.raises(AttributeError):
        message.rank = 1  # type: ignore[misc]


def test_a_field_that_the_class_has_not_is_refused() -> None:
    header = msgspec.msgpack.encode({"type": "leave", "extra": 1})
    with pytest.raises(msgspec.ValidationError, match="extra"):
        msgspec.msgpack.decode(header, type=next(kind for kind in MESSAGES if kind.__name__ == "Leave"))
