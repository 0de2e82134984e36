"""Every example, in one process and in several: it runs, it learns, and it says the same at any number of workers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from examples_expected import EXAMPLES, FOLDER, WITH_OWN_TESTS, WITH_SERVERS, Example
from launched import Launched
from typer.testing import Result

from shoal.runtime import kernel_cache as compiled
from whole_matrix import IS_WHOLE


@pytest.fixture(autouse=True)
def _one_thread_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Aggregates are kept where no other test finds them, kernels where they have been compiled.
    if (kernels := compiled.cache_directory()) is not None:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The models are tiny: beside other processes, threads that wait for each other cost more than they compute.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_every_example_is_tried() -> None:
    tried = {example.name for example in EXAMPLES + WITH_SERVERS} | WITH_OWN_TESTS
    assert tried == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_learns_at_any_number_of_workers(
    example: Example, launch_script: Callable[..., Launched]
) -> None:
    # That others compute the same is shown below, without rounding.
    said = {workers: run(example, workers, launch_script) for workers in ((1, 2, 3) if IS_WHOLE else (3,))}
    for output in said.values():
        example.check(output)
    if example.exact and IS_WHOLE:
        # In float32 Adam and Adagrad turn the rounding of a gradient near zero into a whole first step, so this is
        # coarse; below it is shown without rounding.
        results = {workers: [float(n) for n in re.findall(r"\d+\.\d+", said[workers])] for workers in said}
        assert all(result == pytest.approx(results[1], abs=1e-2) for result in results.values())


@pytest.mark.parametrize("example", WITH_SERVERS, ids=lambda example: example.name)
def test_the_example_learns_on_parameter_servers(
    example: Example, launch_script: Callable[..., Launched]
) -> None:
    options = {"workers": 2, "servers": 2, "strategy": "ps:async", "quiet": True}
    launched = launch_script(example.script, args=tuple(example.args), **options)
    assert launched.exit_code == 0, launched.error
    assert "Warning" not in launched.stderr
    example.check(launched.stdout)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_three_workers_compute_what_one_process_does(example: Example, invoke: Callable[..., Result]) -> None:
    result = invoke(
        "verify", str(example.script), "-n", "3", "--steps", "3", "--", *example.args, *example.fewer
    )
    assert result.exit_code == 0, result.output
    assert ("slices" in result.output) != example.exact, result.output


def test_the_character_gpt_learns_in_bfloat16_with_clipping(launch_script: Callable[..., Launched]) -> None:
    example = next(example for example in EXAMPLES if example.name == "char_gpt")
    args = (*example.args, "--precision", "bf16", "--clip-norm", "0.5")
    launched = launch_script(example.script, workers=2, args=args, quiet=True)
    assert launched.exit_code == 0, launched.error
    example.check(launched.stdout)


def test_an_example_runs_under_plain_python_and_leaves_its_model(tmp_path: Path) -> None:
    example = next(example for example in EXAMPLES if example.name == "clicks")
    ran = subprocess.run(
        [sys.executable, str(example.script), *example.args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr
    example.check(ran.stdout)
    assert {path.name for path in (tmp_path / "out/clicks").iterdir()} == {
        "model.safetensors",
        "manifest.json",
    }


def run(example: Example, workers: int, launch_script: Callable[..., Launched]) -> str:
    launched = launch_script(example.script, workers=workers, args=tuple(example.args), quiet=True)
    assert launched.exit_code == 0, launched.error
    assert "Warning" not in launched.stderr
    return launched.stdout
