"""ps:hybrid: dense parameters by all-reduce and rows on servers recover together from any death."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launched import Launched

from shoal import Faults

NUM_STEPS = 12  # of an epoch
SCRIPT = (
    (Path(__file__).parent / "scripts" / "ps_counting.py")
    .read_text()
    .replace("8 * 60", f"8 * {NUM_STEPS}")
    .replace("trainer.fit(batches, epochs=2,", "history = trainer.fit(batches, epochs=2,")
    .replace(
        "report = {",
        """measured = [epoch["val_loss"] for epoch in history.epochs] + [trainer.evaluate(data.batch(32))["loss"]]
report = {
    "measured": measured,
    "predicted": float(trainer.predict(data.batch(32)).sum()),""",
    )
)


FAULTS = (
    Faults()
    # Its gradients are with the others, who could go on with them; its rows are not on the servers.
    .kill("worker-2", at_step=3, at="worker: before commit")
    # Nothing of the training is left for the next two: they see no batch that shows what is rows.
    .kill("worker-1", at_step=3 * NUM_STEPS, at="worker: epoch ended")
    .kill("worker-0", at_step=3 * NUM_STEPS, at="worker: predicting")
)


def test_every_row_has_every_push_once_and_is_measured_as_the_servers_have_it(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    done = launch_script(
        SCRIPT,
        workers=3,
        servers=2,
        strategy="ps:hybrid",
        args=(str(tmp_path),),
        quiet=True,
        step_timeout_s=20.0,
        faults=FAULTS,
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert done.summary["restarts"] == len(FAULTS.planned)
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    samples, bias = 8 * NUM_STEPS, 24.0 * NUM_STEPS
    for told in ranks:
        assert Counter(told["times"]) == {3.0: samples}
        assert (told["steps"], told["bias"]) == ([NUM_STEPS, 3 * NUM_STEPS], bias)
        # A loss is minus (the row + the bias), which both grow by one per epoch and by one per sample of it.
        assert told["measured"] == [-(2.0 + bias * 2 / 3), -(3.0 + bias), -(3.0 + bias)]
        assert told["predicted"] == samples * (3.0 + bias)
