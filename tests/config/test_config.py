"""The configuration: what a short one means, and that any is a run or a mistake on one line."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fedspan.config import RunConfig, override, parse_config
from fedspan.errors import FedspanError
from fedspan.methods.registry import METHODS
from fedspan.wrappers.registry import WRAPPERS
from helpers.valid_config import VALID


def test_a_short_config_is_filled_up_and_a_written_one_comes_back() -> None:
    config = parse_config({"data": {"train": "train.csv"}})
    assert (config.method.name, config.federation.rounds, config.training.optimizer) == ("fedit", 10, "adamw")
    for some in (config, parse_config(VALID)):
        text = yaml.safe_dump(some.model_dump(mode="json"))
        assert parse_config(yaml.safe_load(text)) == some


def paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where every section and field of a config stands."""
    found: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        found.append((*prefix, name))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += paths(field.annotation, (*prefix, name))
    return found


TEXTS = st.text(max_size=5)
NAMES = st.sampled_from(["name", "r", "tau", "init_A", "spec", "options", "model_config", "a.b", "clients"]) | TEXTS
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from([*METHODS, *WRAPPERS, "average"])
)
NESTED = st.lists(SCALARS, max_size=3) | st.dictionaries(NAMES | st.integers(), SCALARS, max_size=3)
JUNK = SCALARS | NESTED | st.dictionaries(NAMES, NESTED, max_size=2)
PATHS = st.sampled_from([*paths(RunConfig), *(("method", name) for name in ("r", "tau", "lora_alpha", "wrappers"))])
MUTATIONS = st.lists(st.tuples(PATHS, st.sampled_from(["set", "drop", "add"]), NAMES, JUNK), min_size=1, max_size=3)


@settings(max_examples=75, deadline=None)
@given(MUTATIONS)
def test_any_config_is_a_run_or_one_line(mutations: list[tuple[tuple[str, ...], str, str, Any]]) -> None:
    """Whatever a valid config is changed into: a ``RunConfig`` that can be read again, or a FedspanError."""
    values = copy.deepcopy(VALID)
    for path, what, name, junk in mutations:
        place: Any = values
        for section in path[:-1]:
            place = place.get(section) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            continue
        if what == "drop":
            place.pop(path[-1], None)
        else:
            place[path[-1] if what == "set" else name] = junk
    try:
        config = parse_config(values)
    except FedspanError as error:
        refusal = error
    else:
        assert parse_config(config.model_dump()) == config
        config.build_training_settings()
        return
    assert refusal.field
    assert "\n" not in str(refusal)


@settings(max_examples=25, deadline=None)
@given(st.lists(TEXTS | st.tuples(PATHS.map(".".join), st.text(max_size=9)).map("=".join), max_size=3))
def test_any_override_is_applied_or_refused(texts: list[str]) -> None:
    with suppress(FedspanError):
        parse_config(override(VALID, texts))
