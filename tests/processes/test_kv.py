"""`shoal.ps.connect` against real servers: every push counts once, under kills too, and bad input is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

from shoal.config.faults import Faults
from shoal.errors import ConfigError

Launch = Callable[..., Launched]

COUNTING = """
import os
import numpy as np
import shoal
from shoal.cluster.worker import session
from shoal.config.job import current

kv = shoal.ps.connect()
sums = kv.table("sums", dim=2, rule="add", dtype="float64")
keys = np.arange(300)
for number in range(1, 61):
    kv.push(sums, keys[number:], np.full((300 - number, 2), float(shoal.rank() + 1)))
    at_push(number)
    print("pushed", number)
kv.wait()
shoal.reduce(0.0)
expected = 3.0 * np.minimum(keys, 60)
print("exact", (kv.pull(sums, keys).result() == expected[:, None]).all(), flush=True)
kv.close()
"""


def test_requests_in_any_order_shape_and_number(launch_script: Launch) -> None:
    done = launch_script(
        """
        import numpy as np
        import shoal
        import torch
        from shoal.errors import ConfigError

        with shoal.ps.connect() as kv:
            mine = kv.table(f"rows of {shoal.rank()}", dim=3, rule="store", num_rows=1000)
            keys = np.array([[7, 999], [0, 7]])
            values = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
            kv.push(mine, keys, values)
            kv.push(mine, torch.tensor([5]), torch.ones(1, 3))
            values[:] = -1.0  # what was pushed is shoal's by now
            got = kv.pull(mine, [5, 7, 0, 999, 1, 5]).result()
            print(got[:, 0].tolist())
            print(kv.pull(mine, keys).result().shape, kv.pull(mine, []).result().shape)

            sums = kv.table("sums", dim=1, rule="add")
            first = kv.push(sums, [-5, 1 << 60, -5], [1, 2, 3])
            second = kv.push(sums, [-5], [10.0], after=[first])
            held = kv.pull(sums, [1 << 60, -5], after=[first, second])
            kv.wait(held)
            print(first.is_done, second.is_done)
            kv.wait()
            shoal.reduce(0.0)
            print(kv.pull(sums, [1 << 60, -5, 4000]).result().tolist())  # a row that nobody has added to, nor will

            many = [kv.push(sums, [number], [1.0]) for number in range(200)]
            print(kv.pull(sums, np.arange(200)).result().sum() >= 200.0, many[-1].result())
            for wrong in (
                lambda: kv.push("nowhere", [1], [1.0]),
                lambda: kv.push(mine, [1.5], np.ones((1, 3), np.float32)),
                lambda: kv.push(mine, [1000], np.ones((1, 3), np.float32)),
                lambda: kv.pull(mine, [-1]),
                lambda: kv.push(mine, [1], np.ones((1, 3))),
                lambda: kv.push(mine, [1, 2], np.ones((1, 3), np.float32)),
                lambda: kv.push(mine, [2, 1, 2], np.ones((3, 3), np.float32), merge=False),
                lambda: kv.table("sums", dim=2, rule="add"),
                lambda: kv.table("other", dim=2, rule="best"),
                lambda: kv.table("other", dim=0),
                lambda: kv.table("other", dim=1, lr=0.1),
            ):
                try:
                    wrong()
                except ConfigError as error:
                    print("refused:", error)
        try:
            kv.pull(mine, [1])
        except ConfigError as error:
            print(error)
        """,
        workers=2,
        servers=2,
        strategy="ps:async",
    )
    assert (done.exit_code, done.error) == (0, None)
    lines = done.stdout.splitlines()
    assert lines[:6] == [
        "[1.0, 9.0, 6.0, 3.0, 0.0, 1.0]",
        "(2, 2, 3) (0, 3)",
        "True True",
        "[[4.0], [28.0], [0.0]]",
        "True None",
        "refused: table 'nowhere' was not declared in this process; there are: 'rows of 0', 'sums'. Nothing was sent; "
        "kv.table('nowhere', dim=...) comes first, on every worker.",
    ]
    expected = [
        "keys must be integers, got float64",
        "keys must be in 0..999 (num_rows=1000), got 1000",
        "keys must be in 0..999 (num_rows=1000), got -1",
        "values must be float32, got float64",
        "keys of shape (2,) need values of shape (2, 3), got (1, 3)",
        "3 keys were pushed with merge=False, and 1 of them are repeats: key 2 is there 2 times",
        "table 'sums' is there already, and otherwise",
        "there is no update rule 'best'",
        "dim must be an integer of at least 1, got 0",
        "the rule 'store' has no setting 'lr'",
        "this kv is closed",
    ]
    assert [part in line for part, line in zip(expected, lines[6:], strict=True)] == [True] * 11, lines[6:]


def test_a_worker_that_is_killed_between_pushes_and_runs_again_adds_each_of_them_once(
    launch_script: Launch,
) -> None:
    killed = """
def at_push(number):
    if (shoal.rank(), number, current().incarnation) in ((1, 20, 0), (0, 30, 0), (1, 45, 1)):
        os.kill(os.getpid(), 9)  # with pushes under way
    if number == 20:
        kv.wait()
"""
    done = launch_script(killed + COUNTING, workers=2, servers=2, strategy="ps:async")
    assert (done.exit_code, done.error) == (0, None)
    assert done.stdout.endswith("pushed 60\nexact True\n")
    assert done.summary["restarts"] == 3
    said = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("pushed")]
    again = [number for number in said if said.count(number) > 1]
    assert min(again, default=30) > 20, "a replacement is silent until a push of its own counts"
    assert set(said) == set(range(1, 61))


def test_a_server_that_is_killed_costs_no_push_and_doubles_none(launch_script: Launch) -> None:
    reported = """
def at_push(number):
    if number == 30:
        session.report(phase="fit", epoch=1, num_epochs=1, step=30, num_steps=30, loss=0.0, metrics={}, samples=30,
                       samples_per_s=1.0, eta_s=None)
        while kv._group.view == 1:  # until the death was noticed: pushes fall before, into and after it
            kv.pull(sums, keys).result()
"""
    done = launch_script(
        reported + COUNTING,
        workers=2,
        servers=2,
        strategy="ps:async",
        faults=Faults().kill("server-1", at_step=30),
    )
    assert (done.exit_code, done.error) == (0, None)
    assert done.stdout.endswith("exact True\n")
    assert done.summary["restarts"] == 1


@pytest.mark.parametrize("strategy", ["ps", "ddp"])
def test_where_there_is_nothing_to_connect_to_it_is_said_how_to_launch(
    launch_script: Launch, strategy: str
) -> None:
    done = launch_script("import shoal; shoal.ps.connect()", strategy=strategy)
    assert done.exit_code == 2
    assert isinstance(done.error, ConfigError)
    assert f"under '{strategy}'" in str(done.error)
    assert "`shoal run -n 2 --servers 2 --strategy ps:async SCRIPT`" in str(done.error)


SAVING = """
import numpy as np
import shoal
from shoal.config.job import current

kv = shoal.ps.connect()
rows = kv.table("rows", dim=4, rule="adagrad", lr=0.5, init="normal", dtype="float64")
other = kv.table("other", dim=1, rule="add", num_rows=100, dtype="float64")
keys = np.arange(3000) * 10**12
for number in range(2):
    kv.push(rows, keys, np.full((3000, 4), 1.0 + shoal.rank()))
    kv.push(other, np.arange(100), np.ones((100, 1)))
kv.wait()
shoal.reduce(0.0)
first = kv.save("saved")
shoal.reduce(0.0)
kv.push(rows, keys[shoal.rank()::1000], np.full((3, 4), 5.0))
kv.wait()
shoal.reduce(0.0)
second = kv.save("saved")
if shoal.rank() == 0:
    print("first", first.num_rows, first.is_incremental)
    print("second", second.num_rows, second.is_incremental)
    np.save("expected.npy", kv.pull(rows, keys).result())
kv.close()
"""

LOADING = """
import numpy as np
import shoal
from shoal.errors import CheckpointDamaged, CheckpointMismatch, NoCheckpoint

kv = shoal.ps.connect()
rows = kv.table("rows", dim=4, rule="adagrad", lr=0.5, init="normal", dtype="float64")
keys = np.arange(3000) * 10**12
loaded = kv.load("saved")
shoal.reduce(0.0)
print("same", np.array_equal(kv.pull(rows, keys).result(), np.load("expected.npy")))
shoal.reduce(0.0)
if shoal.rank() == 0:
    print(loaded)
    before = kv.pull(rows, [0]).result()
    kv.push(rows, [0], np.ones((1, 4)))
    # Adagrad's sum went with the row: three workers' 1, 4 and 9 twice, 25, and 1 of now.
    print(np.allclose(kv.pull(rows, [0]).result(), before - 0.5 / np.sqrt(28 + 25 + 1)))
    file = sorted(shoal_path.glob("rows-*"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for path, error in (("saved", CheckpointDamaged), ("nowhere", NoCheckpoint)):
        try:
            kv.load(path)
        except error as refused:
            print(str(refused)[:60])
kv.close()
"""


def test_tables_are_saved_by_what_changed_and_load_on_other_servers_whoever_is_killed(
    launch_script: Launch, tmp_path: Path
) -> None:
    move = f"import os, pathlib\nos.chdir({str(tmp_path)!r})\nshoal_path = pathlib.Path('saved')\n"
    faults = Faults().kill("worker-0", at="worker: part of a checkpoint written")
    done = launch_script(
        move + SAVING,
        workers=3,
        servers=2,
        strategy="ps:async",
        quiet=True,
        faults=faults,
        step_timeout_s=30.0,
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert done.summary["restarts"] == 1
    assert "first 3100 False" in done.stdout
    assert "second 9 True" in done.stdout
    assert not list(tmp_path.glob("saved/*.tmp"))
    done = launch_script(
        move + LOADING, workers=2, servers=3, strategy="ps:async", quiet=True, step_timeout_s=30.0
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert done.stdout.splitlines() == [
        "same True",
        "['rows']",
        "True",
        "the checkpoint saved is damaged: the bytes of rows-000001-00",
        "there is no checkpoint to load at nowhere: it has no manifes",
    ]


def test_tables_of_a_script_are_in_the_checkpoints_of_its_model(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    """A resumed script repeats its pushes under the same names, which count already: the rows they made must be back."""
    script, lines = Path(__file__).parent / "scripts" / "named_tables.py", []
    for number, args in enumerate((("5",), ("100", str(tmp_path / "0" / "step-000000006")))):
        done = launch_script(
            script, args=(str(tmp_path / str(number)), *args), workers=3, servers=1 + number, strategy="ps:async",
            name=str(number),
        )  # fmt: skip
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        lines += [line for line in done.stdout.splitlines() if line.startswith("counts")]
    assert lines == [
        "counts [[2.0, 3.0], [15.0, 1.0], [0.0, 0.0]]",
        "counts [[2.0, 3.0], [15.0, 1.0], [0.0, 0.0]]",
    ]
