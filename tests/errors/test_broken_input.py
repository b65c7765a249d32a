"""Whatever the input is changed into, it is taken or refused with a FedspanError of one line: nothing else."""

from __future__ import annotations

import copy
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from world import GOOD, QUESTIONS, World

from fedspan.api.notes import facts_of, read_notes
from fedspan.api.reports import read_report
from fedspan.config import RunConfig, load_config, override, parse_config
from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.data.partition import Partition, partition
from fedspan.data.templates import template_of
from fedspan.errors import FedspanError
from fedspan.models.export import read_adapter
from fedspan.runs.build import prepare
from fedspan.runs.packing import read_index

TALKS = '{"talk": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 9
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
]
FILES = {"good.csv": GOOD, "numbers.csv": NUMBERS, "questions.jsonl": QUESTIONS * 4, "talks.jsonl": TALKS}

HUGE = "an int of thousands of digits"  # stands for one, as Hypothesis cannot print such
WORDS = st.sampled_from(
    [HUGE, "", "label", "text", "a", "null", "x\ud800", "é", "\0", "{", "[a](", "1e9", "good.csv", "loss"]
)
NUMBER = st.sampled_from([-1, 0, 1, 3, 2**31, 2**63, 10**30, -0.5, 0.3, 1e308, float("inf"), float("nan")])
SCALAR = st.none() | st.booleans() | st.integers() | NUMBER | WORDS | st.text(max_size=9)
JUNK = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
DEEP = st.integers(50, 150).map(lambda depth: json.loads("[" * depth + "]" * depth))
CHANGE = st.tuples(st.integers(0, 10**6), st.sampled_from(["set", "drop", "add"]), JUNK | DEEP, WORDS)
CHANGES = st.lists(CHANGE, min_size=1, max_size=3)
CUTS = st.lists(
    st.tuples(
        st.integers(0, 10**6), st.integers(0, 12), st.binary(max_size=6) | st.sampled_from([b'"', b",", b"\n", b"\xff"])
    ),
    max_size=4,
)


def fuzz(cases: int) -> Callable[[Any], Any]:
    """The same cases every time, and none that is remembered."""
    return settings(
        max_examples=cases,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def answered(call: Callable[[], object]) -> object:
    """What comes out, or None for a FedspanError of one line; anything else fails the test."""
    try:
        return call()
    except FedspanError as error:
        refusal = error
    assert str(refusal).splitlines() == [str(refusal)]
    assert str(refusal).encode()
    assert refusal.field
    return None


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, Any]] = []
    for key, inside in list(items):
        found += [(value, key), *places(inside)]
    return found


def changed(value: Any, changes: list[tuple[int, str, Any, str]]) -> Any:
    """A value with something else at a few places in it."""
    value = copy.deepcopy(value)
    for number, what, junk, name in changes:
        junk = 16**5000 if junk == HUGE else copy.deepcopy(junk)
        there = places(value)
        if not there:
            return junk
        container, key = there[number % len(there)]
        if what == "drop":
            del container[key]
        elif what == "add" and isinstance(container, dict):
            container[name] = junk
        else:
            container[key] = junk
    return value


def mangled(content: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    """Bytes with a few of them replaced."""
    for at, length, new in cuts:
        at %= len(content) + 1
        content = content[:at] + new + content[at + length :]
    return content


def as_json(value: Any) -> bytes:
    """JSON as a careless editor would leave it: NaN, half characters and all."""
    try:
        return json.dumps(value).encode()
    except ValueError:  # an int of thousands of digits
        return b'{"a": ' + b"9" * 5000 + b"}"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
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
        loaded = load(data, seed=config.data_seed, task=config.task)
        return partition(loaded.train, config.partition, config.data_seed)
    return None


@fuzz(700)
@given(st.sampled_from(CONFIGS), CHANGES)
@example(CONFIGS[0], [(0, "set", HUGE, "")])
def test_configs(values: dict[str, Any], changes: list[Any]) -> None:
    config = answered(lambda: parse_config(changed(values, changes)))
    if isinstance(config, RunConfig):
        answered(lambda: divided(config))


YAML = st.text(st.sampled_from("abd:-[]{},&*!|>?#'\"%@`\n\t 01.=~<\ud7ff"), max_size=60)


@fuzz(300)
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


@fuzz(200)
@given(st.lists(st.text(max_size=12) | st.builds("{}={}".format, PATHS, YAML), max_size=3))
@example(["seed=0x" + "f" * 5000])
@example(["data=&a {train: *a}"])
@example(["data=&a {train: *a}", "seed=1"])
def test_overrides(texts: list[str]) -> None:
    answered(lambda: parse_config(override(CONFIGS[0], texts)))


def _parquet() -> bytes:
    file = io.BytesIO()
    table = pa.table({"text": ["one", "two", "three", "four"], "label": ["a", "b", "a", "b"], "n": [1, 2, None, 4]})
    pyarrow.parquet.write_table(table, file, compression="none")
    return file.getvalue()


ROWS = [{"text": f"word {n}", "label": "ab"[n % 2]} for n in range(6)]
VALID = {
    "t.csv": GOOD.encode(),
    "t.tsv": GOOD.replace(",", "\t").encode(),
    "t.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
    "t.json": json.dumps(ROWS).encode(),
    "t.csv.gz": gzip.compress(GOOD.encode(), mtime=0),
    "t.jsonl.gz": gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS), mtime=0),
    "t.parquet": _parquet(),
}


def read(name: str, content: bytes, **options: Any) -> None:
    Path(name).write_bytes(content)
    config = DataConfig(train=name, **options)
    for task in ("sequence-classification", "regression"):
        answered(lambda task=task: load(config, task=task))


@fuzz(500)
@given(st.sampled_from(sorted(VALID)), CUTS, st.integers(0, 9), st.booleans())
@example("t.json", [(0, 0, b"[" * 9999)], 0, False)
@example("t.jsonl", [(0, 0, b'{"text": "a", "label": 1' + b"0" * 30 + b"}\n")], 0, False)
def test_data_files(name: str, cuts: list[Any], end: int, drop: bool) -> None:
    content = mangled(VALID[name], cuts)
    read(name, content[: len(content) - end * end], drop_empty=drop)


@fuzz(150)
@given(st.sampled_from(sorted(VALID)), st.binary(max_size=80))
def test_data_files_of_random_bytes(name: str, content: bytes) -> None:
    read(name, content)


@fuzz(150)
@given(CHANGES, st.sampled_from(["{text}", "{label} {talk}"]))
def test_rows_of_json(changes: list[Any], prompt: str) -> None:
    rows = changed([*ROWS, *(json.loads(line) for line in TALKS.splitlines()[:2])], changes)
    read("t.json", as_json(rows))
    for options in ({"prompt": prompt, "answer": "label"}, {"messages": "talk", "chat": True}):
        config = DataConfig.model_validate({"train": "t.json", **options})
        answered(lambda config=config: load(config, task="causal-lm"))


@fuzz(200)
@given(st.text(st.sampled_from("{}[]ab.!:0 \n"), max_size=12) | st.text(max_size=9))
@example("{a[0].b}")
@example("{a!r:{b}}")
def test_prompts(prompt: str) -> None:
    def render() -> str:
        return template_of(prompt, "data.prompt").render({"a": "x{", "b": None})

    answered(render)


def _partition() -> dict[str, Any]:
    part = {"id": "a", "train": [0, 1], "validation": [2], "test": [3]}
    return {
        "format": "fedspan-partition-1",
        "fingerprint": "0" * 64,
        "examples": 4,
        "clients": [part, {**part, "id": "b"}],
    }


@fuzz(150)
@given(CHANGES, CUTS)
@example([(3, "set", 10**30, "")], [])
@example([(2, "set", float("inf"), "")], [])
def test_partition_files(changes: list[Any], cuts: list[Any]) -> None:
    for content in (as_json(changed(_partition(), changes)), mangled(as_json(_partition()), cuts)):
        answered(lambda content=content: Partition.from_json(content.decode(errors="replace")))


@pytest.fixture(scope="module")
def trained(world: World, folder: Path) -> Path:
    """A finished run; its files are changed, each from what it was."""
    world.folder = folder
    return world.run()


def damaged(path: Path, changes: list[Any], cuts: list[Any], call: Callable[[], object]) -> None:
    """Call with a JSON file whose values were changed, then with one whose bytes were; the file is as before after."""
    content = path.read_bytes()
    try:
        for broken in (as_json(changed(json.loads(content), changes)), mangled(content, cuts)):
            path.write_bytes(broken)
            answered(call)
    finally:
        path.write_bytes(content)


@fuzz(80)
@given(CHANGES, CUTS)
def test_notes(trained: Path, changes: list[Any], cuts: list[Any]) -> None:
    place = trained / "adapter"
    damaged(place / "fedspan.json", changes, cuts, lambda: facts_of(place, read_notes(place)))


@fuzz(60)
@given(CHANGES, CUTS)
def test_adapter_configs(trained: Path, changes: list[Any], cuts: list[Any]) -> None:
    place = trained / "adapter"
    layers = {"bert.encoder.layer.0.attention.self.query": (16, 16)}
    damaged(place / "adapter_config.json", changes, cuts, lambda: read_adapter(str(place), layers))


@fuzz(60)
@given(CHANGES, CUTS)
def test_indices_of_checkpoints(trained: Path, changes: list[Any], cuts: list[Any]) -> None:
    damaged(trained / "best" / "checkpoint.json", changes, cuts, lambda: read_index(trained / "best"))


@fuzz(60)
@given(CHANGES, CUTS)
def test_reports(trained: Path, changes: list[Any], cuts: list[Any]) -> None:
    damaged(trained / "report.json", changes, cuts, lambda: read_report(trained))


SMALL = st.sampled_from([None, "x", -1, 0, 7, [], {}, 1.5, True])  # no sizes that a machine has no memory for
MODEL_FILES = st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json"])


@fuzz(30)
@given(MODEL_FILES, st.integers(0, 10**6), st.sampled_from(["set", "drop"]), SMALL)
def test_model_files(world: World, file: str, number: int, what: str, junk: Any) -> None:
    place = Path("model")
    shutil.copytree(world.tiny / "bert", place, dirs_exist_ok=True)
    content = changed(json.loads((place / file).read_text()), [(number, what, junk, "")])
    (place / file).write_text(json.dumps(content))
    answered(lambda: prepare(parse_config(world.values(model={"name": "model"}))))
