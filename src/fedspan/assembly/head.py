"""Start of a run's head: by the config, or chosen by task, model and rules of the run."""

from __future__ import annotations

from dataclasses import replace

from fedspan.assembly.model import RunModel
from fedspan.clients.statistics import compute_client_statistics
from fedspan.config import RunConfig
from fedspan.core.heads import HeadStatistics
from fedspan.core.tensors import split_extras
from fedspan.errors import FedspanError
from fedspan.federation.federation import Federation
from fedspan.federation.head_start import HeadStart, compute_head_tensors, is_start_pretrained, start_head
from fedspan.federation.progress import ClientState, Progress
from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import build_tiny_batch, enter_evaluation
from fedspan.models.head import FeatureTap, NoOutputLayer, OutputLayer, find_output_layer
from fedspan.models.names import FROM_PYTHON
from fedspan.models.sentence_encoders import PooledClassifier
from fedspan.tasks.losses import get_logits
from fedspan.wrappers.head_rounds import HeadRounds, NewHead

_AS_PASSED = (
    "the head starts with the weights of the model that was passed; if it is untrained, set model.head_init: {}"
)


def build_head_start(config: RunConfig, model: RunModel) -> tuple[HeadStart | None, tuple[str, ...]]:
    """Return how the run's head starts (None: as loaded), and notes for the user."""
    requested, is_passed = config.model.head_init, config.model.name.startswith(FROM_PYTHON)
    kind, reason = config.head_kind
    try:
        layer = _find_output_layer(model.adapted) if kind is not None else None
    except NoOutputLayer as error:
        kind, reason, layer = None, str(error), None
        if requested != "auto":
            raise FedspanError(
                "model.head_init", requested, "random", problem=f"the model's head cannot start: {error}"
            ) from error
    if kind is not None and layer is not None and requested == "auto" and not _is_new(model, layer):
        # A head that was trained for these labels, in the checkpoint or in model.adapter.
        return None, (_AS_PASSED.format(kind),) if is_passed else ()
    if kind is None or layer is None:
        start = "with the weights of the model that was passed" if is_passed else "at random"
        return None, (f"the head starts {start}: {reason}",) if reason else ()
    bound, definition = _compute_bound(config, model.adapted, layer), config.task_definition
    has_words = definition.target_type == "labels" and kind != "by-label"
    most_words = config.model.max_length if has_words else 1
    return HeadStart(kind, layer, bound, most_words), ()


def find_new_head(config: RunConfig, model: RunModel) -> NewHead | None:
    """Return the head that the run's first rounds may train alone; None: no such rounds, or the head is not new."""
    if not config.head_rounds:
        return None
    try:
        layer = _find_output_layer(model.adapted)
    except NoOutputLayer:
        return None
    norm = _get_feature_norm(model.adapted) or layer.features**0.5
    is_alone = set(model.new_modules) == {layer.path}
    return NewHead(layer.path, layer.bias, norm, is_alone) if _is_new(model, layer) else None


def _find_output_layer(adapted: AdaptedModel) -> OutputLayer:
    """Find the output layer of a model, and check on a forward pass of a tiny batch that it computes the logits.

    Raises:
        NoOutputLayer: If there is none, or the model cannot be called with tokens or images.
    """
    layer = find_output_layer(adapted)
    tap = FeatureTap(adapted.model, layer)
    with enter_evaluation(adapted.model), tap.record():
        try:
            logits = get_logits(adapted.model(**build_tiny_batch(adapted.model)))
        except Exception as error:  # a model may raise anything on a batch that it does not expect
            lines = str(error).strip().splitlines()
            raise NoOutputLayer(lines[0].rstrip(".") if lines else type(error).__name__) from error
        tap.take(logits)
    return layer


def _is_new(model: RunModel, layer: OutputLayer) -> bool:
    return any(layer.path == path or layer.path.startswith(f"{path}.") for path in model.new_modules)


def _compute_bound(config: RunConfig, adapted: AdaptedModel, layer: OutputLayer) -> float:
    """Return the norm to which features are clipped: secure sums need a bound."""
    if config.federation.secure is None:
        return 0.0
    return _get_feature_norm(adapted, pair=6**0.5) or 2.0 * layer.features**0.5  # a pair of opposite vectors


def _get_feature_norm(adapted: AdaptedModel, pair: float = 2.0) -> float | None:
    """Return the norm of features of normalized vectors, or of a pair's (2: with a cosine of 0); None: they are not."""
    pooling = adapted.model.pooling if isinstance(adapted.model, PooledClassifier) else None
    return None if pooling is None or not pooling.normalize else pair if pooling.pairs else 1.0


def compute_baseline_head(head: HeadStart | None) -> HeadStart | None:
    """Return the head's start of a baseline, whose data are in this process: not clipped."""
    return None if head is None else replace(head, bound=0.0)


def begin(federation: Federation, head: HeadStart | None) -> Progress:
    """Return the progress before the first round, with a head from the statistics of all clients.

    Raises:
        TooFewReplies: If too few clients send statistics.
    """
    return begin_at_random(federation) if head is None else start_head(federation, federation.begin(), head)


def begin_at_random(federation: Federation) -> Progress:
    """Return the progress before the first round, with the head as loaded, which the first rounds may train alone."""
    progress, method = federation.begin(), federation.method
    if not isinstance(method, HeadRounds):
        return progress
    state, is_personal = progress.state, method.declare_claims().personal
    is_short = (
        not is_personal and not state.base.moved and is_start_pretrained(method, state, federation.engine.adapted)
    )
    return replace(progress, state=method.request(state, is_short=is_short))


def begin_locally(federation: Federation, head: HeadStart | None) -> Progress:
    """Return the progress before the first round, with a head of each client from its own examples alone.

    Args:
        federation: A federation of personal models, whose clients are in this process.
        head: How the heads start; None: as loaded. A client without examples has the head as loaded.
    """
    progress = federation.begin()
    if head is None:
        return progress
    engine, loaded = federation.engine, split_extras(progress.state.tensors)[1]
    states: dict[str, ClientState] = {}
    with engine.stages.stage("statistics", sum(len(data.train) for data in federation.clients.values())):
        for id, data in federation.clients.items():
            if not len(data.train):
                continue
            statistics = compute_client_statistics(engine, None, federation.examples, data.train, head.kind, 0.0, 1)
            fitted = compute_head_tensors(head, HeadStatistics.from_tensors(statistics), len(data.train))
            states[id] = ClientState({**loaded, **fitted})
    return replace(progress, states=states, last_rounds=dict.fromkeys(states, 0))
