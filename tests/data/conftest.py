"""Small data sets that the tests of the data package share."""

from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest

from fedspan.errors import FedspanError
from helpers.refusals import Refused


@pytest.fixture(scope="session")
def messages() -> datasets.Dataset:
    """400 examples of 8 labels, sorted by label as many files are, from 5 wards of different size."""
    labels = np.repeat(np.arange(8), 50)
    wards = [f"ward {min(row % 11, 4)}" for row in range(400)]
    return datasets.Dataset.from_dict(
        {"text": [f"message {row}" for row in range(400)], "label": labels, "ward": wards}
    )


@pytest.fixture(scope="session")
def refused() -> Refused:
    """Calls a function that must raise a FedspanError of that field and value, with these words in its one line."""

    def call(
        field: str, value: object, words: list[str], function: Callable[..., object], *args: object
    ) -> FedspanError:
        with pytest.raises(FedspanError) as caught:
            function(*args)
        error = caught.value
        assert (error.field, error.value) == (field, value)
        assert [word for word in words if word not in str(error)] == [], str(error)
        assert "\n" not in str(error)
        return error

    return call


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with published data sets beside the checkout, where there is one."""
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no published data sets in {folder}")
    return folder
