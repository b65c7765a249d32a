"""``fedspan init``: what it writes is a config that reads the file it was written for, up to a prediction."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedspan.config import RunConfig, load_config
from fedspan.runs.report import read_partition
from helpers.written_data import write_table

Call = Callable[..., Any]


def written(call: Call, data: Path, out: Path, *more: object) -> tuple[RunConfig, str]:
    result = call("init", data, "--out", out, *more)
    assert result.exit_code == 0, result.output
    return load_config(out), result.output


TEXTS = [f"a longer text number {number} about something" for number in range(60)]


def test_texts_with_labels_of_several_sites(call: Call, tmp_path: Path) -> None:
    columns = {"id": range(60), "note": TEXTS, "diagnosis": ["a", "b", "c"] * 20, "hospital": ["x", "y"] * 30}
    config, said = written(call, write_table(tmp_path / "notes.csv", columns), tmp_path / "c.yaml")
    assert (config.task, config.data.text, config.data.label) == ("sequence-classification", "note", "diagnosis")
    assert (config.partition.partitioner, config.partition.column) == ("natural", "hospital")
    assert "3 labels: a, b, c" in said
    assert "60 examples, 12 of them held out for testing" in said
    text = (tmp_path / "c.yaml").read_text()
    assert "# layers that get adapters" in text


def test_a_file_for_each_data_owner(call: Call, tmp_path: Path) -> None:
    for site in ("north", "south"):
        write_table(
            tmp_path / f"{site}.csv", {"note": TEXTS * 40, "label": ["a", "b", "c"] * 800}
        )  # more than is inspected
    config, said = written(call, tmp_path / "{clinic}.csv", tmp_path / "c.yaml")
    assert (config.partition.partitioner, config.partition.column) == ("natural", "clinic")
    assert "clients: the column clinic" in said


def test_names_that_say_nothing(call: Call, tmp_path: Path) -> None:
    columns = {"x": TEXTS, "y": ["yes", "no"] * 30}
    config, _ = written(call, write_table(tmp_path / "t.csv", columns), tmp_path / "c.yaml", "--clients", 3)
    assert (config.data.text, config.data.label, config.partition.clients) == ("x", "y", 3)


def test_numbers_pairs_and_what_the_user_says(call: Call, tmp_path: Path) -> None:
    columns = {"sentence1": TEXTS, "sentence2": TEXTS[::-1], "label": [number / 7 for number in range(60)]}
    config, _ = written(call, write_table(tmp_path / "pairs.csv", columns), tmp_path / "c.yaml")
    assert (config.task, config.data.text, config.data.text_pair) == ("text-embedding", "sentence1", "sentence2")
    more = ("--task", "sequence-classification", "--text", "sentence2", "--model", "org/bert", "--method", "rolora")
    columns["label"] = [number % 4 for number in range(60)]
    write_table(tmp_path / "pairs.csv", columns)
    config, _ = written(call, tmp_path / "pairs.csv", tmp_path / "d.yaml", *more)
    assert (config.task, config.data.text, config.data.text_pair) == ("sequence-classification", "sentence2", None)
    assert (config.model.name, config.model.target_modules, config.method.name) == ("org/bert", None, "rolora")


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"question": "1 + 1?", "answer": "2"}, {"prompt": "{question}\n", "answer": "answer"}),
        ({"instruction": "add", "input": "1 1", "output": "2"}, {"prompt": "alpaca", "answer": "output"}),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}, {"chat": True}),
    ],
)
def test_prompts_and_answers(row: dict[str, Any], wanted: dict[str, Any], call: Call, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(20)))
    config, _ = written(call, path, tmp_path / "c.yaml")
    assert config.task == "causal-lm"
    assert {name: getattr(config.data, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone.csv"], "DATA"),
        (["{file}", "--text", "note"], "`--text`: no column named 'note'. The columns are x, y."),
        (["{file}", "--task", "chess"], "`--task`: no task is named 'chess'. "),
        (["{file}", "--out", "{file}"], "t.csv' exists. --force replaces it."),
        (["{numbers}"], "`--label`: no value is given. Expected the column of labels: a"),
        (["{file}", "--task", "causal-lm"], "`--answer`: no value is given. Expected the column of answers: "),
        (["{file}", "--method", "fedot"], "method"),
    ],
)
def test_mistakes(arguments: list[str], said: str, refused: Callable[..., str], tmp_path: Path) -> None:
    file = write_table(tmp_path / "t.csv", {"x": TEXTS, "y": ["yes", "no"] * 30})
    numbers = write_table(tmp_path / "n.csv", {"a": [number / 3 for number in range(60)]})
    words = [word.replace("{file}", str(file)).replace("{numbers}", str(numbers)) for word in arguments]
    if "--out" not in words:
        words += ["--out", str(tmp_path / "c.yaml")]
    assert said in refused("init", *words)
    assert not (tmp_path / "c.yaml").exists()


def test_options_of_data_are_set_and_others_are_not(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("note^kind\n" + "".join(f"{text}, so^{'ab'[at % 2]}\n" for at, text in enumerate(TEXTS)))
    config, _ = written(call, path, tmp_path / "c.yaml", "--set", "data.delimiter=^")
    assert (config.data.delimiter, config.data.label) == ("^", "kind")
    result = call("init", path, "--out", tmp_path / "d.yaml", "--set", "method.r=4")
    assert result.exit_code == 2
    assert "not 'method.r=4'" in result.output


ROWS = 60
LABELS = ("Bürokratie", "Größe", "Überweisung")
MESSAGES = [
    f"{kind}{number % 9} word{number % 7} Café" for number in range(ROWS // 3) for kind in ("admin", "lab", "pain")
]


def test_from_a_file_of_excel_to_a_prediction(call: Call, tiny_folder: Path, tmp_path: Path) -> None:
    data, config, run = tmp_path / "excel.csv", tmp_path / "config.yaml", tmp_path / "run"
    rows = [f"{text};{LABELS[number % 3]}" for number, text in enumerate(MESSAGES)]
    data.write_bytes("\r\n".join(["Nachricht;Kategorie", *rows]).encode("utf-8-sig"))
    first = call("init", data, "--out", config, "--clients", 2, "--model", tiny_folder / "bert")
    assert first.exit_code == 0, first.output
    held_out = ROWS // 5
    assert f"{ROWS} examples, {held_out} of them held out for testing" in " ".join(first.output.split())
    trained = call("run", config, "--out", run, "--set", "federation.rounds=1")
    assert trained.exit_code == 0, trained.output
    divided = read_partition(run)
    used = sum(len(one.train) + len(one.validation) + len(one.test) for one in divided.clients)
    assert used == ROWS - held_out
    predicted = call("predict", run, MESSAGES[0], "--json")
    assert predicted.exit_code == 0, predicted.output
    (row,) = json.loads(predicted.stdout)
    assert json.loads((run / "adapter" / "fedspan.json").read_text(encoding="utf-8"))["labels"] == sorted(LABELS)
    assert row["label"] in LABELS
    assert 1 / len(LABELS) <= row["probability"] <= 1
