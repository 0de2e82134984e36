"""Cases that differ from others of a test in numbers only: `make test` leaves them out, `make matrix` runs them."""

from __future__ import annotations

import os
from typing import Any

import pytest

IS_WHOLE = "SHOAL_WHOLE_MATRIX" in os.environ


def matrix_only(*cases: Any) -> list[Any]:
    """Rows for `parametrize`; a row of several arguments is a tuple."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.matrix)
        for case in cases
    ]
