"""The web page of a server in a real browser, while nodes connect and a run is submitted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from stage import Deployment, free_port

from helpers.sites import SITES, run_values, site_files

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium or Chrome on this machine"),
]


def wait(page: Any, expression: str) -> None:
    """Wait until an expression is true; the page's policy forbids Playwright's own wait, which evaluates text."""
    for _ in range(2400):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError((expression, page.inner_text("body")))


def test_nodes_and_the_rounds_of_a_run_appear_without_a_reload(tiny_folder: Path, tmp_path: Path) -> None:
    files = site_files(tiny_folder / "corpus.csv", tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(run_values(tiny_folder, {"name": "fedit", "r": 2}, federation={"rounds": 3})))
    web = ["--web-port", str(free_port())]
    with Deployment(tmp_path / "deployment", options=web) as made, sync_api.sync_playwright() as playing:
        made.wait_for("server", "web page: ")
        (url,) = (line.split()[-1] for line in made.log("server").splitlines() if line.startswith("web page: "))
        browser = playing.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, wrong = browser.new_page(), list[str]()
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.goto(url)
        wait(page, "document.getElementById('title').textContent === 'No run yet'")
        page.evaluate("window.unchanged = true")
        for site in SITES:
            made.join(site, made.node_file(site, files[site]))
        wait(page, f"document.getElementById('facts').textContent.includes('{len(SITES)} of {len(SITES)}')")
        assert page.locator("#rows td.online").count() == len(SITES)
        made.call("submit", str(config), "--out", str(tmp_path / "run"), "--server", str(made.server))
        wait(page, "document.getElementById('state').textContent === 'finished'")
        assert page.evaluate("window.unchanged")
        assert page.locator("#loss circle").count() == 3
        shown = {row.split("\t")[0]: row.split("\t") for row in page.inner_text("#rows").splitlines()}
        assert {site: (shown[site][1], shown[site][3]) for site in SITES} == dict.fromkeys(SITES, ("online", "3"))
        report = json.loads((tmp_path / "run" / "report.json").read_text())
        moved = sum(report["bytes"].values())
        assert moved > 0
        assert page.evaluate("formatSize(" + str(moved) + ")") in page.inner_text("#facts")
        assert wrong == []
        browser.close()
