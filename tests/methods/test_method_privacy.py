"""Every method under every privacy mechanism: refused with the reason, or the same on all engines and accounted for."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.watched_rounds import method_config

pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

from fedspan.assembly.run import Prepared
from fedspan.core.values import Message, Trained
from fedspan.errors import FedspanError
from fedspan.federation.privacy import compute_client_noise, compute_order_charges, compute_sampling_rate
from fedspan.federation.progress import Progress, RoundResult
from fedspan.federation.serialization import encode_state
from fedspan.methods.registry import METHODS
from fedspan.tasks.task import Examples
from fedspan.training.batched import BatchedEngine
from fedspan.training.config import EngineConfig
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from helpers import refusals, tiny
from helpers.families import UNLIKE, methods_by_family, others_slow
from helpers.remote_federation import remote

GRADIENTS = {"fed-sb", "fedgalore"}
"""Methods whose clients use raw gradients beside their steps."""

REMOTE = {"fedask", "fedit", "fedsa-lora", "fr-lora", "lora-a2", "pfedloru", "slora"}
"""Methods that are run between machines, too: with memories, phases, a second exchange, and messages that leave out
what is known."""


class Counting(LoopEngine):
    """Counts the steps that it takes, by client and round."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.steps: Counter[tuple[str, int]] = Counter()

    def train(self, work: Assignment, examples: Examples) -> Trained:
        made = super().train(work, examples)
        self.steps[work.client, work.round] += made.steps
        return made


def settings(folder: Path, key: str, mechanism: str, noise: float = 0.1, **changes: Any) -> Any:
    return method_config(
        folder,
        key,
        privacy={"mechanism": mechanism, "noise": noise, "clip": 0.5},
        federation={"rounds": 3, "weights": "uniform"},
        **changes,
    )


def fits(key: str, mechanism: str) -> bool:
    claims = METHODS[key](spec=tiny_spec()).declare_claims()
    if claims.sends == "nothing":
        return False
    if claims.second_exchange:
        return mechanism == "dp-sgd"
    if mechanism == "central":
        return claims.reduction == "sum" and not claims.budgets
    return mechanism == "dp-sgd" or (claims.sends == "values" and not claims.budgets)


def tiny_spec() -> Any:
    from fedspan.core.values import Spec

    return Spec(())


def run_rounds(run: Any, rounds: int = 2) -> tuple[list[RoundResult], Progress]:
    progress, results = run.begin(), []
    for _ in range(rounds):
        results.append(run.run_round(progress))
        progress = results[-1].progress
    return results, progress


@pytest.mark.parametrize("mechanism", others_slow(["central", "local", "dp-sgd"], ["central", "dp-sgd"]))
@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_mechanism_fits_or_is_refused_with_the_reason(
    key: str, mechanism: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    if not fits(key, mechanism):
        with pytest.raises(FedspanError, match=f"`: {key} cannot be combined with {mechanism} privacy: ") as refused:
            settings(tiny_folder, key, mechanism)
        assert refused.value.field == "privacy.mechanism"
        return
    here = tiny.variant(prepared, settings(tiny_folder, key, mechanism), engine=Counting)
    if mechanism == "dp-sgd" and key in GRADIENTS:
        with refusals.refused("privacy.mechanism"):
            here.federation.run_round(here.federation.begin())
        return
    rounds = 2 if key in REMOTE else 1
    mine, progress = run_rounds(here.federation, rounds)
    if key in REMOTE:
        theirs, other = run_rounds(remote(here, tmp_path), rounds)
        for one, another in zip(mine, theirs, strict=True):
            assert encode_state(one.progress.state) == encode_state(another.progress.state)
            assert sorted(one.charges, key=str) == sorted(another.charges, key=str)
            assert one.transfers == another.transfers
            assert not another.failures
        assert progress.last_rounds == other.last_rounds
    for values in (progress.state.tensors, progress.state.memory):
        assert all(bool(torch.isfinite(value).all()) for value in values.values() if value.is_floating_point())
    require_accounted(here, mine, mechanism, here.engine)


def require_accounted(run: Prepared, results: list[RoundResult], mechanism: str, engine: Counting) -> None:
    """What rounds say that they cost is what was released."""
    federation = run.federation
    privacy = federation.settings.privacy
    for result in results:
        if mechanism == "central":
            (charge,) = result.charges
            rate = compute_sampling_rate(federation.settings, len(federation.clients))
            assert (charge.mechanism.rate, charge.mechanism.noise) == (rate, compute_client_noise(privacy, rate))
        else:
            assert sorted(charge.payer for charge in result.charges) == sorted(result.cohort)
            for charge in result.charges:
                count = len(federation.clients[charge.payer].train)
                noise = 0.1 if mechanism == "dp-sgd" else 0.05
                rate = min(1.0, 4 / count) if mechanism == "dp-sgd" else 1.0
                assert charge.mechanism.rate == pytest.approx(rate)
                assert charge.mechanism.noise == pytest.approx(noise)
                key = (charge.payer, result.progress.state.round - 1)
                assert charge.count == (engine.steps[key] if mechanism == "dp-sgd" else 1)


@pytest.mark.parametrize("mechanism", ["central", "local", "dp-sgd"])
@pytest.mark.parametrize("key", methods_by_family(["fedit", "rolora", "pfedlora"], ["fedit"]))
def test_the_engines_agree(key: str, mechanism: str, prepared: Prepared, tiny_folder: Path) -> None:
    """Noise of the seed is the same on all engines, so that a simulation can be checked."""
    run = tiny.variant(prepared, settings(tiny_folder, key, mechanism, training={"optimizer": "sgd", "lr": 0.1}))
    _, by_loop = run_rounds(run.federation)
    parts = (run.engine.adapted, run.task, run.engine.settings, run.engine.seed)
    options = EngineConfig(clients_per_pass=3, workers=1, prefix_cache=False)
    tiny.use_engine(run.federation, BatchedEngine(LoopEngine(*parts, options, privacy=run.engine.privacy)))
    _, batched = run_rounds(run.federation)
    for name, value in by_loop.state.tensors.items():
        other = batched.state.tensors[name]
        assert float((value - other).double().norm()) <= 1e-4 * float(value.double().norm()) + 1e-7, name
    assert (run.federation.engine.refusal is not None) == (mechanism == "dp-sgd")


@pytest.mark.parametrize("key", ["fedit", "ffa-lora", "fedsa-lora", "flora"])
def test_every_local_reply_is_within_the_clip_and_its_noise(
    key: str, prepared: Prepared, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fits(key, "local"):
        pytest.skip("refused, as the other test measures")
    from fedspan.clients import host
    from fedspan.core.tensors import compute_norm as norm_of

    found: list[tuple[float, float]] = []
    genuine = host.privatize

    def watched(privacy: Any, started: Any, client: Any, reply: Any, round: int) -> Any:
        made = genuine(privacy, started, client, reply, round)
        change = {name: value.double() - started[name].double() for name, value in made.tensors.items()}
        raw = {name: value.double() - started[name].double() for name, value in reply.tensors.items()}
        found.append((norm_of(change), norm_of(raw)))
        return made

    monkeypatch.setattr(host, "privatize", watched)
    run = tiny.variant(prepared, settings(tiny_folder, key, "local", noise=1e-9, training={"lr": 0.05}))
    run_rounds(run.federation)
    assert found
    assert all(after <= 0.5 * (1 + 1e-5) for after, _ in found)
    assert any(before > 0.5 for _, before in found)
    found.clear()
    noisy = tiny.variant(prepared, settings(tiny_folder, key, "local", noise=3.0))
    (first, *_), _ = run_rounds(noisy.federation, 1)
    count = first.transfers[1].payload // 4
    assert found[0][0] == pytest.approx(3.0 * 0.5 * count**0.5, rel=0.15)


def test_central_privacy_clips_a_head_and_its_adapters_as_one_vector(prepared: Prepared, tiny_folder: Path) -> None:
    run = tiny.variant(prepared, settings(tiny_folder, "fedit", "central", noise=1e-9, training={"lr": 0.05}))
    start, changes = run.federation.begin().state.tensors, list[Tensor]()
    is_head = torch.cat([torch.full((start[name].numel(),), name.startswith("extras/")) for name in sorted(start)])

    def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([(tensors[name].double() - start[name].double()).flatten() for name in sorted(start)])

    def record(_: object, __: object, reply: Message) -> Message:
        changes.append(flatten(reply.tensors))
        return reply

    run.federation.transport.host.tamper = record
    _, progress = run_rounds(run.federation, 1)
    assert all(change.norm() > 0.5 and 0.2 < change[is_head].norm() / change.norm() < 0.98 for change in changes)
    expected = torch.stack([change * 0.5 / change.norm() for change in changes]).mean(0)
    torch.testing.assert_close(flatten(progress.state.tensors), expected, rtol=0, atol=1e-6)


def test_an_order_costs_what_its_phases_release(prepared: Prepared, tiny_folder: Path) -> None:
    """pFedLoRU trains twice a round, on the same examples."""
    costs = {}
    for key in ("fedit", "pfedloru"):
        run = tiny.variant(prepared, settings(tiny_folder, key, "dp-sgd"))
        state, client = run.federation.begin().state, run.federation.clients["west"].client
        sent = run.federation.method.sync(state, client)
        (costs[key],) = compute_order_charges(
            run.federation.settings.privacy, run.engine.settings, run.federation.method, sent, client, state.round
        )
    assert costs["pfedloru"].count > costs["fedit"].count == 2
