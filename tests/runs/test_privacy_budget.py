"""Runs with privacy: what they write down of it, when they end, that they resume, and what nodes make of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.listeners import Notes
from helpers.node_service import CLIENT, introduced, node, served, values
from helpers.refusals import refused

pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

import fedspan
from fedspan.config import parse_config
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import decode_order, decode_reply
from fedspan.progress.listener import Listener
from fedspan.runs.privacy_budget import Budget
from fedspan.training.accounting import Charge, Mechanism, PrivacySpend, compute_epsilon
from helpers import tiny
from helpers.families import others_slow

DP_SGD = {"mechanism": "dp-sgd", "epsilon": 3.0}


def run_values(folder: Path, privacy: dict[str, Any], **changes: Any) -> dict[str, Any]:
    federation = {"rounds": 4, "clients_per_round": 3, "weights": "uniform", **changes.pop("federation", {})}
    return tiny.settings(folder, privacy=privacy, federation=federation, **changes)


def releases(folder: Path) -> list[Any]:
    """What a node's book has of releases under privacy, for its only server."""
    (account,) = json.loads((folder / "budget.json").read_text())["accounts"].values()
    return account["releases"]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mechanism", others_slow(["central", "local", "dp-sgd"], ["central"]))
def test_a_budget_is_spent_by_the_last_round_and_recorded(mechanism: str, tiny_folder: Path, tmp_path: Path) -> None:
    privacy = {"mechanism": mechanism, "epsilon": 3.0, "clip": 0.1}
    report = fedspan.run(run_values(tiny_folder, privacy), tmp_path / "run")
    spent = [row["privacy"]["epsilon"] for row in rows(tmp_path / "run")]
    assert len(spent) == 4
    assert 0 < spent[0] < spent[1] <= spent[2] <= spent[3] <= 3.0
    if mechanism == "central":  # all pay each time; elsewhere a client that missed a round has something left
        assert spent[3] > 2.9
    assert report.privacy["epsilon"] == spent[3]
    assert report.privacy["delta"] == 1e-5
    assert report.privacy["mechanism"] == mechanism
    assert report.rounds == 4
    assert fedspan.read_report(tmp_path / "run").privacy == report.privacy


def test_a_run_ends_before_it_exceeds_its_budget(tiny_folder: Path, tmp_path: Path) -> None:
    one, two = ({Mechanism(0.75, 2.0): count} for count in (1, 2))
    budget = (compute_epsilon(two, 1e-5, "rdp") + compute_epsilon({Mechanism(0.75, 2.0): 3}, 1e-5, "rdp")) / 2
    listener = Notes()
    privacy = {"mechanism": "central", "noise": 2.0, "epsilon": budget}
    evaluation = {"every": 5}
    report = fedspan.run(run_values(tiny_folder, privacy, evaluation=evaluation), tmp_path / "run", listener=listener)
    assert report.rounds == report.best_round == 2
    assert listener.notes[-1] == "stopped after round 2: the next one would exceed privacy.epsilon"
    assert report.privacy["epsilon"] == pytest.approx(compute_epsilon(two, 1e-5, "rdp"))
    assert "validation" in rows(tmp_path / "run")[-1]  # the last round, though it was not meant to be
    too_little = {**privacy, "epsilon": compute_epsilon(one, 1e-5, "rdp") * 0.9}
    with refused("privacy.epsilon"):
        fedspan.run(run_values(tiny_folder, too_little), tmp_path / "none")


@pytest.mark.parametrize(
    ("mechanism", "randomness"),
    [
        ("central", "secret"),
        pytest.param("local", "seed", marks=pytest.mark.slow),
        pytest.param("dp-sgd", "seed", marks=pytest.mark.slow),
        pytest.param("dp-sgd", "secret", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_interrupted_ends_like_one_that_was_not(
    mechanism: str, randomness: str, tiny_folder: Path, tmp_path: Path
) -> None:
    privacy = {"mechanism": mechanism, "epsilon": 3.0, "randomness": randomness, "clip": 0.1}
    given, cut, whole = run_values(tiny_folder, privacy), tmp_path / "cut", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(given, cut, listener=Notes(stop=2))
    key = cut / "noise.key"
    assert key.is_file() == (randomness == "secret")
    if randomness == "secret":
        assert key.stat().st_mode & 0o777 == 0o600
        assert cut.stat().st_mode & 0o777 == 0o700  # its files name the secret samples
        kept = key.read_bytes()
        key.unlink()
        with pytest.raises(FedspanError, match=r"noise\.key"):
            fedspan.resume(cut)
        key.write_bytes(kept[:-1])
        with pytest.raises(FedspanError, match="31 bytes"):
            fedspan.resume(cut)
        key.write_bytes(kept)
    report = fedspan.resume(cut)
    if randomness == "seed":
        assert fedspan.run(given, whole).privacy == report.privacy
        first, second = ((one / "adapter" / "adapter_model.safetensors").read_bytes() for one in (cut, whole))
        assert first == second
        stripped = [{**row, "seconds": 0, "chain": ""} for row in rows(cut)]
        assert stripped == [{**row, "seconds": 0, "chain": ""} for row in rows(whole)]
    assert len(rows(cut)) == 4


class Killed(Listener):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_client_finish(self, round: int, client: str, loss: float) -> None:
        if round == self.round:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("mechanism", "randomness", "twice"),
    [
        pytest.param("local", "seed", False, marks=pytest.mark.slow),
        pytest.param("central", "seed", False, marks=pytest.mark.slow),
        ("central", "secret", True),
    ],
)
def test_a_round_that_was_not_finished_has_paid(
    mechanism: str, randomness: str, twice: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    """Run again, it pays nothing more where it repeats its releases to the bit, and again where it may not."""
    privacy = {"mechanism": mechanism, "noise": 5.0, "randomness": randomness, "clip": 0.1}
    # All clients: a sample of a secret key has none at times, and its round no reply to be killed after.
    federation = {"rounds": 2, "clients_per_round": None}
    given = run_values(tiny_folder, privacy, federation=federation, evaluation={"every": 5})
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(given, cut, listener=Killed(2))
    unfinished = json.loads((cut / "privacy.json").read_text())
    assert unfinished["round"] == 1
    assert sum(count for *_, count in unfinished["releases"]) == (1 if mechanism == "central" else len(tiny.SITES))
    report, whole = fedspan.resume(cut), fedspan.run(given, tmp_path / "whole")
    assert (report.privacy["epsilon"] > whole.privacy["epsilon"]) == twice
    if not twice:
        assert report.privacy == whole.privacy


def test_the_cost_is_on_the_disk_before_an_order_is_sent(tiny_folder: Path, tmp_path: Path) -> None:
    path, config = tmp_path / "privacy.json", parse_config(run_values(tiny_folder, {"mechanism": "local", "noise": 5}))
    charge = (Charge("a", Mechanism(1.0, 5.0), 1),)
    Budget(config, path=path).announce(0, charge)
    again = Budget(config, path=path)
    again.announce(0, charge)
    again.announce(0, charge)
    assert json.loads(path.read_text()) == {"round": 0, "releases": [["a", 1.0, 5.0, 2]]}
    lost = Budget(config, path=path)
    lost.count(charge)  # in this process one client was asked once, in the last one twice
    assert json.loads(lost.dump()) == {"a": [[1.0, 5.0, 2]]}
    assert json.loads(Budget(config, lost.dump(), path, finished=1).dump()) == {"a": [[1.0, 5.0, 2]]}
    for damage in ("{", "[]", '{"round": 0, "releases": [[1]]}'):
        path.write_text(damage)
        with pytest.raises(FedspanError, match="is damaged"):
            Budget(config, path=path)


def test_asking_again_stays_within_the_budget(tiny_folder: Path, tmp_path: Path) -> None:
    """A client whose reply gets lost twice: its second order fits, the third is not sent."""
    once, twice, thrice = (compute_epsilon({Mechanism(1.0, 2.5): count}, 1e-5, "rdp") for count in (1, 2, 3))
    privacy = {"mechanism": "local", "noise": 5.0, "epsilon": (twice + thrice) / 2, "randomness": "secret"}
    run, transport = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)), privacy=privacy)
    honest = transport.replies

    def losing(envelopes: Any, seconds: float, *, wait_for_offline: bool = False) -> Any:
        for id, _ in honest(envelopes, seconds, wait_for_offline=wait_for_offline):
            yield id, "its reply was lost"

    transport.replies = losing
    budget = Budget(run.config, path=tmp_path / "run.json")
    with refused("privacy.epsilon"):
        run.federation.run_round(run.federation.begin(), on_charge=lambda charges: budget.announce(0, charges))
    assert len(transport.sent) == 2
    assert releases(tmp_path) == [[1.0, 2.5, 2]]
    assert json.loads((tmp_path / "run.json").read_text())["releases"] == [[CLIENT, 1.0, 2.5, 2]]
    assert once < twice


def test_baselines_are_without_privacy(tiny_folder: Path, tmp_path: Path) -> None:
    federation = {"rounds": 1}
    given = run_values(tiny_folder, {"mechanism": "dp-sgd", "noise": 500.0}, federation=federation)
    given["baselines"] = ["centralized"]
    report = fedspan.run(given, tmp_path / "run")
    assert report.baselines["centralized"]["scores"]["test"]["loss"] < report.scores["test"]["loss"] - 0.1


def test_a_deployment_s_noise_is_secret(tiny_folder: Path) -> None:
    given = {**values(tiny_folder), "privacy": DP_SGD}
    config = build_server_config(given)
    assert config.privacy.randomness == "secret"
    with refused("privacy.randomness"):
        build_server_config({**given, "privacy": {**DP_SGD, "randomness": "seed"}})


def test_a_node_makes_its_own_noise_and_says_nothing_of_its_loss(tiny_folder: Path, tmp_path: Path) -> None:
    changes = {"privacy": {**DP_SGD, "randomness": "secret"}}
    run, transport = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)), **changes)
    result = run.federation.run_round(run.federation.begin())
    assert not result.failures
    (charge,) = result.charges
    assert charge.payer == CLIENT
    (key,) = tmp_path.glob("*/noise.key")
    assert key.stat().st_mode & 0o777 == 0o600
    assert result.loss != result.loss  # NaN: not told
    assert releases(tmp_path) == [[charge.mechanism.rate, charge.mechanism.noise, charge.count]]
    transport.service = NodeService(node(tiny_folder, tmp_path))
    assert not run.federation.run_round(result.progress).failures
    assert releases(tmp_path)[0][2] == 2 * charge.count


def test_a_node_counts_its_own_examples(tiny_folder: Path, tmp_path: Path) -> None:
    """A server that calls them many would be sent less noise."""
    changes = {"privacy": {**DP_SGD, "randomness": "secret"}}
    run, transport = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)), **changes)
    honest = run.federation.run_round(run.federation.begin()).charges[0].mechanism.noise
    order = decode_order(transport.sent[0])
    lie = replace(order, client=replace(order.client, examples=10**6), serial=order.serial + 10**9)
    assert "client.examples" in (decode_reply(transport.service.answer(lie.to_envelope())).failed or "")
    ((_, noise, _),) = releases(tmp_path)
    assert noise == honest


@pytest.mark.parametrize("mechanism", ["dp-sgd", "local"])
def test_a_round_that_is_rerun_tells_nothing_new(mechanism: str, tiny_folder: Path, tmp_path: Path) -> None:
    """The same order gets the same bits, before and after a restart: so a failed round is not paid for twice."""
    privacy = {"mechanism": mechanism, "epsilon": 3.0, "randomness": "secret"}
    run, transport = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)), privacy=privacy)
    before = run.federation.begin()
    first = run.federation.run_round(before)
    assert not first.failures
    transport.service = NodeService(node(tiny_folder, tmp_path))
    again = run.federation.run_round(before)
    assert not again.failures
    for name, tensor in first.progress.state.tensors.items():
        assert torch.equal(again.progress.state.tensors[name], tensor), name
    assert any(
        not torch.equal(tensor, before.state.tensors[name]) for name, tensor in first.progress.state.tensors.items()
    )


def test_a_node_keeps_to_its_own_limit(tiny_folder: Path, tmp_path: Path) -> None:
    limit = {"limits": {"epsilon": 2.7}}
    for privacy, why in ((None, "no privacy"), ({"mechanism": "central", "noise": 1.0}, "central")):
        given = values(tiny_folder)
        if privacy is not None:
            given = {**given, "privacy": {**privacy, "randomness": "secret"}}
            given["federation"] = {**given["federation"], "weights": "uniform"}
        told = introduced(NodeService(node(tiny_folder, tmp_path, **limit)), given)
        assert why in (told.refused or "")
        assert "limits.private_only" in (told.refused or "")
    seeded = {**values(tiny_folder), "privacy": {**DP_SGD, "randomness": "seed"}}
    assert "this node requires privacy.randomness: secret" in (
        introduced(NodeService(node(tiny_folder, tmp_path)), seeded).refused or ""
    )
    secret = {"privacy": {**DP_SGD, "randomness": "secret"}}
    planned = introduced(NodeService(node(tiny_folder, tmp_path, **limit)), values(tiny_folder, **secret))
    assert "all rounds of the run would cost" in (planned.refused or "")
    # A run that selects some of its nodes does not say how often each of them trains.
    secret["federation"] = {"clients_per_round": 1}
    run, _ = served(tiny_folder, NodeService(node(tiny_folder, tmp_path, **limit)), **secret)
    progress = run.federation.begin()
    progress = run.federation.run_round(progress).progress
    with refused("good replies"):
        run.federation.run_round(progress)
    (spent,) = [PrivacySpend(1e-5, "rdp")]
    spent.restore({"": releases(tmp_path)})
    assert 2.0 < spent.compute_worst() <= 2.7
