"""Mistakes in data files, and in what a config says of them."""

import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from ..mistakes.world import GOOD, LONG_NAME, QUESTIONS, Mistake, World

CAUSAL: dict[str, Any] = {"task": "causal-lm", "name": "t.jsonl"}
READING = "cannot be read as "
SITES = "text,label,site\none,a,x\ntwo,b,y\nthree,a,y\nfour,b,y\n"


def _load(content: str | bytes | None = None, **options: Any) -> Callable[[World], object]:
    return lambda world: world.load(content, **options)


def _partition(content: str = GOOD, **options: Any) -> Callable[[World], object]:
    return lambda world: world.partition(content, **options)


def _lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _parquet(metadata: dict[bytes, bytes] | None = None, **columns: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns).replace_schema_metadata(metadata), file)
    return file.getvalue()


def _test(content: str) -> Callable[[World], object]:
    return lambda world: world.load(test=world.file("test.csv", content))


def _talk(*roles: str) -> dict[str, Any]:
    return {"talk": [{"role": role, "content": "a1"} for role in roles]}


def _conversation(value: object) -> Callable[[World], object]:
    return _load(_lines(value), **CAUSAL, messages="talk", chat=True)


def _unreadable(what: str, provoke: Callable[[World], object]) -> Mistake:
    """A mistake after which a file of training data cannot be read."""
    return Mistake(what, "data.train", provoke, READING)


FILES = [
    Mistake("The file is misspelt.", "data.train", _load(train="trian.csv")),
    Mistake("The folder does not exist.", "data.train", _load(train="no/such/train.csv")),
    Mistake("The test file is misspelt.", "data.test", _load(test="tset.csv")),
    Mistake("The name is too long for the file system.", "data.train", _load(train=LONG_NAME + ".csv")),
    Mistake("The home folder of an unknown user.", "data.train", _load(train="~nobodyx/train.csv")),
    Mistake("A file format that is not supported.", "data.train", _load("x", name="train.docx")),
    Mistake("The file is empty.", "data.train", _load("")),
    Mistake("The file has only a header.", "data.train", _load("text,label\n")),
    Mistake("The list is empty.", "data.train", _load("[]", name="t.json")),
    _unreadable("A row lacks a field.", _load("text,label\none,a\ntwo\n")),
    Mistake(
        "The file has another encoding than data.encoding.",
        "data.train",
        _load("text,label\né,a\n".encode("latin-1"), encoding="utf-8"),
    ),
    Mistake("An unknown encoding.", "data.train", _load(encoding="utf-9")),
    Mistake(
        "The first line is an example, and the columns have no names.",
        "data.text",
        _load("great,yes\nbad,no\nfine,yes\nawful,no\nlovely,yes\n"),
    ),
    _unreadable("The .xlsx file is not a workbook.", _load("x", name="train.xlsx")),
    Mistake("Two columns have the same name.", "data.train", _load("text,label,text\none,a,b\n")),
    _unreadable("The .gz file is not compressed.", _load("text", name="t.csv.gz")),
    _unreadable("The .gz file is truncated.", _load(gzip.compress(GOOD.encode())[:-12], name="t.csv.gz")),
    Mistake("A line is not valid JSON.", "data.train", _load('{"text": "a"\n', name="t.jsonl"), "jsonl: row 1: "),
    Mistake("A line is a list.", "data.train", _load(_lines(["one", "a"]), name="t.jsonl")),
    Mistake("The .json file holds a single object.", "data.train", _load('{"text": 1}', name="t.json")),
    _unreadable("Brackets are nested too deeply.", _load("[" * 99999, name="t.json")),
    _unreadable("Half of a surrogate pair in JSON.", _load('{"text":"\\ud800"}', name="t.jsonl")),
    _unreadable("The .parquet file has another format.", _load(b"PAR1 no", name="t.parquet")),
    _unreadable("The .parquet file is truncated.", _load(_parquet(text=["a"])[:-9], name="t.parquet")),
    Mistake(
        "The .parquet file has damaged metadata on its types.",
        "data.train",
        _load(_parquet({b"huggingface": b"{"}, text=["a", "b"], label=["x", "y"]), name="t.parquet"),
        "cannot hold: ",
    ),
    Mistake("Names for columns that already have names.", "data.columns", _load(columns=["text", "label"])),
    Mistake(
        "Names for the columns of a .jsonl file.",
        "data.columns",
        _load(_lines({"text": "a"}), name="t.jsonl", columns=["text", "label"]),
    ),
    Mistake("An unknown built-in corpus.", "data.train", _load(train="builtin:patients")),
    Mistake(
        "An unknown split of a built-in corpus.",
        "data.train_split",
        _load(train="builtin:patient-messages", train_split="dev"),
    ),
]
ROWS = [
    Mistake("There is no column of texts.", "data.text", _load(text="sentence")),
    Mistake("There is no column of second texts.", "data.text_pair", _load(text_pair="answer")),
    Mistake("There is no column of labels.", "data.label", _load(label="topic")),
    Mistake("A text is empty.", "data.train", _load("text,label\none,a\n ,b\n")),
    Mistake("A label is missing.", "data.train", _load("text,label\none,a\ntwo,\n")),
    Mistake("Texts are numbers.", "data.text", _load(_lines({"text": 1, "label": "a"}), name="t.jsonl")),
    Mistake("A row has two labels.", "data.label", _load(_lines({"text": "a", "label": ["x", "y"]}), name="t.jsonl")),
    Mistake(
        "Labels are numbers with a fraction.",
        "data.label",
        _load(_lines({"text": "a", "label": 1.5}, {"text": "b", "label": 2.0}), name="t.jsonl"),
    ),
    Mistake("All rows have one label.", "data.label", _load("text,label\none,a\ntwo,a\n")),
    Mistake("The test set has a label that the training set lacks.", "data.test", _test("text,label\none,z\n")),
    Mistake("A label is not in data.labels.", "data.train", _load(labels=["a", "c"])),
    Mistake("keep_only with a label that no row has.", "data.labels", _load(labels=["a", "c"], keep_only=True)),
    Mistake("first_labels exceeds the number of labels.", "data.first_labels", _load(first_labels=3)),
    Mistake("Too few rows for a test set.", "data.train", _load("text,label\none,a\ntwo,b\n")),
    Mistake("invalid: skip leaves no rows.", "data.train", _load("text,label\n,a\ntwo,\n", invalid="skip")),
    Mistake("A label is a word in a regression.", "data.label", _load("text,label\none,1\ntwo,b\n", task="regression")),
    Mistake("A label is NaN in a regression.", "data.train", _load("text,label\none,1\ntwo,nan\n", task="regression")),
    Mistake(
        "data.labels is set for a regression.",
        "data.labels",
        _load("text,label\none,1\ntwo,2\n", task="regression", labels=["1", "2"]),
    ),
]
PROMPTS = [
    Mistake("causal-lm has no prompt.", "data.prompt", _load(QUESTIONS, **CAUSAL)),
    Mistake("The prompt names an unknown column.", "data.prompt", _load(QUESTIONS, **CAUSAL, prompt="{topic}")),
    Mistake("A prompt without a column.", "data.prompt", _load(QUESTIONS, **CAUSAL, prompt="Answer!")),
    Mistake("A brace is not closed.", "data.prompt", _load(QUESTIONS, **CAUSAL, prompt="{question"), "itself ("),
    Mistake("A number format in braces.", "data.prompt", _load(QUESTIONS, **CAUSAL, prompt="{question:>9}")),
    Mistake("The braces are empty.", "data.prompt", _load(QUESTIONS, **CAUSAL, prompt="{}")),
    Mistake(
        "There is no column of answers.", "data.answer", _load(QUESTIONS, **CAUSAL, prompt="{question}", answer="reply")
    ),
    Mistake(
        "An answer is empty.",
        "data.train",
        _load(_lines({"question": "a", "answer": ""}), **CAUSAL, prompt="{question}"),
    ),
    Mistake("There is no column of conversations.", "data.messages", _conversation({"chat": []})),
    Mistake("A conversation ends with the user.", "data.messages", _conversation(_talk("user"))),
    Mistake("A conversation is a string.", "data.messages", _conversation({"talk": "hello"})),
    Mistake("Messages without a role.", "data.messages", _conversation({"talk": [{"content": "a1"}]})),
]
PARTITION = [
    Mistake("More clients than examples.", "partition.clients", _partition(clients=500)),
    Mistake("A client gets too few examples.", "partition.min_examples", _partition(clients=4, min_examples=5)),
    Mistake(
        "The column of clients does not exist.", "partition.column", _partition(partitioner="natural", column="site")
    ),
    Mistake(
        "Three clients cannot be divided evenly between two sites.",
        "partition.clients",
        _partition(SITES, data={"test_fraction": 0}, clients=3, column="site"),
    ),
    Mistake(
        "A site has fewer examples than clients.",
        "partition.clients",
        _partition(SITES, data={"test_fraction": 0}, clients=4, column="site"),
    ),
    Mistake(
        "A row names no client.",
        "partition.column",
        _partition(
            "text,label,site\none,a,x\ntwo,b,\nthree,a,y\nfour,b,y\n",
            data={"test_fraction": 0},
            partitioner="natural",
            column="site",
        ),
    ),
    Mistake(
        "The clients' shares are too unequal.",
        "partition.alpha",
        _partition(partitioner="dirichlet", alpha=0.001, clients=3),
    ),
    Mistake(
        "classes_per_client exceeds the number of labels.",
        "partition.classes_per_client",
        _partition(partitioner="pathological", classes_per_client=3, clients=2),
    ),
    Mistake(
        "A partition by labels of data without labels.",
        "partition.partitioner",
        _partition(
            "text,label\none,1\ntwo,2\nthree,3\nfour,4\n", task="regression", partitioner="dirichlet", clients=2
        ),
    ),
    Mistake(
        "The clients' sizes grow too steeply.",
        "partition.min_examples",
        _partition(partitioner="quantity", quantity="exponential", clients=4),
    ),
]
