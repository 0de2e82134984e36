"""Choices with settings on the command line: `topk:ratio=0.01`, `nesterov:lr=0.7,momentum=0.9`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from shoal.errors import ConfigError


class Setting(NamedTuple):
    """A number that a choice may be given."""

    default: float
    least: float
    most: float
    is_whole: bool = False


def parse(
    said: str, known: Mapping[str, Mapping[str, Setting]], *, what: str, shown: Iterable[str]
) -> tuple[str, dict[str, float]]:
    """Name and settings; refuses what means nothing. `what` is chosen, and `shown` are the choices as one writes them."""
    name, _, rest = said.partition(":")
    if name not in known:
        guess = get_close_matches(name, known, n=1)
        hint = f"Did you mean '{guess[0]}'? " if guess else ""
        raise ConfigError(
            f"there is no {what} '{said}'. {hint}Nothing was started; there are {', '.join(shown)}."
        )
    settings = {key: setting.default for key, setting in known[name].items()}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        try:
            number = float(value)
            least, most, is_whole = known[name][key][1:]
            if not least <= number <= most or (is_whole and number != int(number)):
                raise ValueError
        except (KeyError, ValueError):
            meant = ", ".join(f"{key} from {one.least:g} to {one.most:g}" for key, one in known[name].items())
            raise ConfigError(
                f"'{part}' is no setting of the {what} {name}. Nothing was started; its settings: {meant or 'none'}."
            ) from None
        settings[key] = number
    return name, settings
