"""The aggregation protocol that a config selects."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fedspan.config import RunConfig
from fedspan.crypto import require_packages
from fedspan.federation.aggregation.aggregation import AggregationFactory
from fedspan.federation.aggregation.plaintext import PlaintextAggregation


def build_aggregation(config: RunConfig, clip: float | None = None) -> AggregationFactory:
    """Return the aggregation that a config selects.

    Args:
        config: Config of the run.
        clip: Norm to which contributions to a secure sum are clipped; None: that of the config.

    Raises:
        FedspanError: If the config selects secure aggregation and its libraries are not installed.
    """
    secure = config.federation.build_secure_settings()
    if secure is None:
        return PlaintextAggregation
    require_packages()
    from fedspan.federation.aggregation.secure import SecureAggregation  # needs fedspan[secagg]

    return partial(SecureAggregation, secure=secure if clip is None else replace(secure, clip=clip))
