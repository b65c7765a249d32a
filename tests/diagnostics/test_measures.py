"""Diagnoses of runs and numbers of a layer's updates: what they measure, how they read, that they change nothing."""

import json
import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedspan
from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.core.base import Delta
from fedspan.core.lowrank import LowRank
from fedspan.diagnostics.measures import MEASURES, get_values, summarize_measures
from fedspan.diagnostics.round_diagnosis import STEPS, Barrier, Diagnosis
from fedspan.diagnostics.updates import (
    combine_deltas,
    compare_updates,
    compute_form_inner_product,
    compute_principal_angles,
    compute_singular_values,
    measure_moment_mismatch,
    measure_shape,
)
from fedspan.reproduction.reproduce import measure
from fedspan.runs import start
from fedspan.runs.diagnose import diagnose
from helpers import tiny
from helpers.command_line import get_program
from helpers.families import methods_by_family
from helpers.listeners import Notes
from helpers.refusals import refused


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosis") / "run"
    fedspan.run(tiny.config(tiny_folder, federation={"rounds": 2}, training={"schedule": "linear"}), folder)
    return folder


def test_of_a_run_that_is_over_one_more_round_is_diagnosed_and_its_folder_stays(run: Path) -> None:
    def files() -> dict[str, tuple[int, bytes]]:
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}

    before = files()
    found = fedspan.diagnose(run, pairs=1, examples=5)
    assert files() == before
    assert found.round == 3  # at no learning rate of 0: there would be nothing to see
    rows = {row.measure.key: row for row in summarize_measures(found)}
    assert set(rows) == {measure.key for measure in MEASURES}
    assert rows["aggregation_error"].maximum > 1e-3
    for row in rows.values():
        assert row.minimum <= row.mean <= row.maximum
        if row.worst is not None:
            value = row.measure.value(found.layers[row.worst])
            assert value == (row.maximum if row.measure.worst == "high" else row.minimum)
    assert fedspan.diagnose(run, 1, pairs=0).round == 2


@pytest.mark.parametrize("key", methods_by_family(["rolora", "fedloru", "pfedlora"], ["rolora"]))
def test_rounds_that_are_diagnosed_during_a_run(key: str, tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, method={"name": key}, federation={"rounds": 4})
    notes = Notes()
    plain = fedspan.run(values, tmp_path / "plain")
    looked = fedspan.run(
        values, tmp_path / "looked", overrides=["evaluation.diagnostics=2", "engine.name=loop"], listener=notes
    )
    rows = [json.loads(line) for line in (tmp_path / "looked" / "metrics.jsonl").read_text().splitlines()]
    assert ["diagnostics" in row for row in rows] == [False, True, False, True]
    found = fedspan.diagnose(tmp_path / "looked", 3, pairs=0)  # its checkpoint is kept, whichever round was the best
    assert rows[3]["diagnostics"]["layers"] == {name: get_values(layer) for name, layer in found.layers.items()}
    assert rows[3]["diagnostics"]["layers"] != rows[1]["diagnostics"]["layers"]
    assert rows[3]["diagnostics"]["seconds"] > 0
    assert rows[3]["diagnostics"]["alignment"] == pytest.approx(found.alignment, nan_ok=True)
    if not math.isnan(found.alignment):
        assert measure(tmp_path / "looked", ["alignment"])["alignment"] == rows[3]["diagnostics"]["alignment"]
        later = fedspan.diagnose(tmp_path / "plain", pairs=0)  # nothing was inspected: one more round
        assert measure(tmp_path / "plain", ["alignment"])["alignment"] == later.alignment
    assert [note for note in notes.notes if note.startswith("evaluation.diagnostics took ")]
    assert looked.bytes == plain.bytes
    assert (tmp_path / "plain" / "partition.json").read_bytes() == (tmp_path / "looked" / "partition.json").read_bytes()


def test_a_diagnosis_changes_no_bit_of_the_run(run: Path, tmp_path: Path) -> None:
    fedspan.run(run / "config.yaml", tmp_path / "looked", overrides=["evaluation.diagnostics=1"])
    files = [path / "adapter" / "adapter_model.safetensors" for path in (run, tmp_path / "looked")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_where_nobody_may_look(tiny_folder: Path, tmp_path: Path) -> None:
    private = {"mechanism": "central", "noise": 1.0}
    values = tiny.settings(tiny_folder, evaluation={"diagnostics": 1})
    with refused("evaluation.diagnostics"):
        parse_config(values | {"privacy": private, "federation": {"weights": "uniform", "clients_per_round": 2}})
    with refused("evaluation.diagnostics"):
        start.run(parse_config(values), tmp_path / "run", host=lambda place, prepared, run: run(prepared))
    assert not (tmp_path / "run").exists()


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(get_program(), ["diagnose", *arguments])


def test_as_people_read_it_and_as_json(run: Path) -> None:
    result = invoked(str(run), "--pairs", "1", "--examples", "5")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for text in ("fedit, round 3: ", "client drift", "RoLoRA, arXiv:2502.01755", "barrier", "in addition to the round"):
        assert text in shown
    result = invoked(str(run), "--pairs", "0", "--json")
    content = json.loads(result.stdout)
    assert content["barriers"] == []
    assert {len(layer) for layer in content["layers"].values()} == {len(MEASURES)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--round", "7"], "`round`: 7 is not accepted. Expected best, last, or a round with a checkpoint: 1, 2"),
        (["--round", "first"], "`--round`: 'first' is not accepted. Expected best, last, or a number"),
    ],
)
def test_mistakes(run: Path, arguments: list[str], said: str) -> None:
    result = invoked(str(run), *arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_no_run_and_a_deployments_run(run: Path, tmp_path: Path) -> None:
    with refused("run folder", r"the folder of a run"):
        fedspan.diagnose(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    with refused("run folder", "the data of this run's clients are on other machines"):
        fedspan.diagnose(copy)


def test_the_page_of_the_docs_is_that_of_the_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(docs)
    from generate_diagnostics import page

    assert (docs / "diagnostics.md").read_text(encoding="utf-8") == page(), "python docs/generate_diagnostics.py"


@pytest.mark.parametrize(
    ("arguments", "field", "least"),
    [
        ({"pairs": -1}, "pairs", 0),
        ({"pairs": True}, "pairs", 0),
        ({"pairs": 1.5}, "pairs", 0),
        ({"examples": 0}, "examples", 1),
        ({"examples": "5"}, "examples", 1),
    ],
)
def test_numbers_are_whole_and_not_negative(arguments: dict[str, Any], field: str, least: int, tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match=f"a whole number from {least}") as caught:
        diagnose(tmp_path, **arguments)
    assert (caught.value.field, caught.value.value) == (field, arguments[field])


LOSSES = tuple(1.0 + 0.5 * (0 < position < 1) for position in STEPS)
FOUND = Diagnosis("fedit", 3, ("east", "west"), {}, math.nan, (Barrier(("east", "west"), LOSSES),), 7, 1.25)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command asks for."""
    calls: list[tuple[Any, ...]] = []

    def diagnose(run: Path, round: Any, *, pairs: int, examples: int) -> Diagnosis:
        calls.append((run, round, pairs, examples))
        return FOUND

    monkeypatch.setattr(fedspan, "diagnose", diagnose)
    return calls


def test_options_are_passed_on(call: Callable[..., Any], asked: list[tuple[Any, ...]]) -> None:
    assert call("diagnose", "runs/first").exit_code == 0
    assert call("diagnose", "runs/first", "--round", "best", "--pairs", 6, "--examples", 9).exit_code == 0
    assert call("diagnose", "runs/first", "--round", "12").exit_code == 0
    run = Path("runs/first")
    assert asked == [(run, "last", 3, 500), (run, "best", 6, 9), (run, 12, 3, 500)]


def test_as_people_read_it(call: Callable[..., Any], asked: list[tuple[Any, ...]]) -> None:
    shown = " ".join(call("diagnose", "runs/first").output.split())
    assert "fedit, round 3: 2 clients, 0 target layers" in shown
    assert "east - west 1.0000 1.5000 1.0000 0.5000" in shown
    assert "The diagnostics took 1.2 s, in addition to the round." in shown


def test_as_json(call: Callable[..., Any], asked: list[tuple[Any, ...]]) -> None:
    content = json.loads(call("diagnose", "runs/first", "--json").stdout)
    assert content["barriers"] == [
        {"clients": ["east", "west"], "at": list(STEPS), "losses": list(LOSSES), "height": 0.5}
    ]
    assert (content["method"], content["round"], content["clients"]) == ("fedit", 3, ["east", "west"])
    assert (content["layers"], content["examples"], content["seconds"]) == ({}, 7, 1.25)


O, I = 7, 5  # noqa: E741


def draw(rng: torch.Generator, rank: int, dense: bool) -> Delta:
    pair = LowRank(torch.randn(O, rank, generator=rng), torch.randn(rank, I, generator=rng), 0.5)
    return pair.to_dense() if dense else pair


def matrix(delta: Delta) -> Tensor:
    return delta.to(torch.float64).to_dense() if isinstance(delta, LowRank) else delta.double()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**20), st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4))
def test_numbers_of_factors_are_those_of_dense_matrices(seed: int, kinds: list[tuple[int, bool]]) -> None:
    rng = torch.Generator().manual_seed(seed)
    updates = {f"c{number}": draw(rng, *kind) for number, kind in enumerate(kinds)}
    weights = {id: float(number + 1) for number, id in enumerate(updates)}
    whole = draw(rng, 3, seed % 2 == 0)
    found = compare_updates(updates, weights, whole)

    total = sum(weights.values())
    D = {id: matrix(one) for id, one in updates.items()}
    G, mean = matrix(whole), sum((weights[id] / total * one for id, one in D.items()), torch.zeros(O, I).double())

    def cos(left: Tensor, right: Tensor) -> float:
        return float((left * right).sum() / left.norm() / right.norm())

    spread = sum(weights[id] / total * float((one - mean).norm()) ** 2 for id, one in D.items())
    assert found.aggregation_error == pytest.approx(float((G - mean).norm() / mean.norm()), rel=1e-6)
    assert found.drift == pytest.approx(math.sqrt(spread) / float(mean.norm()), rel=1e-6, abs=1e-6)
    assert found.alignment == pytest.approx(sum(cos(one, G) for one in D.values()) / len(D), abs=1e-9)
    pairs = list(combinations(D.values(), 2))
    if pairs:
        assert found.agreement == pytest.approx(sum(cos(*pair) for pair in pairs) / len(pairs), abs=1e-6)
    else:
        assert math.isnan(found.agreement)
        assert math.isnan(found.angle_out)


def test_without_a_global_model_the_mean_is_what_updates_are_aligned_with() -> None:
    rng = torch.Generator().manual_seed(0)
    updates = {id: draw(rng, 2, False) for id in "ab"}
    found = compare_updates(updates, {"a": 1, "b": 3}, None)
    mean = combine_deltas([(0.25, updates["a"]), (0.75, updates["b"])], (O, I))
    with_mean = compare_updates(updates, {"a": 1, "b": 3}, mean)
    assert math.isnan(found.aggregation_error)
    assert with_mean.aggregation_error < 1e-12
    assert found.alignment == pytest.approx(with_mean.alignment)


def test_nearly_nothing_is_not_lost_in_rounding() -> None:
    rng = torch.Generator().manual_seed(0)
    updates = {id: draw(rng, 2, False) for id in "ab"}
    mean = combine_deltas([(0.5, updates["a"]), (0.5, updates["b"])], (O, I))
    off = LowRank(torch.full((O, 1), 1e-9), torch.ones(1, I))
    found = compare_updates(updates, {"a": 1, "b": 1}, combine_deltas([(1.0, mean), (1.0, off)], (O, I)))
    assert found.aggregation_error == pytest.approx(1e-9 * math.sqrt(O * I) / float(matrix(mean).norm()), rel=1e-3)


def test_angles_between_known_subspaces() -> None:
    eye, turned = torch.eye(4).double(), torch.tensor([[1.0, 0], [0, 0.5], [0, math.sqrt(0.75)], [0, 0]]).double()
    assert torch.allclose(compute_principal_angles(eye[:, :2], turned), torch.tensor([0.0, 60.0]).double(), atol=1e-5)
    assert torch.allclose(compute_principal_angles(eye[:, :1], eye[:, 2:]), torch.tensor([90.0]).double())
    frozen = torch.randn(2, I, generator=torch.Generator().manual_seed(1))
    rng = torch.Generator().manual_seed(2)
    updates = {id: LowRank(torch.randn(O, 2, generator=rng), frozen) for id in "abc"}
    found = compare_updates(updates, dict.fromkeys("abc", 1.0), None)
    assert found.angle_in < 1e-3
    assert found.angle_out > 20


def test_ranks_of_known_spectra() -> None:
    diagonal = torch.zeros(O, I)
    diagonal[:3, :3] = torch.diag(torch.tensor([2.0, 2.0, 2.0]))
    assert measure_shape(diagonal).stable_rank == pytest.approx(3)
    assert measure_shape(diagonal).effective_rank == pytest.approx(3)
    assert measure_shape(diagonal).norm == pytest.approx(math.sqrt(12))
    pair = LowRank(torch.randn(O, 2), torch.randn(2, I), 3.0)
    wanted = torch.linalg.svdvals(matrix(pair))[:2]
    assert torch.allclose(compute_singular_values(pair), wanted, rtol=1e-5)
    zero = measure_shape(torch.zeros(O, I))
    assert zero.norm == 0
    assert math.isnan(zero.stable_rank)


def test_products_of_every_kind_of_two_and_moments_apart() -> None:
    rng = torch.Generator().manual_seed(3)
    kinds = [draw(rng, 2, dense) for dense in (False, True)]
    for left in kinds:
        for right in kinds:
            wanted = float((matrix(left) * matrix(right)).sum())
            assert compute_form_inner_product(left, right) == pytest.approx(wanted, rel=1e-5)
    one = torch.tensor([1.0, 1.0])
    assert measure_moment_mismatch({"a": one, "b": one}, {"a": 1, "b": 5}) == 0
    assert measure_moment_mismatch({"a": one, "b": 3 * one}, {"a": 1, "b": 1}) == pytest.approx(0.5)
    assert measure_moment_mismatch({"a": one, "b": 3 * one}, {"a": 3, "b": 1}) == pytest.approx(math.sqrt(0.75) / 1.5)


def test_of_nobody_and_how_high_a_barrier_is() -> None:
    with pytest.raises(ValueError, match="no client"):
        compare_updates({}, {}, None)
    assert Barrier(("a", "b"), (1.0, 1.5, 2.5, 2.0, 3.0)).height == pytest.approx(0.5)
    assert Barrier(("a", "b"), (1.0, 1.1, 1.2, 1.3, 3.0)).height == 0
