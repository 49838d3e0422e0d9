"""What holds of the page of a report in a browser: nothing is cut off or wrong, sound plays, tables sort."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from tests.support.browser import browser

# elements that end beyond the window and are in no box that scrolls
CUT_OFF = """[...document.querySelectorAll("body *")]
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1 && !each.parentElement.closest(".wide, pre"))
  .map((each) => each.outerHTML.slice(0, 80))"""
# boxes with more than they show, that a user cannot scroll, by mouse or by keyboard
NOT_SCROLLED = """[...document.querySelectorAll(".wide")]
  .filter((each) => each.scrollWidth > each.clientWidth)
  .filter((each) => getComputedStyle(each).overflowX !== "auto" || each.tabIndex !== 0)
  .map((each) => each.outerHTML.slice(0, 80))"""
BRIGHTNESS = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => +a + +b, 0)"
PLAYED = """(async () => {
  const audio = document.querySelector("audio");
  const heard = new Promise((resolve) => audio.addEventListener("timeupdate", resolve, { once: true }));
  await audio.play();
  await heard;
  return [audio.readyState, audio.duration];
})()"""
SORTED = """(() => {
  const table = [...document.querySelectorAll("table")].find((each) => each.querySelector("th button"));
  const column = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
  const click = () => { table.querySelector("th button").click(); return column(); };
  return [column(), click(), click()];
})()"""


def check_page(page: Path, profile: Path) -> None:
    """Opens a report with runs, recordings and a table of two rows on narrow and wide screens, light and dark."""
    with browser(profile) as tab:
        for width, scheme in product((400, 1280), ("light", "dark")):
            tab.open(page, width, scheme)
            tab.evaluate('document.querySelectorAll("details").forEach((each) => { each.open = true; })')
            assert tab.evaluate("innerWidth") == width
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate(CUT_OFF) == [] and tab.evaluate(NOT_SCROLLED) == []
            assert (tab.evaluate(BRIGHTNESS) > 383) == (scheme == "light")
        assert tab.evaluate("document.querySelectorAll('.figure svg').length") >= 3
        ready, seconds = tab.evaluate(PLAYED)
        assert ready >= 2 and seconds > 0
        before, ascending, descending = tab.evaluate(SORTED)
        assert sorted(before) == sorted(ascending) and ascending == descending[::-1] and ascending != descending
        assert tab.messages == []
        tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.ran=1>')")
        tab.evaluate("fetch('https://example.org').catch(() => 0)")
        assert tab.evaluate("window.ran") is None and len(tab.messages) >= 2  # the page's policy is in force
