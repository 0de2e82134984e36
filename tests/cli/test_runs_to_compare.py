from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shoal.cli.equality import Dump, Mix, check, read_dump

BATCH_NORM = Mix("stem.norm", "BatchNorm2d", "mixes the batch")


class Script:
    """Answers with the weight each kind of run would end at, and writes down what was asked of it."""

    def __init__(
        self,
        *,
        workers: float,
        whole: float,
        slices: float,
        mixes: tuple[Mix, ...] = (),
        workers_at_rest: float = 1.0,
        mixes_at_rest: tuple[Mix, ...] = (),
    ) -> None:
        self.workers, self.whole, self.slices, self.mixes = workers, whole, slices, mixes
        self.workers_at_rest, self.mixes_at_rest = workers_at_rest, mixes_at_rest
        self.asked: list[tuple[str, bool, int]] = []
        self.rested: list[tuple[str, bool, tuple[str, ...]]] = []

    num_micro: int | None = None

    def __call__(
        self,
        dtype: str,
        *,
        spread: bool,
        num_slices: int = 1,
        num_micro: int | None = None,
        at_rest: tuple[str, ...] = (),
    ) -> Dump:
        if at_rest:
            self.rested.append((dtype, spread, at_rest))
            weight, mixes = self.workers_at_rest if spread else 1.0, self.mixes_at_rest
        else:
            self.asked.append((dtype, spread, num_slices * (num_micro or 1)))
            weight = self.workers if spread else self.slices if self.asked[-1][2] > 1 else self.whole
            mixes = self.mixes
        return Dump(
            state={"weight": np.array([weight], dtype)},
            losses=(1.0, 0.5),
            mixes=mixes if spread else (),
            num_steps=2,
            num_micro=self.num_micro if spread else None,
        )


def test_equal_runs_need_four_of_them() -> None:
    script = Script(workers=1.0, whole=1.0, slices=2.0)
    outcome = check(script, num_workers=3, tolerance=1e-9)
    assert outcome.equal
    assert not outcome.sliced
    assert script.asked == [
        ("float64", True, 1),
        ("float64", False, 1),
        ("float32", True, 1),
        ("float32", False, 1),
    ]


def test_named_layers_are_compared_slice_by_slice_at_once() -> None:
    script = Script(workers=1.0, whole=2.0, slices=1.0, mixes=(BATCH_NORM,))
    outcome = check(script, num_workers=3, tolerance=1e-9)
    assert outcome.equal
    assert outcome.sliced
    assert outcome.mixes == (BATCH_NORM,)
    assert script.asked == [
        ("float64", True, 1),
        ("float64", False, 3),
        ("float32", True, 1),
        ("float32", False, 3),
    ]


def test_a_difference_that_the_slices_explain_is_a_difference_and_said_to_hang_on_the_cut() -> None:
    outcome = check(Script(workers=1.0, whole=2.0, slices=1.0), num_workers=3, tolerance=1e-9)
    assert not outcome.equal
    assert outcome.depends_on_cut
    assert outcome.judged.float64.worst().absolute == 1.0


def test_named_layers_are_put_to_rest_and_compared_with_whole_batches() -> None:
    script = Script(workers=1.0, whole=2.0, slices=1.0, mixes=(BATCH_NORM,))
    outcome = check(script, num_workers=3, tolerance=1e-9)
    assert outcome.equal
    assert script.rested == [("float64", True, ("stem.norm",)), ("float64", False, ("stem.norm",))]


def test_named_layers_do_not_hide_what_depends_on_the_cut_without_them() -> None:
    script = Script(workers=1.0, whole=2.0, slices=1.0, mixes=(BATCH_NORM,), workers_at_rest=1.06)
    outcome = check(script, num_workers=3, tolerance=1e-9)
    assert not outcome.judged.differing
    assert outcome.rested is not None
    assert [found.name for found in outcome.rested.differing] == ["weight"]
    assert not outcome.equal


def test_layers_that_draw_at_rest_too_are_named() -> None:
    noise = Mix("the model", "Sampler", "draws random numbers")
    script = Script(
        workers=1.0, whole=2.0, slices=1.0, mixes=(noise,), workers_at_rest=1.06, mixes_at_rest=(noise,)
    )
    outcome = check(script, num_workers=3, tolerance=1e-9)
    assert outcome.equal
    assert outcome.still_drawing == (noise,)
    assert script.rested == [("float64", True, ("",))]


def test_a_difference_that_nothing_explains_is_shown_against_the_plain_reference() -> None:
    outcome = check(Script(workers=1.0, whole=1.5, slices=1.7), num_workers=3, tolerance=1e-9)
    assert not outcome.equal
    assert not outcome.sliced
    assert not outcome.depends_on_cut
    assert outcome.judged.float64.tensors[0].absolute == 0.5


def test_a_pipeline_is_compared_with_its_micro_batches_in_turn() -> None:
    script = Script(workers=1.0, whole=2.0, slices=1.0, mixes=(BATCH_NORM,))
    script.num_micro = 4
    outcome = check(script, num_workers=1, tolerance=1e-9)
    assert outcome.equal
    assert script.asked[1] == ("float64", False, 4)


def test_named_layers_do_not_excuse_a_difference() -> None:
    outcome = check(
        Script(workers=1.0, whole=1.5, slices=1.7, mixes=(BATCH_NORM,)), num_workers=2, tolerance=1e-9
    )
    assert not outcome.equal
    assert outcome.sliced


def test_float32_does_not_decide() -> None:
    class Rounded(Script):
        def __call__(self, dtype: str, **asked: Any) -> Dump:
            self.workers = 1.001 if dtype == "float32" else 1.0
            return super().__call__(dtype, **asked)

    outcome = check(Rounded(workers=1.0, whole=1.0, slices=1.0), num_workers=2, tolerance=1e-9)
    assert outcome.equal
    assert outcome.judged.float32.tensors[0].absolute > 1e-4


class Noisy(Script):
    """The weight is equal; the bias goes where rounding leads it, by so much in float64 and in float32."""

    def __init__(self, *, float64: float, float32: float) -> None:
        super().__init__(workers=1.0, whole=1.0, slices=1.0)
        self.noise = {"float64": float64, "float32": float32}

    def __call__(self, dtype: str, **asked: Any) -> Dump:
        dump = super().__call__(dtype, **asked)
        bias = np.array([0.2 + (self.noise[dtype] if asked["spread"] else 0.0)], dtype)
        return replace(dump, state={**dump.state, "bias": bias})


def test_what_shrinks_with_the_precision_is_rounding_and_named() -> None:
    script = Noisy(float64=3e-8, float32=0.1)
    outcome = check(script, num_workers=3, tolerance=1e-9)
    assert outcome.equal
    assert not outcome.sliced
    assert [found.name for found in outcome.judged.rounding] == ["bias"]
    assert len(script.asked) == 4


@pytest.mark.parametrize(
    ("float64", "float32"),
    [
        (0.1, 0.1),  # a mistake is as large in any precision
        (3e-8, 3e-8),  # also a small one
        (3e-8, 1e-7),  # which float32 cannot see
        (3e-5, 0.1),  # or which it sees beside noise
        (math.nan, math.nan),
    ],
)
def test_what_does_not_shrink_is_a_difference(float64: float, float32: float) -> None:
    outcome = check(Noisy(float64=float64, float32=float32), num_workers=3, tolerance=1e-9)
    assert [found.name for found in outcome.judged.differing] == ["bias"]
    assert outcome.judged.rounding == ()


def test_a_dump_reads_back_with_nan_losses(tmp_path: Path) -> None:
    save_file({"weight": np.arange(3.0), "steps": np.array(2)}, tmp_path / "state.safetensors")
    report = {
        "losses": [1.5, float("nan")],
        "mixes": [{"layer": "stem.norm", "kind": "BatchNorm2d", "why": "mixes the batch"}],
        "own_loop": False,
        "steps": 2,
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    dump = read_dump(tmp_path)
    assert dump is not None
    assert dump.mixes == (BATCH_NORM,)
    assert dump.num_steps == 2
    assert dump.losses[0] == 1.5
    assert np.isnan(dump.losses[1])
    assert np.array_equal(dump.state["weight"], np.arange(3.0))


def test_a_script_that_never_trained_has_no_dump(tmp_path: Path) -> None:
    assert read_dump(tmp_path) is None
