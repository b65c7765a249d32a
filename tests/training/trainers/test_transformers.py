"""A federation through each class of trainers: its adapter scores as the trainers' own evaluation reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from peft import PeftModel

import fedspan
from fedspan.config.node import NodeConfig
from fedspan.deployment.trainer_node import TrainerNode
from helpers import tiny_decoders
from helpers.trainer_clients import QUIET

OWNERS = (0, 1)
ROWS = 6
DECODER = tiny_decoders.TARGETS["llama"]
ENCODER = ["query", "value"]
Make = Callable[[Path, int, Any], Any]


def rows(owner: int, *columns: str) -> list[dict[str, str]]:
    """An owner's texts, another one for each row and column."""
    words = [f"{kind}{number}" for kind in "abcd" for number in range(6)]
    return [
        {column: " ".join(words[(owner + row + 3 * at) % 24 :][:4]) for at, column in enumerate(columns)}
        for row in range(ROWS)
    ]


def split(table: list[dict[str, Any]]) -> dict[str, Any]:
    data = datasets.Dataset.from_list(table)
    return {"train_dataset": data.select(range(4)), "eval_dataset": data.select(range(4, ROWS))}


def decoder(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "llama-lm", dtype=torch.float32)


def sft(folder: Path, owner: int, model: Any) -> Any:
    trl = pytest.importorskip("trl")
    args = trl.SFTConfig(**QUIET, output_dir=str(folder / "trainer"), bf16=False, max_length=16)
    tokens = tiny_decoders.tokenizer(pads=True)
    return trl.SFTTrainer(model=model, args=args, processing_class=tokens, **split(rows(owner, "text")))


def dpo(folder: Path, owner: int, model: Any) -> Any:
    trl = pytest.importorskip("trl")
    args = trl.DPOConfig(**QUIET, output_dir=str(folder / "trainer"), bf16=False, max_length=16)
    data = split(rows(owner, "prompt", "chosen", "rejected"))
    tokens = tiny_decoders.tokenizer(pads=True)
    return trl.DPOTrainer(model=model, ref_model=decoder(folder), args=args, processing_class=tokens, **data)


def kto(folder: Path, owner: int, model: Any) -> Any:
    trl = pytest.importorskip("trl")
    args = trl.KTOConfig(**QUIET, output_dir=str(folder / "trainer"), bf16=False, max_length=16)
    table = [{**row, "label": at % 2 == 0} for at, row in enumerate(rows(owner, "prompt", "completion"))]
    tokens = tiny_decoders.tokenizer(pads=True)
    return trl.KTOTrainer(model=model, ref_model=decoder(folder), args=args, processing_class=tokens, **split(table))


def encoder_decoder(folder: Path) -> Any:
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(5)
    return transformers.T5ForConditionalGeneration(config)


def seq2seq(folder: Path, owner: int, model: Any) -> Any:
    args = transformers.Seq2SeqTrainingArguments(**QUIET, output_dir=str(folder / "trainer"))
    table = [{"input_ids": [owner + 2 + at, 3, 4], "labels": [owner + 5 + at, 1]} for at in range(ROWS)]
    return transformers.Seq2SeqTrainer(model=model, args=args, **split(table))


def sentence_encoder(folder: Path, dense: int | None = None) -> Any:
    models = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    encoder = models.Transformer(str(folder / "bert"), max_seq_length=16)
    encoder.model.eval()
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    library = pytest.importorskip("sentence_transformers")
    modules = [encoder, models.Pooling(16)]
    if dense is not None:
        torch.manual_seed(dense)
        modules.append(models.Dense(16, 8))
    return library.SentenceTransformer(modules=modules, device="cpu")


def sentences(folder: Path, owner: int, model: Any) -> Any:
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    args = library.SentenceTransformerTrainingArguments(**QUIET, output_dir=str(folder / "trainer"))
    words = [f"{label}{number}" for label in ("admin", "billing", "lab", "symptom") for number in range(8)]
    table = [{"anchor": words[owner + at], "positive": words[owner + at + 9]} for at in range(ROWS)]
    return library.SentenceTransformerTrainer(
        model=model, args=args, loss=losses.MultipleNegativesRankingLoss(model), **split(table)
    )


CASES: dict[str, tuple[Callable[[Path], Any], Make, list[str]]] = {
    "SFTTrainer": (decoder, sft, DECODER),
    "DPOTrainer": (decoder, dpo, DECODER),
    "KTOTrainer": (decoder, kto, DECODER),
    "Seq2SeqTrainer": (encoder_decoder, seq2seq, ["q", "v"]),
    "SentenceTransformerTrainer": (sentence_encoder, sentences, ENCODER),
}


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_of_a_federation_scores_as_its_trainers_reported(
    name: str, tiny_folder: Path, decoders: Path, tmp_path: Path
) -> None:
    load, make, targets = CASES[name]
    folder = tiny_folder if name == "SentenceTransformerTrainer" else decoders
    config = {
        "model": {"target_modules": targets},
        "method": {"name": "rolora", "r": 2},
        "federation": {"rounds": 2},
        "training": {"lr": 0.05, "local_steps": 2},
    }
    trainers = {f"owner-{owner}": make(folder, owner, load(folder)) for owner in OWNERS}
    before = sum(trainer.evaluate()["eval_loss"] for trainer in trainers.values()) / len(OWNERS)
    report = fedspan.simulate(config, tmp_path / "run", trainers=trainers)
    reported = report.scores["validation"]["loss"]
    assert reported != pytest.approx(before, rel=1e-4)  # it learned something
    model = load(folder)
    inner = getattr(model, "transformers_model", model)
    adapted = PeftModel.from_pretrained(copy.deepcopy(inner), tmp_path / "run" / "adapter").merge_and_unload()
    inner.load_state_dict(adapted.state_dict())
    losses = [make(folder, owner, copy.deepcopy(model)).evaluate()["eval_loss"] for owner in OWNERS]
    assert sum(losses) / len(OWNERS) == pytest.approx(reported, rel=1e-4)


def test_weights_outside_of_the_transformers_model_are_compared(tiny_folder: Path, tmp_path: Path) -> None:
    trainers = {str(seed): sentences(tiny_folder, 0, sentence_encoder(tiny_folder, seed)) for seed in OWNERS}
    config = {"model": {"target_modules": ENCODER}, "method": {"name": "rolora", "r": 2}}
    with pytest.raises(fedspan.FedspanError, match="frozen weights of the model of '1' differ"):
        fedspan.simulate(config, tmp_path / "run", trainers=trainers)
    config_of_node = NodeConfig.model_validate({"id": "a", "server": "localhost:1", "folder": str(tmp_path / "node")})
    with pytest.raises(fedspan.FedspanError, match="outside of the Transformers model"):
        TrainerNode(config_of_node, trainers["0"])
