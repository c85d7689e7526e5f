"""The report page in a real Chromium: both widths, dark and light, print, without scripts.

``make test-browser`` runs these. ``MONE_REF_SCREENSHOTS`` names a directory for pictures
of what was looked at.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path

import pytest
from reports import BROKEN_MUST, BROKEN_SHOULD, CASES, FAR, ROOT, write
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from mone_ref.suite import page
from mone_ref.suite.merge import merge
from mone_ref.suite.outcomes import Outcome

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers give it 64 MB
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = {"desktop": (1280, 900), "phone": (390, 844), "narrow": (360, 640)}
LEAST_CONTRAST = 4.5  # WCAG 2.2, success criterion 1.4.3

CONTRAST = """
const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const parse = text => text.match(/[0-9.]+/g).map(Number);
const background = node => {
  for (; node; node = node.parentElement) {
    const colour = parse(getComputedStyle(node).backgroundColor);
    if (colour.length == 3 || colour[3] == 1) return colour;
  }
  return [255, 255, 255];
};
const found = {};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim()) continue;
  const front = parse(getComputedStyle(node).color), back = background(node);
  const [low, high] = [luminance(front), luminance(back)].sort((a, b) => a - b);
  const pair = front + " on " + back;
  if (!(pair in found)) found[pair] = [(high + 0.05) / (low + 0.05), node.className];
}
return found;
"""


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> Path:
    """The page of two engines, one of which is wrong, with evidence as wide as it gets."""
    directory = tmp_path_factory.mktemp("page")
    wide = "a_name_without_a_break" * 500
    evidence = f"</pre><script>document.title = 'owned'</script>{wide}\n" + "line\n" * 500
    wrong = {"outcome": Outcome.MISMATCH, "numbers": FAR, "found": wide, "evidence": evidence}
    changes = {
        BROKEN_MUST: wrong,
        BROKEN_SHOULD: {"outcome": Outcome.WRONGLY_ACCEPTED, "found": "accepted"},
        "load/missing-constant": wrong | {"status": "declared"},
        "unsupported/eplb": {"outcome": Outcome.NOT_APPLICABLE, "found": "no such option"},
        "controls/olmoe-approx-plain": {"outcome": Outcome.MISMATCH, "numbers": FAR},
    }
    reports = [
        write(directory / "wrong.jsonl", name="wrong", changes=changes),
        write(directory / "right.jsonl", name="right"),
    ]
    out = directory / "page.html"
    out.write_text(page.render(merge(reports, ROOT)), encoding="utf-8")
    return out


def installed(program: str) -> str:
    """Its path; nothing is ever downloaded in its place."""
    path = shutil.which(program)
    if path is None:
        pytest.fail(f"{program} is not installed", pytrace=False)
    return path


def start(profile: Path, *, scripts: bool = True) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = installed("chromium")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    if not scripts:
        javascript = "profile.managed_default_content_settings.javascript"
        options.add_experimental_option("prefs", {javascript: 2})
    return webdriver.Chrome(options, Service(installed("chromedriver")))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(params=SIZES)
def sized(browser, html, request):
    """The page at one size, freshly loaded, with a picture of its first screen."""
    show(browser, html, request.param)
    picture(browser, request.param)
    return browser


def show(driver: webdriver.Chrome, html: Path, size: str, scheme: str = "light") -> None:
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    emulate(driver, "", scheme)
    driver.get("about:blank")
    driver.get_log("performance")
    driver.get(html.as_uri())


def emulate(driver: webdriver.Chrome, media: str, scheme: str = "light") -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def picture(driver: webdriver.Chrome, name: str) -> None:
    directory = os.environ.get("MONE_REF_SCREENSHOTS")
    if directory:
        taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        Path(directory, f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


def visible(driver: webdriver.Chrome, selector: str) -> list:
    return [node for node in driver.find_elements(By.CSS_SELECTOR, selector) if node.is_displayed()]


# -- on a screen


def test_the_page_asks_for_its_own_file_only(sized, html):
    events = [json.loads(entry["message"])["message"] for entry in sized.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    outside = [url for url in asked if not url.startswith("data:")]
    assert outside == [html.as_uri()]
    assert sized.get_log("browser") == []
    assert sized.title.startswith("wrong 1.0, right 1.0")


def test_nothing_scrolls_sideways(sized):
    for details in (False, True):
        sized.execute_script(
            "document.querySelectorAll('details').forEach(d => d.open = arguments[0])", details
        )
        width, room = sized.execute_script(
            "return [document.documentElement.scrollWidth, innerWidth]"
        )
        assert 0 < width <= room, details


def test_the_verdict_stands_on_the_first_screen(sized):
    height = sized.execute_script("return innerHeight")
    word = sized.find_element(By.CSS_SELECTOR, ".verdict .word")
    assert word.text == "✗ NOT CONFORMANT"
    assert word.rect["y"] > 0
    assert word.rect["y"] + word.rect["height"] < height


def test_every_case_that_is_not_ok_is_one_link_from_the_table(sized, html):
    names = [BROKEN_MUST, BROKEN_SHOULD, "load/missing-constant", "controls/olmoe-approx-plain"]
    for name in names:
        link = sized.find_element(By.CSS_SELECTOR, f'td a[href="#case-{name}"]')
        summary = link.find_element(By.XPATH, "ancestor::details/summary")
        if not link.is_displayed():
            summary.click()
        link.click()
        case = sized.find_element(By.CSS_SELECTOR, ":target")
        assert case.get_attribute("id") == f"case-{name}"
        top = sized.execute_script("return arguments[0].getBoundingClientRect().top", case)
        assert 0 <= top < 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_every_text_stands_out_from_its_background(browser, html, size, scheme):
    show(browser, html, size, scheme)
    picture(browser, f"{size}-{scheme}")
    pairs = browser.execute_script(CONTRAST)
    assert len(pairs) > 10
    faint = {pair: told for pair, told in pairs.items() if told[0] < LEAST_CONTRAST}
    assert faint == {}
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(251, 251, 250)") == (scheme == "light")


def test_filters_work_and_a_link_shows_what_they_hide(browser, html):
    show(browser, html, "desktop")
    browser.find_element(By.ID, "cases-must").click()
    groups = [node.get_attribute("id") for node in visible(browser, "section.group")]
    assert groups == ["must"]
    assert visible(browser, "tr.group")
    browser.find_element(By.CSS_SELECTOR, 'nav a[href="#advice"]').click()
    assert browser.find_element(By.ID, "advice").is_displayed()
    assert not browser.find_element(By.ID, "ok").is_displayed()
    browser.get(f"{html.as_uri()}#case-{BROKEN_SHOULD}")
    assert browser.find_element(By.ID, f"case-{BROKEN_SHOULD}").is_displayed()
    browser.find_element(By.ID, "clauses-wrong").click()
    rows = [node.get_attribute("id") for node in visible(browser, "tr[id]")]
    assert "clause-SEM-1" in rows
    assert "clause-UPD-5" not in rows


def test_the_keyboard_reaches_the_skip_link_first_and_shows_where_it_is(browser, html):
    show(browser, html, "desktop")
    key = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
    for kind in ("keyDown", "keyUp"):
        browser.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": kind, **key})
    focused = browser.switch_to.active_element
    assert focused.text == "Skip to the verdict"
    assert focused.rect["x"] >= 0
    assert focused.value_of_css_property("outline-style") == "solid"


# -- without scripts, and on paper


def test_the_page_reads_without_scripts(tmp_path, html):
    driver = start(tmp_path, scripts=False)
    try:
        probe = tmp_path / "probe.html"
        probe.write_text("<p id=p>off</p><script>p.textContent = 'on'</script>")
        driver.get(probe.as_uri())
        assert driver.find_element(By.ID, "p").text == "off"
        driver.get(html.as_uri())
        assert driver.find_element(By.CSS_SELECTOR, ".word").text == "✗ NOT CONFORMANT"
        case = driver.find_element(By.ID, f"case-{BROKEN_MUST}")
        evidence = case.find_element(By.CSS_SELECTOR, ".evidence")
        assert not evidence.find_element(By.TAG_NAME, "pre").is_displayed()
        evidence.find_element(By.TAG_NAME, "summary").click()
        assert evidence.find_element(By.TAG_NAME, "pre").is_displayed()
        assert len(driver.find_elements(By.CSS_SELECTOR, ".case")) == len(CASES)
    finally:
        driver.quit()


def test_on_paper_evidence_is_open_and_backgrounds_are_white(browser, html):
    show(browser, html, "desktop", "dark")
    emulate(browser, "print", "dark")
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert colour == "rgb(255, 255, 255)"
    shown = browser.execute_script(
        "return [...document.querySelectorAll('.evidence pre')].map(p => p.checkVisibility())"
    )
    assert shown == [True, True]
    assert visible(browser, "nav, .filter, .skip") == []
    kept = browser.find_element(By.ID, f"case-{BROKEN_SHOULD}")
    assert kept.value_of_css_property("break-inside") == "avoid"
    pairs = browser.execute_script(CONTRAST)
    assert {pair: told for pair, told in pairs.items() if told[0] < LEAST_CONTRAST} == {}


def test_the_page_prints(browser, html):
    show(browser, html, "desktop")
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert printed.startswith(b"%PDF-")
    assert len(printed) > 100_000
