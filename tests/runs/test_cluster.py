"""Runs on a Ray cluster: what each worker takes, and the host of a simulation's clients."""

from __future__ import annotations

from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.runs.cluster import build_simulated_host, get_resources
from fedspan.runs.setup import Prepared
from fedspan.transports.in_process import InProcess


def test_workers_take_what_the_config_says() -> None:
    team = pytest.importorskip("fedspan.transports.ray.team", reason="the extra fedspan[cluster] is not installed")
    cluster: dict[str, Any] = {"address": "head:6379", "workers": 3, "threads_per_worker": 2, "gpus_per_worker": 0.5}
    values = {"data": {"train": "train.csv"}, "engine": {"name": "loop"}, "cluster": {**cluster, "start_timeout": 9.0}}
    assert get_resources(parse_config(values)) == team.Resources("head:6379", 3, 2, 0.5, 9.0)


def test_the_host_of_a_simulation_has_all_of_its_clients(prepared: Prepared) -> None:
    transport = prepared.federation.transport
    assert isinstance(transport, InProcess)
    host = build_simulated_host(prepared.federation)
    assert host is transport.host
    assert list(host.clients) == list(prepared.federation.clients)
