"""Check of a planned run: whether the model is the one that the plan was made for.

`shoal run --plan` leaves the plan in the run directory; rank 0 compares the model that the script
built with it before a strategy has partitioned anything.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from shoal.errors import ConfigError
from shoal.train.graph import shapes_of

FILE_NAME = "plan.json"


def check_planned(model: nn.Module, run_dir: Path) -> None:
    """Refuse a model whose parameters differ from the run's plan, and name the changes. Without a plan, do nothing."""
    try:
        planned = json.loads((run_dir / FILE_NAME).read_text())["model"]
    except (OSError, ValueError, KeyError):
        return
    now = shapes_of(model)
    if not planned or planned == now:
        return
    changed = [
        *(f"'{name}' is {_shown(now[name])} now and was {_shown(shape)} then" for name, shape in planned.items() if name in now and now[name] != shape),
        *(f"'{name}' ({_shown(shape)}) is gone" for name, shape in planned.items() if name not in now),
        *(f"'{name}' ({_shown(shape)}) is new" for name, shape in now.items() if name not in planned),
    ]  # fmt: skip
    if not changed:
        return  # the same parameters in another order
    more = f", and {len(changed) - 1} more parameters differ" if len(changed) > 1 else ""
    raise ConfigError(
        f"the model has changed since the plan was made: {changed[0]}{more}. Nothing was trained; make the plan again with `shoal plan`, "
        "or run without --plan."
    )


def _shown(shape: list[int]) -> str:
    return "×".join(map(str, shape)) or "a number"
