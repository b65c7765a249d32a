"""Ask the site's own search what users ask: each answer is among its first two pages: ``python docs/check_search.py``.

The questions are typed into the site in Chromium or Chrome. Without a browser, node runs the theme's search worker.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

SITE = Path(__file__).parents[1] / "site"
ANSWERS = {
    "how do I federate my Trainer": "your-trainer",
    "bytes per round": "planning",
    "can a node read another's data": "faq",
    "GPU memory for Llama-7B": "language-models",
    "resume": "faq",
    "add a hospital": "faq",
    "compare methods on my data": "comparing",
    "serve the adapter": "faq",
    "Qwen": "language-models",
    "Llama": "language-models",
    "LoRA rank": "language-models",
    "train on a CSV file": "files",
    "non-IID Dirichlet split": "files",
    "which ports must the firewall open": "deployment",
    "Docker": "deployment",
    "what leaves the hospital": "privacy",
    "GDPR": "privacy",
    "differential privacy epsilon": "privacy",
    "can the server see one hospital's update": "secure-aggregation",
    "clients with different ranks": "faq",
    "replace a lost key": "own-a-node",
    "how do I add a method": "adding-a-method",
    "install": "",
    "how do I use several GPUs": "cluster",
    "how long will training take": "planning",
    "which learning rate": "choosing",
    "malicious clients": "robustness",
    "approve a run": "own-a-node",
    "image classification": "images",
    "named entity recognition": "text-tasks",
    "custom loss function": "your-task",
    "resuming a run": "faq",
    "approving runs": "own-a-node",
    "replacing keys": "own-a-node",
    "installing": "",
    "stragglers": "asynchronous",
    "poisoning": "robustness",
    "Prometheus": "monitoring",
    "hostile server": "security",
}
"""Questions, and the page that answers each; empty: the first one."""
WORKER = """
const vm = require("vm"), fs = require("fs"), [site, worker, ...questions] = process.argv.slice(1);
const index = JSON.parse(fs.readFileSync(site + "/search/search_index.json"));
const ask = at => at < questions.length && self.handle({data: {type: 2, data: questions[at]}});
let answers = [];
const self = {
  addEventListener: (_, handle) => { self.handle = handle; },
  postMessage: message => {
    if (message.type === 3) answers.push(message.data.items.map(item => item[0].location));
    if (message.type === 1 || message.type === 3) ask(answers.length);
    if (answers.length === questions.length) { console.log(JSON.stringify(answers)); answers = []; }
  },
  lunr: undefined,
};
self.self = self;
self.importScripts = () => {};
vm.runInNewContext(fs.readFileSync(worker, "utf8"), Object.assign(self, {console, performance, setTimeout}));
self.handle({data: {type: 0, data: {...index, options: {suggest: false}}}});
"""
"""Feeds the theme's worker with the index and the questions; prints the pages that it finds for each."""


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves the site without a line for each request."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def ask_browser(browser: str) -> list[list[str]]:
    """Type each question into the site, and return the pages found."""
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found: list[list[str]] = []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page()
        for question in ANSWERS:
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.fill("input.md-search__input", question)
            page.press("input.md-search__input", "End")  # the theme searches when a key is released
            links = page.locator(".md-search-result__item > a.md-search-result__link")
            links.first.wait_for(state="attached", timeout=30_000)
            found.append([urlsplit(link.get_attribute("href") or "").path for link in links.all()])
        chromium.close()
    server.shutdown()
    return found


def ask_worker(node: str) -> list[list[str]]:
    """Give each question to the theme's worker in node, and return the pages found."""
    (worker,) = (SITE / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    command = [node, "-e", WORKER, str(SITE), str(worker), *ANSWERS]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def main() -> int:
    """Print the first pages for each question; return 1 if an answer is not among them."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    ask: Callable[[str], list[list[str]]] = ask_worker if browser is None else ask_browser
    program = browser or shutil.which("node")
    if program is None:
        print("search not checked: there is neither Chromium nor node on this machine")
        return 0
    failed = 0
    for (question, answer), pages in zip(ANSWERS.items(), ask(program), strict=True):
        first = list(dict.fromkeys(page.partition("#")[0].strip("/").rpartition("/")[2] for page in pages))[:2]
        failed |= answer not in first
        print(f"{'ok' if answer in first else 'NOT FOUND':10} {question}: {', '.join(first)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
