"""Data, checkpoints and models on s3://, gs:// and hdfs://, against real servers of this machine, with a kill in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_jobs import EngineJob
from hadoop import hdfs, unsupported
from object_stores import object_store

SCRIPT = Path(__file__).parent / "store_training.py"

TABLES = """
import sys
import fsspec, pyarrow as pa, pyarrow.parquet as pq
for part in range(2):
    rows = range(20 * part, 20 * part + 20)
    table = pa.table({"a": [i % 7 for i in rows], "b": [i % 5 for i in rows], "y": [float(i % 3) for i in rows]})
    with fsspec.open(f"{sys.argv[1]}/data/{part}.parquet", "wb") as file:
        pq.write_table(table, file)
with fsspec.open(f"{sys.argv[1]}/lines/a.jsonl", "wb") as file:
    file.write(b'{"x": 1, "y": 2}\\n{"x": 3, "y": 4}\\n')
with fsspec.open(f"{sys.argv[1]}/rows/a.csv", "wb") as file:
    file.write(b"x,y\\n1,2\\n3,4\\n")
"""

READS = """
import sys
import shoal
url = sys.argv[1]
for data in (shoal.Dataset.from_jsonl(f"{url}/lines/*.jsonl", label="y"), shoal.Dataset.from_csv(f"{url}/rows/", label="y")):
    assert [(int(x["x"]), int(y)) for x, y in data] == [(1, 2), (3, 4)]
for wrong in (f"{url}/nothing/*.csv", url.replace("bucket", "no-such-bucket") + "/a.csv"):
    try:
        shoal.Dataset.from_csv(wrong)
    except shoal.ShoalError as error:
        print("refused:", type(error).__name__, error)
"""

MODEL = "import sys, fsspec; sys.stdout.buffer.write(fsspec.open(f'{sys.argv[1]}/model/model.safetensors').open().read())"


@pytest.fixture(scope="module", params=["s3", "gs", "hdfs"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    """URL of a folder with the tables, and the environment in which it is reached."""
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("engines are started by `make test-engines` alone")
    pytest.importorskip({"s3": "s3fs", "gs": "gcsfs", "hdfs": "hdfs_native"}[request.param])
    folder = tmp_path_factory.mktemp("store")
    if request.param == "hdfs" and (reason := unsupported()):
        pytest.skip(reason)
    with hdfs(folder) if request.param == "hdfs" else object_store(request.param, folder) as env:
        url, env = (
            (f"{env}/bucket/job", {}) if isinstance(env, str) else (f"{request.param}://bucket/job", env)
        )
        run(TABLES, url, env)
        yield url, env


def run(code: str, url: str, env: dict[str, str]) -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", code, url],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        timeout=180,
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def local_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Weights of an undisturbed job over the same tables in a folder."""
    folder = tmp_path_factory.mktemp("here")
    for name in ("data", "lines", "rows"):
        (folder / name).mkdir()
    url = f"file://{folder}"
    run(TABLES, url, {})
    job = EngineJob(folder / "job", ["-n", "2", str(SCRIPT), url], {})
    assert job.wait() == 0, job.output()
    return run(MODEL, url, {})


def test_a_job_reads_and_saves_there_through_a_killed_worker_and_a_killed_job(
    store: tuple[str, dict[str, str]],
    local_model: bytes,
    start_job: Callable[..., EngineJob],
    tmp_path: Path,
) -> None:
    url, env = store
    job = start_job("-n", "2", str(SCRIPT), url, str(tmp_path), env=env)
    job.wait_for_gate(tmp_path, 2)
    assert "worker 1 was killed by SIGKILL; replacing it" in job.output()
    job.process.send_signal(signal.SIGKILL)
    job.process.wait()
    (tmp_path / "go").touch()
    program = [sys.executable, "-m", "shoal", "resume", str(job.folder / "runs" / job.name)]
    resumed = EngineJob(tmp_path / "resumed", [], env, program=program)
    assert resumed.wait() == 0, resumed.output()
    assert f"going on from {url}/checkpoints/step-000000004: step 4, epoch 1, sample 40" in resumed.output()
    assert run(MODEL, url, env) == local_model
    resumed.close()


def test_lines_and_rows_are_read_there_and_what_is_not_there_is_named(
    store: tuple[str, dict[str, str]],
) -> None:
    url, env = store
    said = run(READS, url, env).decode()
    assert f"NoFiles {url}/nothing/*.csv" in said or "the pattern matches no file" in said
    assert "no-such-bucket/job/a.csv" in said
    assert said.count("refused:") == 2
