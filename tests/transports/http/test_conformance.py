"""Nodes of a server with TLS and keys repeat every method and wrapper of the registry to the bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import fedspan
from fedspan.deployment.deploy import submit
from fedspan.methods.registry import METHODS
from fedspan.transports.http.server import read_link
from helpers.conformance import (
    UNLIKE_CASES,
    describe_case,
    get_method,
    list_cases,
    require_same_model,
    require_same_state,
    require_same_tensors,
)
from helpers.families import others_slow
from helpers.forked_nodes import fork_nodes
from helpers.sites import local_values, run_values, site_files
from helpers.stage import Deployment

SITES = ("north", "south")


@pytest.fixture(scope="module")
def federation(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Path]]:
    """A server and its nodes, which carry out one run after another, and the data of all nodes together."""
    folder = tmp_path_factory.mktemp("federation")
    files = site_files(tiny_folder / "corpus.csv", folder, SITES)
    with Deployment(folder / "deployment") as made:
        nodes = [made.node_file(site, files[site]) for site in SITES]
        with fork_nodes(nodes, made.folder / "nodes.log"):
            yield made, files["all"]


@pytest.mark.parametrize("case", others_slow(list_cases(), UNLIKE_CASES))
def test_every_method_and_wrapper_has_the_bits_of_the_loop_engine(
    case: str, federation: tuple[Deployment, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    made, data = federation
    values = {**run_values(tiny_folder, **describe_case(case), sites=SITES), "engine": {"name": "loop"}}
    here, there = tmp_path / "here", tmp_path / "there"
    fedspan.run(local_values(values, data, values["engine"]), here, progress=False)
    submit(values, there, read_link(made.server), wait=120.0)
    if not METHODS[get_method(case)].claims.personal:
        require_same_model(here, there)
        return
    require_same_state(here, there)
    for site in SITES:  # every client's own adapter, which stays on its node
        own = (made.folder / f"{site}-state").glob("*/adapter")
        require_same_tensors(here / "adapter" / site, max(own, key=lambda path: path.stat().st_mtime_ns))
