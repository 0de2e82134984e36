"""Optional dependencies: the command that installs those of an extra."""

from __future__ import annotations

from importlib import metadata


def install_command(extra: str) -> str:
    """Names the packages themselves, so that it works wherever shoal came from: a checkout, a wheel, an image."""
    try:
        required = metadata.requires("shoal") or []
    except metadata.PackageNotFoundError:  # run from its sources, by PYTHONPATH
        required = []
    mine = [each.partition(";")[0].strip() for each in required if each.endswith(f"extra == '{extra}'")]
    return f"pip install {' '.join(map(repr, mine))}" if mine else f"pip install '/path/to/shoal[{extra}]'"
