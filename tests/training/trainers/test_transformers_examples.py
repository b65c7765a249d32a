"""What a Transformers trainer is set to in a round: numbers of examples, names of measures, and how it is undone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from fedspan.errors import FedspanError
from fedspan.training.trainers.transformers import count_examples, get_length, translate_metrics
from fedspan.training.trainers.transformers_round import restore_losses


class Unsized:
    """A data set of unknown length."""

    def __iter__(self) -> Any:
        return iter(())


def test_lengths_of_data_sets_are_added() -> None:
    assert get_length([1, 2, 3]) == 3
    assert get_length({"pairs": [1, 2], "scores": {"a": [3], "b": []}}) == 3
    with pytest.raises(FedspanError, match="the trainer has no train_dataset"):
        get_length(None)
    with pytest.raises(FedspanError, match="the number of examples of an IterableDataset is unknown"):
        get_length({"pairs": [1, 2], "stream": Unsized()})


class Trainer:
    """A trainer that hands out batches, and calls what was added to it when training begins."""

    def __init__(self, *batches: Any) -> None:
        self.batches = list(batches)
        self.callback_handler = SimpleNamespace(callbacks=list[TrainerCallback]())

    def add_callback(self, callback: TrainerCallback) -> None:
        self.callback_handler.callbacks.append(callback)

    def remove_callback(self, callback: TrainerCallback) -> None:
        self.callback_handler.callbacks.remove(callback)

    def get_batch_samples(self, *_: Any) -> tuple[list[Any], int]:
        return self.batches, 5


class Counter:
    """Counts the examples of each step."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    def count_examples(self, examples: int) -> None:
        self.counted.append(examples)


@pytest.mark.parametrize(
    ("batches", "examples"),
    [
        ([{"ids": torch.zeros(3, 2)}, {"ids": torch.zeros(2, 2)}], 5),
        ([{"number": torch.tensor(1.0), "ids": torch.zeros(4, 2)}], 4),  # a scalar has no rows
        ([[torch.zeros(2, 3), torch.zeros(9)]], 2),
        ([], 0),
    ],
)
def test_rows_of_the_first_tensor_count_without_a_collator(batches: list[Any], examples: int) -> None:
    trainer: Any = Trainer(*batches)
    counter: Any = Counter()
    with count_examples(trainer, counter):
        assert trainer.get_batch_samples(None) == (batches, 5)
    assert counter.counted == [examples]
    assert "get_batch_samples" not in vars(trainer)
    assert trainer.callback_handler.callbacks == []


def test_batches_without_a_tensor_are_refused() -> None:
    trainer: Any = Trainer({"prompt": ["a", "b"]})
    counter: Any = Counter()
    with (
        count_examples(trainer, counter),
        pytest.raises(FedspanError, match=r"its batches \(dict\) hold no tensor, by whose rows examples are counted"),
    ):
        trainer.get_batch_samples()


def test_a_collator_s_examples_count_whatever_rows_its_tensors_have() -> None:
    """Two rows of each of three examples; afterwards the loader has its own collator, and the batch its own entries."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"ids": torch.zeros(2 * len(rows), 4)}

    loader = SimpleNamespace(collate_fn=collate)
    trainer: Any = Trainer()
    counter: Any = Counter()
    with count_examples(trainer, counter):
        (callback,) = trainer.callback_handler.callbacks
        callback.on_train_begin(None, None, None, train_dataloader=SimpleNamespace(base_dataloader=loader))
        trainer.batches = [loader.collate_fn([1, 2, 3])]
        (batch,), _ = trainer.get_batch_samples()
        assert batch.keys() == {"ids"}
    assert counter.counted == [3]
    assert loader.collate_fn is collate


def test_a_metric_of_several_evaluators_is_none_of_fedspan_s() -> None:
    several = {"dev_spearman_cosine": 0.2, "test_spearman_cosine": 0.4}
    values = {**several, "cosine_ndcg@10": 0.5, "search_cosine_recall@10": 0.6, "rewards/accuracies": 0.7}
    expected = {**several, "ndcg_at_10": 0.5, "recall_at_10": 0.6, "reward_accuracy": 0.7}
    assert translate_metrics(values) == expected
    own = {"spearman": 0.1, "dev_spearman_cosine": 0.2, "rewards/margins": 1.0, "reward_margin": 2.0}
    assert translate_metrics(own) == own


def test_losses_in_a_dict_and_in_other_losses_hold_the_model_again() -> None:
    model, wrapper = torch.nn.Linear(3, 2), torch.nn.Sequential()
    inner, outer = torch.nn.Module(), torch.nn.Module()
    inner.model = outer.model = model
    outer.loss = inner
    with restore_losses(SimpleNamespace(loss={"pairs": outer}), model):
        inner.model = outer.model = wrapper
    assert inner.model is outer.model is model
    assert outer.loss is inner
