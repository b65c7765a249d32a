"""A first config for any file: what is found in it, which columns it names, and that only its beginning is read."""

import json
import re
import time
import tracemalloc
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from fedspan.assembly.run import prepare
from fedspan.config import RunConfig, parse_config
from fedspan.config.column_inference import InferredData
from fedspan.config.starter import write_starter_config
from fedspan.config.starter_template import get_default_model, render_config, suggest_target_modules
from fedspan.data.loading import load
from fedspan.errors import FedspanError
from fedspan.planning.estimate import plan
from fedspan.tasks import registry
from fedspan.tasks.registry import TASKS, get_task
from helpers.refusals import refused as refused_field
from helpers.written_data import write_table


def refused(field: str, words: str, path: Path, **options: Any) -> None:
    with refused_field(field, re.escape(words)):
        config_of(path, **options)


TEXTS = [f"a longer text number {number} about something" for number in range(60)]


def config_of(path: Path, **options: Any) -> tuple[RunConfig, str]:
    starter = write_starter_config(path, path.parent / "c.yaml", force=True, **options)
    return starter.config, "\n".join(starter.findings)


def sizes(config: RunConfig) -> dict[str, tuple[int, int, int]]:
    prepared = prepare(config).partition
    assert prepared is not None
    return {part.id: (len(part.train), len(part.validation), len(part.test)) for part in prepared.clients}


def pictures(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        Image.new("RGB", (32, 32), (20 * number, 0, 0)).save(folder / f"{number}.png")
    names = [f"{number}.png" for number in range(12)]
    return write_table(folder / "train.csv", {"id": range(12), "file": names, "kind": ["cat", "dog"] * 6})


AB = ["a", "b"] * 30


@pytest.mark.parametrize(
    ("field", "words", "columns", "options"),
    [
        ("--label", "the column of numbers: review, kind", {"review": TEXTS, "kind": AB}, {"task": "regression"}),
        (
            "--label",
            "--task regression predicts numbers, such as those of n",
            {"t": TEXTS, "n": [n / 70 for n in range(60)]},
            {},
        ),
        ("--clients", "a number from 1", {"text": TEXTS, "label": AB}, {"clients": 0}),
        (
            "data.label",
            "58 of 60 rows have no value in the column 'clinic' (--by)",
            {"text": TEXTS, "label": AB, "clinic": ["x", "", "y", *[""] * 57]},
            {"by": "clinic"},
        ),
    ],
)
def test_tables_without_a_config(
    field: str, words: str, columns: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    refused(field, words, write_table(tmp_path / "t.csv", columns), **options)


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        ("text 'premise' and 'hypothesis', label 'label'", {"premise": TEXTS, "hypothesis": TEXTS[::-1], "label": AB}),
        ("columns that may be labels: size (--label)", {"note": TEXTS, "color": AB, "size": ["s", "m", "l"] * 20}),
        ("1 client, so that it has at least 3 examples", {"text": TEXTS[:5], "label": AB[:5]}),
    ],
)
def test_what_is_found_in_a_table(words: str, columns: dict[str, Any], tmp_path: Path) -> None:
    assert words in config_of(write_table(tmp_path / "t.csv", columns))[1]


@pytest.mark.parametrize("task", [None, "image-classification"])
def test_an_image_csv_and_a_plan_of_its_config(tmp_path: Path, task: str | None) -> None:
    config, found = config_of(pictures(tmp_path / "p"), task=task, model="builtin:resnet-8", clients=2)
    assert (config.task, config.data.image, config.data.label) == ("image-classification", "file", "kind")
    assert "image-classification: image 'file', label 'kind'" in found
    assert config.model.target_modules
    assert plan(config).layers == 7
    assert len(prepare(config).train) == 10


def test_a_folder_of_images(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "p" / label).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (32, 32), (40 * number, 0, 0)).save(tmp_path / "p" / label / f"{number}.png")
    config, _ = config_of(tmp_path / "p")
    assert (config.task, config.data.image, config.data.label) == ("image-classification", "image", "label")


@pytest.mark.parametrize(("rows", "share"), [(60, 0.2), (500, 0.125), (6000, 0.1), (16000, 0.078)])
def test_the_share_for_validation_is_bounded_in_examples(tmp_path: Path, rows: int, share: float) -> None:
    texts = [f"a longer text number {number} about something" for number in range(rows)]
    config, _ = config_of(write_table(tmp_path / "train.csv", {"text": texts, "label": ["a", "b"] * (rows // 2)}))
    assert config.partition.validation == share  # of the four fifths that are not held out


@pytest.mark.parametrize(
    ("method", "fraction", "share"), [("fedit", 0.2, 0), ("fedsa-lora", 0.2, 0.1), ("fedit", 0, 0.1)]
)
def test_clients_have_tests_of_their_own_where_no_common_one_measures_their_model(
    tmp_path: Path, method: str, fraction: float, share: float
) -> None:
    train = write_table(tmp_path / "train.csv", {"text": TEXTS, "label": AB})
    config, _ = config_of(train, method=method, options={"test_fraction": fraction})
    assert config.partition.test == share
    assert config.federation.final_rounds == (2 if fraction else 0)  # a common test set measures the model after them


def test_a_test_file(tmp_path: Path) -> None:
    train = write_table(tmp_path / "train.csv", {"text": TEXTS, "label": AB})
    test = write_table(tmp_path / "test.csv", {"text": TEXTS[:10], "label": ["a", "b"] * 5})
    config, found = config_of(train, test=test)
    assert config.data.test == str(test)
    assert "60 examples, 10 test examples" in found
    assert "duplicates: 10 of 10 test examples also occur" in found


@pytest.mark.parametrize("task", ["regression", "image-classification", "causal-lm"])
def test_an_own_task_gets_what_a_built_in_one_gets(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._tasks, "own", replace(get_task(task), name="own"))
    columns = {"review": TEXTS, "kind": ["a", "b", "c"] * 20, "target": [number / 7 for number in range(60)]}
    if task == "causal-lm":
        columns = {"question": TEXTS, "answer": TEXTS[::-1], "label": ["a", "b", "c"] * 20}
    path = pictures(tmp_path / "p") if task == "image-classification" else write_table(tmp_path / "t.csv", columns)
    (expected, _), (config, found) = (config_of(path, task=name) for name in (task, "own"))
    assert config.task == "own"
    assert config.data == expected.data
    assert "which are labels here" not in found


def test_chats_are_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in TEXTS]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    _, found = config_of(path)
    assert "chats: messages" in found
    assert "True" not in found


def test_a_messy_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{text};{'gut' if number % 2 else 'schön'}" for number, text in enumerate(TEXTS)]
    path.write_bytes("\r\n".join(rows).encode("cp1252"))
    config, found = config_of(path)
    assert (config.data.text, config.data.label, config.data.header) == ("column_1", "column_2", False)
    assert "encoding cp1252 (data.encoding), semicolons between columns (data.delimiter)" in found
    assert "the first line looks like an example: the columns are named column_1, column_2" in found


def test_what_is_not_found_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"a": [number / 3 for number in range(60)]})
    refused("--label", "the column of labels: a", path)
    refused("--text", "the column of images", path, task="image-classification")
    gone = tmp_path / "gone.csv"
    refused("DATA", "there is no file", gone)
    refused("data.test", "there is no file", write_table(path, {"x": TEXTS, "y": [1, 2] * 30}), test=gone)


@pytest.mark.slow
def test_a_large_file_is_read_at_its_beginning(tmp_path: Path) -> None:
    """200 MB; read whole, it would take 2.6 GB."""
    path = tmp_path / "t.csv"
    block = "".join(f"{'a long text ' * 12}{number},{'abc'[number % 3]}\n" for number in range(2000)).encode()
    with path.open("wb") as file:
        file.write(b"text,label\n")
        while file.tell() < 200_000_000:
            file.write(block)
    before, arrow = time.process_time(), pa.total_allocated_bytes()
    tracemalloc.start()
    config, found = config_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    path.unlink()
    assert config.data.label == "label"
    assert "about 1,3" in found
    assert "examples, of which the first 5" in found
    assert "3 labels in the rows that were read: a, b, c" in found
    assert peak < 150_000_000
    assert pa.total_allocated_bytes() - arrow < 50_000_000
    assert time.process_time() - before < 60  # 110 s before, and a few now; tracing included


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_other_large_files_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    rows = pa.table({"text": TEXTS * 40, "label": ["a", "b"] * 1200})
    path = tmp_path / f"t.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(rows, path, row_group_size=100)
    else:
        import json

        records = rows.to_pylist()
        path.write_text(json.dumps(records) if suffix == "json" else "\n".join(map(json.dumps, records)))
    monkeypatch.setattr("fedspan.config.starter._SAMPLE_BYTES", 20_000)
    _, found = config_of(path)
    assert "were read; a run reads and validates all" in found


def test_incomplete_rows_are_skipped_in_the_config(tmp_path: Path) -> None:
    columns = {"note": TEXTS, "label": ["a", "b", "a", ""] * 15}
    config, found = config_of(write_table(tmp_path / "t.csv", columns))
    assert config.data.invalid == "skip"
    assert "rows left out (data.invalid: skip): 15 without a text, a label or an answer" in found
    assert "45 examples" in found


@pytest.mark.parametrize("headed", ["train", "test"])
def test_a_header_in_one_of_two_files(tmp_path: Path, headed: str) -> None:
    rows = [f"a remark of {number} words,{'good' if number % 2 else 'bad'}" for number in range(60)]
    for part in ("train", "test"):
        lines = ["remark,label"] * (part == headed) + rows
        (tmp_path / f"{part}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    test, out = tmp_path / "test.csv", tmp_path / "c.yaml"
    starter = write_starter_config(tmp_path / "train.csv", out, test=test)
    assert starter.config.data.header is None
    loaded = load(starter.config.data, task=starter.config.task_columns)
    assert loaded.test is not None
    assert len(loaded.test) == len(loaded.train) == len(rows)
    assert loaded.labels == ("bad", "good")
    assert [finding for finding in starter.findings if "by position" in finding]


def test_a_file_whose_rows_all_differ_from_the_header(tmp_path: Path) -> None:
    """As R's write.table writes it: the row names have no header."""
    path = tmp_path / "t.csv"
    path.write_text("text,label\n" + "".join(f"{number},{text},a\n" for number, text in enumerate(TEXTS)))
    refused("DATA", "Expected 2 columns, got 3", path)
    refused("DATA", "data.delimiter or data.quoting or data.columns (the names of all columns)", path)


def test_a_client_column_with_blanks_is_not_used_unless_requested(tmp_path: Path) -> None:
    columns = {"text": TEXTS, "label": AB, "site": ["x", "y", "z", "x", ""] * 12}
    path = write_table(tmp_path / "t.csv", columns)
    config, found = config_of(path)
    assert (config.partition.partitioner, config.partition.column) == ("iid", None)
    assert "the column site is not used for clients, unless --by requests it: example 7 has no value" in found
    assert "clients: the column site" not in found
    assert sizes(config).keys() == {f"client-{number:02}" for number in range(10)}
    config, found = config_of(path, by="site")
    assert (config.partition.column, config.data.invalid) == ("site", "skip")
    assert "12 without a client in column 'site'" in found
    assert sizes(config).keys() == {"x", "y", "z"}


def test_a_client_column_with_blanks_beyond_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"text": TEXTS * 40, "label": ["a", "b"] * 1200, "site": ["x", "y", "z", "x", ""] * 480}
    monkeypatch.setattr("fedspan.config.starter._SAMPLE_BYTES", 20_000)
    config, _ = config_of(write_table(tmp_path / "t.csv", columns))
    assert config.partition.partitioner == "iid"


def test_a_client_column_with_a_tiny_client_is_not_used_unless_requested(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"text": TEXTS, "label": AB, "site": [*["x", "y"] * 29, "x", "z"]})
    config, found = config_of(path)
    assert config.partition.partitioner == "iid"
    assert "unless --by requests it: client 'z' has only 1 of the examples" in found
    assert "(partition.min_examples)" in found
    refused("partition.min_examples", "client 'z' has only 1", path, by="site")


def test_few_examples_have_few_clients(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"text": TEXTS[:8], "label": ["a", "b"] * 4})
    config, found = config_of(path)
    assert config.partition.clients == 2
    assert "2 clients, so that each has at least 3 examples (--clients)" in found
    assert sizes(config) == {"client-00": (2, 1, 0), "client-01": (2, 1, 0)}
    refused("--clients", "at most 6, the number of examples", path, clients=10)


def test_options_of_data(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("note^kind\n" + "".join(f"{text}, so^{'ab'[at % 2]}\n" for at, text in enumerate(TEXTS)))
    refused("DATA", "init takes options of data as --set data.FIELD=VALUE", path)
    path.write_text("note^kind\n" + "".join(f"{text}^{'ab'[at % 2]}\n" for at, text in enumerate(TEXTS)))
    words = f"Expected the column of labels: note^kind. {path} has a single column: --set data.delimiter names another"
    refused("--label", words, path)
    config, _ = config_of(path, options={"delimiter": "^", "max_examples": 20})
    assert (config.data.text, config.data.label) == ("note", "kind")
    assert (config.data.delimiter, config.data.max_examples) == ("^", 20)
    refused("data.delimter", "Did you mean 'delimiter'", path, options={"delimter": "^"})
    refused("data.text", "--text sets it", path, options={"text": "note"})


@pytest.mark.parametrize(
    ("notes", "field", "more"), [(["Answers"], "DATA", ")."), (["note", "Read me"], "--label", ".")]
)
def test_a_workbook_whose_first_sheet_has_no_labels(tmp_path: Path, notes: list[str], field: str, more: str) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    book.worksheets[0].title = "About"
    for note in notes:
        book.worksheets[0].append([note])
    sheet = book.create_sheet("Answers")
    for row in [("note", "kind"), *((text, "ab"[at % 2]) for at, text in enumerate(TEXTS))]:
        sheet.append(row)
    path = tmp_path / "t.xlsx"
    book.save(path)
    refused(field, f"sheet 'About' of About, Answers (data.sheet){more} init takes options of data as --set", path)
    config, _ = config_of(path, options={"sheet": "Answers"})
    assert (config.data.sheet, config.data.text, config.data.label) == ("Answers", "note", "kind")


def test_images_that_are_missing_or_damaged(tmp_path: Path) -> None:
    path = pictures(tmp_path / "p")
    (tmp_path / "p" / "3.png").unlink()
    (tmp_path / "p" / "4.png").write_bytes(b"no image")
    config, found = config_of(path, model="builtin:resnet-8", clients=2)
    assert config.data.invalid == "skip"
    assert "2 without a readable image or a label" in found
    assert sum(sum(parts) for parts in sizes(config).values()) == 8
    for image in (tmp_path / "p").glob("*.png"):
        image.unlink()
    refused("data.image", "0.png', and there is no such file", path, model="builtin:resnet-8")


@pytest.mark.parametrize("name", ["score", "how_good", "Rating"])
@pytest.mark.parametrize("fraction", [1, 7])
def test_regression_finds_its_numbers(tmp_path: Path, name: str, fraction: int) -> None:
    numbers = [number / fraction for number in range(60)]
    columns = {"id": range(60), "review": TEXTS, "kind": ["a", "b", "c"] * 20, name: numbers}
    config, _ = config_of(write_table(tmp_path / "t.csv", columns), task="regression")
    assert (config.task, config.data.text, config.data.label) == ("regression", "review", name)


def test_regression_finds_decimals(tmp_path: Path) -> None:
    amounts = pa.array([Decimal(number) / 8 for number in range(60)], pa.decimal128(9, 3))
    pyarrow.parquet.write_table(pa.table({"review": TEXTS, "amount": amounts}), tmp_path / "t.parquet")
    config, _ = config_of(tmp_path / "t.parquet", task="regression")
    assert config.data.label == "amount"
    targets = load(config.data, task=config.task_columns).train["target"][:]
    assert {float(target) for target in targets} < {number / 8 for number in range(60)}


def test_a_requested_column_makes_the_first_line_a_header(tmp_path: Path) -> None:
    path = write_table(tmp_path / "train.csv", {"words": TEXTS, "spam": ["ham", "spam"] * 30})
    config, found = config_of(path, text="words", label="spam")
    assert (config.data.text, config.data.label, config.data.header) == ("words", "spam", None)
    assert "60 examples" in found


@pytest.mark.parametrize("names", [("question1", "question2"), ("title_a", "title_b")])
def test_pairs_of_numbered_columns(tmp_path: Path, names: tuple[str, str]) -> None:
    path = write_table(tmp_path / "t.csv", {names[0]: TEXTS, names[1]: TEXTS, "same": ["no", "yes"] * 30})
    config, found = config_of(path)
    assert (config.data.text, config.data.text_pair, config.data.label) == (*names, "same")
    assert f"text {names[0]!r} and {names[1]!r}" in found
    alone, _ = config_of(path, text=names[1])
    assert (alone.data.text, alone.data.text_pair) == (names[1], None)


def test_scores_by_number_are_no_pair(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"v1": range(60), "v2": range(60), "text": TEXTS, "label": AB})
    assert config_of(path)[0].data.text_pair is None


def test_other_labels_of_images_are_named(tmp_path: Path) -> None:
    path = pictures(tmp_path / "p")
    rows = path.read_text().splitlines()
    path.write_text("\n".join([rows[0] + ",camera", *(f"{row},c{at % 3}" for at, row in enumerate(rows[1:]))]) + "\n")
    _, found = config_of(path, model="builtin:resnet-8", clients=2)
    assert "other columns that may be labels: camera (--label)" in found


def test_names_with_more_in_them_and_columns_that_are_no_labels(tmp_path: Path) -> None:
    columns = {
        "Patient": [f"p{number // 6}" for number in range(60)],
        "Review text": TEXTS,
        "Stars (0-10)": [number / 7 for number in range(60)],
    }
    config, _ = config_of(write_table(tmp_path / "t.csv", columns))
    assert (config.task, config.data.label) == ("regression", "Stars (0-10)")
    rows = [
        {"p": {"body": text, "meta": {"tag": ["ab"[at % 2]], "site": f"s{at % 4}"}}} for at, text in enumerate(TEXTS)
    ]
    path = tmp_path / "t.json"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-16")
    config, _ = config_of(path)
    assert (config.data.text, config.data.label, config.partition.column) == ("p.body", "p.meta.tag", "p.meta.site")


def test_lists_of_texts_are_a_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"sentences": text.split(), "label": "ab"[number % 2]} for number, text in enumerate(TEXTS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config, _ = config_of(path, task="sequence-classification")
    assert (config.data.text, config.data.label) == ("sentences", "label")


def test_lists_of_one_text_are_a_text_and_other_lists_are_named(tmp_path: Path) -> None:
    path, shops = tmp_path / "t.parquet", [f"the shop number {number % 4} in the street" for number in range(60)]
    columns: dict[str, list[Any]] = {"t": [[f"text {number}"] for number in range(60)], "l": AB, "s": shops}
    pyarrow.parquet.write_table(pa.table(columns), path)
    config, found = config_of(path)
    assert (config.data.text, config.data.label) == ("s", "l")
    assert "columns of lists that are not used: t (--text joins lists of texts)" in found
    assert "examples are distinct: check that s is the right column" in found
    columns["t"] = [[text] for text in TEXTS]
    pyarrow.parquet.write_table(pa.table(columns), path)
    config, found = config_of(path)
    assert (config.data.text, config.data.label) == ("t", "l")
    assert "not used" not in found


def test_labels_that_are_combined_are_reported(tmp_path: Path) -> None:
    kinds = ["billing", "tech", "billing|tech", "other", "billing|other", "tech|other"]
    path = write_table(tmp_path / "t.csv", {"text": TEXTS, "label": kinds * 10})
    advice = "--task multi-label-classification --label label"
    config, found = config_of(path)
    assert config.task == "sequence-classification"
    assert f"Values of 'label' contain '|'; for several labels an example: {advice}." in found
    places = ["Bonn, west", "Ulm, south", "Kiel, north"] * 20
    _, found = config_of(write_table(tmp_path / "t.csv", {"text": TEXTS, "label": places}))
    assert "several labels" not in found
    rare = [*kinds[:5], *["billing"] * 40, *["tech"] * 15]  # a tenth of them or less is combined
    _, found = config_of(write_table(tmp_path / "t.csv", {"text": TEXTS, "label": rare}))
    assert "several labels" not in found


def test_requested_labels_of_a_short_file_may_be_many(tmp_path: Path) -> None:
    kinds = ["billing", "tech", "billing|tech", "other", "billing|other", "tech|other"]
    path = write_table(tmp_path / "t.csv", {"text": TEXTS[:6], "label": kinds})
    config, _ = config_of(path, task="multi-label-classification", label="label", options={"test_fraction": 0})
    assert (config.task, config.data.label) == ("multi-label-classification", "label")


def test_whole_numbers_that_may_be_predicted(tmp_path: Path) -> None:
    advice = "different numbers, which are labels here; --task regression predicts numbers"
    columns = {"title": TEXTS, "price": [3 * number + 1 for number in range(60)]}
    refused("data.train", f"The column price has 60 {advice}", write_table(tmp_path / "t.csv", columns))
    columns = {"title": TEXTS * 4, "price": [7 * (number % 30) for number in range(240)]}
    _, found = config_of(write_table(tmp_path / "t.csv", columns))
    assert f"The column price has 30 {advice}" in found
    columns["price"] = [number % 30 for number in range(240)]  # the numbers of 30 classes
    _, found = config_of(write_table(tmp_path / "t.csv", columns))
    assert advice not in found


def test_decimal_commas_are_numbers(tmp_path: Path) -> None:
    columns = {"review": TEXTS, "score": [f"{number / 7:.2f}".replace(".", ",") for number in range(60)]}
    config, _ = config_of(write_table(tmp_path / "t.csv", columns, delimiter=";"))
    assert (config.task, config.data.label) == ("regression", "score")
    loaded = load(config.data, task=config.task_columns)
    numbers = [*loaded.train["target"], *loaded.test["target"]]
    assert sorted(numbers) == [round(number / 7, 2) for number in range(60)]


def rendered(task: str = "sequence-classification", by: str | None = None, **changes: Any) -> dict[str, Any]:
    options = {
        "model": "a/model",
        "targets": None,
        "method": "fedit",
        "shares": (0.1, 0.0),
        "has_test": True,
        **changes,
    }
    data = {"train": "notes: of #1.csv", "text": "té xt"}
    text = render_config(InferredData(task, data, by, ()), data, 7, **options)
    values = yaml.safe_load(text)
    parse_config(values)
    assert values["data"] == data
    return values


def test_rows_are_drawn_or_assigned_by_a_column() -> None:
    assert rendered()["partition"] == {"partitioner": "iid", "clients": 7, "validation": 0.1, "test": 0.0}
    by = rendered(by="site: a #1")["partition"]
    assert by == {"partitioner": "natural", "column": "site: a #1", "validation": 0.1, "test": 0.0}
    assert rendered(shares=(0.2, 0.1))["partition"]["test"] == 0.1


def test_the_model_its_layers_and_the_method_are_those_requested() -> None:
    values = rendered(model="no", targets="[query, value]", method="fedavg")
    assert values["model"] == {"name": "no", "target_modules": ["query", "value"]}
    assert values["method"]["name"] == "fedavg"
    assert rendered()["model"] == {"name": "a/model"}


def test_fast_adapts_the_last_layers_at_a_rate_of_their_own() -> None:
    text, targets = "builtin:all-minilm-l6-v2", get_default_model("sequence-classification")[1]
    every, fast = (rendered(model=text, targets=targets, fast=fast) for fast in (False, True))
    assert every["model"] == {"name": text, "target_modules": ["query", "key", "value", "dense"]}
    assert fast["model"] == {"name": text, "target_modules": ["query", "value"], "layers_to_transform": [4, 5]}
    assert (every["training"]["lr"], fast["training"]["lr"]) == (1e-3, 3e-3)
    with refused_field("--fast"):
        rendered(fast=True)


@pytest.mark.parametrize("task", ["sequence-classification", "causal-lm", "regression"])
def test_logits_are_adjusted_where_the_task_can(task: str) -> None:
    adjusted = "logit_adjustment" in rendered(task)["training"]
    assert adjusted is ("logit_adjustment" in TASKS[task].loss_options)


def test_a_task_without_a_model_to_suggest_asks_for_one() -> None:
    assert get_default_model("sequence-classification") == TASKS["sequence-classification"].default_model
    without = [name for name, task in TASKS.items() if task.default_model is None]
    for name in without:
        with pytest.raises(FedspanError, match=f"{name} has no default model"):
            get_default_model(name)
    assert without


def test_layers_are_suggested_where_peft_has_no_default(tmp_path: Path) -> None:
    task = "image-classification"
    assert suggest_target_modules(task, None) == get_default_model(task)[1]
    assert suggest_target_modules(task, get_default_model(task)[0]) == get_default_model(task)[1]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mobilenet_v2"}))
    every = suggest_target_modules(task, str(tmp_path))
    names = [f"m.layer.{number}.{part}_1x1.convolution" for number in (0, 14) for part in ("expand", "reduce")]
    fast = rendered(task, model=str(tmp_path), targets=every, fast=True)["model"]["target_modules"]
    for pattern, found in ((yaml.safe_load(str(every)), names), (fast, names[2:])):
        assert [name for name in names if re.fullmatch(pattern, name)] == found
    (tmp_path / "config.json").write_text("{")
    assert suggest_target_modules(task, str(tmp_path)) is None  # plan and run say why it cannot be read
    assert suggest_target_modules(task, str(tmp_path / "missing")) is None
