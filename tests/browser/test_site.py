"""The documentation site in an installed Chromium, opened from disk: drawings, keys and search."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import ROOT

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site."""
    pytest.importorskip("furo", reason="the documentation's packages are not installed")
    pytest.importorskip("myst_parser")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-c", "docs", ".", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    return folder


@pytest.fixture
def open_page(browser: Any, site: Path) -> Iterator[Open]:
    """Return a function that opens a page of the site from disk."""
    contexts: list[Any] = []

    def open(path: str, *, width: int = 1400, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            permissions=["clipboard-read", "clipboard-write"],
        )
        contexts.append(context)
        page = context.new_page()
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.goto((site / "index.html").parent.as_uri() + f"/{path}")
        return page

    yield open
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", ["pipeline", "formats", "layouts", "rl-loop"])
def test_texts_of_drawings_are_inside_their_boxes(browser: Any, name: str):
    page = browser.new_page()
    page.goto((ROOT / "docs" / "images" / f"{name}.svg").as_uri())
    outside = page.evaluate(
        """() => {
          const boxes = [...document.querySelectorAll('rect[rx="6"]')].map((box) => box.getBBox());
          return [...document.querySelectorAll('text')].filter((text) => {
            const inner = text.getBBox();
            const [x, y] = [inner.x + inner.width / 2, inner.y + inner.height / 2];
            const box = boxes.find(
              (b) => x > b.x && x < b.x + b.width && y > b.y && y < b.y + b.height);
            return box && (inner.x < box.x || inner.x + inner.width > box.x + box.width);
          }).map((text) => text.textContent);
        }"""
    )
    page.close()
    assert outside == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 800, 390])
def test_pages_fit_the_window(open_page: Open, width: int, dark: bool):
    for path in ("docs/index.html", "docs/configuration.html", "docs/preference.zh.html"):
        page = open_page(path, width=width, dark=dark)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        assert page.problems == []


def test_keys_wrap_between_words_only(open_page: Open):
    page = open_page("docs/configuration.html")
    keys = page.locator("td:first-child code").all_inner_texts()
    assert "train.optimizer.lr" in keys
    broken = page.evaluate(
        """() => [...document.querySelectorAll('td code .pre')].flatMap((key) =>
          [...key.childNodes].filter((node) => {
            const range = document.createRange();
            range.selectNodeContents(node);
            const lines = new Set([...range.getClientRects()].map((r) => r.top));
            return node.nodeType === 3 && lines.size > 1 && !/[\\s-]/.test(node.textContent);
          }).map((node) => node.textContent))"""
    )
    assert broken == []


@pytest.mark.parametrize(
    ("start", "query", "is_chinese"), [("sft", "reward hacking", False), ("faq.zh", "GRPO", True)]
)
def test_a_search_from_disk_shows_texts_in_the_language_of_the_page(
    open_page: Open, start: str, query: str, is_chinese: bool
):
    page = open_page(f"docs/{start}.html")
    page.fill(".sidebar-search", query)
    page.press(".sidebar-search", "Enter")
    page.wait_for_selector("#search-results p.context")
    for link in page.locator("#search-results li a").all():
        assert (".zh" in link.get_attribute("href")) == is_chinese
    assert page.problems == []


def test_a_block_of_code_is_copied(open_page: Open):
    page = open_page("docs/get-started.html")
    page.locator("div.highlight").first.hover()
    page.locator(".copy").first.click()
    page.wait_for_selector(".copy:has-text('Copied')")
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.strip().endswith("source .venv/bin/activate")
