"""The page in a real browser: it draws, stays silent, loads nothing, and takes text for text."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.findings import GateResult, Judgement
from rpadiag.reports.html import write_report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
SCRIPT = "<script>window.planted = 1</script>"
DRAWN_WITHIN_S = 60.0

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]


class Page:
    """A loaded report with what the browser logged while it loaded."""

    def __init__(self, driver: Any, file: Path) -> None:
        self.driver = driver
        self.file = file

    def emulate(self, *, width: int = 1280, scheme: str = "light", media: str = "") -> None:
        """Set page width in CSS pixels, colour scheme and medium, then load afresh."""
        phone = width < 600
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        self.driver.get(self.file.as_uri())
        self.wait("return document.documentElement.dataset.drawn")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: str) -> Any:
        deadline = time.monotonic() + DRAWN_WITHIN_S
        while time.monotonic() < deadline:
            value = self.run(condition)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"not within {DRAWN_WITHIN_S} s: {condition}; console: {self.driver.get_log('browser')}")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    root = tmp_path_factory.mktemp("report")
    runs = [write_compare(root / "compare", prompt_text=SCRIPT, odd_word=f" {SCRIPT}"), write_bisect(root / "bisect")]
    nights = [write_compare(root / "nights" / f"n{i}", num_layers=1, num_prompts=2, spread=1 + i / 4) for i in range(3)]
    failed = GateResult(name=SCRIPT, gate="k3_kl<=1e-9", status="fail", text=f"k3_kl is 1 {SCRIPT}", run="runs/now")
    judgement = Judgement(gates=(failed,), baselines=(SCRIPT,))
    file = write_report(runs, root / "report.html", judgement=judgement, history=nights)
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield Page(driver, file)
    finally:
        driver.quit()


def test_every_plot_is_drawn_and_the_console_stays_silent(page: Page) -> None:
    page.emulate()
    state = page.run(
        "return [...document.querySelectorAll('.plot')].map(e => [e.id, e.querySelectorAll('svg.main-svg').length,"
        " e.querySelectorAll('.trace, .heatmaplayer image, .barlayer path').length])"
    )
    assert len(state) == 9
    assert all(svgs >= 1 and marks >= 1 for _, svgs, marks in state), state
    assert page.driver.get_log("browser") == []


def test_page_requests_nothing_but_itself(page: Page) -> None:
    page.driver.get_log("performance")
    page.emulate()
    asked = [
        entry["params"]["request"]["url"]
        for entry in (json.loads(e["message"])["message"] for e in page.driver.get_log("performance"))
        if entry["method"] == "Network.requestWillBeSent"
    ]
    assert page.file.as_uri() in asked
    assert [u for u in asked if u != page.file.as_uri() and not u.startswith(("data:", "blob:"))] == []


def test_script_in_a_prompt_or_token_stays_text(page: Page) -> None:
    page.emulate()
    assert page.run("return window.planted === undefined")
    assert SCRIPT in page.run("return document.querySelector('#s0-worst mark').textContent")
    assert SCRIPT in page.run("return document.querySelector('#s0-prompts').textContent")
    assert page.run("return document.scripts.length") == 3


def test_switch_over_the_map_changes_what_is_drawn(page: Page) -> None:
    page.emulate()
    shown = "return document.getElementById('s0-map').data.map(t => t.visible)"
    before = page.run(shown)
    page.run("document.querySelectorAll('[data-figure=s0-map] input')[1].click()")
    page.wait("return document.getElementById('s0-map').data[2].visible === true")
    assert page.run(shown) != before
    assert "as they ran" in page.run("return document.getElementById('s0-map-note').textContent")


def test_dark_pages_have_dark_plots_and_follow_a_change_of_scheme(page: Page) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    text = "return document.getElementById('s0-map').layout.font.color"
    page.emulate(scheme="dark")
    dark = (page.run(background), page.run(text))
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    )
    page.wait(f"return (() => {{ {text} }})() !== '{dark[1]}'")
    light = (page.run(background), page.run(text))
    assert dark[0] != light[0] and dark[1] != light[1]


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_page_never_scrolls_sideways(page: Page, width: int) -> None:
    page.emulate(width=width)
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.run("return [...document.querySelectorAll('.plot')].every(e => e.scrollWidth <= e.clientWidth + 1)")


def test_printed_page_has_light_plots_even_on_a_dark_system(page: Page) -> None:
    page.emulate(scheme="dark")
    dark = page.run("return document.getElementById('s0-map').layout.font.color")
    page.run("dispatchEvent(new Event('beforeprint'))")
    page.wait(f"return document.getElementById('s0-map').layout.font.color !== '{dark}'")
    pdf = page.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(pdf) > 50_000


def test_headings_are_in_order_and_every_control_has_a_name(page: Page) -> None:
    page.emulate()
    levels = page.run("return [...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert page.run(
        "return [...document.querySelectorAll('input')].every(i => i.labels.length && i.labels[0].textContent.trim())"
    )
    assert page.run("return [...document.querySelectorAll('button')].every(b => b.textContent.trim())")
    assert page.run(
        "return [...document.querySelectorAll('[id]')].length === new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size"
    )


def test_history_shows_another_metric_when_asked(page: Page) -> None:
    page.emulate()
    figure = "history0"
    drawn = f"return document.querySelectorAll('#{figure} .scatterlayer .trace .point').length"
    assert page.run(drawn) == 4  # the comparison itself and three nights
    title = f"return document.querySelector('#{figure} .ytitle').textContent"
    assert page.run(title) == "mean |d|, nats"
    page.run(f"document.querySelector('fieldset[data-figure={figure}] input[value=\"1\"]').click()")
    page.wait(f"{title} === 'k3 KL, nats'")
    assert "k3 KL: " in page.run(f"return document.getElementById('{figure}-note').textContent")
