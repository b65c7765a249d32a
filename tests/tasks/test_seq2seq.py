"""Sequence to sequence: Transformers' losses, families and engines, generated texts by PEFT, and what is refused."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.trainer_pt_utils import LabelSmoother

import fedspan
from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.config.starter import write_starter_config
from fedspan.models.heads import HEADS
from fedspan.models.loading import adopt_loaded
from fedspan.runs.setup import prepare
from fedspan.tasks.losses import SMOOTHING
from fedspan.tasks.seq2seq import Seq2Seq, Seq2SeqOptions
from fedspan.training.batched import BatchedEngine
from fedspan.training.prefix import PrefixCache
from helpers import tiny_seq2seq

CPU = torch.device("cpu")
FAMILIES = sorted(tiny_seq2seq.FAMILIES)
ROWS = {
    "text": ["der1 der2 der3", "der4", "der5 der6 der7 der0 der1", "der2 der2"],
    "answer": ["the1 the2", "the4 the4 the4 the4", "the5", "the2 the0 the7"],
}


def make(options: Seq2SeqOptions | None = None, rows: dict[str, list[str]] = ROWS) -> tuple[Seq2Seq, Any]:
    task = Seq2Seq(tiny_seq2seq.make_tokenizer(), 12, 9, options)
    return task, task.encode(datasets.Dataset.from_dict(rows))


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_loss_is_transformers_own_and_predictions_add_up_to_it(kind: str, tmp_path: Path) -> None:
    folder = tiny_seq2seq.save_model(kind, tmp_path / kind)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    task, examples = make()
    batch = task.collate(examples, [3, 0, 2, 1], CPU)
    with torch.no_grad():
        output = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")})
        torch.testing.assert_close(task.compute_loss(model, batch), output.loss)
        predictions = task.predict(model, batch)
        smoothed = task.compute_loss(model, {**batch, SMOOTHING: torch.full((4,), 0.2, dtype=torch.float64)})
    torch.testing.assert_close(smoothed, LabelSmoother(0.2)(output, batch["labels"]))
    scores = task.compute_metrics(predictions, examples, [3, 0, 2, 1])
    assert scores["loss"] == pytest.approx(float(output.loss), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(float(output.loss.exp()), rel=1e-5)
    is_target = batch["labels"] != -100
    right = (output.logits.argmax(-1) == batch["labels"])[is_target]
    assert scores["token_accuracy"] == pytest.approx(float(right.float().mean()))
    assert predictions[:, 1].tolist() == is_target.sum(1).tolist()


@pytest.mark.parametrize("kind", FAMILIES)
def test_clients_share_passes_with_the_results_of_the_loop(kind: str, tmp_path: Path) -> None:
    values = tiny_seq2seq.settings(tmp_path, kind, federation={"rounds": 2}, training={"label_smoothing": 0.1})
    tensors = {}
    for engine in ("loop", "batched"):
        prepared = prepare(parse_config({**values, "engine": {"name": engine}}))
        progress = prepared.federation.begin()
        for _ in range(2):
            progress = prepared.federation.run_round(progress).progress
        tensors[engine] = progress.state.tensors
        if isinstance(prepared.engine, BatchedEngine):
            assert prepared.engine.refusal is None
    names = {name.partition("/")[0] for name in tensors["loop"]}
    assert {name.split(".")[-1] for name in names} == set(tiny_seq2seq.TARGETS[kind])
    assert any(".decoder." in f".{name}" for name in names)
    assert any(".encoder." in f".{name}" for name in names)
    for name, value in tensors["loop"].items():
        torch.testing.assert_close(tensors["batched"][name], value, rtol=1e-4, atol=2e-5)


def test_with_dropout_clients_train_one_by_one_and_equal_the_loop(tmp_path: Path) -> None:
    values = tiny_seq2seq.settings(tmp_path, federation={"rounds": 1}, training={"lora_dropout": 0.3})
    tensors = {}
    for engine in ("loop", "batched"):
        prepared = prepare(parse_config({**values, "engine": {"name": engine}}))
        progress = prepared.federation.run_round(prepared.federation.begin()).progress
        tensors[engine] = progress.state.tensors
        if isinstance(prepared.engine, BatchedEngine):
            assert "dropout masks are drawn for one pass" in str(prepared.engine.refusal)
    for name, value in tensors["loop"].items():
        torch.testing.assert_close(tensors["batched"][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_from_python_has_no_dropout_either(kind: str, tmp_path: Path) -> None:
    """BART's and T5's modules call ``F.dropout`` with a number of their own."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tiny_seq2seq.save_model(kind, tmp_path / kind))
    model.config.dropout_rate = model.config.dropout = 0.5
    model = type(model)(model.config)
    task, examples = make()
    loaded = adopt_loaded(model, tiny_seq2seq.make_tokenizer(), HEADS["sequence-to-sequence"], ()).model.train()
    batch = task.collate(examples, [0, 1, 2], CPU)
    with torch.no_grad():
        losses = [float(task.compute_loss(loaded, batch)) for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]


def test_an_empty_source_has_one_token_and_generates(tmp_path: Path) -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tiny_seq2seq.save_model("bart", tmp_path / "bart"))
    model.generation_config.update(return_dict_in_generate=True, num_beams=2, num_return_sequences=2)
    tokenizer = tiny_seq2seq.make_tokenizer()
    tokenizer._tokenizer.post_processor = None  # no special tokens
    task = Seq2Seq(tokenizer, 12, 9)
    examples = task.encode(datasets.Dataset.from_dict({"text": ["", ""], "answer": ["the1", "the2"]}))
    assert examples.sources.lengths.tolist() == [1, 1]
    predictions = task.predict(model.eval(), task.collate(examples, [0, 1], CPU), generate=True)
    assert len(predictions) == 2


def test_sources_have_the_prefix_and_cut_targets_end() -> None:
    task, examples = make(Seq2SeqOptions(prefix="say: ", max_target_length=3))
    tokenizer = task.tokenizer
    assert tokenizer.convert_ids_to_tokens(examples.sources[1]) == ["say:", "der4", "</s>"]
    assert tokenizer.convert_ids_to_tokens(examples.targets[1]) == ["the4", "the4", "</s>"]
    assert examples.lengths.tolist() == [5 + 3, 3 + 3, 7 + 2, 4 + 3]
    (remark,) = task.describe_examples(examples)
    assert remark == "3 of 4 targets reach task_options.max_target_length, 3 tokens: their end may be cut"
    batch = task.collate(examples, [2, 1], CPU)
    assert batch["input_ids"].tolist() == [examples.sources[2], [*examples.sources[1], 0, 0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [7, 3]
    assert batch["labels"].tolist() == [[*examples.targets[2], -100], examples.targets[1]]
    # A tokenizer that ends no text: the task does.
    tokenizer.backend_tokenizer.post_processor = None
    examples = task.encode(datasets.Dataset.from_dict(ROWS))
    assert tokenizer.convert_ids_to_tokens(examples.targets[1]) == ["the4", "the4", "</s>"]
    assert tokenizer.convert_ids_to_tokens(examples.targets[2]) == ["the5", "</s>"]
    assert tokenizer.convert_ids_to_tokens(examples.sources[1]) == ["say:", "der4"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_exports_generate_what_transformers_and_peft_generate(kind: str, tmp_path: Path) -> None:
    training = {"lr": 0.02, "local_steps": 3, "batch_size": 8}
    values = tiny_seq2seq.settings(tmp_path, kind, federation={"rounds": 1}, training=training)
    values["task_options"] |= {"num_beams": 3}
    report = fedspan.run(values, tmp_path / "run")
    assert report.metric == "loss"
    assert {"bleu", "chrf", "rouge_1", "rouge_2", "rouge_l", "perplexity"} <= set(report.scores["test"])
    adapter = tmp_path / "run" / "adapter"
    assert peft.PeftConfig.from_pretrained(str(adapter)).task_type == "SEQ_2_SEQ_LM"
    base = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / kind)
    model = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(adapter)
    texts = [f"der{first} der{last}" for first in range(8) for last in (0, 5)]

    def generate() -> list[str]:
        answers = []
        for text in texts:
            ids = tokenizer(f"say: {text}", return_tensors="pt")["input_ids"]
            generated = model.generate(input_ids=ids, max_new_tokens=9, num_beams=3, do_sample=False)
            answers.append(tokenizer.decode(generated[0], skip_special_tokens=True).strip())
        return answers

    expected = generate()
    with model.disable_adapter():
        assert generate() != expected
    assert len({*expected}) > 1
    assert fedspan.predict(tmp_path / "run", texts) == expected
    fedspan.export(tmp_path / "run", tmp_path / "merged", form="merged")
    assert fedspan.predict(tmp_path / "merged", texts) == expected
    with pytest.raises(FedspanError, match="takes no pairs"):
        fedspan.predict(tmp_path / "run", [("der1", "der2")])


def test_a_file_is_evaluated_with_and_without_generated_texts(tmp_path: Path) -> None:
    fedspan.run(tiny_seq2seq.settings(tmp_path, federation={"rounds": 1}), tmp_path / "run")
    path = tmp_path / "other.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["source", "target"], *zip(ROWS["text"], ROWS["answer"], strict=True)])
    named: dict[str, Any] = {"data": str(path), "text": "source", "answer": "target"}
    plain = fedspan.evaluate(tmp_path / "run", **named, generate=False)
    assert set(plain) == {"loss", "perplexity", "token_accuracy", "examples"}
    whole = fedspan.evaluate(tmp_path / "run", **named)
    assert set(whole) - set(plain) == {"bleu", "chrf", "rouge_1", "rouge_2", "rouge_l"}
    assert whole["loss"] == pytest.approx(plain["loss"])


def test_what_cannot_be_trained_is_refused(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tiny_seq2seq.settings(tmp_path)
    with pytest.raises(FedspanError, match=r"`model\.name`: .*cannot be loaded"):
        prepare(parse_config({**values, "model": {**values["model"], "name": str(tiny_folder / "bert")}}))
    with pytest.raises(FedspanError, match=r"`task_options\.num_beams`: 0 is not accepted"):
        parse_config({**values, "task_options": {"num_beams": 0}})
    with pytest.raises(FedspanError, match=r"`training\.class_weights`: seq2seq has no classes"):
        parse_config({**values, "training": {"class_weights": "balanced"}})
    with pytest.raises(FedspanError, match=r"`task_options\.max_target_length`: 17 .* at most 16"):
        prepare(parse_config({**values, "task_options": {"max_target_length": 17}}))
    prepared = prepare(parse_config(values))
    cache, reason = PrefixCache.make(prepared.engine.adapted, prepared.task, prepared.train, budget=1 << 20)
    assert (cache, reason) == (None, "each of an example's texts has a pass of its own")
    prepared.engine.adapted.model.config.decoder_start_token_id = None
    with pytest.raises(FedspanError, match="has no decoder_start_token_id"):
        prepared.task.compute_loss(prepared.engine.adapted.model, prepared.task.collate(prepared.train, [0], CPU))
    with pytest.raises(FedspanError, match="AutoModelForSeq2SeqLM"):
        prepared.task.compute_loss(torch.nn.Linear(2, 3), prepared.task.collate(prepared.train, [0], CPU))
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(FedspanError, match=r"pip install 'fedspan\[seq2seq\]'") as caught:
        prepare(parse_config(values))
    assert caught.value.field == "evaluation.generate"
    prepare(parse_config({**values, "evaluation": {"generate": False}}))


@pytest.mark.parametrize(
    ("names", "options", "fields"),
    [
        (("source", "target"), {}, ("source", "target")),
        (("translation.de", "translation.en"), {}, ("translation.de", "translation.en")),
        (("en", "de"), {"text": "de"}, ("de", "en")),
        (("Article", "Highlights"), {}, ("Article", "Highlights")),
        (("note", "short"), {"task": "seq2seq"}, ("note", "short")),
        (("a", "b"), {"task": "seq2seq", "text": "b", "answer": "a"}, ("b", "a")),
    ],
)
def test_init_finds_sources_and_targets(
    names: tuple[str, str], options: dict[str, str], fields: tuple[str, str], tmp_path: Path
) -> None:
    rows = [{names[0]: f"the first text {at}", names[1]: f"its text {at}", "site": "ab"[at % 2]} for at in range(40)]
    datasets.Dataset.from_list(rows).to_csv(tmp_path / "pairs.csv", index=False)
    model = str(tiny_seq2seq.save_model("t5", tmp_path / "t5"))
    found = write_starter_config(str(tmp_path / "pairs.csv"), tmp_path / "config.yaml", model=model, **options).config
    assert (found.task, found.data.text, found.data.answer) == ("seq2seq", *fields)
    assert found.partition.column == "site"


def test_init_takes_classes_and_numbers_for_no_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, values in {"classes": ["yes", "no"], "numbers": [f"{at}.5" for at in range(60)]}.items():
        rows = [{"source": f"a text {at}", "target": str(rng.permutation(values)[0])} for at in range(60)]
        datasets.Dataset.from_list(rows).to_csv(tmp_path / f"{name}.csv", index=False)
        model = str(tiny_seq2seq.save_model("t5", tmp_path / "t5"))
        found = write_starter_config(str(tmp_path / f"{name}.csv"), tmp_path / f"{name}.yaml", model=model)
        assert found.config.task != "seq2seq"


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    values = tiny_seq2seq.settings(tmp_path, federation={"rounds": 2})
    fedspan.run(values, tmp_path / "whole")
    fedspan.run({**values, "federation": {**values["federation"], "rounds": 1}}, tmp_path / "half")
    fedspan.resume(tmp_path / "half", overrides=["federation.rounds=2"])
    whole, resumed = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "half")
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
