"""Render the images of the reports and of the live web page: ``python docs/generate_images.py`` (three minutes).

Needs the extra ``dev`` and a Chromium or Chrome on this machine. A name as argument renders that image alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import fedspan
from fedspan.monitoring.run_monitor import RunMonitor, build_page_state
from fedspan.monitoring.web import WebPage

IMAGES = Path(__file__).parent / "images"
CONFIG: dict[str, Any] = {
    "model": {"name": "builtin:all-minilm-l6-v2", "target_modules": ["query", "value"], "layers_to_transform": [5]},
    "data": {"train": "builtin:patient-messages"},
    "partition": {"partitioner": "dirichlet", "alpha": 0.5, "clients": 6},
    "federation": {"rounds": 6},
    "training": {"lr": 8.0e-3, "batch_size": 16},
}


@contextmanager
def open_view(width: int, height: int) -> Generator[Any]:
    """Yield a page of the browser."""
    browser = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playing:
        opened = playing.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        yield opened.new_page(viewport={"width": width, "height": height})
        opened.close()


def render_report(folder: Path) -> None:
    """Compare two methods on two seeds, render the report and take a screenshot of its top."""
    fedspan.compare(CONFIG, folder / "series", ["fedit", "rolora"], seeds=[0, 1])
    page = fedspan.report(folder / "series", folder / "page.html")
    with open_view(1100, 1000) as view:
        view.goto(page.as_uri())
        view.wait_for_selector("#figure-0 .main-svg")
        view.screenshot(path=IMAGES / "report.png")


def render_live_page(folder: Path) -> None:
    """Run a simulation in another process, and take a screenshot of its page in the middle of a round."""
    run = Path("runs/first")
    overrides = ["partition.clients=12", "federation.clients_per_round=8", "federation.rounds=12", "engine.name=loop"]
    script = "import json, sys, fedspan; fedspan.run(json.loads(sys.argv[1]), sys.argv[2], overrides=sys.argv[3:])"

    os.chdir(folder)
    process = subprocess.Popen([sys.executable, "-c", script, json.dumps(CONFIG), str(run), *overrides])
    monitor = RunMonitor(run)
    with WebPage(lambda: build_page_state(monitor)) as page, open_view(1100, 1000) as view:
        view.goto(page.url)
        text = ""
        while not re.search(r"round [89] of 12: training, [1-9]", text) or "no reply yet" not in text:
            if process.poll() is not None:
                raise SystemExit("the run ended before the screenshot")
            view.wait_for_timeout(20)
            text = view.locator("main").inner_text()
        view.screenshot(path=IMAGES / "live-page.png")
    process.terminate()
    process.wait()


RENDERERS = {"report": render_report, "live-page": render_live_page}


def main() -> None:
    """Render the images."""
    for name in sys.argv[1:] or RENDERERS:
        with tempfile.TemporaryDirectory() as folder:
            RENDERERS[name](Path(folder))


if __name__ == "__main__":
    main()
