"""Whatever a configuration is changed into, it is taken or refused with one line at once: nothing else."""

import ast
import random
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fedspan.config import RunConfig, load_config, load_yaml, override, parse_config, parse_yaml
from fedspan.config.node import load_node
from fedspan.data.loading import load
from fedspan.data.partition import partition
from fedspan.experiments.execution import open_series, read_settings
from helpers.fuzzing import SEEDS, answered, changed, fuzz, mangled
from helpers.mistakes.world import GOOD, QUESTIONS
from helpers.refusals import refused
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
@given(st.sampled_from(CONFIGS), SEEDS)
def test_configs(values: dict[str, Any], seed: int) -> None:
    config = answered(lambda: parse_config(changed(values, random.Random(seed))))
    if isinstance(config, RunConfig):
        assert parse_config(config.model_dump()) == config
        config.build_training_settings()
        answered(lambda: divided(config))


def test_half_of_a_surrogate_pair_is_refused() -> None:
    """Pydantic cannot hold the message about the repeated label, which quotes it."""
    values = {**CONFIGS[0], "data": {"train": "t.csv", "labels": ["\ud800", "\ud800"]}}
    with refused("config", r"without half of a surrogate pair") as caught:
        parse_config(values)
    assert str(caught.value).isprintable()


YAML = st.text(st.sampled_from("abd:-[]{},&*!|>?#'\"%@`\n\t 01.=~<\ud7ff"), max_size=60)


@fuzz(75)
@given(
    st.binary(max_size=60)
    | YAML.map(str.encode)
    | st.builds(
        lambda values, seed: mangled(yaml.safe_dump(values).encode(), random.Random(seed)),
        st.sampled_from(CONFIGS),
        SEEDS,
    )
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


SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedspan"
PACKAGED = {"config/reading.py", "data/catalogue.py", "reproduction/presets.py"}
"""The module with the bounds, and those that read files of the package only."""


def laugh(levels: int) -> str:
    """A section with one value, ten to the power of the levels times."""
    lists = [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 10)}]" for level in range(1, levels + 1)]
    return "\n".join(["data:", "  l0: &l0 lol", *(f"  {line}" for line in lists)])


def test_aliases_are_refused_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with refused("config", r"it has an alias \(\*l0\)"):
        override(parse_yaml(laugh(9), "config.yaml"), ())
    path = tmp_path / "node.yaml"
    path.write_text(laugh(9))
    with refused("config", "alias"):
        load_node(path)
    with refused("--set"):
        override({}, ["data.labels=[&a [1], *a]"])
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("text", ["a: &a [*a]", "? [", "!!int _", "2026-13-01", "[" * 50, "a: [", "!!python/none x"])
def test_every_mistake_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_yaml(text)


def test_settings_that_share_a_list_are_read_again(tmp_path: Path) -> None:
    shared = [1, 2]
    open_series(tmp_path / "series", "sweep.yaml", {"over": {"a": shared, "b": shared}}, ())
    assert read_settings(tmp_path / "series", "sweep.yaml", {"over": dict})["over"] == {"a": [1, 2], "b": [1, 2]}


def test_no_other_module_parses_yaml() -> None:
    parsing = set[str]()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "yaml" in text else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml" and "load" in node.attr:
                parsing.add(path.relative_to(SOURCE).as_posix())
    assert parsing == PACKAGED
