"""The page in a real browser: it draws, stays silent, loads nothing, and takes text for text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pages import CHROMIUM, DRIVER, Page, browser
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.findings import GateResult, Judgement
from rpadiag.reports.html import write_report

SCRIPT = "<script>window.planted = 1</script>"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    root = tmp_path_factory.mktemp("report")
    runs = [write_compare(root / "compare", prompt_text=SCRIPT, odd_word=f" {SCRIPT}"), write_bisect(root / "bisect")]
    nights = [write_compare(root / "nights" / f"n{i}", num_layers=1, num_prompts=2, spread=1 + i / 4) for i in range(3)]
    failed = GateResult(name=SCRIPT, gate="k3_kl<=1e-9", status="fail", text=f"k3_kl is 1 {SCRIPT}", run="runs/now")
    judgement = Judgement(gates=(failed,), baselines=(SCRIPT,))
    file = write_report(runs, root / "report.html", judgement=judgement, history=nights)
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        yield Page(driver, file)


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
    asked = page.requests()
    assert page.file.as_uri() in asked
    assert [u for u in asked if u != page.file.as_uri() and not u.startswith(("data:", "blob:"))] == []


def test_script_in_a_prompt_or_token_stays_text(page: Page) -> None:
    page.emulate()
    assert page.run("return window.planted === undefined")
    assert SCRIPT in page.run("return document.querySelector('#s0-worst mark').textContent")
    assert SCRIPT in page.run("return document.querySelector('#s0-prompts button[data-prompt=\"0\"]').textContent")
    page.run("document.querySelector('#s0-prompts button[data-prompt=\"0\"]').click()")
    page.wait("return document.querySelector('#s0-prompts .text .tok')")
    assert SCRIPT in page.run("return document.querySelector('#s0-prompts .text').textContent")
    assert page.run(
        "return document.querySelectorAll('#s0-prompts script, img').length === 0 && window.planted === undefined"
    )
    assert page.run("return document.scripts.length") == 3


def test_switch_over_the_map_changes_what_is_drawn(page: Page) -> None:
    page.emulate()
    shown = "return document.getElementById('s0-map').data.map(t => t.visible)"
    before = page.run(shown)
    page.run("document.querySelectorAll('[data-figure=s0-map] input')[2].click()")
    page.wait("return document.getElementById('s0-map').data[4].visible === true")
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
