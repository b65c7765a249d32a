"""Causal and masked language models: losses, packing and masks, generation, predictions, and what is cut or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

import fedspan
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.tasks.causal import CausalLM, EncodedPrompts, GenerationOptions, can_attend_across_examples
from fedspan.tasks.losses import SMOOTHING
from fedspan.tasks.masked_lm import MaskedLanguageModel
from fedspan.tasks.prompts import truncate
from fedspan.training.prefix import PrefixCache
from helpers import tiny_decoders, tiny_masked
from helpers.families import others_slow
from helpers.refusals import refused

CPU = torch.device("cpu")
ROWS = {
    "text": ["Q: a1 a2 a3 A:", "Q: b0 A:", "Q: c1 c2 A:", "d5"],
    "answer": ["b1 b2 b3", "c0", "d1 d2", "a5 a5 a5 a5 a5"],
}
families = pytest.mark.parametrize("family", tiny_decoders.FAMILIES)


def encoded(task: CausalLM, **rows: list[str]) -> EncodedPrompts:
    return task.encode(datasets.Dataset.from_dict({**ROWS, **rows}))


def made(**options: object) -> CausalLM:
    return CausalLM(tiny_decoders.tokenizer(pads=True), 24, **options)


def model_of(family: str, folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / f"{family}-lm", attn_implementation="eager").eval()


def test_prompt_and_answer_are_tokenized_apart() -> None:
    """<s> (2) before the prompt, </s> (3) behind the answer, the border between two ids."""
    task = made()
    examples = encoded(task)
    words = task.tokenizer.get_vocab()
    assert examples.ids[1] == [2, words["Q:"], words["b0"], words["A:"], words["c0"], 3]
    assert examples.starts.tolist() == [6, 4, 5, 2]
    assert examples.lengths.tolist() == [len(row) for row in examples.ids]
    batch = task.collate(examples, [1, 0], CPU)
    assert batch["labels"][0].tolist() == [-100] * 4 + [words["c0"], 3] + [-100] * 4
    assert batch["attention_mask"].sum(1).tolist() == [6, 10]
    assert batch["input_ids"][0, 6:].tolist() == [0] * 4


@families
def test_the_loss_is_that_of_transformers_on_the_answer(family: str, decoders: Path) -> None:
    task, model = made(), model_of(family, decoders)
    batch = task.collate(encoded(task), [0, 1, 2, 3], CPU)
    with torch.no_grad():
        ours, theirs = task.compute_loss(model, batch), model(**batch)
        smoothed = task.compute_loss(model, {**batch, SMOOTHING: torch.full((4,), 0.2, dtype=torch.float64)})
    assert float(ours) == pytest.approx(float(theirs.loss), rel=1e-5)
    torch.testing.assert_close(smoothed, LabelSmoother(0.2)(theirs, batch["labels"], shift_labels=True))


@families
def test_the_prompt_is_no_part_of_the_loss(family: str, decoders: Path) -> None:
    """By hand: the mean of -log p over the answers' tokens, from one example at a time, without padding."""
    task, model = made(), model_of(family, decoders)
    examples = encoded(task)
    losses: list[float] = []
    rows: list[tuple[float, int, int]] = []
    for ids, start in zip(examples.ids, examples.starts.tolist(), strict=True):
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        own = [-float(log_p[at - 1, ids[at]]) for at in range(start, len(ids))]
        right = sum(int(log_p[at - 1].argmax()) == ids[at] for at in range(start, len(ids)))
        rows.append((sum(own), len(own), right))
        losses += own
    indices = [2, 0, 3, 1]
    with torch.no_grad():
        batch = task.collate(examples, indices, CPU)
        predictions = task.predict(model, batch)
        assert float(task.compute_loss(model, batch)) == pytest.approx(np.mean(losses), rel=1e-4)
    for index, row in zip(indices, predictions.tolist(), strict=True):
        assert row == pytest.approx(rows[index], rel=1e-4)
    metrics = task.compute_metrics(predictions, examples, indices)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-3)
    assert metrics["token_accuracy"] == sum(right for *_, right in rows) / len(losses)
    assert "exact_match" not in metrics


@pytest.mark.parametrize(
    "family", others_slow([family for family in tiny_decoders.FAMILIES if family != "opt"], ["llama", "gpt2"])
)
def test_packing_changes_no_loss_and_no_gradient(family: str, decoders: Path) -> None:
    """Examples end to end in one row see neither each other nor the row's positions."""
    padded, packed, model = made(), made(packing=True), model_of(family, decoders)
    examples = encoded(padded)
    batch = packed.collate(examples, [0, 1, 2, 3], CPU)
    assert batch["input_ids"].shape == (1, int(examples.lengths.sum()))
    results: list[tuple[Tensor, list[Tensor]]] = []
    for task in (padded, packed):
        model.zero_grad()
        loss = task.compute_loss(model, task.collate(examples, [0, 1, 2, 3], CPU))
        loss.backward()
        results.append(
            (loss.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        )
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-5)
    for left, right in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(left, right, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        rows = [task.predict(model, task.collate(examples, [3, 1, 0], CPU), generate=True) for task in (padded, packed)]
    assert torch.allclose(rows[0][:, :3], rows[1][:, :3], rtol=1e-4)
    assert torch.equal(rows[0][:, 3:], rows[1][:, 3:])


@families
def test_a_model_that_would_see_across_packed_examples_is_known(family: str, decoders: Path) -> None:
    """OPT builds its mask without looking at positions."""
    assert can_attend_across_examples(model_of(family, decoders), CPU) == (family == "opt")


@families
def test_generation_in_batches_is_greedy_decoding_of_each_prompt_alone(family: str, decoders: Path) -> None:
    """The oracle: the most probable next token of the bare prompt, again and again, up to </s>."""
    task, model = made(generation=GenerationOptions(max_new_tokens=5)), model_of(family, decoders)
    examples = encoded(task)
    with torch.no_grad():
        rows = task.predict(model, task.collate(examples, [0, 1, 2, 3], CPU), generate=True)
        for index, row in enumerate(rows[:, 3:].long().tolist()):
            ids = examples.ids[index][: int(examples.starts[index])]
            expected: list[int] = []
            while len(expected) < 5 and 3 not in expected:
                expected.append(int(model(torch.tensor([ids + expected])).logits[0, -1].argmax()))
            kept = [id for id in expected if id != 3]
            assert row == kept + [-1] * (5 - len(kept))
            assert task.decode_predictions(rows)[index] == " ".join(
                task.tokenizer.convert_ids_to_tokens([i for i in kept if i > 3])
            )
    metrics = task.compute_metrics(rows, examples, [0, 1, 2, 3])
    assert metrics["exact_match"] == np.mean(
        [a == b for a, b in zip(task.decode_predictions(rows), ROWS["answer"], strict=True)]
    )


def test_what_is_cut_is_said_or_refused() -> None:
    tokenizer = tiny_decoders.tokenizer(pads=True)
    short = CausalLM(tokenizer, 5)
    examples = encoded(short)
    assert (examples.truncated_prompts, examples.truncated_answers) == (4, 1)
    assert short.describe_examples(examples) == (
        "4 of 4 prompts lost their beginning: model.max_length is 5 tokens",
        "1 of 4 answers lost their end: model.max_length is 5 tokens",
    )
    assert all(ids[0] == 2 for ids in examples.ids)  # <s> stays
    assert examples.answers == tuple(ROWS["answer"])  # whole, to compare generated ones with
    assert made().describe_examples(encoded(made())) == ()


def test_chat_prompts_are_the_template_s() -> None:
    """System message, earlier messages, the user's, then what is learnt, with the template's own end."""
    task = made(chat=True, system="a0")
    history = '[{"role": "user", "content": "b1"}, {"role": "assistant", "content": "c1"}]'
    examples = encoded(task, history=["[]", history, "[]", "[]"])
    texts = [task.tokenizer.decode(ids) for ids in examples.ids]
    assert texts[0] == "system a0 </s> user Q: a1 a2 a3 A: </s> assistant b1 b2 b3 </s>"
    assert texts[1] == "system a0 </s> user b1 </s> assistant c1 </s> user Q: b0 A: </s> assistant c0 </s>"
    answers = [task.tokenizer.decode(ids[start:]) for ids, start in zip(examples.ids, examples.starts, strict=True)]
    assert answers[:2] == ["b1 b2 b3 </s>", "c0 </s>"]


def test_a_chat_template_that_does_not_fit_is_refused() -> None:
    cases = {
        None: "has no chat template",
        "{{ raise_exception('no system') }}": "no system",
        "{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}": "changes a prompt once",
    }
    for template, words in cases.items():
        task = made(chat=True)
        task.tokenizer.chat_template = template
        with refused("data.chat", words):
            encoded(task)


def test_an_empty_prompt_begins_somewhere() -> None:
    """A tokenizer without a sign for the beginning gives no id for an empty text."""
    task = made(chat=True)
    task.tokenizer.chat_template = "{% if messages|length > 1 %}{{ messages[1]['content'] }}{% endif %}"
    examples = encoded(task)
    assert examples.starts.tolist() == [1] * 4
    assert all(ids[0] == 2 for ids in examples.ids)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 32), st.booleans())
def test_the_prompt_gives_way_before_the_answer(prompt: int, answer: int, length: int, keep_first: bool) -> None:
    given_ids, learnt = list(range(prompt)), list(range(100, 100 + answer))
    kept, rest = truncate(given_ids, learnt, length, keep_first)
    assert len(kept) >= 1
    assert len(rest) >= 1
    assert len(kept) + len(rest) == min(length, prompt + answer)
    assert rest == learnt[: len(rest)]
    assert kept[1:] == given_ids[len(given_ids) - len(kept) + 1 :]  # the end of the prompt, which the answer follows
    assert kept[0] == (0 if keep_first else given_ids[-len(kept)])
    if len(rest) < answer:  # only where the prompt is at its shortest already
        assert len(kept) == min(prompt, max(1, length // 4))
    if prompt + answer <= length:
        assert (kept, rest) == (given_ids, learnt)


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
    with refused("texts", r"`texts`: 'red1' is not accepted\. Expected texts with \[MASK\]"):
        fedspan.predict(tmp_path / "run", ["red1"])
    with refused("texts", "takes no pairs"):
        fedspan.predict(tmp_path / "run", [("red1", "red2")])


def test_what_cannot_learn_masked_words_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny_masked.settings(tmp_path)
    with refused("model.name"):
        prepare(parse_config({**values, "model": {**values["model"], "name": str(tiny_folder / "bert")}}))
    with refused("task_options.mask_share"):
        parse_config({**values, "task_options": {"mask_share": 1.0}})
    prepared = prepare(parse_config(values))
    cache, reason = PrefixCache.make(prepared.engine.adapted, prepared.task, prepared.train, budget=1 << 20)
    assert (cache, reason) == (None, "a part of the inputs is drawn at random for every batch")
    shutil.copytree(tmp_path / "masked", tmp_path / "unmasked")
    tokenizer = tiny_masked.make_tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "unmasked")
    with refused("model.name"):
        prepare(parse_config({**values, "model": {**values["model"], "name": str(tmp_path / "unmasked")}}))
