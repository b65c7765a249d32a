"""Central privacy of sums that come under masks: clients clip, the server adds the noise that it would add anyway."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

from fedspan.config import parse_config
from fedspan.core.tensors import compute_norm as norm_of
from fedspan.core.values import Reduced
from fedspan.errors import FedspanError
from fedspan.federation.settings import SecureSettings
from fedspan.runs.setup import Prepared
from helpers import secure_rounds, tiny

CLIP = 0.05


def run_of(prepared: Prepared, folder: Path, noise: float) -> tuple[Prepared, list[Reduced]]:
    config = tiny.config(
        folder,
        privacy={"mechanism": "central", "noise": noise, "clip": CLIP},
        federation={"clients_per_round": None, "weights": "uniform", "rounds": 2},
    )
    run = tiny.variant(prepared, config, watch=lambda one: secure_rounds.Noted(inner=one))
    known = run.federation.clients.items()  # made with the weights of another config
    tiny.use_clients(run.federation, {id: replace(one, client=replace(one.client, weight=1.0)) for id, one in known})
    method = run.federation.method
    assert isinstance(method, secure_rounds.Noted)
    return run, method.reduced


@pytest.mark.parametrize("noise", [1e-9, 2.0])
def test_the_mean_is_that_of_replies_in_plaintext(
    noise: float, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    run, seen = run_of(prepared, tiny_folder, noise)
    there, _ = secure_rounds.secured(run, tmp_path, settings=SecureSettings(clip=1e4, bits=64))
    progress = run.federation.begin()
    hidden, plain = there.run_round(progress), run.federation.run_round(progress)
    assert hidden.charges == plain.charges
    assert not hidden.failures
    for name, value in seen[1].mean.items():
        assert float((seen[0].mean[name] - value).abs().max()) < 1e-6, name


def test_a_client_that_is_gone_adds_nothing_and_the_number_below_stays(
    prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    run, seen = run_of(prepared, tiny_folder, 1e-9)
    begun = run.federation.begin()
    start = run.federation.method.start(
        run.federation.method.sync(begun.state, None), None, {}, begun.state.round
    ).tensors
    whole, _ = secure_rounds.secured(run, tmp_path / "whole", settings=SecureSettings(bits=64))
    lost = secure_rounds.gone_at("train", "west")
    less, _ = secure_rounds.secured(run, tmp_path / "less", settings=SecureSettings(bits=64), lose=lost)
    whole.run_round(begun)
    result = less.run_round(begun)
    assert [failure.client for failure in result.failures] == ["west"]
    apart = {name: (seen[0].mean[name] - value).double() for name, value in seen[1].mean.items()}
    assert [one.count for one in seen] == [4, 4]  # the number of replies is not protected
    assert norm_of(apart) == pytest.approx(CLIP / 4, rel=1e-3)  # its own clipped change, of four clients'
    moved = {name: (value - start[name]).double() for name, value in seen[1].mean.items()}
    assert norm_of(moved) <= CLIP * 3 / 4 * (1 + 1e-5)


def test_a_cohort_that_may_be_too_small_to_hide_in_is_refused(tiny_folder: Path) -> None:
    given = tiny.settings(
        tiny_folder,
        privacy={"mechanism": "central", "noise": 1.0},
        federation={"weights": "uniform", "secure": {}},
        engine={"name": "flower-sim"},
    )
    with pytest.raises(FedspanError, match=r"with privacy\.mechanism: central and federation\.secure") as refused:
        parse_config(given)
    assert refused.value.field == "federation.clients_per_round"
    given["federation"]["clients_per_round"] = None
    parse_config(given)
