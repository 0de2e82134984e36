"""Meshes by name: `dp=2,tp=2,pp=2` taken apart, and who sits where in it.

Pure and without torch, so that the command line can refuse degrees that do
not multiply to the number of workers before anything starts. Axes are
ordered `pp, dp, fsdp, tp` from the outside in: ranks that talk most are
neighbours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from shoal.errors import ConfigError

_PART = re.compile(r"(?P<axis>pp|dp|fsdp|tp)=(?P<degree>\d{1,6})")
_MEANING = {
    "pp": "stages of a pipeline",
    "dp": "replicas of the model",
    "fsdp": "shards of the parameters",
    "tp": "parts of each layer",
}


@dataclass(frozen=True, slots=True)
class Axes:
    """How many ranks along each axis."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        """Of the whole mesh."""
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Parts into which a batch is cut; ranks that differ in tp or pp alone compute the same part."""
        return self.dp * self.fsdp

    def coordinates(self, rank: int) -> Axes:
        """Where a rank sits, counted from 0 along each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, fsdp = divmod(rest, self.fsdp)
        pp, dp = divmod(rest, self.dp)
        return Axes(pp, dp, fsdp, tp)

    def data_rank(self, rank: int) -> int:
        """Which part of a batch a rank computes."""
        at = self.coordinates(rank)
        return at.dp * self.fsdp + at.fsdp

    def speakers(self) -> list[int]:
        """One rank for each part of a batch, in their order: the first along tp, in the last stage, which has the loss."""
        return [
            rank
            for rank in range(self.num_ranks)
            if self.coordinates(rank).tp == 0 and self.coordinates(rank).pp == self.pp - 1
        ]

    def __str__(self) -> str:
        return ",".join(
            f"{each.name}={getattr(self, each.name)}" for each in fields(self) if getattr(self, each.name) > 1
        )


def parse(name: str) -> Axes | None:
    """The axes of `dp=2,tp=2`; plain `fsdp`, `tp` or `pp` have the degree 0: all workers. None where it is no mesh."""
    if name in ("fsdp", "tp", "pp"):
        return Axes(**{name: 0})
    parts = [_PART.fullmatch(part) for part in name.split(",")]
    if not all(parts):
        return None
    degrees: dict[str, int] = {}
    for part in parts:
        assert part is not None
        axis, degree = part["axis"], int(part["degree"])
        if axis in degrees:
            raise ConfigError(f"'{name}' says {axis} twice. Nothing was started; give each axis one degree.")
        if degree < 1:
            raise ConfigError(
                f"'{name}' asks for {axis}={degree}. Nothing was started; a degree is 1 or more."
            )
        degrees[axis] = degree
    return Axes(**degrees)


def fill(axes: Axes, num_workers: int, name: str) -> Axes:
    """The axes for so many workers; refuses degrees that do not multiply to their number."""
    if axes.num_ranks == 0:
        [axis] = [each.name for each in fields(axes) if getattr(axes, each.name) == 0]
        return Axes(**{axis: num_workers})
    if axes.num_ranks != num_workers:
        said = [part.partition("=")[0] for part in name.split(",")]
        replicas, rest = divmod(num_workers, axes.num_ranks)
        whole = f" (dp={replicas},{name})" if not rest and replicas > 1 and axes.dp == 1 else ""
        product = " x ".join(f"{getattr(axes, axis)} {_MEANING[axis]}" for axis in said)
        raise ConfigError(
            f"'{name}' is {product}: {axes.num_ranks} workers, and {num_workers} were asked for. Nothing was started; use "
            f"-n {axes.num_ranks}, or degrees that multiply to {num_workers}{whole}."
        )
    return axes
