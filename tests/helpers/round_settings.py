"""Settings of rounds for tests of parts of a federation."""

from typing import Any

from fedspan.federation.config import RoundSettings


def make_settings(rounds: int, **changes: Any) -> RoundSettings:
    """Settings for trusted clients, without the limits that are a config's defaults."""
    return RoundSettings(rounds=rounds, **{"clip_ratio": None, "max_weight_ratio": None, **changes}).trust()


def with_rules(settings: RoundSettings, **rules: Any) -> RoundSettings:
    """Settings that check replies by the default rules, except those given; no client is given up."""
    checks = {"retries": 2, "max_norm_ratio": 10.0, "validates": True}
    return settings.trust().model_copy(update={**checks, **rules})
