"""Tasks of lm-evaluation-harness on a run's adapter: the numbers are those of the model's own likelihoods."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from fedspan.config import parse_config
from fedspan.serving.load import load_served
from helpers import refusals, tiny_decoders

pytest.importorskip("lm_eval", reason="the extra fedspan[harness] is not installed")

TASK = """
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" a", " word2 word3"]
doc_to_target: right
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def run(decoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness") / "run"
    changes = {"federation": {"rounds": 1}, "evaluation": {"generate": False}}
    fedspan.run(parse_config(tiny_decoders.settings(decoders, "llama", **changes)), folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"word{number} word{number + 1}", "right": number % 2} for number in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.yaml").write_text(TASK.format(file=folder / "rows.jsonl"))
    return folder, rows


def test_the_accuracy_is_that_of_the_likelier_answer(
    run: Path, tasks: tuple[Path, list[dict[str, Any]]], call: Callable[..., Any]
) -> None:
    folder, rows = tasks
    given = ["evaluate", run, "--tasks", "own_choice", "--task-folder", folder]
    result = call(*given, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["own_choice"]
    served, right = load_served(run), 0
    tokenizer: Any = served.processor
    for row in rows:
        scores: list[float] = []
        for answer in (" a", " word2 word3"):
            whole = tokenizer(row["question"] + answer, return_tensors="pt").input_ids
            start = len(tokenizer(row["question"]).input_ids)
            with torch.inference_mode():
                logits = served.model(input_ids=whole).logits[0].log_softmax(-1)
            picked = logits[start - 1 : -1].gather(1, whole[0, start:, None])
            scores.append(float(picked.sum()))
        right += (scores[1] > scores[0]) == row["right"]
    assert found["acc"] == pytest.approx(right / len(rows))
    assert found["examples"] == len(rows)
    shown = call(*given, "--limit", "2").stdout
    assert "own_choice" in shown
    assert "acc" in shown
    assert " 2 " in f"{shown} "


@pytest.mark.parametrize("files", ["arc", pytest.param("", marks=pytest.mark.slow)], ids=["one folder", "all"])
def test_the_nearest_of_the_harness_s_own_tasks_is_named(
    files: str, run: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thousands of files take ten seconds to read, so one folder of them stands for all."""
    from lm_eval import tasks

    if files:
        some = partial(tasks.TaskManager, include_path=str(Path(tasks.__file__).parent / files), include_defaults=False)
        monkeypatch.setattr(tasks, "TaskManager", lambda include_path: some())
    assert "`tasks`: lm-evaluation-harness has no task 'arc_eazy'. Did you mean 'arc_easy'" in refused(
        "evaluate", run, "--tasks", "arc_eazy"
    )


def test_mistakes(run: Path, refused: Callable[..., str]) -> None:
    assert "`--data`: it cannot be combined with --tasks" in refused(
        "evaluate", run, "--tasks", "mmlu", "--data", "x.csv"
    )
    assert "`--limit`: it needs --tasks" in refused("evaluate", run, "--limit", "3")
    with refusals.refused("shots", r"`shots`: -1 is not accepted\. Expected a whole number from 0"):
        fedspan.harness(run, ["mmlu"], shots=-1)
    with refusals.refused("tasks", r"`tasks`: \[\] is not accepted\. Expected names"):
        fedspan.harness(run, [])
