"""`shoal verify` over real jobs: equal where it must be, and not fooled where it must not."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from whole_matrix import matrix_only

Verify = Callable[..., Result]

DATA = """
import torch, shoal
from torch import nn

torch.manual_seed(3)
x, y = torch.randn(103, 8), torch.randint(0, 3, (103,))
data = shoal.Dataset.from_arrays((x, y)).shuffle(seed=0)

def train(model, loss=None, batch=16, **options):
    trainer = shoal.Trainer(
        model,
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        **options,
    )
    trainer.fit(data.batch(batch), epochs=2)
    raise AssertionError("the script ends with the last step")
"""

MLP = "nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))"


@pytest.fixture
def verify(invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """`shoal verify` of a script."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # small sums: more threads only wait for each other
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def verify(script: str, *args: str) -> Result:
        Path("train.py").write_text(DATA + textwrap.dedent(script))
        result = invoke("verify", "train.py", "--steps", "10", *args)
        assert list((tmp_path / "temporary").iterdir()) == [], "a run directory was left behind"
        assert not Path("runs").exists()
        return result

    return verify


@pytest.mark.parametrize(
    "batches",
    [
        "data.batch(6, per_worker=True)",
        "DataLoader(pairs, 6, sampler=DistributedSampler(pairs, shoal.num_workers(), shoal.rank()))",
    ],
    ids=["batch", "DistributedSampler"],
)
def test_batches_given_per_worker_are_compared_with_one_process_that_has_them_all(
    verify: Verify, batches: str
) -> None:
    script = f"""
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        pairs = TensorDataset(x, y)
        trainer = shoal.Trainer(
            {MLP}, loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
        )
        trainer.fit({batches}, epochs=2)
    """
    result = verify(script, "-n", "3")
    assert result.exit_code == 0, result.output


def told(result: Result) -> str:
    return " ".join(result.stdout.split())


@pytest.mark.parametrize("workers", ["3", *matrix_only("2", "4")])
def test_a_plain_model_is_equal_and_one_process_needs_no_slices(
    verify: Verify, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")  # with the threads that a user has, here at least
    # 103 samples in batches of 16: step 7 has 7 samples, cut unevenly by 2, 3 and 4.
    result = verify(f"train({MLP})", "-n", workers, "--strategy", "ddp")
    assert result.exit_code == 0, result.output
    assert f"equal: ddp on {workers} workers computes what one process does" in told(result)
    assert "slices" not in result.output
    assert "0.weight" in result.stdout
    assert "loss of a step" in result.stdout


@pytest.mark.parametrize("workers", ["3", *matrix_only("2", "4")])
def test_batchnorm_and_dropout_are_named_and_compared_slice_by_slice(verify: Verify, workers: str) -> None:
    result = verify(
        "train(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)), batch=19)",
        "-n",
        workers,
    )
    assert result.exit_code == 0, result.output
    assert "1 (BatchNorm1d) mixes the batch" in told(result)
    assert "3 (Dropout) draws random numbers" in told(result)
    assert f"the {workers} workers' slices in turn, with the workers' seeds" in told(result)


@pytest.mark.parametrize("workers", ["3", *matrix_only("2", "4")])
def test_a_masked_and_weighted_loss_is_equal(verify: Verify, workers: str) -> None:
    result = verify(
        f"""
        y[torch.rand(103) < 0.4] = -100
        train({MLP}, loss=nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]), ignore_index=-100))
        """,
        "-n",
        workers,
    )
    assert result.exit_code == 0, result.output
    assert "slices" not in result.output


def test_fewer_samples_than_workers_in_the_last_batch_is_equal(verify: Verify) -> None:
    # 103 = 10 * 10 + 3: the last batch of an epoch leaves a fourth worker without a sample.
    result = verify(f"train({MLP}, batch=10)", "-n", "4", "--steps", "12")
    assert result.exit_code == 0, result.output


def test_a_script_whose_gradients_depend_on_the_rank_is_caught(verify: Verify) -> None:
    result = verify(
        f"""
        scale = 1 + shoal.rank()
        train({MLP}, loss=lambda output, target: nn.functional.cross_entropy(output, target) * scale)
        """,
        "-n",
        "2",
    )
    assert result.exit_code == 1, result.output
    assert "not equal: ddp on 2 workers computes something else than one process" in told(result)
    assert "code that depends on the rank, which the script asks for in" in told(result)


CENTRED = """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 3), nn.Dropout(DROPOUT)

    def forward(self, x):
        return self.linear(self.dropout(x - x.mean(0)))

train(Centred())
"""

MASKED = """
# Only from the fourth batch on are there labels to leave out: the check of the first batch sees none.
y[60:][torch.rand(43) < 0.6] = -100
data = shoal.Dataset.from_arrays((x, y))

def loss(output, target):
    kept = target != -100
    each = nn.functional.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (each * kept).sum() / kept.sum().clamp(min=1)
"""


@pytest.mark.parametrize("dropout", ["0.0", "0.3"])
def test_a_layer_that_mixes_without_being_known_for_it_is_a_difference(verify: Verify, dropout: str) -> None:
    result = verify(CENTRED.replace("DROPOUT", dropout), "-n", "3")
    assert result.exit_code == 1, result.output
    assert "not equal: ddp on 3 workers" in told(result)
    assert "mixes the samples of a batch" in told(result)
    assert ("the layers above were at rest" in told(result)) == (dropout == "0.3")


@pytest.mark.parametrize("layers", ["nn.Dropout(0.3),", *matrix_only("", "nn.BatchNorm1d(8),")])
def test_a_masked_mean_is_caught_whatever_layers_are_beside_it(verify: Verify, layers: str) -> None:
    result = verify(
        f"{MASKED}\ntrain(nn.Sequential({layers} nn.Linear(8, 3)), loss=loss)".replace("\n", "\n        "),
        "-n",
        "3",
    )
    assert result.exit_code != 0, result.output
    assert "equal: ddp" not in told(result)
    assert "(sum, count)" in " ".join(result.output.split())


def test_a_loss_that_compares_samples_in_a_loop_of_ones_own_is_caught_beside_dropout(verify: Verify) -> None:
    result = verify(
        """
        data = shoal.Dataset.from_arrays((x, y))

        def loss(output, target):
            apart = torch.cdist(output, output) * (target[:, None] == target[None])
            return apart.max(1).values.mean()

        model = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = shoal.setup(model, optimizer, data.batch(16))
        for epoch in range(3):
            model.train()
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(inputs), target).backward()
                optimizer.step()
        """,
        "-n",
        "2",
    )
    assert result.exit_code == 1, result.output
    assert "a mean over a mask" in told(result)


def test_a_loop_of_ones_own_with_dropout_is_compared_with_dropout_at_rest(verify: Verify) -> None:
    result = verify(
        """
        model = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = shoal.setup(model, optimizer, data.batch(16))
        for inputs, target in batches:
            model.train()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        """,
        "-n",
        "3",
    )
    assert result.exit_code == 0, result.output
    assert "0 (Dropout) draws random numbers" in told(result)


def test_a_loop_of_ones_own_is_compared_too(verify: Verify) -> None:
    result = verify(
        f"""
        model = {MLP}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = shoal.setup(model, optimizer, data.batch(16))
        for epoch in range(3):
            for inputs, target in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        """,
        "-n",
        "3",
    )
    assert result.exit_code == 0, result.output
    assert "equal: ddp on 3 workers" in told(result)


def test_fewer_steps_than_asked_for_are_said(verify: Verify) -> None:
    result = verify(f"train({MLP}, batch=103)", "-n", "2")
    assert result.exit_code == 0, result.output
    assert "The script trains for 2 steps; 10 were asked for." in told(result)


@pytest.mark.parametrize("option", [("--compress", "int8"), ("--sync-every", "3")])
def test_what_is_meant_to_differ_is_refused_with_the_reason(verify: Verify, option: tuple[str, str]) -> None:
    result = verify(f"train({MLP})", "-n", "3", *option)
    assert result.exit_code == 2
    for words in (" ".join(option), "are not those of one process", "Nothing was started", "metrics.jsonl"):
        assert words in " ".join(result.stderr.split())


def test_both_sides_compute_where_they_are_told_to(verify: Verify) -> None:
    result = verify(f"train({MLP}, batch=103)", "-n", "2", "--device", "cuda:7,cpu", "--soft-placement")
    assert result.exit_code == 0, result.stderr
    assert "--soft-placement on 2 workers computes what one process does" in " ".join(result.stdout.split())


def test_a_tolerance_below_rounding_finds_rounding(verify: Verify) -> None:
    result = verify(f"train({MLP})", "-n", "3", "--tolerance", "0")
    assert result.exit_code == 1
    assert "Beyond the tolerance of 0e+00" in told(result)


def test_a_bias_that_only_rounding_moves_is_named_and_counts_as_equal(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")  # one thread on both sides would round alike
    # BatchNorm takes the bias out again, so its gradient is rounding; Adam makes steps of full length of it.
    result = verify(
        """
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        trainer = shoal.Trainer(
            model, loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.Adam(params, lr=0.05, eps=1e-10)
        )
        trainer.fit(data.batch(19), epochs=2)
        """,
        "-n",
        "3",
    )
    assert result.exit_code == 0, result.output
    assert "0.bias differs by" in told(result)
    assert "count as equal" in told(result)


def test_a_script_that_never_trains_is_told_so(verify: Verify) -> None:
    result = verify("print('no training here')", "-n", "2")
    assert result.exit_code == 2
    assert "neither calls shoal nor forms a process group" in " ".join(result.stderr.split())
    assert "no training here" not in result.output


def test_a_script_that_fails_shows_its_own_error_once(verify: Verify) -> None:
    result = verify("raise ValueError('mine')", "-n", "2")
    assert result.exit_code == 1
    assert result.stderr.count("ValueError: mine") == 1
    assert "equal" not in result.stdout


def test_a_script_that_leaves_with_a_code_gives_that_code(verify: Verify) -> None:
    assert verify("raise SystemExit(7)", "-n", "2").exit_code == 7


def test_arguments_behind_the_dashes_reach_the_script(verify: Verify) -> None:
    result = verify("import sys; raise SystemExit(len(sys.argv))", "-n", "2", "--", "--lr", "0.1", "-x")
    assert result.exit_code == 4


def test_a_script_that_only_verifys_cast_breaks_is_compared_in_float32_and_not_blamed(verify: Verify) -> None:
    result = verify(
        """
        class Rotated(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(8, 3)

            def forward(self, x):
                return self.inner(x) @ torch.eye(3, dtype=torch.float32)

        train(Rotated())
        """,
        "-n",
        "3",
    )
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "The script fails in float64, to which verify casts its model and data" in said
    assert "equal: ddp on 3 workers computes what one process does, up to rounding" in said
    assert "the error above is its own" not in result.output


def test_a_script_compared_in_float32_is_compared_with_whole_batches_too(verify: Verify) -> None:
    result = verify(
        """
        class Centred(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.drop = nn.Linear(8, 3), nn.Dropout(0.2)

            def forward(self, x):
                return self.drop(self.inner(x - x.mean(0))) @ torch.eye(3, dtype=torch.float32)

        train(Centred())
        """,
        "-n",
        "3",
    )
    assert result.exit_code == 1, result.output
    assert "with whole batches, though the layers above were at rest" in " ".join(result.stdout.split())
    assert "float64  " not in result.stdout


def test_a_backward_that_depends_on_the_slice_is_named_as_the_cause(verify: Verify) -> None:
    result = verify(
        """
        class Normalised(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, gradient):
                return gradient / gradient.norm()

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 3)

            def forward(self, x):
                return self.second(Normalised.apply(self.first(x).tanh()))

        train(Model())
        """,
        "-n",
        "2",
    )
    assert result.exit_code == 1, result.output
    assert "The cause is likely first.weight (its gradient), which mixes the samples of a batch" in told(
        result
    )


def test_gradients_changed_in_a_loop_are_named_as_the_cause(verify: Verify) -> None:
    result = verify(
        f"""
        model = {MLP}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = shoal.setup(model, optimizer, data.batch(16))
        for inputs, target in batches:
            optimizer.zero_grad()
            output = model(inputs)
            output.register_hook(lambda gradient: gradient / gradient.norm())
            nn.functional.cross_entropy(output, target).backward()
            optimizer.step()
        """,
        "-n",
        "2",
    )
    assert result.exit_code == 1, result.output
    assert (
        "gradients that are clipped or changed by arithmetic of the script's own before optimizer.step() sums them"
        in told(result)
    )
