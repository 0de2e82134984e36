"""Which compressors there are by name, and their settings. Names only; `shoal.collectives.compression` holds them."""

from __future__ import annotations

from difflib import get_close_matches

from shoal.core.errors import ConfigError

COMPRESSORS = {
    "none": "gradients travel as they are",
    "bf16": "half the bytes",
    "fp16": "half the bytes, more digits, less range",
    "int8": "a quarter of the bytes",
    "topk:ratio=0.01": "the largest hundredth, the rest is kept for later (error feedback)",
    "powersgd:rank=4": "matrices by thin factors, what they miss is kept for later",
}

_SETTINGS = {
    "none": {},
    "bf16": {},
    "fp16": {},
    "int8": {},
    "topk": {"ratio": (0.01, 1e-6, 1.0)},
    "powersgd": {"rank": (4.0, 1.0, 256.0)},
}  # name -> setting -> default, least, most

_REMEMBER = {"topk", "powersgd"}


def parse(said: str) -> tuple[str, dict[str, float]]:
    """Name and settings of `topk:ratio=0.01`; refuses what means nothing."""
    name, _, rest = said.partition(":")
    if name not in _SETTINGS:
        guess = get_close_matches(name, _SETTINGS, n=1)
        hint = f"Did you mean '{guess[0]}'? " if guess else ""
        raise ConfigError(
            f"there is no compression '{said}'. {hint}Nothing was started; there are {', '.join(COMPRESSORS)}."
        )
    known = _SETTINGS[name]
    settings = {key: default for key, (default, _, _) in known.items()}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        try:
            number = float(value)
            if key not in known or not known[key][1] <= number <= known[key][2]:
                raise ValueError
            if name == "powersgd" and number != int(number):
                raise ValueError
        except ValueError:
            meant = (
                ", ".join(f"{key} from {least:g} to {most:g}" for key, (_, least, most) in known.items())
                or "none"
            )
            raise ConfigError(
                f"'{part}' is no setting of the compression {name}. Nothing was started; its settings: {meant}."
            ) from None
        settings[key] = number
    return name, settings


def remembers(said: str) -> bool:
    """Whether ranks keep something of their own between steps."""
    return parse(said)[0] in _REMEMBER
