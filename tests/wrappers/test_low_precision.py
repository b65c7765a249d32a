"""Rounds in low precision against rounds computed by hand, the bytes that travel, and error feedback."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.core.transfer_formats import Format, compress, decompress
from fedspan.errors import FedspanError
from fedspan.federation.serialization import compute_payload_size
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedsvd import FedSVD
from fedspan.methods.flora import FLoRA
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.low_precision import LowPrecision
from toys.oracle import copied, descend
from toys.problem import HEAD, LAYERS, Problem
from toys.rounds import Double, Federation, close, sgd

LR, SCALING, STEPS, SEED = 0.3, 2.0, 2, 9


def _rounded(name: str, value: Tensor, format: Format, rng: torch.Generator | None = None) -> Tensor:
    return decompress(*compress(name, value, format, rng))[1].double()


def _federation(problem: Problem, **options: object) -> Federation:
    inner = WithExtras(inner=FedIT(spec=problem.adapted().spec, r=2, lora_alpha=4.0), policy="average")
    return Federation(Double(inner=LowPrecision(inner=inner, seed=SEED, **options)), problem, sgd(LR, steps=STEPS))  # type: ignore[arg-type]


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
    for number, members in enumerate([(0, 1, 2, 3), (1, 3), (0, 1, 2, 3)]):
        cohort = [problem.client_ids[member] for member in members]
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
        for one in LAYERS:
            for s in "AB":
                assert close(federation.state.tensors[join_tensor_name(one, s)], server[one][s], 1e-6)
        for path in HEAD:
            assert close(federation.state.tensors[f"extras/{path}"], head[path], 1e-6)


def test_bytes_on_the_wire() -> None:
    problem = Problem(clients=1, dtype=torch.float32)
    sizes: dict[Format, int] = {}
    for format in ("float32", "bfloat16", "float16", "int8"):
        inner = FedIT(spec=problem.adapted().spec, r=2)
        federation = Federation(LowPrecision(inner=inner, uplink=format, downlink=format), problem, sgd(LR))
        message = federation.method.sync(federation.state, None)
        federation.round()
        sizes[format] = compute_payload_size(federation.replies["client-0"])
        assert compute_payload_size(message) == sizes[format]
    entries = 2 * (5 + 8 + 8 + 6)
    scales = 4 * 2 * 4  # two of A, two of B, for each of two layers
    assert sizes == {"float32": 4 * entries, "bfloat16": 2 * entries, "float16": 2 * entries, "int8": entries + scales}


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


def test_refusals() -> None:
    spec = Problem(clients=1).adapted().spec
    stacked, renewed = FLoRA(spec=spec), FedSVD(spec=spec)
    for error_feedback in (False, True):  # it is refused with and without
        wrapped = LowPrecision(inner=stacked, error_feedback=error_feedback)
        assert "single replies" in str(wrapped.explain_refusal(stacked.declare_claims()))
    refusal = LowPrecision(inner=renewed, error_feedback=True).explain_refusal(renewed.declare_claims())
    assert "re-initializes" in str(refusal)
    assert LowPrecision(inner=renewed).explain_refusal(renewed.declare_claims()) is None


def test_values_that_float16_cannot_hold_name_the_option() -> None:
    problem = Problem(clients=1, dtype=torch.float32)
    federation = Federation(
        LowPrecision(inner=FedIT(spec=problem.adapted().spec, r=2), downlink="float16"), problem, sgd(LR)
    )
    name = join_tensor_name("fc1", "A")
    federation.state.tensors[name].fill_(1e5)  # type: ignore[index]
    with pytest.raises(FedspanError, match=r"method\.wrappers.*above float16's largest"):
        federation.round()
