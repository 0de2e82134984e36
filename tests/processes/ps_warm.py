"""The warm parent of tests with servers: numba and the kernels are loaded once. Import `warm_parent` where it is wanted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.cluster.roles import PRELOAD_WITH_MESH, PRELOAD_WITH_SERVERS
from shoal.cluster.warm_client import WarmParent

_shared: list[WarmParent] = []


@pytest.fixture(scope="session")
def warm_parent() -> Iterator[WarmParent]:
    """One for all modules that import it."""
    if _shared:
        yield _shared[0]
        return
    with WarmParent(
        "tests-ps", preload=["shoal.train.metrics", PRELOAD_WITH_MESH, *PRELOAD_WITH_SERVERS]
    ) as warm:
        warm.wait_ready()
        _shared.append(warm)
        yield warm
        _shared.clear()
