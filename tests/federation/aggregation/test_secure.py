"""Masked sums, with central privacy and without: the mean is that of replies in plaintext."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

from fedspan.assembly.run import Prepared
from fedspan.clients.host import Host
from fedspan.clients.metric_noise import MetricLimits
from fedspan.config import parse_config
from fedspan.core.method import Wrapper
from fedspan.core.tensors import compute_norm as norm_of
from fedspan.core.values import Client, Contribution, Message, Reduced
from fedspan.crypto.keys import SessionKeys, draw_secret
from fedspan.crypto.masks import Ring
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.config import SecureSettings
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress, RoundResult
from fedspan.federation.protocol import Envelope, Order, decode_reply
from fedspan.federation.secagg import messages
from fedspan.transports.in_process import simulate
from helpers import refusals, secure_rounds, tiny
from helpers.families import others_slow
from helpers.remote_federation import require_whole_resend

ALL = tuple(sorted(tiny.SITES))
OTHERS = tuple(id for id in ALL if id != "south")
PHASES, LATE_PHASES = ("keys", "shares", "train"), ("confirm", "unmask")


@pytest.fixture
def built(prepared: Prepared, tiny_folder: Path) -> Prepared:
    config = tiny.config(tiny_folder, federation={"clients_per_round": None})
    return tiny.variant(prepared, config, watch=lambda method: secure_rounds.Noted(inner=method))


def reduced(federation: Federation) -> Any:
    method = federation.method
    return method.reduced[-1]


def run_round(federation: Any) -> tuple[Progress, RoundResult, Reduced]:
    begin = federation.begin()
    return begin, federation.run_round(begin), reduced(federation)


def require_mean(built: Prepared, federation: Any, begin: Progress, hidden: Reduced, asked: Any, replied: Any) -> None:
    """Require that the mean of a secure round is that of the replies in plaintext."""
    secure_rounds.among(built.federation, *replied).run_round(begin)
    secure_rounds.require_close(hidden.mean, reduced(federation).mean, secure_rounds.bound(federation, asked, replied))


def require_left_out(built: Prepared, federation: Any, why: str) -> None:
    """Require that one client's reply is left out of a round, and the mean is that of the others."""
    begin, result, hidden = run_round(federation)
    (failure,) = result.failures
    assert failure.client == "south"
    assert why in failure.reason
    require_mean(built, federation, begin, hidden, ALL, OTHERS)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_round_s_mean_is_the_plain_one(bits: Any, built: Prepared, tmp_path: Path) -> None:
    settings = SecureSettings(bits=bits)
    federation, stage = secure_rounds.secured(built, tmp_path, settings=settings)
    begin, result, hidden = run_round(federation)
    plain = secure_rounds.among(built.federation, *ALL).run_round(begin)
    assert not result.failures
    secure_rounds.require_same_round(result, plain)
    assert hidden.count == reduced(federation).count == 4
    limit = secure_rounds.bound(federation, ALL, ALL)
    worst = secure_rounds.require_close(hidden.mean, reduced(federation).mean, limit)
    assert worst > 0 or bits == 64
    assert [task for task, _, _ in stage.asked] == [phase for phase in (*PHASES, *LATE_PHASES) for _ in ALL]


@pytest.mark.parametrize("phase", [*PHASES, *LATE_PHASES])
def test_who_is_gone_is_in_the_sum_only_if_it_has_sent_its_vector(phase: str, built: Prepared, tmp_path: Path) -> None:
    federation, _ = secure_rounds.secured(built, tmp_path, lose=secure_rounds.gone_at(phase, "south"))
    begin, result, hidden = run_round(federation)
    failures = [(failure.client, failure.attempt) for failure in result.failures]
    assert failures == [("south", 0)] * (phase in PHASES)
    assert all(secure_rounds.GONE in failure.reason for failure in result.failures)
    counted = OTHERS if phase in PHASES else ALL
    plain = secure_rounds.among(built.federation, *counted).run_round(begin)
    secure_rounds.require_same_round(result, plain)
    assert hidden.count == len(counted)
    asked = OTHERS if phase == "keys" else ALL  # the sum is laid out for those who sent keys
    secure_rounds.require_close(hidden.mean, reduced(federation).mean, secure_rounds.bound(federation, asked, counted))


@pytest.mark.parametrize("phase", others_slow([*PHASES, *LATE_PHASES], ["train", "unmask"]))
def test_too_few_end_the_attempt_and_the_state_stays(phase: str, built: Prepared, tmp_path: Path) -> None:
    """Two of four are too few for the quorum, or for the shares, of which it takes three."""
    lose = secure_rounds.gone_at(phase, "south", "west")
    federation, stage = secure_rounds.secured(built, tmp_path, lose=lose, retries=1)
    begin = federation.begin()
    before = serialization.encode_state(begin.state)
    with refusals.refused("good replies", r"needs good replies of at least 3 of 4 clients.*south: ") as stopped:
        federation.run_round(begin)
    assert "west" in str(stopped.value)
    assert serialization.encode_state(begin.state) == before
    assert {attempt for _, attempt, _ in stage.asked} == {0, 1}
    sessions = {asked.session for asked, _ in stage.sent if not isinstance(asked, Order)}
    assert len(sessions) == 2
    stage.lose = secure_rounds.nobody
    again = federation.run_round(begin)
    assert set(again.progress.last_rounds) == set(ALL)
    plain = secure_rounds.among(built.federation, *ALL).run_round(begin)
    assert again.loss == pytest.approx(plain.loss, rel=1e-12)


@pytest.mark.parametrize("phase", [*PHASES, *LATE_PHASES])
def test_an_attempt_that_failed_is_followed_by_one_that_does_not(phase: str, built: Prepared, tmp_path: Path) -> None:
    federation, stage = secure_rounds.secured(
        built, tmp_path, lose=secure_rounds.gone_at(phase, "south", "west", attempts=1)
    )
    begin, result, hidden = run_round(federation)
    assert {failure.attempt for failure in result.failures} == {0}
    assert {"south", "west"} <= {failure.client for failure in result.failures}
    plain = secure_rounds.among(built.federation, *ALL).run_round(begin)
    secure_rounds.require_same_round(result, plain)
    secure_rounds.require_close(hidden.mean, reduced(federation).mean, secure_rounds.bound(federation, ALL, ALL))
    stage.lose = secure_rounds.nobody
    assert not federation.run_round(result.progress).failures  # what was left on the clients' disks is not in the way


def test_what_is_transmitted_is_noise_of_which_every_value_is_as_likely(built: Prepared, tmp_path: Path) -> None:
    federation, stage = secure_rounds.secured(built, tmp_path)
    federation.run_round(federation.begin())
    federation.run_round(federation.begin())
    vectors = [
        serialization.decode(decode_reply(back).body).tensors[messages.MASKED].numpy()
        for asked, back in stage.came
        if isinstance(asked, Order)
    ]
    assert len(vectors) == 8
    for vector in vectors:
        counts = np.bincount(vector.view(np.uint8), minlength=256)
        spread = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert abs(spread - 255) < 5 * (2 * 255) ** 0.5
    for number, one in enumerate(vectors):  # the same round twice: the same changes, under other masks
        for other in vectors[:number]:
            counts = np.bincount((one - other).view(np.uint8), minlength=256)
            spread = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
            assert abs(spread - 255) < 5 * (2 * 255) ** 0.5


def test_every_byte_that_is_transmitted_is_counted(built: Prepared, tmp_path: Path) -> None:
    federation, stage = secure_rounds.secured(built, tmp_path)
    result = federation.run_round(federation.begin())
    for direction, envelopes in (("down", stage.sent), ("up", stage.came)):
        for id in ALL:
            own = [(asked, envelope) for asked, envelope in envelopes if asked.to == id]
            sizes = [
                len(envelope.body) + (0 if isinstance(asked, Order) else len(envelope.header))
                for asked, envelope in own
            ]
            counted = [one.bytes for one in result.transfers if (one.client, one.direction) == (id, direction)]
            assert sorted(counted) == sorted(sizes)
            assert len(counted) == 5
    elements = sum(value.numel() for value in reduced(federation).mean.values())
    assert {one.payload for one in result.transfers} == {0, 4 * elements}
    assert f"{elements} masked integers of 32 bits" in (federation.get_note() or "")


def changed(change: Any) -> secure_rounds.Spoil:
    """South's vector changed."""

    def spoil(asked: Order | messages.Phase, back: Envelope) -> Envelope:
        if not isinstance(asked, Order) or asked.to != "south":
            return back
        answer = decode_reply(back)
        return replace(answer, body=serialization.encode(change(serialization.decode(answer.body)))).to_envelope()

    return spoil


def vector_of(message: Message) -> torch.Tensor:
    return message.tensors[messages.MASKED]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda message: Message({messages.MASKED: vector_of(message)[:-1]}), "a masked vector ["),
        (lambda message: Message({messages.MASKED: vector_of(message).long()}), "of torch.int64, not ["),
        (lambda message: Message({messages.MASKED: vector_of(message)[None]}), "a masked vector [1, "),
        (lambda message: Message({"other": vector_of(message)}), "not of one masked vector"),
        (lambda message: Message({**message.tensors, "more": torch.zeros(1)}), "not of one masked vector"),
        (lambda message: Message(message.tensors, {"more": 1}), "not of one masked vector"),
    ],
)
def test_a_vector_that_does_not_fit_is_left_out(change: Any, why: str, built: Prepared, tmp_path: Path) -> None:
    federation, _ = secure_rounds.secured(built, tmp_path, spoil=changed(change))
    require_left_out(built, federation, why)


def test_a_sum_beyond_the_bound_is_refused(built: Prepared, tmp_path: Path) -> None:
    """One client adds to its vector what no change within the clip can be; whose fault it is, nobody can say."""
    one = torch.tensor([0]), torch.tensor([3 * 2**29], dtype=torch.int32)
    spoil = changed(lambda message: Message({messages.MASKED: vector_of(message).index_add(0, *one)}))
    federation, stage = secure_rounds.secured(built, tmp_path, spoil=spoil, retries=0)
    begin = federation.begin()
    with refusals.refused("good replies", r"a mean with a norm of 150, above federation\.secure\.clip"):
        federation.run_round(begin)
    stage.spoil = secure_rounds.good
    assert not federation.run_round(begin).failures


def wrong_shares(*liars: str, of: str | None = None, attempts: int = 1) -> secure_rounds.Spoil:
    """Clients that reveal other shares than they were sent: of all clients or of one."""

    def spoil(asked: Order | messages.Phase, back: Envelope) -> Envelope:
        if asked.task != "unmask" or asked.to not in liars or asked.attempt >= attempts:
            return back
        answer = messages.UnmaskReply.model_validate_json(back.header)
        wrong = {id: share[:2] + bytes(32) if of in (None, id) else share for id, share in answer.shares.items()}
        return answer.model_copy(update={"shares": wrong}).to_envelope()

    return spoil


def test_wrong_shares_that_are_needed_end_the_attempt_and_name_their_sender(built: Prepared, tmp_path: Path) -> None:
    """A client dropped out, so that every share counts. The others have revealed theirs, and accept a sum of the same
    clients only: without the one that dropped out, and with the one that revealed wrong shares."""
    lose = secure_rounds.gone_at("train", "south", attempts=1)
    federation, stage = secure_rounds.secured(built, tmp_path, lose=lose, spoil=wrong_shares("east"), retries=1)
    result = federation.run_round(federation.begin())
    assert {id for _, attempt, id in stage.asked if attempt == 1} == set(ALL) - {"south"}
    assert set(result.progress.last_rounds) == set(ALL) - {"south"}
    (failure,) = (failure for failure in result.failures if failure.client == "east")
    assert (failure.attempt, failure.reason.startswith("unmask: its share of")) == (0, True)


def test_wrong_shares_of_one_client_are_left_out(built: Prepared, tmp_path: Path) -> None:
    """It replies to train, and then gives shares that are not those it was sent."""
    federation, stage = secure_rounds.secured(built, tmp_path, spoil=wrong_shares("east"))
    begin, result, hidden = run_round(federation)
    (failure,) = result.failures
    assert failure.client == "east"
    assert "is not the one that" in failure.reason
    assert "it was not needed" in failure.reason
    assert max(attempt for _, attempt, _ in stage.asked) == 0
    require_mean(built, federation, begin, hidden, ALL, ALL)


def test_two_clients_cannot_have_a_third_left_out(built: Prepared, tmp_path: Path) -> None:
    """They reveal wrong shares of its secret in every attempt: the round fails, and it is they that are named."""
    spoil = wrong_shares("east", "north", of="south", attempts=9)
    federation, stage = secure_rounds.secured(built, tmp_path, spoil=spoil, retries=1)
    with refusals.refused("good replies", r"east: unmask: its share of 'south' is not.*north: unmask: its share"):
        federation.run_round(federation.begin())
    assert {id for _, attempt, id in stage.asked if attempt == 1} == set(ALL)


def test_a_client_whose_secrets_nobody_can_open_is_left_out_of_the_retry(built: Prepared, tmp_path: Path) -> None:
    """It seals noise for the others, in every attempt; the round does not wait for it to be honest."""

    def spoil(asked: Order | messages.Phase, back: Envelope) -> Envelope:
        if asked.task != "shares" or asked.to != "south":
            return back
        answer = messages.SharesReply.model_validate_json(back.header)
        return answer.model_copy(update={"sealed": dict.fromkeys(answer.sealed, bytes(100))}).to_envelope()

    federation, stage = secure_rounds.secured(built, tmp_path, spoil=spoil)
    begin, result, hidden = run_round(federation)
    assert {failure.client for failure in result.failures if failure.attempt == 0} == {"south"}
    assert {id for _, attempt, id in stage.asked if attempt == 1} == set(OTHERS)
    assert set(result.progress.last_rounds) == set(OTHERS)
    require_mean(built, federation, begin, hidden, OTHERS, OTHERS)


LOW_ORDER = (bytes(32), b"\1" + bytes(31), (2**255 - 20).to_bytes(32, "little"))
"""Points of X25519 with which every private key gives the same secret: 0, 1 and p - 1."""

NOT_CANONICAL = ((2**255 - 19).to_bytes(32, "little"), (2**255 + 9).to_bytes(32, "little"))
"""Points in another form: p, which is 0, and 9 with the highest bit, which X25519 ignores."""


def spoil_keys(change: Callable[[messages.PublicKeys], Mapping[str, Any]]) -> secure_rounds.Spoil:

    def spoil(asked: Order | messages.Phase, back: Envelope) -> Envelope:
        if asked.task != "keys" or asked.to != "south":
            return back
        answer = messages.KeysReply.model_validate_json(back.header)
        return answer.model_copy(
            update={"keys": answer.keys.model_copy(update=dict(change(answer.keys)))}
        ).to_envelope()

    return spoil


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda keys: {"masking": keys.sealing}, "two of its keys are the same"),
        (lambda keys: {"signing": keys.sealing}, "two of its keys are the same"),
        *((lambda _, low=low: {"sealing": low}, "the same secret with every private key") for low in LOW_ORDER),
        *((lambda _, low=low: {"masking": low}, "the same secret with every private key") for low in LOW_ORDER),
        *((lambda _, key=key: {"sealing": key}, "not in its canonical form") for key in NOT_CANONICAL),
        *((lambda _, key=key: {"masking": key}, "not in its canonical form") for key in NOT_CANONICAL),
        (lambda _: {"identity": "ecdsa-sha2-nistp384 AAAA", "signature": b"x"}, ""),
        (lambda _: {"signature": b"x"}, ""),
    ],
)
def test_keys_that_others_refuse_fail_their_sender_alone(
    change: Any, reason: str, built: Prepared, tmp_path: Path
) -> None:
    federation, stage = secure_rounds.secured(built, tmp_path, spoil=spoil_keys(change))
    begin, result, hidden = run_round(federation)
    (failure,) = result.failures
    assert (failure.client, failure.attempt) == ("south", 0)
    assert failure.reason.startswith("keys: ")
    assert reason in failure.reason
    assert max(attempt for _, attempt, _ in stage.asked) == 0
    assert {id for task, _, id in stage.asked if task != "keys"} == set(OTHERS)
    require_mean(built, federation, begin, hidden, OTHERS, OTHERS)


def test_two_clients_with_one_key_fail_alone(built: Prepared, tmp_path: Path) -> None:
    """They agreed on it before; the one whose keys arrive later fails."""
    shared = SessionKeys.derive(draw_secret(), "of two").masking_public

    def spoil(asked: Order | messages.Phase, back: Envelope) -> Envelope:
        if asked.task != "keys" or asked.to not in ("south", "east"):
            return back
        answer = messages.KeysReply.model_validate_json(back.header)
        return answer.model_copy(update={"keys": answer.keys.model_copy(update={"masking": shared})}).to_envelope()

    federation, stage = secure_rounds.secured(built, tmp_path, spoil=spoil, retries=0)
    with refusals.refused("good replies", r"east: keys: another client has sent one of its keys; south: shares: "):
        federation.run_round(federation.begin())  # south does not know the private key of what it sent
    assert not any(task == "train" for task, _, _ in stage.asked), "two clients are too few"


def test_the_clip_holds_where_the_reply_is_made(built: Prepared, tmp_path: Path) -> None:
    """Far below what training changes: every client's change comes down to that norm, and their mean is no longer."""
    clip = 1e-3
    federation, _ = secure_rounds.secured(built, tmp_path, settings=SecureSettings(clip=clip))
    begin = federation.begin()
    federation.run_round(begin)
    mean = reduced(federation).mean
    moved = torch.cat([(value.double() - begin.state.tensors[name].double()).flatten() for name, value in mean.items()])
    assert clip / 5 < float(moved.norm()) <= clip * 1.01


def test_no_training_loss_leaves_a_client_that_adds_noise_to_metrics(built: Prepared, tmp_path: Path) -> None:
    federation, stage = secure_rounds.secured(built, tmp_path)
    assert math.isfinite(federation.run_round(federation.begin()).loss)
    make = stage.make

    def make_careful(id: str) -> Host:
        host = make(id)
        host.metric_limits = MetricLimits(epsilon=1.0)
        return host

    stage.make = make_careful
    stage.came.clear()
    federation.run_round(federation.begin())
    assert [decode_reply(back).parts for asked, back in stage.came if isinstance(asked, Order)] == [()] * len(ALL)


@dataclass(frozen=True, kw_only=True)
class Agreed(Wrapper):
    """A method all of whose clients contribute the same."""

    agreed: Mapping[str, torch.Tensor]

    def contribute(self, message: Message, client: Client) -> Contribution:
        return replace(self.inner.contribute(message, client), sum=self.agreed)


def test_rounding_may_lengthen_a_mean_beyond_the_clip(built: Prepared, tmp_path: Path) -> None:
    """Each of four entries is half a step above an integer, and these four are rounded up: by a step of the norm."""
    tiny.reweight(built.federation, dict.fromkeys(ALL, 1.0))
    begin, clip = built.federation.begin(), 2.0**-10
    agreed = {name: value.clone() for name, value in begin.state.tensors.items()}
    agreed["bert.encoder.layer.0.attention.self.query/B"].view(-1)[5:9] = 1.0
    method, settings = Agreed(inner=built.federation.method, agreed=agreed), SecureSettings(clip=clip)
    federation, _ = secure_rounds.secured(built, tmp_path, settings=settings, method=method)
    assert not federation.run_round(begin).failures
    mean = reduced(federation).mean
    moved = {name: value.double() - begin.state.tensors[name].double() for name, value in mean.items()}
    assert norm_of(moved) == pytest.approx(clip, rel=1e-6)


@dataclass(frozen=True, kw_only=True)
class Spoilt(Wrapper):
    """A method one of whose clients contributes something else."""

    change: Any

    def contribute(self, message: Message, client: Client) -> Contribution:
        contribution = self.inner.contribute(message, client)
        return self.change(contribution) if client.id == "south" else contribution


def without_first(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(list(tensors.items())[1:])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: replace(one, sum={name: value * float("nan") for name, value in one.sum.items()}), "not finite"),
        (lambda one: replace(one, sum=without_first(one.sum)), "same names and shapes as the other"),
        (lambda one: replace(one, weight=3.0), "the client's own weight"),
        (lambda one: replace(one, stack={"more": torch.zeros(1)}), "contribution to a sum"),
    ],
)
def test_a_client_whose_reply_has_no_place_in_the_sum_drops_out(
    change: Any, why: str, built: Prepared, tmp_path: Path
) -> None:
    spoilt = Spoilt(inner=built.federation.method, change=change)
    federation, _ = secure_rounds.secured(built, tmp_path, method=spoilt)
    require_left_out(built, federation, why)


def test_replies_that_do_not_sum_stop_the_run_before_anything_is_sent(built: Prepared, tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Counting(Wrapper):
        def contribute(self, message: Message, client: Client) -> Contribution:
            return replace(self.inner.contribute(message, client), stack={"count": torch.zeros(1)})

    method = Counting(inner=built.federation.method)
    federation, stage = secure_rounds.secured(
        replace(built, federation=simulate(
            method, built.engine, built.federation.clients, built.federation.examples, built.federation.settings
        )), tmp_path
    )  # fmt: skip
    with refusals.refused("federation.secure"):
        federation.run_round(federation.begin())
    assert not stage.asked


def test_two_clients_are_too_few_to_hide_among(prepared: Prepared, tiny_folder: Path, tmp_path: Path) -> None:
    made = tiny.variant(prepared, tiny.config(tiny_folder, federation={"clients_per_round": 2}))
    federation, stage = secure_rounds.secured(made, tmp_path)
    with refusals.refused("federation.secure"):
        federation.run_round(federation.begin())
    assert not stage.asked


def test_a_client_may_ask_for_more_company(built: Prepared, tmp_path: Path) -> None:
    """Three left of four are not enough for clients who want four: they give nothing away, and the run stops."""
    lose = secure_rounds.gone_at("train", "south")
    federation, stage = secure_rounds.secured(built, tmp_path, lose=lose, least=4, retries=0)
    too_small = r"`limits\.secure_clients`: a sum of 3 clients is too small\. Expected at least 4 clients"
    with pytest.raises(FedspanError, match=too_small):
        federation.run_round(federation.begin())
    given = [
        messages.ConfirmReply.model_validate_json(back.header).signature
        for asked, back in stage.came
        if asked.task == "confirm"
    ]
    assert given == [b"", b"", b""]
    assert not any(task == "unmask" for task, _, _ in stage.asked)


def test_more_clients_than_a_sum_may_have_are_refused_before_anything_is_sent(
    built: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedspan.federation.aggregation.secure.MAX_SECURE_CLIENTS", 3)
    federation, stage = secure_rounds.secured(built, tmp_path)
    with refusals.refused("federation.secure"):
        federation.run_round(federation.begin())
    assert not stage.asked


def test_a_client_that_lost_its_states_is_sent_everything(
    prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    config = tiny.config(tiny_folder, method={"name": "fedloru"}, federation={"clients_per_round": None})
    federation, _ = secure_rounds.secured(tiny.variant(prepared, config), tmp_path)
    require_whole_resend(federation, tmp_path)


def test_plain_orders_are_refused_in_a_secure_run_and_secure_ones_elsewhere(built: Prepared, tmp_path: Path) -> None:
    federation, stage = secure_rounds.secured(built, tmp_path)
    progress = federation.run_round(federation.begin()).progress
    order = next(asked for asked, _ in stage.sent if isinstance(asked, Order))
    participant = stage.make(order.to)
    with refusals.refused("federation.secure"):
        participant.answer(replace(order, secure=None))
    participant.secure = None
    with refusals.refused("federation.secure"):
        participant.answer(order)
    with refusals.refused("federation.secure"):
        participant.reply(next(asked for asked, _ in stage.sent if not isinstance(asked, Order)))
    assert progress.state.round == 1


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
    return run, method.reduced


@pytest.mark.parametrize("noise", [1e-9, 2.0])
def test_the_mean_is_the_plaintext_mean(noise: float, prepared: Prepared, tiny_folder: Path, tmp_path: Path) -> None:
    run, seen = run_of(prepared, tiny_folder, noise)
    there, _ = secure_rounds.secured(run, tmp_path, settings=SecureSettings(clip=1e4, bits=64))
    progress = run.federation.begin()
    hidden, plain = there.run_round(progress), run.federation.run_round(progress)
    assert hidden.charges == plain.charges
    assert not hidden.failures
    for name, value in seen[1].mean.items():
        assert float((seen[0].mean[name] - value).abs().max()) < 1e-6, name


def test_a_client_that_is_gone_adds_nothing_to_the_sum(prepared: Prepared, tiny_folder: Path, tmp_path: Path) -> None:
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


def test_the_noise_covers_what_rounding_adds_to_a_clipped_change(
    prepared: Prepared, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = run_of(prepared, tiny_folder, 1e4)
    begun = run.federation.begin()
    start = run.federation.method.sync(begun.state, None).tensors
    for levels in (2**40, 8):
        monkeypatch.setattr(Ring, "levels", levels)
        there, _ = secure_rounds.secured(run, tmp_path / str(levels), settings=SecureSettings(bits=64))
        there.run_round(begun)
    fine, coarse = (norm_of({name: (one.mean[name] - start[name]).double() for name in one.mean}) for one in seen)
    count = sum(value.numel() for value in seen[0].mean.values())
    assert coarse / fine == pytest.approx(1 + count**0.5 / 8, rel=1e-3)


def test_a_cohort_that_may_be_too_small_to_hide_in_is_refused(tiny_folder: Path) -> None:
    given = tiny.settings(
        tiny_folder, privacy={"mechanism": "central", "noise": 1.0}, federation={"weights": "uniform", "secure": {}}
    )
    with refusals.refused("federation.clients_per_round") as refused:
        parse_config(given)
    assert refused.value.field == "federation.clients_per_round"
    given["federation"]["clients_per_round"] = None
    parse_config(given)
