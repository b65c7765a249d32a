"""Masked language modeling: masks by key, Transformers' loss, resumed runs, predictions, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from transformers.trainer_pt_utils import LabelSmoother

import fedspan
from fedspan import FedspanError
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.tasks.losses import SMOOTHING
from fedspan.tasks.masked_lm import MaskedLanguageModel
from fedspan.training.prefix import PrefixCache
from helpers import tiny_masked

CPU = torch.device("cpu")
TEXTS = ["red0 red1 red2 red3 red4 red5 red0 red1", "blue0 blue1", "[UNK]", "red0 blue1 red2 blue3 red4"]


def make(texts: list[str] = TEXTS, share: float = 0.4) -> tuple[MaskedLanguageModel, Any]:
    task = MaskedLanguageModel(tiny_masked.make_tokenizer(), 16, mask_share=share)
    return task, task.encode(datasets.Dataset.from_dict({"text": texts}))


def test_a_rounded_share_of_words_is_masked_in_evaluation_always_the_same_ones() -> None:
    task, examples = make()
    batch = task.collate(examples, [0, 1, 2, 3], CPU)
    is_masked = batch["labels"] != -100
    assert is_masked.sum(1).tolist() == [3, 1, 0, 2]
    assert (batch["input_ids"][is_masked] == 4).all()
    assert not is_masked[:, 0].any()  # no special tokens
    whole = torch.where(is_masked, batch["labels"], batch["input_ids"])
    assert whole.tolist() == [row + [0] * (10 - len(row)) for row in examples.text.encodings["input_ids"]]
    _, others = make([TEXTS[3], TEXTS[0]])  # the same texts in another data set, alone in their batches
    for row, other in ((0, 1), (3, 0)):
        length = int(examples.lengths[row])
        single = task.collate(others, [other], CPU)
        assert torch.equal(single["input_ids"][0], batch["input_ids"][row, :length])
        assert torch.equal(single["labels"][0], batch["labels"][row, :length])


def test_masks_of_training_depend_on_their_key_and_the_example_only() -> None:
    task, examples = make(["red0 red1 red2 red3 red4 red5 red0 red1"] * 200)
    keys = [(3, 1, "east", 0, 5)] * 200
    batch = task.collate_for_training(examples, range(200), CPU, keys)
    again = task.collate_for_training(examples, [7, 3], CPU, keys[:2])
    for row, index in enumerate((7, 3)):
        assert torch.equal(again["input_ids"][row], batch["input_ids"][index])
        assert torch.equal(again["labels"][row], batch["labels"][index])
    for part, value in enumerate((4, 2, "west", 1, 6)):  # seed, round, client, phase, batch
        changed: tuple[Any, ...] = (*keys[0][:part], value, *keys[0][part + 1 :])
        other = task.collate_for_training(examples, range(200), CPU, [changed] * 200)
        assert not torch.equal(other["labels"], batch["labels"])
    predicted = batch["labels"] != -100
    assert predicted.sum(1).tolist() == [3] * 200
    words, inputs = batch["labels"][predicted], batch["input_ids"][predicted]
    assert float((inputs == 4).float().mean()) == pytest.approx(0.8, abs=0.06)
    # A random token is the word itself in 1 of 17 cases.
    assert float((inputs == words).float().mean()) == pytest.approx(0.1 + 0.1 / 17, abs=0.05)


def test_the_loss_is_transformers_own_and_predictions_add_up_to_it(tmp_path: Path) -> None:
    model = transformers.AutoModelForMaskedLM.from_pretrained(tiny_masked.save_masked(tmp_path / "model")).eval()
    task, examples = make()
    batch = task.collate(examples, [3, 0, 2, 1], CPU)
    known = {key: value for key, value in batch.items() if key != "target_tokens"}
    with torch.no_grad():
        output = model(**known)
        torch.testing.assert_close(task.compute_loss(model, batch), output.loss)
        predictions = task.predict(model, batch)
        smoothed = task.compute_loss(model, {**batch, SMOOTHING: torch.full((4,), 0.2, dtype=torch.float64)})
    torch.testing.assert_close(smoothed, LabelSmoother(0.2)(output, batch["labels"]))
    scores = task.compute_metrics(predictions, examples, [3, 0, 2, 1])
    assert scores["loss"] == pytest.approx(float(output.loss), rel=1e-5)
    assert scores["pseudo_perplexity"] == pytest.approx(float(output.loss.exp()), rel=1e-5)
    is_masked = batch["labels"] != -100
    guesses = output.logits.argmax(-1)
    accuracy = float((guesses == batch["labels"])[is_masked].float().mean())
    assert scores["masked_accuracy"] == pytest.approx(accuracy)
    names = [
        " ".join(task.tokenizer.convert_ids_to_tokens(row[places].tolist()))
        for row, places in zip(guesses, is_masked, strict=True)
    ]
    assert task.decode_predictions(predictions) == names


def test_masks_are_filled_as_transformers_and_peft_fill_them(tmp_path: Path) -> None:
    training = {"lr": 0.04, "local_steps": 20, "batch_size": 8}
    rest = {"evaluation": {"every": 2}, "engine": {"name": "batched", "clients_per_pass": 3}}
    fedspan.run(tiny_masked.settings(tmp_path, federation={"rounds": 2}, training=training, **rest), tmp_path / "run")
    base = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "masked")
    task, examples = make([json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()])
    batch = task.collate(examples, range(len(examples)), CPU)
    with torch.no_grad():
        before = float(task.compute_loss(base.eval(), batch))
        model = peft.PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")).eval()
        assert float(task.compute_loss(model, batch)) < before - 0.3
        texts = ["red1 [MASK] red2 [MASK]", "blue4 blue3 [MASK]"]
        expected: list[str] = []
        for text in texts:
            inputs = task.tokenizer(text, return_tensors="pt")
            places = inputs["input_ids"][0] == task.tokenizer.mask_token_id
            expected.append(task.tokenizer.decode(model(**inputs).logits[0, places].argmax(-1)))
    assert fedspan.predict(tmp_path / "run", texts) == expected
    with pytest.raises(FedspanError, match=r"`texts`: 'red1' is not accepted\. Expected texts with \[MASK\]"):
        fedspan.predict(tmp_path / "run", ["red1"])
    with pytest.raises(FedspanError, match="takes no pairs"):
        fedspan.predict(tmp_path / "run", [("red1", "red2")])


def test_what_cannot_learn_masked_words_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny_masked.settings(tmp_path)
    with pytest.raises(FedspanError, match="has no weights for cls"):
        prepare(parse_config({**values, "model": {**values["model"], "name": str(tiny_folder / "bert")}}))
    with pytest.raises(FedspanError, match=r"`task_options\.mask_share`: 1\.0 is not accepted"):
        parse_config({**values, "task_options": {"mask_share": 1.0}})
    prepared = prepare(parse_config(values))
    cache, reason = PrefixCache.make(prepared.engine.adapted, prepared.task, prepared.train, budget=1 << 20)
    assert (cache, reason) == (None, "a part of the inputs is drawn at random for every batch")
    shutil.copytree(tmp_path / "masked", tmp_path / "unmasked")
    tokenizer = tiny_masked.make_tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "unmasked")
    with pytest.raises(FedspanError, match="whose tokenizer has a mask"):
        prepare(parse_config({**values, "model": {**values["model"], "name": str(tmp_path / "unmasked")}}))
