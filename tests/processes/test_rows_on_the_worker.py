"""`ps --row-cache` with one worker: rows live and are updated at the worker; whoever is killed, the bits are those of `ps`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched

from shoal import Faults
from shoal.train.checkpoint.checkpoint import open_checkpoint

SCRIPTS = Path(__file__).parent / "scripts"
Launch = Callable[..., Launched]
_without: dict[str, dict[str, Any]] = {}


def ended(
    launch: Launch, out: Path, variant: str, *, script: Path = SCRIPTS / "everything.py", **options: Any
) -> tuple[Launched, dict[str, Any]]:
    out.mkdir()
    done = launch(
        script, workers=1, strategy="ps", args=(str(out), variant), quiet=True,
        **{"servers": 1, "step_timeout_s": 30.0, **options},
    )  # fmt: skip
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    return done, json.loads((out / "0.json").read_text())


@pytest.mark.parametrize(
    ("variant", "row_cache", "options", "faults"),
    [
        ("sparse", 50, {}, Faults()),
        (
            "sparse",
            50,
            {"snapshot_every": 3},
            Faults()
            .kill("worker-0", at_step=1, at="worker: before commit")
            .kill("worker-0", at_step=8, at="worker: committed", incarnation=1)
            .kill("worker-0", at_step=12, at="worker: before forward", incarnation=2),
        ),
        (
            "sparse",
            30,  # of 50 rows: some are written back and dropped
            {"snapshot_every": 2, "servers": 2, "replicas": 2},
            Faults()
            .kill("worker-0", at_step=5, at="worker: exchange begun")
            .kill("server-1", at_step=9)
            .kill("worker-0", at_step=11, at="worker: exchange finished, not committed", incarnation=1),
        ),
        (
            "sparse",
            50,
            {},
            Faults()
            .kill("worker-0", at="worker: checkpoint written")
            .kill("worker-0", at="worker: a call ended", incarnation=1)
            .kill("worker-0", at="worker: predicting", incarnation=2),
        ),
        (
            "plain",
            50,
            {"snapshot_every": 1},
            Faults().kill("worker-0", at_step=7),
        ),  # momentum: no rows at all
        ("mixing", 50, {"snapshot_every": 4}, Faults().kill("worker-0", at_step=6)),
    ],
)
def test_ends_with_the_bits_of_ps_whoever_dies(
    launch_script: Launch,
    tmp_path: Path,
    variant: str,
    row_cache: int,
    options: dict[str, Any],
    faults: Faults,
) -> None:
    if variant not in _without:
        _, _without[variant] = ended(launch_script, tmp_path / "without", variant)
    done, found = ended(
        launch_script, tmp_path / "with", variant, row_cache=row_cache, faults=faults, **options
    )
    assert done.summary["restarts"] == len(faults.planned)
    assert done.summary.get("went_back", 0) == 0
    assert found == _without[variant]


@pytest.mark.parametrize("options", [{}, {"row_cache": 50, "snapshot_every": 3}], ids=["ps", "cached"])
def test_a_replacement_whose_script_reads_the_model_first_finds_what_was_trained(
    launch_script: Launch, tmp_path: Path, options: dict[str, Any]
) -> None:
    reading = tmp_path / "reading.py"
    text = (SCRIPTS / "everything.py").read_text()
    reading.write_text(text.replace("history = trainer.fit", "trainer.model\nhistory = trainer.fit", 1))
    if "sparse" not in _without:
        _, _without["sparse"] = ended(launch_script, tmp_path / "without", "sparse")
    done, found = ended(
        launch_script, tmp_path / "with", "sparse", script=reading,
        faults=Faults().kill("worker-0", at_step=8, at="worker: committed"), **options,
    )  # fmt: skip
    assert done.summary["restarts"] == 1
    assert found == _without["sparse"]


@pytest.mark.parametrize("row_cache", [50, 30])
def test_a_load_between_fits_is_in_what_a_replacement_finds(
    launch_script: Launch, tmp_path: Path, row_cache: int
) -> None:
    """Whole at the worker and in part: weights of the first fit, optimizer state of the second."""
    loading = tmp_path / "loading.py"
    text = (SCRIPTS / "everything.py").read_text()
    begin, end = "evaluated = trainer.evaluate", "predicted = trainer.predict"
    loading.write_text(
        text.replace(begin, f"trainer.save(out / 'model')\n{begin}").replace(
            end, f"trainer.load(out / 'model')\ntrainer.fit(train.batch(20), max_steps=4)\n{end}"
        )
    )
    _, expected = ended(launch_script, tmp_path / "without", "sparse", script=loading)
    done, found = ended(
        launch_script, tmp_path / "with", "sparse", script=loading, row_cache=row_cache, snapshot_every=2,
        faults=Faults().kill("worker-0", at_step=17).kill("worker-0", at_step=19, incarnation=1),
    )  # fmt: skip
    assert done.summary["restarts"] == 2
    assert found == expected


LARGE_NOTE = """
import json, sys, torch, shoal
from torch import nn

torch.manual_seed(0)
# 75 MiB of weights and optimizer state besides the rows: more than a request may have in the socket.
model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 1_100_000), nn.AdaptiveAvgPool1d(1))
data = shoal.Dataset.from_arrays((torch.arange(48).reshape(24, 2), torch.ones(24, 1)))
optimizer = lambda params: torch.optim.Adagrad(params, lr=0.1)
shoal.Trainer(model, loss=nn.MSELoss(), optimizer=optimizer, seed=0).fit(data.batch(4), epochs=1)
sums = {name: tensor.double().sum().item() for name, tensor in model.state_dict().items()}
open(sys.argv[1] + "/0.json", "w").write(json.dumps(sums))
"""


def test_a_recovery_point_with_much_besides_its_rows(launch_script: Launch, tmp_path: Path) -> None:
    script = tmp_path / "large_note.py"
    script.write_text(LARGE_NOTE)
    found = []
    for name, faults in (("undisturbed", Faults()), ("killed", Faults().kill("worker-0", at_step=4))):
        done, sums = ended(
            launch_script, tmp_path / name, "", script=script, row_cache=50, snapshot_every=2, faults=faults
        )
        assert done.summary["restarts"] == len(faults.planned)
        found.append(sums)
    assert found[0] == found[1]


def pieces(folder: Path) -> dict[str, torch.Tensor]:
    saved = open_checkpoint(max(folder.glob("step-*"))).pieces
    return {name: saved[name] for name in saved}


def test_bags_and_hashed_rows_of_which_a_part_is_at_the_worker(launch_script: Launch, tmp_path: Path) -> None:
    def train(name: str, **options: Any) -> tuple[Launched, Path]:
        out = tmp_path / name
        out.mkdir()
        done = launch_script(
            SCRIPTS / "table_memory.py", workers=1, servers=2, strategy="ps", args=(str(out),), name=name, quiet=True,
            step_timeout_s=30.0, **options,
        )  # fmt: skip
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        return done, out

    (_, without), (_, undisturbed) = train("without"), train("undisturbed", row_cache=9_000)
    done, cached = train(
        "cached", row_cache=6_000, snapshot_every=3, faults=Faults().kill("worker-0", at_step=6)
    )
    assert done.summary["restarts"] == 1
    for when in ("half", "end", "looked"):
        by_ps, expected, found = (pieces(out / when) for out in (without, undisturbed, cached))
        assert found.keys() == expected.keys() == by_ps.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (when, name)
            # Under ps the gradient's norm, by which it is clipped, is added up slot by slot.
            torch.testing.assert_close(found[name], by_ps[name], rtol=1e-4, atol=1e-4)


def test_rows_that_are_resumed_saved_loaded_and_looked_up(launch_script: Launch, tmp_path: Path) -> None:
    ended = {}
    for name, options in (("without", {}), ("cached", {"row_cache": 40, "snapshot_every": 2})):
        first, second = tmp_path / name, tmp_path / f"{name}-resumed"
        for out, epochs in ((first, "1"), (second, "2")):
            resumed = (str(next(first.glob("step-*"))),) if out is second else ()
            done = launch_script(
                SCRIPTS / "hash_rows.py", workers=1, servers=1, strategy="ps", args=(str(out), epochs, *resumed),
                name=out.name, quiet=True, **options,
            )  # fmt: skip
            assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        ended[name] = pieces(second)
    assert ended["cached"].keys() == ended["without"].keys()
    for name, tensor in ended["without"].items():
        torch.testing.assert_close(ended["cached"][name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("script", "args", "row_cache", "said"),
    [
        ("table_memory.py", (), 1_000, "one step uses more than 1,000 rows of"),
        ("hash_rows.py", ("loop",), 100, "a loop of the script's own shows it none"),
    ],
)
def test_what_cannot_be_is_refused_in_a_paragraph(
    launch_script: Launch, tmp_path: Path, script: str, args: tuple[str, ...], row_cache: int, said: str
) -> None:
    done = launch_script(
        SCRIPTS / script, workers=1, servers=1, strategy="ps", args=(str(tmp_path), *args), quiet=True,
        row_cache=row_cache,
    )  # fmt: skip
    assert done.exit_code != 0
    assert said in str(done.error)


POLICY = """
import torch, shoal
from torch import nn

rows = shoal.nn.HashEmbedding(4, policy=shoal.nn.RowPolicy(admit_after=2))
model = nn.Sequential(rows, nn.Flatten(), nn.Linear(8, 1))
data = shoal.Dataset.from_arrays((torch.arange(20).reshape(10, 2), torch.ones(10, 1)))
optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
shoal.Trainer(model, loss=nn.MSELoss(), optimizer=optimizer).fit(data.batch(5), epochs=1)
"""


def test_a_table_with_a_policy_is_refused(launch_script: Launch, tmp_path: Path) -> None:
    script = tmp_path / "policy.py"
    script.write_text(POLICY)
    done = launch_script(script, workers=1, servers=1, strategy="ps", quiet=True, row_cache=100)
    assert done.exit_code != 0
    assert "'0.rows' has a RowPolicy, which only servers know to apply" in str(done.error)
