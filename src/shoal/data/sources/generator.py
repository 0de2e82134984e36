"""Samples from a generator function of the user's: a stream, read anew each epoch.

There is no way to the middle of a generator but through its beginning, so a
resumed epoch is read again up to its position, and that is told.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from shoal.data.sources.source import name_of
from shoal.data.sources.user_code import line_of
from shoal.data.stream import OwnStream
from shoal.errors import ConfigError, DataError


class GeneratorStream(OwnStream):
    """One pass over what the function returns is one epoch."""

    def __init__(self, fn: Any, *, num_samples: int | None, seed: int) -> None:
        if not callable(fn):
            cure = "; give a function that makes it: from_generator(lambda: ...)" if _is_iterable(fn) else ""
            raise ConfigError(
                f"from_generator takes a function that returns a new iterator for each epoch, got a {type(fn).__name__}{cure}."
            )
        self._fn, self._num_samples, self.seed = fn, num_samples, seed
        self._takes_epoch = _takes_epoch(fn)
        self._epoch = 0
        self._last: Any = None

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next pass reads."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._read(self._epoch)

    def _read(self, epoch: int) -> Iterator[Any]:
        samples = self._begun(epoch)
        number = 0
        while self._num_samples is None or number < self._num_samples:
            try:
                sample = next(samples)
            except StopIteration:
                break
            except Exception as error:
                where = f" at {place}" if (place := line_of(error, self._fn)) else ""
                error.add_note(
                    f"raised by the generator {name_of(self._fn)} after {number} samples of epoch {epoch}{where}"
                )
                raise
            yield sample
            number += 1
        if self._num_samples is not None and number < self._num_samples:
            raise DataError(
                f"the generator {name_of(self._fn)} ended after {number} samples of epoch {epoch}, and num_samples says "
                f"{self._num_samples}. What was trained is whole; let it give that many, or leave num_samples out."
            )

    def describe(self) -> dict[str, Any]:
        """The function's name, and that there is no way into the middle."""
        described: dict[str, Any] = {
            "source": "generator",
            "fn": name_of(self._fn),
            "resumes": "by reading again",
        }
        return described if self._num_samples is None else {**described, "num_samples": self._num_samples}

    def _begun(self, epoch: int) -> Iterator[Any]:
        made = self._fn(epoch) if self._takes_epoch else self._fn()
        if not _is_iterable(made):
            raise ConfigError(
                f"from_generator({name_of(self._fn)}) should return an iterator of samples, and returned a "
                f"{type(made).__name__}. Write a function with yield, or return an iterable."
            )
        samples: Iterator[Any] = iter(made)
        if samples is made and made is self._last:
            raise DataError(
                f"from_generator({name_of(self._fn)}) returned the iterator of the epoch before, which has been read already. "
                "What was trained is whole; let the function make a new one each time it is called."
            )
        self._last = made
        return samples


def _is_iterable(thing: Any) -> bool:
    return hasattr(thing, "__iter__") or hasattr(thing, "__getitem__")


def _takes_epoch(fn: Callable[..., Any]) -> bool:
    """Whether it has a parameter that must be given, or one named epoch."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some that are written in C tell nothing
        return False
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    keyword_only = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
    ]
    if len(required) > 1 or keyword_only:
        names = ", ".join([*(parameter.name for parameter in required), *keyword_only])
        raise ConfigError(
            f"from_generator calls {name_of(fn)} with nothing, or with the epoch, and it wants {names}. Give a function of "
            "the epoch that knows the rest: from_generator(lambda epoch: fn(path, epoch))."
        )
    first = next(iter(parameters), None)
    return bool(required) or (first is not None and first.name == "epoch")
