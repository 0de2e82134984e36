"""`shoal kubernetes render` and `shoal cloud render`: files for engines that are given them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config.hosts import Resources

KUBERNETES_EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal kubernetes render -n 4 --hosts 2 --image registry/train:1 train.py > job.yaml\n"
    "  kubectl apply -f job.yaml"
)
CLOUD_EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal cloud render --cloud gcp -n 4 --hosts 2 train.py > task.yaml\n"
    "  SHOAL_JOIN_KEY=$(openssl rand -hex 16) sky launch --secret SHOAL_JOIN_KEY task.yaml"
)

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="As it is called there.")]
Args = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")]
Workers = Annotated[int, typer.Option("-n", "--workers", metavar="WORKERS", min=1, help="Worker processes.")]
Hosts = Annotated[
    int, typer.Option("--hosts", metavar="N", min=1, help="Pods or machines that have workers.")
]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the job.")]
Wanted = Annotated[str, typer.Option("--resources", metavar="ROLE:...", help="As for `shoal run`.")]


def kubernetes(
    script: Script,
    args: Args = None,
    workers: Workers = 1,
    hosts: Hosts = 1,
    servers: Annotated[
        int | None,
        typer.Option(
            "--servers", metavar="N", min=1, help="Pods with a server.", show_default="1 with ps, else none"
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", metavar="STRATEGY", help="As for `shoal run`.", show_default="ddp"),
    ] = None,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="With Python, shoal and the script.")
    ] = "",
    name: Name = "shoal",
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="Of Kubernetes.")] = "default",
    resources: Wanted = "",
    volume: Annotated[
        str,
        typer.Option(
            "--volume", metavar="CLAIM", help="Claim for the run directory.", show_default="the head's disk"
        ),
    ] = "",
    metrics_from: Annotated[
        str,
        typer.Option(
            "--metrics-from",
            metavar="NAMESPACE",
            help="Namespace of a Prometheus that may read the pods' /metrics.",
            show_default="none",
        ),
    ] = "",
    trainjob: Annotated[
        bool, typer.Option("--trainjob", help="A Kubeflow TrainJob in place of the JobSet.")
    ] = False,
) -> None:
    """Write the manifests of a job to standard output: Secret, Service, NetworkPolicy and JobSet. The Secret holds a new join key."""
    from shoal.cluster.hosts.joining import new_join_key
    from shoal.config.hosts import SERVER_RESOURCES, parse_resources
    from shoal.config.launch import LaunchConfig
    from shoal.engines import kubernetes as manifests
    from shoal.engines.yaml_text import to_yaml

    if not image:
        raise ConfigError(
            "the pods need an image with Python, shoal and the script. Nothing was written; build one from docs/guides/Dockerfile "
            "and name it with --image."
        )
    _refuse(name, workers, hosts)
    num_servers = LaunchConfig(script=script, workers=workers, strategy=strategy, servers=servers).num_servers
    if num_servers and trainjob:
        raise ConfigError(
            f"a TrainJob is torchrun's world of equal processes, and --strategy {strategy} wants {num_servers} server{'s' if num_servers > 1 else ''} too. Nothing was "
            "written; leave --trainjob out."
        )
    job = manifests.KubernetesJob(
        name=name,
        image=image,
        script=script,
        args=args or [],
        namespace=namespace,
        num_workers=workers,
        num_hosts=hosts,
        resources=_of_host(resources, workers, hosts),
        server_resources=parse_resources(resources).get("server_resources", SERVER_RESOURCES),
        num_servers=num_servers,
        strategy=strategy or "",
        metrics_from=metrics_from,
        key=new_join_key(),
        volume=volume,
    )
    documents = manifests.render(job)
    if trainjob:
        documents = [documents[0], manifests.render_trainjob(job)]
    typer.echo("---\n".join(to_yaml(each) for each in documents), nl=False)


def cloud(
    script: Script,
    args: Args = None,
    cloud: Annotated[str, typer.Option("--cloud", metavar="CLOUD", help="gcp or aws.")] = "gcp",
    workers: Workers = 1,
    hosts: Hosts = 1,
    name: Name = "shoal",
    resources: Wanted = "",
    accelerator: Annotated[
        str, typer.Option("--accelerator", metavar="NAME", help="GPU, as SkyPilot calls it: L4, A100.")
    ] = "L4",
    spot: Annotated[
        bool, typer.Option("--spot", help="Spot instances: a host leaves when its is taken.")
    ] = False,
) -> None:
    """Write a task file of SkyPilot to standard output."""
    from shoal.engines import cloud as task
    from shoal.engines.yaml_text import to_yaml

    if cloud not in task.CLOUDS:
        raise ConfigError(
            f"there is no cloud '{cloud}'. Nothing was written; give one of {', '.join(task.CLOUDS)}."
        )
    _refuse(name, workers, hosts)
    rendered = task.render(
        cloud=cloud,
        name=name,
        script=script,
        args=args or [],
        num_workers=workers,
        num_hosts=hosts,
        resources=_of_host(resources, workers, hosts),
        accelerator=accelerator,
        use_spot=spot,
    )
    typer.echo(to_yaml(rendered), nl=False)


def _of_host(said: str, workers: int, hosts: int) -> Resources:
    from shoal.config.hosts import Resources, parse_resources

    return parse_resources(said).get("worker_resources", Resources()) * -(-workers // hosts)


def _refuse(name: str, workers: int, hosts: int) -> None:
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--name {name} cannot be a name of pods. Nothing was written; use up to 40 of a-z, 0-9 and -, a letter first."
        )
    if workers < hosts:
        raise ConfigError(
            f"{workers} workers cannot be on {hosts} hosts: each needs one. Nothing was written; give -n {hosts} or more."
        )
