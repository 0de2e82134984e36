from __future__ import annotations

import pytest

from shoal.cluster.supervisor import progress_text
from shoal.runtime.transport.messages.supervisor import Progress


@pytest.mark.parametrize(
    ("per_s", "text"),
    [
        (0, "0"),
        (0.5, "0.50"),
        (7.25, "7.25"),
        (71.34, "71.3"),
        (999, "999"),
        (999.9, "1.00 k"),
        (71_340, "71.3 k"),
        (2.5e6, "2.50 M"),
        (3e9, "3.00 G"),
    ],
)
def test_rates_have_three_digits(per_s: float, text: str) -> None:
    assert progress_text.rate(per_s) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0.4, "0 s"),
        (9.2, "9 s"),
        (59.6, "1 min 0 s"),
        (250, "4 min 10 s"),
        (12_000, "3 h 20 min"),
    ],
)
def test_durations_are_rounded_as_people_do(seconds: float, text: str) -> None:
    assert progress_text.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.43121, "0.4312"), (0, "0.0000"), (12.5, "12.5000"), (1e-5, "1.000e-05"), (float("nan"), "nan")],
)
def test_values_show_what_matters(number: float, text: str) -> None:
    assert progress_text.value(number) == text


def test_a_line_says_where_a_job_is() -> None:
    progress = Progress(
        0, 1, "fit", 2, 2, 200, 800, 0.43121, {"loss": 0.5, "accuracy": 0.8}, 1000, 71_340.0, 9.1, 1
    )
    assert (
        progress_text.line(progress) == "fit  epoch 2/2  step 200/800  loss 0.4312  71.3 k samples/s  ETA 9 s"
    )
    assert progress_text.epoch_line(progress) == "epoch 1/2 done  mean loss 0.5000  accuracy 0.8000"


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(1, ""), (4.0, "instead of 4.00 MB, 4 times less"), (0.8, "instead of 4.00 MB, 1.25 times as much")],
)
def test_bytes_of_a_step_are_more_or_less_than_the_gradients(ratio: float, said: str) -> None:
    facts = {"raw_bytes_per_step": 4e6, "sent_bytes_per_step": 4e6 / ratio, "ratio": ratio}
    told = progress_text.exchanged(
        facts | {"compress": "none", "exchange": "shm", "loss_curve": "metrics.jsonl"}
    )
    assert said in told
    assert ("instead" in told) == (ratio != 1)


def test_a_line_leaves_out_what_nobody_knows() -> None:
    assert (
        progress_text.line(Progress(0, 2, "evaluate", 0, None, 5, None, None, {}, 0, 0.0, None))
        == "evaluate  step 5"
    )


def test_on_a_narrow_terminal_values_stay_whole_and_sentences_break_between_words() -> None:
    epoch = "epoch 1/3 done  mean loss 0.4598  accuracy 0.8309  val_loss 0.2541  val_accuracy 0.9530"
    assert progress_text.wrapped(epoch, 80).splitlines() == [
        "epoch 1/3 done  mean loss 0.4598  accuracy 0.8309  val_loss 0.2541",
        "  val_accuracy 0.9530",
    ]
    sentence = "starting train-2: importing torch, once for all workers"
    assert progress_text.wrapped(sentence, 30).split() == sentence.split()
    assert max(map(len, progress_text.wrapped(sentence, 30).splitlines())) <= 30
    assert progress_text.wrapped('  File "a.py", line 3\nshort', 10) == '  File "a.py", line 3\nshort'
