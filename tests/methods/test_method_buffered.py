"""Every method in asynchronous rounds: it is refused with the reason, or its rounds are what synchronous ones sum."""

from pathlib import Path
from typing import Any

import pytest

from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from helpers.families import FAMILIES, methods_by_family
from helpers.watched_rounds import differences, method_config

STACKS = "its server needs the single replies of a round"
OTHER = "its clients also send something other than new values"
REINITIALIZED = "its factors are re-initialized in every round"
LATER = "it re-initializes its factors after round 2"
ALTERNATES = "a client trains something else in round 2 than in round 1"
REASONS: dict[str, str | None] = {
    "fed-sb": OTHER,
    "fedask": "its rounds have a second exchange",
    "fedavg": None,
    "federa": None,
    "fedex-lora": STACKS,
    "fedgalore": STACKS,
    "fedhm": STACKS,
    "fedit": None,
    "fedloru": LATER,
    "fedmomentum": STACKS,
    "fedrot-lora": ALTERNATES,
    "fedsa-lora": None,
    "fedsvd": REINITIALIZED,
    "ffa-lora": None,
    "flexlora": STACKS,
    "flora": STACKS,
    "florist": STACKS,
    "florg": STACKS,
    "fr-lora": REINITIALIZED,
    "hetlora": STACKS,
    "la-lora": None,
    "local-only": "its clients send nothing",
    "lora-a2": OTHER,
    "lora-fair": STACKS,
    "mfedloru": STACKS,
    "pfedlora": None,
    "pfedloru": LATER,
    "ravan": None,
    "rolora": ALTERNATES,
    "slora": LATER,
}
"""Reasons of refusals, None for methods that run."""
WRAPPERS: dict[str, str | None] = {
    "fedadagrad": None,
    "fedadam": None,
    "fedavgm": None,
    "fedpaq": None,
    "fedprox": None,
    "fedyogi": None,
    "low-precision": None,
    "scaffold": OTHER,
}
OPTIONS = {"scaffold": {"variate": "gradient"}}


def federation_of(clients: int) -> dict[str, Any]:
    return {"clients_per_round": clients, "rounds": 4, "buffered": {"concurrency": 4}}


@pytest.mark.parametrize(
    "key",
    methods_by_family(quick=[key for key in FAMILIES if key not in ("fedit", "pfedlora")]),  # these take seconds
)
def test_a_method_is_refused_with_the_reason_or_runs(key: str, tiny_folder: Path) -> None:
    """If all clients reply in every round, their rounds are synchronous; otherwise replies are of several rounds."""
    simulation = {"speed": {"distribution": "uniform", "median": 10, "spread": 3}}
    settings = federation_of(4)
    try:
        method_config(tiny_folder, key, federation=settings, simulation=simulation)
    except FedspanError as error:
        refused: FedspanError | None = error
    else:
        refused = None
    expected_reason = REASONS[key]
    if refused is not None:
        assert refused.field == "federation.buffered"
        assert expected_reason in str(refused)
        return
    assert expected_reason is None
    run, waiting, partial = (
        prepare(method_config(tiny_folder, key, federation=federation, simulation=simulation)).federation
        for federation in (settings, {**settings, "buffered": None}, federation_of(2))
    )
    progress, expected, mixed, stale = run.begin(), waiting.begin(), partial.begin(), 0
    for _ in range(4):
        progress, expected = run.run_round(progress).progress, waiting.run_round(expected).progress
        for part in ("state", "states", "last_rounds"):
            assert differences(getattr(progress, part), getattr(expected, part)) == []
        result = partial.run_round(mixed)
        assert not result.failures
        stale += sum(age > 0 for _, age in result.arrivals or ())
        mixed = result.progress
    assert stale
    assert all(bool(value.isfinite().all()) for value in mixed.state.tensors.values())


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_wrappers_are_refused_with_the_reason_or_fit(wrapper: str) -> None:
    values = {
        "data": {"train": "x.csv"},
        "method": {"name": "fedit", "wrappers": [{"name": wrapper, **OPTIONS.get(wrapper, {})}]},
        "training": {"max_grad_norm": 0.0},
        "federation": federation_of(2),
        "simulation": {"speed": {}},
    }
    if (reason := WRAPPERS[wrapper]) is None:
        parse_config(values)
        return
    with pytest.raises(FedspanError, match=reason):
        parse_config(values)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"federation": {"buffered": {"concurrency": 3}}}, "federation.buffered", "needs federation.clients_per_round"),
        ({"privacy": {"mechanism": "central", "noise": 1}}, "privacy", "count the clients of synchronous rounds"),
        ({"cluster": {"workers": 2}}, "cluster", "cannot be combined with federation.buffered"),
        (
            {"simulation": {"speed": {}, "present": {"client-00": (2, None)}}},
            "simulation.present",
            "cannot be combined with federation.buffered",
        ),
        ({"evaluation": {"diagnostics": 2}}, "evaluation.diagnostics", "updates that start from one state"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    values = {"data": {"train": "x.csv"}, "federation": federation_of(2), "simulation": {"speed": {}}, **changes}
    if values["federation"].get("clients_per_round") and "privacy" in changes:
        values["federation"] = {**values["federation"], "weights": "uniform"}
    with pytest.raises(FedspanError, match=problem) as refused:
        parse_config(values)
    assert refused.value.field == field
