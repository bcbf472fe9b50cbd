"""A report in headless Chromium, and checks of what a keyboard or a screen reader meets there.

The checks follow axe-core's rules of the same names, as far as they apply to a page of headings, tables, figures and disclosures.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
DRAWN_WITHIN_S = 120.0

# Every text that is seen, against the surface behind it: WCAG AA is 4.5, or 3 for large text. Returns the offenders.
CONTRAST = """
const channel = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length === 3 ? [...m, 1] : m; };
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
function surface(e) {
  for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > 0.99) return c; }
  return [255, 255, 255, 1];
}
const low = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; (node = walker.nextNode());) {
  const e = node.parentElement;
  if (!node.data.trim() || e.closest('script, style, noscript, option') || !e.checkVisibility({ visibilityProperty: true })) continue;
  const svg = e.closest('svg');
  const style = getComputedStyle(e);
  const ink = parse(svg ? style.fill : style.color);
  const [a, b] = [luminance(ink), luminance(surface(svg ? svg.closest('.plot') || svg.parentElement : e))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
  const enough = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
  if (ratio < enough) low.push([node.data.trim().slice(0, 40), Math.round(ratio * 100) / 100, e.className.baseVal ?? e.className]);
}
return low.slice(0, 20);
"""

# Rule -> what breaks it. Each expression gives a list that is empty where the page is in order.
RULES = {
    "one main, banner, contentinfo": "return ['main', 'header.masthead', 'footer'].filter(s => document.querySelectorAll(s).length !== 1)",
    "language and title": "return document.documentElement.lang && document.title ? [] : ['html']",
    "landmarks of a kind have names of their own": """
        return ['nav', 'main > article', 'article > section'].flatMap(s => {
          const names = [...document.querySelectorAll(s)].map(e => e.ariaLabel || document.getElementById(e.getAttribute('aria-labelledby'))?.textContent);
          return names.some(n => !n) || (s === 'nav' && new Set(names).size !== names.length) ? [s + JSON.stringify(names)] : [];
        })""",
    "one h1, and no level is skipped": """
        const levels = [...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => Number(h.tagName[1]));
        return levels.filter((l, i) => (l === 1) !== (i === 0) || (i > 0 && l - levels[i - 1] > 1))""",
    "headings are not empty": "return [...document.querySelectorAll('h1,h2,h3,h4,h5')].filter(h => !h.textContent.trim()).map(h => h.outerHTML)",
    "tables have a caption": "return [...document.querySelectorAll('table')].filter(t => !t.caption?.textContent.trim()).map(t => t.outerHTML.slice(0, 80))",
    "header cells have a scope and a text": "return [...document.querySelectorAll('th')].filter(h => !h.scope || !h.textContent.trim()).map(h => h.outerHTML.slice(0, 120))",
    "data rows begin with a header cell": "return [...document.querySelectorAll('tbody tr:not(.opened)')].filter(r => r.cells[0].tagName !== 'TH').map(r => r.outerHTML.slice(0, 80))",
    "figures have a text alternative": "return [...document.querySelectorAll('.plot')].filter(p => (p.ariaLabel || '').length < 20 || !p.getAttribute('role')).map(p => p.id)",
    "figures are named": "return [...document.querySelectorAll('figure')].filter(f => !document.getElementById(f.getAttribute('aria-labelledby'))?.textContent).map(f => f.outerHTML.slice(0, 80))",
    "controls have names": """
        return [...document.querySelectorAll('button, select, input, summary, a')].filter(e =>
          !(e.ariaLabel || e.textContent.trim() || [...(e.labels || [])].map(l => l.textContent.trim()).join(''))).map(e => e.outerHTML)""",
    "ids are unique": "const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.filter((x, i) => ids.indexOf(x) !== i)",
    "references lead somewhere": """
        const named = ['aria-labelledby', 'aria-controls', 'aria-describedby'].flatMap(a =>
          [...document.querySelectorAll(`[${a}]`)].map(e => e.getAttribute(a)));
        const links = [...document.querySelectorAll('a[href^="#"]')].map(a => a.getAttribute('href').slice(1));
        return [...named, ...links].filter(id => !document.getElementById(id))""",
    "what scrolls can be reached": """
        return [...document.querySelectorAll('main *')].filter(e => {
          const s = getComputedStyle(e);
          const scrolls = (/auto|scroll/.test(s.overflowX) && e.scrollWidth > e.clientWidth + 1) || (/auto|scroll/.test(s.overflowY) && e.scrollHeight > e.clientHeight + 1);
          return scrolls && e.checkVisibility() && e.tabIndex < 0 && !e.querySelector('a, button, [tabindex="0"]');
        }).map(e => e.outerHTML.slice(0, 120))""",
    "pictures for show are hidden": "return [...document.querySelectorAll('.badge svg, .track, .meter, .chevron, .mark')].filter(e => e.ariaHidden !== 'true').map(e => e.outerHTML)",
    "targets are large enough": """
        return [...document.querySelectorAll('button, select, .switch label')].filter(e => e.checkVisibility()).filter(e => {
          const r = e.getBoundingClientRect(); return r.height < 24 || r.width < 24; }).map(e => e.outerHTML)""",
    "lists of terms hold terms": "return [...document.querySelectorAll('dl')].filter(d => !d.querySelector('dt') || !d.querySelector('dd')).map(d => d.outerHTML.slice(0, 80))",
}  # fmt: skip


class Page:
    """A loaded report with what the browser logged while it loaded."""

    def __init__(self, driver: Any, file: Path) -> None:
        self.driver = driver
        self.file = file

    def emulate(self, *, width: int = 1280, scheme: str = "light", media: str = "", whole: bool = True) -> None:
        """Set page width in CSS pixels, colour scheme and medium, then load afresh; ``whole``: until every figure is drawn."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        self.driver.get(self.file.as_uri())
        self.wait(f"return document.documentElement.dataset.{'drawn' if whole else 'ready'}")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        """Keys as a keyboard sends them, to whatever has the focus."""
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def focused(self) -> str:
        return str(
            self.run(
                "const e = document.activeElement; return e.id || e.dataset.pick || e.dataset.prompt || e.className || e.tagName"
            )
        )

    def wait(self, condition: str) -> Any:
        deadline = time.monotonic() + DRAWN_WITHIN_S
        while time.monotonic() < deadline:
            value = self.run(condition)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"not within {DRAWN_WITHIN_S} s: {condition}; console: {self.driver.get_log('browser')}")

    def broken_rules(self) -> dict[str, list[str]]:
        """Rules that the page as it stands breaks, with what breaks them."""
        return {rule: found for rule, script in RULES.items() if (found := self.run(script))}

    def requests(self) -> list[str]:
        """Addresses asked for since the log was last read."""
        messages = (json.loads(e["message"])["message"] for e in self.driver.get_log("performance"))
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """A headless Chromium that logs its console and its requests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()
