"""The world in which mistakes are made: one for all of these tests, as it trains runs of its own."""

import pytest

from helpers.mistakes.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The folder of models, data and runs in which mistakes are made."""
    return World(tmp_path_factory.mktemp("world"))
