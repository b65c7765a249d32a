"""Render the images of the reports and of the live web page: ``python docs/generate_images.py`` (five minutes).

Needs the extra ``dev`` and a Chromium or Chrome on this machine. A name as argument renders that image alone. The
server's page needs to create the folder ``/srv/fedspan``.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import yaml
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
NODES = ("clinic-north", "clinic-south", "clinic-west")
SERVER_FOLDER = Path("/srv/fedspan")
"""Folder of the server, whose page shows the path of its run: that of the unit in ``deploy/systemd``."""


@contextmanager
def open_view(width: int, height: int) -> Generator[Any]:
    """Yield a page of the browser."""
    browser = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playing:
        opened = playing.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        yield opened.new_page(viewport={"width": width, "height": height})
        opened.close()


def render_report(folder: Path) -> None:
    """Run the demo, render its report and take a screenshot of its top."""
    with as_file(files("fedspan") / "demo.yaml") as config:
        fedspan.run(config, folder / "run")
    page = fedspan.report(folder / "run", folder / "page.html")
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


@contextmanager
def create_server_folder() -> Generator[None]:
    """Create the server's folder and change into it for the duration of the context."""
    before = Path.cwd()
    SERVER_FOLDER.mkdir()
    try:
        os.chdir(SERVER_FOLDER)
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(SERVER_FOLDER)


@create_server_folder()
def render_server_page(_: Path) -> None:
    """Run a server and three nodes, and take a screenshot of the server's page after a node has missed the deadline.

    Another node is killed in the second round, so that a selected client has not replied. The first node has more data
    than the others, so that it still trains when another has replied.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.stage import Deployment, free_port

    with (files("fedspan.data") / "corpus" / "patient_messages" / "train.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    config = {
        **CONFIG,
        "data": {"labels": sorted({row["label"] for row in rows})},
        "partition": {"clients": len(NODES)},
    }
    config |= {"federation": {"rounds": 10, "deadline": 90, "min_replies": 2}, "device": "cpu", "threads": 1}
    config["model"] = {**CONFIG["model"], "layers_to_transform": None}
    config["training"] = {"lr": 1.0e-3, "batch_size": 8, "local_epochs": 4}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    run, web = Path("runs/first"), ["--web-port", str(free_port())]
    with Deployment(Path("deployment").resolve(), options=web) as made, open_view(1100, 1080) as view:
        made.wait_for("server", "web page: ")
        for name, places in zip(NODES, ((0, 1, 2, 3), (4,), (5,)), strict=True):
            data = Path(f"{name}.csv").resolve()
            with data.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["text", "label"])
                writer.writeheader()
                writer.writerows(row for number, row in enumerate(rows) if number % 6 in places)
            made.join(name, made.node_file(name, data, validation=0.1, test=0.2))
        command = ("submit", "config.yaml", "--out", str(run), "--server", str(made.server))
        process = made.start("submit", *command)
        view.goto(next(line.split()[-1] for line in made.log("server").splitlines() if line.startswith("web page: ")))
        text = ""
        while "reasons below" not in text or not (
            re.search("training, [1-9]", text) and re.search(r"\n\w.*replied\t", text)
        ):
            if process.poll() is not None:
                raise SystemExit(f"the run ended before the screenshot\n{made.logs()}")
            if NODES[-1] in made.processes and "2 of 10" in text:
                made.end(NODES[-1])
            view.wait_for_timeout(50)
            text = view.locator("main").inner_text()
        view.screenshot(path=IMAGES / "server-page.png")


RENDERERS = {"report": render_report, "live-page": render_live_page, "server-page": render_server_page}


def main() -> None:
    """Render the images."""
    for name in sys.argv[1:] or RENDERERS:
        with tempfile.TemporaryDirectory() as folder:
            RENDERERS[name](Path(folder))


if __name__ == "__main__":
    main()
