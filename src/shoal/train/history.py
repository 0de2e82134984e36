"""What a fit leaves behind: one list per metric, one value per epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class History(Mapping[str, list[float]]):
    """Loss and metrics of every epoch, equal on every rank: `history["val_loss"][-1]`."""

    def __init__(self, epochs: list[dict[str, float]] | None = None) -> None:
        self.epochs: list[dict[str, float]] = list(epochs or [])

    def append(self, logs: dict[str, float]) -> None:
        """Add one epoch."""
        self.epochs.append(dict(logs))

    def __getitem__(self, name: str) -> list[float]:
        values = [logs[name] for logs in self.epochs if name in logs]
        if not values:
            raise KeyError(name)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for logs in self.epochs for name in logs))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"History({dict(self)!r})"
