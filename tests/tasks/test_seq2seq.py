"""Sequence to sequence: Transformers' losses, families and engines, generated texts by PEFT, and what is refused."""

import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
from transformers.trainer_pt_utils import LabelSmoother

import fedspan
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.config.starter import write_starter_config
from fedspan.models.heads import HEADS
from fedspan.models.loading import adopt_loaded
from fedspan.tasks import registry
from fedspan.tasks.losses import SMOOTHING
from fedspan.tasks.seq2seq import SEQ2SEQ, Seq2Seq, Seq2SeqOptions
from fedspan.training.batched import BatchedEngine
from fedspan.training.prefix import PrefixCache
from helpers import tiny, tiny_seq2seq
from helpers.families import others_slow
from helpers.refusals import refused

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


def train_alike(values: dict[str, Any], **tolerance: float) -> tuple[dict[str, torch.Tensor], str]:
    """Train by both engines to the same tensors; returns them, and why clients share no passes."""
    loop, batched = (prepare(parse_config({**values, "engine": {"name": name}})) for name in ("loop", "batched"))
    tensors, same = tiny.final_tensors(loop), tiny.final_tensors(batched)
    for name, value in tensors.items():
        torch.testing.assert_close(same[name], value, **tolerance)
    assert isinstance(batched.engine, BatchedEngine)
    return tensors, str(batched.engine.refusal)


@pytest.mark.parametrize("kind", others_slow(FAMILIES, ["t5"]))
def test_clients_share_passes_with_the_results_of_the_loop(kind: str, tmp_path: Path) -> None:
    values = tiny_seq2seq.settings(tmp_path, kind, federation={"rounds": 2}, training={"label_smoothing": 0.1})
    tensors, refusal = train_alike(values, rtol=1e-4, atol=2e-5)
    assert refusal == "None"
    names = {name.partition("/")[0] for name in tensors}
    assert {name.split(".")[-1] for name in names} == set(tiny_seq2seq.TARGETS[kind])
    assert any(".decoder." in f".{name}" for name in names)
    assert any(".encoder." in f".{name}" for name in names)


def test_with_dropout_clients_train_one_by_one_and_equal_the_loop(tmp_path: Path) -> None:
    values = tiny_seq2seq.settings(tmp_path, federation={"rounds": 1}, training={"lora_dropout": 0.3})
    assert "dropout masks are drawn for one pass" in train_alike(values, rtol=1e-5, atol=1e-6)[1]


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


def make_language_tokenizer(kind: str) -> Any:
    """Make a tokenizer of a multilingual model: mBART's targets end with the language, NLLB's begin with it."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = [f"▁{word}{number}" for word in ("der", "the") for number in range(8)]
    if kind == "mbart":
        vocabulary = [(word, 0.0) for word in [*special, "▁", *words, "de_DE", "en_XX", "<mask>"]]
        return transformers.MBartTokenizer(vocab=vocabulary, src_lang="en_XX", tgt_lang="en_XX")
    codes = ["deu_Latn", "eng_Latn"]
    vocabulary = {word: at for at, word in enumerate([*special, "▁", *words, *codes, "<mask>"])}
    return transformers.NllbTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=codes)


@pytest.mark.parametrize("kind", ["mbart", "nllb"])
def test_languages_mark_texts_as_the_tokenizer_does_and_begin_generated_ones(kind: str) -> None:
    own = make_language_tokenizer(kind)
    codes = ("de_DE", "en_XX") if kind == "mbart" else ("deu_Latn", "eng_Latn")
    source, target = own.convert_tokens_to_ids(list(codes))
    options = Seq2SeqOptions(source_language=codes[0], target_language=codes[1], num_beams=1)
    task = Seq2Seq(own, 12, 9, options)
    examples = task.encode(datasets.Dataset.from_dict({"text": ["der1 der2 der3"], "answer": ["the1 the2"]}))
    reference = make_language_tokenizer(kind)
    reference.src_lang, reference.tgt_lang = codes
    expected = reference("der1 der2 der3", text_target="the1 the2")
    assert examples.sources[0] == expected["input_ids"]
    assert examples.targets[0] == expected["labels"]
    assert source in examples.sources[0]
    assert target in examples.targets[0]
    assert own.src_lang != codes[0] or kind == "nllb"  # the model's own tokenizer stays as it is
    values = {**tiny_seq2seq.BART, "vocab_size": len(own), "pad_token_id": 1, "decoder_start_token_id": 2}
    torch.manual_seed(3)
    if kind == "mbart":
        model = transformers.MBartForConditionalGeneration(transformers.MBartConfig(**values)).eval()
    else:
        model = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**values)).eval()
    batch = task.collate(examples, [0], CPU)
    generated = task.predict(model, batch, generate=True)[0, 3:].long()
    ids = torch.tensor([expected["input_ids"]])
    start = {"decoder_start_token_id": target} if kind == "mbart" else {"forced_bos_token_id": target}
    theirs = model.generate(input_ids=ids, max_new_tokens=9, num_beams=1, do_sample=False, **start)[0, 1:]
    assert generated[generated >= 0].tolist() == theirs[: int((generated >= 0).sum())].tolist()
    if kind == "nllb":
        assert int(generated[0]) == target


def test_languages_that_do_not_fit_are_refused() -> None:
    mbart, both = make_language_tokenizer("mbart"), {"source_language": "de_DE", "target_language": "en_XX"}
    with refused("task_options.target_language"):
        Seq2SeqOptions(source_language="de_DE")
    with refused("task_options.target_language"):
        Seq2Seq(mbart, 12, 9, Seq2SeqOptions(**{**both, "target_language": "xx"}))
    with refused("task_options.source_language"):
        Seq2Seq(mbart, 12, 9)
    with refused("task_options.source_language"):
        Seq2Seq(tiny_seq2seq.make_tokenizer(), 12, 9, Seq2SeqOptions(**both))


def test_lengths_of_generated_texts_are_those_of_the_options_or_of_the_model(tmp_path: Path) -> None:
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(tiny_seq2seq.save_model("bart", tmp_path / "bart"))
    model.eval()
    task, examples = make(Seq2SeqOptions(num_beams=3, length_penalty=-4.0, min_new_tokens=5))
    batch = task.collate(examples, [0, 1, 2, 3], CPU)
    generated = task.predict(model, batch, generate=True)[:, 3:].long()
    theirs = model.generate(
        **{name: batch[name] for name in ("input_ids", "attention_mask")},
        **{"num_beams": 3, "length_penalty": -4.0, "min_new_tokens": 5, "max_new_tokens": 9, "do_sample": False},
    )[:, 1:]
    for row, other in zip(generated, theirs, strict=True):
        length = int((row >= 0).sum())
        assert row[:length].tolist() == other[:length].tolist()
        assert length >= 5
    with refused("task_options.min_new_tokens"):
        make(Seq2SeqOptions(min_new_tokens=10))
    with refused("task_options.length_penalty"):
        Seq2SeqOptions(num_beams=1, length_penalty=1.0)
    plain, _ = make()
    model.generation_config.update(min_new_tokens=None, min_length=11)
    with refused("evaluation.max_new_tokens") as caught:
        plain.predict(model, batch, generate=True)
    assert caught.value.expected == "at least 10, or task_options.min_new_tokens"
    freed, _ = make(Seq2SeqOptions(min_new_tokens=0))
    assert len(freed.predict(model, batch, generate=True)) == 4


def test_lengths_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    values = tiny_seq2seq.settings(tmp_path, evaluation={"generate": True, "max_new_tokens": 2})
    with refused("evaluation.max_new_tokens"):
        prepare(parse_config(values))
    prepare(parse_config({**values, "evaluation": {"generate": False, "max_new_tokens": 2}}))


def test_a_prefix_that_leaves_no_room_for_a_source_is_refused() -> None:
    with refused("task_options.prefix"):
        make(Seq2SeqOptions(prefix="say: " * 11))
    _, examples = make(Seq2SeqOptions(prefix="say: " * 10))
    assert examples.sources.lengths.tolist() == [12, 12, 12, 12]


@pytest.mark.parametrize("kind", others_slow(FAMILIES, ["t5"]))
def test_dp_sgd_without_noise_and_clipping_is_sgd(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="needs fedspan[privacy]")
    values = tiny_seq2seq.settings(tmp_path, kind, evaluation={"generate": False})
    # Targets of equal lengths: the mean over a batch's tokens is then the mean of the examples' means.
    rows = [
        {"de": f"der{at % 8} der{at % 5}", "en": f"the{at % 8} the{at % 3}", "site": "ab"[at % 2]} for at in range(20)
    ]
    datasets.Dataset.from_list(rows).to_csv(tmp_path / "pairs.csv", index=False)
    tiny.require_sgd_without_noise(values, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("kind", others_slow(FAMILIES, ["marian"]))
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
    with refused("texts", "takes no pairs"):
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
    with refused("model.name"):
        prepare(parse_config({**values, "model": {**values["model"], "name": str(tiny_folder / "bert")}}))
    with refused("task_options.num_beams"):
        parse_config({**values, "task_options": {"num_beams": 0}})
    with refused("training.class_weights"):
        parse_config({**values, "training": {"class_weights": "balanced"}})
    with refused("task_options.max_target_length"):
        prepare(parse_config({**values, "task_options": {"max_target_length": 17}}))
    prepared = prepare(parse_config(values))
    cache, reason = PrefixCache.make(prepared.engine.adapted, prepared.task, prepared.train, budget=1 << 20)
    assert (cache, reason) == (None, "each of an example's texts has a pass of its own")
    prepared.engine.adapted.model.config.decoder_start_token_id = None
    with refused("model.name"):
        prepared.task.compute_loss(prepared.engine.adapted.model, prepared.task.collate(prepared.train, [0], CPU))
    with refused("model.name"):
        prepared.task.compute_loss(torch.nn.Linear(2, 3), prepared.task.collate(prepared.train, [0], CPU))
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with refused("evaluation.generate") as caught:
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


def test_init_finds_the_columns_of_a_task_of_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._tasks, "my-summaries", replace(SEQ2SEQ, name="my-summaries"))
    rows = [{"long": f"the first text {at}", "short": f"its text {at}"} for at in range(40)]
    datasets.Dataset.from_list(rows).to_csv(tmp_path / "pairs.csv", index=False)
    model = str(tiny_seq2seq.save_model("t5", tmp_path / "t5"))
    options: dict[str, str] = {"model": model, "task": "my-summaries"}
    found = write_starter_config(str(tmp_path / "pairs.csv"), tmp_path / "config.yaml", **options).config
    assert (found.task, found.data.text, found.data.answer) == ("my-summaries", "long", "short")


def test_init_takes_classes_and_numbers_for_no_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, values in {"classes": ["yes", "no"], "numbers": [f"{at}.5" for at in range(60)]}.items():
        rows = [{"source": f"a text {at}", "target": str(rng.permutation(values)[0])} for at in range(60)]
        datasets.Dataset.from_list(rows).to_csv(tmp_path / f"{name}.csv", index=False)
        model = str(tiny_seq2seq.save_model("t5", tmp_path / "t5"))
        found = write_starter_config(str(tmp_path / f"{name}.csv"), tmp_path / f"{name}.yaml", model=model)
        assert found.config.task != "seq2seq"
