"""Losses and metrics that no client can have: they count nowhere, and their clients are named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedspan.federation.plausibility import drop_impossible_losses, drop_impossible_metrics
from fedspan.federation.protocol import Part, Reply
from fedspan.runs.setup import prepare
from helpers import tiny


def reply(*losses: float) -> Reply:
    return Reply("train", 0, 0, "a", tuple(Part(loss=loss, examples=4.0) for loss in losses))


@pytest.mark.parametrize("losses", [(1e308,), (-1.0,), (0.5, 1e308), (1e308, -1.0)])
def test_an_impossible_loss_removes_its_reply_and_names_its_client(losses: tuple[float, ...]) -> None:
    others = {"a": reply(0.5), "b": reply(0.7, 3.0), "silent": reply()}
    kept, ((client, reason),) = drop_impossible_losses({**others, "liar": reply(*losses)})
    assert kept == others
    assert client == "liar"
    assert reason.startswith("of its training, loss ")


def test_a_client_that_reports_a_loss_of_1e308_hides_no_other_client_s(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(lies: bool) -> tuple[float, list[tuple[str, str]]]:
        values = tiny.config(tiny_folder, federation={"clients_per_round": None}, simulation={})
        federation = prepare(values).federation
        host = tiny.host_of(federation)
        honest = host.train

        def lying(orders: Any, on_reply: Callable[[Reply], None]) -> None:
            lie = (Part(loss=1e308, examples=1e6),)
            honest(orders, lambda one: on_reply(replace(one, parts=lie) if lies and one.id == "west" else one))

        monkeypatch.setattr(host, "train", lying)
        result = federation.run_round(federation.begin())
        return result.loss, [(failure.client, failure.reason) for failure in result.failures]

    loss, failures = train(lies=True)
    honest_loss, silent = train(lies=False)
    assert math.isfinite(loss)
    assert loss == pytest.approx(honest_loss, rel=0.3)  # the mean of three clients in place of four
    assert [client for client, _ in failures] == ["west"]
    assert silent == []


def test_a_loss_is_compared_with_the_median_from_three_clients_on() -> None:
    rows, impossible = drop_impossible_metrics({"a": {"loss": 0.2}, "b": {"loss": 5000.0}})
    assert rows == {"a": {"loss": 0.2}, "b": {"loss": 5000.0}}
    assert not impossible
    rows, impossible = drop_impossible_metrics({"a": {"loss": 20.0}, "b": {"loss": 5000.0}, "c": {"loss": 0.1}})
    assert [id for id, _ in impossible] == []
    rows, impossible = drop_impossible_metrics({"a": {"loss": 0.2}, "b": {"loss": 5000.0}, "c": {"loss": 0.1}})
    assert impossible == [("b", "loss 5e+03 is not from 0 to 1e+03")]
    assert rows["b"] == {}
