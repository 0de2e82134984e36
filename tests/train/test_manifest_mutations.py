"""A manifest that was changed and signed again: a resumed fit ends with the right bits, or is refused in a paragraph."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import adam, batches, trainer
from torch import nn
from torch.optim import lr_scheduler

import shoal
from shoal.callbacks import EarlyStopping, ModelCheckpoint
from shoal.errors import CheckpointError
from shoal.train.checkpoint import saving
from shoal.train.checkpoint.checkpoint import list_checkpoints

Keys = tuple[str | int, ...]

REMOVED = object()
WRONG = ["x", None, -1, 10**20, {}, {"$float": []}, REMOVED]
"""Put in the place of every value, unless it is what stands there."""

FREE = re.compile(
    r"^(shoal|torch)$"  # who wrote it, for people
    r"|^progress\.(seed|strategy|num_workers)$|^progress\.data\b"
    r"|^progress\.(skipped_steps|firsts|origin|histories|results|position\.(next_index|samples|loss_|measured_at|weights|stretch))"
    r"|^progress\.fit\.(first_|trainer$)"
    r"|^progress\.optimizer\.(numbers|groups\.0\.settings)|^progress\.(scheduler|callbacks|leases|loss_scale)"
)
"""Fields that have several right values, or may be missing: of a wrong one that is of the right kind nobody can know."""


USED_BY_A_STEP = re.compile(r"^progress\.(optimizer|scheduler|callbacks)")


def build() -> shoal.Trainer:
    torch.manual_seed(3)
    return trainer(
        nn.Linear(6, 4).double(),
        optimizer=adam,
        scheduler=lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        metrics=["accuracy"],
        callbacks=[EarlyStopping("loss", patience=2), ModelCheckpoint(every_steps=3, keep_last=99)],
    )


def places(value: Any, path: Keys = ()) -> Iterator[Keys]:
    """Every field, those inside of it after it."""
    if path:
        yield path
    if path == ("progress", "data"):
        return  # for people, but for the number of samples
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def mutated(fields: dict[str, Any], path: Keys, wrong: Any) -> dict[str, Any] | None:
    changed: Any = json.loads(json.dumps(fields))
    within = changed
    for key in path[:-1]:
        within = within[key]
    if wrong is REMOVED:
        del within[path[-1]]
    elif within[path[-1]] == wrong:
        return None
    else:
        within[path[-1]] = wrong
    return dict(changed)


def signed(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields)[:-1].encode()
    return body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


@pytest.mark.timeout(300)
def test_every_field_of_a_manifest_may_be_wrong(run_dir: Path) -> None:
    build().fit(batches(), epochs=2)
    [before, newest] = list_checkpoints(run_dir / "checkpoints")
    manifest = Path(newest) / "manifest.json"
    fields = json.loads(manifest.read_bytes())
    del fields["sha256"]
    run, failures, num_tried, num_damaged = build(), [], 0, 0
    for path in places(fields):
        name = ".".join(map(str, path))
        for wrong in WRONG:
            changed = mutated(fields, path, wrong)
            if changed is None:
                continue
            num_tried += 1
            manifest.write_bytes(signed(changed))
            told = f"{name} = {'missing' if wrong is REMOVED else json.dumps(wrong)}"
            try:
                saving.resume(run, batches(), "auto")
                if run.step == 6 and USED_BY_A_STEP.search(name):
                    run.fit(batches(), max_steps=1)
            except CheckpointError:
                continue
            except Exception as error:
                failures.append(f"{told}: {type(error).__name__}: {error}")
                run = build()
                continue
            finally:
                run.progress.histories.clear()
            num_damaged += run.progress.newest_checkpoint == before
            if run.progress.newest_checkpoint != before and not FREE.search(name):
                failures.append(f"{told}: taken for right")
    assert not failures, f"{len(failures)} of {num_tried}:\n" + "\n".join(failures)
    assert num_tried > 400
    assert num_damaged > 200
