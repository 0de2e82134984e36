"""Which device each worker gets, over imagined machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import placement
from shoal.config.job import Job
from shoal.config.placement import DevicePlacement, place
from shoal.errors import ConfigError, DeviceMissing


@given(num_workers=st.integers(1, 8), count=st.integers(0, 8), kind=st.sampled_from(["cuda", "xpu"]))
def test_one_device_per_worker_by_local_rank_or_the_cpu_for_all(
    num_workers: int, count: int, kind: str
) -> None:
    placed = place("auto", num_workers=num_workers, visible={kind: count})
    if count >= num_workers:
        assert placed == DevicePlacement(tuple(f"{kind}:{rank}" for rank in range(num_workers)))
        assert placed.has_own_devices
        assert placed.accelerator == kind
    else:
        assert set(placed.devices) == {"cpu"}
        assert not placed.is_mixed
        assert bool(placed.notes) == (count > 0)  # devices that nobody uses are worth a word


@given(num_workers=st.integers(1, 8), count=st.integers(0, 8))
def test_a_missing_device_is_refused_or_replaced_by_the_cpu(num_workers: int, count: int) -> None:
    wish = {"num_workers": num_workers, "visible": {"cuda": count} if count else {}}
    if count < num_workers:
        with pytest.raises(DeviceMissing, match=f"worker {count}.* on cuda:{count}") as refused:
            place("cuda", **wish)  # type: ignore[arg-type]
        assert (refused.value.rank, refused.value.device) == (count, f"cuda:{count}")
    placed = place("cuda", **wish, is_soft=True)  # type: ignore[arg-type]
    assert placed.devices == tuple(f"cuda:{rank}" if rank < count else "cpu" for rank in range(num_workers))
    assert len(placed.notes) == max(0, num_workers - count)


def test_devices_by_name() -> None:
    visible = {"cuda": 2}
    assert place("cuda:1", num_workers=1, visible=visible).devices == ("cuda:1",)
    mixed = place("cuda:1,cpu,cpu", num_workers=3, visible=visible)
    assert mixed.devices == ("cuda:1", "cpu", "cpu")
    assert mixed.is_mixed
    assert not mixed.has_own_devices
    # Two that share a device cannot exchange by themselves.
    assert not place("cuda:0", num_workers=2, visible=visible).has_own_devices
    # By local rank among those that want the kind.
    assert place("cpu,cuda,cuda", num_workers=3, visible=visible).devices == ("cpu", "cuda:0", "cuda:1")
    # And past those that are named.
    for said in ("cuda,cuda:0", "cuda:0,cuda"):
        assert place(said, num_workers=2, visible=visible).has_own_devices
    shared = place("cuda:0", num_workers=3, visible=visible)
    assert shared.is_shared
    assert "3 workers share cuda:0" in shared.notes[0]


@pytest.mark.parametrize(
    "said", ["", "cuda:x", "cpu:1", "auto:0", "gpu 1", "cuda:0,", "cuda:0,cpu", "auto,cpu,cpu", "cuda:٠"]
)
def test_what_names_no_device_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="Nothing was started"):
        placement.parse(said, num_workers=3)


def test_a_mesh_needs_a_device_of_one_kind_for_each() -> None:
    def check(said: str, *, is_mesh: bool = True) -> None:
        placement.check(said, num_workers=2, strategy="fsdp", is_mesh=is_mesh)

    for fine in ("auto", "cpu", "cuda", "cuda:0,cuda:1", "cuda:0,cuda:0", "cuda:0"):
        check(fine)
    check("cuda:0,cpu", is_mesh=False)
    with pytest.raises(ConfigError, match="different kinds"):
        check("cuda:0,cpu")
    with pytest.raises(ConfigError, match="one device for several"):
        check("xpu:0")
    with pytest.raises(ConfigError, match="one device for several"):
        check("xpu,xpu:0")  # which may be the same


@pytest.mark.parametrize(
    ("strategy", "exchange", "device", "by_themselves"),
    [
        ("ddp", "auto", "cuda", True),
        ("ddp", "auto", "cuda:0", False),  # through the host is faster
        ("ddp", "native", "cuda:0", True),
        ("fsdp", "auto", "cuda:0", True),
        ("fsdp", "auto", "xpu", True),
        ("ddp", "native", "cuda:0,cpu", False),
        ("ddp", "native", "cpu", False),
    ],
)
def test_whether_devices_exchange_by_themselves(
    monkeypatch: pytest.MonkeyPatch, strategy: str, exchange: str, device: str, by_themselves: bool
) -> None:
    monkeypatch.setattr(placement, "visible_devices", lambda: {device.partition(":")[0]: 2})
    placement._placed.cache_clear()
    job = Job(name="x", run_dir=Path("x"), num_workers=2, strategy=strategy, exchange=exchange, device=device)
    assert placement.groups_on_devices(job) == by_themselves
    placement._placed.cache_clear()


def test_a_mesh_with_too_few_devices_is_on_the_cpu_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "visible_devices", lambda: {"cuda": 1})
    placement._placed.cache_clear()
    for strategy, devices in (("ddp", ("cuda:0", "cpu")), ("tp", ("cpu", "cpu"))):
        job = Job(
            name="x", run_dir=Path("x"), num_workers=2, strategy=strategy, device="cuda", soft_placement=True
        )
        placed = placement.of_job(job)
        assert placed.devices == devices
        assert ("of one kind" in placed.notes[-1]) == (strategy == "tp")
    placement._placed.cache_clear()


def test_every_host_has_devices_of_its_own() -> None:
    two = {"cuda": 2}
    homes = (0, 0, 1, 1, 2)
    everybody = ("cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0")
    for said in ("auto", "cuda"):
        placed = place(said, num_workers=5, visible=two, homes=homes)
        assert (placed.devices, placed.is_shared, placed.has_own_devices) == (everybody, False, True)
    with pytest.raises(DeviceMissing, match="cuda:2"):
        place("cuda", num_workers=5, visible=two, homes=(0, 0, 0, 1, 1))
    assert place("auto", num_workers=5, visible=two, homes=(0, 0, 0, 1, 1)).devices == ("cpu",) * 5
    one = place("cuda:0", num_workers=3, visible=two, homes=(0, 1, 1))
    assert one.devices == ("cuda:0",) * 3
    assert "2 workers share cuda:0" in one.notes[-1]
    named = place("cuda:1,cuda,cuda,cuda", num_workers=4, visible=two, homes=(0, 0, 1, 1))
    assert named.devices == ("cuda:1", "cuda:0", "cuda:0", "cuda:1")


def test_a_gpu_is_what_torch_calls_cuda() -> None:
    assert place("gpu", num_workers=2, visible={"cuda": 2}).devices == ("cuda:0", "cuda:1")
    assert place("GPU:1,cpu", num_workers=2, visible={"cuda": 2}).devices == ("cuda:1", "cpu")


@pytest.mark.parametrize(
    ("said", "number", "visible", "device"),
    [
        ("cpu", 0, {"cuda": 2}, "cpu"),
        ("auto", 0, {}, "cpu"),
        ("auto", 3, {"cuda": 2}, "cuda:1"),
        ("cuda", 2, {"cuda": 2}, "cuda:0"),
        ("gpu:1", 0, {"cuda": 2}, "cuda:1"),
    ],
)
def test_servers_take_turns_over_the_devices_of_their_host(
    said: str, number: int, visible: dict[str, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "visible_devices", lambda: visible)
    assert placement.of_server(said, number) == device


def test_a_server_without_the_device_that_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "visible_devices", lambda: {"cuda": 1})
    with pytest.raises(ConfigError, match="--server-device cuda:1: server 0 sees 1 cuda"):
        placement.of_server("cuda:1", 0)
