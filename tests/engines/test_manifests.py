"""Rendered files: Kubernetes' own kinds against its published schemas, SkyPilot's by its shell and its names.

JobSet and TrainJob are custom kinds, whose schemas no package has: their pods are checked as those of a Job.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import ConfigError

KUBERNETES = ["kubernetes", "render", "-n", "5", "--hosts", "2", "--image", "registry/train:1"]
SCRIPT = ["train.py", "--lr", "0.1"]


def render(*args: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return list(yaml.safe_load_all(done.stdout))


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(each for each in documents if each["kind"] == kind)


def test_manifests_are_what_kubernetes_publishes_as_their_schema() -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate comes with `make test-engines`"
    )
    documents = render(*KUBERNETES, "--resources", "worker:cpus=2,gpus=1,memory=8", *SCRIPT)
    assert [each["kind"] for each in documents] == ["Secret", "Service", "NetworkPolicy", "JobSet"]
    for each in documents[:3]:
        validator.validate(each, "1.31", strict=True)
    for job in documents[3]["spec"]["replicatedJobs"]:
        as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job["template"]}
        validator.validate(as_job, "1.31", strict=True)


def test_the_join_key_is_in_the_secret_alone() -> None:
    documents = render(*KUBERNETES, *SCRIPT)
    key = of_kind(documents, "Secret")["stringData"]["join-key"]
    assert len(key) >= 20
    assert key not in str(documents[1:])
    pods = [
        job["template"]["spec"]["template"] for job in of_kind(documents, "JobSet")["spec"]["replicatedJobs"]
    ]
    names = [pod["spec"]["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"]["name"] for pod in pods]
    assert names == ["shoal", "shoal"]
    assert key != of_kind(render(*KUBERNETES, *SCRIPT), "Secret")["stringData"]["join-key"]


def test_pods_ask_for_what_their_workers_need_and_join_the_head() -> None:
    head, hosts = of_kind(render(*KUBERNETES, "--resources", "worker:cpus=2,gpus=1", *SCRIPT), "JobSet")[
        "spec"
    ]["replicatedJobs"]
    there = hosts["template"]["spec"]
    container = there["template"]["spec"]["containers"][0]
    assert (there["parallelism"], there["completions"]) == (2, 2)
    assert container["resources"]["requests"] == {"cpu": "6", "nvidia.com/gpu": "3"}
    assert container["command"][:3] == ["shoal", "join", "shoal://shoal-head-0-0.shoal:7070"]
    run = head["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert run[-3:] == SCRIPT
    assert run[run.index("--hosts") + 1] == "2"


def test_a_trainjob_starts_shoal_under_its_torchrun() -> None:
    documents = render(*KUBERNETES, "--trainjob", *SCRIPT)
    trainer = of_kind(documents, "TrainJob")["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 3)
    assert [*trainer["command"], *trainer["args"][:4]] == [
        "torchrun",
        "--no-python",
        "shoal",
        "run",
        "--on",
        "torchrun",
    ]


@pytest.mark.parametrize("cloud", ["gcp", "aws"])
def test_a_task_of_skypilot_has_a_head_and_hosts_that_join_it(cloud: str) -> None:
    (task,) = render("cloud", "render", "--cloud", cloud, "-n", "4", "--hosts", "2", "--spot", *SCRIPT)
    assert task["resources"] == {"infra": cloud, "cpus": "2+", "use_spot": True}
    assert (task["num_nodes"], task["secrets"]) == (2, {"SHOAL_JOIN_KEY": None})
    program = 'shoal() { echo "shoal $*"; }; exec() { "$@"; builtin exit; }\n' + task["run"]
    said = []
    for rank in ("0", "1"):
        env = {"PATH": "/usr/bin:/bin", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": "2"}
        done = subprocess.run(
            ["bash", "-c", program],
            env={**env, "SKYPILOT_NODE_RANK": rank},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout.strip())
    assert said == [
        "shoal run --hosts 2 --bind 10.0.0.7:7070 -n 4 --name shoal train.py --lr 0.1",
        "shoal join shoal://10.0.0.7:7070 --timeout 600",
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["kubernetes", "render", "train.py"], "the pods need an image"),
        ([*KUBERNETES, "--name", "My_Job", "train.py"], "cannot be a name of pods"),
        ([*KUBERNETES, "--hosts", "9", "train.py"], "5 workers cannot be on 9 hosts"),
        (["cloud", "render", "--cloud", "azur", "train.py"], "there is no cloud 'azur'"),
    ],
)
def test_what_cannot_be_rendered_is_refused(args: list[str], said: str) -> None:
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    assert said in " ".join((done.output + str(done.exception)).split())
