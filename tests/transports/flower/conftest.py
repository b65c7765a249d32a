"""Tests may be coroutines."""

import asyncio
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), 120))
    return True


@pytest.fixture
def identity() -> None:
    """Flower makes messages only where it knows of which task they are."""
    from fedspan.transports.flower.adapter import set_identity

    set_identity(1, 1, 1)


@pytest.fixture(scope="module")
def kept_worker() -> Iterator[None]:
    """A worker that all simulations of one worker share: Ray and the import of torch take most of a short run's time.

    Whatever a run leaves in its process is there in the next one.
    """
    ray = pytest.importorskip("ray", reason="the extra fedspan[flower-sim] is not installed")
    from fedspan.transports.ray.adapter import own_token

    # Flower's own class: if a release renames it, this fails.
    RayBackend = importlib.import_module("flwr.server.superlink.fleet.vce.backend.raybackend").RayBackend
    build, pools = RayBackend.build, list[Any]()

    def keep(backend: Any, app_fn: Any) -> None:
        if pools:
            backend.pool, backend.app_fn = pools[0], app_fn
            return
        build(backend, app_fn)
        pools.append(backend.pool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayBackend, "build", keep)
        patch.setattr(RayBackend, "terminate", lambda backend: None)
        with own_token():
            yield
    ray.shutdown()
