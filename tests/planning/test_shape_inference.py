"""Rounds on shapes: no value is computed, later rounds repeat earlier ones, and what depends on data is estimated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic, reply
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Job, LayerSpec, Message, Spec, Trained
from fedspan.methods.fedgalore import FedGaLore
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.registry import METHODS
from fedspan.methods.slora import SLoRA
from fedspan.planning.shape_inference import ClientExchange, ShapeInference, count_traffic, rewrap_method, unwrap_method
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedprox import FedProx

HUGE = LayerSpec("layer", 1 << 20, 1 << 22)
SMALL = LayerSpec("layer", 12, 20)
RUNNABLE = [key for key in METHODS if key != "lora-a2"]


def spec_of(layer: LayerSpec, clients: int = 4) -> Spec:
    return Spec((layer,), clients=clients)


@pytest.mark.parametrize("key", RUNNABLE)
def test_a_layer_of_four_million_million_weights_is_run(key: str) -> None:
    """16 TiB in float32: any operation on values would end the process."""
    inference = ShapeInference(METHODS[key](spec=spec_of(HUGE), r=8), [8])
    for _ in range(7):
        exchange = inference.run_round([8] * 3)[8]
        tensors = (*exchange.down.tensors.values(), *exchange.up.tensors.values(), *exchange.jobs[0].tensors.values())
        assert {tensor.device.type for tensor in tensors} <= {"meta"}
    assert inference.state.round == 7


def test_outside_of_it_tensors_have_values_again() -> None:
    ShapeInference(FedIT(spec=spec_of(HUGE)), [8]).run_round([8])
    assert float(torch.ones(3).sum()) == 3.0
    assert torch.linalg.qr(torch.eye(2))[0].device.type == "cpu"


@pytest.mark.parametrize(
    "method",
    [
        FedLoRU(spec=spec_of(SMALL), r=9, tau=3),
        SLoRA(spec=spec_of(SMALL), r=2, sparse_rounds=4, density=0.5),
        FedGaLore(spec=spec_of(SMALL), r=2, adaptive_refreshes=7),
        METHODS["rolora"](spec=spec_of(SMALL), r=2),
        METHODS["flora"](spec=spec_of(SMALL), r=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_rounds_that_repeat_are_those_that_would_be_run(method: RegisteredMethod) -> None:
    """Sixty rounds, of which fewer than twenty are run, against all sixty run one by one."""
    cohorts = [[method.r] * 3] * 60
    inference = ShapeInference(method, [method.r])
    expected = [inference.run_round(cohort)[method.r].traffic for cohort in cohorts]
    assert [row[method.r] for row in count_traffic(method, [method.r], cohorts)] == expected
    assert len(set(expected)) > 1


def test_cohorts_of_other_ranks_change_what_comes_down() -> None:
    """FLoRA's factors are stacked: ranks 2 + 3, then 3 + 4, of 300 elements each, in turn to the last round."""
    cohorts = [[2, 3], [3, 4]] * 30
    rows = count_traffic(METHODS["flora"](spec=spec_of(LayerSpec("layer", 100, 200))), [2, 3, 4], cohorts)
    assert [row[2].down for row in rows[1:5]] == [4 * 300 * 5, 4 * 300 * 7, 4 * 300 * 5, 4 * 300 * 7]
    assert rows[59][4] == Traffic(down=4 * 300 * 5, up=4 * 300 * 4)


@pytest.mark.parametrize("bits", [2, 5, 8, 16])
def test_quantized_replies_have_their_packed_size_and_leave_the_state_s_shapes(bits: int) -> None:
    """A norm of 4 bytes, then the bits of all entries, padded to a byte: 2 x 20 entries of A, 12 x 2 of B."""
    inference = ShapeInference(FedPAQ(inner=FedIT(spec=spec_of(SMALL), r=2), bits=bits), [2])
    before = {name: (value.shape, value.dtype) for name, value in inference.state.tensors.items()}
    up = inference.run_round([2, 2])[2].up
    assert {tensor.dtype for tensor in up.tensors.values()} == {torch.uint8}
    packed = {name.removeprefix("fedpaq/"): len(tensor) for name, tensor in up.tensors.items()}
    assert packed == {"layer/A": 4 + -(-40 * bits // 8), "layer/B": 4 + -(-24 * bits // 8)}
    assert {name: (value.shape, value.dtype) for name, value in inference.state.tensors.items()} == before


def test_runs_that_differ_in_the_partition_only_share_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal method with equal cohorts is not run again; another option, or another cohort, is."""
    rounds: list[int] = []
    run_round = ShapeInference.run_round

    def counted(self: ShapeInference, cohort: Sequence[int]) -> dict[int, ClientExchange]:
        rounds.append(len(cohort))
        return run_round(self, cohort)

    monkeypatch.setattr(ShapeInference, "run_round", counted)
    layer = LayerSpec("layer", 41, 43)  # in no other test
    first = count_traffic(FedIT(spec=spec_of(layer), r=2), [2], [[2, 2]] * 3)
    assert rounds == [2, 2, 2]
    assert count_traffic(FedIT(spec=spec_of(layer), r=2), [2], [[2, 2]] * 3) == first
    assert len(rounds) == 3
    count_traffic(METHODS["ffa-lora"](spec=spec_of(layer), r=2), [2], [[2, 2]] * 3)
    count_traffic(FedIT(spec=spec_of(layer), r=2), [2], [[2, 2, 2]] * 3)
    assert len(rounds) == 9


def test_a_method_that_depends_on_data_is_estimated() -> None:
    method = METHODS["lora-a2"](spec=spec_of(SMALL), r=4)
    wrapped = FedProx(inner=WithExtras(inner=method, policy="average"))
    rows = count_traffic(wrapped, [2, 4], [[2, 4]] * 3)
    assert rows[0] == {2: Traffic(0, 4 * 2 * 13), 4: Traffic(0, 4 * 4 * 13)}
    assert rows[1] == {2: Traffic(4 * 4 * 12, 4 * 2 * 21), 4: Traffic(4 * 4 * 12, 4 * 4 * 21)}


@dataclass(frozen=True, kw_only=True)
class Deciding(RegisteredMethod):
    """FedIT that sends A only if a value says so."""

    claims: ClassVar[Claims] = FedIT.claims
    init_A: ClassVar[str] = "kaiming"  # read by FedIT.init
    init, sync, start, contribute, update = FedIT.init, FedIT.sync, FedIT.start, FedIT.contribute, FedIT.update

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        message = reply(job, trained)
        a, b = join_tensor_name("layer", "A"), join_tensor_name("layer", "B")
        if message.tensors[b].norm() > message.tensors[a].norm():
            return message, memory
        assert float(message.tensors[a].sum()) == int(message.tensors[a][0, 0]) == 1
        return Message({b: message.tensors[b]}), memory


def test_a_comparison_is_false_and_a_number_is_one() -> None:
    exchange = ShapeInference(Deciding(spec=spec_of(SMALL), r=2), [2]).run_round([2])[2]
    assert set(exchange.up.tensors) == {"layer/B"}


def test_wrappers_around_another_method() -> None:
    inner, other = FedIT(spec=spec_of(SMALL)), FedIT(spec=spec_of(HUGE))
    wrapped = FedProx(inner=WithExtras(inner=inner, policy="local"))
    assert unwrap_method(wrapped) is inner
    moved = rewrap_method(wrapped, other)
    assert unwrap_method(moved) is other
    assert isinstance(moved, FedProx)
    assert isinstance(moved.inner, WithExtras)
    assert moved.inner.policy == "local"
