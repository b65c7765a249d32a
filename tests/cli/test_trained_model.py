"""``fedspan predict``, ``evaluate`` and ``export``, on texts and on images."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import yaml
from peft import PeftModel

import fedspan
from helpers import refusals, tiny, tiny_decoders, tiny_images
from helpers.command_line import Call, Write, done


def test_predict(call: Call, finished: Path, tmp_path: Path) -> None:
    texts = ["admin1 admin2 word3", "symptom4 word1"]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts))
    rows = json.loads(done(call("predict", finished, *texts, "--json")))
    assert [row["text"] for row in rows] == texts
    assert all(row["label"] in tiny.LABELS and 0.25 <= row["probability"] <= 1 for row in rows)
    expected = "".join(f"{row['label']}\t{row['probability']:.4f}\t{row['text']}\n" for row in rows)
    assert done(call("predict", finished, "--file", tmp_path / "texts.txt")) == expected
    assert done(call("predict", finished, "--file", "-", input="\n".join(texts))) == expected
    assert done(call("predict", finished, *texts, "--client", "west")) == expected


def test_a_terminal_executes_nothing_in_a_label(call: Call, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspan.cli.trained_model.sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    for answer, shown in ((("a\x1b]0;b", 0.5), "a\\x1b]0;b  0.5000  x\n"), ("c\n\x1b[2J", "x\n  c\n  \\x1b[2J\n")):
        monkeypatch.setattr(fedspan, "predict", lambda *_, answer=answer: [answer])
        assert done(call("predict", finished, "x")) == shown


def test_only_line_ends_end_a_line(call: Call, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_bytes("admin1\u2028word3\r\nlab2\x0cword1\rlab3\n".encode())
    rows = json.loads(done(call("predict", finished, "--file", tmp_path / "texts.txt", "--json")))
    assert [row["text"] for row in rows] == ["admin1\u2028word3", "lab2\x0cword1", "lab3"]
    refused = call("predict", finished, "--file", "-", "--text", "message", input="lab2")
    assert "standard input is read as lines" in refused.stderr


def test_no_column_of_the_table_is_overwritten(call: Call, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("text,label,predicted_label\nadmin1 word2,x,y\n")
    done(call("predict", finished, "--file", tmp_path / "new.csv", "--out", tmp_path / "out.jsonl"))
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert (row["label"], row["predicted_label"], row["predicted_predicted_label"] in tiny.LABELS) == ("x", "y", True)
    refused = call("predict", finished, "admin1", "--out", tmp_path / "absent" / "out.csv")
    assert "`--out`" in refused.stderr
    assert "a file in a folder that exists" in refused.stderr


def test_options_that_describe_no_data_are_refused(call: Call, finished: Path, tmp_path: Path) -> None:
    """They would be ignored: the run's own test set has the columns of the run's config."""
    for option in (("--label", "intent"), ("--role", "tokens=words"), ("--set", "data.label=intent")):
        assert "no data are given" in call("evaluate", finished, *option).stderr
    (tmp_path / "new.csv").write_text("text,label\nadmin1,admin\n")
    with refusals.refused("run_data", "only one test set is measured"):
        fedspan.evaluate(finished, data=tmp_path / "new.csv", run_data=tmp_path / "new.csv")
    refused = call("evaluate", finished, "--tasks", "mmlu", "--text-pair", "b")
    assert "cannot be combined with --tasks" in refused.stderr


def test_a_model_of_single_texts_takes_no_pairs(call: Call, finished: Path) -> None:
    assert done(call("predict", finished, "admin1\tword3")) == done(call("predict", finished, "admin1 word3"))
    with refusals.refused("texts", "Expected single texts, as in this model's training"):
        fedspan.predict(finished, [("admin1", "word3")])


@pytest.fixture(scope="module")
def paired(call: Call, write: Write, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on pairs of texts, in columns of their own names."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = (tiny_folder / "corpus.csv").read_text().splitlines()[1:]
    lines = [f"word{number % 9},{row}" for number, row in enumerate(rows)]
    (folder / "pairs.csv").write_text("\n".join(["question,passage,label,site", *lines]) + "\n")
    data = {"train": str(folder / "pairs.csv"), "text": "question", "text_pair": "passage"}
    done(call("run", write(data=data, federation={"rounds": 1}), "--out", folder / "run"))
    return folder / "run"


def test_a_model_of_pairs_takes_no_single_texts(call: Call, paired: Path, tmp_path: Path) -> None:
    out = done(call("export", paired, "--out", tmp_path / "out")) and tmp_path / "out"
    for folder in (paired, out):
        result = call("predict", folder, "admin1 word3")
        assert result.exit_code == 2
        assert "pairs of texts (in a shell, separated by a tab), as in this model's training" in result.stderr
        ((label, share),) = fedspan.predict(folder, [("word1", "admin1 word3")])
        assert done(call("predict", folder, "word1\tadmin1 word3")) == f"{label}\t{share:.4f}\tword1 admin1 word3\n"


def test_rows_that_an_evaluation_leaves_out_are_counted(call: Call, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("text,label\nadmin1,admin\nlab2,\nlab3,lab\n")
    shown = done(call("evaluate", finished, "--data", tmp_path / "new.csv", "--set", "data.invalid=skip"))
    assert [line.split() for line in shown.splitlines()[-2:]] == [["examples", "2"], ["skipped", "1"]]


TEXTS = ["admin1 admin2 word3", "symptom4, word1", "lab2"]


@pytest.mark.parametrize("name", ["new.csv", "new.csv.gz", "new.xlsx", "new.jsonl"])
def test_predict_reads_a_table_as_init_does(call: Call, finished: Path, tmp_path: Path, name: str) -> None:
    import pandas

    table = pandas.DataFrame({"id": [7, 8, 9], "label": ["lab", "lab", "admin"], "text": TEXTS})
    writers = {"xlsx": table.to_excel, "jsonl": lambda path, **_: table.to_json(path, orient="records", lines=True)}
    writers.get(name.rpartition(".")[2], table.to_csv)(tmp_path / name, index=False)
    expected = fedspan.predict(finished, TEXTS)
    rows = json.loads(done(call("predict", finished, "--file", tmp_path / name, "--json")))
    assert [(row["label"], row["probability"], row["text"]) for row in rows] == [
        (label, pytest.approx(share, abs=1e-6), text) for (label, share), text in zip(expected, TEXTS, strict=True)
    ]


def test_predictions_stand_beside_the_columns_of_the_table(call: Call, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("message,label\nadmin1 word2,=1+1\nlab2 lab3,x\n")
    wrong = call("predict", finished, "--file", tmp_path / "new.csv")
    assert "`--text`: no column named 'text'" in wrong.stderr
    options = ("--file", tmp_path / "new.csv", "--text", "message", "--out")
    done(call("predict", finished, *options, tmp_path / "out.csv"))
    done(call("predict", finished, *options, tmp_path / "out.jsonl"))
    expected = fedspan.predict(finished, ["admin1 word2", "lab2 lab3"])
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["message"], row["label"]) for row in rows] == [("admin1 word2", "'=1+1"), ("lab2 lab3", "x")]
    assert [(row["predicted_label"], row["probability"]) for row in rows] == [
        (label, f"{share:.4f}") for label, share in expected
    ]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["label"], line["predicted_label"]) for line in lines] == [
        ("=1+1", expected[0][0]),
        ("x", expected[1][0]),
    ]
    again = call("predict", finished, *options, tmp_path / "out.csv")
    assert "a file that does not exist yet" in again.stderr


def test_a_table_of_prompts(call: Call, decoders: Path, tmp_path: Path) -> None:
    """A template of several columns is filled from them; one of a single column as for texts."""
    values = tiny_decoders.settings(decoders, federation={"rounds": 1, "clients_per_round": None})
    rows = [{"first": "a1", "second": "b2", "answer": "c3", "site": site} for site in ("x", "y") for _ in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for prompt, column, text in (("Q: {first} {second} A:", None, "Q: a1 b2 A:"), ("Q: {first} A:", "second", "b2")):
        values["data"] = {"train": str(tmp_path / "rows.jsonl"), "prompt": prompt, "test_fraction": 0.2}
        values["partition"] = {"clients": 2}
        folder = tmp_path / f"run-{column}"
        fedspan.run(values, folder)
        options = () if column is None else ("--text", column)
        shown = done(call("predict", folder, "--file", tmp_path / "rows.jsonl", "--json", *options))
        assert [(row["text"], row["answer"]) for row in json.loads(shown)[:1]] == [
            (text, fedspan.predict(folder, [text])[0])
        ]


def test_a_table_of_pairs(call: Call, paired: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("passage,question\nadmin1 word2,word1\n")
    (tmp_path / "half.csv").write_text("question,label\nadmin1 word2,lab\n")
    ((label, _),) = fedspan.predict(paired, [("word1", "admin1 word2")])
    shown = done(call("predict", paired, "--file", tmp_path / "new.csv"))
    assert shown.startswith(f"{label}\t")
    assert shown.endswith("\tword1 admin1 word2\n")
    assert "`--text-pair`: no column named 'passage'" in call("predict", paired, "--file", tmp_path / "half.csv").stderr


def test_an_exported_model_is_evaluated_on_the_columns_of_its_training(
    call: Call, paired: Path, tmp_path: Path
) -> None:
    done(call("export", paired, "--out", tmp_path / "out"))
    data = ("--data", paired.parent / "pairs.csv", "--json")
    assert done(call("evaluate", tmp_path / "out", *data)) == done(call("evaluate", paired, *data))


def test_personal_models_differ(call: Call, personal: Path) -> None:
    said = {client: done(call("predict", personal, "admin1 lab2", "--client", client)) for client in tiny.SITES}
    assert len(set(said.values())) == len(tiny.SITES)
    assert "one for each client" in (personal.parent / "screen.txt").read_text()


def test_clients_of_any_name_have_models(call: Call, write: Write, tiny_folder: Path, tmp_path: Path) -> None:
    names = {"east": "..", "north": "St. Mary's/North", "south": "süd " * 40, "west": "west"}
    rows = (tiny_folder / "corpus.csv").read_text().splitlines()
    for site, name in names.items():
        rows = [row.removesuffix(f",{site}") + f",{name}" if row.endswith(f",{site}") else row for row in rows]
    data = tmp_path / "corpus.csv"
    data.write_text("\n".join(rows))
    config = write(data={"train": str(data)}, method={"name": "fedsa-lora"}, federation={"rounds": 1})
    done(call("run", config, "--out", tmp_path / "run"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert set(report["adapters"]) == {name.strip() for name in names.values()}
    for client, where in report["adapters"].items():
        assert (tmp_path / "run" / where).parent == tmp_path / "run" / "adapter"
        assert done(call("predict", tmp_path / "run", "admin1", "--client", client))


def test_evaluate_measures_what_the_run_reported(call: Call, finished: Path, tiny_folder: Path) -> None:
    metrics = json.loads(done(call("evaluate", finished, "--json")))
    reported = json.loads((finished / "report.json").read_text())["scores"]["test"]
    assert metrics["accuracy"] == reported["accuracy"]
    assert metrics["macro_f1"] == pytest.approx(reported["macro_f1"])
    assert metrics["loss"] == pytest.approx(reported["loss"], abs=1e-5)
    shown = done(call("evaluate", finished))
    assert f"{100 * metrics['accuracy']:.1f}%" in shown
    whole = json.loads(done(call("evaluate", finished, "--data", tiny_folder / "corpus.csv", "--json")))
    assert whole["examples"] == sum(tiny.SITES.values())


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_export(call: Call, finished: Path, tiny_folder: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "deep" / form
    assert done(call("export", finished, "--out", out, "--form", form)) == f"wrote {out}\n"
    assert [path.name for path in out.parent.iterdir()] == [form]
    data = ("--data", tiny_folder / "corpus.csv", "--json")
    there = json.loads(done(call("evaluate", finished, *data)))
    here = json.loads(done(call("evaluate", out, *data)))
    assert here == pytest.approx(there, abs=1e-5)
    assert done(call("predict", out, "lab1 word2")) == done(call("predict", finished, "lab1 word2"))
    if form == "merged":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
        assert model.config.id2label == dict(enumerate(tiny.LABELS))
        assert model.config.hidden_dropout_prob == 0.1
        assert transformers.AutoTokenizer.from_pretrained(out)("lab1").input_ids


def test_export_of_a_client(call: Call, personal: Path, tmp_path: Path) -> None:
    out = tmp_path / "theirs"
    done(call("export", personal, "--out", out, "--client", "north"))
    expected = done(call("predict", personal, "admin1 lab2", "--client", "north"))
    assert done(call("predict", out, "admin1 lab2")) == expected
    assert done(call("predict", out, "admin1 lab2", "--client", "north")) == expected


def test_export_of_a_round(call: Call, finished: Path, stopped: Path, tmp_path: Path) -> None:
    """From checkpoints: of a run that is not finished, and of rounds that were not the best."""
    name = "adapter_model.safetensors"
    for round in ("best", "last", "1"):
        done(call("export", stopped, "--out", tmp_path / round, "--round", round))
    done(call("export", finished, "--out", tmp_path / "first", "--round", "1"))
    done(call("export", finished, "--out", tmp_path / "second", "--round", "2"))
    first = (tmp_path / "first" / name).read_bytes()
    assert all((tmp_path / round / name).read_bytes() == first for round in ("best", "last", "1"))
    assert (tmp_path / "second" / name).read_bytes() != first


@pytest.fixture(scope="module")
def screens(call: Call, images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By kind of model: a run's folder and what the command showed."""
    shown: dict[str, tuple[Path, str]] = {}
    for name, kind in (("resnet", "resnet"), ("scratch", "builtin:resnet-8")):
        folder = tmp_path_factory.mktemp(name)
        values = tiny_images.settings(images, kind, federation={"rounds": 1})
        (folder / "run.yaml").write_text(yaml.safe_dump(values))
        result = call("run", folder / "run.yaml", "--out", folder / "run")
        assert result.exit_code == 0, result.output
        shown[name] = folder / "run", result.stdout
    return shown


@pytest.mark.parametrize("name", ["resnet", "scratch"])
def test_the_closing_screen(name: str, screens: dict[str, tuple[Path, str]]) -> None:
    folder, screen = screens[name]
    report = json.loads((folder / "report.json").read_text())
    assert "macro-F1" in screen
    assert "a held-out image" in screen
    assert all(Path(row["text"]).is_file() for row in report["examples"])
    assert f"fedspan predict {folder} image.png" in screen.replace("\n", "")
    kind = {"resnet": "adapter", "scratch": "model"}[name]
    assert [line for line in screen.splitlines() if line.startswith(kind) and line.endswith(str(folder / "adapter"))]


@pytest.mark.parametrize("name", ["resnet", "scratch"])
def test_the_snippet_loads_the_model(name: str, images: Path, screens: dict[str, tuple[Path, str]]) -> None:
    folder, screen = screens[name]
    lines = [line.strip() for line in screen.splitlines() if "import " in line or "from_pretrained" in line]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    model = names["model"].eval()
    assert not isinstance(model, PeftModel)
    assert any("merge_and_unload" in line for line in lines) == (name == "resnet")
    assert ("import fedspan.models.resnet" in lines) == (name == "scratch")
    paths = sorted((images / "pictures" / "north").rglob("*.png"))
    source = images / "resnet" if name == "resnet" else folder / "adapter"
    shares = model(pixel_values=tiny_images.pixels(source, paths)).logits.softmax(1).amax(1)
    assert [share for _, share in fedspan.predict(folder, paths)] == pytest.approx(shares.tolist(), abs=1e-4)


def test_predicting_on_files(call: Call, images: Path, screens: dict[str, tuple[Path, str]]) -> None:
    paths = sorted((images / "pictures" / "north" / "red").iterdir())[:2]
    folder, _ = screens["resnet"]
    answers = fedspan.predict(folder, [str(path) for path in paths])
    shown = call("predict", folder, *paths).stdout.splitlines()
    assert shown == [f"{label}\t{share:.4f}\t{path}" for (label, share), path in zip(answers, paths, strict=True)]
    rows = json.loads(call("predict", folder, *paths, "--json").stdout)
    assert [(row["text"], row["label"]) for row in rows] == [
        (str(path), label) for (label, _), path in zip(answers, paths, strict=True)
    ]
