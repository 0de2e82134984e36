from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.planner import measuring
from shoal.observe.planner.cost_model import (
    SHARDS,
    SUMS,
    TERMS,
    ClusterShape,
    LinkSpeed,
    PlanCandidate,
    TensorCost,
    Workload,
    all_reduce_s,
    predict,
)
from shoal.observe.planner.measuring import (
    Calibration,
    LinkTimes,
    MeasuredRun,
    calibrate,
    codecs_of,
    disturbed,
    layers_of,
    links_of,
    shards_of,
    with_links,
    workload_of,
)

GRAPH = {
    "layers": [
        {"name": "rows", "kind": "Embedding", "shape": "N×4×8", "parameters": 8000, "parameter_bytes": 32000},
        {"name": "conv", "kind": "Conv2d", "shape": "N×16×5×5", "parameters": 144, "parameter_bytes": 576},
        {
            "name": "add",
            "kind": "add",
            "shape": "N×8",
            "parameters": 0,
            "parameter_bytes": 0,
            "is_join": True,
        },
        {"name": "head", "kind": "Linear", "shape": "N×8", "parameters": 264, "parameter_bytes": 1056},
    ]
}
for _layer in GRAPH["layers"]:
    _layer["output_bytes"] = 4096


def measured(workers: int, threads: int, sent: float = 0.0, **terms: float) -> MeasuredRun:
    found = dict.fromkeys(TERMS, 0.0) | terms
    return MeasuredRun(
        step_s=sum(found.values()),
        terms=found,
        batch=64,
        workers=workers,
        threads=threads,
        sent_bytes=sent,
        peak_bytes=300 << 20,
        cpu_share=1.0,
        graph=GRAPH,
    )


seconds = st.floats(1e-4, 1.0)


@given(
    seconds,
    seconds,
    seconds | st.none(),
    seconds,
    seconds,
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.floats(100.0, 1e7),
)
def test_a_calibration_predicts_itself(
    alone_s: float,
    narrow_s: float,
    parts_s: float | None,
    slice_s: float,
    apply_s: float,
    read_s: float,
    exposed_s: float,
    sent: float,
) -> None:
    """However odd the measurements: what they are explained by gives them again, unless more was hidden than there was to hide behind."""
    cluster = ClusterShape(per_host=2, cores=2, exchanges={name: LinkSpeed(1e-4, 1e9) for name in SUMS})
    several = measured(
        2, 1, sent, compute=slice_s, apply=apply_s, read=read_s, communication=exposed_s, other=0.001
    )
    alone = measured(1, 2, compute=alone_s, apply=apply_s)
    calibration = Calibration(
        alone=alone,
        narrow=measured(1, 1, compute=narrow_s),
        in_parts=measured(1, 1, compute=parts_s) if parts_s is not None else None,
        several=several,
    )
    workload = workload_of(calibration, cluster)
    single = predict(PlanCandidate(workers=1, strategy="single"), workload, cluster)
    assert single.step_s == pytest.approx(alone.step_s)
    ddp = predict(PlanCandidate(workers=2, strategy="ddp"), workload, cluster)
    for term in ("compute", "apply", "read", "other"):
        assert ddp.terms[term] == pytest.approx(several.terms[term])
    sum_s = (exposed_s - workload.waiting_s) / (1 - workload.overlap)
    is_hidden = workload.overlap * sum_s <= slice_s / 2 and 0.06 * sum_s < exposed_s
    if is_hidden and workload.overlap < 0.9:
        assert ddp.terms["communication"] == pytest.approx(exposed_s, rel=1e-6, abs=1e-9)


def test_what_neighbours_cost_is_told_from_what_a_small_slice_does_not_save() -> None:
    """A slice that took as long as half a batch and a half more: by the batch in parts, its neighbour's doing."""
    cluster = ClusterShape(per_host=2, cores=2, exchanges={name: LinkSpeed(1e-6, 1e12) for name in SUMS})
    base = Calibration(
        alone=measured(1, 2, compute=0.06),
        narrow=measured(1, 1, compute=0.1),
        several=measured(2, 1, compute=0.075),
    )
    pipeline = PlanCandidate(workers=2, strategy="pp")
    without = predict(pipeline, workload_of(base, cluster), cluster)
    parted = replace(base, in_parts=measured(1, 1, compute=0.1))
    with_parts = predict(pipeline, workload_of(parted, cluster), cluster)
    assert workload_of(parted, cluster).fixed_s == 0
    assert workload_of(parted, cluster).crowding == pytest.approx(1.5)
    # Four micro-batches each paid what the neighbour cost, and pay it once.
    assert with_parts.step_s < 0.75 * without.step_s


def test_sparse_rows_are_told_from_dense_gradients_by_what_was_sent() -> None:
    cluster = ClusterShape(per_host=2, cores=2)
    base = Calibration(alone=measured(1, 2, compute=0.1), narrow=measured(1, 1, compute=0.1))
    sparse = workload_of(replace(base, several=measured(2, 1, 576 + 1056 + 500.0, compute=0.05)), cluster)
    assert (sparse.gradient_bytes, sparse.row_bytes) == (576 + 1056, 1000)
    dense = workload_of(replace(base, several=measured(2, 1, 33632.0, compute=0.05)), cluster)
    assert (dense.gradient_bytes, dense.row_bytes) == (33632, 0)


def test_layers_have_the_features_of_their_outputs() -> None:
    assert [(layer.name, layer.features) for layer in layers_of(GRAPH)] == [
        ("rows", 8),
        ("conv", 16),
        ("head", 8),
    ]
    assert layers_of({}) == ()


def test_links_and_compressors_from_their_times() -> None:
    by_size = {4096: {"ring": 2e-4, "shm": 2e-5}, 1 << 20: {"ring": 2e-3, "shm": 2e-4}}
    links = links_of(by_size, 2)
    assert links["shm"].bytes_per_s > links["ring"].bytes_per_s
    assert links["ring"].latency_s == pytest.approx(1e-4)
    small, large = 64 << 10, 4 << 20
    codecs = codecs_of(
        {
            "none": {small: 1e-4, large: 4e-3},
            "bf16": {small: 2e-4, large: 6e-3},
            "int8": {small: 1e-5, large: 1e-3},
        },
        2,
    )
    assert codecs["bf16"].latency_s + large / codecs["bf16"].bytes_per_s == pytest.approx(6e-3 - 2e-3)
    assert codecs["bf16"].latency_s + small / codecs["bf16"].bytes_per_s == pytest.approx(2e-4 - 0.5e-4)
    # Quicker than the plain sum: no cost, and a bandwidth that JSON can hold.
    assert codecs["int8"].latency_s + large / codecs["int8"].bytes_per_s < 1e-9
    assert math.isfinite(codecs["int8"].bytes_per_s)


def test_fsdp_by_its_bytes_and_by_its_parameters() -> None:
    def line(num_bytes: int, parameters: int) -> dict[str, float]:
        sharded_s = 2e-3 + parameters * 1e-4 + num_bytes / 1e9 * 1.5
        of_sizes = {"bytes": num_bytes, "parameters": parameters, "plain_s": 1e-3}
        return of_sizes | {"sharded_s": 1e-3 + sharded_s, "sharded_apply_s": 1e-4 + parameters * 2e-5}

    unit, costs = shards_of([line(64, 8), line(64, 64), line(4 << 20, 8)], 2)
    assert costs == pytest.approx((1e-4, 2e-5))
    cluster = ClusterShape(per_host=2, exchanges={SHARDS: unit})
    assert all_reduce_s(SHARDS, 4 << 20, 2, cluster) == pytest.approx(2e-3 + 1.5 * (4 << 20) / 1e9, rel=0.01)


def test_where_fsdp_does_not_run_a_gather_costs_what_a_sum_does() -> None:
    by_size = {4096: {"native": 2e-4}, 1 << 20: {"native": 2e-3}}
    cluster = with_links(ClusterShape(per_host=2), LinkTimes(by_size, {}, {}, [], []), 2)
    assert cluster.exchanges[SHARDS] == cluster.exchanges["native"]
    assert cluster.tensors == TensorCost()


def test_rows_by_the_bytes_that_others_send() -> None:
    by_bytes = {4608: 1e-3, 4608 + (1 << 20): 3e-3}
    rowy = Workload(batch=8, alone={}, compute_s=0.0, row_bytes=3 * (4608 + (1 << 20)))
    cluster = with_links(ClusterShape(per_host=4, cores=4), LinkTimes({}, {}, {"auto": by_bytes}, [], []), 3)
    ddp = PlanCandidate(workers=3, strategy="ddp")
    took_s = predict(ddp, rowy, cluster).step_s - predict(ddp, replace(rowy, row_bytes=0), cluster).step_s
    assert took_s == pytest.approx(3e-3)


def test_a_server_by_its_bytes_and_by_its_rows() -> None:
    """What was measured of a server is predicted of it again, for as many workers and for more."""
    lines = [
        {"bytes": 64, "row_bytes": 0, "served_s": 2e-3, "whole_s": 3e-3},
        {"bytes": 64 + (4 << 20), "row_bytes": 0, "served_s": 8e-3, "whole_s": 9e-3},
        {"bytes": 64, "row_bytes": 1 << 20, "served_s": 5e-3, "whole_s": 6e-3},
    ]
    cluster = with_links(ClusterShape(per_host=4, cores=4), LinkTimes({}, {}, {}, [], lines), 2)

    def served_s(workers: int, dense: int, rows: int) -> float:
        work = Workload(batch=8, alone={}, compute_s=0.0, gradient_bytes=dense, row_bytes=workers * rows)
        return predict(PlanCandidate(workers=workers, strategy="ps", servers=1), work, cluster).step_s

    assert served_s(2, 4 << 20, 0) == pytest.approx(8e-3)
    assert served_s(2, 0, 1 << 20) == pytest.approx(5e-3)
    assert served_s(4, 4 << 20, 0) == pytest.approx(2e-3 + 6e-3 * 5 / 3)


def test_a_calibration_with_rows_predicts_itself() -> None:
    """Nothing overlaps, so all of the measured communication is that of the sums."""
    cluster = ClusterShape(per_host=2, cores=2, exchanges={n: LinkSpeed(1e-5, 1e6) for n in SUMS})
    several = measured(2, 1, 576 + 1056 + 500.0, compute=0.05, communication=0.1)
    base = Calibration(alone=measured(1, 2, compute=0.1), narrow=measured(1, 1, compute=0.1), several=several)
    workload = workload_of(base, cluster)
    assert workload.row_bytes == 1000
    ddp = predict(PlanCandidate(workers=2, strategy="ddp"), workload, cluster)
    assert ddp.terms["communication"] == pytest.approx(several.terms["communication"])


@pytest.mark.parametrize(("narrow_s", "runs"), [(0.01, 2), (0.9, 1)])
def test_one_worker_that_was_far_slower_with_more_threads_is_measured_again(
    narrow_s: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "available_cores", lambda: 2)
    first = iter([1.0, 0.02, 5.0])
    asked = []

    class Recorded:
        def run(self, name: str, *_: object, **__: object) -> MeasuredRun:
            asked.append(name)
            return measured(1, 2, compute=next(first) if name == "n1" else narrow_s)

    found = calibrate(Recorded(), 2, with_parts=False)  # type: ignore[arg-type]  # what calibrate asks of ScriptRuns
    assert asked.count("n1") == runs
    assert found.alone.step_s == (0.02 if runs == 2 else 1.0)


def test_a_machine_that_others_used_is_named() -> None:
    assert disturbed([1.0, 0.9]) == ""
    assert "as little as 22% of a core" in disturbed([1.0, 0.22])
