"""The page in a real browser: rounds appear without a reload, names of others are text, nothing is loaded elsewhere."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from fedspan.files import to_json
from fedspan.monitoring.web import WebPage, write_redirect
from helpers import tiny
from helpers.written_run import HOSTILE, PretendRun

pytest.importorskip("starlette", reason="the extra fedspan[web] is not installed")


class View:
    """A page that is open in the browser, with what it printed and requested."""

    def __init__(self, browser: Any, url: str, width: int = 1280) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900})
        self.page, self.wrong, self.requested = self.context.new_page(), list[str](), list[str]()
        self.page.on("console", lambda message: self.wrong.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(url)

    def wait(self, expression: str) -> None:
        """Wait until an expression is true; the page's policy forbids Playwright's own wait, which evaluates text."""
        until = time.monotonic() + 60
        while not self.page.evaluate(expression):
            assert time.monotonic() < until, (expression, self.wrong)
            self.page.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.slow)])
def test_rounds_appear_without_a_reload(
    width: int, browser: Any, pretend_run: PretendRun, collect: Callable[[], Mapping[str, Any]]
) -> None:
    with WebPage(collect) as server:
        view = View(browser, server.url, width)
        view.wait("document.getElementById('state').textContent === 'running'")
        assert view.page.url == f"http://127.0.0.1:{server.port}/"  # without the token
        view.page.evaluate("window.unchanged = true")
        for number in (1, 2):
            pretend_run.add(number, 0.25 * number)
            view.wait(f"document.getElementById('facts').textContent.includes('{number} of 5')")
            view.wait(f"document.querySelectorAll('#loss circle').length === {number}")
        assert view.page.evaluate("window.unchanged")
        assert "50.0%" in view.text("#facts")
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        report = {"metric": "accuracy", "rounds": 2, "best_round": 2, "scores": {"test": {"accuracy": 0.5}}}
        pretend_run.folder.report.write_text(to_json(report))
        view.wait("document.getElementById('state').textContent === 'finished'")
        assert "accuracy, best round" in view.text("#facts")
        pretend_run.folder.report.write_text(to_json({**report, "selected": False}))
        view.wait("document.getElementById('facts').textContent.includes('accuracy, last round')")
        assert view.wrong == []
        assert {url.rsplit("/", 1)[0] for url in view.requested if not url.startswith("data:")} == {
            f"http://127.0.0.1:{server.port}"
        }
    view.wait("document.getElementById('state').textContent === 'unreachable'")
    view.context.close()


def test_a_node_s_row_says_what_it_does_until_it_replies(
    browser: Any, pretend_run: PretendRun, collect: Callable[[], Mapping[str, Any]]
) -> None:
    pretend_run.add(1)

    def collect_server() -> Mapping[str, Any]:
        state = dict(collect())
        rows = [
            {**row, "node_status": "online", "node_seen": "now", "node_work": "training, 37 %"}
            for row in state["clients"]
        ]
        return {**state, "clients": rows, "nodes": {"online": 2, "total": 2, "problem": None}}

    def read_rows(view: View) -> dict[str, str]:
        return {row.split("\t")[0]: row.split("\t")[3] for row in view.text("#rows").splitlines()}

    with WebPage(collect_server) as server:
        pretend_run.write_progress(round=2, cohort=["east", "north"], replied=["north"])
        view = View(browser, server.url)
        view.wait("document.getElementById('rows').textContent.includes('training, 37 %')")
        assert read_rows(view) == {"east": "training, 37 %", "north": "replied"}
        assert "1 of 2 selected replied" in view.text("#count")
        pretend_run.write_progress(round=2, cohort=["east", "north"], replied=["east", "north"])
        view.wait("!document.getElementById('rows').textContent.includes('training')")
        assert read_rows(view) == {"east": "replied", "north": "replied"}
        assert view.wrong == []
        view.context.close()


def test_the_redirect_opens_the_page(browser: Any, collect: Callable[[], Mapping[str, Any]]) -> None:
    with WebPage(collect) as server, write_redirect(server.url) as path:
        view = View(browser, path.as_uri())
        view.page.wait_for_url(f"http://127.0.0.1:{server.port}/")
        view.wait("document.getElementById('state').textContent === 'running'")
        view.context.close()


@pytest.mark.slow
def test_a_state_that_cannot_be_read_is_shown_with_its_reason(browser: Any) -> None:
    with WebPage(Mock(side_effect=ZeroDivisionError("by zero"))) as server:
        view = View(browser, server.url)
        view.wait("document.getElementById('alert').textContent.endsWith('ZeroDivisionError: by zero')")
        view.context.close()


@pytest.mark.slow
def test_losses_that_differ_by_less_than_a_tick_do_not_stop_the_page(
    browser: Any, pretend_run: PretendRun, collect: Callable[[], Mapping[str, Any]]
) -> None:
    with WebPage(collect) as server:
        view = View(browser, server.url)
        for number, loss in ((1, 1e16), (2, 1e16 + 2), (3, -1.7e308), (4, 1.7e308)):
            pretend_run.add(number, loss=loss)
            view.wait(f"document.querySelectorAll('#loss circle').length === {number}")
        view.context.close()


@pytest.mark.slow
def test_an_axis_has_its_values(
    browser: Any, pretend_run: PretendRun, collect: Callable[[], Mapping[str, Any]]
) -> None:
    for number, accuracy in ((1, 0.966), (2, 0.975)):
        pretend_run.add(number, accuracy, validation={"accuracy": accuracy, "loss": 1.0})
    with WebPage(collect) as server:
        view = View(browser, server.url)
        view.wait("document.querySelectorAll('#score circle').length === 4")
        labels = view.page.locator("#score text").all_text_contents()
        assert [label for label in labels if label.endswith("%")] == ["97%", "97.5%"]
        view.context.close()


def test_names_and_reasons_of_others_do_not_run(
    browser: Any, pretend_run: PretendRun, collect: Callable[[], Mapping[str, Any]]
) -> None:
    failure = {"client": HOSTILE, "attempt": 0, "reason": f"<script>window.hit=1</script>{HOSTILE}", "purpose": "train"}
    pretend_run.add(1, cohort=[HOSTILE], failures=[failure])
    pretend_run.write_progress(cohort=[HOSTILE], notes=[HOSTILE], stage={"text": HOSTILE, "unit": HOSTILE, "total": 2})
    with WebPage(collect) as server:
        view = View(browser, server.url)
        view.wait("document.querySelectorAll('#reasons tr').length === 1")
        shown = HOSTILE.replace("\x1b", "\\x1b")
        assert view.text("#reasons td:nth-child(2)") == shown
        assert view.text("#rows th") == shown
        assert "<script>" in view.text("#reasons td:nth-child(3)")
        assert view.page.evaluate("document.querySelectorAll('img').length") == 0
        assert view.page.evaluate("window.hit") is None
        assert view.wrong == []
        # Even a script that got into the page would not run.
        view.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit=1\">')")
        view.wait("document.querySelectorAll('img').length === 1")
        assert view.page.evaluate("window.hit") is None
        view.context.close()


@pytest.mark.slow
def test_a_stage_after_the_last_round_and_a_silent_run(
    browser: Any, pretend_run: PretendRun, collect: Callable[[], Mapping[str, Any]]
) -> None:
    pretend_run.add(2)  # of 5, and none follows
    stage = {"text": "evaluation", "done": 3, "total": 7, "unit": "examples"}
    pretend_run.write_progress(round=None, cohort=[], stage=stage, updated=time.time() - 300)
    with WebPage(collect) as server:
        view = View(browser, server.url)
        view.wait("document.getElementById('stage').textContent === 'evaluation, 3 of 7 examples'")
        assert re.fullmatch(r"no news for 5:\d\d", view.text("#times"))
        pretend_run.write_progress(round=3, cohort=["a", "b"], replied=["a"], failures={"b": "gone"}, stage=stage)
        view.wait("document.getElementById('stage').textContent === 'round 3 of 5: evaluation, 3 of 7 examples'")
        assert view.text("#count").startswith("1 of 2 selected replied, 1 failed")
        assert view.text("#rows td.bad") == "failed"
        assert "round 3: gone" in view.text("#rows")
        stage = {"text": "training", "done": 0, "total": 8003, "unit": "examples"}  # no node has replied
        pretend_run.write_progress(round=3, cohort=["a", "b"], stage=stage)
        view.wait("document.getElementById('stage').textContent === 'round 3 of 5: training'")
        view.context.close()


@pytest.mark.slow
def test_the_filter_finds_a_client(
    browser: Any, pretend_run: PretendRun, collect: Callable[[], Mapping[str, Any]]
) -> None:
    ids = [f"clinic-{number:03}" for number in range(100)]
    pretend_run.add(1, cohort=ids)
    pretend_run.write_progress(cohort=ids, replied=ids[:7], losses={}, clients=100)
    with WebPage(collect) as server:
        view = View(browser, server.url)
        view.wait("document.querySelectorAll('#rows tr').length === 100")
        assert "7 of 100 selected replied" in view.text("#count")
        view.page.fill("#filter", "CLINIC-042")
        view.wait("document.querySelectorAll('#rows tr').length === 1")
        assert view.text("#rows th") == "clinic-042"
        view.context.close()


@pytest.mark.slow
def test_a_simulation_is_watched_from_start_to_end(browser: Any, tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, federation={"rounds": 4, "clients_per_round": 3})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "fedspan"]
    watching = subprocess.Popen([*command, "watch", tmp_path / "run"], stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        watching.stdout.readline()
        view = View(browser, watching.stdout.readline().strip())
        view.wait("document.getElementById('state').textContent === 'waiting'")
        view.page.evaluate("""() => {
            window.titles = new Set();
            new MutationObserver(() => window.titles.add(document.title))
                .observe(document.querySelector("title"), {childList: true});
        }""")
        running = [*command, "run", tmp_path / "config.yaml", "--out", tmp_path / "run", "--track", "none"]
        subprocess.run(running, check=True, capture_output=True)
        view.wait("document.getElementById('state').textContent === 'finished'")
        titles = view.page.evaluate("[...window.titles]")
        assert titles[-1].startswith("4/4 finished")
        assert view.page.evaluate("document.querySelectorAll('#loss circle').length") == 4
        assert re.search(r"best round\n?\d+\.\d%", view.text("#facts"))
        assert {view.text(f"#rows tr:nth-child({place}) th") for place in (1, 2, 3, 4)} == set(tiny.SITES)
        assert view.wrong == []
        view.context.close()
    finally:
        watching.terminate()
        watching.wait()
