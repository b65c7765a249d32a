"""Why methods have no asynchronous rounds, found by running them; what each of them does is in tests/methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import pytest

from fedspan.core.factors import draw_a_factors
from fedspan.core.method import Memory, Method
from fedspan.core.values import Client, Job, LayerSpec, Message, Spec
from fedspan.federation.round_dependence import explain_round_dependence
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.low_precision import LowPrecision
from fedspan.wrappers.wrapper import Wrapper

SPEC = Spec((LayerSpec("layer", 14, 11),), clients=1)


@final
@dataclass(frozen=True, kw_only=True)
class Redrawing(Wrapper):
    """Its clients start from another A in the fourth round."""

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        if round == 3:
            assert isinstance(self.inner, FedIT)
            message = Message({**message.tensors, **draw_a_factors(self.inner, self.inner.r, round)})
        return super().start(message, client, memory, round)


@pytest.mark.parametrize(
    ("method", "rounds", "reason"),
    [
        (FedIT(spec=SPEC, r=2), 9, None),
        (FedPAQ(inner=FedIT(spec=SPEC, r=2)), 9, None),
        (LowPrecision(inner=FedIT(spec=SPEC, r=2), uplink="int8", error_feedback=True), 9, None),
        (FedLoRU(spec=SPEC, r=2, tau=4), 3, None),  # it is FedIT until then
        (FedLoRU(spec=SPEC, r=2, tau=4), 4, "it re-initializes its factors after round 4"),
        (Redrawing(inner=FedIT(spec=SPEC, r=2)), 3, None),
        (Redrawing(inner=FedIT(spec=SPEC, r=2)), 4, "a client trains something else in round 4 than in round 1"),
    ],
)
def test_dependence_is_found_in_the_round_where_it_shows(method: Method, rounds: int, reason: str | None) -> None:
    assert explain_round_dependence(method, rounds) == reason
