"""A hostile server's orders and configs: what exceeds a node's limits is refused, and under noise no failure tells."""

import json
import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.assembly.head import begin
from fedspan.assembly.run import Prepared, prepare
from fedspan.clients import metric_noise
from fedspan.clients.metric_noise import add_noise
from fedspan.config import RunConfig, parse_config
from fedspan.config.node import NodeConfig, NodeLimits
from fedspan.deployment.handshake import build_node_values, build_server_config
from fedspan.deployment.limits import require_workload
from fedspan.deployment.node import NodeService
from fedspan.deployment.usage import Release, UsageBook
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.progress import ClientData, TooFewReplies
from fedspan.federation.protocol import Order, decode_order, decode_reply
from fedspan.federation.serialization import decode
from fedspan.models.export import read_adapter
from fedspan.runs import start
from fedspan.tasks.classification import SequenceClassification
from helpers import refusals, tiny
from helpers.listeners import Notes
from helpers.node_service import CLIENT, Direct, introduced, node, serve, served, values


@pytest.fixture
def asked(tiny_folder: Path, tmp_path: Path) -> tuple[Direct, Order]:
    """A node that has trained a round of three, and the order that it carried out."""
    run, transport = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)))
    assert not run.federation.run_round(run.federation.begin()).failures
    return transport, decode_order(transport.sent[-1])


def refusal(transport: Direct, order: Order) -> str:
    """Why the node refuses an order."""
    answer = decode_reply(transport.service.answer(replace(order, serial=order.serial + 10**6).to_envelope()))
    assert not answer.body
    return answer.failed or ""


def test_an_order_differs_in_nothing_from_what_was_agreed(asked: tuple[Direct, Order]) -> None:
    """Round 50 of three, another learning rate, another weight: all that the node can compute itself."""
    transport, order = asked
    assert order.client is not None
    client = order.client
    changes: list[tuple[dict[str, Any], str]] = [
        ({"round": 49}, "`limits.rounds`: an order for round 50 of a run with 3 rounds"),
        ({"round": 3}, "an order for round 4 of a run with 3 rounds"),
        ({"task": "evaluate", "round": 4}, "an order for round 5 of a run with 3 rounds"),
        ({"task": "statistics", "round": 1}, "an order for round 2"),
        ({"lr": 0.0}, "the order has lr 0.0, and by the run's config and this node's data it is 0.02"),
        ({"lr": 0.021}, "the order has lr"),
        ({"client": replace(client, weight=0.0)}, "the order has client.weight 0.0"),
        ({"client": replace(client, examples=10**6)}, "the order has client.examples"),
        ({"client": replace(client, rank=10**6)}, "Expected a rank of the run's config: [2]"),
        ({"client": replace(client, scaling=0.0)}, "the order has client.scaling 0.0"),
    ]
    for number, (change, why) in enumerate(changes):
        said = refusal(transport, replace(order, serial=order.serial + number * 10**6, **change))
        assert why in said, (change, said)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"training": {"local_steps": 10**12}}, "`limits.steps`: the run's training.local_steps is 1000000000000"),
        ({"training": {"local_steps": 100, "gradient_accumulation_steps": 10**6}}, "limits.steps"),
        ({"training": {"local_steps": None, "local_epochs": 2, "gradient_accumulation_steps": 20000}}, "limits.steps"),
        ({"training": {"batch_size": 10**9}}, "`limits.batch`: the run's training.batch_size is 1000000000"),
        ({"evaluation": {"batch_size": 10**9}}, "limits.batch"),
        ({"model": {"max_length": 10**9}}, "limits.tokens"),
        ({"method": {"r": 10**6}}, "limits.rank"),
        ({"method": {"r": "1000000"}}, "limits.rank"),
        ({"federation": {"ranks": {CLIENT: 10**6}}}, "limits.rank"),
        ({"federation": {"ranks": ["1000000"]}}, "limits.rank"),
        ({"federation": {"ranks": {"assign": "fractions", "of": {"1000000": 1.0}}}}, "limits.rank"),
        ({"federation": {"rounds": 50}}, "the run's federation.rounds is 50, and this node allows at most"),
        ({"method": {"name": "fedgalore", "period": 10**12, "steps": 4}}, "method.period is 1000000000000"),
        ({"method": {"name": "fedgalore", "steps": 10**6}}, "limits.steps"),
        ({"method": {"name": "fedgalore", "steps": "1000000"}}, "limits.steps"),
        (
            {"method": {"name": "fedgalore", "steps": 15000}, "training": {"gradient_accumulation_steps": 2}},
            "steps is 30000",
        ),
        (
            {"method": {"name": "pfedlora", "personal_epochs": 10**5}},
            "the method's own epochs (100000) take more passes",
        ),
        ({"model": {"pretrained": False}}, "`limits.from_scratch`: this node does not train models from scratch"),
        ({"model": {"device_map": "auto"}, "engine": {"name": "loop"}}, "model.device_map"),
        ({"model": {"adapter": "somebody/adapter"}}, "this node does not allow the adapter 'somebody/adapter'"),
        ({"model": {"name": "somebody/model"}}, "this node does not allow 'somebody/model'"),
        ({"model": {"revision": "abc"}}, "@abc'. It allows"),
    ],
)
def test_what_a_run_may_cost_is_bounded(config: dict[str, Any], why: str, tiny_folder: Path, tmp_path: Path) -> None:
    given = values(tiny_folder)
    for section, own in config.items():
        given[section] = {**given.get(section, {}), **own}

    def reached(*_: object, **__: object) -> Any:
        raise AssertionError("the network, or a model")

    # for epochs the node counts its examples
    counts_examples = "local_epochs" in config.get("training", {}) or "personal_epochs" in config.get("method", {})
    models = [str(tiny_folder / "bert")]
    own = node(tiny_folder, tmp_path, limits={"run_rounds": 40, "models": models})
    told = introduced(NodeService(own) if counts_examples else NodeService(own, reached), given)
    assert why in (told.refused or ""), told.refused
    assert {path.name for path in tmp_path.iterdir()} <= {"audit.jsonl", "audit.jsonl.lock", "budget.json", "heartbeat"}


def test_models_of_the_hub_are_named_by_the_operator(tiny_folder: Path, tmp_path: Path) -> None:
    """Without a list, only the models that come with fedspan; and an adapter is a folder, never an id."""
    told = introduced(NodeService(node(tiny_folder, tmp_path, limits={"models": None})), values(tiny_folder))
    assert "It allows builtin:*" in (told.refused or "")
    elsewhere = f"{tiny_folder}/../{tiny_folder.name}/bert"  # which fits the pattern of the node's file
    told = introduced(NodeService(node(tiny_folder, tmp_path)), values(tiny_folder, model={"name": elsewhere}))
    assert "this node does not allow" in (told.refused or "")
    own = node(tiny_folder, tmp_path, limits={"models": []}, models={"house-bert": str(tiny_folder / "bert")})
    assert introduced(NodeService(own), values(tiny_folder, model={"name": "house-bert"})).refused is None
    with refusals.refused("model.adapter"):
        read_adapter("somebody/adapter", {})


def test_the_node_selects_and_splits_its_examples(tiny_folder: Path, tmp_path: Path) -> None:
    """A server that could choose them would single out people: two examples, one label, another split every run."""
    given = values(tiny_folder)
    given["federation"]["early_stopping"] = 2  # needs the server's partition.validation alone
    hostile = {
        **given,
        "seed": 99,
        "data": {**given["data"], "max_examples": 2, "keep_only": True, "test_fraction": 0.9, "group": "text"},
        "partition": {
            "clients": 1,
            "validation": 0.9,
            "test": 0.05,
            "seed": 7,
            "partitioner": "natural",
            "column": "a",
        },
        "engine": {"workers": 3, "prefix_memory": 1e9, "name": "loop"},
    }
    own = node(tiny_folder, tmp_path, split_seed=5).model_dump()
    made = build_node_values(hostile, own)
    assert made["partition"] == {"partitioner": "iid", "clients": 1, "validation": 0.1, "test": 0.1, "seed": 5}
    assert made["engine"] == {"name": "loop"}
    assert made["data"] == {"test_fraction": 0.0, "labels": given["data"]["labels"], **own["data"]}
    honest = introduced(NodeService(node(tiny_folder, tmp_path / "a")), given)
    assert introduced(NodeService(node(tiny_folder, tmp_path / "b")), hostile).examples == honest.examples == 96


def test_a_node_with_few_examples_stays_away(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits={"train_examples": 97}))
    told = introduced(service, values(tiny_folder, training={"local_steps": None}))
    assert "`limits.train_examples`: this node has fewer training examples" in (told.refused or "")
    assert "96" not in (told.refused or "").replace("97", "")


def test_a_part_of_few_examples_has_no_metrics(tiny_folder: Path, tmp_path: Path) -> None:
    run, _ = served(tiny_folder, NodeService(node(tiny_folder, tmp_path, limits={"evaluation_examples": 12})))
    assert None not in run.evaluator.evaluate_clients(run.federation.begin())
    service = NodeService(node(tiny_folder, tmp_path / "more", limits={"evaluation_examples": 13}))
    run, _ = served(tiny_folder, service)
    assert run.evaluator.evaluate_clients(run.federation.begin()) == (None, None)


class Coded(Direct):
    """A server that orders a model whose loss is a number with the count of each label as a digit.

    The head's weights are zero, so that every example has the same logits, and its biases are powers of the number of
    examples.
    """

    def __init__(self, service: NodeService, examples: int) -> None:
        super().__init__(service)
        self.examples = examples
        self.biases = -10 * torch.tensor([0.0, 1.0, examples + 1.0, (examples + 1.0) ** 2])

    def replies(self, envelopes: Any, seconds: float, *, wait_for_offline: bool = False) -> Any:
        for id, envelope in envelopes.items():
            order = decode_order(envelope)
            message = serialization.decode(order.body)
            changed = {
                name: self.biases.to(value) if name.endswith("bias") else torch.zeros_like(value)
                for name, value in message.tensors.items()
                if "classifier." in name
            }
            assert len(changed) == 2
            body = serialization.encode(replace(message, tensors={**message.tensors, **changed}))
            yield from super().replies({id: replace(order, body=body).to_envelope()}, seconds)
            assert self.came[-1].failed is None

    def decode(self, loss: float) -> list[int]:
        """Read the number of examples of each label from a loss."""
        excess = loss - float(self.biases.double().logsumexp(0))
        number, base = round(excess * self.examples / 10), self.examples + 1
        digits = [number % base, number // base % base, number // base**2]
        return [self.examples - sum(digits), *digits]


def attack(
    tiny_folder: Path, folder: Path, examples: int, epsilon: float | None, training: dict[str, Any]
) -> tuple[Prepared, Coded, ClientData, np.ndarray]:
    """A hostile server's run, and the node's data with the label of each example."""
    built = list[Prepared]()

    def build(*arguments: Any) -> Prepared:
        built.append(prepare(*arguments))
        return built[-1]

    service = NodeService(node(tiny_folder, folder, limits={"evaluation_epsilon": epsilon}), build)
    run, _ = served(tiny_folder, service, training=training)
    run.federation.transport = coded = Coded(service, examples)
    (data,) = built[-1].federation.clients.values()
    labels = getattr(built[-1].federation.examples, "labels", None)
    assert isinstance(labels, np.ndarray)
    return run, coded, data, labels


LABELS = len(tiny.LABELS)
MEASURED = pytest.mark.parametrize("epsilon", [None, 1.0])
"""Without noise, by which an owner chooses metrics as measured, the attacks work."""


@MEASURED
def test_one_evaluation_loss_tells_no_counts_of_labels(
    epsilon: float | None, tiny_folder: Path, tmp_path: Path
) -> None:
    run, coded, data, labels = attack(tiny_folder, tmp_path, 12, epsilon, {})
    run.evaluator.evaluate_clients(run.federation.begin())
    assert coded.came[-1].scores is not None
    scores = coded.came[-1].scores
    for loss, rows in ((scores["validation"]["loss"], data.validation), (scores["test"]["loss"], data.test)):
        counts = np.bincount(labels[rows], minlength=LABELS).tolist()
        assert (coded.decode(loss) == counts) is (epsilon is None)
        assert (0 <= loss <= 2 * math.log(LABELS)) is (epsilon is not None)


@MEASURED
def test_one_training_loss_tells_no_counts_of_labels(epsilon: float | None, tiny_folder: Path, tmp_path: Path) -> None:
    run, coded, data, labels = attack(
        tiny_folder, tmp_path, 96, epsilon, {"lr": 1e-12, "local_epochs": 1, "local_steps": None}
    )
    run.federation.run_round(run.federation.begin())
    counts = np.bincount(labels[data.train], minlength=LABELS).tolist()
    assert [coded.decode(part.loss) for part in coded.came[-1].parts] == ([counts] if epsilon is None else [])


SIZES = {name: getattr(NodeLimits(), name) for name in ("min_batch", "train_examples")}
SLOW = "(([a-z0-9.]+)+)+!"


@pytest.mark.parametrize(
    "model",
    [
        {"target_modules": SLOW},
        {"target_modules": ["query", SLOW]},
        {"exclude_modules": SLOW},
        {"layers_pattern": [SLOW], "layers_to_transform": [0]},
        {"target_modules": ["query"] * 1001},
    ],
)
def test_a_server_s_pattern_is_refused_before_it_is_matched(
    model: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    service = NodeService(node(tiny_folder, tmp_path))
    started = time.monotonic()
    refused = introduced(service, values(tiny_folder, model=model)).refused or ""
    assert time.monotonic() - started < 5
    assert "names of modules" in refused
    assert introduced(service, values(tiny_folder, model={"target_modules": "all-linear"})).refused is None


@pytest.mark.parametrize(
    ("training", "method", "reason"),
    [
        ({"batch_size": 1, "local_steps": 1}, {}, "`limits.min_batch`: the run's steps are of 1 examples"),
        ({"batch_size": 8, "local_steps": 1}, {}, "`limits.train_examples`: the run's replies are of 8 examples"),
        ({"batch_size": 8}, {"name": "fedgalore", "steps": 1}, "the run's replies are of 8 examples"),
        ({"batch_size": 8, "weight_decay": 10.0, "lr": 0.1}, {}, "each step would erase 100% of those before"),
        ({"batch_size": 8}, {"name": "fedit", "wrappers": [{"name": "fedprox", "mu": 25}]}, "would erase 50% of those"),
        ({"batch_size": 8, "lr": 100}, {"name": "fedit", "wrappers": ["fedprox"]}, "would erase 100% of those"),
        ({"batch_size": 8, "local_steps": 2}, {"name": "lora-fair"}, None),
        ({"batch_size": 1, "gradient_accumulation_steps": 8}, {}, None),
        ({"batch_size": 16}, {"name": "fedit", "wrappers": [{"name": "fedprox", "mu": 1}]}, None),
    ],
)
def test_a_reply_is_no_single_example_s_gradient(
    training: dict[str, int], method: dict[str, Any], reason: str | None, tiny_folder: Path, tmp_path: Path
) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=SIZES))
    config = values(tiny_folder, **({"method": method} if method else {}))
    config["training"] = {"lr": 0.02, "optimizer": "sgd", "local_steps": 4, **training}
    refused = introduced(service, config).refused
    assert refused is None if reason is None else reason in (refused or "")


@pytest.mark.parametrize(
    ("method", "training", "why"),
    [
        ({"name": "la-lora"}, {"batch_size": 8, "local_steps": 2}, "are of 8 examples"),
        ({"name": "la-lora"}, {"batch_size": 8, "gradient_accumulation_steps": 2}, None),
        ({"name": "fedgalore", "steps": 6, "period": 1}, {"batch_size": 8}, "are of 8 examples"),
        ({"name": "fedgalore"}, {"batch_size": 4, "gradient_accumulation_steps": 4}, "Expected at least 32"),
        ({"name": "fedgalore", "steps": 5, "period": 2}, {"batch_size": 16}, None),
    ],
)
def test_what_a_reply_holds_apart_is_of_enough_examples_too(
    method: dict[str, Any], training: dict[str, Any], why: str | None, tiny_folder: Path, tmp_path: Path
) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=SIZES))
    run, transport = served(tiny_folder, service, method={"r": 2, **method}, training={"lr": 0.01, **training})
    with suppress(TooFewReplies):
        run.federation.run_round(run.federation.begin())
    failed = transport.came[-1].failed
    assert failed is None if why is None else why in (failed or "")


def test_an_epoch_s_rest_is_no_reply_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    """With n - 1 examples a batch, one example is left: whichever batch comes first, it trains on more."""
    service, trained = NodeService(node(tiny_folder, tmp_path, limits=SIZES)), list[float]()
    run, _ = served(tiny_folder, service, training={"lr": 0.01, "local_steps": 1, "batch_size": 95})
    host = service._run("run").host
    host.on_trained = lambda _, result: trained.append(result.metrics["examples"])
    progress = run.federation.begin()
    for _ in range(3):
        run.federation.run_round(progress)
    assert trained == [96, 96, 96]


def test_refused_epochs_tell_of_the_examples_no_more_than_their_rounded_number(
    prepared: Prepared, tiny_folder: Path
) -> None:
    def answer(config: RunConfig, examples: int, count_passes: Callable[[int, int | None], int] | None = None) -> bool:
        try:
            require_workload(config, examples, NodeLimits(), prepared.federation.method, count_passes)
        except FedspanError:
            return False
        return True

    for epochs, batch in ((16, 1), (62, 4), (124, 8), (15, 1), (120, 8)):
        training = {"lr": 0.1, "local_epochs": epochs, "batch_size": batch, "gradient_accumulation_steps": 8}
        config = parse_config({**tiny.settings(tiny_folder), "training": training})
        assert len({answer(config, examples) for examples in (1200, 1234, 1299)}) == 1, (epochs, batch)
        loaders = {answer(config, 1234, lambda epochs, _, n=n: epochs * n) for n in (1200, 1234, 1299)}
        assert len(loaders) == 1, (epochs, "batches of an own trainer")


EXACT = {"approve": "auto", "head_statistics": "exact", "statistics_max_length": 2, "statistics_examples": 1}
LDA = {"head_init": "lda"}


def test_a_deployment_starts_without_statistics_unless_it_asks_for_them(tiny_folder: Path) -> None:
    for model in ({}, {"head_init": "auto"}):
        assert build_server_config({**values(tiny_folder), "model": model}).head_kind == (None, None)
    assert build_server_config({**values(tiny_folder), "model": LDA}).head_kind == ("lda", None)


def test_nodes_send_no_statistics_by_default_and_the_run_starts_at_random(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(
        node(tiny_folder, tmp_path / "node", limits={"head_statistics": NodeLimits().head_statistics})
    )

    def build(config: Any, partition: Any, key: bytes | None, callbacks: Any) -> Prepared:
        return served(tiny_folder, service, model=LDA)[0]

    notes = Notes()
    config = build_server_config(values(tiny_folder, model=LDA))
    report = start.run(config, tmp_path / "run", build=build, listener=notes)
    assert (report.rounds, report.start["head_init"]) == (3, "random")
    said = [note for note in notes.notes if "no statistics of examples leave this node" in note]
    assert len(said) == 1
    assert said[0].startswith("the head starts at random: ")


def test_an_owner_s_statistics_leave_once_whatever_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits=EXACT))
    run, _ = served(tiny_folder, service, model=LDA)
    begin(run.federation, run.head)
    restarted = NodeService(node(tiny_folder, tmp_path, limits=EXACT))
    again, _ = served(tiny_folder, restarted, model=LDA)
    for name in ("run", "another"):
        assert introduced(restarted, values(tiny_folder, model=LDA), run=name).refused is None
        again.federation.run = name
        with refusals.refused("good replies", "statistics of this data set have left this node for this server"):
            begin(again.federation, again.head)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"statistics_max_length": 17}, "model.max_length is 16, and this node sends statistics only from 17 on"),
        ({"statistics_examples": 10}, r"statistics of \d+ features need \d+ examples here"),
    ],
)
def test_statistics_of_short_texts_or_few_examples_stay(
    limits: dict[str, int], reason: str, tiny_folder: Path, tmp_path: Path
) -> None:
    run, _ = served(tiny_folder, NodeService(node(tiny_folder, tmp_path, limits={**EXACT, **limits})), model=LDA)
    with pytest.raises(FedspanError, match=reason):
        begin(run.federation, run.head)
    allowed, _ = served(tiny_folder, NodeService(node(tiny_folder, tmp_path, limits=EXACT)), model=LDA)
    assert begin(allowed.federation, allowed.head).state.tensors, "what was refused did not leave"


def test_yaml_reads_off_as_false() -> None:
    given = {"id": "clinic", "server": "localhost:1", "limits": {"head_statistics": False}}
    assert NodeConfig.model_validate(given).limits.head_statistics == "off"


def train_overflowing(folder: Path, service: NodeService, **privacy: Any) -> Direct:
    """Order a node to train a model whose head overflows on its examples, and return what connects it to the server."""
    run, transport = served(folder, service, **privacy)
    progress = run.federation.begin()
    tensors = {
        name: torch.full_like(value, 3e38) if name.startswith("extras/") and value.ndim == 2 else value
        for name, value in progress.state.tensors.items()
    }
    with suppress(TooFewReplies):  # such numbers are too large for an honest server
        run.federation.run_round(replace(progress, state=replace(progress.state, tensors=tensors)))
    return transport


@pytest.mark.parametrize("mechanism", ["local", "dp-sgd"])
def test_a_loss_that_is_not_finite_is_hidden_by_noise(mechanism: str, tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    service = NodeService(node(tiny_folder, tmp_path))
    privacy = {"mechanism": mechanism, "clip": 1.0, "noise": 4.0, "randomness": "secret"}
    sent = train_overflowing(tiny_folder, service, privacy=privacy).sent
    reply = decode_reply(service.answer(sent[-1]))  # once more
    assert reply.failed is None
    assert reply.parts == ()
    assert all(bool(value.isfinite().all()) for value in decode(reply.body).tensors.values())


def offer(kind: str, folder: Path, offered: Path) -> Path:
    """Offer a model with a tokenizer that gives one word, admin1, a number for which it has no embedding."""
    shutil.copytree(folder, offered)
    shutil.rmtree(offered / "bert")
    tiny.save_model(kind, offered).rename(offered / "bert")
    tokenizer = json.loads((offered / "bert" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["admin1"] = 10**6
    (offered / "bert" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return offered


def record_measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record how many examples of each part an evaluation measures, and how many there are."""
    measured: list[tuple[int, int]] = []

    def record(metrics: Any, count: int, examples: int, *args: Any) -> dict[str, float]:
        measured.append((count, examples))
        return add_noise(metrics, count, examples, *args)

    monkeypatch.setattr(metric_noise, "add_noise", record)
    return measured


@pytest.mark.parametrize(
    ("kind", "engine", "layers"), [("bert", "batched", None), ("deep-bert", "batched", [1]), ("deep-bert", "loop", [1])]
)
def test_a_text_on_which_the_chosen_model_fails_spoils_no_other_s_metrics(
    kind: str, engine: str, layers: list[int] | None, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if it is the longest of the data set, on which passes without padding and stored states are verified."""
    folder, measured = offer(kind, tiny_folder, tmp_path / "offered"), record_measured(monkeypatch)
    texts = (folder / "corpus.csv").read_text().replace("admin1", "admin2").splitlines()
    texts[1:9] = [f"{'admin1 ' * 14},{text.split(',', 1)[1]}" for text in texts[1:9]]
    (folder / "corpus.csv").write_text("\n".join(texts))
    service = NodeService(node(folder, tmp_path / "node", limits={"evaluation_epsilon": 0.1}))
    run, _ = served(folder, service, model={"layers_to_transform": layers}, engine={"name": engine})
    run.evaluator.evaluate_clients(run.federation.begin())
    assert len(measured) == 2
    assert all(count >= examples - 8 > 0 for count, examples in measured)


@pytest.mark.parametrize(
    "case",
    [
        *(("local", "bert", None, "model"), ("dp-sgd", "bert", None, "model"), ("dp-sgd", "deep-bert", [1], "model")),
        *(("dp-sgd", "bert", None, "collation"), ("dp-sgd", "bert", None, "sum")),
    ],
)
def test_a_text_on_which_the_chosen_model_fails_is_hidden_by_noise(
    case: tuple[str, str, list[int] | None, str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer that the server offers gives one word a number for which its model has no embedding."""
    mechanism, kind, layers, place = case
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    from fedspan.training.noisy_sum import NoisySum  # needs Opacus

    folder, measured = offer(kind, tiny_folder, tmp_path / "offered"), record_measured(monkeypatch)

    def collate(*args: Any, collate: Any = SequenceClassification.collate) -> dict[str, torch.Tensor]:
        batch = collate(*args)
        if (batch["input_ids"] == 10**6).any():
            raise IndexError("outside of the model")
        return batch

    def add(sums: NoisySum, gradients: Any, add: Any = NoisySum.add) -> None:
        if len(next(iter(gradients.values()))):
            raise IndexError("no way to leave out the example")
        add(sums, gradients)

    if place == "collation":
        monkeypatch.setattr(SequenceClassification, "collate", collate)
    elif place == "sum":
        monkeypatch.setattr(NoisySum, "add", add)
    service = NodeService(node(folder, tmp_path / "node", limits={"evaluation_epsilon": 0.1}))
    privacy = {"mechanism": mechanism, "clip": 1.0, "noise": 4.0, "randomness": "secret"}
    model = {"layers_to_transform": layers}
    training = {"local_steps": 4, "batch_size": 64}
    run, transport = served(folder, service, privacy=privacy, training=training, model=model)
    progress = run.federation.begin()
    assert None not in run.evaluator.evaluate_clients(progress)
    assert any(0 < count < examples for count, examples in measured)
    assert not run.federation.run_round(progress).failures
    sent, reply = decode_order(transport.sent[-1]), decode_reply(service.answer(transport.sent[-1]))
    assert reply.parts == ()
    before, after = decode(sent.body).tensors, decode(reply.body).tensors
    assert after.keys() <= before.keys()
    for name, value in after.items():
        assert not torch.equal(value, before[name]), name  # it has noise, whatever failed


def test_without_noise_the_failure_is_reported(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_overflowing(tiny_folder, NodeService(node(tiny_folder, tmp_path)))
    assert "the loss of client" in caplog.text


@pytest.mark.parametrize("mechanism", ["local", "dp-sgd"])
def test_noise_does_not_tell_how_many_examples_have_the_labels_that_a_server_names(
    mechanism: str, tiny_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    releases, privacy = set[tuple[Release, ...]](), {"mechanism": mechanism, "epsilon": 4.0, "clip": 1.0}
    for number, labels in enumerate((["admin", "billing", "lab", "symptom"], ["lab", "x", "y", "z"], list("wxyz"))):
        service = NodeService(node(tiny_folder, tmp_path / str(number), limits={"train_examples": 16, "min_batch": 8}))
        config = values(tiny_folder, privacy={**privacy, "randomness": "secret"}, training={"batch_size": 8})
        run, transport = serve({**config, "data": {"labels": labels}}, service)
        run.federation.run_round(run.federation.begin())
        reply = decode_reply(service.answer(transport.sent[-1]))
        assert reply.failed is None
        releases.add(UsageBook(service.node).get_account().releases)
    assert len(releases) == 1
