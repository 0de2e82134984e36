from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from shoal.cluster.supervisor.display import (
    DRAW_EVERY_S,
    EPOCH_LINE_EVERY_S,
    LINE_EVERY_S,
    Display,
    LiveDisplay,
    Quiet,
    binary,
    open_display,
    table,
)
from shoal.runtime.transport.messages.supervisor import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def at(step: int, *, rank: int = 0, epoch: int = 1, phase: str = "fit", call: int = 1) -> Progress:
    return Progress(rank, call, phase, epoch, 2, step, 800, 0.5, {}, step, 10.0, None)


def plain() -> tuple[Display, Clock, io.BytesIO]:
    clock, err = Clock(), io.BytesIO()
    return Display(io.BytesIO(), err, clock=clock), clock, err


def steps_shown(err: io.BytesIO) -> list[int]:
    return [int(step) for step in re.findall(rb"step (\d+)/", err.getvalue())]


def test_plain_lines_come_at_beginnings_ends_and_every_few_seconds() -> None:
    display, clock, err = plain()
    display.update(at(1))
    display.update(at(2))
    clock.now += LINE_EVERY_S
    display.update(at(50))
    display.update(at(51))
    display.update(at(51, epoch=2))  # an epoch of no length
    clock.now += EPOCH_LINE_EVERY_S
    display.update(at(52, epoch=3))
    display.update(at(53, epoch=3, phase="validate"))
    display.update(at(800, epoch=3, phase="validate"))
    display.update(at(800, epoch=3, phase="validate"))
    assert steps_shown(err) == [1, 50, 52, 53, 800]


def test_the_last_state_is_shown_once_at_the_end() -> None:
    display, _, err = plain()
    display.update(at(1))
    display.update(at(7))
    display.update(at(6, rank=1))
    display.close()
    assert steps_shown(err) == [1, 7]


def test_quiet_shows_the_scripts_output_alone() -> None:
    out, err = io.BytesIO(), io.BytesIO()
    display = open_display(out, err, quiet=True)
    assert isinstance(display, Quiet)
    display.update(at(1))
    display.out(b"hello\n")
    display.close()
    assert (out.getvalue(), err.getvalue()) == (b"hello\n", b"")


class Screen(io.RawIOBase):
    """A terminal that understands just what a LiveDisplay writes: text, colours, and going up to clear."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, data: bytes) -> int:  # type: ignore[override]
        text = re.sub(r"\x1b\[[\d;]*m", "", data.decode())
        if cleared := re.match(r"\x1b\[(\d+)F\x1b\[J", text):
            del self.lines[len(self.lines) - int(cleared[1]) :]
            text = text[cleared.end() :]
        assert "\x1b" not in text
        assert not text or text.endswith("\n")
        self.lines += text.splitlines()
        return len(data)


def live() -> tuple[LiveDisplay, Clock, Screen]:
    clock, screen = Clock(), Screen()
    return LiveDisplay(screen, screen, clock=clock), clock, screen  # type: ignore[arg-type]


def test_a_table_stays_at_the_foot_and_output_goes_above_it() -> None:
    display, clock, screen = live()
    display.update(at(1))
    height = len(screen.lines)
    for number in range(3):
        clock.now += DRAW_EVERY_S
        display.out(b"line %d\n" % number)
    assert screen.lines[:3] == ["line 0", "line 1", "line 2"]
    assert len(screen.lines) == 3 + height
    assert any("1/800" in line for line in screen.lines[3:])


def test_a_table_is_drawn_at_most_so_often_and_misses_nothing() -> None:
    display, clock, screen = live()
    display.update(at(1))
    display.out(b"printed\n")
    display.update(at(2))
    assert not any("2/800" in line for line in screen.lines)
    wait_s = display.tick()
    assert wait_s is not None
    clock.now += wait_s
    assert display.tick() is None
    assert screen.lines[0] == "printed"
    assert any("2/800" in line for line in screen.lines)


def test_a_table_has_a_line_per_worker_where_there_are_several() -> None:
    display, clock, screen = live()
    display.update(at(5))
    assert not any("worker" in line for line in screen.lines)
    clock.now += DRAW_EVERY_S
    display.update(at(4, rank=1))
    assert [line.split()[:2] for line in screen.lines if "worker" in line] == [
        ["worker", "0"],
        ["worker", "1"],
    ]


def test_a_call_that_is_over_stays_above_the_table_and_one_without_epochs_shows_none() -> None:
    display, clock, screen = live()
    display.update(at(1))
    display.update(at(1, rank=1))
    display.update(at(800))
    clock.now += DRAW_EVERY_S
    display.update(at(5, epoch=0, phase="evaluate", call=2))
    clock.now += DRAW_EVERY_S
    display.update(at(5, rank=1, epoch=0, phase="evaluate", call=2))
    assert screen.lines[0].startswith("fit  epoch 1/2  step 800/800")
    assert [line.split()[:2] for line in screen.lines if "evaluate" in line] == [["evaluate", "5/800"]]
    assert [line.split() for line in screen.lines if "worker 0" in line] == [["worker", "0", "5"]]


def test_the_last_table_stays_when_the_display_is_closed() -> None:
    display, _, screen = live()
    display.update(at(1))
    display.update(at(800))
    display.close()
    display.close()
    assert sum("800/800" in line for line in screen.lines) == 1


def test_in_a_process_of_its_own_prints_go_above_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    display, clock, screen = live()
    display.update(at(1))
    clock.now += DRAW_EVERY_S
    before = sys.stdout
    with display.owning_prints():
        print("first", "line")
        print("unfinished", end="")
    assert sys.stdout is before
    display.close()
    assert screen.lines[:2] == ["first line", "unfinished"]


def test_a_reader_that_went_away_does_not_end_a_job() -> None:
    class Gone(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError

    display = Display(Gone(), io.BytesIO())
    display.out(b"nobody reads this\n")


def test_streams_that_only_take_text_get_text() -> None:
    text = io.StringIO()
    binary(text).write("grüße\n".encode())
    assert text.getvalue() == "grüße\n"


def ended(epoch: int, *, num_epochs: int = 3) -> Progress:
    metrics = {"loss": 0.25, "accuracy": 0.5, "val_loss": 0.75}
    return Progress(0, 1, "fit", epoch, num_epochs, 100 * epoch, 300, 0.5, metrics, 1, 1.0, 5000.0, epoch)


@pytest.mark.parametrize("make", [plain, live])
def test_every_epoch_has_one_line_that_stays(make: Callable[[], tuple[Display, Clock, Any]]) -> None:
    display, clock, err = make()
    for epoch in (1, 2, 3):
        display.update(ended(epoch))
        clock.now += DRAW_EVERY_S
        display.update(ended(epoch))
    display.close()
    lines = err.lines if isinstance(err, Screen) else err.getvalue().decode().splitlines()
    assert [line for line in lines if "done" in line] == [
        f"epoch {epoch}/3 done  mean loss 0.2500  accuracy 0.5000  val_loss 0.7500" for epoch in (1, 2, 3)
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_table_keeps_epoch_step_loss_and_eta_whole(width: int) -> None:
    metrics = {f"a_metric_with_a_long_name_{number}": 0.5 for number in range(6)}
    progress = {
        rank: Progress(rank, 1, "fit", 12, 100, 123456, 1234567, 0.43121, metrics, 1, 71_300.0, 93_000.0, 11)
        for rank in range(12)
    }
    console = Console(file=io.StringIO(), width=width - 1)
    with console.capture() as captured:
        console.print(table(progress, max_workers=3, width=width - 1))
    drawn = captured.get()
    assert all(text in drawn for text in ("12/100", "123456/1234567", "0.4312", "25 h 50 min", "worker 2"))
    assert "…" not in drawn


def test_a_start_that_takes_long_is_explained_once_and_a_short_one_is_not() -> None:
    display, clock, err = plain()
    display.expect("starting job-1: importing torch")
    wait_s = display.tick()
    assert wait_s is not None
    clock.now += wait_s
    assert display.tick() is None
    assert display.tick() is None
    assert err.getvalue() == b"starting job-1: importing torch\n"
    display.expect("again")
    display.out(b"the script speaks\n")
    clock.now += 10
    display.tick()
    assert b"again" not in err.getvalue()
