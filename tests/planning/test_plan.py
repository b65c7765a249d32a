"""What is planned is what a run measures: bytes, trainable numbers, memory; rounds on shapes compute no value."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch

import fedspan
from fedspan.assembly.head import begin
from fedspan.assembly.run import Prepared, prepare
from fedspan.core.lowrank import LowRank
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic, reply
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Job, LayerSpec, Message, Spec, Trained
from fedspan.federation.progress import Progress
from fedspan.methods.fedgalore import FedGaLore
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.registry import METHODS
from fedspan.methods.slora import SLoRA
from fedspan.planning.plan import PlannedModel, plan_run, prepare_model
from fedspan.planning.shape_inference import ClientExchange, ShapeInference, count_traffic, rewrap_method, unwrap_method
from fedspan.planning.traffic import Computation, StandIn, count_layer
from fedspan.runs.ledger import Ledger, Totals
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedprox import FedProx
from helpers import tiny
from helpers.families import UNLIKE, methods_by_family, others_slow
from helpers.refusals import refused

RANK = 3


def test_an_empty_model_has_the_layers_and_parameters_of_a_loaded_one(
    planned: PlannedModel, prepared: Prepared
) -> None:
    loaded = prepared.engine.adapted
    assert planned.adapted.spec == loaded.spec
    sizes = [sum(p.numel() for p in each.model.parameters()) for each in (planned.adapted, loaded)]
    assert sizes[0] == sizes[1]
    assert planned.base == sum(
        p.numel() * p.element_size() for p in (*loaded.model.parameters(), *loaded.model.buffers())
    )
    assert planned.adapted.device.type == "meta"


@pytest.mark.parametrize("kind", others_slow(["class-means", "lda", "random"], ["lda"]))
def test_the_heads_statistics_are_planned(kind: str, tiny_folder: Path) -> None:
    config = tiny.config(tiny_folder, model={"head_init": kind})
    prepared = prepare(config)
    begin(prepared.federation, prepared.head)
    up = {one.payload for one in prepared.federation.pop_events().transfers if one.direction == "up"}
    planned = plan_run(config, prepare_model(config, len(tiny.LABELS)), clients=len(tiny.SITES))
    assert (up or {0}) == {planned.head_up}


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_what_trains_is_what_moves(key: str, prepared: Prepared, planned: PlannedModel, tiny_folder: Path) -> None:
    """The largest number of elements that any job of the first two rounds moves (a probing first round aside)."""
    config = tiny.config(tiny_folder, method={"name": key, "r": RANK, "lora_alpha": 6})
    plan = plan_run(config, planned, clients=len(tiny.SITES))
    run = tiny.variant(prepared, config)
    method, progress, most = run.federation.method, run.federation.begin(), 0
    for _ in range(2):
        for client_data in run.federation.clients.values():
            job = method.start(
                method.sync(progress.state, client_data.client), client_data.client, {}, progress.state.round
            )
            most = max(most, sum(job.tensors[name].numel() for name in job.trainable_names))
        progress = run.federation.run_round(progress).progress
    assert plan.trainable >= most - sum(p.numel() for p in planned.adapted.extras.values())
    assert plan.trainable <= plan.parameters
    assert plan.client.gradients == 4 * plan.trainable
    assert plan.client.total > plan.client.base == planned.base


def test_steps_follow_from_examples_or_are_given(planned: PlannedModel, tiny_folder: Path) -> None:
    config = tiny.config(tiny_folder)
    assert plan_run(config, planned, clients=4).all_steps == 2 * 3 * 2
    partition = {"validation": 0.1, "test": 0.1}
    epochs = tiny.config(tiny_folder, partition=partition, training={"local_steps": None, "local_epochs": 2})
    assert plan_run(epochs, planned, clients=4).steps is None
    assert plan_run(epochs, planned, clients=4, examples=200).steps == 2 * 10


def test_a_natural_partition_needs_the_number_of_clients(planned: PlannedModel, tiny_folder: Path) -> None:
    with refused("clients"):
        plan_run(tiny.config(tiny_folder), planned)


def test_narrow_and_quantized_bases_take_less(planned: PlannedModel, tiny_folder: Path) -> None:
    half = prepare_model(tiny.config(tiny_folder, model={"dtype": "bfloat16"}), len(tiny.LABELS))
    quarter = prepare_model(tiny.config(tiny_folder, model={"quantization": "nf4"}), len(tiny.LABELS))
    assert quarter.base < planned.base
    assert half.base < 0.7 * planned.base
    config = tiny.config(tiny_folder)
    kept = [plan_run(config, each, clients=4).client.activations for each in (half, planned)]
    assert kept[0] < kept[1]


ROUNDS, RANK = 4, 3


def count_run(prepared: Prepared, path: Path, start: Progress | None = None) -> Totals:
    """The ledger of a federation of a few rounds."""
    federation = prepared.federation
    progress = start or federation.begin()
    with Ledger(path) as ledger:
        for number in range(1, federation.settings.rounds + 1):
            result = federation.run_round(progress)
            progress = result.progress
            for one in result.transfers:
                ledger.record(number, one.client, one.direction, one.bytes, one.payload)
        ledger.commit()
        return ledger.totals


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_bytes_are_the_ledger_s(
    key: str, prepared: Prepared, planned: PlannedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    """Every method with the head as it likes it, every client in every round."""
    changes = {"federation": {"rounds": ROUNDS, "clients_per_round": None}}
    never_prunes = {"gamma": 1.0} if key == "hetlora" else {}
    config = tiny.config(tiny_folder, method={"name": key, "r": RANK, "lora_alpha": 6, **never_prunes}, **changes)
    totals = count_run(tiny.variant(prepared, config), tmp_path / "ledger.jsonl")
    plan = plan_run(config, planned, clients=len(tiny.SITES))
    if METHODS[key].claims.adaptive_rank:  # the largest rank is planned
        assert not plan.exact
        assert plan.first_down * plan.clients == totals.count_round("down", 1).payload
        assert totals.count_round("down", 1).payload < totals.run("down").payload <= plan.bytes_down
    else:
        assert plan.exact
        assert plan.bytes_down == totals.run("down").payload
    assert plan.bytes_up == totals.run("up").payload
    assert plan.first_up * plan.clients == totals.count_round("up", 1).payload
    assert plan.first_down * plan.clients == totals.count_round("down", 1).payload


OTHER_STARTS = {"federa", "fedsa-lora", "florg", "fr-lora", "pfedlora"}
"""Methods whose orders to train the head hold more: another start, a base that moves, or a model for each client."""


@pytest.mark.parametrize("key", methods_by_family(quick=("fedit", "fedask")))
def test_rounds_of_the_head_alone_are_the_ledger_s(key: str, tiny_folder: Path, tmp_path: Path) -> None:
    changes = {"federation": {"rounds": ROUNDS, "clients_per_round": None}}
    never_prunes = {"gamma": 1.0} if key == "hetlora" else {}
    method = {"name": key, "r": RANK, "lora_alpha": 6, **never_prunes}
    config = tiny.config(tiny_folder, method=method, model={"head_rounds": 2, "extras": "average"}, **changes)
    run = prepare(config)
    totals = count_run(run, tmp_path / "ledger.jsonl", begin(run.federation, run.head))
    plan = plan_run(config, prepare_model(config, len(tiny.LABELS)), clients=len(tiny.SITES))
    assert not plan.exact
    assert plan.first_up * plan.clients == totals.count_round("up", 1).payload
    assert plan.bytes_up == totals.run("up").payload
    if key not in OTHER_STARTS and not METHODS[key].claims.adaptive_rank:
        assert plan.first_down * plan.clients == totals.count_round("down", 1).payload
        assert plan.bytes_down == totals.run("down").payload


@pytest.mark.parametrize(
    "wrapper",
    [
        "scaffold",
        {"name": "fedpaq", "bits": 5},
        pytest.param("fedprox", marks=pytest.mark.slow),
        pytest.param("fedadam", marks=pytest.mark.slow),
    ],
)
def test_wrappers_are_planned_too(
    wrapper: Any, prepared: Prepared, planned: PlannedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"federation": {"rounds": ROUNDS, "clients_per_round": None}}
    changes["training"] = {"optimizer": "sgd", "max_grad_norm": 0.0}
    config = tiny.config(tiny_folder, method={"name": "fedit", "r": RANK, "wrappers": [wrapper]}, **changes)
    totals = count_run(tiny.variant(prepared, config), tmp_path / "ledger.jsonl")
    plan = plan_run(config, planned, clients=len(tiny.SITES))
    assert (plan.bytes_down, plan.bytes_up) == (totals.run("down").payload, totals.run("up").payload)


def test_ranks_that_clients_prune_are_planned_as_they_were(
    prepared: Prepared, planned: PlannedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    changes = {"federation": {"rounds": ROUNDS, "clients_per_round": None}}
    config = tiny.config(tiny_folder, method={"name": "hetlora", "r": RANK, "lora_alpha": 6}, **changes)
    totals = count_run(tiny.variant(prepared, config), tmp_path / "ledger.jsonl")
    plan = plan_run(config, planned, clients=len(tiny.SITES))
    assert not plan.exact
    assert totals.run("up").payload < plan.bytes_up
    assert totals.run("down").payload <= plan.bytes_down


def test_ranks_and_cohorts(prepared: Prepared, planned: PlannedModel, tiny_folder: Path, tmp_path: Path) -> None:
    """A method whose messages do not depend on who was away is planned to the byte for cohorts too."""
    federation = {"rounds": ROUNDS, "clients_per_round": 2, "ranks": {"east": 1, "west": 2}}
    config = tiny.config(tiny_folder, method={"name": "hetlora", "r": RANK}, federation=federation)
    totals = count_run(tiny.variant(prepared, config), tmp_path / "ledger.jsonl")
    by_position = {**federation, "ranks": {"client-00": 1, "client-03": 2}}
    ordered = tiny.config(tiny_folder, method={"name": "hetlora", "r": RANK}, federation=by_position)
    plan = plan_run(ordered, planned, clients=len(tiny.SITES))
    assert not plan.exact
    assert plan.bytes_up == totals.run("up").payload
    assert plan.cohort == 2


def test_the_public_function_fills_in_what_the_catalogue_knows(tiny_folder: Path) -> None:
    values = tiny.settings(tiny_folder)
    values["partition"] = {"clients": 4}
    values["data"] = {"dataset": "sst2", "train": str(tiny_folder / "missing.tsv"), "test": "nowhere.tsv"}
    values["training"] = {"local_epochs": 1, "batch_size": 10}
    found = fedspan.plan(values, overrides=["data.max_examples=500"])
    assert (found.clients, found.steps) == (4, 10)
    # three of 16 x 16 and two of 24 x 16, of rank 2; a head for 2 labels
    assert found.trainable == 2 * (3 * 32 + 2 * 40) + 2 * 17


def test_an_architecture_takes_the_place_of_the_model_s_config(tiny_folder: Path) -> None:
    values = tiny.settings(tiny_folder)
    values["partition"] = {"clients": 4}
    values["model"] = {"name": "nobody/knows-it", "target_modules": ["query"]}
    encoder = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    found = fedspan.plan(values, architecture={"model_type": "roberta", **encoder}, labels=4)
    assert found.layers == 3
    elsewhere = ["data.train=nowhere.csv"]
    with refused("data.labels"):
        fedspan.plan(values, architecture={"model_type": "roberta", **encoder}, overrides=elsewhere)
    with refused("model.name"):
        fedspan.plan(values, labels=4)


def test_what_a_local_file_tells_need_not_be_said(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder)  # by site: a natural partition
    run = fedspan.run(values, tmp_path / "run", overrides=["federation.rounds=1"])
    found = fedspan.plan(values, overrides=["federation.rounds=1"])
    expected = fedspan.plan(values, overrides=["federation.rounds=1"], labels=4, clients=4, examples=96)
    assert found == expected
    assert found.clients == len(run.by_client) == 4
    rows = pd.read_csv(values["data"]["train"], dtype=str)
    for site, own in rows.groupby(values["partition"]["column"]):
        own.drop(columns=values["partition"]["column"]).to_csv(tmp_path / f"{site}.csv", index=False)
    each = str(tmp_path / f"{{{values['partition']['column']}}}.csv")
    assert fedspan.plan(values, overrides=["federation.rounds=1", f"data.train={each}"]) == found
    gone = values | {"data": {**values["data"], "train": str(tmp_path / "elsewhere.csv")}}
    with refused("data.labels"):
        fedspan.plan(gone)


WIDE, TALL = LayerSpec("wide", 4, 9), LayerSpec("tall", 9, 6)


@pytest.mark.parametrize("layer", [WIDE, TALL], ids=["wide", "tall"])
@pytest.mark.parametrize("rank", [1, 3])
def test_lora_trains_and_holds_its_factors(layer: LayerSpec, rank: int) -> None:
    factors = rank * (layer.out_features + layer.in_features)
    counts = count_layer(METHODS["fedit"](spec=Spec((layer,), clients=5), r=rank), layer, rank)
    assert counts.trained == (factors, factors)  # in the first two rounds
    assert (counts.held, counts.stored) == (factors, factors)
    assert counts.computation == Computation(rank=rank, moves=frozenset("AB"))


def test_frozen_factors_are_held_and_do_not_move() -> None:
    """FFA-LoRA trains B alone, and RoLoRA one factor after the other."""
    counts = count_layer(METHODS["ffa-lora"](spec=Spec((WIDE,), clients=5), r=2), WIDE, 2)
    assert set(counts.trained) == {2 * 4}
    assert counts.held == 2 * (4 + 9)
    assert counts.computation.moves == frozenset("B")
    turns = count_layer(METHODS["rolora"](spec=Spec((WIDE,), clients=5), r=2), WIDE, 2)
    assert turns.trained == (2 * 4, 2 * 9)


def test_full_fine_tuning_trains_a_whole_weight() -> None:
    counts = count_layer(METHODS["fedavg"](spec=Spec((TALL,), clients=5)), TALL, 1)
    assert set(counts.trained) == {9 * 6}
    assert counts.computation.rank == 0
    assert counts.computation.moves


@pytest.mark.parametrize(
    ("computation", "shapes"),
    [
        (Computation(), {}),
        (Computation(rank=2), {"A": (2, 9), "B": (4, 2)}),
        (Computation(matrix="held"), {"D": (4, 9)}),
        (Computation(base=False, weight="made", rank=3), {"A": (3, 9), "B": (4, 3), "W": (4, 9)}),
    ],
)
def test_a_stand_in_computes_as_it_is_told(computation: Computation, shapes: dict[str, tuple[int, int]]) -> None:
    stand_in = StandIn(computation)
    assert stand_in.shapes(4, 9) == shapes
    slots = {name: torch.randn(shape) for name, shape in shapes.items()}
    effective = stand_in.compute_effective(slots)
    assert effective.base is computation.base
    assert (effective.weight is None) is (computation.weight is None)
    if computation.weight is not None:
        assert effective.weight is not slots["W"]
        assert torch.equal(effective.weight, slots["W"])
    if computation.rank:
        assert isinstance(effective.pair, LowRank)
        assert (slots["B"], slots["A"]) == (effective.pair.B, effective.pair.A)
    else:
        assert effective.pair is slots.get("D")


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
