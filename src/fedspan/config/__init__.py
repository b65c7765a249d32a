"""The configuration of a run: pydantic models, read from YAML, overridden by ``--set a.b=c``.

Every mistake raises a ``FedspanError`` that names the field, the value and what would be right.
"""

from fedspan.config.method import MethodConfig, WrapperConfig
from fedspan.config.reading import (
    ConfigLike,
    load_config,
    load_yaml,
    override,
    parse_config,
    parse_yaml,
    read_values,
    to_plain_values,
)
from fedspan.config.run import RunConfig
from fedspan.federation.config import EvaluationConfig, FederationConfig
from fedspan.models.config import ModelConfig

__all__ = [
    "ConfigLike",
    "EvaluationConfig",
    "FederationConfig",
    "MethodConfig",
    "ModelConfig",
    "RunConfig",
    "WrapperConfig",
    "load_config",
    "load_yaml",
    "override",
    "parse_config",
    "parse_yaml",
    "read_values",
    "to_plain_values",
]
