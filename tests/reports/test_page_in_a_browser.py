"""The page in a real browser: every chart is drawn, nothing is fetched, buttons work, on a phone too."""

import re
from pathlib import Path
from typing import Any

import pytest

import fedspan
from helpers import tiny

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    fedspan.compare(
        tiny.settings(tiny_folder, federation={"rounds": 3}, evaluation={"diagnostics": 1}),
        folder / "series",
        ["fedit", "rolora"],
        [0, 1],
    )
    return fedspan.report(folder / "series", folder / "page.html", diagnostics=True)


@pytest.mark.parametrize("width", [1200, 390])
def test_charts_are_drawn_and_buttons_work(width: int, browser: Any, page: Path) -> None:
    seen, wrong, asked = browser.new_page(viewport={"width": width, "height": 900}), list[str](), list[str]()
    seen.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    seen.on("pageerror", lambda error: wrong.append(str(error)))
    seen.on("request", lambda request: asked.append(request.url))
    seen.goto(page.as_uri())
    count = seen.locator(".figure").count()
    assert count == 12  # three of them diagnostics
    seen.wait_for_selector(f"#figure-{count - 1} .main-svg", timeout=30_000)
    assert seen.locator(".figure .js-plotly-plot, .figure.js-plotly-plot").count() == count
    assert all(box["width"] > 0.8 * min(width, 1152) - 40 for box in boxes(seen, count))
    assert seen.evaluate("document.documentElement.scrollWidth") <= width
    before = xs(seen)
    seen.locator("#figure-0 .updatemenu-button").nth(1).click()
    seen.wait_for_function(
        "figure => document.getElementById(figure).layout.xaxis.title.text.startsWith('mega')", arg="figure-0"
    )
    assert xs(seen) != before
    assert wrong == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    seen.close()


def test_a_dark_page_has_light_text(browser: Any, page: Path) -> None:
    """Also if the reader changes the scheme while the page is open."""
    seen = browser.new_page(color_scheme="dark")
    seen.goto(page.as_uri())
    for scheme in ("dark", "light", "dark"):
        seen.emulate_media(color_scheme=scheme)
        seen.wait_for_function(
            "dark => matchMedia('(prefers-color-scheme: dark)').matches == dark", arg=scheme == "dark"
        )
        seen.wait_for_selector("#figure-0 .xtitle")
        ground = brightness(seen, "body", "backgroundColor")
        texts = [brightness(seen, place, "color") for place in ("body", "footer", "td")]
        texts += [brightness(seen, f"#figure-0 {place}", "fill") for place in (".xtick text", ".xtitle", ".legendtext")]
        assert all(abs(ground - text) > 120 for text in texts), (scheme, ground, texts)
        buttons = seen.locator("#figure-0 .updatemenu-button")
        assert buttons.count() == 3
        for at in range(3):
            button = f"#figure-0 .updatemenu-button:nth-of-type({at + 1})"
            grounds, labels = (brightness(seen, f"{button} {part}", "fill") for part in ("rect", "text"))
            assert abs(grounds - labels) > 120, (scheme, at, grounds, labels)
        assert (ground < 64) == (scheme == "dark")
    seen.close()


def brightness(seen: Any, place: str, property: str) -> float:
    """Mean of red, green and blue of an element's color, from 0 to 255; of the page behind it if it has none."""
    read = "([place, names]) => names.map(name => getComputedStyle(document.querySelector(place))[name])"
    color, opacity = seen.evaluate(read, [place, [property, "fillOpacity"]])
    if property == "fill" and float(opacity) == 0:
        return brightness(seen, "body", "backgroundColor")
    return sum(float(value) for value in re.findall(r"[\d.]+", color)[:3]) / 3


def boxes(seen: Any, count: int) -> list[dict[str, float]]:
    return [seen.locator(f"#figure-{number}").bounding_box() for number in range(count)]


def xs(seen: Any) -> list[float]:
    return seen.evaluate("document.getElementById('figure-0').data.find(trace => trace.name).x")
