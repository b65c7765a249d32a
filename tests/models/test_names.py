"""Names of models."""

from __future__ import annotations

from fedspan.models.names import get_published_name, resolve_model


def test_other_names_are_left_to_transformers() -> None:
    for name in ("bert-base-uncased", "org/model", "builtin:", "./folder"):
        assert resolve_model(name) == name


def test_an_adapter_names_its_base_so_that_anybody_can_load_it() -> None:
    assert get_published_name("builtin:all-minilm-l6-v2") == "sentence-transformers/all-MiniLM-L6-v2"
    for name in ("bert-base-uncased", "some/folder", "builtin:unknown"):
        assert get_published_name(name) == name
