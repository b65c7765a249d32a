"""Several clients in one pass: model families, what trains beside factors, what is refused, and its worker."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.core.values import Trained
from fedspan.errors import FedspanError
from fedspan.tasks.causal import CausalLM
from fedspan.tasks.masked_lm import MaskedLanguageModel
from fedspan.tasks.seq2seq import Seq2Seq
from fedspan.tasks.task import Examples
from fedspan.tasks.token_classification import TokenClassification
from fedspan.training import stacking, worker
from fedspan.training.batched import BatchedEngine, balance, run_parallel
from fedspan.training.jobs import Assignment
from helpers import tiny, tiny_decoders, tiny_images, tiny_masked, tiny_seq2seq, tiny_tags
from helpers.families import others_slow

SGD: Mapping[str, Any] = {"optimizer": "sgd", "lr": 0.02}
EVERYBODY: Mapping[str, Any] = {"rounds": 2, "clients_per_round": None}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients shared each pass."""
    found: list[int] = []
    advance = worker.Worker.advance

    def counted(self: worker.Worker, group: Sequence[Any], examples: Examples) -> None:
        advance(self, group, examples)
        found.append(len(group))

    monkeypatch.setattr(worker.Worker, "advance", counted)
    return found


def values(kind: str, tiny_folder: Path, decoders: Path, images: Path, **changes: Any) -> dict[str, Any]:
    """A run of a kind of model."""
    training = {**SGD, **changes.pop("training", {})}
    shared: dict[str, Any] = {"federation": {**EVERYBODY}, "training": training, "engine": {"name": "batched"}}
    if kind.endswith("-lm"):
        made = tiny_decoders.settings(decoders, kind.removesuffix("-lm"), **changes)
    elif kind in ("vit", "resnet", "builtin:resnet-8"):
        made = tiny_images.settings(images, kind, **changes)
    else:
        if kind == "distilbert":
            changes["model"] = {**changes.get("model", {}), "target_modules": ["q_lin", "v_lin", "lin1", "lin2"]}
        made = tiny.settings(tiny_folder, kind, **changes)
    for section, change in shared.items():
        made[section] = {**made.get(section, {}), **change}
    return made


def same(made: dict[str, Any], clients_per_pass: int = 3, workers: int = 1) -> tuple[float, BatchedEngine]:
    """How far apart loop and batched end; the batched engine.

    Relatively, but for tensors that begin at 0 and hardly move: keys' biases, whose gradient is rounding alone.
    """
    made["engine"] = {"name": "loop"}
    expected = tiny.final_tensors(prepare(parse_config(made)))
    made["engine"] = {"name": "batched", "clients_per_pass": clients_per_pass, "workers": workers}
    prepared = prepare(parse_config(made))
    found = tiny.final_tensors(prepared)
    gaps = [
        float((value.double() - found[name].double()).norm() / value.double().norm().clamp(min=1e-3))
        for name, value in expected.items()
    ]
    return max(gaps), prepared.engine


KINDS = ("bert", "roberta", "distilbert", "gpt2", *(f"{family}-lm" for family in tiny_decoders.FAMILIES), "vit")


@pytest.mark.parametrize("kind", others_slow([*KINDS, "resnet", "builtin:resnet-8"], ["bert", "llama-lm", "resnet"]))
def test_every_family_of_models(kind: str, tiny_folder: Path, decoders: Path, images: Path, passes: list[int]) -> None:
    gap, engine = same(values(kind, tiny_folder, decoders, images))
    assert gap < 1e-5
    assert engine.refusal is None
    assert max(passes) > 1


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"lora_dropout": 0.4}},
        pytest.param({"training": {"gradient_accumulation_steps": 3, "local_steps": None}}, marks=pytest.mark.slow),
        pytest.param({"training": {"batch_size": 7, "local_steps": None}}, marks=pytest.mark.slow),
        pytest.param({"training": {"logit_adjustment": 1.0, "local_steps": None}}, marks=pytest.mark.slow),
        {"training": {"momentum": 0.9, "weight_decay": 0.1, "optimizer_state": "keep"}},
        pytest.param({"model": {"modules_to_save": ["LayerNorm", "pooler"]}}, marks=pytest.mark.slow),
        {"model": {"target_modules": ["word_embeddings", "query"]}},
        pytest.param({"model": {"pretrained": False}}, marks=pytest.mark.slow),
        pytest.param({"model": {"gradient_checkpointing": True}}, marks=pytest.mark.slow),
        pytest.param({"model": {"layers_to_transform": [1]}}, marks=pytest.mark.slow),
        pytest.param({"method": {"wrappers": [{"name": "fedprox", "mu": 0.1}]}}, marks=pytest.mark.slow),
        {"method": {"wrappers": [{"name": "scaffold"}]}},
        pytest.param(
            {"method": {"name": "hetlora", "r": 3}, "federation": {"ranks": [1, 2, 3]}}, marks=pytest.mark.slow
        ),
        {  # a kind of clients is verified after passes of another one
            "training": {"lora_dropout": 0.1},
            "method": {"name": "hetlora", "r": 2},
            "federation": {"ranks": {"east": 1, "north": 2, "west": 2, "south": 1}},
        },
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_what_trains_and_how(
    changes: dict[str, Any], tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    federation = changes.get("federation", {})
    made = values("deep-bert", tiny_folder, decoders, images, **{k: v for k, v in changes.items() if k != "federation"})
    made["federation"] = {**made["federation"], **federation}
    gap, engine = same(made)
    assert gap < 1e-5
    assert engine.refusal is None
    assert max(passes) > 1


def test_projectors_are_renewed_beside_running_statistics(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    """A client whose projectors come from its gradient keeps the statistics of its own images."""
    changes = {"training": {"lr": 0.0001}, "method": {"name": "fedgalore", "r": 2}}
    gap, engine = same(values("builtin:resnet-8", tiny_folder, decoders, images, **changes))
    assert gap < 1e-5  # with ten times the rate, rounding grows to 2e-3 on some processors
    assert engine.refusal is None
    assert max(passes) > 1


def test_a_client_without_examples_does_not_disturb_the_measuring(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stacking, "_SHARE", 1e9)
    monkeypatch.setenv("FEDSPAN_CACHE", str(tmp_path))
    prepared = prepare(tiny.config(tiny_folder, engine={"name": "batched"}, federation={"clients_per_round": None}))
    federation = prepared.federation
    empty = {id: replace(one, train=one.train[:0]) for id, one in federation.clients.items() if id != "west"}
    tiny.use_clients(federation, {**federation.clients, **empty})
    federation.run_round(federation.begin())
    assert prepared.engine.stacking is not None


def test_threads_side_by_side_on_one_base(tiny_folder: Path, decoders: Path, images: Path) -> None:
    """FLoRA moves the base that the threads share."""
    made = values("bert", tiny_folder, decoders, images, method={"name": "flora"})
    assert same(made, clients_per_pass=2, workers=2)[0] < 1e-5


def test_two_runs_have_the_same_bits(tiny_folder: Path, decoders: Path, images: Path) -> None:
    made = values("bert", tiny_folder, decoders, images)
    made["engine"] = {"name": "batched", "clients_per_pass": 2, "workers": 2}
    one, other = (tiny.final_tensors(prepare(parse_config(made))) for _ in range(2))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_model_that_mixes_examples_is_detected(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose embeddings lose their mean over the batch: alone, a client would get something else."""
    embeddings = transformers.models.bert.modeling_bert.BertEmbeddings
    forward = embeddings.forward

    def centered(self: Any, *args: Any, **options: Any) -> Tensor:
        made = forward(self, *args, **options)
        return made - made.mean(0, keepdim=True)

    monkeypatch.setattr(embeddings, "forward", centered)
    gap, engine = same(values("bert", tiny_folder, decoders, images))
    assert gap < 1e-5  # rounding, of batches without padding
    assert passes == []
    assert "predictions differ by" in engine.refusal


def test_packed_batches_train_alone(tiny_folder: Path, decoders: Path, images: Path, passes: list[int]) -> None:
    gap, engine = same(values("llama-lm", tiny_folder, decoders, images, data={"packing": True}))
    assert gap == 0.0
    assert passes == []
    assert engine.refusal == "packed batches are one row"


def test_a_loss_that_is_no_number_names_the_client(tiny_folder: Path, decoders: Path, images: Path) -> None:
    made = values("bert", tiny_folder, decoders, images, training={"lr": 1e30, "max_grad_norm": 0})
    made["engine"] = {"name": "batched", "clients_per_pass": 3, "workers": 2}
    words = r"`training.lr`: the loss of client \w+ in round [12] became (nan|inf)"
    with pytest.raises(FedspanError, match=words):
        tiny.final_tensors(prepare(parse_config(made)))


def test_moments_are_returned_to_who_asks_for_them(tiny_folder: Path, decoders: Path, images: Path) -> None:
    made = values("bert", tiny_folder, decoders, images, training={"optimizer": "adamw"})
    made["engine"] |= {"clients_per_pass": 3, "workers": 1}
    prepared = prepare(parse_config(made))
    works: dict[str, Assignment] = {}
    asked, unasked = dict[str, Trained](), dict[str, Trained]()

    def record(work: Assignment, trained: Trained) -> None:
        works[work.client], asked[work.client] = work, trained

    def finish(work: Assignment, trained: Trained) -> None:
        unasked[work.client] = trained

    prepared.federation.run_round(prepared.federation.begin(), on_trained=record)  # a diagnosis compares moments
    works = {id: replace(work, job=replace(work.job, want_moments=False)) for id, work in works.items()}
    sizes = {id: int(prepared.train.lengths[work.indices].sum()) for id, work in works.items()}  # the host's
    prepared.engine.train_all(prepared.train, sizes, works.__getitem__, finish)
    for id, trained in asked.items():
        assert set(trained.optimizer_state.moments) == {"exp_avg", "exp_avg_sq"}
        assert unasked[id].optimizer_state == replace(trained.optimizer_state, moments={})
        assert all(torch.equal(value, unasked[id].tensors[name]) for name, value in trained.tensors.items())


def test_clients_are_divided_by_their_work() -> None:
    shares = balance({"a": 5, "b": 9, "c": 4, "d": 1, "e": 4}, 2)
    assert shares == [["b", "e"], ["a", "c", "d"]]
    assert balance({"a": 1}, 1) == [["a"]]


def test_threads_are_divided_and_given_back() -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(4)
    try:
        run_parallel([lambda: seen.append(torch.get_num_threads()) for _ in range(2)])
        assert seen == [2, 2]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_client_is_evaluated_as_by_the_loop_engine(tiny_folder: Path) -> None:
    scores: list[dict[str, float]] = []
    for engine in ("loop", "batched"):
        made = prepare(parse_config({**tiny.settings(tiny_folder), "engine": {"name": engine}}))
        job = made.evaluator.build_job(made.federation.begin(), None)
        rows = made.federation.clients["east"].validation
        scores.append(made.engine.evaluate("east", job, made.train, rows, 4))
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)
    assert scores[0]["loss"] > 0


def train_in_every_second_step(engine: str, steps: int, tiny_folder: Path) -> dict[str, Tensor]:
    """The changes of a client's tensors, all of which train in the second of two steps."""
    made = prepare(parse_config({**tiny.settings(tiny_folder), "engine": {"name": engine, "workers": 1}}))
    method, clients = made.federation.method, made.federation.clients
    state, results = made.federation.begin().state, dict[str, Trained]()

    def open_job(id: str) -> Assignment:
        client = clients[id].client
        job = method.start(method.sync(state, client), client, {}, 0)
        groups = tuple(replace(group, turns=2, turn=1) for group in job.trainable)
        return Assignment(id, 0, replace(job, trainable=groups, steps=steps), clients[id].train, 0.1)

    def finish_job(assignment: Assignment, result: Trained) -> None:
        results[assignment.client] = result

    made.engine.train_all(made.train, {id: len(data.train) for id, data in clients.items()}, open_job, finish_job)
    before = open_job("east").job.tensors
    return {name: value.double() - before[name] for name, value in results["east"].tensors.items()}


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_in_which_nothing_trains_changes_nothing(steps: int, tiny_folder: Path) -> None:
    expected, changes = (train_in_every_second_step(engine, steps, tiny_folder) for engine in ("loop", "batched"))
    assert any(bool(value.any()) for value in changes.values()) == (steps > 1)
    for name, value in expected.items():
        torch.testing.assert_close(changes[name], value, rtol=1e-3, atol=1e-6)


TASKS: dict[type[Any], Callable[[Path, Path, Path], dict[str, Any]]] = {
    MaskedLanguageModel: lambda _, __, own: tiny_masked.settings(own),
    TokenClassification: lambda models, _, own: tiny_tags.settings(models, own),
    CausalLM: lambda _, decoders, __: tiny_decoders.settings(decoders, "llama"),
    Seq2Seq: lambda _, __, own: tiny_seq2seq.settings(own),
}


def test_too_little_memory_for_a_pass_names_the_setting(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(self: worker.Worker, group: Sequence[Any], examples: Examples) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(worker.Worker, "advance", advance)
    prepared = prepare(tiny.config(tiny_folder, engine={"name": "batched", "clients_per_pass": 3, "workers": 1}))
    with pytest.raises(FedspanError, match="cpu has too little memory for 3 clients in a pass") as caught:
        prepared.federation.run_round(prepared.federation.begin())
    assert caught.value.field == "engine.clients_per_pass"


@pytest.mark.parametrize("is_continuous", [False, True])
@pytest.mark.parametrize("task", others_slow(list(TASKS), [MaskedLanguageModel, TokenClassification]))
def test_what_rounding_may_flip_refuses_no_shared_pass(
    task: type[Any],
    is_continuous: bool,
    tiny_folder: Path,
    decoders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids of the largest score, and counts of right ones, differ between passes; of the losses, it is noticed."""
    predict, passes = task.predict, list[int]()

    def change(self: Any, model: Any, batch: Any, **options: Any) -> Tensor:
        predictions = predict(self, model, batch, **options)
        passes.append(len(predictions))
        columns = (
            predictions[:, : self.continuous_columns] if is_continuous else predictions[:, self.continuous_columns :]
        )
        columns += len(passes)
        return predictions

    monkeypatch.setattr(task, "predict", change)
    made = TASKS[task](tiny_folder, decoders, tmp_path)
    made["engine"] = {"name": "batched", "clients_per_pass": 3, "workers": 1}
    prepared = prepare(parse_config(made))
    prepared.federation.run_round(prepared.federation.begin())
    assert ("predictions differ" in str(prepared.engine.refusal)) == is_continuous
    assert len(passes) > 2
