"""Rounds in low precision, error feedback and server optimizers against rounds and formulas written out by hand."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspan.core.method import Claims, Memory, Method, Wrapper
from fedspan.core.tensors import Tensors, create_generator, join_tensor_name
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Spec, Trained
from fedspan.federation.serialization import compute_payload_size
from fedspan.federation.validation import build_untrained_reply, validate_reply
from fedspan.methods.fedask import FedASK
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.fedsvd import FedSVD
from fedspan.methods.flora import FLoRA
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.methods.registry import METHODS
from fedspan.methods.rolora import RoLoRA
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedadagrad import FedAdagrad
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedavgm import FedAvgM
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedyogi import FedYogi
from fedspan.wrappers.low_precision import Format, LowPrecision, compress, decompress
from fedspan.wrappers.scaffold import Scaffold
from fedspan.wrappers.server_optimizer import Adaptive, ServerOptimizer
from fedspan.wrappers.wrapper import compute_common_start, split_prefix
from helpers.dense_rounds import require_state
from helpers.families import others_slow
from helpers.refusals import refused
from helpers.toys.oracle import copied, descend
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Double, Federation, close, sgd

LR, SCALING, STEPS, SEED = 0.3, 2.0, 2, 9
FORMATS: tuple[Format, ...] = ("bfloat16", "float16", "int8")
SUMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{
        key: (key, {})
        for key, cls in METHODS.items()
        if cls.claims.reduction == "sum" and cls.claims.sends != "nothing"
    },
    "florg, Gram sums": ("florg", {"gram_sums": True, "init_std": 0.3}),
    "scaffold": ("fedit", {}),
}
"""All methods whose replies sum, by the options that make them so; and one with control variates around it."""
QUICK = ("fedit", "fed-sb", "fedask", "lora-a2", "florg, Gram sums", "scaffold")
"""One whose replies hold new values alone, and all that send something else."""
every_sum = pytest.mark.parametrize("kind", others_slow(SUMS, QUICK))
every_format = pytest.mark.parametrize("format", others_slow(FORMATS, ["int8"]))


def _rounded(name: str, value: Tensor, format: Format, rng: torch.Generator | None = None) -> Tensor:
    return decompress(*compress(name, value, format, rng))[1].double()


def _federation(problem: Problem, **options: object) -> Federation:
    inner = WithExtras(inner=FedIT(spec=problem.adapted().spec, r=2, lora_alpha=4.0), policy="average")
    return Federation(Double(inner=LowPrecision(inner=inner, seed=SEED, **options)), problem, sgd(LR, steps=STEPS))


@pytest.mark.parametrize("error_feedback", [False, True], ids=["plain", "error feedback"])
@pytest.mark.parametrize("downlink", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("uplink", ["bfloat16", "float16", "int8"])
def test_rounds_match_rounding_by_hand(uplink: Format, downlink: Format, error_feedback: bool) -> None:
    """The server's own tensors are not rounded: the rounded change is added to them."""
    problem = Problem()
    federation = _federation(problem, uplink=uplink, downlink=downlink, error_feedback=error_feedback)
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    server = {one: {s: federation.state.tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    errors: dict[tuple[str, str], Tensor] = {}
    for number, positions in enumerate([(0, 1, 2, 3), (1, 3), (0, 1, 2, 3)]):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares = problem.shares(cohort)
        after, head_after = copied(server), dict(head)
        received = {
            one: {s: _rounded(join_tensor_name(one, s), value, downlink) for s, value in slots.items()}
            for one, slots in server.items()
        }
        head_received = {path: _rounded(path, value, downlink) for path, value in head.items()}
        for id in cohort:
            mine, own_head = copied(received), dict(head_received)
            descend(problem, id, W, own_head, mine, SCALING, LR, STEPS, train="AB")

            def sent(key: str, change: Tensor, id: str = id, number: int = number) -> Tensor:
                change = change + errors.get((id, key), 0.0) if error_feedback else change
                draws = uplink == "int8" and not error_feedback
                rng = create_generator(SEED, "low-precision", number, id, key) if draws else None
                rounded = _rounded(key, change, uplink, rng)
                errors[id, key] = change - rounded
                return rounded

            for one in LAYERS:
                for s in "AB":
                    change = mine[one][s] - received[one][s]
                    after[one][s] = after[one][s] + shares[id] * sent(join_tensor_name(one, s), change)
            for path in HEAD:
                change = own_head[path] - head_received[path]
                head_after[path] = head_after[path] + shares[id] * sent(f"extras/{path}", change)
        server, head = after, head_after
        require_state(federation, head, server, 1e-6)


def test_error_feedback_delivers_changes_below_the_resolution() -> None:
    """Many equal changes of a quarter of int8's step reach the server with error feedback, and none does without."""
    big, small, rounds = 127.0, 0.25, 64
    change, error, total = torch.tensor([[big, small, small, small, small]]), torch.zeros(1, 5), torch.zeros(1, 5)
    for _ in range(rounds):
        rounded = _rounded("A", change + error, "int8").float()
        error = change + error - rounded
        total += rounded
    assert torch.equal(_rounded("A", change, "int8").float()[0, 1:], torch.zeros(4))
    assert float((total / rounds - change).abs().max()) <= 1.0 / rounds


def _build_sum(kind: str, problem: Problem, *, extras: bool = True) -> Method:
    key, options = SUMS[kind]
    spec = replace(problem.adapted().spec, clients=len(problem.client_ids))
    method: Method = METHODS[key](spec=spec, r=2, lora_alpha=4.0, **options)
    method = WithExtras(inner=method, policy="average") if extras else method
    return Scaffold(inner=method) if kind == "scaffold" else method


def _wrap(kind: str, problem: Problem, **options: Any) -> Federation:
    """A federation of a sum method with the wrapper, without which it is never refused."""
    inner = _build_sum(kind, problem, extras=options.pop("extras", True))
    method = LowPrecision(inner=inner, seed=SEED, **options)
    assert method.explain_refusal(inner.declare_claims()) is None
    return Federation(Double(inner=method), problem, sgd(0.1, steps=STEPS))


def _restore(tensors: Tensors) -> dict[str, Tensor]:
    """What was compressed in a message, by the name that every format shares."""
    sent, _ = split_prefix("low-precision/", tensors)
    return dict(decompress(name, value) for name, value in sent.items())


def _get_resolution(value: Tensor, format: Format) -> Tensor | float:
    """The largest error of every entry: half a unit of the last place of a float, a step of a row or column of int8."""
    if format != "int8":
        spacing = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[format]
        return spacing / 2 * value.abs() + 2.0**-25  # float16's smallest numbers lie 2^-24 apart
    return value.abs().max() / 127 * 1.0001 if value.ndim else 0.0


def _align(rounded: Federation, exact: Federation) -> None:
    """Let a federation go on from another's state and memories, with the errors that its own clients remember."""
    errors = {
        id: {name: value for name, value in party.memory.items() if name.startswith("low-precision-memory/")}
        for id, party in rounded.parties.items()
    }
    rounded.state = exact.state
    rounded.parties = {id: replace(party, memory={**party.memory, **errors[id]}) for id, party in exact.parties.items()}


def _get_errors(federation: Federation, id: str) -> Tensors:
    """What rounding removed from a client's last replies, by the name that ``_restore`` gives."""
    return split_prefix("low-precision-memory/error/", federation.parties[id].memory)[0]


@every_sum
@every_format
def test_replies_and_sums_of_every_method_are_right_within_the_formats_rounding(kind: str, format: Format) -> None:
    """Each round starts from the exact state; a message of float32 with the rounded values gives the same sum."""
    problem = Problem()
    exact = _wrap(kind, problem, uplink="float32", downlink="float32")
    rounded = _wrap(kind, problem, uplink=format, downlink="float32")
    plain = Federation(Double(inner=_build_sum(kind, problem)), problem, sgd(0.1, steps=STEPS))
    for _ in range(3):
        _align(rounded, exact)
        for federation in (plain, exact, rounded):
            federation.round()
        shares = problem.shares(problem.client_ids)
        limits: dict[str, float] = {}
        for id, reply in exact.replies.items():
            values, restored = _restore(reply.tensors), _restore(rounded.replies[id].tensors)
            assert values.keys() == restored.keys()
            for name, value in values.items():
                assert bool(((restored[name] - value).abs() <= _get_resolution(value, format)).all()), name
            client = exact.parties[id].client
            sent = rounded.method.contribute(rounded.replies[id], client)
            others = {name: value for name, value in reply.tensors.items() if not name.startswith("low-precision/")}
            in_float32 = {**others, **{f"low-precision/{name}": value for name, value in restored.items()}}
            by_float32 = exact.method.contribute(replace(reply, tensors=in_float32), client)
            assert sent.sum.keys() == by_float32.sum.keys()
            assert all(torch.equal(value, by_float32.sum[name]) for name, value in sent.sum.items())
            for name, value in exact.method.contribute(reply, client).sum.items():
                relative = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 8**0.5 / 127}[format]  # rows of 8 at most
                # Both factors of a Gram matrix have an error; its norm is at least theirs over the root of the rank.
                factor = 2 * 2**0.5 * (1 + relative) if name.endswith("/gram") else 1.0
                limits[name] = limits.get(name, 1e-6) + shares[id] * factor * relative * float(value.norm())
        for name, limit in limits.items():
            assert float((rounded.reduced.mean[name] - exact.reduced.mean[name]).norm()) <= limit, name
        for name, value in plain.state.tensors.items():
            assert close(exact.state.tensors[name], value, 1e-5), name


@every_sum
@every_format
def test_bytes_of_every_method_are_those_of_the_format_in_both_directions(kind: str, format: Format) -> None:
    """Both messages of all exchanges; what is transmitted is what plans count."""
    problem = Problem()
    federation = _wrap(kind, problem, uplink=format, downlink=format, extras=False)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}[format]
    for number in range(3):
        messages = [federation.method.sync(federation.state, party.client) for party in federation.parties.values()]
        federation.round()
        for id, elements in federation.elements.items():
            assert elements == federation.declare_claims(id, number)
        for message in (*messages, *federation.replies.values()):
            floats = {value.dtype for value in message.tensors.values()} - {torch.int32}  # indices of slots
            assert floats <= {dtype}


@pytest.mark.parametrize("kind", others_slow([kind for kind in SUMS if kind not in ("fedask", "lora-a2")], QUICK))
@pytest.mark.parametrize("format", others_slow(["bfloat16", "int8"], ["int8"]))
def test_clients_remember_what_rounding_removed_from_every_reply(kind: str, format: Format) -> None:
    """Where error feedback is refused otherwise, and after a gradient that no later reply continues, nothing is."""
    problem = Problem()
    inner = _build_sum(kind, problem)
    if inner.declare_claims().reinitializes:
        refusal = LowPrecision(inner=inner, error_feedback=True).explain_refusal(inner.declare_claims())
        assert "re-initializes" in str(refusal)
        return
    exact = _wrap(kind, problem, uplink="float32", downlink="float32")
    rounded = _wrap(kind, problem, uplink=format, downlink="float32", error_feedback=True)
    generation = exact.state.generation
    for number in range(4):
        _align(rounded, exact)
        is_renewed, generation = generation != exact.state.generation, exact.state.generation
        before = {id: _get_errors(rounded, id) for id in rounded.parties if not is_renewed}
        exact.round()
        rounded.round()
        for id, reply in exact.replies.items():
            after, restored = _get_errors(rounded, id), _restore(rounded.replies[id].tensors)
            if kind == "fed-sb" and not number:
                assert not after
                continue
            for name, value in _restore(reply.tensors).items():
                corrected = value + before.get(id, {}).get(name, 0.0)
                assert bool(((after[name] - (corrected - restored[name])).abs() <= 1e-6).all()), name
            assert any(bool(error.any()) for error in after.values())


def test_what_rounding_removed_under_earlier_coordinates_is_dropped() -> None:
    spec, client = Spec((LayerSpec("layer", 6, 4),)), Client("a", 2, 1.0, 1, 1.0)
    method = LowPrecision(inner=FedIT(spec=spec, r=2), uplink="bfloat16", error_feedback=True)
    state = method.init(Problem().adapted())
    jobs = [method.start(method.sync(replace(state, generation=number), client), client, {}, 0) for number in range(2)]
    changes = {name: torch.full_like(value, 1 / 3) for name, value in jobs[0].tensors.items()}
    first, memory = method.compress(changes, jobs[0], client, {}, 0)
    renewed, _ = method.compress(changes, jobs[1], client, memory, 1)
    continued, _ = method.compress({name: 0.0 * value for name, value in changes.items()}, jobs[0], client, memory, 1)
    assert all(torch.equal(renewed[name], value) for name, value in first.items())
    assert all(bool(value.all()) for value in continued.values())  # the errors alone


@pytest.mark.parametrize("format", FORMATS)
def test_both_messages_of_a_second_exchange_are_rounded(format: Format) -> None:
    inner = FedASK(spec=Spec((LayerSpec("layer", 6, 4),)), r=2, oversampling=1)
    method = LowPrecision(inner=inner, uplink=format, downlink=format, seed=SEED)
    rng = torch.Generator().manual_seed(0)
    B, A, Y = (torch.randn(shape, generator=rng) for shape in ((6, 2), (2, 4), (6, 3)))
    tensors, client, state = {"layer/B": B, "layer/A": A}, Client("a", 2, 1.0, 1, 1.0), ServerState(round=3)
    first = Reduced({"layer/Y": Y})
    order = method.build_second_order(state, first)
    Q = _rounded("layer/Q", inner.build_second_order(state, first).tensors["layer/Q"], format).float()
    assert dict(decompress(name, value) for name, value in order.tensors.items()).keys() == {"layer/Q"}
    reply = method.build_second_reply(order, tensors, client, 3)
    P = inner.build_second_reply(Message({"layer/Q": Q}), tensors, client, 3).tensors["layer/P"]
    name = "low-precision-whole/layer/P"
    draws = create_generator(SEED, "low-precision", 3, "a", name) if format == "int8" else None
    summed = method.contribute(reply, client).sum
    assert summed.keys() == {"layer/P"}
    assert torch.equal(summed["layer/P"].double(), _rounded(name, P, format, draws))
    assert compute_payload_size(reply) == {"bfloat16": 2 * 12, "float16": 2 * 12, "int8": 12 + 3 * 4}[format]


@dataclass(frozen=True, kw_only=True)
class _SendsChanges(Wrapper):
    """A method that sends changes, under names of their own: ``layer/dA``."""

    def declare_claims(self) -> Claims:
        return replace(self.inner.declare_claims(), sends="changes")

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        result, memory = self.inner.finish(job, trained, client, memory, round)
        changes = {name.replace("/", "/d"): value - job.tensors[name] for name, value in result.tensors.items()}
        return replace(result, tensors=changes), memory

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        start = compute_common_start(self.inner, state)
        mean = {name: start[name] + reduced.mean[name.replace("/", "/d")] for name in start}
        return self.inner.update(state, replace(reduced, mean=mean))


def test_replies_that_are_changes_already_are_rounded_as_they_are() -> None:
    """Nothing is subtracted at the client, nor added at the server; the result is that of the method's own values."""
    problem = Problem()
    inner = FedIT(spec=problem.adapted().spec, r=2, lora_alpha=4.0)
    values, changes = (
        Federation(Double(inner=LowPrecision(inner=method)), problem, sgd(LR, steps=STEPS))
        for method in (inner, _SendsChanges(inner=inner))
    )
    for federation in (values, changes):
        federation.round()
    for id, reply in values.replies.items():
        sent, restored = _restore(changes.replies[id].tensors), _restore(reply.tensors)
        assert sent.keys() == {f"low-precision-whole/{name.replace('/', '/d')}" for name in restored}
        for name, value in restored.items():
            assert torch.equal(sent[f"low-precision-whole/{name.replace('/', '/d')}"], value)
    for name, value in values.state.tensors.items():
        assert close(changes.state.tensors[name], value, 1e-6)


def test_a_client_may_send_fewer_slots_and_none_of_a_layer_but_the_whole_head() -> None:
    problem = Problem(clients=1)
    inner = WithExtras(inner=LoRAA2(spec=problem.adapted().spec, r=2), policy="average")
    method, client = LowPrecision(inner=inner, uplink="int8"), Client("a", 2, 1.0, 1, 1.0)
    expected = build_untrained_reply(method, method.sync(method.init(problem.adapted()), client), client, 0)
    layer = "low-precision/columns/low-precision-whole/fc1/dB"
    for slots in (1, 0):
        fewer = {
            layer: compress("x", torch.ones(8, slots), "int8")[1],
            "fc1/slots": torch.arange(slots, dtype=torch.int32),
        }
        summed = validate_reply(method, replace(expected, tensors={**expected.tensors, **fewer}), client, expected)
        assert summed.contribution.sum["fc1/dB"].any(0).tolist() == [slots == 1, False]
    head = next(name for name in expected.tensors if name.endswith("extras/head.weight"))
    smaller = {**expected.tensors, head: expected.tensors[head][:1]}
    with pytest.raises(ValueError, match=r"head\.weight is \[1, "):
        validate_reply(method, replace(expected, tensors=smaller), client, expected)


def test_refusals() -> None:
    spec = Problem(clients=1).adapted().spec
    stacked, renewed = FLoRA(spec=spec), FedSVD(spec=spec)
    for error_feedback in (False, True):  # it is refused with and without
        wrapped = LowPrecision(inner=stacked, error_feedback=error_feedback)
        assert "single replies" in str(wrapped.explain_refusal(stacked.declare_claims()))
    refusal = LowPrecision(inner=renewed, error_feedback=True).explain_refusal(renewed.declare_claims())
    assert "re-initializes" in str(refusal)
    assert LowPrecision(inner=renewed).explain_refusal(renewed.declare_claims()) is None
    silent, chosen = LocalOnly(spec=spec), LoRAA2(spec=spec)
    assert "hold nothing" in str(LowPrecision(inner=silent).explain_refusal(silent.declare_claims()))
    refusal = LowPrecision(inner=chosen, error_feedback=True).explain_refusal(chosen.declare_claims())
    assert "other slots" in str(refusal)
    wide = LoRAA2(spec=spec, r=6)  # the layers have 5 and 8 inputs
    refusal = LowPrecision(inner=wide, uplink="int8").explain_refusal(wide.declare_claims())
    assert "a scale for each slot" in str(refusal)
    assert LowPrecision(inner=wide).explain_refusal(wide.declare_claims()) is None


def test_values_that_float16_cannot_hold_name_the_option() -> None:
    problem = Problem(clients=1, dtype=torch.float32)
    federation = Federation(
        LowPrecision(inner=FedIT(spec=problem.adapted().spec, r=2), downlink="float16"), problem, sgd(LR)
    )
    name = join_tensor_name("fc1", "A")
    federation.state.tensors[name].fill_(1e5)
    with refused("method.wrappers"):
        federation.round()


TAU = 2
SERVER_LR, BETAS, ADAPTIVITY = 0.05, (0.8, 0.9), 1e-2
ADAPTIVE: dict[str, Any] = {"lr": SERVER_LR, "beta1": BETAS[0], "tau": ADAPTIVITY}


def adam_v(v: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return BETAS[1] * v + (1 - BETAS[1]) * delta * delta


def yogi_v(v: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    square = delta * delta
    sign = torch.where(v > square, 1.0, torch.where(v < square, -1.0, 0.0))
    return v - (1 - BETAS[1]) * square * sign


def adagrad_v(v: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return v + delta * delta


class AdaptiveOracle:
    """Algorithm 2 for one tensor; ``rule`` is the line in which the three differ."""

    def __init__(self, rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.rule = rule
        self.m = torch.zeros(())
        self.v = torch.tensor(ADAPTIVITY**2, dtype=torch.float64)

    def step(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        delta = mean - x
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * delta
        self.v = self.rule(self.v, delta)
        return x + SERVER_LR * self.m / (torch.sqrt(self.v) + ADAPTIVITY)


class Momentum:
    """FedAvgM for one tensor: ``v <- 0.8 v + D;  x <- x + 0.05 v``."""

    def __init__(self) -> None:
        self.v = torch.zeros(())

    def step(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        self.v = 0.8 * self.v + (mean - x)
        return x + 0.05 * self.v


OPTIMIZERS: dict[str, tuple[type[ServerOptimizer], dict[str, Any], Callable[[], Any]]] = {
    "fedadam": (FedAdam, {**ADAPTIVE, "beta2": BETAS[1]}, lambda: AdaptiveOracle(adam_v)),
    "fedyogi": (FedYogi, {**ADAPTIVE, "beta2": BETAS[1]}, lambda: AdaptiveOracle(yogi_v)),
    "fedadagrad": (FedAdagrad, ADAPTIVE, lambda: AdaptiveOracle(adagrad_v)),
    "fedavgm": (FedAvgM, {"lr": 0.05, "momentum": 0.8}, Momentum),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fedloru_under_it_matches_the_oracle_and_forgets_at_accumulations(name: str) -> None:
    problem = Problem()
    cls, options, oracle = OPTIMIZERS[name]
    inner = FedLoRU(spec=problem.adapted().spec, seed=4, r=2, lora_alpha=4.0, tau=TAU)
    wrapped = cls(inner=WithExtras(inner=inner, policy="average"), **options)
    federation = Federation(Double(inner=wrapped), problem, sgd(LR, steps=STEPS))
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)

    def fresh(generation: int) -> dict:
        tensors = inner.create_factors(generation)
        return {one: {s: tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}

    server = fresh(0)
    servers = {key: oracle() for key in [(one, s) for one in LAYERS for s in "AB"] + list(HEAD)}
    for number, positions in enumerate([(0, 1, 2, 3), (0, 2), (1, 2, 3), (0, 1, 2, 3), (1, 3)]):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares = problem.shares(cohort)
        mean = {one: {s: torch.zeros_like(server[one][s]) for s in "AB"} for one in LAYERS}
        head_mean = {name: torch.zeros_like(head[name]) for name in HEAD}
        for id in cohort:
            mine, own_head = copied(server), dict(head)
            descend(problem, id, W, own_head, mine, SCALING, LR, STEPS)
            for one in LAYERS:
                for s in "AB":
                    mean[one][s] += shares[id] * mine[one][s]
            for name in HEAD:
                head_mean[name] += shares[id] * own_head[name]
        for one in LAYERS:
            for s in "AB":
                server[one][s] = servers[one, s].step(server[one][s], mean[one][s])
        for name in HEAD:
            head[name] = servers[name].step(head[name], head_mean[name])
        if (number + 1) % TAU == 0:
            for one in LAYERS:
                W[one] = W[one] + SCALING * server[one]["B"] @ server[one]["A"]
                for s in "AB":
                    servers[one, s] = oracle()
            server = fresh((number + 1) // TAU)
            kept = {key.partition("/")[2].partition("/")[2] for key in federation.state.memory}
            assert kept == {f"extras/{key}" for key in HEAD}  # the head was not re-initialized
        for one in LAYERS:
            assert close(federation.get_weight(one), W[one] + SCALING * server[one]["B"] @ server[one]["A"])
        require_state(federation, head, server)


def test_only_what_was_transmitted_gathers_moments() -> None:
    problem = Problem(clients=2)
    wrapped = FedAdam(inner=RoLoRA(spec=problem.adapted().spec, r=2))
    federation = Federation(Double(inner=wrapped), problem, sgd(LR))
    federation.round()
    assert {name for name in federation.state.memory if "/m/" in name} == {
        "FedAdam/m/" + join_tensor_name(one, "B") for one in LAYERS
    }
    frozen = {one: federation.state.tensors[join_tensor_name(one, "B")] for one in LAYERS}
    federation.round()
    for one in LAYERS:  # the frozen factor does not move by its stale moments
        assert torch.equal(federation.state.tensors[join_tensor_name(one, "B")], frozen[one])


def test_refused_where_a_mean_change_has_no_meaning() -> None:
    spec = Problem(clients=2).adapted().spec
    cases = {
        "stack": FLoRA(spec=spec),
        "re-initializes": FedLoRU(spec=spec, tau=1),
        "hold changes already": FedPAQ(inner=FedIT(spec=spec)),
        "hold nothing": LocalOnly(spec=spec),
    }
    for words, method in cases.items():
        refusal = FedAdam(inner=method).explain_refusal(method.declare_claims())
        assert words in refusal
    residual = replace(METHODS["fedit"].claims, moves_base=True)
    assert "moves the base" in str(FedAdam(inner=FedIT(spec=spec)).explain_refusal(residual))
    assert FedAdam(inner=FedIT(spec=spec)).explain_refusal(FedLoRU(spec=spec, tau=2).declare_claims()) is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_along_the_mean_is_not_the_mean(name: str) -> None:
    cls, options, _ = OPTIMIZERS[name]
    inner = RoLoRA(spec=Problem(clients=2).adapted().spec)
    assert inner.declare_claims().exact
    assert not cls(inner=inner, **options).declare_claims().exact


def test_a_reply_that_is_not_what_was_claimed_is_an_error() -> None:
    """LoRA-A2's replies are changes, whatever its claims say."""
    problem = Problem(clients=2)
    method = FedAdam(inner=LoRAA2(spec=problem.adapted().spec, r=2))
    federation = Federation(Double(inner=method), problem, sgd(LR))
    with refused("method.wrappers"):
        federation.round()


ROWS, COLUMNS = 3, 2
RULES: dict[type[ServerOptimizer], Callable[[float, float], float]] = {
    FedAdam: lambda v, square: 0.75 * v + 0.25 * square,
    FedYogi: lambda v, square: v + (0.25 * square if v < square else -0.25 * square),
    FedAdagrad: lambda v, square: v + square,
}


@pytest.mark.parametrize("cls", RULES)
def test_adaptive_steps_are_those_of_a_loop_over_entries(cls: type[Adaptive]) -> None:
    """From v = tau^2 and without bias correction; FedAdagrad has no momentum unless the user asks for it."""
    beta1, options = (0.0, {}) if cls is FedAdagrad else (0.6, {"beta1": 0.6, "beta2": 0.75})
    optimizer = cls(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=0.5, tau=0.1, **options)
    changes = torch.randn(5, ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moments = {
        kind: torch.full((ROWS, COLUMNS), optimizer.get_initial(kind), dtype=torch.float64)
        for kind in optimizer.moments
    }
    first, second = ([[start] * COLUMNS for _ in range(ROWS)] for start in (0.0, 0.1**2))
    for change in changes:
        step, moments = optimizer.step(change, moments)
        for row, values in enumerate(change.tolist()):
            for column, value in enumerate(values):
                first[row][column] = beta1 * first[row][column] + (1 - beta1) * value
                second[row][column] = RULES[cls](second[row][column], value**2)
                expected = 0.5 * first[row][column] / (math.sqrt(second[row][column]) + 0.1)
                assert float(step[row, column]) == pytest.approx(expected, rel=1e-12)


def test_momentum_of_fedadagrad_may_be_requested() -> None:
    optimizer = FedAdagrad(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=2.0, beta1=0.5, tau=1.0)
    step, moments = optimizer.step(torch.tensor([4.0]), {"m": torch.tensor([2.0]), "v": torch.tensor([9.0])})
    assert moments["m"].tolist() == [3.0]  # 0.5 * 2 + 0.5 * 4
    assert moments["v"].tolist() == [25.0]  # 9 + 4^2
    assert step.tolist() == [1.0]  # 2 * 3 / (5 + 1)


@dataclass(frozen=True, kw_only=True)
class Recorded(Adaptive):
    """A second moment that shows what it is given: ``v + 3 D^2``."""

    def compute_second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + 3 * squared


def test_a_step_divides_the_first_moment_by_the_root_of_the_new_second_one() -> None:
    """The second moment is updated first, and tau is added to its root, not under it."""
    optimizer = Recorded(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=6.0, beta1=0.75, tau=1.0)
    change = torch.tensor([[1.0, -2.0]])
    before = {"m": torch.tensor([[1.0, 2.0]]), "v": torch.tensor([[1.0, 4.0]])}
    step, after = optimizer.step(change, before)
    assert after["m"].tolist() == [[1.0, 1.0]]  # 0.75 m + 0.25 D
    assert after["v"].tolist() == [[4.0, 16.0]]
    assert step.tolist() == [[2.0, pytest.approx(1.2)]]  # 6 m / (sqrt(v) + 1)
    assert before["v"].tolist() == [[1.0, 4.0]]
