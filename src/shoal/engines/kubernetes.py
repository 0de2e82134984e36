"""Kubernetes: manifests of a job, and the engine inside it.

`shoal kubernetes render` writes a JobSet with a pod for the head and one for
each host, its Service, Secret and NetworkPolicy. The head runs with `--on
kubernetes`: the pods join by themselves, and where one is evicted its Job starts
another. The join key is in the Secret, from which the pods have it in their
environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config.hosts import DEFAULT_PORT, Resources
from shoal.engines.protocol import KEY_VARIABLE, Ticket

SECRET_KEY = "join-key"
BACKOFF_LIMIT = 1000
"""Pods of hosts that may fail: each is a host that was lost, and the head says when it is enough."""

GRACE_S = 60
"""For workers to save when a pod is evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """A job as its manifests describe it."""

    name: str
    """Of the JobSet; its other objects are named after it."""

    image: str
    """With shoal, the script and what it imports."""

    script: str
    """Path in the image."""

    args: Sequence[str]
    """What the script finds in sys.argv[1:]."""

    namespace: str
    """Of all objects."""

    num_workers: int
    """In all pods together."""

    num_hosts: int
    """Pods that run workers; the head's is one more."""

    resources: Resources
    """Of a host."""

    key: str
    """The join key, which goes into the Secret."""

    volume: str = ""
    """Claim for the run directory; empty: the head's own disk, and hosts copy checkpoints."""


def is_local(detail: str) -> bool:
    return False


def open_engine(detail: str, ticket: Ticket) -> Kubernetes:
    return Kubernetes()


class Kubernetes:
    """The engine seen from the head's pod: the JobSet starts all pods, and starts them again."""

    def start(self, hosts: Sequence[int], resources: Resources) -> None:
        pass

    def watch(self) -> dict[int, str]:
        return {}

    def stop(self) -> None:
        pass

    def logs(self, host: int) -> str:
        return ""


def render(job: KubernetesJob) -> list[dict[str, Any]]:
    """Secret, Service, NetworkPolicy and JobSet, in the order in which they are applied."""
    labels = {"app.kubernetes.io/name": "shoal", "app.kubernetes.io/instance": job.name}
    meta = {"name": job.name, "namespace": job.namespace, "labels": labels}
    ours = {"podSelector": {"matchLabels": labels}}
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": meta,
            "type": "Opaque",
            "stringData": {SECRET_KEY: job.key},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,  # hosts look for the head before it is ready
                "selector": labels,
                "ports": [{"name": "join", "port": DEFAULT_PORT, "protocol": "TCP"}],
            },
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": meta,
            "spec": {**ours, "policyTypes": ["Ingress"], "ingress": [{"from": [ours]}]},
        },
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": meta,
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": job.name},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [
                    {"name": "head", "replicas": 1, "template": {"spec": _job(job, labels, is_head=True)}},
                    {"name": "hosts", "replicas": 1, "template": {"spec": _job(job, labels, is_head=False)}},
                ],
            },
        },
    ]


def render_trainjob(job: KubernetesJob) -> dict[str, Any]:
    """Kubeflow's TrainJob: torchrun of its runtime starts `shoal run --on torchrun` on every node."""
    run = ["shoal", "run", "--on", "torchrun", "--name", job.name, job.script, *job.args]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name, "namespace": job.namespace},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": job.image,
                "numNodes": job.num_hosts,
                "numProcPerNode": -(-job.num_workers // job.num_hosts),
                "command": ["torchrun", "--no-python"],
                "args": run,
                "env": [_key(job)],
                "resourcesPerNode": _resources(job.resources),
            },
        },
    }


def _job(job: KubernetesJob, labels: Mapping[str, str], *, is_head: bool) -> dict[str, Any]:
    head = f"{job.name}-head-0-0.{job.name}"
    ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    if is_head:
        command = ["shoal", "run", "--on", "kubernetes", "--bind", f"$(POD_IP):{DEFAULT_PORT}"]
        command += ["--hosts", str(job.num_hosts), "-n", str(job.num_workers), "--name", job.name]
        command += ["--run-dir", "/runs", job.script, *job.args]
    else:
        command = [
            "shoal",
            "join",
            f"shoal://{head}:{DEFAULT_PORT}",
            "--timeout",
            "600",
            "--run-dir",
            "/runs",
        ]
    container: dict[str, Any] = {
        "name": "shoal",
        "image": job.image,
        "command": command,
        "env": [_key(job), ip],
        "resources": _resources(Resources(cpus=1, memory_gb=2) if is_head else job.resources),
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
    }
    if is_head:
        container["ports"] = [{"name": "join", "containerPort": DEFAULT_PORT}]
        container["readinessProbe"] = {"tcpSocket": {"port": DEFAULT_PORT}, "periodSeconds": 5}
    runs = {"persistentVolumeClaim": {"claimName": job.volume}} if job.volume else {"emptyDir": {}}
    return {
        "parallelism": 1 if is_head else job.num_hosts,
        "completions": 1 if is_head else job.num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0 if is_head else BACKOFF_LIMIT,
        # An eviction is a host that was lost, not a failure of the job.
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
            ]
        },
        "template": {
            "metadata": {"labels": dict(labels)},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": GRACE_S,
                "automountServiceAccountToken": False,
                "containers": [container],
                "volumes": [{"name": "runs", **runs}],
            },
        },
    }


def _key(job: KubernetesJob) -> dict[str, Any]:
    return {"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": {"name": job.name, "key": SECRET_KEY}}}


def _resources(wanted: Resources) -> dict[str, Any]:
    amounts = {"cpu": f"{wanted.cpus:g}"}
    amounts |= {"memory": f"{wanted.memory_gb * 1024:.0f}Mi"} if wanted.memory_gb else {}
    amounts |= {"nvidia.com/gpu": str(wanted.gpus)} if wanted.gpus else {}
    return {
        "requests": amounts,
        "limits": {name: amount for name, amount in amounts.items() if name != "cpu"},
    }


def to_yaml(value: Any, indent: int = 0) -> str:
    """YAML of what these manifests have: maps, lists, and scalars as JSON writes them. No reader is needed, so no library is."""
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        return "".join(
            f"{pad}{key if '/' not in key else json.dumps(key)}:{_below(each, indent + 1)}"
            for key, each in value.items()
        )
    assert isinstance(value, list)
    return "".join(
        f"{pad}- {to_yaml(each, indent + 1).lstrip() if _is_deep(each) else _scalar(each)}" for each in value
    )


def _below(value: Any, indent: int) -> str:
    if isinstance(value, str) and "\n" in value:
        return " |\n" + "".join(f"{'  ' * indent}{line}\n" for line in value.splitlines())
    return f"\n{to_yaml(value, indent)}" if _is_deep(value) else f" {_scalar(value)}"


def _is_deep(value: Any) -> bool:
    return isinstance(value, (Mapping, list)) and bool(value)


def _scalar(value: Any) -> str:
    return json.dumps(value) + "\n"
