"""--table-memory and --server-device: where servers keep rows and dense parameters, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from launched import Launched

from shoal import Faults
from shoal.train.checkpoint.checkpoint import open_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "table_memory.py"
TABLES_BYTES = 2 * 9_000 * 16 * 4
Launch = Callable[..., Launched]


def pieces(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("step-*")
    saved = open_checkpoint(path).pieces
    return {name: saved[name] for name in saved}


def test_rows_on_disk_chunks_in_a_device_store_and_a_killed_server_leave_the_same_bits(
    launch_script: Launch, tmp_path: Path
) -> None:
    def train(name: str, **options: object) -> tuple[Launched, dict[str, torch.Tensor]]:
        out = tmp_path / name
        out.mkdir()
        done = launch_script(
            SCRIPT, workers=3, servers=2, replicas=2, strategy="ps", args=(str(out),), name=name, quiet=True,
            step_timeout_s=30.0, **options,
        )  # fmt: skip
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        return done, pieces(out / "end")

    _, without = train("without")
    limited, with_limit = train(
        "limited",
        table_memory=str(TABLES_BYTES // 4),
        server_device="auto",  # without an accelerator: the store of a device, on the CPU
        faults=Faults().kill("server-1", at_step=5),
    )
    assert limited.summary["restarts"] == 1
    tables = limited.summary["tables"]
    assert tables["memory_bytes"] <= 2 * (TABLES_BYTES // 4)
    assert tables["disk_bytes"] > TABLES_BYTES
    assert tables["num_misses"] > 0
    assert with_limit.keys() == without.keys()
    for name, tensor in without.items():
        assert torch.equal(with_limit[name], tensor), name


def test_a_limit_too_small_for_the_tables_is_refused_with_what_they_need(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script(
        SCRIPT, workers=3, servers=2, strategy="ps", args=(str(tmp_path),), quiet=True, table_memory="100K"
    )
    assert done.exit_code == 3
    assert "102,400 bytes on each server, and 2 tables need 131,072" in " ".join(str(done.error).split())
