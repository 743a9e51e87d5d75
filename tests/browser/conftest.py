"""Pages of `msrl view` in an installed Chromium, which `nox -s browser` runs.

The tests are skipped without playwright or without a browser. MSRL_CHROMIUM names the browser,
MSRL_AXE the script of axe-core, and MSRL_SCREENSHOTS a folder that receives screenshots.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    paths = (os.environ.get("MSRL_CHROMIUM"), *map(shutil.which, NAMES))
    return next((path for path in paths if path), None)


def missing() -> str | None:
    """Return why the tests cannot run, or None."""
    if importlib.util.find_spec("playwright") is None:
        return "needs playwright: run nox -s browser"
    if chromium() is None:
        return "needs a browser: install chromium, or name one in MSRL_CHROMIUM"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := missing():
        own = f"{HERE}{os.sep}"
        for item in items:
            if str(item.path).startswith(own):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A container has no user namespaces for Chromium's sandbox. The pages are our own.
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()
