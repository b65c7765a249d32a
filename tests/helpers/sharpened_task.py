"""A task with an option and a metric of its own."""

from dataclasses import dataclass, replace
from typing import Any

from fedspan.tasks.classification import SEQUENCE_CLASSIFICATION, SequenceClassification
from fedspan.tasks.metrics import Metric


@dataclass(frozen=True)
class Options:
    """Options of the task ``sharpened``.

    Args:
        sharpness: Factor on the logits of a prediction.
    """

    sharpness: float = 1.0


class Sharpened(SequenceClassification):
    """Classification whose predictions are sharpened, with a metric of its own."""

    def __init__(self, *arguments: Any, sharpness: float) -> None:
        super().__init__(*arguments)
        self.sharpness = sharpness

    def predict(self, model: Any, batch: Any, *, generate: bool = False) -> Any:
        return self.sharpness * super().predict(model, batch)

    def compute_metrics(self, predictions: Any, examples: Any, indices: Any) -> dict[str, float]:
        confidence = float(predictions.softmax(1).amax(1).mean())
        return {**super().compute_metrics(predictions, examples, indices), "confidence": confidence}


def _build(tokenizer: Any, settings: Any, data: Any) -> Sharpened:
    options = OWN.parse_options(settings.options)
    return Sharpened(tokenizer, settings.labels, settings.max_length, settings.metric, sharpness=options.sharpness)


OWN = replace(
    SEQUENCE_CLASSIFICATION,
    name="sharpened",
    build=_build,
    metrics=("confidence", "accuracy", "loss"),
    custom_metrics={"confidence": Metric("confidence", True, is_percentage=True)},
    options=Options,
)
