from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.collectives.gradients import BETWEEN_HOSTS_BYTES, Item, lay_out
from shoal.config import parallel_options
from shoal.config.choices import COMPRESSORS, EXCHANGES, CompressorChoice, PushCodec
from shoal.config.parallel_options import ParallelOptions
from shoal.observe.planner.cost_model import (
    SUMS,
    ClusterShape,
    LinkSpeed,
    ModelLayer,
    PlanCandidate,
    Workload,
    all_reduce_s,
    best_by_workers,
    compressed,
    enumerate_candidates,
    fitted,
    learned,
    memory_of,
    predict,
    refusal,
    served_bytes,
    sift,
    stage_imbalance,
    stops_paying,
    why,
)
from shoal.ps.codecs import Compression

LINKS = {name: LinkSpeed(50e-6, 2e9) for name in SUMS}
LAYERS = tuple(
    ModelLayer(
        name=f"layers.{number}",
        kind="Linear",
        parameters=256 * 256 + 256,
        parameter_bytes=4 * (256 * 256 + 256),
        output_bytes=4 * 256 * 64,
        features=256,
    )
    for number in range(4)
)
ALONE = {"compute": 0.08, "apply": 0.004, "read": 0.002, "other": 0.001}
WORKLOAD = Workload(
    batch=64,
    alone=ALONE,
    compute_s=0.08,
    fixed_s=0.002,
    apply_s=0.004,
    read_s=0.002,
    other_s=0.001,
    overlap=0.5,
    parameter_bytes=sum(layer.parameter_bytes for layer in LAYERS),
    gradient_bytes=sum(layer.parameter_bytes for layer in LAYERS),
    layers=LAYERS,
    peak_bytes=400 << 20,
)

clusters = st.builds(
    ClusterShape,
    hosts=st.integers(1, 8),
    per_host=st.integers(1, 8),
    cores=st.integers(1, 16),
    between=st.builds(LinkSpeed, st.floats(1e-6, 1e-2), st.floats(1e6, 1e11)),
    exchanges=st.just(LINKS),
)


def candidates(cluster: ClusterShape) -> list[PlanCandidate]:
    most = cluster.hosts * cluster.per_host
    return [
        each
        for each in enumerate_candidates(cluster, counts=[most])
        if refusal(each, WORKLOAD, cluster) is None
    ]


@given(clusters, st.floats(1.0, 100.0), st.data())
def test_more_bandwidth_or_less_latency_never_makes_a_step_longer(
    cluster: ClusterShape, factor: float, data: st.DataObject
) -> None:
    able = candidates(cluster)
    assume(able)
    candidate = data.draw(st.sampled_from(able))
    faster = replace(
        cluster, between=LinkSpeed(cluster.between.latency_s / factor, cluster.between.bytes_per_s * factor)
    )
    slow, fast = (predict(candidate, WORKLOAD, each).step_s for each in (cluster, faster))
    assert fast <= slow * (1 + 1e-9)


@given(clusters, st.floats(0.1, 10.0))
def test_one_worker_is_what_was_measured_at_the_speed_of_its_device(
    cluster: ClusterShape, speed: float
) -> None:
    alone = predict(PlanCandidate(workers=1, strategy="single"), WORKLOAD, replace(cluster, speed=speed))
    assert alone.step_s == pytest.approx(sum(ALONE.values()) / speed)
    assert alone.memory_bytes == WORKLOAD.peak_bytes


@given(
    st.sampled_from([*(set(SUMS) - {"shm"}), "hierarchical"]),
    st.integers(1, 8),
    st.integers(1, 7),
    st.floats(1e3, 1e9),
)
def test_more_hosts_never_make_a_sum_shorter(name: str, per_host: int, hosts: int, num_bytes: float) -> None:
    cluster = ClusterShape(hosts=hosts + 1, per_host=per_host, exchanges=LINKS)
    fewer = (
        all_reduce_s(name, num_bytes, per_host * hosts, cluster) if name != "hierarchical" or hosts > 1 else 0
    )
    assert all_reduce_s(name, num_bytes, per_host * (hosts + 1), cluster) >= fewer * (1 - 1e-9)


@given(clusters, st.data())
def test_terms_are_never_negative_and_memory_never_grows_by_cutting(
    cluster: ClusterShape, data: st.DataObject
) -> None:
    able = candidates(cluster)
    assume(able)
    candidate = data.draw(st.sampled_from(able))
    found = predict(candidate, WORKLOAD, cluster)
    assert all(seconds >= 0 for seconds in found.terms.values())
    assert found.step_s > 0
    if candidate.family in ("fsdp", "tp", "pp"):
        whole = PlanCandidate(workers=candidate.workers, strategy="ddp")
        assert memory_of(candidate, WORKLOAD) <= memory_of(whole, WORKLOAD)


@given(st.sampled_from(sorted(SUMS)), st.integers(2, 8), st.floats(1e-6, 1e-3), st.floats(1e8, 1e11))
def test_latency_and_bandwidth_are_found_again_in_the_times_they_make(
    name: str, workers: int, latency_s: float, bytes_per_s: float
) -> None:
    cost = SUMS[name]
    times = {
        size: cost.rounds(workers) * latency_s + cost.sent(workers) * size / bytes_per_s
        for size in (1, 1 << 20, 1 << 24)
    }
    link = fitted(name, times, workers)
    assert link.latency_s == pytest.approx(latency_s, rel=0.05, abs=1e-7)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_has_a_cost(name: str) -> None:
    cluster = ClusterShape(per_host=4, cores=4, exchanges=LINKS)
    assert 0 < all_reduce_s(name, 1e6, 4, cluster, hosts=2 if name == "hierarchical" else 1) < math.inf


@pytest.mark.parametrize("choice", [choice for choice in COMPRESSORS.values() if choice.name != "none"])
def test_every_compressor_sends_fewer_bytes(choice: CompressorChoice) -> None:
    assert compressed(choice.form, 1e6, 2, LAYERS) < 1e6
    assert (served_bytes(choice.form, 1e6, 1e6) < 4e6) == (choice.codec is not None)


def test_topk_of_servers_pushes_a_part_of_dense_gradients_and_whole_rows() -> None:
    assert served_bytes("topk:ratio=0.1", 1e6, 0.0) == pytest.approx(1.2e6)
    assert served_bytes("topk:ratio=0.1", 0.0, 1e6) == pytest.approx(2e6)


def test_a_new_compressor_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    half = CompressorChoice(
        "half",
        "half the bytes",
        "shoal.collectives.compression.casts:bf16",
        sum_bytes=lambda gradients, settings: gradients.num_bytes / 2,
        codec=PushCodec(implementation="shoal.ps.codecs:bf16", share=lambda settings: 0.5),
    )
    monkeypatch.setitem(COMPRESSORS, "half", half)
    assert compressed("half", 1e6, 2, LAYERS) == 5e5
    assert served_bytes("half", 1e6, 0.0) == 1.5e6
    for strategy in ("ddp", "ps", "ps:async"):
        parallel_options.check(
            ParallelOptions(compress="half"), strategy=strategy, num_workers=2, num_hosts=1
        )
    assert any(each.compress == "half" for each in enumerate_candidates(ClusterShape(), counts=[2]))
    assert Compression("half").encoded(np.ones((2, 4), np.float32)).nbytes == 16


def test_a_slow_link_asks_for_the_exchange_that_sends_least_over_it() -> None:
    cluster = ClusterShape(hosts=2, per_host=4, cores=8, between=LinkSpeed(1e-4, 1e7), exchanges=LINKS)
    found, _ = sift(enumerate_candidates(cluster, counts=[8]), WORKLOAD, cluster)
    exact = [each for each in found if each.candidate.family == "ddp" and each.candidate.is_exact]
    assert exact[0].candidate.exchange in ("auto", "hierarchical")
    inexact = [each for each in found if each.candidate.family == "ddp" and not each.candidate.is_exact]
    assert inexact[0].step_s < exact[0].step_s


@pytest.mark.parametrize(
    ("candidate", "changed", "reason"),
    [
        (
            PlanCandidate(workers=8, strategy="ddp"),
            {"batch": 4},
            "a batch of 4 samples cannot be cut over 8 workers",
        ),
        (PlanCandidate(workers=8, strategy="ddp", exchange="shm"), {}, "they are on 2 hosts"),
        (PlanCandidate(workers=8, strategy="tp"), {"layers": ()}, "a loop of its own"),
        (
            PlanCandidate(workers=8, strategy="tp"),
            {"layers": (ModelLayer(name="a", kind="Linear", parameters=21, features=3),)},
            "no Linear layer of the model has features that divide by 8",
        ),
        (PlanCandidate(workers=8, strategy="pp"), {}, "8 stages are more than the 4 layers"),
        (PlanCandidate(workers=4, strategy="pp"), {"batch": 7}, "cannot be cut into 8 micro-batches"),
        (
            PlanCandidate(workers=8, strategy="fsdp"),
            {"row_bytes": 8, "layers": (ModelLayer(name="rows", kind="Embedding"),)},
            "'rows' has sparse gradients",
        ),
        (
            PlanCandidate(workers=8, strategy="ddp"),
            {"peak_bytes": 1 << 30},
            "by the shapes of its layers, and there are 2 GiB",
        ),
        (
            PlanCandidate(workers=8, strategy="fsdp", compress="int8"),
            {},
            "--compress int8 makes the gradients of ddp",
        ),
    ],
)
def test_what_cannot_run_is_dropped_with_its_reason(
    candidate: PlanCandidate, changed: dict[str, object], reason: str
) -> None:
    cluster = ClusterShape(hosts=2, per_host=4, cores=4, memory_bytes=2 << 30, exchanges=LINKS)
    assert reason in (refusal(candidate, replace(WORKLOAD, **changed), cluster) or "nothing")


def test_every_product_of_axes_is_looked_at_once() -> None:
    names = [
        (each.strategy, each.schedule)
        for each in enumerate_candidates(ClusterShape(per_host=8), counts=[8])
        if each.axes.dp < each.workers and not each.servers
    ]
    assert len(names) == len(set(names))
    assert {"fsdp", "tp", "pp", "fsdp=2,tp=4", "pp=2,dp=2,tp=2", "dp=4,fsdp=2"} <= {name for name, _ in names}


def test_stages_are_as_even_as_their_layers_allow() -> None:
    assert stage_imbalance(LAYERS, 2) == pytest.approx(1.0)
    assert stage_imbalance(LAYERS, 3) == pytest.approx(1.5, rel=1e-6)


def test_the_number_of_workers_that_pay_and_why_not_more() -> None:
    cluster = ClusterShape(hosts=4, per_host=2, cores=2, between=LinkSpeed(1e-3, 1e7), exchanges=LINKS)
    found, _ = sift(enumerate_candidates(cluster), WORKLOAD, cluster)
    best = best_by_workers([each for each in found if each.candidate.is_exact])
    assert list(best) == [1, 2, 4, 6, 8]
    assert "The next worker stops paying at 2" in stops_paying(best)
    assert "because of what the workers exchange" in stops_paying(best)
    roomy = replace(cluster, between=LinkSpeed(1e-6, 1e12))
    found, _ = sift(enumerate_candidates(roomy), WORKLOAD, roomy)
    assert stops_paying(best_by_workers(found)).startswith("All 8 workers pay")


def test_the_reason_names_the_nearest_other_way() -> None:
    cluster = ClusterShape(per_host=4, cores=4, exchanges=LINKS)
    found, _ = sift(enumerate_candidates(cluster, counts=[4]), WORKLOAD, cluster)
    exact = [each for each in found if each.candidate.is_exact]
    said = why(exact[0], exact, WORKLOAD)
    assert said.startswith(f"{exact[0].candidate.family} fits this model: ")
    assert "the nearest other way" in said
    ddp = next(each for each in exact if each.candidate.strategy == "ddp")
    said = why(ddp, exact, WORKLOAD)
    assert said.startswith("ddp fits this model: 1.05 MB of gradients cost")
    assert f"{exact[0].candidate.name} is predicted at" in said


def test_relaxed_ways_are_looked_at_and_inexact() -> None:
    cluster = ClusterShape(hosts=2, per_host=4, cores=4, between=LinkSpeed(1e-4, 1e7), exchanges=LINKS)
    rows = replace(WORKLOAD, row_bytes=1 << 20)
    found, dropped = sift(enumerate_candidates(cluster, counts=[8]), rows, cluster)
    by_name = {each.candidate.name: each for each in found}
    for name in (
        "ps:ssp=2 --servers 1",
        "ps:hybrid --servers 2",
        "ddp --sync-every 8",
        "ddp --sync-every 64",
    ):
        assert not by_name[name].candidate.is_exact
    # The further apart the workers meet, the less a slow link costs.
    steps = [by_name[name].step_s for name in ("ddp --sync-every 64", "ddp --sync-every 8", "ddp")]
    assert steps == sorted(steps)
    assert by_name["ps:async --servers 2"].step_s <= by_name["ps:ssp=8 --servers 2"].step_s
    assert by_name["ps:ssp=8 --servers 2"].step_s <= by_name["ps:ssp=2 --servers 2"].step_s
    _, dropped = sift(enumerate_candidates(cluster, counts=[8]), WORKLOAD, cluster)
    [reason] = {each.reason for each in dropped if each.candidate.strategy == "ps:hybrid"}
    assert "this model has none" in reason


def test_what_was_measured_of_a_way_tells_of_its_kind_and_of_no_other() -> None:
    cluster = ClusterShape(per_host=4, cores=4, exchanges=LINKS)
    found, _ = sift(enumerate_candidates(cluster, counts=[2, 4]), WORKLOAD, cluster)
    by_name = {(each.candidate.name, each.candidate.workers): each.step_s for each in found}
    pipeline = PlanCandidate(workers=4, strategy="pp")
    after = learned(found, {pipeline: 2 * by_name["pp", 4]})
    told = {(each.candidate.name, each.candidate.workers): each.step_s for each in after}
    assert told["pp", 4] == pytest.approx(2 * by_name["pp", 4])
    assert told["pp --schedule gpipe", 4] == pytest.approx(2 * by_name["pp --schedule gpipe", 4])
    assert told["pp=2,dp=2", 4] == pytest.approx(2 * by_name["pp=2,dp=2", 4])
    assert told["pp", 2] == pytest.approx(2 * by_name["pp", 2])
    assert told["tp", 4] == by_name["tp", 4]
    assert told["ddp", 4] == by_name["ddp", 4]


def test_a_measured_step_keeps_the_proportions_of_its_terms() -> None:
    found = predict(PlanCandidate(workers=2, strategy="ddp"), WORKLOAD, ClusterShape(per_host=2))
    measured = found.corrected(2 * found.step_s)
    assert measured.step_s == pytest.approx(2 * found.step_s)
    assert measured.terms["compute"] == pytest.approx(2 * found.terms["compute"])


def test_a_compressor_costs_its_fixed_part_for_each_bucket() -> None:
    """1 MiB first, then 25 MiB each, as the buckets of a model with such layers are laid out; between hosts 4 MiB."""
    layout = lay_out([Item(number, 1 << 18, 4, "cpu") for number in range(60)])
    model = replace(WORKLOAD, layers=(), gradient_bytes=60 << 20, parameter_bytes=60 << 20, overlap=0.0)
    free, dear = (
        ClusterShape(per_host=2, cores=2, exchanges=LINKS, codecs={"int8": LinkSpeed(fixed_s, 1e18)})
        for fixed_s in (0.0, 1e-3)
    )
    int8 = PlanCandidate(workers=2, strategy="ddp", compress="int8")
    costs = predict(int8, model, dear).step_s - predict(int8, model, free).step_s
    assert costs == pytest.approx(len(layout) * 1e-3)
    apart = [replace(each, hosts=2, per_host=1) for each in (free, dear)]
    between = lay_out(
        [Item(number, 1 << 18, 4, "cpu") for number in range(60)], bucket_bytes=BETWEEN_HOSTS_BYTES
    )
    costs = predict(int8, model, apart[1]).step_s - predict(int8, model, apart[0]).step_s
    assert costs == pytest.approx(len(between) * 1e-3)


def test_rows_cost_what_the_exchange_makes_of_them_and_no_compressor_makes_them_smaller() -> None:
    rowy = replace(WORKLOAD, row_bytes=40 << 20, overlap=0.0)
    slow = LINKS | {"native": LinkSpeed(50e-6, 1e8)}
    cluster = ClusterShape(per_host=4, cores=4, exchanges=slow)

    def by_rows(exchange: str, compress: str = "none") -> float:
        c = PlanCandidate(workers=4, strategy="ddp", exchange=exchange, compress=compress)
        return predict(c, rowy, cluster).step_s - predict(c, replace(rowy, row_bytes=0), cluster).step_s

    # Ten MiB of each worker go to three others: over torch's group, unless the ranks share memory.
    assert by_rows("shm") == pytest.approx(3 * 50e-6 + 3 * (10 << 20) / 2e9)
    assert by_rows("native") == pytest.approx(3 * 50e-6 + 3 * (10 << 20) / 1e8)
    assert by_rows("ring") == pytest.approx(by_rows("native"))
    assert by_rows("ring", "bf16") == pytest.approx(by_rows("ring"))
    cluster = replace(cluster, rows={"auto": LinkSpeed(1e-4, 1e9), "native": LinkSpeed(1e-3, 1e8)})
    assert by_rows("shm") == by_rows("auto") == pytest.approx(1e-4 + 3 * (10 << 20) / 1e9)
    assert by_rows("ring") == pytest.approx(1e-3 + 3 * (10 << 20) / 1e8)


def test_a_hybrid_push_of_rows_is_one_pass_at_a_server_and_an_exact_one_two() -> None:
    rowy = replace(WORKLOAD, compute_s=0.0, fixed_s=0.0, apply_s=0.0, gradient_bytes=1, row_bytes=400 << 20)
    cluster = ClusterShape(per_host=4, cores=4, exchanges=LINKS)
    ways = [PlanCandidate(workers=4, strategy=name, servers=1) for name in ("ps", "ps:hybrid")]
    exact, hybrid = (predict(each, rowy, cluster).terms["server"] for each in ways)
    assert hybrid == pytest.approx(exact / 2, rel=1e-3)
