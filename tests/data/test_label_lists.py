"""Separators of several labels in one text, and columns that combine the same few labels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fedspan.data.label_lists import find_combined_labels, find_separator


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        (["a", None, "", "b;c"], ";"),
        (["a,b", "c;d", "e|f"], "|"),  # wherever it stands, the bar comes first
        (["a,b", "c;d"], ";"),
        (["a b", "c"], None),
        ([], None),
    ],
)
def test_a_separator_is_the_first_that_occurs(texts: Sequence[str | None], separator: str | None) -> None:
    assert find_separator(texts) == separator


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        (["a", "b", "a|b", "b | c"], "|"),  # 3 labels in 4 combinations
        (["Bonn, west", "Ulm, south"], None),  # 4 in 2
        (["a", "b", "c", "a,b", None, ""], ","),  # a fourth of the texts that there are
        (["a", "b", "c", "c", "a,b"], ","),  # a fifth
        (["a", "b", "c", "c", "c", "a,b"], None),  # a sixth
        (["a|", "|a", "a"], None),  # one label alone
        (["a", "b"], None),
    ],
)
def test_many_combinations_of_few_labels_are_lists(texts: Sequence[str | None], separator: str | None) -> None:
    assert find_combined_labels(texts) == separator
