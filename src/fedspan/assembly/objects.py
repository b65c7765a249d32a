"""Data, models and tokenizers that were passed from Python: whether a run needs them again, and what they hold."""

from __future__ import annotations

from typing import Any

from fedspan.assembly.model import ModelObjects
from fedspan.assembly.run import Objects
from fedspan.config import RunConfig
from fedspan.data.files import FROM_TRAINERS, IN_MEMORY
from fedspan.data.objects import read_objects
from fedspan.errors import FedspanError
from fedspan.models.names import FROM_PYTHON

_PASSED = "the {} passed from Python: pass {} again as {}= of {} (the command line has no such option)"


def collect_objects(config: RunConfig, call: str, data: Any, model: Any, tokenizer: Any) -> Objects:
    """Collect the objects that a run was started from.

    Args:
        config: Config of the run.
        call: The Python function that takes them, for errors: ``fedspan.resume``.
        data: The data; None: read as the config says.
        model: The model; None: loaded by name.
        tokenizer: The tokenizer or image processor; None: that of the model's name.

    Raises:
        FedspanError: If the run was started from data or a model that are missing here, or the data cannot be read.
    """
    if data is None:
        require_named_data(config, call)
    if model is None:
        require_named_model(config, call)
    source = None if data is None else read_objects(data, config.partition.clients)
    return Objects(source, ModelObjects(model, tokenizer))


def require_named_data(config: RunConfig, call: str, argument: str = "data") -> None:
    """Check that the config of a run names its data.

    Args:
        config: Config of the run.
        call: The Python function that takes data, for the error.
        argument: The argument of that function.

    Raises:
        FedspanError: If the data were passed from Python.
    """
    if config.data.train == FROM_TRAINERS:
        problem = "the clients of this run trained with trainers passed from Python: pass them again as trainers= of "
        raise FedspanError("trainers", None, problem=f"{problem}fedspan.simulate(..., resume=True)")
    if config.data.train == IN_MEMORY:
        raise FedspanError("data", None, problem=_PASSED.format("data of this run were", "them", argument, call))


def require_named_model(config: RunConfig, call: str) -> None:
    """Check that the config of a run names its model.

    Args:
        config: Config of the run.
        call: The Python function that takes a model, for the error.

    Raises:
        FedspanError: If the model was passed from Python.
    """
    if config.model.name.startswith(FROM_PYTHON):
        raise FedspanError("model", None, problem=_PASSED.format("model of this run was", "it", "model", call))
