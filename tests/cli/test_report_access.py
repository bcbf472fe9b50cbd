"""The page by keyboard, by screen reader, in both themes, on a phone, on paper, and with ten thousand prompts."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bench_report import write_run
from pages import CHROMIUM, CONTRAST, DRIVER, Page, browser
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.reports.html import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]
OPEN_EVERYTHING = """
document.querySelectorAll('details').forEach(d => { d.open = true; });
document.querySelectorAll('.sequences button[aria-expanded="false"]').forEach(b => b.click());
"""
LARGE_PAGE_CPU_S = (
    6.0  # of the page's thread until it answers, plots near the window included; 1 to 2 s on an idle core
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def single(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Page:
    root = tmp_path_factory.mktemp("single")
    runs = [write_compare(root / "compare"), write_bisect(root / "bisect")]
    return Page(driver, write_report(runs, root / "report.html"))


@pytest.fixture(scope="module")
def several(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Page:
    root = tmp_path_factory.mktemp("several")
    runs = [write_compare(root / name, num_layers=2, spread=spread) for name, spread in (("monday", 1.0), ("tuesday", 1.04), ("now", 3.0))]  # fmt: skip
    return Page(driver, write_report(runs, root / "report.html"))


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("which", ["single", "several"])
def test_page_keeps_the_rules_of_accessible_pages_with_everything_opened(
    which: str, width: int, request: pytest.FixtureRequest
) -> None:
    page: Page = request.getfixturevalue(which)
    page.emulate(width=width)
    assert page.broken_rules() == {}
    page.run(OPEN_EVERYTHING)
    page.wait("return document.querySelectorAll('.opened:not([hidden]) .text, .sequences:not(:has(button))').length")
    assert page.broken_rules() == {}
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.driver.get_log("browser") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(single: Page, several: Page, scheme: str) -> None:
    for page in (single, several):
        page.emulate(scheme=scheme)
        page.run(OPEN_EVERYTHING)
        page.wait("return document.querySelector('.reading .text')")
        assert page.run(CONTRAST) == []
    page.run("document.querySelector('.subtitle').style.color = '#777'")
    assert [text for text, *_ in page.run(CONTRAST)] == ["One column a run; each has its own part "]


def test_keyboard_goes_from_the_skip_link_through_the_map_to_the_numbers_of_a_site(single: Page) -> None:
    from selenium.webdriver import Keys

    page = single
    page.emulate()
    page.press(Keys.TAB)
    assert page.focused() == "skip" and page.run("return document.activeElement.getBoundingClientRect().left") >= 0
    page.press(Keys.ENTER, Keys.TAB)
    for _ in range(40):
        if page.focused() == "s0-map":
            break
        page.press(Keys.TAB)
    assert page.focused() == "s0-map"
    site = "return document.querySelector('#s0-map-site .numbers h4').textContent"
    first = page.run(site)
    page.press(Keys.HOME)
    assert page.run(site) == first.replace(first.split(".")[1], "0")
    page.press(Keys.ARROW_RIGHT)
    assert page.run(site).startswith("layers.1.")
    before = page.run("return document.getElementById('s0-map').layout.shapes[0].y0")
    page.press(Keys.ARROW_DOWN)
    assert page.run("return document.getElementById('s0-map').layout.shapes[0].y0") == before + 1
    page.press(Keys.END)
    assert page.run(site).startswith("layers.*.")
    page.press(Keys.TAB)
    assert page.focused() == "point"
    page.press(Keys.TAB)
    assert page.focused() == "layer"
    assert page.run("return document.querySelector('#s0-map-site .numbers').ariaLive") == "polite"


def test_lists_beside_the_map_open_any_site(single: Page) -> None:
    page = single
    page.emulate()
    options = "return [...document.querySelectorAll('#s0-map-site [data-pick=point] option')].map(o => o.textContent)"
    points = page.run(options)
    pick = "const s = document.querySelector(`#s0-map-site [data-pick=${arguments[0]}]`); s.value = arguments[1]; s.dispatchEvent(new Event('change'));"
    page.run(pick, "point", str(points.index("final_norm (rmsnorm)")))
    text = page.run("return document.querySelector('#s0-map-site .numbers').textContent")
    assert text.startswith("final_norm") and "made here" in text and "end to end" in text
    page.run(pick, "point", str(points.index("q_rope (rope)")))
    page.run(pick, "layer", "4")
    assert page.run("return document.querySelector('#s0-map-site h4').textContent") == "layers.3.q_rope"


def test_click_on_a_cell_opens_its_site(single: Page) -> None:
    from selenium.webdriver import ActionChains

    page = single
    page.emulate()
    page.run("document.getElementById('s0-map').scrollIntoView({ block: 'center', behavior: 'instant' })")
    where = page.run(
        "const p = document.getElementById('s0-map'), b = p.getBoundingClientRect(), l = p._fullLayout;"
        "const row = l.yaxis.ticktext.indexOf('q_rope');"
        "return [b.left + l.xaxis._offset + l.xaxis.d2p(2), b.top + l.yaxis._offset + l.yaxis.d2p(row)]"
    )
    actions = ActionChains(page.driver)
    actions.w3c_actions.pointer_action.move_to_location(*(int(v) for v in where)).click()
    actions.perform()
    page.wait("return document.querySelector('#s0-map-site h4').textContent === 'layers.2.q_rope'")


def test_keyboard_opens_a_sequence_and_walks_its_tokens(single: Page) -> None:
    from selenium.webdriver import Keys

    page = single
    page.emulate()
    page.run("document.querySelector('.sequences button[data-prompt=\"0\"]').focus()")
    page.press(Keys.ENTER)
    page.wait("return document.querySelector('.opened:not([hidden]) .tok')")
    assert page.run("return document.activeElement.ariaExpanded") == "true"
    page.press(Keys.TAB)
    assert page.focused() == "text"
    said = "return document.querySelector('.readout').textContent"
    assert "strange position 30: d −0.6100 nats, ratio 0.543" in page.run(said)
    page.press(Keys.ARROW_LEFT)
    assert "position 29" in page.run(said)
    page.press(Keys.HOME)
    assert "position 1: equal to the last bit" in page.run(said)
    page.press(Keys.TAB, Keys.ENTER)
    page.wait("return document.querySelector('.reading table')")
    assert page.run("return document.querySelector('.reading tbody th').textContent") == "strange"
    page.run("document.querySelector('.sequences button[data-prompt=\"0\"]').focus()")
    page.press(Keys.ENTER)
    assert page.run("return document.activeElement.ariaExpanded") == "false"


def test_colour_is_not_the_only_sign_of_how_far_a_token_is(single: Page) -> None:
    page = single
    page.emulate()
    page.run("document.querySelector('.sequences button[data-prompt=\"0\"]').click()")
    page.wait("return document.querySelector('.reading .less3')")
    look = "const s = getComputedStyle(document.querySelector(arguments[0])); return [s.textDecorationLine, s.textDecorationThickness]"
    assert page.run(look, ".text .less3") == ["underline", "3px"]
    assert page.run(look, ".legend .more2") == ["overline", "1.5px"]


def test_focus_is_seen_on_everything_that_takes_it(single: Page) -> None:
    from selenium.webdriver import Keys

    page = single
    page.emulate()
    unseen = []
    for _ in range(60):
        page.press(Keys.TAB)
        if page.run("return document.activeElement === document.body"):
            break
        seen = page.run(
            "const e = document.activeElement, of = e.matches('.switch input') ? e.nextElementSibling : e, s = getComputedStyle(of);"
            "return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2"
        )
        if not seen:
            unseen.append(page.focused())
    assert unseen == []


def test_reader_can_ask_for_the_other_theme(single: Page) -> None:
    page = single
    page.emulate(scheme="light")
    colours = "return [getComputedStyle(document.body).backgroundColor, document.getElementById('s0-map').layout.font.color, document.getElementById('theme').textContent]"
    light = page.run(colours)
    page.run("document.getElementById('theme').click()")
    page.wait(f"return document.getElementById('s0-map').layout.font.color !== '{light[1]}'")
    dark = page.run(colours)
    assert dark[0] != light[0] and (light[2], dark[2]) == ("Dark page", "Light page")


def test_several_runs_stand_in_columns_with_what_changed(several: Page) -> None:
    page = several
    page.emulate()
    heads = page.run("return [...document.querySelectorAll('.beside thead a')].map(a => a.textContent)")
    assert heads == ["monday", "tuesday", "now"]
    row = "return [...[...document.querySelectorAll('.beside tbody tr')].find(r => r.cells[0].textContent === arguments[0]).cells].map(c => [c.className, c.textContent])"
    cells = page.run(row, "mean_abs_d, nats")
    assert [c[0] for c in cells[1:]] == ["num", "num", "num changed"]
    assert cells[2][1].endswith("+4.0 %") and cells[3][1].endswith("× 3.0")
    assert page.run("return document.querySelectorAll('h1').length") == 1


def test_paper_has_light_plots_all_of_them_and_no_controls(single: Page) -> None:
    page = single
    page.emulate(scheme="dark", media="print")
    page.run("dispatchEvent(new Event('beforeprint'))")
    shown = "return [...document.querySelectorAll('button.copy, #theme, .switch, .pick, .toc, .skip')].filter(e => e.checkVisibility()).length"
    assert page.run(shown) == 0
    assert page.run("return getComputedStyle(document.body).color") == "rgb(25, 28, 32)"
    assert page.run("return [...document.querySelectorAll('.plot')].every(p => p.querySelector('svg'))")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    pdf = base64.b64decode(page.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF") and pdf.count(b"/Type /Page\n") >= 3


def test_page_of_ten_thousand_prompts_answers_at_once_and_says_what_it_left_out(
    driver: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root: Path = tmp_path_factory.mktemp("large")
    write_run(root / "run", num_tokens=200_000, num_sites=30_000, num_prompts=10_000)
    page = Page(driver, write_report([root / "run"], root / "report.html"))
    assert page.file.stat().st_size < 8_000_000
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    page.emulate(whole=False)
    spent = {m["name"]: m["value"] for m in driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
    assert spent["TaskDuration"] < LARGE_PAGE_CPU_S, spent
    assert page.run("return document.querySelectorAll('.sequences button').length") == 40
    assert "9,960 sequences closer than these" in page.run("return document.querySelector('.sequences').textContent")
    page.run("document.querySelector('.sequences button').click()")
    page.wait("return document.querySelector('.opened:not([hidden]) .tok')")
    page.wait("return document.documentElement.dataset.drawn")
    assert page.driver.get_log("browser") == []
