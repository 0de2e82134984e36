"""Scripts before a migration whose peers do not install beside torch: each runs as it stands, in its peer's own environment, and trains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import log
from pathlib import Path

import pytest

from etcd_members import free_ports

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples/migration"
TIMEOUT_S = 240
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "2"}

# The first test of an environment installs it: a gigabyte with TensorFlow's.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]

PADDLE_ACCURACY = """
import paddle
from paddle import nn

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
model.set_state_dict(paddle.load("model.pdparams"))
x = paddle.randn([4096, 20])
right = model(x).argmax(1) == (x.sum(1) > 0).astype("int64")
print(f"accuracy {float(right.astype('float32').mean()):.3f}")
"""

MXNET_ERROR = """
import runpy, sys

gradient = runpy.run_path(sys.argv[1], run_name="__main__")["gradient"]
print(f"error {gradient.abs().mean().asscalar():.3f}")
"""


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """`peer("mxnet")`: the interpreter of an environment under .peers/; skips, with the reason, where pip cannot make it."""
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("peers are installed by `make matrix` alone")
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.peers.environments import Skipped, environment

    def peer(name: str) -> str:
        python = environment(name)
        if isinstance(python, Skipped):
            pytest.skip(python.reason)
        return str(python)

    return peer


def run(
    command: Sequence[str],
    folder: Path,
    roles: Sequence[dict[str, str]] = ({},),
    servers: Sequence[dict[str, str]] = (),
) -> str:
    """Output of a process for each of `roles`; those of `servers` run beside them and are then ended, as theirs never end."""
    processes: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"process-{number}.log" for number in range(len(roles) + len(servers))]
    codes: list[int | str] = []
    try:
        for path, role in zip(logs, (*roles, *servers), strict=True):
            with path.open("w") as log:
                env = {**os.environ, **QUIET, **role}
                processes.append(
                    subprocess.Popen(
                        command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
                    )
                )
        for each in processes[: len(roles)]:
            try:
                codes.append(each.wait(TIMEOUT_S))
            except subprocess.TimeoutExpired:
                codes.append(f"not over after {TIMEOUT_S} s")
    finally:
        for each in processes:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
    assert codes == [0] * len(roles), "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in logs)
    return "\n".join(path.read_text() for path in logs[: len(roles)])


def printed(name: str, output: str) -> list[float]:
    found = [float(value) for value in re.findall(rf"{name} (\d\.\d+)", output)]
    assert found, output[-3000:]
    return found


def test_the_estimator_learns(peer: Callable[[str], str], tmp_path: Path) -> None:
    output = run([peer("tensorflow-2.15"), str(SCRIPTS / "estimator_before.py")], tmp_path)
    assert printed("accuracy", output)[-1] > 0.9


def test_tensorflow_learns_on_two_servers(peer: Callable[[str], str], tmp_path: Path) -> None:
    command = [peer("tensorflow-2.15"), str(SCRIPTS / "tf_ps_before.py")]
    at = [f"127.0.0.1:{port}" for port in free_ports(4)]
    cluster = {"chief": at[:1], "worker": at[1:2], "ps": at[2:]}

    def role(kind: str, index: int = 0) -> dict[str, str]:
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}

    output = run(command, tmp_path, [role("chief")], [role("worker"), role("ps", 0), role("ps", 1)])
    losses = printed("loss:", output)
    assert len(losses) == 3
    assert losses[-1] < min(losses[0], log(2)), losses  # log(2) is chance


def test_two_processes_of_paddle_learn(peer: Callable[[str], str], tmp_path: Path) -> None:
    python = peer("paddle-3")
    command = [python, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    run([*command, str(SCRIPTS / "paddle_before.py")], tmp_path, [{"POD_IP": "127.0.0.1"}])
    assert len(list(tmp_path.glob("log/workerlog.*"))) == 2
    assert printed("accuracy", run([python, "-c", PADDLE_ACCURACY], tmp_path))[-1] > 0.9


def test_two_workers_of_mxnet_learn_on_two_servers(peer: Callable[[str], str], tmp_path: Path) -> None:
    [port] = free_ports(1)
    job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NODE_HOST": "127.0.0.1"}
    job |= {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "2"}
    workers, servers = ([{**job, "DMLC_ROLE": role}] * 2 for role in ("worker", "server"))
    command = [peer("mxnet"), "-c", MXNET_ERROR, str(SCRIPTS / "mxnet_before.py")]
    output = run(command, tmp_path, workers, [{**job, "DMLC_ROLE": "scheduler"}, *servers])
    errors = printed("error", output)
    assert len(errors) == 2
    assert max(errors) < 0.2  # 0.5 of weights that are zero
