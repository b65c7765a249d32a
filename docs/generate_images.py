"""Render docs/images/report.png, the top of a report: ``python docs/generate_images.py`` (two minutes).

Needs the extra ``dev`` and a Chromium or Chrome on this machine.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import fedspan

PICTURE = Path(__file__).parent / "images" / "report.png"
CONFIG = {
    "model": {"name": "builtin:all-minilm-l6-v2", "target_modules": ["query", "value"], "layers_to_transform": [5]},
    "data": {"train": "builtin:patient-messages"},
    "partition": {"partitioner": "dirichlet", "alpha": 0.5, "clients": 6},
    "federation": {"rounds": 6},
    "training": {"lr": 8.0e-3, "batch_size": 16},
}


def main() -> None:
    """Compare two methods on two seeds, render the report and take a screenshot of its top."""
    browser = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with tempfile.TemporaryDirectory() as name:
        series = Path(name) / "series"
        fedspan.compare(CONFIG, series, ["fedit", "rolora"], seeds=[0, 1])
        page = fedspan.report(series, Path(name) / "page.html")
        with sync_playwright() as playing:
            opened = playing.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            view = opened.new_page(viewport={"width": 1100, "height": 1000})
            view.goto(page.as_uri())
            view.wait_for_selector("#figure-0 .main-svg")
            view.screenshot(path=PICTURE)
            opened.close()


if __name__ == "__main__":
    main()
