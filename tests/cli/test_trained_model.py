"""``fedspan predict``, ``evaluate`` and ``export``, on texts and on images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from click.testing import Result
from peft import PeftModel

import fedspan
from helpers import tiny, tiny_images
from helpers.command_line import done

Call = Callable[..., Result]
Write = Callable[..., Path]


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


def test_predict_pairs(call: Call, finished: Path) -> None:
    assert done(call("predict", finished, "--pairs", "admin1\tword3")).endswith("\tadmin1 word3\n")


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
