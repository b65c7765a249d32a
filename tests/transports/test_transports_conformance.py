"""Conformance on every transport covers the whole registry, also what is registered later."""

import ast
from pathlib import Path

import pytest

from fedspan.methods import registry as methods
from fedspan.wrappers import registry as wrappers
from helpers import conformance
from helpers.families import others_slow

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", ["ray/test_worker.py", "http/test_conformance.py"])
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
