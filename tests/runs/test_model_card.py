"""Model cards: the hub reads them, they say what the report says, and nothing of a client or a path."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import fedspan
from fedspan.runs.folder import CARD
from fedspan.runs.model_card import _write_command
from helpers import tiny


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
