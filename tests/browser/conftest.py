"""A headless Chromium, where there is one: Debian's, or the one SHOAL_TEST_BROWSER names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


def why_not() -> str | None:
    """Why there is no browser to test with; None where there is."""
    if _executable() is None:
        return "no chromium on this machine (apt-get install chromium)"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return None


def _executable() -> str | None:
    return (
        os.environ.get("SHOAL_TEST_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")
    )


@pytest.fixture(scope="module")  # not for the session: tests of jobs look for processes that were left behind
def browser() -> Iterator[Any]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, as in CI, Chromium has no sandbox; the pages are our own.
        found = playwright.chromium.launch(
            executable_path=_executable(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield found
        finally:
            found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails its test where a script fails, or the content security policy refuses something."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found, wrong = context.new_page(), list[str]()
    found.set_default_timeout(30_000)
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on(
        "console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None
    )
    yield found
    context.close()
    assert not wrong
