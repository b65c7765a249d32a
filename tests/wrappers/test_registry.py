"""How a config names wrappers."""

from __future__ import annotations

from fedspan.config import parse_config
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedprox import FedProx
from helpers.valid_config import SPEC, VALID


def test_wrappers_are_written_as_keys_or_with_their_options() -> None:
    wrappers = ["fedprox", {"name": "fedadam", "lr": 0.1, "beta1": 0.5}, {"name": "fedpaq", "bits": 4}]
    config = parse_config({**VALID, "method": {"name": "fedit", "r": 4, "wrappers": wrappers}})
    assert config.method.options == {"r": 4}
    assert config.method.title == "fedit+fedprox+fedadam+fedpaq"
    method = config.wrap_method(config.build_method(SPEC))
    assert isinstance(method, FedPAQ)
    assert isinstance(method.inner, FedAdam)
    assert isinstance(method.inner.inner, FedProx)
    assert isinstance(method.inner.inner.inner, WithExtras)
    assert (method.bits, method.seed) == (4, 3)
    assert (method.inner.lr, method.inner.beta1, method.inner.tau) == (0.1, 0.5, 1e-3)
    assert parse_config(config.model_dump(mode="json")) == config
