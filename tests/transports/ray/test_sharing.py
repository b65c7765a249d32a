"""Workers of the runs of a series."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")


from fedspan.runs.cluster import connect_workers, get_resources
from fedspan.runs.setup import prepare
from fedspan.transports.ray.sharing import share_teams
from fedspan.transports.ray.team import open_team
from helpers.cluster_configs import config

pytestmark = pytest.mark.slow


def test_runs_of_a_series_may_differ_in_their_workers(tiny_folder: Path) -> None:
    with share_teams():
        for workers in (1, 2):
            prepared = prepare(config(tiny_folder, workers=workers))
            with open_team(get_resources(prepared.config)) as team:
                connected = connect_workers(prepared, team).federation
                assert connected.run_round(connected.begin()).failures == ()
