"""Rows that are admitted and dropped by a policy: one process, servers, a killed server and a resumed run agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched

from shoal import Faults
from shoal.errors import ConfigError
from shoal.train.checkpoint.checkpoint import list_checkpoints, open_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "row_policy.py"
Launch = Callable[..., Launched]
Tensors = dict[str, torch.Tensor]


def test_the_same_rows_are_there_whoever_is_killed_and_on_any_number_of_servers(
    launch_script: Launch, tmp_path: Path
) -> None:
    def train(name: str, epochs: str, resume: Path | None = None, **options: object) -> tuple[Tensors, Path]:
        out = tmp_path / name
        given = (str(out), epochs, *([str(resume)] if resume else []))
        done = launch_script(SCRIPT, args=given, name=name, quiet=True, step_timeout_s=30.0, **options)
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        newest = Path(list_checkpoints(out / "checkpoints")[-1])
        pieces = open_checkpoint(newest).pieces
        return {each: pieces[each] for each in pieces if each.startswith(("model/", "optimizer/"))}, newest

    one, _ = train("one", "2", workers=1, strategy="single")
    kills = Faults().kill("server-1", at_step=5).kill("worker-2", at_step=8)
    killed, _ = train("killed", "2", workers=3, servers=2, replicas=2, strategy="ps", faults=kills)
    assert one.keys() == killed.keys()
    for name in one:
        torch.testing.assert_close(killed[name], one[name], rtol=1e-5, atol=1e-6, msg=name)
    sightings = one["optimizer/rows.rows/sightings"][:, 0]
    assert (sightings == 1).any()  # ids that have no row yet
    assert (sightings > 5).any()
    assert int(one["optimizer/rows.rows/evictions"]) > 0
    assert len(one["model/rows.keys"]) < 90  # of about 140 that were seen

    # Saved after every step, whole after 1 and 5: what 6 builds on stays, and 2 to 4 are gone with what they built on.
    _, half = train("half", "1", workers=3, servers=2, replicas=2, strategy="ps")
    manifests = [json.loads((path / "manifest.json").read_text()) for path in sorted(half.parent.iterdir())]
    assert [path.name[-1] for path in sorted(half.parent.iterdir())] == ["5", "6"]
    assert ["base" in each for each in manifests] == [False, True]
    resumed, _ = train("resumed", "2", half, workers=3, servers=3, replicas=2, strategy="ps")
    for name in killed:
        assert torch.equal(resumed[name], killed[name]), name


def test_seconds_are_refused_where_bits_must_not_depend_on_the_clock(
    launch_script: Launch, tmp_path: Path
) -> None:
    (tmp_path / "seconds.py").write_text(SCRIPT.read_text().replace("ttl_steps=3", "ttl_s=3.0"))
    done = launch_script(
        tmp_path / "seconds.py", args=(str(tmp_path), "1"), workers=2, servers=1, strategy="ps", quiet=True
    )
    assert isinstance(done.error, ConfigError)
    assert "ttl_s=3 seconds" in str(done.error)
    assert "ttl_steps" in str(done.error)


EMBEDDINGS = SCRIPT.parent / "embedding_rows.py"
WIDTHS = {"model/table.weight": 4, "optimizer/table.weight/sum": 4, "model/bag.weight": 3}


@pytest.mark.parametrize("strategy", ["ps", "ps:hybrid", "ps:ssp=1"])
def test_checkpoints_hold_the_rows_of_embeddings_that_changed(
    launch_script: Launch, tmp_path: Path, strategy: str
) -> None:
    def train(name: str, epochs: str, *resume: str, **options: object) -> list[Path]:
        given = (str(tmp_path / name), epochs, *resume)
        done = launch_script(EMBEDDINGS, args=given, name=name, quiet=True, step_timeout_s=30.0, **options)
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        return [Path(path) for path in list_checkpoints(tmp_path / name / "checkpoints")]

    def tensors(path: Path) -> Tensors:
        pieces = open_checkpoint(path, verify=True).pieces
        return {each: pieces[each] for each in pieces if each.startswith(("model/", "optimizer/"))}

    workers = 2 if strategy == "ps" else 1  # the order of two would be chance
    options = {"workers": workers, "servers": 2, "strategy": strategy}
    half = train("half", "1", **options)
    sizes = [json.loads((path / "manifest.json").read_text()) for path in half]
    assert any("base" in each for each in sizes)
    for manifest in (each for each in sizes if "base" in each):
        rows = {each["name"]: each["shape"] for each in manifest["pieces"] if each["name"] in WIDTHS}
        for name, width in WIDTHS.items():
            # Of 24 samples with two ids each, and of some more where rows are pushed beside the step.
            assert 0 < rows[name][0] <= (48 if strategy == "ps" else 144)
            assert rows[name][1] == width
    one = tensors(train("one", "1", workers=1, strategy="single")[-1])
    found = tensors(half[-1])
    assert one.keys() == found.keys()
    for name in one:
        torch.testing.assert_close(found[name], one[name], rtol=1e-9, atol=1e-12, msg=name)

    if strategy == "ps:ssp=1":  # another strategy runs what its leases do not know to be done once more
        return
    expected = tensors(train("expected", "2", workers=1, strategy="single")[-1])
    for name, how in (("one-more", {"workers": 1, "strategy": "single"}), ("ddp", {"workers": 2})):
        more = tensors(train(name, "2", str(half[-1]), **how)[-1])
        for piece in expected:
            torch.testing.assert_close(more[piece], expected[piece], rtol=1e-9, atol=1e-12, msg=piece)


@pytest.mark.parametrize("point", ["worker: checkpoint not written", "worker: checkpoint written"])
def test_a_kill_between_checkpoints_of_changed_rows_leaves_whole_ones(
    launch_script: Launch, tmp_path: Path, point: str
) -> None:
    ends = []
    for name, faults in (
        ("whole", None),
        ("killed", Faults().kill("worker-0", at_step=3, at=point).kill("server-1", at_step=9)),
    ):
        done = launch_script(
            EMBEDDINGS,
            args=(str(tmp_path / name), "2"),
            name=name,
            workers=2,
            servers=2,
            replicas=2,
            strategy="ps",
            faults=faults,
            step_timeout_s=30.0,
        )
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        for path in list_checkpoints(tmp_path / name / "checkpoints"):
            pieces = open_checkpoint(path, verify=True).pieces
            last = {each: pieces[each] for each in pieces if each.startswith(("model/", "optimizer/"))}
        ends.append(last)
    assert ends[0].keys() == ends[1].keys()
    for name in ends[0]:
        assert torch.equal(ends[0][name], ends[1][name]), name
