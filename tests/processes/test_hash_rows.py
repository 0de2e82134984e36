"""Rows of a HashEmbedding: the same under one process and servers, in each other's checkpoints, and refused by ddp."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file
from typer.testing import Result

from shoal import Faults
from shoal.errors import ConfigError
from shoal.train.checkpoint.checkpoint import open_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "hash_rows.py"
ONE = {"workers": 1, "strategy": "single"}
SERVED = {"workers": 2, "strategy": "ps", "servers": 2}
Launch = Callable[..., Launched]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def train(launch_script: Launch, tmp_path: Path) -> Callable[..., tuple[Tensors, Path]]:
    def train(name: str, do: str, begin_from: Path | None = None, **options: object) -> tuple[Tensors, Path]:
        out = tmp_path / name
        out.mkdir()
        given = [str(begin_from)] if begin_from is not None else []
        done = launch_script(
            options.pop("script", SCRIPT),
            args=(str(out), do, *given),
            name=name,
            quiet=True,
            step_timeout_s=30.0,
            **options,
        )
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        assert done.summary["restarts"] == ("faults" in options)
        return load_file(out / "state.safetensors"), next(iter(out.glob("step-*")), out)

    return train


def assert_close(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-9, msg=name)


def saved(path: Path) -> Tensors:
    pieces = open_checkpoint(path).pieces
    return {name: pieces[name] for name in pieces if name.startswith(("model/", "optimizer/"))}


def test_a_checkpoint_of_either_goes_on_under_the_other(train: Callable[..., tuple[Tensors, Path]]) -> None:
    one, half_of_one = train("one-1", "1", **ONE)
    served, half_served = train("served-1", "1", faults=Faults().kill("server-1", at_step=3), **SERVED)
    assert_close(served, one)
    assert {
        "model/rows.keys",
        "model/rows.rows",
        "optimizer/rows.rows/sum",
        "optimizer/rows.rows/step",
    } <= saved(half_of_one).keys()
    assert_close(saved(half_served), saved(half_of_one))
    straight, whole = train("one-2", "2", **ONE)
    for name, half, options in (
        ("served-from-one", half_of_one, {**SERVED, "workers": 3, "servers": 1}),
        ("one-from-served", half_served, ONE),
    ):
        state, end = train(name, "2", half, **options)
        assert_close(state, straight)
        assert_close(saved(end), saved(whole))


def test_a_loop_of_ones_own_trains_them_as_one_process_does(
    train: Callable[..., tuple[Tensors, Path]],
) -> None:
    one, _ = train("one", "loop", **ONE)
    killed = Faults().kill("worker-1", at_step=3)
    served, _ = train("served", "loop", workers=3, strategy="ps", servers=2, faults=killed)
    assert_close(served, one)


@pytest.mark.parametrize("strategy", ["ps:async", "ps:hybrid"])
def test_relaxed_strategies_save_them_too(train: Callable[..., tuple[Tensors, Path]], strategy: str) -> None:
    state, path = train("relaxed", "1", workers=2, strategy=strategy, servers=1)
    pieces = saved(path)
    assert torch.equal(state["rows.keys"], pieces["model/rows.keys"])
    assert len(pieces["optimizer/rows.rows/sum"]) == len(pieces["model/rows.rows"]) == 50


@pytest.mark.parametrize(("strategy", "num_updates"), [("ps:hybrid", 16.0), ("ps", 8.0)])
def test_updates_are_counted_on_through_checkpoints_where_slots_have_no_rows(
    train: Callable[..., tuple[Tensors, Path]], tmp_path: Path, strategy: str, num_updates: float
) -> None:
    source = SCRIPT.read_text().replace("shoal.nn.HashEmbedding(4, scale=0.5)", "nn.Embedding(50, 4)")
    (tmp_path / "plain.py").write_text(source.replace("- 9) * 10**16", ")"))
    path = None
    for epochs in ("1", "2"):
        options = {"workers": 2, "strategy": strategy, "servers": 1, "script": tmp_path / "plain.py"}
        _, path = train(f"plain-{epochs}", epochs, path, **options)
    assert path is not None
    assert float(saved(path)["optimizer/rows.weight/step"]) == num_updates


@pytest.mark.parametrize("do", ["1", "loop"])
def test_ddp_refuses_them_before_the_first_step(launch_script: Launch, tmp_path: Path, do: str) -> None:
    done = launch_script(SCRIPT, workers=2, strategy="ddp", args=(str(tmp_path), do), quiet=True)
    assert isinstance(done.error, ConfigError)
    assert "the HashEmbedding 'rows' cannot be trained with 'ddp'" in str(done.error)
    assert "--strategy ps" in str(done.error)


def test_verify_finds_them_equal(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    given = ["verify", str(SCRIPT), "-n", "2", "--strategy", "ps", "--steps", "4"]
    result = invoke(*given, "--", str(tmp_path), "2")
    assert result.exit_code == 0, result.output
    assert "rows.rows" in result.output
    assert "equal: ps on 2 workers computes what one process does" in " ".join(result.output.split())
