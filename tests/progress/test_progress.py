"""What a run shows while it is at work: bars, the time that is left, and the file that other processes read."""

import io
import json
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedspan
from fedspan.assembly.run import Prepared
from fedspan.cli.formatting import create_console
from fedspan.errors import FedspanError
from fedspan.progress.bar import ProgressBar, has_bar
from fedspan.progress.file import INTERVAL, ProgressFile
from fedspan.progress.formatting import format_duration, format_number, format_runs, shorten
from fedspan.progress.listener import Listener, Listeners
from fedspan.progress.remaining_time import Effort, describe_stage, get_unrepeated_name
from fedspan.training.stages import Stage
from helpers import tiny
from helpers.clock import Clock


def shown(bar: ProgressBar, width: int = 80) -> str:
    out = Console(file=io.StringIO(), width=width)
    out.print(bar.render_footer())
    return out.file.getvalue()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bar(clock: Clock) -> ProgressBar:
    return ProgressBar(Console(file=io.StringIO(), width=80, force_terminal=True), clock)


@pytest.mark.parametrize("width", [80, 120])
def test_every_stage_has_its_bar(prepared: Prepared, clock: Clock, bar: ProgressBar, width: int) -> None:
    assert "reading the data and loading the model, elapsed 0:00" in shown(bar, width)
    bar.on_stage_change(Stage("model"))
    assert "loading the model, elapsed 0:00" in shown(bar, width)
    bar.on_stage_change(None)
    clock.now = 10.0
    bar.on_start(prepared, 0, False)
    said = shown(bar, width)
    assert "1/3" in said
    assert "0/3" in said
    assert "left" not in said, "no speed yet"
    training = Stage("training", 0, 24)
    bar.on_stage_change(Stage("hidden states", 30, 100, outer=training))
    said = shown(bar, width)
    assert "examples    30/100" in said
    assert "outputs of the frozen layers (once)" in said
    bar.on_stage_change(Stage("stacking", outer=training))
    assert "trying how many clients to train at once" in shown(bar, width)
    bar.on_stage_change(training)
    clock.now = 20.0
    first, *others = prepared.federation.draw_cohort(0)
    bar.on_stage_change(Stage("training", 8, 24))
    bar.on_client_finish(1, first, 2.0)
    bar.on_client_finish(1, first, 1.0)  # a second phase of the same client
    said = shown(bar, width)
    assert "clients        1/3" in said
    assert "loss 1.0000" in said
    assert first in said
    assert "elapsed 0:20, about" in said
    for client in others:
        bar.on_client_finish(1, client, 1.0)
    bar.on_stage_change(Stage("training", 24, 24))
    assert "finishing the round, " in shown(bar, width)
    bar.on_stage_change(Stage("evaluation", 3, 12))
    said = shown(bar, width)
    assert "measuring, " in said
    assert "examples      3/12" in said
    for round in (1, 2, 3):
        bar.on_round_finish({"round": round})
    bar.on_stage_change(None)
    assert "measuring the best round" in shown(bar, width)


def test_baselines_and_the_end(prepared: Prepared, clock: Clock, bar: ProgressBar) -> None:
    config = prepared.config.model_copy(update={"baselines": ["centralized"]})
    bar.on_start(replace(prepared, config=config), 3, True)
    bar.on_baseline_start("centralized", 3)
    bar.on_baseline_round("centralized", 1, 0.75)
    bar.on_stage_change(Stage("training", 40, 96))
    said = shown(bar)
    assert "centralized       1/3" in said
    assert "loss 0.7500" in said
    assert "examples        40/96" in said
    assert "⠋ training, elapsed" in said
    assert max(map(len, said.splitlines())) <= 80
    clock.now = 75.0
    with bar:
        pass
    assert shown(bar) == "3 rounds in 1:15\n"


def test_fifty_clients_are_as_calm_as_four(prepared: Prepared, bar: ProgressBar) -> None:
    bar.on_start(prepared, 0, False)
    lines = len(shown(bar).splitlines())
    for index in range(50):
        bar.on_client_finish(1, f"client-{index:02}", 1.0)
        assert len(shown(bar).splitlines()) == lines == 4


@pytest.mark.parametrize("notebook", [False, True], ids=["file", "notebook"])
def test_without_bars_there_are_lines(
    prepared: Prepared, clock: Clock, notebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook without ipywidgets gets them, and no warning for each frame that Rich cannot draw."""
    monkeypatch.setattr("fedspan.progress.bar.find_spec", lambda name: None)
    printed = list[str]()
    console = Console(file=io.StringIO(), width=80, force_jupyter=notebook)
    monkeypatch.setattr(console, "print", lambda text, **_: printed.append(text.plain))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ProgressBar(console, clock) as bar:
            bar.on_stage_change(Stage("model"))
            clock.now = 4.0
            bar.on_start(prepared, 0, False)
            bar.on_stage_change(Stage("training", 8, 24))
            clock.now = 12.0
            bar.on_stage_change(Stage("training", 16, 24))
            bar.on_stage_change(Stage("training", 17, 24))
            for round in (1, 2, 3):
                bar.on_round_finish({"round": round})
    first, state, last = printed
    assert first == "reading the data and loading the model"
    assert state.startswith("  training, 16 of 24 examples, elapsed 0:12")
    assert last == "3 rounds in 0:12"


def test_ipywidgets_draw_the_bars_of_a_notebook(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspan.progress.bar.find_spec", lambda name: name)
    assert ProgressBar(Console(file=io.StringIO(), force_jupyter=True), clock).is_live


def test_forced_colors_are_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of notebooks and CI set FORCE_COLOR, and would print every frame of a bar."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    for stream, live in ((_Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr("sys.stdout", stream)
        assert ProgressBar().is_live is live
        assert create_console().is_terminal
        assert create_console().is_interactive is live


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_in_a_terminal_or_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert has_bar(True)
    assert not has_bar(False)
    for stream, wanted in ((_Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        assert has_bar(None) is wanted


def test_a_call_shows_the_bar_on_standard_error(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    terminal, rounds = _Terminal(), list[int]()
    monkeypatch.setattr("sys.stderr", terminal)

    class Own(Listener):
        def on_round_finish(self, row: Any) -> None:
            rounds.append(row["round"])
            print(json.dumps(row["round"]))

    values = tiny.settings(tiny_folder, federation={"rounds": 2})
    fedspan.run(values, tmp_path / "run", listener=Own())
    assert rounds == [1, 2]
    assert "2 rounds in 0:" in terminal.getvalue()
    assert "worst client" in terminal.getvalue()  # the head of the table of rounds
    assert capsys.readouterr().out == "1\n2\n", "a file or pipe gets what the script prints, and no bar"
    terminal.truncate(0)
    fedspan.run(values, tmp_path / "quiet", progress=False)
    assert terminal.getvalue() == ""
    assert has_bar(None)


@pytest.fixture
def compared(prepared: Prepared) -> Prepared:
    return replace(prepared, config=prepared.config.model_copy(update={"baselines": ["local-only", "centralized"]}))


def keys() -> list[str]:
    baselines = [key for name in ("local-only", "centralized") for key in (*(f"{name} {n}" for n in (1, 2, 3)), name)]
    return ["round 1", "round 2", "round 3", "closing", *baselines]


def test_it_reaches_nothing_at_the_end(compared: Prepared) -> None:
    """With speeds as assumed, the run ends when the first estimate said."""
    clock = Clock()
    effort = Effort(compared, 0, clock)
    completed: list[float] = []
    for key in keys():
        effort.finish(key)
        completed.append(effort.completed)
    assert completed[-1] == pytest.approx(effort.total)
    assert effort.estimate_left() is None

    clock, total = Clock(), effort.total
    effort = Effort(compared, 0, clock)
    assert effort.estimate_left() is None, "no speed yet"
    for key, passes in zip(keys()[:-1], completed, strict=False):
        clock.now = passes  # a pass takes a second
        effort.finish(key)
        left = total - passes
        assert effort.estimate_left() == pytest.approx((left, left))
        clock.now += 0.5
        assert effort.estimate_left() == pytest.approx((left - 0.5, left - 0.5)), "it counts down between two counts"
        clock.now -= 0.5


def test_batches_count_within_a_round(prepared: Prepared) -> None:
    clock = Clock()
    effort = Effort(prepared, 0, clock)
    work = 2 * 4 * 3  # examples of a round: steps, batch size, clients
    for done in (0, 6, 12, 24, 1000):  # more than announced, as in a method that trains twice
        clock.now = 3.0 * min(done, work)
        effort.stage(Stage("training", done, work))
        assert effort.completed == 3.0 * min(done, work)
        left = effort.total - effort.completed
        assert done == 0 or effort.estimate_left() == pytest.approx((left, left))
    for clients, test in ((0, 0), (5, 0), (10, 0), (10, 3)):
        stage = Stage("evaluation", test or clients, 10)
        effort.stage(stage)
        assert effort.completed == 3.0 * work + clients + test
    effort.finish("round 1")
    effort.stage(Stage("evaluation", 4, 10))
    before = effort.completed
    assert before < 2 * 3.0 * work, "what is measured before training belongs to no round"


def test_what_only_the_first_round_waits_for_stops_the_clock(prepared: Prepared) -> None:
    clock = Clock()
    effort, training = Effort(prepared, 0, clock), Stage("training", 0, 24)
    effort.stage(training)
    clock.now = 10.0
    effort.stage(Stage("training", 12, 24))
    expected, _ = effort.estimate_left()
    effort.stage(Stage("hidden states", 0, 100, outer=training))
    clock.now = 20.0
    effort.stage(Stage("hidden states", 25, 100, outer=training))
    assert effort.estimate_left() == pytest.approx((expected + 30.0, expected + 30.0))
    clock.now = 50.0
    effort.stage(Stage("training", 12, 24))
    assert effort.estimate_left() == pytest.approx((expected, expected))
    effort.stage(Stage("stacking", outer=training))
    assert effort.estimate_left() is None, "nobody knows how long that takes"


def test_speeds_are_those_of_each_kind_of_passes_in_the_last_rounds(prepared: Prepared) -> None:
    """A first round that takes four times as long, and evaluation that takes twice as long as assumed."""
    clock = Clock()
    effort, (examples, scored) = Effort(prepared, 0, clock), (24, 10)
    lengths = {"training": 3.0, "evaluation": 2.0}
    part = [("training", examples)] + [("evaluation", scored)] * (scored > 0)
    for number, factor in ((1, 4.0), (2, 1.0)):
        for name, count in part:
            effort.stage(Stage(name, 0, count))
            clock.now += factor * count * lengths[name]
            effort.stage(Stage(name, count, count))
        effort.finish(f"round {number}")
    parts = effort._parts[2:]
    expected = sum(part.training + 2.0 * part.evaluation for part in parts)
    least, most = effort.estimate_left()
    assert least == most
    assert expected < most < 2.0 * expected


def test_the_speed_of_a_measurement_is_no_estimate_of_training(prepared: Prepared) -> None:
    clock = Clock()
    effort = Effort(prepared, 0, clock)
    for stage in (Stage("evaluation", 0, 10), Stage("evaluation", 10, 10), Stage("training", 0, 24)):
        effort.stage(stage)
        clock.now += 10.0
        assert effort.estimate_left() is None
    effort.stage(Stage("training", 12, 24))
    assert effort.estimate_left() is not None


def test_early_stopping_makes_a_range(prepared: Prepared) -> None:
    federation = prepared.config.federation.model_copy(update={"early_stopping": 1})
    config = prepared.config.model_copy(update={"federation": federation})
    clock = Clock()
    effort = Effort(replace(prepared, config=config), 0, clock)
    clock.now = effort._parts[0].work
    effort.finish("round 1", best=1)
    (second, third, closing) = (part.work for part in effort._parts[1:])
    assert effort.estimate_left() == pytest.approx((second + closing, second + third + closing))
    clock.now += second
    effort.finish("round 2", best=2)
    assert effort.estimate_left() == pytest.approx((third + closing, third + closing))


def test_rounds_and_epochs_that_are_not_run_are_no_work(compared: Prepared) -> None:
    effort = Effort(compared, 0, Clock())
    for key in ("round 1", "closing", "local-only 1", "local-only", "centralized 1", "centralized"):
        effort.finish(key)
    assert effort.completed == pytest.approx(effort.total)
    resumed = Effort(compared, 2, Clock())
    resumed.finish("round 3")
    assert resumed.completed < effort.completed


def test_stages_and_numbers_in_words() -> None:
    test = Stage("learning rate", 1, 5, "rates")
    inside = Stage("hidden states", 3, 9, outer=Stage("training", 0, 9, outer=test))
    assert describe_stage(inside) == "range test of the learning rate, 2 of 5"
    assert get_unrepeated_name(inside) == "learning rate"
    assert get_unrepeated_name(Stage("training", 3, 9)) is None
    assert describe_stage(Stage("training", 9, 9)) == "finishing the round"
    losses = (None, 0.0, 0.00003, 0.123456, -2.0, 999.99, 1000.0, -123456.0, float("nan"))
    texts = ["-", "0.0000", "3e-05", "0.1235", "-2.0000", "999.9900", "1e+03", "-1.23e+05", "-"]
    assert [format_number(loss) for loss in losses] == texts
    seconds, texts = (0.4, 59.6, 75, 3599.4, 3600, 3675, 1e6), ["0:00", "1:00", "1:15", "59:59"]
    assert [format_duration(one) for one in seconds] == [*texts, "1:00:00", "1:01:15", "277:46:40"]
    assert [format_runs(count) for count in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]


def test_texts_become_one_short_line() -> None:
    assert shorten(" a\n b\t c ", 5) == "a b c"
    assert shorten("abcdef", 5) == "abcd…"
    assert len(shorten("ab " * 99, 20)) == 20
    assert shorten("ab", 0) == "…"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def wait_for(path: Path, **expected: object) -> dict[str, Any]:
    """Return the file's content once it has these values; a thread writes it."""
    until = time.monotonic() + 30
    while True:
        content = read(path)
        if all(content.get(name) == value for name, value in expected.items()):
            return content
        assert time.monotonic() < until, (content, expected)
        time.sleep(0.005)


def test_clients_and_stages_of_a_round(prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    file = ProgressFile(path)
    file.on_stage_change(Stage("model"))
    assert not path.exists()  # there is no folder yet
    with file:
        assert read(path)["stage"]["text"] == "loading the model"
        file.on_start(prepared, 0, False)
        started = wait_for(path, rounds=3, clients=4)
        assert "round" not in started
        assert (started["metric"], started["is_percentage"]) == ("accuracy", True)
        file.on_round_start(1)
        cohort = list(prepared.federation.draw_cohort(0))
        wait_for(path, round=1, cohort=cohort, replied=[], failures={})
        file.on_client_finish(1, cohort[0], 0.5)
        file.on_client_failure(1, cohort[1], "x" * 5000)
        wait_for(path, losses={cohort[0]: 0.5}, failures={cohort[1]: "x" * 500})
        file.on_client_finish(1, cohort[1], float("nan"))  # in another attempt
        wait_for(path, replied=cohort[:2], losses={cohort[0]: 0.5}, failures={})
        file.on_round_finish({"round": 1})
        wait_for(path, round=None, round_started=None, cohort=[], replied=[])  # no round follows, as far as is known
        file.on_round_start(2)
        wait_for(path, round=2, cohort=list(prepared.federation.draw_cohort(1)), replied=[])
        file.on_baseline_start("local-only", 5)
        file.on_baseline_round("local-only", 2, 0.5)
        wait_for(path, baseline={"name": "local-only", "round": 2, "rounds": 5})
    assert not path.exists()


def test_clients_with_an_order_are_those_of_an_asynchronous_round(tiny_folder: Path, tmp_path: Path) -> None:
    """None of them is drawn before; the live page shows who replied, and who failed, within the round."""
    federation = {"rounds": 2, "clients_per_round": 2, "buffered": {"concurrency": 2}}
    orders = list[tuple[int, list[str], list[str]]]()

    class Watcher(fedspan.Listener):
        def on_client_finish(self, round: int, client: str, loss: float) -> None:
            orders.append((round, [*file._state["cohort"]], [*file._losses]))

    simulation = {"speed": {"distribution": "uniform", "median": 10, "spread": 3}}
    settings = tiny.settings(tiny_folder, federation=federation, simulation=simulation)
    with ProgressFile(tmp_path / "progress.json") as file:
        fedspan.run(settings, tmp_path / "run", listener=Listeners(file, Watcher()))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    by_round = {row["round"]: [id for id, _ in row["arrivals"]] for row in rows if row["round"]}
    for round, arrived in by_round.items():
        seen = [entry for entry in orders if entry[0] == round]
        assert sorted(seen[-1][2]) == sorted(arrived)
        assert set(arrived) <= set(seen[-1][1])


def test_many_changes_are_few_writes(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, written, began = tmp_path / "progress.json", list[Path](), time.monotonic()
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: written.append(self) or replace(self, target))
    with ProgressFile(path) as file:
        file.on_start(prepared, 0, False)
        for round in range(1, 500):
            file.on_round_start(round)
            file.on_round_finish({"round": round})
        file.on_note("last")
        wait_for(path, notes=["last"])
        assert 2 <= len(written) <= 2 + (time.monotonic() - began) / INTERVAL


def test_a_hanging_disk_does_not_stop_training(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writing, may_write = tmp_path / "progress.json", threading.Event(), threading.Event()
    replace = Path.replace

    def replace_late(self: Path, target: Path) -> Path:
        writing.set()
        assert may_write.wait(30)
        return replace(self, target)

    with ProgressFile(path) as file:
        monkeypatch.setattr(Path, "replace", replace_late)
        file.on_note("one")
        assert writing.wait(30)
        file.on_start(prepared, 0, False)  # these return while the file is being written
        file.on_stage_change(Stage("training"))
        file.on_round_start(1)
        file.on_round_finish({"round": 1})
        assert "rounds" not in read(path)
        may_write.set()
        wait_for(path, notes=["one"], rounds=3)
    assert not path.exists()


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (FedspanError("nodes", 1, problem="1 of 3 nodes participate"), "failed", "`nodes`: 1 of 3 nodes participate."),
        (ZeroDivisionError("by zero"), "failed", "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), "interrupted", "interrupted (Ctrl-C)"),
    ],
)
def test_the_reason_of_a_failure_stays(error: BaseException, state: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    with pytest.raises(type(error)), ProgressFile(path):
        raise error
    assert (read(path)["state"], read(path)["reason"]) == (state, reason)


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    with ProgressFile(tmp_path / "gone" / "progress.json") as file:
        file.on_note("one")
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_it_and_removes_it_at_the_end(tiny_folder: Path, tmp_path: Path) -> None:
    path, seen = tmp_path / "run" / "progress.json", list[dict[str, Any]]()

    class Watcher(fedspan.Listener):
        def on_client_finish(self, round: int, client: str, loss: float) -> None:
            seen.append(wait_for(path, round=round))

    fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 2}), tmp_path / "run", listener=Watcher())
    assert {len(entry["cohort"]) for entry in seen} == {3}
    assert {entry["round"] for entry in seen} == {1, 2}
    assert not path.exists()
