"""`shoal join`, and the options of a job on several hosts."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer

from shoal.cli.options import Decorator, takes_group
from shoal.cli.verb import fail
from shoal.engines import registry
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config.hosts import HostsConfig
    from shoal.config.launchers import World

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal run --hosts 3 -n 6 --bind 10.0.0.1 train.py     on the head: waits for two more hosts\n"
    "  shoal join shoal://10.0.0.1:7070                      on each of the others: asks for the key"
)

Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="N|NAMES",
        help="Hosts of the job, this one among them: a number, and the others run `shoal join`; or names (a,b,c), where it "
        "is started by ssh.",
        show_default="this machine alone",
    ),
]
Bind = Annotated[
    str | None,
    typer.Option("--bind", metavar="ADDRESS[:PORT]", help="Where this machine listens for the other hosts."),
]
Interface = Annotated[
    str | None,
    typer.Option(
        "--interface",
        metavar="NAME[,NAME]",
        help="Network interface for connections between hosts, torch's too; of several NCCL uses all, `--connections` spreads over "
        "them, the others use the first.",
        show_default="that of the address",
    ),
]
NumConnections = Annotated[
    int | None,
    typer.Option(
        "--connections",
        metavar="N",
        min=1,
        max=16,
        help="Connections of a worker to each server on another host: large pushes and pulls go over all of them.",
        show_default="2 where a host has more than two cores per process, else 1",
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster", metavar="FILE", help="Hosts with their numbers of workers and servers, in TOML."
    ),
]
JoinKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--join-key-file",
        metavar="FILE",
        help="File of mode 0600 with the join key.",
        show_default="SHOAL_JOIN_KEY, else the head makes one and prints it",
    ),
]
JoinTimeout = Annotated[
    float | None,
    typer.Option(
        "--join-timeout",
        metavar="SECONDS",
        help="How long the head waits for all hosts.",
        show_default="600",
    ),
]
Ssh = Annotated[
    str,
    typer.Option(
        "--ssh", metavar="COMMAND", help="Command that starts `shoal join` on the hosts that --hosts names."
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise", metavar="ADDRESS", help="Address under which others reach this machine (NAT)."
    ),
]
Plaintext = Annotated[
    bool,
    typer.Option(
        "--plaintext",
        help="No encryption between hosts: for a fabric that is trusted, never a public address.",
    ),
]
Servers = Annotated[
    str | None,
    typer.Option(
        "--servers",
        metavar="N|colocated",
        help="Server processes that hold the weights, for the strategies ps and ps:...; colocated: one on each host that has "
        "workers.",
        show_default="1 with ps, else 0",
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        "--min-workers",
        metavar="M",
        help="Where a host is lost and no other has room for its workers: go on with fewer, at least so many, until one joins.",
        show_default="wait for a host",
    ),
]
Journal = Annotated[
    str | None,
    typer.Option(
        "--journal",
        metavar="etcd://HOST:PORT,...",
        help="etcd in which the head is recorded: when it is lost, another host takes over by itself. etcds:// with TLS.",
        show_default="`shoal resume` by hand",
    ),
]
Ship = Annotated[
    bool, typer.Option("--ship", help="Send the script's folder to hosts that do not share its file system.")
]


On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ENGINE[:DETAIL]",
        help="Engine that runs the workers, in --hosts N hosts (one, if left out): "
        f"{', '.join(registry.ENGINES)}.",
        show_default="this machine",
    ),
]
EngineResources = Annotated[
    str,
    typer.Option(
        "--resources",
        metavar="ROLE:...",
        help="Resources that an engine is asked for, by role: 'worker:cpus=2,gpus=1,memory=8 server:cpus=1'.",
        show_default="a core for each worker, half a core for each server",
    ),
]


class HostOptions(NamedTuple):  # a dataclass takes 3 ms longer to make, and `shoal --help` would wait for it
    """Options of a job on several hosts: those of `shoal run` and `shoal resume`."""

    on: On = None
    resources: EngineResources = ""
    hosts: Hosts = None
    bind: Bind = None
    interface: Interface = None
    connections: NumConnections = None
    cluster: ClusterFile = None
    join_key_file: JoinKeyFile = None
    join_timeout: JoinTimeout = None
    ssh: Ssh = "ssh -o BatchMode=yes"
    advertise: Advertise = None
    plaintext: Plaintext = False
    ship: Ship = False
    journal: Journal = None

    def config(self, *, num_workers: int, world: World | None = None) -> HostsConfig | None:
        return hosts_config(
            self.hosts,
            self.bind,
            self.cluster,
            self.interface,
            on=self.on,
            world=world,
            resources=self.resources,
            num_workers=num_workers,
            connections=self.connections or 0,
            key_file=self.join_key_file,
            ssh=self.ssh,
            advertise=self.advertise or "",
            plaintext=self.plaintext,
            ship=self.ship,
            **self.given_join_timeout,
        )

    @property
    def given_join_timeout(self) -> dict[str, float]:
        """As keyword argument of HostsConfig, which has the default: a cluster file may say another."""
        return {} if self.join_timeout is None else {"join_timeout_s": self.join_timeout}


@functools.cache
def takes_host_options(without: tuple[str, ...] = ()) -> Decorator:
    """Give a verb these flags where its signature has `hosting`, which it is then called with."""
    kinds = get_type_hints(HostOptions, include_extras=True)
    flags = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in HostOptions._field_defaults.items()
        if name not in without
    ]
    return takes_group("hosting", flags, HostOptions)


def number_of_servers(said: str | None) -> int | str | None:
    """A number where one was given; LaunchConfig refuses words that it does not know."""
    return int(said) if said is not None and said.isdecimal() else said


def hosts_config(
    hosts: str | None,
    bind: str | None,
    cluster: Path | None,
    interface: str | None = None,
    *,
    on: str | None = None,
    resources: str = "",
    num_workers: int = 1,
    world: World | None = None,
    **options: Any,
) -> HostsConfig | None:
    """The hosts that the options ask for; None for this machine alone."""
    from shoal.config.hosts import HostsConfig, parse_bind, parse_hosts, read_cluster, read_tf_config
    from shoal.runtime.transport import interfaces

    said: dict[str, Any] = {}
    if world is not None:
        from shoal.cluster.launch import world as worlds

        return worlds.hosts_of(world, bind, **options)
    if on is not None:
        if interface is not None:
            named = interfaces.named(interface)
            options["interfaces"], bind = tuple(named), bind or next(iter(named.values()))
        from shoal.cluster.hosts.engine_hosts import engine_hosts

        num_slots, names = parse_hosts(hosts) if hosts is not None else (1, ())
        if names or cluster is not None:
            raise ConfigError(
                f"--on {on} has the engine choose the hosts, and {'--hosts' if names else '--cluster'} names them. Nothing was "
                "started; give --hosts a number, or leave --on out."
            )
        if options.get("key_file") is not None:
            options["key_file"] = str(options["key_file"])
        return engine_hosts(
            on,
            num_slots=num_slots,
            num_workers=num_workers,
            bind=bind,
            resources=resources,
            **options,
        )
    if resources:
        raise ConfigError("--resources are asked of an engine. Nothing was started; name it with --on.")
    if cluster is not None:
        try:
            said = read_cluster(cluster.read_text(), str(cluster))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the cluster file {cluster} cannot be read: {error}. Nothing was started."
            ) from None
    elif hosts is None and bind is not None and "TF_CONFIG" in os.environ:
        said = read_tf_config(os.environ["TF_CONFIG"])
    if hosts is not None:
        if said:
            raise ConfigError(
                "--hosts and --cluster both name the hosts. Nothing was started; give one of them."
            )
        said["num_hosts"], said["names"] = parse_hosts(hosts)
        said["by_ssh"] = bool(said["names"])
    if not said:
        given = {"--bind": bind, "--interface": interface, "--connections": options.get("connections")}
        for option in (each for each, value in given.items() if value):
            raise ConfigError(f"{option} is for a job on several hosts. Nothing was started; add --hosts.")
        return None
    if bind is not None:
        said["bind"], said["port"] = parse_bind(bind)
    if interface is not None:
        named = interfaces.named(interface)
        if bind is None and (address := next(iter(named.values()))).startswith("127."):
            raise ConfigError(
                f"--interface {interface} has the address {address}, which no other host can reach. Nothing was started; name the "
                "interface of the network that the hosts share."
            )
        said["interfaces"] = tuple(named)
        said.setdefault("bind", next(iter(named.values())))
        if interfaces.of_address(said["bind"]) != next(iter(named)):
            raise ConfigError(
                f"--interface {interface} has the address {next(iter(named.values()))}, and --bind says {said['bind']}. Nothing was "
                "started; leave --bind out, or give it an address of that interface."
            )
    if options.get("key_file") is not None:
        options["key_file"] = str(options["key_file"])
    # An option that was not given leaves what the cluster file says.
    given = {
        key: value
        for key, value in options.items()
        if key not in said or (value is not False and value not in (None, ""))
    }
    return HostsConfig(**{**said, **given})


def enter_world(on: str | None) -> World | None:
    """World of the launcher that --on names, where it started this process."""
    if on is None:
        return None
    from shoal.cluster.launch import world

    return world.enter(registry.parse(on)[0])


def follow_world(world: World, bind: str | None, run_dir: Path) -> int:
    from shoal.cluster.launch import world as worlds

    return worlds.follow(world, bind, run_dir)


def leading_world(world: World | None) -> AbstractContextManager[list[int]]:
    if world is None or world.local_size == 1:
        return nullcontext([])
    from shoal.cluster.launch import world as worlds

    return worlds.leading(world)


def join(
    address: Annotated[str, typer.Argument(metavar="shoal://HOST:PORT", help="As the head printed it.")],
    join_key_file: JoinKeyFile = None,
    run_dir: Annotated[
        Path,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            help="Where files of this host go that the head's run directory cannot hold.",
        ),
    ] = Path("runs"),
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long the head is tried.")
    ] = 30.0,
    as_host: Annotated[
        str,
        typer.Option(
            "--as-host",
            metavar="N",
            help="Number of the host to be; with --mpi, numbers by rank: 1,2,3.",
            show_default="any",
        ),
    ] = "",
    mpi: Annotated[
        bool, typer.Option("--mpi", help="Take the number from mpirun, which started this process.")
    ] = False,
    cores: Annotated[
        int | None,
        typer.Option(
            "--cores", metavar="N", min=1, help="Cores to use.", show_default="all of the machine's"
        ),
    ] = None,
    interface: Interface = None,
    advertise: Advertise = None,
) -> None:
    """Join a job as one of its hosts: runs its processes here until the job is over."""
    from shoal.cluster.hosts import opening
    from shoal.config.launchers import forget

    wants = _wanted(as_host, mpi)
    forget(os.environ)  # workers are not processes of mpirun
    code, error = opening.join(
        address,
        key_file=str(join_key_file) if join_key_file else None,
        run_dir=run_dir,
        timeout_s=timeout,
        wants=wants,
        cores=cores,
        interface=interface,
        advertise=advertise,
    )
    if error is not None:
        fail(error, code)
    raise typer.Exit(code)


def _wanted(as_host: str, mpi: bool) -> int:
    """Number of the host that this process is to be; -1: any."""
    from shoal.engines import mpi as launcher

    numbers = as_host.split(",") if as_host else []
    if not all(number.strip().isdecimal() for number in numbers) or (len(numbers) > 1 and not mpi):
        raise ConfigError(f"--as-host {as_host} is no number of a host. Nothing was started.")
    if not mpi:
        return int(numbers[0]) if numbers else -1
    rank = launcher.own_rank()
    if not numbers:
        return rank + 1
    if rank >= len(numbers):
        raise ConfigError(
            f"--as-host {as_host} has no number for rank {rank} of mpirun. Nothing was started; give one for each."
        )
    return int(numbers[rank])
