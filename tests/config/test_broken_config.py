"""Whatever a configuration is changed into, it is taken or refused with a FedspanError of one line: nothing else."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fedspan.config import RunConfig, load_config, override, parse_config
from fedspan.data.loading import load
from fedspan.data.partition import partition
from fedspan.errors import FedspanError
from helpers.fuzzing import CHANGES, CUTS, HUGE, answered, changed, fuzz, mangled
from helpers.mistakes.world import GOOD, QUESTIONS
from helpers.valid_config import VALID

NUMBERS = "text,label\n" + "".join(f"word{n},{n / 4}\n" for n in range(9))
CONFIGS: list[dict[str, Any]] = [
    {
        "seed": 1,
        "model": {"name": "bert", "target_modules": ["query"], "max_length": 16},
        "data": {"train": "good.csv", "label": "label", "test_fraction": 0.3},
        "partition": {"partitioner": "dirichlet", "clients": 2, "alpha": 1.0, "min_examples": 1},
        "method": {"name": "fedloru", "r": 2, "tau": 2},
        "federation": {"rounds": 1, "ranks": {"client-00": 2}},
        "training": {"lr": 0.1, "betas": [0.9, 0.99]},
    },
    {
        "task": "regression",
        "data": {"train": "numbers.csv", "test_fraction": 0},
        "partition": {"partitioner": "quantity", "clients": 2, "min_examples": 1},
        "evaluation": {"metric": "loss", "every": 2},
    },
    {
        "task": "causal-lm",
        "data": {"train": "questions.jsonl", "prompt": "Q: {question}", "answer": "answer", "max_examples": 9},
        "partition": {"partitioner": "iid", "clients": 2, "validation": 0.1, "test": 0.2, "min_examples": 1},
        "evaluation": {"answer_pattern": "(\\d+)", "generate": True},
    },
    VALID,
]
FILES = {"good.csv": GOOD, "numbers.csv": NUMBERS, "questions.jsonl": QUESTIONS * 4}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    path = tmp_path_factory.mktemp("broken")
    for name, content in FILES.items():
        (path / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


def divided(config: RunConfig) -> object:
    """Load and divide, if the data are ours: a hub is asked for other names, and none can be reached."""
    data = config.data
    if data.train in FILES and data.dataset is None and (data.test is None or data.test in FILES):
        loaded = load(data, seed=config.data_seed, task=config.task_columns)
        return partition(loaded.train, config.partition, config.data_seed)
    return None


@fuzz(100)
@given(st.sampled_from(CONFIGS), CHANGES)
@example(CONFIGS[0], [(0, "set", HUGE, "")])
def test_configs(values: dict[str, Any], changes: list[Any]) -> None:
    config = answered(lambda: parse_config(changed(values, changes)))
    if isinstance(config, RunConfig):
        assert parse_config(config.model_dump()) == config
        config.build_training_settings()
        answered(lambda: divided(config))


def test_half_of_a_surrogate_pair_is_refused() -> None:
    """Pydantic cannot hold the message about the repeated label, which quotes it."""
    values = {**CONFIGS[0], "data": {"train": "t.csv", "labels": ["\ud800", "\ud800"]}}
    with pytest.raises(FedspanError, match=r"without half of a surrogate pair") as caught:
        parse_config(values)
    assert str(caught.value).isprintable()


YAML = st.text(st.sampled_from("abd:-[]{},&*!|>?#'\"%@`\n\t 01.=~<\ud7ff"), max_size=60)


@fuzz(75)
@given(
    st.binary(max_size=60)
    | YAML.map(str.encode)
    | st.tuples(st.sampled_from(CONFIGS).map(yaml.safe_dump).map(str.encode), CUTS).map(lambda two: mangled(*two))
)
@example(b"data: &a {train: *a}")
@example(b"seed: 0x" + b"f" * 5000)
@example(b"? [a]\n: 1")
@example(b"a: !!int _")
@example(b"a: !!binary \xc3\xa9")
@example(b"a: !!timestamp x")
def test_yaml_bytes(content: bytes) -> None:
    Path("my.yaml").write_bytes(content)
    answered(lambda: load_config("my.yaml"))


PATHS = st.sampled_from(
    ["seed", "data.train", "data", "method.r", "model.name", "training.betas", "", ".", "a.b.c", "seed.x"]
)


@fuzz(50)
@given(st.lists(st.text(max_size=12) | st.builds("{}={}".format, PATHS, YAML), max_size=3))
@example(["seed=0x" + "f" * 5000])
@example(["data=&a {train: *a}"])
@example(["data=&a {train: *a}", "seed=1"])
def test_overrides(texts: list[str]) -> None:
    answered(lambda: parse_config(override(CONFIGS[0], texts)))
