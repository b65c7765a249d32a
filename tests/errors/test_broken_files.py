"""Whatever a file is changed into, it is read or refused with a FedspanError of one line: nothing else."""

import gzip
import io
import json
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedspan.assembly.run import prepare
from fedspan.assembly.task import parse_task_settings, read_notes
from fedspan.config import parse_config
from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.data.partition import Partition
from fedspan.models.export import read_adapter
from fedspan.runs.checkpoint_format import read_index
from fedspan.runs.report import read_report
from fedspan.tasks.registry import get_task
from helpers.fuzzing import CHANGES, CUTS, answered, as_json, changed, fuzz, mangled
from helpers.mistakes.world import GOOD, World

TALKS = '{"talk": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 9


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    path = tmp_path_factory.mktemp("broken")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


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
    "t.conll": b"take\tO\naspirin\tB-Drug\n\nrest\tO\n",
}


def read(name: str, content: bytes, **options: Any) -> None:
    Path(name).write_bytes(content)
    config = DataConfig(train=name, **options)
    for task in ("sequence-classification", "regression", "token-classification"):
        answered(lambda task=task: load(config, task=get_task(task).columns))


@fuzz(80)
@given(st.sampled_from(sorted(VALID)), CUTS, st.integers(0, 9), st.booleans())
@example("t.json", [(0, 0, b"[" * 9999)], 0, False)
@example("t.jsonl", [(0, 0, b'{"text": "a", "label": 1' + b"0" * 30 + b"}\n")], 0, False)
def test_data_files(name: str, cuts: list[Any], end: int, drop: bool) -> None:
    content = mangled(VALID[name], cuts)
    read(name, content[: len(content) - end * end], invalid="skip" if drop else "error")


@fuzz(40)
@given(st.sampled_from(sorted(VALID)), st.binary(max_size=80))
def test_data_files_of_random_bytes(name: str, content: bytes) -> None:
    read(name, content)


@fuzz(40)
@given(CHANGES, st.sampled_from(["{text}", "{label} {talk}"]))
def test_rows_of_json(changes: list[Any], prompt: str) -> None:
    rows = changed([*ROWS, *(json.loads(line) for line in TALKS.splitlines()[:2])], changes)
    read("t.json", as_json(rows))
    for options in ({"prompt": prompt, "answer": "label"}, {"messages": "talk", "chat": True}):
        config = DataConfig.model_validate({"train": "t.json", **options})
        answered(lambda config=config: load(config, task=get_task("causal-lm").columns))


def _partitions() -> list[dict[str, Any]]:
    part = {"id": "a", "train": [0, 1], "validation": [2], "test": [3]}
    head = {"format": "fedspan-partition-1", "fingerprint": "0" * 64, "examples": 4}
    flat = {"clients": ["a", "b"], "train": [2, 2], "validation": [1, 1], "test": [1, 1], "rows": [*range(8)]}
    return [{**head, "clients": [part, {**part, "id": "b"}]}, {**head, "format": "fedspan-partition-2", **flat}]


@fuzz(40)
@given(CHANGES, CUTS)
@example([(3, "set", 10**30, "")], [])
@example([(2, "set", float("inf"), "")], [])
def test_partition_files(changes: list[Any], cuts: list[Any]) -> None:
    for whole in _partitions():
        for content in (as_json(changed(whole, changes)), mangled(as_json(whole), cuts)):
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


@fuzz(20)
@given(CHANGES, CUTS)
def test_notes(trained: Path, changes: list[Any], cuts: list[Any]) -> None:
    place = trained / "adapter"
    damaged(place / "fedspan.json", changes, cuts, lambda: parse_task_settings(place, read_notes(place)))


@fuzz(20)
@given(CHANGES, CUTS)
def test_adapter_configs(trained: Path, changes: list[Any], cuts: list[Any]) -> None:
    place = trained / "adapter"
    layers = {"bert.encoder.layer.0.attention.self.query": (16, 16)}
    damaged(place / "adapter_config.json", changes, cuts, lambda: read_adapter(str(place), layers))


@fuzz(20)
@given(CHANGES, CUTS)
def test_indices_of_checkpoints(trained: Path, changes: list[Any], cuts: list[Any]) -> None:
    damaged(trained / "best" / "checkpoint.json", changes, cuts, lambda: read_index(trained / "best"))


@fuzz(20)
@given(CHANGES, CUTS)
def test_reports(trained: Path, changes: list[Any], cuts: list[Any]) -> None:
    damaged(trained / "report.json", changes, cuts, lambda: read_report(trained))


SMALL = st.sampled_from([None, "x", -1, 0, 7, [], {}, 1.5, True])  # no sizes that a machine has no memory for
MODEL_FILES = st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json"])


@fuzz(10)
@given(MODEL_FILES, st.integers(0, 10**6), st.sampled_from(["set", "drop"]), SMALL)
def test_model_files(world: World, file: str, number: int, what: str, junk: Any) -> None:
    place = Path("model")
    shutil.copytree(world.tiny / "bert", place, dirs_exist_ok=True)
    content = changed(json.loads((place / file).read_text()), [(number, what, junk, "")])
    (place / file).write_text(json.dumps(content))
    answered(lambda: prepare(parse_config(world.values(model={"name": "model"}))))
