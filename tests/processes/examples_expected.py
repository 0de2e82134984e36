"""Expected output of each example when run small: it ran, and it learnt something real."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.data import generated

FOLDER = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Example:
    """A script, the arguments that make it quick, and what its output has to show."""

    name: str
    args: list[str]
    check: Callable[[str], None]
    exact: bool
    """No layer mixes the batch or draws random numbers: the numbers printed are the same at any number of workers."""

    fewer: tuple[str, ...] = ()
    """Arguments with which it has enough data for a few steps: `shoal verify` runs it several times."""

    @property
    def script(self) -> Path:
        return FOLDER / f"{self.name}.py"


def numbers(pattern: str, output: str) -> list[float]:
    """Every number that the pattern's groups catch, in order."""
    found = re.findall(pattern, output)
    assert found, f"nothing like {pattern!r} in:\n{output}"
    return [float(number) for match in found for number in (match if isinstance(match, tuple) else (match,))]


def falls(losses: list[float], by: float) -> None:
    assert losses[-1] < losses[0] - by, f"the loss should fall by {by}: {losses}"


def check_clicks(output: str) -> None:
    auc, best = numbers(r"AUC ([\d.]+) of ([\d.]+) possible", output)
    assert best == round(generated.best_auc(num_ids=5000), 4)
    assert 0.68 < auc < best
    assert numbers(r"accuracy ([\d.]+)", output)[0] > 0.74


def check_resnet(output: str) -> None:
    falls(numbers(r"loss ([\d.]+)", output), by=0.5)
    assert numbers(r"validation accuracy ([\d.]+)", output)[-1] > 0.2  # chance is 0.1


def check_char_gpt(output: str) -> None:
    falls([float(loss) for loss in re.findall(r"\d\.\d{4}", output.splitlines()[0])], by=0.3)
    loss, best = numbers(r"loss ([\d.]+), best possible ([\d.]+)", output)
    assert best == round(generated.best_loss(16), 4)
    assert best < loss < 2.9  # ln 32 is 3.47


def check_vae(output: str) -> None:
    falls([float(loss) for loss in re.findall(r"\d+\.\d{3}", output.splitlines()[0])], by=20)
    assert numbers(r"([\d.]+)% of the pictures' variance", output)[0] > 20


def check_gan(output: str) -> None:
    off, from_centre = numbers(r"points, ([\d.]+) from the ring on average, mean ([\d.]+)", output)
    assert off < 0.6
    assert from_centre < 0.8


def check_custom_loop(output: str) -> None:
    falls(numbers(r"loss ([\d.]+)", output), by=0.5)
    assert numbers(r"accuracy ([\d.]+)", output)[-1] > 0.5


def check_ftrl(output: str) -> None:
    auc, best_auc = numbers(r"AUC ([\d.]+) of ([\d.]+) possible", output)
    assert 0.6 < auc < best_auc
    loss, best, constant = numbers(
        r"loss ([\d.]+), best possible ([\d.]+), without features ([\d.]+)", output
    )
    assert best < loss < constant - 0.02
    (found,) = re.findall(r"([\d,]+) are not zero, of ([\d,]+) features seen", output)
    used, seen = (int(number.replace(",", "")) for number in found)
    assert 100 < used < seen / 5


def check_matrix_factorisation(output: str) -> None:
    errors = numbers(r"RMSE ([\d.]+)", output)
    falls(errors, by=0.3)
    assert len(errors) == 5
    assert errors[-1] > numbers(r"noise ([\d.]+)", output)[0]


def check_table_features(output: str) -> None:
    auc, best = numbers(r"AUC ([\d.]+) of ([\d.]+) possible", output)
    assert best - 0.08 < auc < best
    likely, unlikely = numbers(r"two visitors: ([\d.]+), ([\d.]+)", output)
    assert likely > unlikely


EXAMPLES = [
    Example(
        "clicks",
        ["--samples", "12000", "--ids", "5000", "--batch", "250", "--out", "out/clicks"],
        check_clicks,
        exact=True,
        fewer=("--samples", "2000"),
    ),
    Example(
        "resnet",
        ["--samples", "1000", "--epochs", "3", "--batch", "48", "--width", "4", "--size", "16"],
        check_resnet,
        exact=False,
        fewer=("--samples", "200", "--epochs", "1"),
    ),
    Example(
        "char_gpt",
        ["--samples", "700", "--length", "16", "--dim", "32", "--layers", "1"],
        check_char_gpt,
        exact=True,
    ),
    Example("vae", ["--samples", "2000", "--size", "8"], check_vae, exact=False, fewer=("--samples", "500")),
    Example("gan", [], check_gan, exact=True),
    Example("custom_loop", ["--samples", "1000"], check_custom_loop, exact=True),
    Example(
        "table_features",
        ["--rows", "8000", "--out", "out/table"],
        check_table_features,
        exact=True,
        fewer=("--rows", "2000"),
    ),
]

WITH_SERVERS = [
    Example("ftrl", ["--samples", "20000", "--batch", "250"], check_ftrl, exact=False),
    Example(
        "matrix_factorisation",
        ["--users", "300", "--items", "200", "--ratings", "40000", "--epochs", "4", "--batch", "500"],
        check_matrix_factorisation,
        exact=False,
    ),
]
"""Those that speak to the servers themselves: they are launched with some."""

WITH_OWN_TESTS = {
    "map_reduce",
    "map_reduce_training",
    "ordered_updates",
    "from_anywhere",
    "matmul",
    "spirals",
    "cifar10",
    "estimator",
    "keras_model",
}
"""Those that show something else than one training, in tests of their own: test_<name>_example.py."""
