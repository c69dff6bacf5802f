"""The page of a simulation in a real browser: wide and narrow, light and dark, of long runs and of none at all.

Skipped, with the reason, where there is no browser. The page has no script of its own; what is measured here is where
its texts have come to lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.browser import MISSING, Tab, browser, find_browser

from octavo.cli.main import run as octavo

pytestmark = pytest.mark.skipif(find_browser() is None, reason=MISSING)
BY_HAND = ["--device", "h100-sxm", "--layers", "4", "--kv-heads", "2", "--head-dim", "16", "--weights-bytes", "16GB"]
RUNS = {
    "many": ["--requests", "300", "--rate", "4000", "--input-tokens", "lognormal:300,300", "--reuse", "prefix",
             "--prefix-tree", "1,3,32", "--kv-cache-memory-bytes", "4MiB", "--slo-ttft", "1", "--context", "2048"],
    "one": ["--requests", "1"],
    "none": ["--requests", "2", "--input-tokens", "9000", "--context", "4096"],
}  # fmt: skip
LAID_OUT = """[...document.querySelectorAll('svg')].map((svg) => {
    const whole = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].filter((one) => one.textContent)
        .map((one) => [one.textContent, one.getBoundingClientRect()]);
    const over = (a, b) => a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
    return {
        name: svg.getAttribute('aria-label'),
        small: texts.filter(([, at]) => at.height < 10).map(([text]) => text),
        outside: texts.filter(([, at]) => at.left < whole.left - 1 || at.right > whole.right + 1 ||
            at.top < whole.top - 1 || at.bottom > whole.bottom + 1).map(([text]) => text),
        overlapping: texts.flatMap(([text, at], i) => texts.slice(i + 1).filter(([, other]) => over(at, other))
            .map(([other]) => `${text} and ${other}`)),
        twice: texts.length - new Set(
            texts.map(([text, at]) => `${text} ${at.right < whole.left + 80 * whole.width / 720}`)).size,
    };
})"""
PALE = """(() => {
    const grey = (colour) => { const [r, g, b] = colour.match(/[0-9.]+/g).map(Number); return (r + g + b) / 3; };
    const card = grey(getComputedStyle(document.querySelector('section')).backgroundColor);
    return [...document.querySelectorAll('svg text, h1, h2, .card b, .card span, pre, .legend li')]
        .filter((one) => Math.abs(grey(getComputedStyle(one).fill === 'rgb(0, 0, 0)' || !one.closest('svg')
            ? getComputedStyle(one).color : getComputedStyle(one).fill) - card) < 60)
        .map((one) => one.textContent);
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, flags in RUNS.items():
        file = str(folder / f"{name}.html")
        assert octavo(["simulate", *BY_HAND, *flags, "--no-intervals", "--html", file]) == 0
    return {name: folder / f"{name}.html" for name in RUNS}


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 390)])
def test_every_text_of_the_page_can_be_read(
    name: str, scheme: str, width: int, pages: dict[str, Path], tab: Tab
) -> None:
    tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.resize(width, 800)
    tab.open(pages[name].as_uri())
    assert tab.complaints == []
    assert not tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    plots = tab.evaluate(LAID_OUT)
    assert len(plots) == (2 if name == "none" else 5)
    for plot in plots:
        told = {fault: plot[fault] for fault in ("small", "outside", "overlapping")}
        assert told == {"small": [], "outside": [], "overlapping": []}, plot["name"]
        assert plot["twice"] == 0, f"{plot['name']}: two ticks of one axis have the same name"
    assert tab.evaluate(PALE) == []


def test_what_was_refused_is_told_and_a_goal_nobody_gave_is_not(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["none"].as_uri())
    assert "2 invalid" in tab.evaluate("document.querySelector('.warn').textContent")
    cards = "[...document.querySelectorAll('.card')].map((one) => one.textContent).join(' ')"
    assert "objectives" not in tab.evaluate(cards)
    tab.open(pages["many"].as_uri())
    assert "objectives" in tab.evaluate(cards)
    assert "80 of" in tab.evaluate("document.body.textContent")


def test_one_request_is_seen_in_every_plot(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["one"].as_uri())
    box = "[...document.querySelectorAll('polygon, polyline, rect')].map((one) => one.getBBox())"
    assert tab.evaluate(f"{box}.filter((one) => one.width > 0 && one.height > 0).length") >= 7
