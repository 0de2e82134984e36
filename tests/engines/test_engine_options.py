"""`--on` and `--resources`: what is refused, in one paragraph, before anything starts."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal import system
from shoal.cli.hosts import hosts_config
from shoal.cluster.hosts import opening
from shoal.config.hosts import HostsConfig, Resources, parse_resources
from shoal.engines import protocol, ray_session, registry, spark
from shoal.engines.protocol import Ticket
from shoal.errors import ConfigError


def config(**changes: object) -> HostsConfig:
    said = {"num_hosts": 3, "on": "mpi", "head_takes_part": False, "bind": "127.0.0.1", "workers": (0, 2, 1)}
    return HostsConfig(**{**said, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on": "rey"}, r"there is no engine 'rey'\. .*Nothing was started; there are"),
        ({"on": "mpj"}, r"Did you mean mpi\?"),
        ({"on": "torchrun"}, "torchrun gives no hosts"),
        ({"on": "cloud:gcp"}, r"`shoal cloud render` writes .* Nothing was started"),
        ({"on": "mpi", "resources": "worker:memory=1e"}, "'memory=1e' is none of"),
        ({"on": "mpi:/no/such/file"}, "names a hostfile that does not exist"),
        ({"on": "mpi", "hosts": "3", "num_workers": 2}, "2 workers cannot be on 3 hosts of mpi"),
        ({"on": "mpi", "hosts": "a,b"}, "has the engine choose the hosts, and --hosts names them"),
        ({"resources": "worker:cpus=2"}, "--resources are asked of an engine"),
        ({"on": "mpi", "resources": "chief:cpus=2"}, "'chief' is no role"),
        ({"on": "mpi", "resources": "worker:cores=2"}, "'cores=2' is none of cpus=N"),
        ({"on": "mpi", "resources": "worker:gpus=0.5"}, r"'gpus=0\.5' is none of .*gpus=N \(whole\)"),
    ],
)
def test_what_an_engine_cannot_be_asked_for_is_refused(
    options: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.shutil, "which", lambda program: f"/usr/bin/{program}")
    with pytest.raises(ConfigError, match=said):
        hosts_config(options.pop("hosts", None), None, None, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_workers", "num_servers", "resources", "said"),
    [
        (8, 0, "worker:cpus=2", "2 hosts of 8 cores and 0 GB each were asked of mpi, which is this machine"),
        (2, 2, "server:cpus=64,memory=900000", "2 hosts of 65 cores and 900000 GB each .* ask for less"),
        (2, 0, "worker:memory=900000", "2 hosts of 1 cores and 900000 GB each"),
        (8, 2, "", ""),  # processes without a wish share the cores
        (2, 0, "worker:cpus=2", ""),
    ],
)
def test_the_sum_over_all_hosts_is_more_than_this_machine_has_or_accepted(
    num_workers: int, num_servers: int, resources: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(system, "cores", lambda: list(range(4)))
    hosts = config(**parse_resources(resources), workers=(), port=0)
    refused = pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext()
    with refused:
        opening.listen(
            hosts, script="train.py", num_workers=num_workers, num_servers=num_servers
        ).listener.close()


@pytest.mark.parametrize(
    "name", [name for name, spec in registry.ENGINES.items() if spec.package or spec.program]
)
def test_an_engine_that_is_not_installed_is_named_with_the_way_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.shutil, "which", lambda program: None)
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"not (installed here|on PATH).*(shoal\[{name}\]|install)"):
        registry.load(name)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "which is not installed here"),
        ("import no_such_module", "which is not installed here"),
        ("__version__ = '3.5.1'", r"needs pyspark 4\.0 or newer, and 3\.5\.1 is installed here"),
        ("__version__ = '4.1.0'", ""),
    ],
)
def test_a_package_on_the_path_without_its_metadata_is_known_by_its_own_version(
    content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Spark's own Python is, of $SPARK_HOME/python; or a folder of that name beside the script."""
    (tmp_path / "pyspark").mkdir()
    if content:
        (tmp_path / "pyspark" / "__init__.py").write_text(content)
    monkeypatch.setattr(
        sys, "path", [str(tmp_path), *(each for each in sys.path if "site-packages" not in each)]
    )
    monkeypatch.setattr(registry.shutil, "which", lambda program: f"/usr/bin/{program}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        registry.load("spark")
    sys.modules.pop("pyspark", None)


def test_an_address_is_reached_where_one_of_several_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        protocol.reach(f"spark://127.0.0.1:1,127.0.0.1:{port}")  # a standby master of Spark
    with pytest.raises(OSError, match="refused"):
        protocol.reach(f"spark://127.0.0.1:1,127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["spark://master", "ray://10.0.0.5:", "10.0.0.5:100000", "h1:1,h2"])
def test_an_address_of_another_form_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="is no HOST:PORT"):
        protocol.reach(address)


def test_a_package_that_is_too_old_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda package: package)
    monkeypatch.setattr(registry.metadata, "version", lambda package: "2.9.3")
    with pytest.raises(
        ConfigError, match=r"--on ray needs ray 2\.40 or newer, and 2\.9\.3 is installed here"
    ):
        registry.load("ray")


def test_versions_that_are_asked_for_are_those_of_the_extras() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, spec in registry.ENGINES.items():
        if spec.package:
            [asked] = [each for each in extras[name] if each.startswith(spec.package)]
            assert (
                registry._release(asked.partition(">=")[2])
                == registry._release(spec.oldest)[: asked.count(".") + 1]
            )


def test_gpus_are_not_asked_of_a_spark_on_this_machine_which_never_gives_any() -> None:
    ticket = Ticket(job="a", address="shoal://h:1", key="k" * 20, cores=1, folder="/f")
    with pytest.raises(
        ConfigError, match=r"1 GPUs a host were asked of Spark at local\[1\], which gives none"
    ):
        spark._make_context("", ticket, 1, Resources(gpus=1))


def test_an_address_that_a_killed_ray_left_behind_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_session._running() == "local"
    (tmp_path / "ray").mkdir()
    with socket.socket() as running:
        running.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{running.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert ray_session._running() == "local"
        running.listen()
        assert ray_session._running() == address


def test_no_ray_is_started_only_to_show_its_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert ray_session.queue("") == []


def test_a_ray_of_ones_own_is_forgotten_where_another_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **options: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_session, "_OWN", threading.Event())
    ray_session.connect("local")
    assert ray_session._OWN.is_set()
    with socket.create_server(("127.0.0.1", 0)) as another:
        ray_session.connect(f"127.0.0.1:{another.getsockname()[1]}")
    assert not ray_session._OWN.is_set()


def test_the_head_of_an_engine_has_no_worker_and_no_server() -> None:
    assert [config().host_of(rank, 3) for rank in range(3)] == [1, 1, 2]
    assert [config().host_of_server(number) for number in range(4)] == [1, 2, 1, 2]


def test_resources_of_a_host_are_those_of_the_fullest_one() -> None:
    asked = parse_resources("worker:cpus=2,gpus=1,memory=8 server:memory=4")
    assert config(**asked).resources(3, 2) == Resources(cpus=4.5, gpus=2, memory_gb=20)
    again = parse_resources("worker:cpus=2 worker:memory=8")
    assert again["worker_resources"] == Resources(cpus=2, memory_gb=8)


def test_the_join_key_is_in_the_environment_of_a_slot_and_not_in_its_command() -> None:
    ticket = Ticket(job="a", address="shoal://h:1", key="secret" * 5, cores=2, folder="/f")
    assert "secret" not in " ".join(ticket.command("--as-host", "1"))
    assert ticket.environment()["SHOAL_JOIN_KEY"] == "secret" * 5
    assert "SHOAL_JOIN_KEY" not in os.environ


@pytest.mark.parametrize("on", ["join", "kubernetes"])
def test_hosts_that_join_by_themselves_need_a_key_that_was_given(
    on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_JOIN_KEY", raising=False)
    with pytest.raises(
        ConfigError, match=rf"--on {on} join with a key .* Nothing was started; .*SHOAL_JOIN_KEY"
    ):
        opening.listen(config(on=on), script="train.py")
