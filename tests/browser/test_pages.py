"""Pages of `msrl view` as a user sees them: clicks, keys, themes, widths and hostile texts."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import test_view_images
import view_runs
from msrl import registry
from msrl.workflows.view.build import View, write_folder, write_single_file
from msrl.workflows.view.serve import open_server
from scripted_episodes import TOOL_FORMATS

SIZES = {"wide": (1400, 900), "middle": (800, 900), "narrow": (390, 844)}
PAGES = {
    "overview": "#/overview",
    "configuration": "#/overview?tab=config",
    "lineage": "#/overview?tab=lineage",
    "steps": "#/steps?run=0&step=2",
    "rollouts": "#/rollouts",
    "group": "#/group/0/rollout/1/0",
    "sample": "#/sample/0/rollout/1/1",
    "tokens": "#/sample/0/rollout/1/1?view=tokens",
    "evaluation": "#/evaluation",
}
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a view of two runs that differ in their learning rate."""
    root = tmp_path_factory.mktemp("view")
    first = view_runs.make_run(root / "runs" / "grpo", num_steps=60, format="parquet")
    settings = {"samples_per_prompt": 8, "prompts_per_step": 3}
    lr = {"optimizer": {"lr": 2e-4}}
    config = view_runs.make_config("faster", train=lr, rollout=settings)
    second = view_runs.make_run(root / "runs" / "faster", num_steps=40, config=config)
    rows = [view_runs.jsonl_row(view_runs.response(1, 0, number), 5) for number in range(8)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (second / "rollouts" / "step_000001.jsonl").write_text(lines)
    write_folder([first, second], root / "view")
    return root / "view"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a view of a run whose name, prompts, responses and answers are hostile."""
    root = tmp_path_factory.mktemp("hostile")
    name = "<img src=x onerror=window.hacked=1>"
    run = view_runs.make_run(
        root / name, texts=view_runs.HOSTILE * 4, config=view_runs.make_config(name)
    )
    write_folder([run], root / "view")
    write_single_file([run], root / "view" / "single.html")
    return root / "view"


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Return a function that opens a page and records its errors and requests."""
    contexts: list[Any] = []

    def open(
        folder: Path | str, hash: str = "", size: str = "wide", dark: bool = False, **options: Any
    ) -> Any:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            **options,
        )
        contexts.append(context)
        page = context.new_page()
        page.problems = []
        page.requested = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda message: page.problems.append(message.text)
                if message.type in ("error", "warning") else None)  # fmt: skip
        page.on("request", lambda request: page.requested.append(request.url))
        page.on("dialog", lambda dialog: page.problems.append("dialog"))
        address = folder if isinstance(folder, str) else (folder / "index.html").as_uri()
        page.goto(address + hash)
        page.wait_for_selector("h1")
        page.wait_for_timeout(150)
        return page

    yield open
    for context in contexts:
        context.close()


def screenshot(page: Any, name: str) -> None:
    """Save a screenshot if MSRL_SCREENSHOTS names a folder."""
    if target := os.environ.get("MSRL_SCREENSHOTS"):
        page.screenshot(path=f"{target}/{name}.png")


def axe_faults(page: Any) -> list[Any]:
    """Return the serious faults that axe-core finds; none without its script."""
    script = os.environ.get("MSRL_AXE")
    if not script:
        return []
    page.evaluate(Path(script).read_text())
    rules = page.evaluate("axe.run()")["violations"]
    serious = [rule for rule in rules if rule["impact"] in ("serious", "critical")]
    return [(rule["id"], [node["html"] for node in rule["nodes"]][:3]) for rule in serious]


@pytest.mark.sample(18)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_fault_no_request_and_no_sideways_scrolling(
    folder: Path, open_page: Open, name: str, size: str, theme: str
):
    page = open_page(folder, PAGES[name], size, theme == "dark", bypass_csp=True)
    screenshot(page, f"{name}-{size}-{theme}")
    assert page.problems == []
    assert all(address.startswith("file:") for address in page.requested)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert axe_faults(page) == []


def test_the_reason_of_a_wrong_answer_is_four_clicks_away(folder: Path, open_page: Open):
    page = open_page(folder)
    page.click("nav >> text=Rollouts")
    page.click("button:has-text('wrong')")
    page.click(".virtual .row >> nth=0")
    page.wait_for_selector("text=Why this reward")
    text = page.inner_text("main")
    assert "14 in the box" in text
    assert "wrong" in text
    assert page.problems == []


def test_the_differing_key_of_two_runs_is_one_click_away(folder: Path, open_page: Open):
    page = open_page(folder)
    page.click("text=Compare configurations")
    first = page.inner_text(".card:has(h2:text-is('Differences')) table")
    assert "train.optimizer.lr" in first
    assert "0.0002" in first


def test_curves_are_drawn_and_smoothed(folder: Path, open_page: Open):
    page = open_page(folder)
    page.wait_for_selector(".curve canvas")
    before = page.locator(".curve .readout").first.inner_text()
    slider = page.locator("input[type=range]")
    slider.focus()
    for _ in range(20):
        slider.press("ArrowRight")
    page.wait_for_timeout(200)
    assert page.locator("output").first.inner_text() == "0.4"
    assert before != ""
    assert page.problems == []


def test_filters_and_search_select_samples(folder: Path, open_page: Open):
    page = open_page(folder, "#/rollouts")
    assert "720 samples of 720" in page.inner_text("[role=status]")
    page.click("button:has-text('right')")
    page.wait_for_selector("[role=status]:has-text('360 samples of 720')")
    page.fill("input[type=search]", "8+7? (101)")
    page.wait_for_selector("[role=status]:has-text('2 samples with this text (searched 60 of 60')")
    assert page.locator(".virtual .row").count() == 2
    assert page.problems == []


def test_a_search_marks_its_hits_and_keeps_its_list(folder: Path, open_page: Open):
    page = open_page(folder, "#/rollouts?from=1&to=1")
    page.type("input[type=search]", "boxed{15}")
    page.wait_for_selector("[role=status]:has-text('6 samples with this text')")
    assert page.evaluate("document.activeElement.value") == "boxed{15}"
    assert page.locator(".virtual mark").all_inner_texts() == ["boxed{15}"] * 6
    page.click(".virtual .row >> nth=0")
    page.wait_for_selector(".turn mark")
    page.wait_for_selector("a:has-text('next')")
    for _ in range(5):
        assert page.inner_text(".turn mark") == "boxed{15}"
        page.keyboard.press("n")
        page.wait_for_timeout(150)
    assert page.locator("a:has-text('next')").count() == 0
    assert page.problems == []


def test_axes_fit_their_values(tmp_path: Path, open_page: Open):
    run = view_runs.make_run(tmp_path / "run", num_steps=1)
    with (run / "metrics.jsonl").open("a") as file:
        for step in (2, 3000):
            file.write(json.dumps({"step": step, "metrics": {"train/constant": 0.0}}) + "\n")
    write_folder([run], tmp_path / "view")
    page = open_page(tmp_path / "view")
    page.get_by_label("Metrics").fill("train/constant")
    page.wait_for_selector(".curve canvas")
    with page.expect_download() as download:
        page.get_by_label("Save train/constant as SVG").click()
    svg = Path(download.value.path()).read_text()
    assert {"-1", "0", "1", "3,000"} <= {*re.findall(r">([^<]*)</text>", svg)}
    width = re.search(r'width="([0-9.]+)"', svg)
    last = re.search(r'x="([0-9.]+)"[^>]*>3,000', svg)
    assert width is not None and last is not None
    assert float(last[1]) + 18 <= float(width[1])


def test_a_group_of_eight_fits_the_page(folder: Path, open_page: Open):
    page = open_page(folder, "#/group/1/rollout/1/0")
    boxes = [card.bounding_box() for card in page.locator(".side-by-side > .card").all()]
    assert len(boxes) == 8
    assert all(box["x"] + box["width"] <= 1400 for box in boxes)


def test_navigation_leaves_no_frame_around_the_page(folder: Path, open_page: Open):
    page = open_page(folder)
    page.keyboard.press("2")
    page.wait_for_selector("h1:has-text('Step')")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "none"


def test_runs_sort_filter_and_export(folder: Path, open_page: Open):
    page = open_page(folder)
    page.click("th button:has-text('step')")
    assert page.locator("tbody th").all_inner_texts() == ["faster", "grpo"]
    page.click("th button:has-text('step')")
    assert page.locator("tbody th").all_inner_texts() == ["grpo", "faster"]
    page.get_by_label("Runs", exact=True).first.fill("fast")
    page.wait_for_selector("[role=status]:has-text('1 run of 2')")
    page.get_by_label("X axis").select_option("tokens")
    page.wait_for_selector(".curve canvas")
    with page.expect_download() as download:
        page.get_by_label("Save train/loss as CSV").first.click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0] == 'tokens,"grpo","faster"'
    assert page.problems == []


def test_every_page_can_be_used_with_the_keyboard(folder: Path, open_page: Open):
    page = open_page(folder, "#/rollouts")
    page.focus(".virtual")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.get_attribute(".virtual", "aria-activedescendant") == "row-2"
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Why this reward")
    page.click("button:has-text('Tokens')")
    page.focus(".tokens")
    before = page.inner_text(".token-readout")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".token-readout") != before
    page.go_back()
    page.wait_for_selector(".virtual")


def test_calls_of_tools_are_folded_in_every_format(open_page: Open, tmp_path: Path):
    texts = [row.text for row in TOOL_FORMATS.values()]
    assert set(TOOL_FORMATS) == set(registry.names(registry.TOOL_FORMATS))
    write_folder([view_runs.make_run(tmp_path / "tools", texts=texts)], tmp_path / "view")
    for number, (name, row) in enumerate(TOOL_FORMATS.items()):
        page = open_page(tmp_path / "view", f"#/sample/0/rollout/1/{12 + number}")
        page.wait_for_selector(".turn")
        calls = page.locator(".turn details.call:not([open])")
        assert calls.count() >= 1, name
        assert row.content in page.inner_text("main"), name
        calls.last.click()
        assert "stop" in page.locator(".turn details.call[open] pre").inner_text(), name
        assert page.problems == []


def test_each_token_shows_its_numbers(folder: Path, open_page: Open):
    page = open_page(folder, PAGES["tokens"])
    page.hover(".tk:not(.prompt) >> nth=5")
    numbers = page.inner_text(".token-readout")
    for name in ("log-ratio", "entropy", "KL", "advantage", "version", "probability"):
        assert name in numbers
    choices = page.locator("select option").all_inner_texts()
    assert len(choices) == 7
    page.select_option("select", label="Entropy")
    assert page.locator(".tk.high-8").count() > 0


def test_problems_won_and_lost_are_listed(folder: Path, open_page: Open):
    page = open_page(folder, "#/evaluation")
    page.wait_for_selector(".virtual .row")
    assert page.locator("button:has-text('won 2')").count() == 1
    assert page.locator("button:has-text('lost 2')").count() == 1
    page.click("button:has-text('lost 2')")
    page.wait_for_selector(".virtual .row")
    assert page.locator(".virtual .row").count() == 2


@pytest.mark.parametrize("file", ["index.html", "single.html"])
def test_hostile_texts_take_no_effect(hostile: Path, open_page: Open, file: str):
    page = open_page((hostile / file).as_uri(), "#/rollouts?sort=reward")
    last = 12 + 4 * len(view_runs.HOSTILE)
    for hash in ("#/overview", "#/overview?tab=lineage", "#/overview?tab=config", "#/steps?step=1"):
        page.goto((hostile / file).as_uri() + hash)
        page.wait_for_timeout(50)
    for view in ("text", "tokens"):
        for row in range(12, last):
            page.goto(f"{(hostile / file).as_uri()}#/sample/0/rollout/1/{row}?view={view}")
            page.wait_for_selector(".turn" if view == "text" else ".tk")
    page.goto((hostile / file).as_uri() + "#/group/0/rollout/1/3")
    page.wait_for_selector(".side-by-side .text")
    assert page.evaluate("window.hacked") is None
    assert (
        page.locator("main img, main svg[onload], main a[href^=javascript], main style").count()
        == 0
    )
    assert page.locator("script:not([data-chunk])").count() <= 4
    assert all(address.startswith("file:") for address in page.requested)
    assert page.problems == []
    text = page.inner_text("main")
    assert "<img src=x onerror" in text or "</script>" in text


def test_control_characters_are_visible(hostile: Path, open_page: Open):
    row = 12 + next(i for i, text in enumerate(view_runs.HOSTILE) if "\x1b" in text)
    page = open_page(hostile, f"#/sample/0/rollout/1/{row}")
    text = page.inner_text(".turn >> nth=1")
    assert "\u241b" in text and "[U+202E]" in text and "\u202e" not in text


def test_the_policy_blocks_an_injected_script(hostile: Path, open_page: Open):
    page = open_page(hostile)
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        " document.body.append(s); document.body.setAttribute('onclick', 'window.hacked = 2');"
        " document.body.click(); }"
    )
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_a_served_view_follows_the_run(browser: Any, open_page: Open, tmp_path: Path):
    import threading

    run = view_runs.make_run(tmp_path / "grpo", num_steps=2)
    view = View([run], tmp_path / "view", is_live=True)
    view.update()
    with open_server(view, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = open_page(server.link, "")
        page.goto(page.url + "#/steps")
        page.wait_for_selector("h1:text-is('Step 2')")
        page.wait_for_timeout(3500)
        line = (run / "metrics.jsonl").read_text().splitlines()[-1]
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line.replace('"step": 2,', '"step": 3,', 1) + "\n")
        view.update()
        page.wait_for_selector("h1:text-is('Step 3')", timeout=15000)
        page.goto(page.url.split("#")[0] + "#/rollouts")
        page.type("input[type=search]", "boxed{15}")
        page.wait_for_selector("[role=status]:has-text('12 samples with this text')")
        assert page.locator(".virtual mark").count() == 12
        assert page.problems == []
        server.shutdown()


def test_a_served_overview_saves_tags_and_notes(open_page: Open, tmp_path: Path):
    import threading

    for name in ("grpo", "dapo"):
        view_runs.make_run(tmp_path / "runs" / name, num_steps=1)
    view = View([tmp_path / "runs"], tmp_path / "view", is_live=True)
    view.update()
    with open_server(view, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = open_page(server.link)
        page.get_by_label("note of dapo").fill("<b>best</b>")
        page.get_by_label("tags of dapo").fill("good, small")
        page.get_by_label("tags of dapo").press("Enter")
        page.wait_for_timeout(300)
        server.shutdown()
        assert page.problems == []
    saved = json.loads((tmp_path / "runs" / "dapo" / "notes.json").read_text())
    assert saved == {"tags": ["good", "small"], "note": "<b>best</b>"}


def cpu_seconds(browser: Any) -> float:
    """Return the CPU time of the browser, which other programs of the machine do not change."""
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    return sum(process["cpuTime"] for process in processes)


def test_100_000_samples_open_in_three_seconds_and_scroll(
    browser: Any, open_page: Open, tmp_path: Path
):
    from big_view import write_big_view

    write_big_view(tmp_path / "view", num_steps=200, samples_per_step=500)
    assert sum(path.is_file() for path in (tmp_path / "view").rglob("*")) <= 100
    before, start = cpu_seconds(browser), time.perf_counter()
    page = open_page(tmp_path / "view", "#/rollouts")
    page.wait_for_selector("[role=status]:has-text('of 100,000')")
    seconds, wall = cpu_seconds(browser) - before, time.perf_counter() - start
    frames = page.evaluate(
        """async () => {
          const list = document.querySelector('.virtual');
          const times = [];
          for (let i = 0; i < 60; i += 1) {
            list.scrollTop += 4000;
            const start = performance.now();
            await new Promise((next) => requestAnimationFrame(() => setTimeout(next)));
            times.push(performance.now() - start);
          }
          times.sort((a, b) => a - b);
          return [times[30], document.querySelectorAll('.virtual .row').length];
        }"""
    )
    print(f"opened in {wall:.2f} s ({seconds:.2f} s of CPU), {frames[0]:.0f} ms per frame")
    assert seconds < 3.0
    assert frames[1] < 100


def test_the_tokens_of_each_sequence_of_an_episode_are_shown(tmp_path: Path, open_page: Open):
    run = view_runs.make_run(tmp_path / "runs" / "agent", num_steps=1)
    row = json.dumps(view_runs.edited_episode())
    (run / "rollouts" / "step_000001.jsonl").write_text(row + "\n")
    write_folder([run], tmp_path / "view")
    page = open_page(tmp_path / "view", "#/sample/0/rollout/1/0?view=tokens")
    page.wait_for_selector(".tokens .tk")
    assert page.locator(".tokens .tk").count() == 5
    page.get_by_label("Sequence").select_option("1")
    page.wait_for_function("document.querySelectorAll('.tokens .tk').length === 3")
    assert page.problems == []


@pytest.mark.parametrize("size", SIZES)
def test_a_sample_shows_its_images(tmp_path: Path, open_page: Open, size: str):
    run = view_runs.make_run(tmp_path / "grpo", num_steps=0)
    test_view_images.write(run, test_view_images.BOTH)
    write_folder([run], tmp_path / "view")
    page = open_page(tmp_path / "view", "#/sample/0/rollout/1/0", size, bypass_csp=True)
    page.wait_for_selector("main img")
    screenshot(page, f"images-{size}")
    widths = page.evaluate("[...document.querySelectorAll('main img')].map(i => i.naturalWidth)")
    assert len(widths) == 2
    assert all(widths)
    assert page.problems == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert axe_faults(page) == []
