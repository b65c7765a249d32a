"""Exported models: PEFT and Transformers load them, they score and predict as reported, and their cards say so."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from transformers import AutoImageProcessor, AutoTokenizer, MobileNetV2Config, MobileNetV2ForImageClassification

import fedspan
from fedspan.assembly.task import collect_task_settings, parse_task_settings, read_notes
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.run_folder import CARD
from fedspan.runs.model_card import _write_command
from fedspan.serving.load import _load_adapter
from fedspan.tasks.settings import TaskSettings
from helpers import tiny, tiny_images
from helpers.exported_models import load_as_its_card_says
from helpers.refusals import refused


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 1}), folder)
    return folder / "adapter"


def test_an_adapter_s_folder_holds_its_tokenizer(adapter: Path) -> None:
    texts = ["word1 admin1", "word7"]
    tokenizer: Any = AutoTokenizer.from_pretrained(adapter)
    labels = json.loads((adapter / "fedspan.json").read_text())["labels"]
    model: Any = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=len(labels))
    with torch.no_grad():
        probabilities = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(1)
    for (label, probability), row in zip(fedspan.predict(adapter, texts), probabilities, strict=True):
        assert label == labels[int(row.argmax())]
        assert probability == pytest.approx(float(row.max()), abs=1e-6)


def test_an_adapter_s_folder_holds_its_image_processor(image_runs: Path) -> None:
    processor: Any = AutoImageProcessor.from_pretrained(image_runs / "vit" / "adapter", backend="pil")
    assert type(processor).__name__ == "ViTImageProcessorPil"


@pytest.mark.parametrize("name", ["vit", "resnet", "scratch"])
def test_evaluate_gives_the_report_s_scores(name: str, images: Path, image_runs: Path) -> None:
    report = json.loads((image_runs / name / "report.json").read_text())
    found = fedspan.evaluate(image_runs / name)
    wanted = report["scores"]["test"]
    assert found == pytest.approx({**{key: wanted[key] for key in found if key in wanted}, "examples": 10}, abs=1e-4)
    assert {"accuracy", "loss"} <= set(found)
    everywhere = fedspan.evaluate(image_runs / name, data=images / "pictures")
    assert everywhere["examples"] == sum(tiny_images.SITES.values())


@pytest.mark.parametrize("name", ["vit", "resnet", "scratch"])
def test_predictions_on_files(name: str, images: Path, image_runs: Path) -> None:
    """The same as somebody without fedspan gets; paths as text or as paths."""
    folder = image_runs / name / "adapter"
    paths = sorted((images / "pictures").rglob("0[0-4].png"))
    if name == "scratch":
        model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        pixels = tiny_images.pixels(folder, paths)
    else:
        base = tiny_images.fresh_classifier(images / name)
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        pixels = tiny_images.pixels(images / name, paths)
    with torch.no_grad():
        shares = model(pixel_values=pixels).logits.softmax(1)
    found = fedspan.predict(image_runs / name, [str(paths[0]), *paths[1:]])
    assert [label for label, _ in found] == [tiny_images.COLORS[index] for index in shares.argmax(1).tolist()]
    assert [share for _, share in found] == pytest.approx(shares.amax(1).tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["vit", "resnet", "scratch"])
def test_merged_exports(name: str, images: Path, image_runs: Path, tmp_path: Path) -> None:
    out = fedspan.export(image_runs / name, tmp_path / "merged", form="merged")
    model = load_as_its_card_says(out)
    paths = sorted((images / "pictures" / "west").rglob("*.png"))
    with torch.no_grad():
        shares = model(pixel_values=tiny_images.pixels(out, paths)).logits.softmax(1).amax(1)
    for folder in (image_runs / name, out):
        found = fedspan.predict(folder, paths)
        assert [share for _, share in found] == pytest.approx(shares.tolist(), abs=1e-4)
    again = fedspan.export(out, tmp_path / "again", form="merged")
    assert fedspan.predict(again, paths) == fedspan.predict(out, paths)
    if name == "scratch":
        with pytest.raises(Exception, match="holds a merged model"):
            fedspan.export(image_runs / name, tmp_path / "adapter")


def test_a_model_that_reads_its_convolutions_attributes(tmp_path: Path) -> None:
    """MobileNet's padding reads the stride of a convolution, which PEFT's wrapper does not have."""
    torch.manual_seed(0)
    sizes = {"image_size": 32, "depth_multiplier": 0.25, "depth_divisible_by": 4, "min_depth": 4, "num_labels": 3}
    config = MobileNetV2Config(**sizes, initializer_range=0.5)
    model = MobileNetV2ForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=r".*\.conv_1x1\.convolution", init_lora_weights=False)
    )
    adapted.save_pretrained(str(tmp_path / "adapter"))
    base = MobileNetV2ForImageClassification.from_pretrained(tmp_path / "base").eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = adapted.merge_and_unload()(pixel_values=pixels).logits
        assert not torch.allclose(base(pixel_values=pixels).logits, expected, rtol=0.01)
        found = _load_adapter(base, tmp_path / "adapter")(pixel_values=pixels).logits
    assert torch.allclose(found, expected, rtol=1e-4)


def settings(**changes: Any) -> TaskSettings:
    config = parse_config({"data": {"train": "train.csv"}, **changes})
    return collect_task_settings(config, ("a", "b"), 64, None)


def written(folder: Path, **changes: Any) -> dict[str, Any]:
    notes = {**asdict(settings()), "base_model": "base", "client": None, "kept": ["classifier"], **changes}
    (folder / "fedspan.json").write_text(json.dumps(notes))
    return notes


def test_settings_are_those_of_the_config_and_of_the_model() -> None:
    found = settings(evaluation={"max_new_tokens": 9}, model={"quantization": "int8"})
    assert (found.task, found.labels, found.max_length) == ("sequence-classification", ("a", "b"), 64)
    assert (found.metric, found.max_new_tokens, found.quantization) == ("accuracy", 9, "int8")
    assert settings(evaluation={"metric": "macro_f1"}).metric == "macro_f1"
    assert settings(task="causal-lm").labels == ()  # whatever column of labels its data have


def test_notes_come_back_as_they_were_written(tmp_path: Path) -> None:
    notes = written(tmp_path)
    assert read_notes(tmp_path) == json.loads(json.dumps(notes))
    assert parse_task_settings(tmp_path, read_notes(tmp_path)) == settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("base_model", ""), ("base_model", 3), ("revision", 3), ("client", 3), ("kept", "classifier"), ("kept", [1])],
)
def test_entries_of_another_kind_are_named(name: str, value: object, tmp_path: Path) -> None:
    written(tmp_path, **{name: value})
    with refused(f"{tmp_path / 'fedspan.json'}.{name}"):
        read_notes(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", ["a"]),
        ("labels", ["a", "a"]),
        ("max_length", 0),
        ("max_new_tokens", 0),
        ("metric", "pearson"),
        ("answer_pattern", "("),
        ("columns", {"label_separator": ""}),
        ("image_size", 0),
    ],
)
def test_settings_that_no_run_has_are_named(name: str, value: object, tmp_path: Path) -> None:
    written(tmp_path, **{name: value})
    with pytest.raises(FedspanError) as caught:
        parse_task_settings(tmp_path, read_notes(tmp_path))
    assert caught.value.field.startswith(f"{tmp_path / 'fedspan.json'}")
    assert caught.value.field.endswith(name)


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cards") / "run"
    fedspan.run(tiny.config(tiny_folder, federation={"rounds": 2}), folder)
    return folder


def test_the_hub_reads_it_and_it_says_what_the_report_says(run: Path) -> None:
    card = ModelCard.load(run / "adapter" / CARD)
    report = json.loads((run / "report.json").read_text())
    assert card.data.base_model == "bert"
    assert card.data.library_name == "peft"
    assert card.data.pipeline_tag == "text-classification"
    assert {"federated-learning", "fedspan", "lora", "fedit"} <= set(card.data.tags or [])
    found = {one.metric_type: one.metric_value for one in card.data.eval_results or []}
    assert found["accuracy"] == pytest.approx(report["scores"]["test"]["accuracy"], abs=1e-6)
    assert f"- Rounds: 2; this is round {report['best_round']}" in card.text
    assert f"{report['bytes']['down']:,} down" in card.text
    assert "- Clients: 4, 3 a round; partition: natural" in card.text


def test_neither_clients_nor_paths_nor_labels_are_in_it(run: Path, tiny_folder: Path) -> None:
    text = (run / "adapter" / CARD).read_text()
    for word in ("east", "north", "south", "west", str(tiny_folder), str(run), *tiny.LABELS):
        assert not re.search(rf"\b{re.escape(word)}\b", text), word


def test_a_command_says_neither_where_things_are_nor_what_the_data_are() -> None:
    words = ["/usr/bin/fedspan", "run", "ward7/my.yaml", "--set", "data.train=patients/ward7.csv", "--set", "seed=3"]
    assert (
        _write_command(words, "") == "## Command\n\n```\nfedspan run my.yaml --set data.train=... --set seed=3\n```\n"
    )
    module = ["/usr/lib/python3/site-packages/fedspan/__main__.py", "demo"]
    assert _write_command(module, "") == "## Command\n\n```\nfedspan demo\n```\n"


@pytest.mark.parametrize("words", [["-c"], ["train.py", "--secret", "ward7"], ["/usr/bin/pytest", "tests"], [""]])
def test_a_run_from_python_has_a_python_call(words: list[str]) -> None:
    call = 'fedspan.run("config.yaml", "run")'
    section = _write_command(words, call)
    assert f"import fedspan\n\n{call}\n" in section
    assert "ward7" not in section
    assert "## Command" not in section


def test_personal_adapters_have_one_each_and_an_export_takes_it_along(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fedspan.run(tiny.config(tiny_folder, method={"name": "fedsa-lora"}, federation={"rounds": 1}), folder)
    cards = sorted((folder / "adapter").glob(f"*/{CARD}"))
    assert len(cards) == 4
    assert len({card.read_text() for card in cards}) == 1
    out = fedspan.export(folder, tmp_path / "own", client="north")
    assert (out / CARD).is_file()
    assert (fedspan.export(out, tmp_path / "again") / CARD).read_text() == (out / CARD).read_text()


def test_a_merged_model_s_card_is_that_of_a_model(run: Path, tmp_path: Path) -> None:
    before, card = (ModelCard.load(folder / CARD) for folder in (run / "adapter", merged(run, tmp_path)))
    assert (card.data.library_name, card.data.base_model) == ("transformers", "bert")
    assert "lora" not in (card.data.tags or [])
    assert [one.metric_value for one in card.data.eval_results or []] == [
        one.metric_value for one in before.data.eval_results or []
    ]
    assert "PEFT" not in card.text
    assert "PeftModel" not in card.text
    assert 'AutoModelForSequenceClassification.from_pretrained("FOLDER")' in card.text
    for section in ("## Training", "## Scores", "## Python"):  # the rest is as it was
        assert text_of(card, section) == text_of(before, section)


def test_a_cut_adapter_s_card_says_so_and_claims_no_score(run: Path, tmp_path: Path) -> None:
    card = ModelCard.load(fedspan.export(run, tmp_path / "cut", rank=1) / CARD)
    assert card.data.eval_results is None
    assert "cut to rank 1 afterwards" in text_of(card, "## Scores")
    assert "- Method: fedit, cut to rank 1\n" in card.text
    assert card.data.library_name == "peft"


def merged(run: Path, folder: Path) -> Path:
    return fedspan.export(run, folder / "merged", form="merged")


def text_of(card: ModelCard, section: str) -> str:
    return card.text.partition(section)[2].partition("\n## ")[0].strip()
