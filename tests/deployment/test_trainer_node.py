"""A data owner's node that trains with the owner's own trainer, and goes on after a restart."""

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer, BertForSequenceClassification, TrainerCallback

import fedspan
from fedspan.assembly.server import prepare_server
from fedspan.config.node import NodeConfig
from fedspan.deployment import deploy
from fedspan.deployment.handshake import Introduction, build_server_config, compute_base_digest, compute_extras_digest
from fedspan.deployment.node import NodeService
from fedspan.deployment.submission import Handshakes
from fedspan.deployment.trainer_node import TrainerNode
from fedspan.federation.progress import TooFewReplies
from fedspan.federation.protocol import decode_reply
from fedspan.progress.listener import Listener
from helpers import refusals, tiny
from helpers.captured_log import CapturedLog
from helpers.node_service import introduced, node, served, values
from helpers.trainer_clients import NEW_MODULES, arguments, make_trainer, save_without_head, torch_trainer


def test_a_node_trains_and_evaluates_with_its_owners_trainer(tiny_folder: Path, tmp_path: Path) -> None:
    config = node(tiny_folder, tmp_path / "node", data={}, limits={"train_examples": 1})
    with closing(TrainerNode(config, make_trainer(tiny_folder, "east"))) as worker:
        prepared, transport = served(tiny_folder, worker.service)
        assert [data.client.examples for data in prepared.federation.clients.values()] == [8]
        federation, losses = prepared.federation, list[float]()
        progress = federation.begin()
        for _ in range(2):
            result = federation.run_round(progress)
            progress = result.progress
            losses.append(result.loss)
        validation, _ = prepared.evaluator.evaluate_clients(progress)
    assert validation.by_client["clinic"]["examples"] == 3
    assert losses[1] < losses[0]
    with closing(TrainerNode(config, make_trainer(tiny_folder, "east"))) as restarted:
        transport.service = restarted.service
        again, _ = prepared.evaluator.evaluate_clients(progress)
        assert again.pooled["loss"] == pytest.approx(validation.pooled["loss"], rel=1e-5)
        assert federation.run_round(progress).progress.state.round == 3


@pytest.mark.parametrize(
    ("limits", "sends_loss", "sends_metrics"),
    [({}, True, True), ({"evaluation_examples": 4}, True, False), ({"evaluation_epsilon": 9.0}, False, False)],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_trainer_s_metrics_leave_only_as_measured_of_enough_examples(
    limits: dict[str, Any], sends_loss: bool, sends_metrics: bool, fails: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    """No noise can hide an example in a trainer's own metrics, nor that its evaluation fails on one."""
    config = node(tiny_folder, tmp_path / "node", data={}, limits={"train_examples": 1, **limits})
    trainer, calls = make_trainer(tiny_folder, "east"), list[bool]()

    def evaluate(evaluate: Any = trainer.evaluate) -> Any:
        calls.append(fails)
        return evaluate(object() if fails else None)

    trainer.compute_metrics = lambda _: {"accuracy": 0.9}
    trainer.evaluate = evaluate
    with closing(TrainerNode(config, trainer)) as worker:
        prepared, transport = served(tiny_folder, worker.service)
        assert math.isnan(prepared.federation.run_round(prepared.federation.begin()).loss) is not sends_loss
        prepared.evaluator.evaluate_clients(prepared.federation.begin())
        reply = transport.came[-1]
    assert calls == [fails] * sends_metrics
    assert (reply.failed is not None) is (fails and sends_metrics)
    measured = {"loss", "accuracy", "examples"} if sends_metrics and not fails else set[str]()
    assert set((reply.scores or {}).get("validation", {})) == measured


def test_the_stored_reply_of_a_trainer_does_not_outlive_its_process(tiny_folder: Path, tmp_path: Path) -> None:
    """The next process may read other examples, which nothing shows."""
    config = node(tiny_folder, tmp_path / "node", data={}, limits={"train_examples": 1})
    with closing(TrainerNode(config, make_trainer(tiny_folder, "east"))) as worker:
        prepared, transport = served(tiny_folder, worker.service)
        prepared.federation.run_round(prepared.federation.begin())
        (envelope,) = transport.sent
        assert decode_reply(worker.answer(envelope)).failed is None
    with closing(TrainerNode(config, make_trainer(tiny_folder, "east"))) as restarted:
        assert "answered with other data" in (decode_reply(restarted.answer(envelope)).failed or "")


def test_a_plain_loop_with_its_tokenizer_has_the_servers_base(tiny_folder: Path, tmp_path: Path) -> None:
    config = node(tiny_folder, tmp_path / "node", data={}, limits={"train_examples": 1})
    loop = torch_trainer(tiny_folder, "east", AutoTokenizer.from_pretrained(tiny_folder / "bert"))
    with closing(TrainerNode(config, loop)) as worker:
        prepared, _ = served(tiny_folder, worker.service)
        assert prepared.federation.run_round(prepared.federation.begin()).loss > 0


@pytest.mark.parametrize("kind", ["trainer", "loop"])
def test_a_trainer_needs_a_tokenizer(kind: str, tiny_folder: Path, tmp_path: Path, caplog: CapturedLog) -> None:
    trainer: Any = torch_trainer(tiny_folder, "east")
    if kind == "trainer":
        trainer = make_trainer(tiny_folder, "east")
        trainer.processing_class = None
    config = node(tiny_folder, tmp_path / "node", data={}, limits={"train_examples": 1})
    with closing(TrainerNode(config, trainer)) as worker:
        assert introduced(worker.service, values(tiny_folder)).refused is not None
    assert "has no tokenizer, whose vocabulary the server compares with its own. Pass processing_class=" in caplog.text


@pytest.mark.parametrize(("kind", "targets"), [("bert", tiny.BERT), ("t5", ["q", "v", "wo"])])
def test_a_node_without_the_new_modules_of_the_server_is_refused_by_their_names(
    kind: str, targets: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    servers = pytest.importorskip("fedspan.transports.http.server", reason="the extra fedspan[deploy] is missing")
    checkpoint = save_without_head(kind, tiny_folder, tmp_path / kind)
    named = {"name": str(checkpoint), "target_modules": targets, "pooling": "stock"}
    limits = {"train_examples": 1, "models": [str(checkpoint)]}
    config = node(tiny_folder, tmp_path / "node", data={}, limits=limits)
    link = servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)
    server: Any = None

    def meet(service: NodeService, model: dict[str, Any], run: str, labels: Any = tiny.LABELS) -> dict[str, str]:
        given = {**values(tiny_folder, model=model), "data": {"labels": list(labels)}}
        handshakes = Handshakes(prepare_server(build_server_config(given)), Listener(), link)
        handshakes.process(7, introduced(service, given, run=run).to_envelope(), server)
        return handshakes.refused

    trainer = make_trainer(tiny_folder, "east", model=tiny.fresh_classifier(checkpoint))
    names = ", ".join(NEW_MODULES[kind])
    with closing(TrainerNode(config, trainer)) as worker:
        (reason,) = meet(worker.service, named, "unnamed").values()
        assert f"its model does not train {names} in full, which have new weights in this run" in reason
        assert f"need `model.modules_to_save: [{names}]`" in reason
        saved = {**named, "modules_to_save": NEW_MODULES[kind]}
        assert not meet(worker.service, saved, "named")
        (reason,) = meet(worker.service, saved, "more", [*tiny.LABELS, "other"]).values()
        assert reason == "its head is for another number of labels"
        prepared, _ = served(tiny_folder, worker.service, model=saved)
        assert prepared.federation.run_round(prepared.federation.begin()).loss > 0


@pytest.mark.parametrize(
    ("field", "changes", "reason"),
    [
        ("base", {"processor": None}, "its base model differs in: tokenizer"),
        ("base", {"pooling": None}, "its base model differs in: pooling or text_pair"),
        ("base", None, "its base model differs in: weights or dtype, tokenizer, pooling or text_pair"),
        ("extras", None, "its model trains other modules in full than this run's"),
    ],
)
def test_a_server_names_what_differs(field: str, changes: Any, reason: str, tiny_folder: Path, tmp_path: Path) -> None:
    servers = pytest.importorskip("fedspan.transports.http.server", reason="the extra fedspan[deploy] is missing")
    link = servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)
    prepared = prepare_server(build_server_config(values(tiny_folder, model={"pooling": "mean"})))
    handshakes, server = Handshakes(prepared, Listener(), link), cast(Any, None)
    digests = {"base": compute_base_digest(prepared.model), "extras": compute_extras_digest(prepared.model)}
    introduction = Introduction(id="clinic", version=fedspan.__version__, examples=5, **digests)
    digest = "0" * 64 if changes is None else compute_base_digest(replace(prepared.model, **changes))
    handshakes.process(7, introduction.model_copy(update={field: digest}).to_envelope(), server)
    assert handshakes.refused["clinic"] == reason
    handshakes.process(7, introduction.to_envelope(), server)
    assert handshakes.nodes.keys() == {"clinic"}


def test_a_node_has_data_or_a_trainer(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, "east")
    with refusals.refused("data", "leave data out"):
        TrainerNode(node(tiny_folder, tmp_path / "node"), trainer)
    (tmp_path / "node.yaml").write_text("id: clinic\nserver: localhost:1\n")
    with refusals.refused("data", r"fedspan\.join\(file, trainer=\.\.\.\)"):
        deploy.join(tmp_path / "node.yaml", insecure=True)


def test_fields_that_bind_no_trainer_are_named(tiny_folder: Path, tmp_path: Path, caplog: CapturedLog) -> None:
    trainer = make_trainer(tiny_folder, "east")
    limits = {"tokens": 128, "batch": 4, "steps": 10}
    given = {"id": "clinic", "server": "localhost:1", "folder": str(tmp_path / "node"), "limits": limits}
    TrainerNode(NodeConfig.model_validate({**given, "device": "cpu", "split_seed": 2}), trainer).close()
    assert caplog.messages == [
        "these fields of the node's file do not bind the trainer: split_seed, device, limits.batch, limits.tokens"
    ]
    with refusals.refused("limits.accept_base"):
        TrainerNode(node(tiny_folder, tmp_path / "node", data={}, limits={"accept_base": True}), trainer)


def test_checkpoints_do_not_bind_a_trainer(tiny_folder: Path, tmp_path: Path, caplog: CapturedLog) -> None:
    own = node(tiny_folder, tmp_path / "node", data={}, limits={"train_examples": 1})
    with closing(TrainerNode(own, make_trainer(tiny_folder, "east"))) as worker:
        for training, is_warned in (({}, False), ({"checkpoint_steps": 1}, True)):
            config = values(tiny_folder, training=training)
            assert introduced(worker.service, config, run=f"run {is_warned}").refused is None
            assert ("checkpoint_steps and checkpoint_minutes do not bind the trainer" in caplog.text) is is_warned


def test_a_loop_in_several_processes_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = fedspan.TorchTrainer(torch.nn.Linear(3, 2), lambda round: None, 8)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refusals.refused("trainer", "runs in 2 processes, and a plain loop trains in one"):
        TrainerNode(node(tiny_folder, tmp_path / "node", data={}), loop)


@pytest.mark.parametrize(
    ("training", "accumulated", "limit", "field"),
    [
        ({"local_steps": None, "local_epochs": 3}, 1, 6, None),  # 8 examples in the trainer's batches of 4
        ({"local_steps": None, "local_epochs": 3}, 1, 5, "local_epochs: 3"),
        ({"local_steps": None, "local_epochs": 3, "batch_size": 64}, 1, 5, "local_epochs: 3"),
        ({"local_steps": 2}, 2, 4, None),
        ({"local_steps": 2}, 2, 3, "local_steps: 2"),
    ],
)
def test_steps_are_limited_by_the_trainers_own_batches(
    training: dict[str, Any], accumulated: int, limit: int, field: str | None, tiny_folder: Path, tmp_path: Path
) -> None:
    config = node(tiny_folder, tmp_path / "node", data={}, limits={"train_examples": 1, "batch": 64, "steps": limit})
    args = arguments(tmp_path / "trainer", gradient_accumulation_steps=accumulated)
    with closing(TrainerNode(config, make_trainer(tiny_folder, "east", args=args))) as worker:
        refused = introduced(worker.service, values(tiny_folder, training=training)).refused
    if field is None:
        assert refused is None
    else:
        assert f"`limits.steps`: training.{field} takes more passes than this node allows ({limit})" in (refused or "")


@pytest.mark.parametrize(("epochs", "limit", "is_refused"), [(3, 8, False), (3, 7, True), (10**6, 10**6, True)])
def test_epochs_of_a_method_count_as_steps(
    epochs: int, limit: int, is_refused: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    config = node(tiny_folder, tmp_path / "node", data={}, limits={"train_examples": 1, "steps": limit})
    with closing(TrainerNode(config, make_trainer(tiny_folder, "east"))) as worker:  # 8 examples in batches of 4
        method = {"name": "pfedlora", "personal_epochs": epochs}
        refused = introduced(worker.service, values(tiny_folder, method=method, training={"local_steps": 2})).refused
    reason = f"local_steps: 2 and the method's own epochs ({epochs}) take more passes than this node allows ({limit})"
    assert (reason in (refused or "")) == is_refused
    assert (refused is not None) == is_refused


def test_a_plain_loop_counts_the_batches_that_it_names_or_its_examples() -> None:
    model = torch.nn.Linear(3, 2)
    assert fedspan.TorchTrainer(model, lambda round: None, 8).count_passes(3, None) == 24
    named = fedspan.TorchTrainer(model, lambda round: None, 8, batches=2)
    assert (named.count_passes(3, None), named.count_passes(3, 5)) == (6, 5)
    with refusals.refused("batches", "the number of batches of an epoch, at least 1"):
        fedspan.TorchTrainer(model, lambda round: None, 8, batches=0)


class ReadingBert(BertForSequenceClassification):
    """A classifier that uses the weight of a target layer without a call, too."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        weight = self.bert.encoder.layer[0].attention.self.query.weight
        output.loss = output.loss + 0 * functional.linear(torch.ones(1, weight.shape[1]), weight).sum()
        return output


def test_a_weight_that_is_used_without_a_call_is_refused_in_every_order(
    tiny_folder: Path, tmp_path: Path, caplog: CapturedLog
) -> None:
    model = ReadingBert.from_pretrained(tiny_folder / "bert", num_labels=len(tiny.LABELS))
    logs = refuse_twice(tiny_folder, tmp_path, caplog, model=model)
    assert all("without calling the layer" in log for log in logs)


def refuse_twice(tiny_folder: Path, tmp_path: Path, caplog: CapturedLog, **trainer: Any) -> list[str]:
    """Send two orders to a node whose trainer trains neither; return what it logs of each."""
    config, logs = node(tiny_folder, tmp_path / "node", data={}, limits={"train_examples": 1}), list[str]()
    with closing(TrainerNode(config, make_trainer(tiny_folder, "east", **trainer))) as worker:
        prepared, _ = served(tiny_folder, worker.service)
        progress = prepared.federation.begin()
        for _ in range(2):
            caplog.clear()
            with pytest.raises(TooFewReplies):
                prepared.federation.run_round(progress)
            logs.append(caplog.text)
    return logs


class ChangesOnce(TrainerCallback):
    """Changes the base in the first round only."""

    is_done = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.is_done:
            self.is_done = True
            with torch.no_grad():
                model.bert.embeddings.word_embeddings.weight[0, 0] += 1


def test_a_node_whose_base_changed_refuses_orders(tiny_folder: Path, tmp_path: Path, caplog: CapturedLog) -> None:
    first, second = refuse_twice(tiny_folder, tmp_path, caplog, callbacks=[ChangesOnce()])
    assert "changed in round 1" in first
    assert "no order is accepted any more" in second
