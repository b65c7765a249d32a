"""Every method and wrapper, also one registered later, on every transport; nodes with TLS and keys to the bit."""

import ast
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fedspan
from fedspan.deployment.console import log_to_console
from fedspan.deployment.deploy import join, submit
from fedspan.methods import registry as methods
from fedspan.methods.registry import METHODS
from fedspan.transports.http.server import read_link
from fedspan.wrappers import registry as wrappers
from helpers import conformance
from helpers.conformance import UNLIKE_CASES, list_cases
from helpers.families import others_slow
from helpers.sites import local_values, run_values, site_files
from helpers.stage import Deployment


@contextmanager
def fork_nodes(files: Sequence[Path], log: Path) -> Generator[None]:
    """Run what ``fedspan join`` calls for each node's file, in processes that end with this context.

    The process in which a node trains is forked, too, and not spawned.
    """
    group = multiprocessing.get_context("fork").Process(target=_run_group, args=[files, log, os.getpid()])
    group.start()
    try:
        yield
    finally:
        if group.pid is not None and group.is_alive():
            os.killpg(group.pid, signal.SIGKILL)
        group.join()


def _run_group(files: Sequence[Path], log: Path, tests: int) -> None:
    """Be the leader of the nodes' process group, which ends them if the tests are killed."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork
    for path in files:
        fork.Process(target=_run_node, args=[path]).start()
    while os.getppid() == tests:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _run_node(path: Path) -> None:
    log_to_console()
    join(path)


HERE = Path(__file__).parent


@pytest.mark.parametrize("file", ["ray/test_worker.py", Path(__file__).name])
def test_a_transport_runs_all_cases_and_its_quick_ones_in_every_run_of_the_tests(file: str) -> None:
    """Workers of a cluster and a deployment are compared with runs in process."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    decorator = "pytest.mark.parametrize('case', others_slow(list_cases(), UNLIKE_CASES))"
    assert [one.name for one in functions if decorator in map(ast.unparse, one.decorator_list)]
    marks = {ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)}
    assert not any(line.startswith("pytestmark") for line in marks)  # else all cases would be slow


def test_a_method_or_wrapper_is_a_case_as_soon_as_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods._methods, "newest", methods.METHODS["fedit"])
    monkeypatch.setattr(conformance, "WRAPPERS", {**wrappers.WRAPPERS, "newest": wrappers.WRAPPERS["fedprox"]})
    cases = conformance.list_cases()
    assert len(cases) == len(set(cases)) == len(methods.METHODS) + len(wrappers.WRAPPERS) + 1
    assert {"newest", "fedit+newest", *methods.METHODS} <= {*cases}
    quick = conformance.UNLIKE_CASES
    assert {*quick} < {*cases}
    assert {str(one.values[0]) for one in others_slow(cases, quick) if one.marks} == {*cases} - {*quick}


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
    values = {**run_values(tiny_folder, **conformance.describe_case(case), sites=SITES), "engine": {"name": "loop"}}
    here, there = tmp_path / "here", tmp_path / "there"
    fedspan.run(local_values(values, data, values["engine"]), here, progress=False)
    submit(values, there, read_link(made.server), wait=120.0)
    if not METHODS[conformance.get_method(case)].claims.personal:
        conformance.require_same_model(here, there)
        return
    conformance.require_same_state(here, there)
    for site in SITES:  # every client's own adapter, which stays on its node
        own = (made.folder / f"{site}-state").glob("*/adapter")
        conformance.require_same_tensors(here / "adapter" / site, max(own, key=lambda path: path.stat().st_mtime_ns))
