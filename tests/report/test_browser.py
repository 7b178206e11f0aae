"""The report in a real browser: silent, offline, and readable on a phone and in the dark."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedveil.core.ledger import Row
from fedveil.report import svg, write
from fedveil.report.figures import Figure
from report.audits import audited

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
Maker, Rower = Callable[..., Path], Callable[..., Row]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "no-sandbox disable-gpu disable-background-networking disable-component-update disable-sync no-first-run"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("needs Chromium on the path")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=[f"--{flag}" for flag in QUIET.split()])
        yield browser
        browser.close()


@pytest.fixture
def report(make: Maker, row: Rower, tmp_path: Path) -> Path:
    """A report with everything that could be too wide, ask for something or run."""
    evil = "<script>document.title = 'hacked'</script>"
    wide = "w" * 300
    rows = [row(n, n / 40, missing={"0": wide}, events=[evil, wide], epsilon=n / 7) for n in range(1, 31)]
    for each in rows:
        each.metrics |= {"matching": 10.0**-each.round, "radius": 1.5}
    folders = [make(f"run{i}-{'long' * 12}", rows, extra=f'note = "{wide}{evil}"') for i in range(3)]
    folders.append(make("d", [0.1, 0.5], method=evil))
    picture = Figure(figsize=(8, 3))
    picture.add_subplot().bar(range(5), range(5))
    (folders[0] / "figures").mkdir()
    hostile = '<script>fetch("http://example.com")</script><image href="http://example.com/x.png"/></svg>'
    for path in (folders[0] / "split.svg", folders[0] / "figures" / "cosine.svg"):
        path.write_text(svg(picture).replace("</svg>", hostile))
    audited(folders[0], broken=(wide, evil), control=6.5)
    return write(folders, tmp_path / "report.html")


def look(browser: Any, path: Path, **options: Any) -> tuple[Any, list[str]]:
    """The opened page with all details unfolded, and what went wrong: requests, errors, messages."""
    trouble: list[str] = []
    page = browser.new_context(**options).new_page()

    def route(request: Any) -> None:
        if request.request.url.startswith(("file:", "data:")):
            request.continue_()
        else:
            trouble.append(request.request.url)
            request.abort()

    page.route("**/*", route)
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.evaluate("Promise.all([...document.images].map(each => each.decode()))")
    return page, trouble


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_fits_asks_for_nothing_and_runs_nothing(browser: Any, report: Path, width: int) -> None:
    page, trouble = look(browser, report, viewport={"width": width, "height": 800})
    assert trouble == []
    assert page.title() == "4 runs compared · fedveil"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg").count() == 7
    assert all(page.evaluate("[...document.images].map(each => each.naturalWidth > 0 && each.clientWidth > 0)"))
    page.context.close()


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_it_follows_the_colour_scheme_and_figures_stay_on_light_ground(
    browser: Any, report: Path, scheme: str, dark: bool
) -> None:
    page, trouble = look(browser, report, color_scheme=scheme)

    def brightness(selector: str, what: str) -> float:
        colour = page.eval_on_selector(selector, f"each => getComputedStyle(each).{what}")
        return sum(float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]) / 3

    assert trouble == []
    ground, ink = brightness("body", "backgroundColor"), brightness("body", "color")
    assert (ground < 60 and ink > 200) if dark else (ground > 230 and ink < 60)
    assert brightness(".figure", "backgroundColor") == 255
    assert brightness(".figure", "color") == 0
    page.context.close()
