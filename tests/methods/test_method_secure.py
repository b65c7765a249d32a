"""Every method whose replies sum, under secure aggregation: the plain round's mean, within the integers' bound."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.watched_rounds import method_config

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from fedspan.assembly.run import Prepared
from fedspan.config import parse_config
from fedspan.core.tensors import Tensors
from fedspan.errors import FedspanError
from fedspan.federation.config import SecureSettings
from fedspan.methods.registry import METHODS
from helpers import refusals, secure_rounds, tiny
from helpers.families import others_slow

SUMS = sorted(key for key, cls in METHODS.items() if cls.claims.reduction == "sum" and cls.claims.sends != "nothing")
STACKS = sorted(key for key, cls in METHODS.items() if cls.claims.reduction == "stack")
EPOCH: Mapping[str, Any] = {"local_steps": None, "batch_size": 12}  # one step to four, by a client's number of texts
SGD: Mapping[str, Any] = {**EPOCH, "optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}
WRAPPED: Mapping[str, tuple[dict[str, Any], Mapping[str, Any]]] = {
    **{key: ({"name": key}, EPOCH) for key in SUMS},
    "florg, Gram sums": ({"name": "florg", "gram_sums": True}, EPOCH),
    "fedadam": ({"name": "fedit", "wrappers": ["fedadam"]}, EPOCH),
    "fedprox": ({"name": "rolora", "wrappers": ["fedprox"]}, EPOCH),
    "fedpaq": ({"name": "fedit", "wrappers": ["fedpaq"]}, EPOCH),
    "low-precision, sketches": ({"name": "fedask", "wrappers": ["low-precision"]}, EPOCH),
    "low-precision, slots": ({"name": "lora-a2", "wrappers": [{"name": "low-precision", "uplink": "int8"}]}, EPOCH),
    "scaffold II": ({"name": "fedit", "wrappers": ["scaffold"]}, SGD),
    "scaffold I": ({"name": "rolora", "wrappers": [{"name": "scaffold", "variate": "option-I"}]},
                   {**SGD, "max_grad_norm": 0}),
}  # fmt: skip
QUICK = ("rolora", "fedsa-lora", "florg, Gram sums", "scaffold II")
"""Alternating and personal factors, sums of matrices, and variates."""
by_family = pytest.mark.parametrize("kind", others_slow(WRAPPED, QUICK))


def secure_and_plain(
    kind: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path, **changes: Any
) -> tuple[Prepared, secure_rounds.Federation, secure_rounds.Stage]:
    method, training = WRAPPED[kind]
    name = method["name"]
    rest = {key: value for key, value in method.items() if key != "name"}
    limits = {"clip_ratio": None, "max_weight_ratio": None}  # secure sums have a clip of their own
    federation = {"clients_per_round": 3, "rounds": 3, **limits, **changes.pop("federation", {})}
    config = method_config(tiny_folder, name, method=rest, training=training, federation=federation)
    here = tiny.variant(prepared, config, watch=lambda one: secure_rounds.Noted(inner=one))
    # In 64 bits with a wide clip: that of a method's first change from nothing may be long.
    settings = SecureSettings(clip=1e4, bits=64)
    there, stage = secure_rounds.secured(here, tmp_path, settings=settings, **changes)
    return here, there, stage


def split_exchanges(means: Tensors) -> tuple[Tensors, Tensors]:
    """The means of a round's first exchange, and of FedASK's second one."""
    second = {name: value for name, value in means.items() if name.endswith("/P")}
    return {name: value for name, value in means.items() if name not in second}, second


def require_close(hidden: Tensors, shown: Tensors, limit: float) -> None:
    """Check that means agree: to a bound in the first exchange; the second depends on an SVD of the first mean."""
    (first, second), (first_shown, second_shown) = split_exchanges(hidden), split_exchanges(shown)
    secure_rounds.require_close(first, first_shown, limit)
    assert second.keys() == second_shown.keys()
    for name, value in second.items():
        assert float((value - second_shown[name]).norm()) <= 1e-4 * float(second_shown[name].norm())


@by_family
def test_a_secure_round_is_the_plain_one(kind: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path) -> None:
    """Round after round from the same progress, cohorts of three of four: what clients hold and keep differs."""
    here, there, _ = secure_and_plain(kind, prepared, tiny_folder, tmp_path)
    notes = here.federation.method
    progress = here.federation.begin()
    for _ in range(here.federation.settings.rounds):
        result = there.run_round(replace(progress, states={}))
        hidden = notes.reduced[-1]
        plain = here.federation.run_round(progress)
        assert not result.failures
        assert result.cohort == plain.cohort
        assert result.progress.last_rounds == plain.progress.last_rounds
        assert result.loss == pytest.approx(plain.loss, rel=1e-9)
        open_mean = notes.reduced[-1]
        assert hidden.count == open_mean.count
        assert not open_mean.stack
        require_close(hidden.mean, open_mean.mean, secure_rounds.bound(there, result.cohort, result.cohort))
        elements = [sum(value.numel() for value in part.values()) for part in split_exchanges(hidden.mean)]
        payloads = {one.payload for one in result.transfers if one.direction == "up"}
        assert payloads == {0, *(8 * count for count in elements)}
        progress = plain.progress


@by_family
@pytest.mark.parametrize("phase", others_slow(["train", "unmask"], ["unmask"]))
def test_a_round_without_one_client_is_that_of_the_others(
    kind: str, phase: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    all = tuple(sorted(tiny.SITES))
    lose = secure_rounds.gone_at(phase, "south")
    federation = {"clients_per_round": None, "rounds": 1}
    here, there, _ = secure_and_plain(kind, prepared, tiny_folder, tmp_path, federation=federation, lose=lose)
    notes = here.federation.method
    begin = there.begin()
    result = there.run_round(begin)
    hidden = notes.reduced[-1]
    left = all if phase == "unmask" else tuple(id for id in all if id != "south")
    plain = secure_rounds.among(here.federation, *left).run_round(begin)
    secure_rounds.require_same_round(result, plain)
    require_close(hidden.mean, notes.reduced[-1].mean, secure_rounds.bound(there, all, left))


@pytest.mark.parametrize("key", STACKS)
def test_methods_that_see_single_replies_are_refused_with_the_reason(key: str) -> None:
    with refusals.refused("federation.secure") as refused:
        parse_config({"data": {"train": "x.csv"}, "method": {"name": key}, "federation": {"secure": {}}})
    assert (refused.value.field, refused.value.value) == ("federation.secure", SecureSettings())


def test_what_has_no_secure_sum_is_refused_with_the_reason() -> None:
    def given(**changes: Any) -> dict[str, Any]:
        return {"data": {"train": "x.csv"}, "federation": {"secure": {}}, **changes}

    single = "federa needs single replies, because it does not compute their mean"
    for values, why in (
        (given(method={"name": "local-only"}), "sends nothing"),
        (given(federation={"secure": {}, "reduction": "median"}), "compares single replies"),
        (given(method={"name": "federa", "aggregation": "product_svd"}), single),
    ):
        with pytest.raises(FedspanError, match=why):
            parse_config(values)
    for name in SUMS:
        parse_config(given(method={"name": name}))
    parse_config(given(method={"name": "florg", "gram_sums": True}))
