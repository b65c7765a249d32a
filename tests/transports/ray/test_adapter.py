"""Only processes with the token reach a local Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")

import ray

from fedspan.runs.cluster import get_resources
from fedspan.transports.ray.team import open_team
from helpers.cluster_configs import config

pytestmark = pytest.mark.slow


def test_a_process_without_the_token_is_not_let_in(tiny_folder: Path) -> None:
    code = "import sys, ray; ray.init(address=sys.argv[1], logging_level='error')"
    with open_team(get_resources(config(tiny_folder))):
        address = ray.get_runtime_context().gcs_address
        stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        for variables, admitted in ((stranger, False), (dict(os.environ), True)):
            command = [sys.executable, "-c", code, address]
            found = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
            assert (found.returncode == 0) == admitted, found.stderr
    assert "RAY_AUTH_TOKEN" not in os.environ
