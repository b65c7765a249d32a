"""Transformers trainers of the tiny corpus's clients, on the batches that fedspan's own engines draw."""

import gc
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

import fedspan
from fedspan.assembly.run import Prepared
from fedspan.tasks.task import Examples, Task
from fedspan.training.batching import draw_training_batches
from fedspan.training.trainers.local import RoundPlan
from fedspan.training.trainers.optimizer import JobOptimizer
from fedspan.training.trainers.trainer_engine import Owner, TrainerEngine
from fedspan.training.trainers.transformers import TransformersTrainer

from . import tiny, tiny_seq2seq


class Rows(torch.utils.data.Dataset[int]):
    """Indices of a client's examples."""

    def __init__(self, indices: np.ndarray) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: int) -> int:
        return int(self.indices[at])


class SameBatches(Trainer):
    """A trainer that draws its batches as fedspan's own engines do."""

    plan: RoundPlan
    draw: Any

    def get_train_dataloader(self) -> Any:
        return DataLoader(_Identity(), batch_sampler=_Epochs(self.draw, self.plan), collate_fn=self.data_collator)


class _Identity(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, at: int) -> int:
        return at


class _Epochs:
    """The batches of one epoch after another, as a batch sampler."""

    def __init__(self, draw: Any, plan: RoundPlan) -> None:
        self._draw, self._plan, self._epoch = draw, plan, 0

    def __len__(self) -> int:
        return len(self._draw(self._plan, 1))

    def __iter__(self) -> Iterator[list[int]]:
        self._epoch += 1
        yield from self._draw(self._plan, self._epoch)[(self._epoch - 1) * len(self) :]


class _Planned(TransformersTrainer):
    """Tells the trainer which round it trains."""

    def train(self, plan: RoundPlan, optimizer: JobOptimizer) -> float:
        self.trainer.plan = plan
        return super().train(plan, optimizer)


QUIET: Mapping[str, Any] = {
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "logging_strategy": "no",
}
"""Arguments of a quiet trainer."""


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Arguments of a quiet trainer that writes to a folder."""
    return TrainingArguments(**{**QUIET, "output_dir": str(folder), **changes})


def trainer_of(
    model: nn.Module, task: Task, examples: Examples, indices: np.ndarray, args: Any, config: Any
) -> Trainer:
    """A client's trainer on the model, with the batches of fedspan's engines."""
    training = config.build_training_settings()

    def draw(plan: RoundPlan, epochs: int) -> list[list[int]]:
        batches = draw_training_batches(
            indices,
            examples.lengths,
            batch_size=training.batch_size,
            epochs=epochs,
            batches=None,
            seed=config.seed,
            key=(plan.round, plan.client, plan.phase),
            group_by_length=training.group_by_length,
        )
        return [batch.tolist() for batch in batches]

    def collate(rows: list[int]) -> dict[str, torch.Tensor]:
        return dict(task.collate(examples, rows, torch.device("cpu")))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = SameBatches(model=model, args=args, train_dataset=Rows(indices), data_collator=collate)
    made.draw = draw
    return made


def with_trainers(prepared: Prepared, config: Any, folder: Path, **changes: Any) -> Prepared:
    """A run of other settings on a loaded model and its data, whose clients train with Transformers trainers."""
    made = tiny.variant(prepared, config)
    adapted, clients = prepared.engine.adapted, made.federation.clients
    owners: dict[str, Owner] = {}
    for id in clients:
        args = arguments(folder, gradient_accumulation_steps=config.training.gradient_accumulation_steps, **changes)
        built = trainer_of(adapted.model, made.task, made.train, clients[id].train, args, config)
        owners[id] = Owner(_Planned(built), adapted)
    engine = TrainerEngine(owners, made.task, config.build_training_settings(), config.seed)
    tiny.use_engine(made.federation, engine)
    return replace(made, engine=engine)


@cache
def site_rows(folder: Path, owner: str) -> tuple[Any, datasets.Dataset]:
    """The tokenizer, and the encoded texts of a site of the tiny corpus; many tests read them and none changes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    rows = datasets.load_dataset("csv", data_files=str(folder / "corpus.csv"), split="train").to_list()
    encoded = [
        {**tokenizer(row["text"]), "labels": tiny.LABELS.index(row["label"])} for row in rows if row["site"] == owner
    ]
    return tokenizer, datasets.Dataset.from_list(encoded)


def spare_the_collector() -> None:
    """Exempt all that was imported so far from the garbage collector.

    Accelerate collects twice in every round and evaluation, and each time it would walk over all modules of TRL and
    sentence-transformers, which took most of a test's time.
    """
    gc.collect()
    gc.freeze()


def make_trainer(folder: Path, owner: str, **changes: Any) -> Trainer:
    """The trainer of a site of the tiny corpus, as its owner would write it."""
    tokenizer, encoded = site_rows(folder, owner)
    return Trainer(
        model=changes.pop("model", None) or tiny.fresh_classifier(folder / "bert"),
        args=changes.pop("args", None) or arguments(folder / "trainer"),
        train_dataset=encoded.select(range(8)),
        eval_dataset=encoded.select(range(8, 11)),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        **changes,
    )


def save_without_head(kind: str, folder: Path, path: Path) -> Path:
    """Save a trained model, for whose classifier a pooler is new beside the head (bert), or a head of two layers."""
    if kind == "bert":
        model: Any = AutoModel.from_pretrained(folder / "bert", add_pooling_layer=False)
    else:
        model = tiny_seq2seq.FAMILIES[kind](vocab_size=tiny.VOCABULARY_SIZE, eos_token_id=3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.fill_(0.1)
    model.save_pretrained(path)
    tiny.save_tokenizer(path)
    return path


NEW_MODULES: Mapping[str, list[str]] = {
    "bert": ["bert.pooler.dense"],
    "bart": ["classification_head.dense", "classification_head.out_proj"],
    "t5": ["classification_head.dense", "classification_head.out_proj"],
}
"""The modules of ``save_without_head``'s classifiers that neither its checkpoint has nor PEFT's rules train."""


def torch_trainer(folder: Path, owner: str, processor: Any = None) -> fedspan.TorchTrainer:
    """The same owner's plain PyTorch loop, with the batches of ``make_trainer`` in their order."""
    trainer = make_trainer(folder, owner)
    model = trainer.model
    loader = DataLoader(trainer.train_dataset, batch_size=4, collate_fn=trainer.data_collator)
    held_out = trainer.data_collator(list(trainer.eval_dataset))

    def train(round: fedspan.TrainingRound) -> None:
        for batch in round.batches(loader):
            loss = model(**batch).loss
            loss.backward()
            round.step(loss, len(batch["labels"]))

    def evaluate() -> dict[str, float]:
        return {"loss": float(model(**held_out).loss)}

    return fedspan.TorchTrainer(model, train, 8, evaluate=evaluate, validation_examples=3, processor=processor)


def sentence_encoder(folder: Path, dense: int | None = None) -> Any:
    """A sentence-transformers model without dropout around the tiny encoder; ``dense`` seeds a layer on top of it."""
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


def make_sentence_trainer(model: Any, args: Any) -> Any:
    """A trainer of scored pairs of words, whose loss is a mean over pairs."""
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    words = [f"{label}{number}" for label in tiny.LABELS for number in range(8)]
    pairs = [{"first": words[at], "second": words[at + 9], "score": at % 3 / 2} for at in range(8)]
    train, loss = datasets.Dataset.from_list(pairs), losses.CosineSimilarityLoss(model)
    return library.SentenceTransformerTrainer(
        model=model, args=args, loss=loss, train_dataset=train, eval_dataset=train.select(range(4))
    )
