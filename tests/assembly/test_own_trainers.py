"""Federations of owners with trainers of their own: results, resuming, secure sums, and what is refused."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import fedspan
from fedspan.assembly.own_trainers import TrainerRuns, adopt_trainers
from fedspan.crypto.masks import Ring
from fedspan.errors import FedspanError
from fedspan.federation.config import SecureSettings
from fedspan.tasks import metrics
from helpers import tiny, tiny_decoders, tiny_seq2seq
from helpers.captured_log import CapturedLog
from helpers.families import others_slow
from helpers.listeners import Notes
from helpers.refusals import refused
from helpers.trainer_clients import (
    NEW_MODULES,
    arguments,
    make_trainer,
    save_without_head,
    spare_the_collector,
    torch_trainer,
)

OWNERS = ("east", "north", "south")
TARGETS = {**tiny_seq2seq.TARGETS, "bert": tiny.BERT}


def settings(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "seed": 3,
        "model": {"target_modules": tiny.BERT},
        "method": {"name": "fedit", "r": 2, "lora_alpha": 4},
        "federation": {"rounds": 2},
        "training": {"lr": 0.05, "local_epochs": 1},
    }
    return tiny.change_sections(values, changes)


def simulate(tiny_folder: Path, folder: Path, resume: bool = False, **changes: Any) -> fedspan.RunReport:
    trainers = {owner: lambda owner=owner: make_trainer(tiny_folder, owner) for owner in OWNERS}
    return fedspan.simulate(settings(**changes), folder, trainers=trainers, resume=resume)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def tiny_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models, of which ``bert`` is the deeper one: that of one layer learns nothing in two short rounds."""
    folder = tmp_path_factory.mktemp("deep")
    for path in tiny_folder.iterdir():
        (folder / path.name).symlink_to(tiny_folder / "deep-bert" if path.name == "bert" else path)
    return folder


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    simulate(tiny_folder, folder)
    spare_the_collector()  # the first run imports modules
    return folder


def test_the_report_has_the_trainers_own_evaluation(finished: Path) -> None:
    report = fedspan.read_report(finished)
    assert report.rounds == 2
    assert 0 < report.scores["validation"]["loss"] < report.start["validation"]["loss"]
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["cohort"] for row in rows] == [list(OWNERS)] * 2
    assert rows[1]["loss"] < rows[0]["loss"]


def test_the_adapter_loads_with_peft_and_scores_as_reported(finished: Path, tiny_folder: Path) -> None:
    report = fedspan.read_report(finished)
    model = PeftModel.from_pretrained(
        tiny.fresh_classifier(tiny_folder / "bert"), finished / "adapter"
    ).merge_and_unload()
    losses = [make_trainer(tiny_folder, owner, model=model).evaluate()["eval_loss"] for owner in OWNERS]
    assert sum(losses) / len(OWNERS) == pytest.approx(report.scores["validation"]["loss"], rel=1e-4)


def test_a_run_that_stopped_ends_with_the_same_bits(finished: Path, tiny_folder: Path, tmp_path: Path) -> None:
    trainers = {owner: lambda owner=owner: make_trainer(tiny_folder, owner) for owner in OWNERS}
    with pytest.raises(KeyboardInterrupt):
        fedspan.simulate(settings(), tmp_path / "run", trainers=trainers, listener=Notes(1))
    torch.manual_seed(99)
    simulate(tiny_folder, tmp_path / "run", resume=True)
    assert weights(tmp_path / "run").keys() == weights(finished).keys()
    assert all(torch.equal(value, weights(finished)[name]) for name, value in weights(tmp_path / "run").items())


def test_a_run_is_not_resumed_on_other_frozen_weights(tiny_folder: Path, tmp_path: Path) -> None:
    trainers = {"east": make_trainer(tiny_folder, "east")}
    with pytest.raises(KeyboardInterrupt):
        fedspan.simulate(settings(), tmp_path / "run", trainers=trainers, listener=Notes(1))
    model = tiny.fresh_classifier(tiny_folder / "bert")
    _change_base(model)
    trainers = {"east": make_trainer(tiny_folder, "east", model=model)}
    with refused("trainers", "not those with which the run began"):
        fedspan.simulate(settings(), tmp_path / "run", trainers=trainers, resume=True)


def test_a_refused_run_gives_the_model_back_as_it_was(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, "east")
    model = trainer.model
    model.bert.pooler.requires_grad_(False)
    flags = {name: value.requires_grad for name, value in model.named_parameters()}
    refusal(tiny_folder, tmp_path, trainer, privacy={"mechanism": "dp-sgd", "noise": 1.0, "clip": 1.0})
    assert not any("forward" in vars(module) for module in model.modules())
    assert {name: value.requires_grad for name, value in model.named_parameters()} == flags
    fedspan.simulate(settings(), tmp_path / "run", trainers={"east": trainer})
    assert {name: value.requires_grad for name, value in model.named_parameters()} == flags


def test_two_clients_do_not_share_a_trainer(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, "east")
    with refused("trainers['b']"):
        fedspan.simulate(settings(), tmp_path / "run", trainers={"a": trainer, "b": trainer})


def test_an_adapter_inside_of_a_plain_loops_model_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    model = torch.nn.Sequential(tiny.fresh_classifier(tiny_folder / "bert"))
    inject_adapter_in_model(LoraConfig(target_modules=["query"]), model[0])
    assert "PEFT adapter" in refusal(tiny_folder, tmp_path, fedspan.TorchTrainer(model, lambda round: None, 8))


def test_a_run_is_resumed_with_its_trainers_only(finished: Path) -> None:
    with refused("trainers", r"fedspan.simulate\(..., resume=True\)"):
        fedspan.resume(finished, overrides=["federation.rounds=3"])


def test_secure_sums_end_where_plain_ones_do(tiny_folder: Path, tmp_path: Path) -> None:
    """To half a step of quantization per client, and the rounding of float32."""
    pytest.importorskip("Crypto")
    secure = SecureSettings()
    for name, own in {"plain": {}, "secure": {"secure": secure.model_dump()}}.items():
        simulate(tiny_folder, tmp_path / name, federation={"rounds": 1, **own})
    plain, summed = (weights(tmp_path / name) for name in ("plain", "secure"))
    bound = Ring(secure.bits, secure.clip, len(OWNERS)).bound_error(len(OWNERS)) / len(OWNERS)
    assert plain.keys() == summed.keys()
    for name, value in plain.items():
        rounding = 4 * torch.finfo(torch.float32).eps * float(value.abs().max())
        assert float((value - summed[name]).abs().max()) <= bound + rounding, name
        if "lora_B" in name:  # which starts at 0
            assert float(value.abs().max()) > 1e4 * bound, name


def test_clients_with_models_of_their_own_are_evaluated_with_them(tiny_folder: Path, tmp_path: Path) -> None:
    report = simulate(tiny_folder, tmp_path / "run", method={"name": "fedsa-lora"}, federation={"rounds": 1})
    assert sorted(report.adapters) == list(OWNERS)


def test_a_shared_model_gives_what_separate_ones_give(finished: Path, tiny_folder: Path, tmp_path: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / "bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainers = {owner: make_trainer(tiny_folder, owner, model=model) for owner in OWNERS}
    fedspan.simulate(settings(), tmp_path / "run", trainers=trainers)
    assert all(torch.equal(value, weights(finished)[name]) for name, value in weights(tmp_path / "run").items())
    after = model.state_dict()  # given back as it was
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def refusal(tiny_folder: Path, tmp_path: Path, trainer: Any, **changes: Any) -> str:
    with pytest.raises(FedspanError) as caught:
        fedspan.simulate(settings(**changes), tmp_path / "run", trainers={"east": trainer})
    return str(caught.value)


class Meddler(transformers.TrainerCallback):
    def __init__(self, action: Any) -> None:
        self._action = action

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._action(model)


def _change_base(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[0, 0] += 1


def _permute_base(model: torch.nn.Module) -> None:
    with torch.no_grad():
        weight = model.bert.embeddings.word_embeddings.weight
        weight.copy_(weight.flip(0))


def _break(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.classifier.bias.fill_(math.nan)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (_change_base, "frozen base of client east changed in round 1"),
        (_permute_base, "frozen base of client east changed in round 1"),
        (_break, "not finite|became nan"),
    ],
)
def test_a_trainer_that_breaks_the_model_gives_no_reply(
    action: Any, reason: str, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_folder, "east", callbacks=[Meddler(action)])
    assert re.search(reason, refusal(tiny_folder, tmp_path, trainer))


class EvaluationMeddler(transformers.TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        _change_base(model)


def test_an_evaluation_that_changes_the_base_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, "east", callbacks=[EvaluationMeddler()])
    with refused("trainer", "changed in an evaluation"):
        fedspan.simulate(settings(), tmp_path / "run", trainers={"east": trainer})


def test_a_starting_adapter_is_trained_further(finished: Path, tiny_folder: Path, tmp_path: Path) -> None:
    before = fedspan.read_report(finished).scores["validation"]["loss"]
    changes = {"model": {"adapter": str(finished / "adapter")}, "training": {"lr": 1e-9}, "federation": {"rounds": 1}}
    report = simulate(tiny_folder, tmp_path / "run", **changes)
    assert report.scores["validation"]["loss"] == pytest.approx(before, rel=1e-4)


def test_a_trainer_that_takes_no_step_gives_no_reply(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, "east")
    trainer.train = lambda: type("Output", (), {"training_loss": 0.5})()
    assert "took no optimizer step" in refusal(tiny_folder, tmp_path, trainer)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy": {"mechanism": "dp-sgd", "noise": 1.0, "clip": 1.0}}, "every example's own gradient"),
        ({"training": {"logit_adjustment": 1.0}}, "the trainer's own|has no classes"),
        ({"training": {"lr": "auto"}}, "fedspan can read"),
        ({"baselines": ["local-only"]}, "fedspan can read"),
        ({"data": {"train": "rows.csv"}}, "leave data out"),
        ({"task": "regression"}, "leave task out"),
        ({"method": {"name": "fedgalore"}}, "renewed from gradients within a round"),
        ({"model": {"adapter": "no-such-folder"}}, "model.adapter"),
        ({"model": {"dtype": "bfloat16"}}, "number format float32"),
        ({"model": {"pretrained": False}}, r"model.pretrained.*no effect"),
        ({"model": {"max_length": 64}}, r"model.max_length.*no effect"),
        ({"training": {"batch_size": 16}}, r"training.batch_size.*draw their own batches"),
        ({"training": {"gradient_accumulation_steps": 2}}, r"accumulation_steps.*draw their own batches"),
        ({"data": {"text": "note"}}, r"data.text.*no effect"),
        ({"partition": {"validation": 0.2}}, r"partition.validation.*no effect"),
        ({"engine": {"name": "batched"}}, r"engine.name.*no effect"),
        ({"device": "cpu"}, r"device.*no effect"),
    ],
)
def test_impossible_settings_are_refused(
    changes: dict[str, Any], reason: str, tiny_folder: Path, tmp_path: Path
) -> None:
    assert re.search(reason, refusal(tiny_folder, tmp_path, make_trainer(tiny_folder, "east"), **changes))


def _replace_optimizer(trainer: Any, *args: Any) -> torch.optim.Optimizer:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    return trainer.optimizer


def test_a_trainer_that_replaces_the_optimizer_is_refused_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, "east")
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.__class__ = type("Own", (type(trainer),), {"create_optimizer": _replace_optimizer})
    problem = refusal(tiny_folder, tmp_path, trainer)
    assert "its create_optimizer replaces the round's optimizer" in problem
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())


def test_a_trainer_that_keeps_a_set_optimizer_may_make_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, "east")
    methods = {"create_optimizer": lambda self, *_: self.optimizer or _replace_optimizer(self)}
    trainer.__class__ = type("Own", (type(trainer),), methods)
    report = fedspan.simulate(settings(federation={"rounds": 1}), tmp_path / "run", trainers={"east": trainer})
    assert report.rounds == 1


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ([1, 2], "trainers", "Expected a dict of the clients' trainers by id"),
        ({1: "trainer"}, "trainers", "1 is not accepted. Expected ids of clients, which are texts"),
        ({"a": torch.nn.Linear(3, 2)}, "trainers['a']", "'Linear' is not accepted. Expected a transformers.Trainer"),
        ({"a": fedspan.TorchTrainer}, "trainers['a']", "Expected a transformers.Trainer"),
        ({"a": lambda owner: owner}, "trainers['a']", "a function without arguments that returns one"),
    ],
)
def test_trainers_of_another_form_are_refused(given: Any, field: str, words: str, tmp_path: Path) -> None:
    with refused(field) as caught:
        fedspan.simulate(settings(), tmp_path / "run", trainers=given)
    assert words in str(caught.value)


def test_the_card_has_the_call_and_the_trainers_scores(finished: Path, tiny_folder: Path, tmp_path: Path) -> None:
    card, report = (finished / "adapter" / "README.md").read_text(), fedspan.read_report(finished)
    assert 'fedspan.simulate("config.yaml", "run", trainers=trainers)' in card
    assert f"so too good on average: loss {report.scores['validation']['loss']:.4f}" in card
    assert "Nothing was held out" not in card
    trainers = {owner: make_trainer(tiny_folder, owner) for owner in OWNERS}
    fedspan.simulate(finished / "config.yaml", tmp_path / "run", trainers=trainers)
    assert all(torch.equal(value, weights(finished)[name]) for name, value in weights(tmp_path / "run").items())


def test_a_model_with_an_adapter_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    peft_config = LoraConfig(r=4, lora_alpha=12, target_modules=["value", "query"])
    model = get_peft_model(tiny.fresh_classifier(tiny_folder / "bert"), peft_config)
    problem = refusal(tiny_folder, tmp_path, make_trainer(tiny_folder, "east", model=model))
    assert "Leave peft_config (or get_peft_model) out of the script" in problem
    assert 'method: {r: 4, lora_alpha: 12} and model: {target_modules: ["query", "value"]}' in problem


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizers": (torch.optim.SGD([torch.zeros(1, requires_grad=True)]), None)}, "made with optimizers="),
        ({"args": {"auto_find_batch_size": True}}, "auto_find_batch_size"),
        ({"args": {"bf16_full_eval": True}}, "bf16_full_eval and fp16_full_eval convert the model"),
        (
            {"args": {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}},
            "rolls the tensors back",
        ),
    ],
)
def test_a_trainer_s_own_means_are_refused(
    changes: dict[str, Any], reason: str, tiny_folder: Path, tmp_path: Path
) -> None:
    if "args" in changes:
        changes = {"args": arguments(tmp_path / "trainer", **changes["args"])}
    assert reason in refusal(tiny_folder, tmp_path, make_trainer(tiny_folder, "east", **changes))


def test_the_task_of_trainers_is_for_trainers(tiny_folder: Path, tmp_path: Path) -> None:
    with refused("task", r"fedspan\.simulate"):
        fedspan.run({**tiny.settings(tiny_folder), "task": "trainer"}, tmp_path / "run")


@pytest.mark.parametrize("training", [{"local_epochs": 1}, pytest.param({"local_steps": 3}, marks=pytest.mark.slow)])
def test_a_plain_loop_ends_where_a_trainer_does(training: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path / "trainer", train_sampling_strategy="sequential")
    made = {
        "trainer": {owner: make_trainer(tiny_folder, owner, args=args) for owner in OWNERS[:2]},
        "loop": {owner: torch_trainer(tiny_folder, owner) for owner in OWNERS[:2]},
    }
    for name, trainers in made.items():
        fedspan.simulate(settings(training=training, federation={"rounds": 1}), tmp_path / name, trainers=trainers)
    expected, found = weights(tmp_path / "trainer"), weights(tmp_path / "loop")
    assert all(torch.allclose(value, found[name], rtol=1e-4, atol=1e-5) for name, value in expected.items())
    scores = [fedspan.read_report(tmp_path / name).scores["validation"]["loss"] for name in made]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


def test_a_metric_of_a_plain_loop_that_is_not_a_number_is_missing(tiny_folder: Path, tmp_path: Path) -> None:
    loop = torch_trainer(tiny_folder, "east")
    loss = loop.evaluate
    measured = fedspan.TorchTrainer(
        loop.model, loop._train, 8, evaluate=lambda: {**loss(), "accuracy": math.nan}, validation_examples=3
    )
    problem = refusal(tiny_folder, tmp_path, measured, evaluation={"metric": "accuracy"})
    assert "has no finite accuracy; it has loss" in problem


def test_mixed_precision_and_checkpointing_last_for_several_rounds(tiny_folder: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path / "trainer", bf16=True, gradient_checkpointing=True)
    trainer = make_trainer(tiny_folder, "east", args=args)
    model, kinds = trainer.model, list[tuple[bool, torch.dtype]]()
    forward = model.forward
    layer = model.bert.pooler.dense
    layer.register_forward_hook(lambda module, args, output: kinds.append((module.training, output.dtype)))
    report = fedspan.simulate(settings(), tmp_path / "run", trainers={"east": trainer})
    assert report.rounds == 2
    assert {is_training for is_training, _ in kinds} == {True, False}
    assert {dtype for _, dtype in kinds} == {torch.bfloat16}
    assert model.forward == forward


@pytest.mark.parametrize("kind", [pytest.param("trainer", marks=pytest.mark.slow), "loop"])
def test_a_second_run_with_the_same_trainers_has_the_same_bits(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    make = make_trainer if kind == "trainer" else torch_trainer
    trainers = {owner: make(tiny_folder, owner) for owner in OWNERS[:2]}
    changed = settings(training={"lora_dropout": 0.2}, federation={"rounds": 1})
    for name in ("first", "second"):
        fedspan.simulate(changed, tmp_path / name, trainers=trainers)
        torch.manual_seed(99)
    for name, value in weights(tmp_path / "first").items():
        assert torch.equal(value, weights(tmp_path / "second")[name]), name
    first, second = (fedspan.read_report(tmp_path / name).scores for name in ("first", "second"))
    assert first == second


def test_a_trainer_that_has_trained_is_refused_with_the_way_out(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, "east", args=arguments(tmp_path / "trainer", max_steps=1))
    trainer.train()
    assert "has trained already" in refusal(tiny_folder, tmp_path, trainer)


def test_a_missing_metric_is_refused_at_the_first_evaluation(tiny_folder: Path, tmp_path: Path) -> None:
    problem = refusal(tiny_folder, tmp_path, make_trainer(tiny_folder, "east"), evaluation={"metric": "accuracy"})
    assert "has no finite accuracy; it has loss" in problem
    assert "compute_metrics" in problem


def notes_of(caplog: CapturedLog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("fedspan.")]


class Stopper(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


class EpochStopper(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = True


class AccumulationStopper(transformers.TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 1


@pytest.mark.parametrize(
    ("stopper", "training", "reason"),
    [
        (Stopper, {"local_epochs": 1}, "ended after 1 of 2 planned steps"),
        (EpochStopper, {"local_epochs": 2}, "ended after 2 of 4 planned steps"),
        *(
            pytest.param(stopper, training, reason, marks=pytest.mark.slow)
            for stopper, training, reason in (
                (Stopper, {"local_steps": 5}, "ended after 1 of 5 planned steps"),
                (EpochStopper, {"local_epochs": 1}, "ended after 1 of 2 planned steps"),
                (EpochStopper, {"local_steps": 5}, "ended after 3 of 5 planned steps"),
            )
        ),
        (AccumulationStopper, {"local_epochs": 1}, "ended after 1 of 2 planned steps"),
    ],
)
def test_a_callback_that_stops_a_round_early_gives_no_reply(
    stopper: type[transformers.TrainerCallback],
    training: dict[str, Any],
    reason: str,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}  # two steps of four examples
    args = arguments(tmp_path / "trainer", **(accumulated if stopper is AccumulationStopper else {}))
    trainer = make_trainer(tiny_folder, "east", callbacks=[stopper()], args=args)
    assert reason in refusal(tiny_folder, tmp_path, trainer, training=training)


@pytest.mark.parametrize(
    ("stopper", "training", "batch"),
    [
        (Stopper, {"local_steps": 1}, 4),
        (EpochStopper, {"local_epochs": 2}, 8),  # epochs of one batch
        pytest.param(EpochStopper, {"local_steps": 1}, 4, marks=pytest.mark.slow),
    ],
)
def test_a_callback_that_stops_with_the_last_step_stops_nothing_early(
    stopper: type[transformers.TrainerCallback], training: dict[str, Any], batch: int, tiny_folder: Path, tmp_path: Path
) -> None:
    args = arguments(tmp_path / "trainer", per_device_train_batch_size=batch)
    trainer = make_trainer(tiny_folder, "east", callbacks=[stopper()], args=args)
    changed = settings(training=training, federation={"rounds": 1})
    assert fedspan.simulate(changed, tmp_path / "run", trainers={"east": trainer}).rounds == 1


def test_several_evaluation_sets_count_like_one_of_all_their_examples(tiny_folder: Path, tmp_path: Path) -> None:
    losses: dict[str, float] = {}
    for kind in ("one", "several"):
        trainer = make_trainer(tiny_folder, "east")
        if kind == "several":
            whole: Any = trainer.eval_dataset
            trainer.eval_dataset = {"first": whole.select(range(2)), "second": whole.select(range(2, 3))}
        report = fedspan.simulate(settings(federation={"rounds": 1}), tmp_path / kind, trainers={"east": trainer})
        losses[kind] = report.scores["validation"]["loss"]
    assert losses["several"] == pytest.approx(losses["one"], rel=1e-5)


def _measure_margin(prediction: Any) -> dict[str, float]:
    values = prediction.predictions
    return {"margin": float((values.max(1) - values.min(1)).mean()), "rewards/chosen": 1.0}


def test_unknown_metrics_are_reported_once_and_registered_ones_judge_rounds(
    tiny_folder: Path, tmp_path: Path, caplog: CapturedLog
) -> None:
    def run(name: str, **changes: Any) -> fedspan.RunReport:
        trainers = {
            owner: make_trainer(tiny_folder, owner, compute_metrics=_measure_margin) for owner in ("east", "north")
        }
        changed = settings(**changes, federation={"rounds": 1})
        return fedspan.simulate(changed, tmp_path / name, trainers=trainers)

    assert "margin" not in run("unknown").scores["validation"]
    notes = [note for note in notes_of(caplog) if "not in the report" in note]
    known, unnamable = notes
    assert "client east" in known
    assert known.endswith("(fedspan.register_metrics): margin")
    assert unnamable.endswith("no identifiers in lower case: rewards/chosen")
    caplog.clear()
    registered = dict(metrics.METRICS)
    try:
        fedspan.register_metrics({"margin": fedspan.Metric("margin", True, maximum=100.0)})
        report = run("known", evaluation={"metric": "margin"})
    finally:
        metrics._metrics.clear()
        metrics._metrics.update(registered)
    assert report.metric == "margin"
    assert report.scores["validation"]["margin"] > 0
    (note,) = [note for note in notes_of(caplog) if "not in the report" in note]
    assert note == unnamable


def test_arguments_without_effect_are_named_once_for_all_clients_that_set_them(
    tiny_folder: Path, tmp_path: Path, caplog: CapturedLog
) -> None:
    changes: dict[str, dict[str, Any]] = {owner: {"weight_decay": 0.1, "warmup_steps": 3} for owner in OWNERS}
    changes["north"] = {}
    trainers = {
        owner: make_trainer(tiny_folder, owner, args=arguments(tmp_path / owner, **changed))
        for owner, changed in changes.items()
    }
    TrainerRuns(adopt_trainers(trainers)).close()
    (note,) = notes_of(caplog)
    assert note.startswith("these trainer arguments of east, south have no effect, because ")
    assert note.endswith(": weight_decay, warmup_steps")


def make_loop(model: Any, rows: Any, targets: Mapping[str, int]) -> fedspan.TorchTrainer:
    loader = DataLoader(rows, batch_size=4)

    def train(round: fedspan.TrainingRound) -> None:
        for batch in round.batches(loader):
            values = {name: torch.full((len(batch["input_ids"]),), value) for name, value in targets.items()}
            loss = model(**batch, **values).loss
            loss.backward()
            round.step(loss, len(batch["input_ids"]))

    return fedspan.TorchTrainer(model, train, len(rows))


ROWS = [{"input_ids": torch.tensor([5, 6, 7, 8, at])} for at in range(5, 13)]


def test_the_head_of_question_answering_trains_and_is_exported(
    tiny_folder: Path, tmp_path: Path, caplog: CapturedLog
) -> None:
    def load() -> Any:
        torch.manual_seed(4)
        return transformers.BertForQuestionAnswering.from_pretrained(tiny_folder / "bert").eval()

    model = load()
    before = model.qa_outputs.weight.detach().clone()
    loop = make_loop(model, ROWS, {"start_positions": 1, "end_positions": 3})
    fedspan.simulate(settings(federation={"rounds": 1}), tmp_path / "run", trainers={"east": loop})
    assert not notes_of(caplog)
    torch.manual_seed(77)  # another random head
    fresh = transformers.BertForQuestionAnswering.from_pretrained(tiny_folder / "bert").eval()
    assert not torch.equal(fresh.qa_outputs.weight, before)
    peft_model = PeftModel.from_pretrained(fresh, str(tmp_path / "run" / "adapter"))
    trained = peft_model.base_model.model.qa_outputs.modules_to_save["default"].weight
    assert torch.equal(trained, weights(tmp_path / "run")["base_model.model.qa_outputs.weight"])
    assert not torch.allclose(trained, before, atol=1e-4)


@pytest.mark.parametrize("kind", others_slow(NEW_MODULES, ["bert"]))
def test_untrained_modules_are_noted(kind: str, tiny_folder: Path, tmp_path: Path, caplog: CapturedLog) -> None:
    checkpoint = save_without_head(kind, tiny_folder, tmp_path / kind)

    def run(name: str, **model: Any) -> list[str]:
        caplog.clear()
        trainer = make_trainer(tiny_folder, "east", model=tiny.fresh_classifier(checkpoint))
        changed = settings(model={"target_modules": TARGETS[kind], **model}, federation={"rounds": 1})
        fedspan.simulate(changed, tmp_path / name, trainers={"east": trainer})
        return notes_of(caplog)

    (note,) = run("frozen")
    names = ", ".join(NEW_MODULES[kind])
    expected = f"{names} of client east look untrained and do not train: model.modules_to_save: [{names}] trains them"
    assert note.startswith(expected)
    assert not run("saved", modules_to_save=NEW_MODULES[kind])
    saved = weights(tmp_path / "saved")
    assert all(f"base_model.model.{name}.weight" in saved for name in NEW_MODULES[kind])


def test_a_loop_that_does_not_call_the_model_is_reported_once(
    tiny_folder: Path, tmp_path: Path, caplog: CapturedLog
) -> None:
    model: Any = tiny.fresh_classifier(tiny_folder / "bert")

    def train(round: fedspan.TrainingRound) -> None:
        for batch in round.batches(DataLoader(ROWS, batch_size=4)):
            logits = model.classifier(model.bert(**batch).pooler_output)
            loss = torch.nn.functional.cross_entropy(logits, torch.ones(len(logits), dtype=torch.int64))
            loss.backward()
            round.step(loss, len(logits))

    fedspan.simulate(settings(), tmp_path / "run", trainers={"east": fedspan.TorchTrainer(model, train, len(ROWS))})
    (note,) = notes_of(caplog)
    assert note.startswith("the training of client east in round 1 did not call the model itself (model(...))")


def plain_loop(tiny_folder: Path, counted: int, **changes: Any) -> fedspan.TorchTrainer:
    """A loop whose loader runs dry after one epoch, and which counts some number of examples in each step."""
    trainer = make_trainer(tiny_folder, "east")
    model = trainer.model
    once = iter(DataLoader(trainer.train_dataset, batch_size=4, collate_fn=trainer.data_collator))

    def train(round: fedspan.TrainingRound) -> None:
        for batch in round.batches(once):
            loss = model(**batch).loss
            loss.backward()
            round.step(loss, counted)

    return fedspan.TorchTrainer(model, train, 8, **changes)


def test_a_plain_loop_may_accumulate_a_step_over_several_epochs(tiny_folder: Path, tmp_path: Path) -> None:
    source = make_trainer(tiny_folder, "east")
    model = source.model
    loader = DataLoader(source.train_dataset, batch_size=4, collate_fn=source.data_collator)
    passes: list[int] = []

    def train(round: fedspan.TrainingRound) -> None:
        for number, batch in enumerate(round.batches(loader), 1):
            loss = model(**batch).loss / 5
            loss.backward()
            passes.append(number)
            if number % 5 == 0:
                round.step(loss * 5, 8)

    trainers = {"east": fedspan.TorchTrainer(model, train, 8)}
    config = settings(training={"local_steps": 2}, federation={"rounds": 1})
    assert fedspan.simulate(config, tmp_path / "run", trainers=trainers).rounds == 1
    assert passes == list(range(1, 11))


def test_an_evaluation_that_fails_is_reported_with_client_and_round(tiny_folder: Path, tmp_path: Path) -> None:
    for good, when in ((0, "before the first round"), (1, "after round 1")):
        calls = iter([{"loss": 1.0}] * good)

        def evaluate(calls: Iterator[dict[str, float]] = calls) -> dict[str, float]:
            if (scores := next(calls, None)) is None:
                raise ValueError("no such column")
            return scores

        trainer = plain_loop(tiny_folder, 4, evaluate=evaluate, validation_examples=3)
        assert f"evaluation of client east failed {when}" in refusal(tiny_folder, tmp_path / str(good), trainer)


def test_a_plain_loop_trains_on_a_quantized_base(decoders: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra fedspan[quantization] is not installed")
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm", quantization_config=quantization)
    stored = {name: value.clone() for name, value in model.named_parameters() if not value.is_floating_point()}
    tokens = torch.arange(3, 27).reshape(8, 3)
    losses: list[float] = []

    def train(round: fedspan.TrainingRound) -> None:
        for rows in round.batches(tokens.split(4)):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            losses.append(float(loss))
            round.step(loss, len(rows))

    config = {"model": {"target_modules": tiny_decoders.TARGETS["llama"]}, "training": {"lr": 0.05, "local_epochs": 2}}
    fedspan.simulate(config, tmp_path / "run", trainers={"a": fedspan.TorchTrainer(model, train, len(tokens))})
    assert stored
    assert losses[-1] < losses[0]
    found = dict(model.named_parameters())
    assert all(torch.equal(value, found[name]) for name, value in stored.items())
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
