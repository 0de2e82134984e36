"""Bad tables in jobs of several workers: everybody stops, in words, or goes on without the bad rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launched import Launched

from shoal.errors import BadSample, FileDamaged, FileLost, TooManySkipped

SCRIPT = """
import pathlib, sys
import torch, shoal, shoal.callbacks

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, row):
        return self.line(row["x"].unsqueeze(1)).squeeze(1)

class Remove(shoal.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        if shoal.rank() == 0 and "remove" in sys.argv:
            pathlib.Path("b.csv").unlink(missing_ok=True)

options = {"on_error": "skip", "max_skips": 3} if "skip" in sys.argv else {}
data = shoal.Dataset.from_csv("*.csv", label="y", schema={"x": "float32", "y": "float32"}, **options)
model = Line()
trainer = shoal.Trainer(
    model, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[Remove()]
)
history = trainer.fit(data.batch(20), epochs=1)
print("samples", trainer.position.samples)
"""


def rows(*bad: int, begin: int = 0, end: int = 100) -> str:
    said = [f"{'?' if row in bad else row / 100},{row / 50}" for row in range(begin, end)]
    return "x,y\n" + "".join(f"{line}\n" for line in said)


def test_a_bad_row_stops_the_job_with_its_address(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(rows(67))
    launched = launch_script(SCRIPT, workers=2)
    assert isinstance(launched.error, BadSample)
    assert str(launched.error).startswith("a.csv, row 68, line 69, column 'x': '?' is no float32")
    assert (launched.error.row, launched.error.column, launched.exit_code) == (68, "x", 3)


def test_bad_rows_are_left_out_and_written_down(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(rows(3, 67, 68))
    launched = launch_script(SCRIPT, workers=2, args=["skip"])
    assert launched.exit_code == 0, launched.error
    skipped = [event for event in launched.events if event["event"] == "sample skipped"]
    assert sorted(event["line"] for event in skipped) == [5, 69, 70]
    assert {(event["where"], event["column"]) for event in skipped} == {("a.csv", "x")}


def test_more_bad_rows_than_allowed_stop_the_job(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(rows(*range(30, 50)))
    launched = launch_script(SCRIPT, workers=2, args=["skip"])
    assert isinstance(launched.error, TooManySkipped)
    assert "max_skips=3 allows no more" in str(launched.error)


def test_a_file_that_disappears_in_mid_epoch_stops_the_job(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(rows())
    (tmp_path / "b.csv").write_text(rows())
    launched = launch_script(SCRIPT, workers=2, args=["remove"])
    assert isinstance(launched.error, FileLost)
    assert str(launched.error).startswith(
        "the file b.csv cannot be read any further: it is not there any more."
    )


def test_a_damaged_file_stops_the_job_before_the_first_step(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(rows() + '"1,2\n')
    launched = launch_script(SCRIPT, workers=2)
    assert isinstance(launched.error, FileDamaged)
    assert "the file a.csv is damaged: the quote that opens in line 102 is never closed." in str(
        launched.error
    )
