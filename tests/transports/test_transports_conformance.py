"""Conformance on every transport covers the whole registry, also what is registered later."""

import ast
from pathlib import Path

import pytest

from fedspan.methods import registry as methods
from fedspan.wrappers import registry as wrappers
from helpers import conformance
from helpers.families import others_slow

HERE = Path(__file__).parent
TABLES = {
    "ray/test_worker.py": "UNLIKE_CASES",
    "flower/test_simulation.py": "SIMULATED",
    "flower/test_supernode_methods.py": "DEPLOYED",
}
"""Workers of a cluster, Flower's simulation and a deployment, which are compared with runs in process, and the names of
their quick cases."""


@pytest.mark.parametrize(("file", "quick"), TABLES.items())
def test_a_transport_runs_all_cases_and_its_quick_ones_in_every_run_of_the_tests(file: str, quick: str) -> None:
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    decorator = f"pytest.mark.parametrize('case', others_slow(list_cases(), {quick}))"
    assert [one.name for one in functions if decorator in map(ast.unparse, one.decorator_list)]
    marks = {ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)}
    assert not any(line.startswith("pytestmark") for line in marks)  # else all cases would be slow


def test_a_method_or_wrapper_is_a_case_as_soon_as_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods._methods, "newest", methods.METHODS["fedit"])
    monkeypatch.setattr(conformance, "WRAPPERS", {**wrappers.WRAPPERS, "newest": wrappers.WRAPPERS["fedprox"]})
    cases = conformance.list_cases()
    assert len(cases) == len(set(cases)) == len(methods.METHODS) + len(wrappers.WRAPPERS) + 1
    assert {"newest", "fedit+newest", *methods.METHODS} <= {*cases}
    assert {*conformance.SIMULATED, *conformance.DEPLOYED} == {*conformance.UNLIKE_CASES}
    for quick in (conformance.UNLIKE_CASES, conformance.SIMULATED, conformance.DEPLOYED):
        assert {*quick} < {*cases}
        assert {str(one.values[0]) for one in others_slow(cases, quick) if one.marks} == {*cases} - {*quick}
