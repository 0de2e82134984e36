"""Speed of the link between head and host, as a host measures it when it joins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from namespaces import Cluster

from shoal.cluster.hosts.authority import Authority
from shoal.cluster.hosts.files import FileService, measured_link
from shoal.runtime.transport import tls
from shoal.runtime.transport.framing import read_message


@pytest.mark.parametrize(("rate", "bytes_per_s"), [("64kbit", 0.0), ("10mbit", 1.25e6), ("100mbit", 12.5e6)])
def test_a_limited_link_is_measured_as_it_is(
    rate: str, bytes_per_s: float, start_cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    head, host = start_cluster(2)
    host.limit(rate)
    authority, service = Authority("job"), FileService(tmp_path, None)
    with head.network():
        listener = tls.listen(head.address)

    def serve() -> None:
        with authority.issue("head").accept(listener) as stream:
            assert isinstance(stream, tls.TlsStream)
            stream.settimeout(10.0)
            service.serve(stream, read_message(stream)[0])

    thread = threading.Thread(target=serve)
    thread.start()
    with host.network():
        found = measured_link(
            f"{tls.TLS}{head.address}:{listener.getsockname()[1]}", authority.issue("host-1")
        )
    thread.join()
    listener.close()
    # The bucket of 256 kB lets the beginning through at once; what takes longer than 3 s is not known.
    assert 0.7 * bytes_per_s <= found <= 1.6 * bytes_per_s
