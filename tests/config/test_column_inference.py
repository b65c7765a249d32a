"""Which columns of a file are texts, labels and clients."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from fedspan.data.loading import load
from helpers.found_config import TEXTS, config_of, pictures, refused, table


@pytest.mark.parametrize("name", ["score", "how_good", "Rating"])
@pytest.mark.parametrize("fraction", [1, 7])
def test_regression_finds_its_numbers(tmp_path: Path, name: str, fraction: int) -> None:
    numbers = [number / fraction for number in range(60)]
    columns = {"id": range(60), "review": TEXTS, "kind": ["a", "b", "c"] * 20, name: numbers}
    config, _ = config_of(table(tmp_path / "t.csv", columns), task="regression")
    assert (config.task, config.data.text, config.data.label) == ("regression", "review", name)


def test_regression_without_numbers(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", {"review": TEXTS, "kind": ["a", "b", "c"] * 20})
    refused("--label", "the column of numbers: review, kind", path, task="regression")


def test_fractions_without_labels_suggest_regression(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", {"review": TEXTS, "share": [number / 70 for number in range(60)]})
    refused("--label", "--task regression predicts numbers, such as those of share", path)


def test_regression_finds_decimals(tmp_path: Path) -> None:
    amounts = pa.array([Decimal(number) / 8 for number in range(60)], pa.decimal128(9, 3))
    pyarrow.parquet.write_table(pa.table({"review": TEXTS, "amount": amounts}), tmp_path / "t.parquet")
    config, _ = config_of(tmp_path / "t.parquet", task="regression")
    assert config.data.label == "amount"
    targets = load(config.data, task=config.task_columns).train["target"][:]
    assert {float(target) for target in targets} < {number / 8 for number in range(60)}


def test_a_requested_column_makes_the_first_line_a_header(tmp_path: Path) -> None:
    path = table(tmp_path / "train.csv", {"words": TEXTS, "spam": ["ham", "spam"] * 30})
    config, found = config_of(path, text="words", label="spam")
    assert (config.data.text, config.data.label, config.data.header) == ("words", "spam", None)
    assert "60 examples" in found


def test_both_texts_of_a_pair_are_printed(tmp_path: Path) -> None:
    columns = {"premise": TEXTS, "hypothesis": TEXTS[::-1], "label": ["yes", "no"] * 30}
    _, found = config_of(table(tmp_path / "t.csv", columns))
    assert "text 'premise' and 'hypothesis', label 'label'" in found


@pytest.mark.parametrize("names", [("question1", "question2"), ("title_a", "title_b")])
def test_pairs_of_numbered_columns(tmp_path: Path, names: tuple[str, str]) -> None:
    path = table(tmp_path / "t.csv", {names[0]: TEXTS, names[1]: TEXTS, "same": ["no", "yes"] * 30})
    config, found = config_of(path)
    assert (config.data.text, config.data.text_pair, config.data.label) == (*names, "same")
    assert f"text {names[0]!r} and {names[1]!r}" in found
    alone, _ = config_of(path, text=names[1])
    assert (alone.data.text, alone.data.text_pair) == (names[1], None)


def test_scores_by_number_are_no_pair(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", {"v1": range(60), "v2": range(60), "text": TEXTS, "label": ["a", "b"] * 30})
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
    config, _ = config_of(table(tmp_path / "t.csv", columns))
    assert (config.task, config.data.label) == ("regression", "Stars (0-10)")
    rows = [
        {"p": {"body": text, "meta": {"tag": ["ab"[at % 2]], "site": f"s{at % 4}"}}} for at, text in enumerate(TEXTS)
    ]
    path = tmp_path / "t.json"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-16")
    config, _ = config_of(path)
    assert (config.data.text, config.data.label, config.partition.column) == ("p.body", "p.meta.tag", "p.meta.site")


def test_other_columns_that_may_be_labels_are_named(tmp_path: Path) -> None:
    columns = {"note": TEXTS, "color": ["red", "blue"] * 30, "size": ["s", "m", "l"] * 20}
    config, found = config_of(table(tmp_path / "t.csv", columns))
    assert config.data.label == "color"
    assert "other columns that may be labels: size (--label)" in found


def test_lists_of_texts_are_a_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"sentences": text.split(), "label": "ab"[number % 2]} for number, text in enumerate(TEXTS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config, _ = config_of(path, task="sequence-classification")
    assert (config.data.text, config.data.label) == ("sentences", "label")


def test_lists_of_one_text_are_a_text_and_other_lists_are_named(tmp_path: Path) -> None:
    path, shops = tmp_path / "t.parquet", [f"the shop number {number % 4} in the street" for number in range(60)]
    columns: dict[str, list[Any]] = {
        "t": [[f"text {number}"] for number in range(60)],
        "l": ["a", "b"] * 30,
        "s": shops,
    }
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
    path = table(tmp_path / "t.csv", {"text": TEXTS, "label": kinds * 10})
    advice = "--task multi-label-classification --label label"
    config, found = config_of(path)
    assert config.task == "sequence-classification"
    assert f"Values of 'label' contain '|'; for several labels an example: {advice}." in found
    places = ["Bonn, west", "Ulm, south", "Kiel, north"] * 20
    _, found = config_of(table(tmp_path / "t.csv", {"text": TEXTS, "label": places}))
    assert "several labels" not in found
    rare = [*kinds[:5], *["billing"] * 40, *["tech"] * 15]  # a tenth of them or less is combined
    _, found = config_of(table(tmp_path / "t.csv", {"text": TEXTS, "label": rare}))
    assert "several labels" not in found


def test_requested_labels_of_a_short_file_may_be_many(tmp_path: Path) -> None:
    kinds = ["billing", "tech", "billing|tech", "other", "billing|other", "tech|other"]
    path = table(tmp_path / "t.csv", {"text": TEXTS[:6], "label": kinds})
    config, _ = config_of(path, task="multi-label-classification", label="label", options={"test_fraction": 0})
    assert (config.task, config.data.label) == ("multi-label-classification", "label")


def test_whole_numbers_that_may_be_predicted(tmp_path: Path) -> None:
    advice = "different numbers, which are labels here; --task regression predicts numbers"
    columns = {"title": TEXTS, "price": [3 * number + 1 for number in range(60)]}
    refused("data.train", f"The column price has 60 {advice}", table(tmp_path / "t.csv", columns))
    columns = {"title": TEXTS * 4, "price": [7 * (number % 30) for number in range(240)]}
    _, found = config_of(table(tmp_path / "t.csv", columns))
    assert f"The column price has 30 {advice}" in found
    columns["price"] = [number % 30 for number in range(240)]  # the numbers of 30 classes
    _, found = config_of(table(tmp_path / "t.csv", columns))
    assert advice not in found


def test_decimal_commas_are_numbers(tmp_path: Path) -> None:
    columns = {"review": TEXTS, "score": [f"{number / 7:.2f}".replace(".", ",") for number in range(60)]}
    config, _ = config_of(table(tmp_path / "t.csv", columns, delimiter=";"))
    assert (config.task, config.data.label) == ("regression", "score")
    loaded = load(config.data, task=config.task_columns)
    assert loaded.test is not None
    numbers = [*loaded.train["target"], *loaded.test["target"]]
    assert sorted(numbers) == [round(number / 7, 2) for number in range(60)]
