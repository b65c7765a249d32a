"""The bars of a series that is started from Python."""

from __future__ import annotations

import io

from rich.console import Console

from fedspan.experiments.series import Step
from fedspan.experiments.series_bar import SeriesBar
from fedspan.runs.setup import Prepared
from fedspan.training.stages import Stage


def shown(bar: SeriesBar) -> str:
    out = Console(file=io.StringIO(), width=80)
    out.print(bar.render_footer())
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_the_current_run_has_its_place_in_the_series_and_its_bars(prepared: Prepared) -> None:
    bar = SeriesBar(Console(file=io.StringIO(), width=80, force_terminal=True), lambda: 0.0)
    step = Step("fedit-seed0", "fedit, seed 0", "fedit", 0, prepared.config)
    bar.on_series_start([step, step])
    bar.on_run_start(step)
    bar.on_stage_change(Stage("model"))
    assert "run 1 of 2: fedit, seed 0; all: 0:00" in shown(bar)
    assert "loading the model" in shown(bar)
    bar.on_start(prepared, 0, False)
    bar.on_stage_change(Stage("training", 6, 24))
    bar.on_client_finish(1, "north", 1.5)
    assert "clients        1/3" in shown(bar)
    bar.on_run_finish(step, "accuracy", 0.5, 61.0, True)
    bar.on_run_start(step)
    assert "run 2 of 2" in shown(bar)
    assert "clients" not in shown(bar), "of the next run, nothing is known yet"
    bar.on_run_failure(step, "it diverged")
    with bar:
        pass
    assert shown(bar) == "2 runs in 0:00\n"
    bar.done = 1
    assert shown(bar) == "1 run in 0:00\n"
