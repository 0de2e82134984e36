"""Object stores for tests: servers of this machine that speak the protocols of S3 and of Google's storage."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from waiting import wait_until


@contextlib.contextmanager
def object_store(scheme: str, folder: Path) -> Iterator[dict[str, str]]:
    """Start one with an empty bucket `bucket`; gives the environment of its clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    if scheme == "s3":
        program = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        env = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    else:
        start = "import sys; from gcp_storage_emulator.__main__ import main; main(sys.argv[1:])"
        program = [sys.executable, "-c", start, "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
        program.append("--default-bucket=bucket")
        # Without looking for a kind of bucket that only Google has.
        env = {"STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    with (folder / f"{scheme}.log").open("wb") as log:
        server = subprocess.Popen(program, stdout=log, stderr=log, env={**os.environ, **env})
    try:
        assert wait_until(lambda: server.poll() is not None or _answers(url), 90.0)
        assert server.poll() is None, (folder / f"{scheme}.log").read_text()
        if scheme == "s3":
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=30)
        yield env
    finally:
        server.kill()
        server.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
