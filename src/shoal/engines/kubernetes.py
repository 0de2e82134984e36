"""Manifests of a job on Kubernetes.

`shoal kubernetes render` writes a JobSet with a Job for each role, whose pods are its services, and
their Service, Secret and NetworkPolicy. Kubernetes probes the health endpoint of each; if a pod is
evicted or stuck its Job starts another, which joins by itself. The join key is in the Secret, from
which the pods have it in their environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config.hosts import DEFAULT_PORT, SERVER, WORKER, Resources
from shoal.engines.protocol import KEY_VARIABLE

SECRET_KEY = "join-key"
BACKOFF_LIMIT = 1000
"""Pods of a role that may fail: each is a service that was lost, and the coordinator says when it is enough."""

GRACE_S = 75
"""For workers to save when a pod is evicted: longer than --grace, 60 s, after which they are killed."""

COORDINATOR = "coordinator"
CONTAINER = "shoal"
HEALTH_PORT = 9090
USER_ID = 1000
"""Of the user of the image (docs/guides/Dockerfile), as a group: volumes are made writable for it."""

COORDINATOR_RESOURCES = Resources(cpus=1, memory_gb=2)


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
    """sys.argv[1:] of the script."""

    namespace: str
    """Of all objects."""

    num_workers: int
    """In all pods together."""

    num_hosts: int
    """Pods that run workers."""

    resources: Resources
    """Of a pod with workers."""

    server_resources: Resources
    """Of a pod with a server."""

    num_servers: int = 0
    """Pods that run a server."""

    strategy: str = ""
    """Empty: that of `shoal coordinator`."""

    metrics_from: str = ""
    """Namespace whose pods may read the metrics; empty: none."""

    key: str
    """The join key, which goes into the Secret."""

    volume: str = ""
    """Claim for the run directory; empty: the head's own disk, and hosts copy checkpoints."""


def render(job: KubernetesJob) -> list[dict[str, Any]]:
    """Secret, Service, NetworkPolicy and JobSet, in the order in which they are applied."""
    labels = _labels(job)
    meta = {"name": job.name, "namespace": job.namespace, "labels": labels}
    ours = {"podSelector": {"matchLabels": labels}}
    ingress: list[dict[str, Any]] = [{"from": [ours]}]
    if job.metrics_from:
        there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": job.metrics_from}}}
        ingress.append({"from": [there], "ports": [{"port": HEALTH_PORT, "protocol": "TCP"}]})
    counts = {COORDINATOR: 1, WORKER: job.num_hosts, SERVER: job.num_servers}
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
                "publishNotReadyAddresses": True,  # services look for the coordinator before it is ready
                "selector": labels,
                "ports": [{"name": "join", "port": DEFAULT_PORT, "protocol": "TCP"}],
            },
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": meta,
            "spec": {**ours, "policyTypes": ["Ingress"], "ingress": ingress},
        },
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": meta,
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": job.name},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": [COORDINATOR]},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [
                    {"name": role, "replicas": 1, "template": {"spec": _job(job, role, count)}}
                    for role, count in counts.items()
                    if count
                ],
            },
        },
    ]


def render_trainjob(job: KubernetesJob) -> dict[str, Any]:
    """Kubeflow's TrainJob: torchrun of its runtime starts `shoal run --on torchrun` on every node."""
    run = ["shoal", "run", "--on", "torchrun", "--name", job.name, *_literal(job)]
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


def _job(job: KubernetesJob, role: str, count: int) -> dict[str, Any]:
    """Job of all services of a role: `count` pods, each of which is started again where it is lost."""
    runs = {"persistentVolumeClaim": {"claimName": job.volume}} if job.volume else {"emptyDir": {}}
    labels = {**_labels(job), "app.kubernetes.io/component": role}
    # Only a volume keeps a coordinator's state; without one another would silently begin anew.
    may_return = role != COORDINATOR or bool(job.volume)
    rules: list[dict[str, Any]] = [
        {
            "action": "Ignore" if may_return else "FailJob",  # an eviction is a death like any other
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
    ]
    if role == COORDINATOR:
        failed = {"containerName": CONTAINER, "operator": "In", "values": [1, 2, 3]}
        rules.append({"action": "FailJob", "onExitCodes": failed})  # the script's own failure is not retried
    return {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": BACKOFF_LIMIT if may_return else 0,
        "podFailurePolicy": {"rules": rules},
        "template": {
            "metadata": {"labels": labels, **_scraped(job)},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": GRACE_S,
                "automountServiceAccountToken": False,
                "securityContext": {"fsGroup": USER_ID},
                "containers": [_container(job, role)],
                "volumes": [{"name": "runs", **runs}],
            },
        },
    }


def _container(job: KubernetesJob, role: str) -> dict[str, Any]:
    command = ["shoal", role, "--health", f"$(POD_IP):{HEALTH_PORT}", "--run-dir", "/runs"]
    ports = {"health": HEALTH_PORT}
    if role == COORDINATOR:
        ports["join"] = DEFAULT_PORT
        command += ["--bind", f"$(POD_IP):{DEFAULT_PORT}", "--name", job.name, "-n", str(job.num_workers)]
        command += ["--worker-services", str(job.num_hosts)]
        command += ["--strategy", job.strategy] if job.strategy else []
        command += ["--servers", str(job.num_servers)] if job.num_servers else []
        command += _literal(job)
    else:
        command += ["--join", f"shoal://{job.name}-{COORDINATOR}-0-0.{job.name}:{DEFAULT_PORT}"]
    resources = {COORDINATOR: COORDINATOR_RESOURCES, WORKER: job.resources, SERVER: job.server_resources}
    return {
        "name": CONTAINER,
        "image": job.image,
        "command": command,
        "env": [
            _key(job),
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "resources": _resources(resources[role]),
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
        "startupProbe": _probe("/healthz", periodSeconds=2, failureThreshold=60),
        "livenessProbe": _probe("/healthz", periodSeconds=10, failureThreshold=3),
        "readinessProbe": _probe("/readyz", periodSeconds=5, failureThreshold=1),
    }


def _probe(path: str, **often: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "health"}, "timeoutSeconds": 5, **often}


def _labels(job: KubernetesJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "shoal", "app.kubernetes.io/instance": job.name}


def _scraped(job: KubernetesJob) -> dict[str, Any]:
    """Annotations by which a Prometheus that may reach the pods finds them."""
    if not job.metrics_from:
        return {}
    said = {"scrape": "true", "port": str(HEALTH_PORT), "path": "/metrics"}
    return {"annotations": {f"prometheus.io/{name}": value for name, value in said.items()}}


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


def _literal(job: KubernetesJob) -> list[str]:
    """Script and arguments as they are: Kubernetes puts variables in the place of $(NAME), the join key among them."""
    return [word.replace("$", "$$") for word in (job.script, *job.args)]
