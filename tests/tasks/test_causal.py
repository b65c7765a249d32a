"""Causal language models: loss on the answer alone, packing, generation, and what is cut when a text is too long."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from fedspan.tasks.causal import CausalLM, EncodedPrompts, GenerationOptions, can_attend_across_examples
from fedspan.tasks.losses import SMOOTHING
from fedspan.tasks.prompts import truncate
from helpers import tiny_decoders
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
