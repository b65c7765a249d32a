"""Data sets known by name: every entry is whole, and loads from its original files and from copies of the hub's."""

import csv
import gzip
import importlib.util
import json
import re
import string
from pathlib import Path

import datasets
import pandas as pd
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import fedspan
from fedspan.config import parse_config
from fedspan.data import DataConfig
from fedspan.data.builtin import CORPORA
from fedspan.data.catalogue import DatasetEntry, get_dataset_entry, list_datasets, render_snippet
from fedspan.data.dataset_defaults import fill_data_defaults
from fedspan.data.loading import LoadedData, load
from fedspan.data.templates import parse_template
from fedspan.tasks.metrics import METRICS
from fedspan.tasks.registry import TASKS, get_task
from helpers import refusals
from helpers.fuzzing import answered, fuzz
from helpers.refusals import Refused
from helpers.written_data import config_for

ENTRIES = {entry.key: entry for entry in list_datasets()}
TEXTS = {key: entry for key, entry in ENTRIES.items() if entry.task != "image-classification"}
EVERY = pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
EVERY_TEXT = pytest.mark.parametrize("entry", TEXTS.values(), ids=list(TEXTS))


def dataset_config(dataset: str, **options: object) -> DataConfig:
    return DataConfig.model_validate({"dataset": dataset, **{key: str(value) for key, value in options.items()}})


def loaded(entry: DatasetEntry, config: DataConfig) -> LoadedData:
    assert entry.task in TASKS
    return load(config, task=get_task(entry.task).columns)


def needed(entry: DatasetEntry, columns: dict[str, str]) -> dict[str, str]:
    """The columns of a file by what they hold, those of the prompt among them."""
    named = {} if entry.prompt is None else {name: name for name in parse_template(entry.prompt, "prompt").columns}
    return {**named, **columns}


def rows_of(entry: DatasetEntry, columns: dict[str, str], count: int = 12) -> list[dict[str, str]]:
    """Made-up rows: labels or numbers alternate, all else is text with quotes and commas in it."""
    rows = []
    for row in range(count):
        values = {column: f'some "{role}", row {row}' for role, column in needed(entry, columns).items()}
        if "label" in columns:
            numbers = entry.task == "regression"
            values[columns["label"]] = f"{row % 5}.5" if numbers else str(row % 2)
        rows.append(values)
    return rows


def write(path: Path, rows: list[dict[str, str]], *, header: list[str] | None = None, quotes: bool = True) -> Path:
    """Rows in the format that the name of the file says; of a file without header, with all of its columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pd.DataFrame(rows).to_parquet(path)
        return path
    if kind == "jsonl":
        content = "".join(json.dumps(row) + "\n" for row in rows)
    elif kind == "json":
        content = json.dumps(rows)
    else:
        names = header or list(rows[0])
        lines = [] if header else [names]
        lines += [[row.get(name, "filler") for name in names] for row in rows]
        if kind == "tsv" and not quotes:
            content = "".join("\t".join(line) + "\n" for line in lines)
        else:
            file = Path(f"{path}.tmp")
            with file.open("w", newline="") as stream:
                csv.writer(stream, delimiter="\t" if kind == "tsv" else ",").writerows(lines)
            content = file.read_text()
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@EVERY
def test_every_entry_is_whole(entry: DatasetEntry) -> None:
    assert all(text.strip() == text and text for text in (entry.title, entry.summary, entry.license, entry.source))
    assert "\n" not in entry.summary
    assert not entry.summary.endswith(".")
    assert entry.rows.train > 0
    assert entry.hub is not None or entry.files is not None
    assert (entry.rows.test is not None) == bool(
        (entry.hub is not None and entry.hub.test_split) or (entry.files is not None and entry.files.test)
    )
    named = {name for name, column in entry.columns if column is not None}
    assert {name for name, column in entry.file_columns if column is not None} >= named
    wanted = {"causal-lm": {"answer"}, "image-classification": {"image", "label"}}.get(entry.task, {"text", "label"})
    assert named - {"text_pair"} == wanted
    if entry.files is not None and entry.files.header is not None:
        columns = {column for _, column in entry.file_columns if column is not None}
        assert columns <= set(entry.files.header)
    if entry.labels is not None:
        assert len(set(entry.labels)) == len(entry.labels) >= 2


@EVERY
def test_every_metric_belongs_to_its_task(entry: DatasetEntry) -> None:
    assert entry.metric in METRICS
    if entry.metric == "exact_match":
        assert (entry.task, entry.answer_pattern is None) == ("causal-lm", False)
    else:
        assert entry.metric in get_task(entry.task).metric_names


@EVERY
def test_prompts_and_patterns_parse(entry: DatasetEntry) -> None:
    assert (entry.prompt is not None) == (entry.task == "causal-lm")
    if entry.prompt is not None:
        assert parse_template(entry.prompt, "prompt").required
        assert entry.columns.answer not in parse_template(entry.prompt, "prompt").columns
    if entry.answer_pattern is not None:
        assert re.compile(entry.answer_pattern).groups <= 1
        assert entry.max_new_tokens is not None


@pytest.mark.parametrize(
    ("key", "answer", "counts"),
    [
        ("gsm8k", "so 72 in all.\n#### 72", "72"),
        ("math", r"hence $\boxed{\frac{1}{\sqrt{2}}}$ holds", r"\frac{1}{\sqrt{2}}"),
        ("metamathqa", "... The answer is: 3/4", "3/4"),
        ("boolq", "the correct answer is false", "false"),
        ("piqa", "the correct answer is solution2", "solution2"),
        ("winogrande", "the correct answer is option1", "option1"),
        ("hellaswag", "the correct answer is ending4", "ending4"),
        ("ARC-Easy", "the correct answer is answer5", "answer5"),
    ],
)
def test_what_counts_of_an_answer(key: str, answer: str, counts: str) -> None:
    found = re.search(ENTRIES[key].answer_pattern or "", answer)
    assert found.group(found.re.groups) == counts


@pytest.mark.parametrize("entry", [e for e in TEXTS.values() if e.files], ids=[k for k, e in TEXTS.items() if e.files])
def test_original_files_load(entry: DatasetEntry, tmp_path: Path) -> None:
    files = entry.files
    columns = entry.file_columns.model_dump(exclude_none=True)
    options: dict[str, object] = {}
    for part, name in (("train", files.train), ("test", files.test)):
        if name is not None:
            rows = rows_of(entry, columns, 12 if part == "train" else 6)
            options[part] = write(tmp_path / name, rows, header=files.header, quotes=files.quoting == "double")
    data = loaded(entry, dataset_config(entry.key, **options))
    assert (len(data.train), len(data.test)) == ((12, 6) if files.test else (10, 2))
    if "text" in columns:
        assert data.train["text"][0] == 'some "text", row 0'
        assert ("text_pair" in data.train.column_names) == ("text_pair" in columns)
    else:
        assert data.train["answer"][0] == 'some "answer", row 0'
    assert len(data.labels) == (2 if entry.task == "sequence-classification" else 0)


@EVERY_TEXT
@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl.gz", "parquet"])
def test_local_copies_of_the_hub_s_columns_load(entry: DatasetEntry, suffix: str, tmp_path: Path) -> None:
    rows = rows_of(entry, entry.columns.model_dump(exclude_none=True))
    quotes = bool(entry.files and entry.files.quoting)
    train = write(tmp_path / f"copy.{suffix}", rows, quotes=quotes)
    data = loaded(entry, dataset_config(entry.key, train=train))
    assert len(data.train) + len(data.test or ()) == 12


@pytest.mark.parametrize("key", [key for key, entry in TEXTS.items() if entry.hub])
def test_from_the_hub_the_right_part_is_asked_for(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = TEXTS[key]
    asked = []

    def answer(path: str, *, name: str | None, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_list(rows_of(entry, entry.columns.model_dump(exclude_none=True)))

    monkeypatch.setattr(datasets, "load_dataset", answer)
    data = loaded(entry, dataset_config(key))
    if key in CORPORA:
        assert (len(data.train), len(data.test), asked) == (entry.rows.train, entry.rows.test, [])
        return
    parts = [entry.hub.train_split, *([entry.hub.test_split] if entry.hub.test_split else [])]
    assert asked == [(entry.hub.id, entry.hub.config, part) for part in parts]


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    rows = [{"sentence": f"s {row}", "review": f"r {row}", "mood": "ab"[row % 2], "label": "c"} for row in range(4)]
    train = write(tmp_path / "train.csv", rows)
    data = load(dataset_config("sst2", train=train, text="review", label="mood"))
    assert set(data.train["text"]) < {"r 0", "r 1", "r 2", "r 3"}
    assert data.labels == ("a", "b")
    config = DataConfig.model_validate({"dataset": "mnli", "test_split": "validation_mismatched", "text_pair": None})
    assert fill_data_defaults(config).test_split == "validation_mismatched"
    assert fill_data_defaults(config).text_pair is None
    assert fill_data_defaults(fill_data_defaults(config)) == fill_data_defaults(config)
    mirror = fill_data_defaults(dataset_config("mrpc", train="someone/mrpc"))
    assert (mirror.train, mirror.hub_config, mirror.text_pair) == ("someone/mrpc", None, "sentence2")


def test_f1_is_of_the_class_that_the_benchmark_means(monkeypatch: pytest.MonkeyPatch) -> None:
    names = datasets.ClassLabel(names=["not_equivalent", "equivalent"])
    features = datasets.Features({"sentence1": datasets.Value("string"), "sentence2": datasets.Value("string")})
    rows = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [0, 1]}
    dataset = datasets.Dataset.from_dict(rows, features=datasets.Features({**features, "label": names}))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: dataset)
    assert load(dataset_config("mrpc")).labels == ("not_equivalent", "equivalent")


def test_incomplete_rows_are_dropped_where_it_is_known_that_there_are_some(tmp_path: Path, refused: Refused) -> None:
    rows = [{"instruction": f"i {row}", "input": "", "output": "" if row == 1 else "o"} for row in range(6)]
    train = write(tmp_path / "alpaca.json", rows)
    data = load(dataset_config("alpaca", train=train), task=get_task("causal-lm").columns)
    assert (len(data.train) + len(data.test or ()), data.dropped) == (5, 1)
    strict = DataConfig.model_validate({"dataset": "alpaca", "train": str(train), "invalid": "error"})
    with refusals.refused("data.train"):
        load(strict, task=get_task("causal-lm").columns)
    pairs = write(tmp_path / "pairs.csv", [{"text": "a", "label": "x"}, {"text": "", "label": "y"}] * 2)
    plain = DataConfig(train=str(pairs), invalid="skip")
    refused("data.label", "label", ["two labels"], load, plain)
    nothing = write(tmp_path / "nothing.csv", [{"text": " ", "label": "x"}])
    blank = DataConfig(train=str(nothing), invalid="skip")
    refused("data.train", str(nothing), ["every row of"], load, blank)


def test_mistakes_are_named(refused: Refused, tmp_path: Path) -> None:
    refused("data.train", None, ["not on the hub", "boolq/train.json"], load, dataset_config("boolq"), "data")
    clash = dataset_config("banking77", train="someone/banking", text="label")
    refused("data.dataset", "banking77", ["do not fit it: 'label' is also the column of text"], load, clash)
    odd = write(tmp_path / "odd.csv", [{"one": "a", "two": "b"}])
    refused("data.text", "sentence", ["no column named"], load, dataset_config("sst2", train=odd))


@EVERY
def test_snippets_are_configs(entry: DatasetEntry) -> None:
    for where in ("hub", "files"):
        text = render_snippet(entry, where)
        there = {"hub": entry.hub, "files": entry.files}[where] is not None
        assert (text is not None) == there
        if text is not None:
            config = parse_config(yaml.safe_load(text))
            assert (config.data.dataset, config.task) == (entry.key, entry.task)
            assert config.evaluation.generate == (entry.metric == "exact_match")


def test_python_lists_them_too() -> None:
    assert fedspan.list_datasets() == tuple(ENTRIES.values())
    assert not set("".join(ENTRIES)) - set(string.ascii_letters + string.digits + "-_")


def test_the_page_about_them_is_current() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("generate_data", docs / "generate_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (docs / "data.md").read_text(encoding="utf-8") == module.page(), "run: python docs/generate_data.py"


REAL = [
    ("sst2", "glue/SST-2/train.tsv", "glue/SST-2/dev.tsv", 67349, 872, 2),
    ("cola", "glue/CoLA/train.tsv", "glue/CoLA/dev.tsv", 8551, 1043, 2),
    ("mrpc", "glue/MRPC/train.tsv", "glue/MRPC/dev.tsv", 3668, 408, 2),
    ("stsb", "glue/STS-B/train.tsv", "glue/STS-B/dev.tsv", 5749, 1500, 0),
    ("qnli", "glue/QNLI/dev.tsv", None, 5463, None, 2),
    ("banking77", "banking77/train.csv", "banking77/test.csv", 10003, 3080, 77),
    ("gsm8k", "gsm8k/train.jsonl", "gsm8k/test.jsonl", 7473, 1319, 0),
    ("alpaca", "alpaca/alpaca_5000.json", None, 5000, None, 0),
    pytest.param(
        "alpaca", "alpaca/alpaca_52k_en_from_open-chinese.jsonl.gz", None, 52002, None, 0, marks=pytest.mark.slow
    ),
    *(
        (name, f"commonsense/{name}/train.json.gz", f"commonsense/{name}/test.json.gz", train, test, 0)
        for name, train, test in [
            ("boolq", 9427, 3270), ("ARC-Easy", 2251, 2376), ("ARC-Challenge", 1119, 1172), ("openbookqa", 4957, 500)
        ]
    ),
    *(
        ("blitzer_sentiment", f"blitzer_sentiment/{name}/train.tsv", f"blitzer_sentiment/{name}/dev.tsv", 1700, 300, 2)
        for name in ("airline", "books", "dvd", "electronics", "kitchen")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "train", "test", "rows", "tests", "labels"), REAL)
def test_published_files_load(
    real_data: Path, key: str, train: str, test: str | None, rows: int, tests: int | None, labels: int
) -> None:
    entry = ENTRIES[key]
    options = {"train": real_data / train} | ({"test": real_data / test} if test else {})
    data = loaded(entry, dataset_config(key, **options))
    held = len(data.test or ())
    if tests is not None:
        assert held == tests == entry.rows.test
        assert len(data.train) + data.dropped == rows == entry.rows.train
    assert len(data.train) + (held if test is None else 0) + data.dropped == rows
    assert len(data.labels) == labels
    assert (data.dropped > 0) == (entry.invalid == "skip")
    if entry.answer_pattern is not None:
        found = [re.search(entry.answer_pattern, answer) for answer in data.train["answer"]]
        assert all(found)


def test_a_config_without_a_data_set_is_left_alone() -> None:
    config = DataConfig(train="x.csv", text="body")
    assert fill_data_defaults(config) is config


@pytest.mark.parametrize("name", CORPORA)
def test_the_corpora_that_come_with_the_package_are_whole(name: str) -> None:
    data, rows = load(config_for(f"builtin:{name}")), get_dataset_entry(name, "data.dataset").rows
    assert (len(data.train), len(data.test)) == (rows.train, rows.test)
    assert len(data.labels) == {"patient-messages": 20, "review-sentences": 2}[name]
    assert set(data.train["label"]) == set(data.test["label"]) == set(range(len(data.labels)))


@fuzz(50)
@given(st.text(st.sampled_from("{}[]ab.!:0 \n"), max_size=12) | st.text(max_size=9))
@example("{a[0].b}")
@example("{a!r:{b}}")
def test_prompts(prompt: str) -> None:
    def render() -> str:
        return parse_template(prompt, "data.prompt").render({"a": "x{", "b": None})

    answered(render)
