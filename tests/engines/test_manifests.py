"""Rendered files: Kubernetes' kinds, JobSet and TrainJob against their published schemas, SkyPilot's commands by a shell.

The schemas of JobSet and TrainJob are those of Kubeflow's own client (kubeflow-trainer-api), generated from its OpenAPI.
SkyPilot itself clashes with our pins; it read the task files once, outside of the tests (ADR 56).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from shoal import cli
from shoal.cli import app
from shoal.errors import ConfigError

KUBERNETES = ["kubernetes", "render", "-n", "5", "--hosts", "2", "--image", "registry/train:1"]
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "docs/guides/Dockerfile"
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
    more = ["--strategy", "ps", "--servers", "2", "--metrics-from", "monitoring", "--volume", "runs"]
    documents = render(*KUBERNETES, "--resources", "worker:cpus=2,gpus=1,memory=8", *more, *SCRIPT)
    assert [each["kind"] for each in documents] == ["Secret", "Service", "NetworkPolicy", "JobSet"]
    for each in documents[:3]:
        validator.validate(each, "1.31", strict=True)
    assert [job["name"] for job in documents[3]["spec"]["replicatedJobs"]] == [
        "coordinator",
        "worker",
        "server",
    ]
    for job in documents[3]["spec"]["replicatedJobs"]:
        as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job["template"]}
        validator.validate(as_job, "1.31", strict=True)


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_custom_kinds_are_what_their_projects_publish_as_their_schema(kind: str) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api comes with `make test-engines`"
    )
    model = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}[kind]
    more = (
        ["--trainjob"] if kind == "TrainJob" else ["--strategy", "ps", "--servers", "2", "--volume", "runs"]
    )
    found = of_kind(render(*KUBERNETES, "--resources", "worker:cpus=2,gpus=1,memory=8", *more, *SCRIPT), kind)
    assert model.from_dict(found).to_dict() == found  # a name that the schema lacks would not come back
    found["spec"]["noSuchField"] = 1
    assert model.from_dict(found).to_dict() != found


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


def services(*args: str) -> dict[str, dict[str, Any]]:
    """Spec of the Job of each role."""
    jobs = of_kind(render(*KUBERNETES, *args, *SCRIPT), "JobSet")["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"] for job in jobs}


def container(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job["template"]["spec"]["containers"][0])


def test_pods_ask_for_what_their_role_needs_and_join_the_coordinator() -> None:
    jobs = services("--resources", "worker:cpus=2,gpus=1 server:cpus=3", "--strategy", "ps:async")
    assert [(role, job["parallelism"], job["completions"]) for role, job in jobs.items()] == [
        ("coordinator", 1, 1),
        ("worker", 2, 2),
        ("server", 1, 1),
    ]
    requests = {role: container(job)["resources"]["requests"] for role, job in jobs.items()}
    assert requests["worker"] == {"cpu": "6", "nvidia.com/gpu": "3"}
    assert requests["server"] == {"cpu": "3"}
    for role in ("worker", "server"):
        join = container(jobs[role])["command"]
        assert join[:2] == ["shoal", role]
        assert join[-2:] == ["--join", "shoal://shoal-coordinator-0-0.shoal:7070"]


@pytest.mark.parametrize("more", [[], ["--strategy", "ps", "--servers", "2"]])
def test_commands_of_pods_are_ones_that_shoal_takes(more: list[str]) -> None:
    taken: list[dict[str, Any]] = []
    for role, job in services(*more).items():
        verb = typer.main.get_command(cli.load(role))
        command = [word.replace("$(POD_IP)", "10.1.2.3") for word in container(job)["command"][2:]]
        with verb.make_context(role, command) as context:
            taken.append(context.params)
    coordinator = taken[0]
    assert (coordinator["script"], coordinator["args"]) == (SCRIPT[0], SCRIPT[1:])
    assert (coordinator["workers"], coordinator["worker_services"]) == (5, 2)
    assert coordinator["bind"] == "10.1.2.3:7070"
    assert {each["health"] for each in taken} == {"10.1.2.3:9090"}


def test_every_role_is_probed_at_its_health_endpoint() -> None:
    for job in services("--strategy", "ps").values():
        pod = container(job)
        assert {port["name"]: port["containerPort"] for port in pod["ports"]}["health"] == 9090
        paths = [pod[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
        assert paths == [{"path": path, "port": "health"} for path in ("/healthz", "/healthz", "/readyz")]


def test_an_evicted_pod_is_replaced_and_has_time_to_save_but_a_coordinator_without_a_volume_ends_the_job() -> (
    None
):
    for role, job in services().items():
        assert job["template"]["spec"]["terminationGracePeriodSeconds"] > 60  # of --grace
        action = job["podFailurePolicy"]["rules"][0]["action"]
        assert (action, job["backoffLimit"] > 0) == (
            ("FailJob", False) if role == "coordinator" else ("Ignore", True)
        )
    rules = services("--volume", "runs")["coordinator"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    assert rules[1]["onExitCodes"]["values"] == [1, 2, 3]


def test_metrics_are_read_from_the_namespace_that_was_named_alone() -> None:
    policy = of_kind(render(*KUBERNETES, "--metrics-from", "monitoring", *SCRIPT), "NetworkPolicy")
    ours, prometheus = policy["spec"]["ingress"]
    assert "podSelector" in ours["from"][0]
    assert prometheus["ports"] == [{"port": 9090, "protocol": "TCP"}]
    assert len(of_kind(render(*KUBERNETES, *SCRIPT), "NetworkPolicy")["spec"]["ingress"]) == 1


def test_the_user_of_the_image_may_write_to_the_volume() -> None:
    [user] = re.findall(r"useradd --uid (\d+) shoal", RECIPE.read_text())
    assert RECIPE.read_text().rstrip().endswith("USER shoal")
    for job in services("--strategy", "ps", "--volume", "runs").values():
        pod = job["template"]["spec"]
        assert pod["securityContext"] == {"fsGroup": int(user)}
        assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]


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


def test_the_image_has_all_that_the_wheel_is_built_of(tmp_path: Path) -> None:
    copies = [line.split()[1:] for line in RECIPE.read_text().splitlines() if line.startswith("COPY ")]
    for *sources, target in copies:
        if target.startswith("/src/"):
            there = tmp_path / target.lstrip("/")
            for source in sources:
                where = ROOT / source
                if where.is_dir():
                    shutil.copytree(where, there, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    there.mkdir(parents=True, exist_ok=True)
                    shutil.copy(where, there)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            "--wheel-dir",
            tmp_path,
            tmp_path / "src",
        ],
        env={**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("shoal-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"shoal/cli/__init__.py", "shoal/_examples/spirals.py"} <= set(names)


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
        ([*KUBERNETES, "--strategy", "ps", "--trainjob", "train.py"], "wants 1 server too"),
        (["cloud", "render", "--cloud", "azur", "train.py"], "there is no cloud 'azur'"),
    ],
)
def test_what_cannot_be_rendered_is_refused(args: list[str], said: str) -> None:
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    assert said in " ".join((done.output + str(done.exception)).split())
