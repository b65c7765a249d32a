"""Decoders of five families, trained as language models and as classifiers: what PEFT loads gives the run's numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.run_folder import RunFolder
from fedspan.runs.trained_models import write_adapters
from helpers import tiny_decoders
from helpers.families import others_slow

families = pytest.mark.parametrize("family", others_slow(tiny_decoders.FAMILIES, ["llama", "gpt2"]))


def classifier(folder: Path, family: str, **changes: Any) -> dict[str, Any]:
    data = {"train": str(folder / "questions.jsonl"), "text": "question", "label": "kind", "test_fraction": 0.2}
    return {**tiny_decoders.settings(folder, family, **changes), "task": "sequence-classification", "data": data}


def exported(prepared: Prepared, tmp_path: Path, auto: Any, **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """After two rounds: PEFT's model, and logits of both on one padded batch."""
    progress = prepared.federation.begin()
    for _ in range(2):
        progress = prepared.federation.run_round(progress).progress
    adapter = write_adapters(prepared, progress, RunFolder(tmp_path))["global"]
    base = auto.from_pretrained(prepared.config.model.name, attn_implementation="eager", **options)
    base.config.pad_token_id = prepared.task.tokenizer.pad_token_id
    theirs = PeftModel.from_pretrained(base, str(adapter)).eval()
    batch = prepared.task.collate(prepared.train, [0, 5, 9], torch.device("cpu"))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    job = prepared.evaluator.build_job(progress, None)
    prepared.engine.adapted.model.eval()
    prepared.engine.adapted.install(job.parametrization, job.tensors, frozenset())
    with torch.no_grad():
        return theirs, prepared.engine.adapted.model(**inputs).logits, theirs(**inputs).logits


@families
def test_a_language_model_s_adapter_gives_the_same_logits_in_peft(family: str, decoders: Path, tmp_path: Path) -> None:
    prepared = prepare(parse_config(tiny_decoders.settings(decoders, family)))
    before = prepare(parse_config(tiny_decoders.settings(decoders, family)))
    theirs, ours, logits = exported(prepared, tmp_path, AutoModelForCausalLM)
    assert torch.allclose(ours, logits, rtol=1e-4, atol=1e-5)
    batch = before.task.collate(before.train, [0, 5, 9], torch.device("cpu"))
    with torch.no_grad():
        untrained = before.engine.adapted.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert not torch.allclose(ours, untrained.logits, atol=1e-2)  # and it did learn something
    assert theirs.peft_config["default"].task_type == "CAUSAL_LM"


@families
def test_a_decoder_s_classifier_gives_the_same_logits_in_peft(family: str, decoders: Path, tmp_path: Path) -> None:
    """Also the tokenizers that pad on the left, or not at all: the padding is on the right, behind the last token."""
    prepared = prepare(parse_config(classifier(decoders, family)))
    _, ours, logits = exported(prepared, tmp_path, AutoModelForSequenceClassification, num_labels=4)
    assert torch.allclose(ours, logits, rtol=1e-4, atol=1e-5)
    batch = prepared.task.collate(prepared.train, [0, 5, 9], torch.device("cpu"))
    assert (batch["attention_mask"][:, 0] == 1).all()
    assert (batch["attention_mask"].sum(1) == torch.from_numpy(prepared.train.lengths[[0, 5, 9]])).all()


@families
def test_padding_does_not_change_what_a_decoder_s_classifier_says(family: str, decoders: Path) -> None:
    prepared = prepare(parse_config(classifier(decoders, family)))
    job, indices = prepared.evaluator.build_job(prepared.federation.begin(), None), np.arange(12)
    together = prepared.engine.predict(job, prepared.train, indices, 12)
    alone = prepared.engine.predict(job, prepared.train, indices, 1)
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_run_of_a_language_model_from_config_to_answers(family: str, decoders: Path, tmp_path: Path) -> None:
    """Loss falls, the best round has the least, and an exported model answers as the run's report says."""
    changes = {"federation": {"rounds": 4}, "training": {"lr": 0.02, "local_steps": None, "batch_size": 8}}
    values = {**tiny_decoders.settings(decoders, family, **changes), "baselines": ["centralized"]}
    report = fedspan.run(values, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["validation"]["loss"] for line in lines]
    assert (report.task, report.metric) == ("causal-lm", "loss")
    assert rows[-1] < rows[0]
    assert report.best_round == 1 + int(np.argmin(rows))
    assert set(report.scores["test"]) == {"loss", "perplexity", "token_accuracy", "exact_match"}
    assert set(report.baselines["centralized"]["scores"]["clients"]) == {
        "loss",
        "perplexity",
        "token_accuracy",
        "worst",
    }
    measured = fedspan.evaluate(tmp_path / "run")
    for name, value in report.scores["test"].items():
        assert measured[name] == pytest.approx(value, rel=1e-4)
    questions = [row["text"].removeprefix("Q: ").removesuffix(" A:") for row in report.examples]
    assert fedspan.predict(tmp_path / "run", questions) == [row["prediction"] for row in report.examples]
    merged = fedspan.export(tmp_path / "run", tmp_path / "merged", "merged")
    assert fedspan.predict(merged, questions) == [row["prediction"] for row in report.examples]
    assert fedspan.evaluate(merged, data=decoders / "questions.jsonl", generate=False)["examples"] == 100
