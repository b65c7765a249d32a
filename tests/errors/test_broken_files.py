"""Whatever a file is changed into, it is read or refused with a FedspanError of one line: nothing else."""

import gzip
import io
import json
import random
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
from helpers.fuzzing import SEEDS, answered, changed, dumped, fuzz, list_places, mangled
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
@given(st.sampled_from(sorted(VALID)), SEEDS, st.booleans())
def test_data_files(name: str, seed: int, drop: bool) -> None:
    read(name, mangled(VALID[name], random.Random(seed)), invalid="skip" if drop else "error")


@fuzz(40)
@given(st.sampled_from(sorted(VALID)), st.binary(max_size=80))
@example("t.jsonl", b'{"text": "a", "label": 1' + b"0" * 30 + b"}\n")
def test_data_files_of_random_bytes(name: str, content: bytes) -> None:
    read(name, content)


@fuzz(40)
@given(SEEDS, st.sampled_from(["{text}", "{label} {talk}"]))
def test_rows_of_json(seed: int, prompt: str) -> None:
    rows = changed([*ROWS, *(json.loads(line) for line in TALKS.splitlines()[:2])], random.Random(seed))
    read("t.json", dumped(rows))
    for options in ({"prompt": prompt, "answer": "label"}, {"messages": "talk", "chat": True}):
        config = DataConfig.model_validate({"train": "t.json", **options})
        answered(lambda config=config: load(config, task=get_task("causal-lm").columns))


PARTITION = {
    **{"format": "fedspan-partition-2", "fingerprint": "0" * 64, "examples": 4, "clients": ["a", "b"]},
    **{"train": [2, 2], "validation": [1, 1], "test": [1, 1], "rows": [*range(8)]},
}


@fuzz(40)
@given(SEEDS)
def test_partition_files(seed: int) -> None:
    draws = random.Random(seed)
    for content in (dumped(changed(PARTITION, draws)), mangled(dumped(PARTITION), draws)):
        answered(lambda content=content: Partition.from_json(content.decode(errors="replace")))


@pytest.mark.parametrize("change", [{"clients": 10**30}, {"examples": float("inf")}])
def test_numbers_that_no_partition_has(change: dict[str, Any]) -> None:
    answered(lambda: Partition.from_json(json.dumps({**PARTITION, **change})))


@pytest.fixture(scope="module")
def trained(world: World, folder: Path) -> Path:
    """A finished run; its files are changed, each from what it was."""
    world.folder = folder
    return world.run()


def damaged(path: Path, seed: int, call: Callable[[], object]) -> None:
    """Call with a JSON file whose values were changed, then with one whose bytes were; the file is as before after."""
    content, draws = path.read_bytes(), random.Random(seed)
    try:
        for broken in (dumped(changed(json.loads(content), draws)), mangled(content, draws)):
            path.write_bytes(broken)
            answered(call)
    finally:
        path.write_bytes(content)


@fuzz(20)
@given(SEEDS)
def test_notes(trained: Path, seed: int) -> None:
    place = trained / "adapter"
    damaged(place / "fedspan.json", seed, lambda: parse_task_settings(place, read_notes(place)))


@fuzz(20)
@given(SEEDS)
def test_adapter_configs(trained: Path, seed: int) -> None:
    place = trained / "adapter"
    layers = {"bert.encoder.layer.0.attention.self.query": (16, 16)}
    damaged(place / "adapter_config.json", seed, lambda: read_adapter(str(place), layers))


@fuzz(20)
@given(SEEDS)
def test_indices_of_checkpoints(trained: Path, seed: int) -> None:
    damaged(trained / "best" / "checkpoint.json", seed, lambda: read_index(trained / "best"))


@fuzz(20)
@given(SEEDS)
def test_reports(trained: Path, seed: int) -> None:
    damaged(trained / "report.json", seed, lambda: read_report(trained))


SMALL = st.sampled_from([None, "x", -1, 0, 7, [], {}, 1.5, True])  # no sizes that a machine has no memory for
MODEL_FILES = st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json"])


@fuzz(10)
@given(MODEL_FILES, st.integers(0, 10**6), st.sampled_from(["set", "drop"]), SMALL)
def test_model_files(world: World, file: str, number: int, what: str, junk: Any) -> None:
    place = Path("model")
    shutil.copytree(world.tiny / "bert", place, dirs_exist_ok=True)
    content = json.loads((place / file).read_text())
    places = list_places(content)
    container, key = places[number % len(places)]
    if what == "drop":
        del container[key]
    else:
        container[key] = junk
    (place / file).write_text(json.dumps(content))
    answered(lambda: prepare(parse_config(world.values(model={"name": "model"}))))
