"""``fedspan`` from Python: what the command line does, as functions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import fedspan
from fedspan import FedspanError, RunReport
from helpers import tiny
from helpers.listeners import Notes
from helpers.refusals import refused


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunReport]:
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 2}), folder)


def test_public_names_and_tasks_are_all_there() -> None:
    assert {"run", "resume", "export", "predict", "evaluate", "load_config", "list_methods"} <= set(dir(fedspan))
    for name in fedspan.__all__:
        assert getattr(fedspan, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        getattr(fedspan, "fit")  # noqa: B009
    assert {"sequence-classification", "text-embedding"} <= {task.name for task in fedspan.list_tasks()}


def test_pages_and_stub_have_every_public_name() -> None:
    pages = (Path(__file__).parents[1] / "docs" / "api").glob("*.md")
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    names = set(fedspan.__all__) - {"__version__"}
    assert [name for name in sorted(names) if f"::: {fedspan._HOMES[name]}.{name}" not in lines] == []
    stub = Path(fedspan.__file__).with_suffix(".pyi").read_text()
    named = {line.rpartition(" as ")[2] for line in stub.splitlines() if " as " in line}
    assert {*named, "__version__"} == set(fedspan.__all__)


def test_the_list_of_methods_needs_no_torch() -> None:
    script = "import sys, fedspan; assert fedspan.list_methods(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["unset", "count", "policy"],
)
def test_waiting_threads_do_not_spin_for_long_unless_the_user_says_how(values: dict[str, str], expected: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    script = "import os, fedspan; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env={**inherited, **values}
    )
    assert done.stdout.strip() == expected


def test_no_public_name_config_or_error_needs_transformers(tiny_folder: Path, tmp_path: Path) -> None:
    """In one process, whose import of torch takes seconds; Transformers is loaded when a model is."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny.settings(tiny_folder)))
    script = f"""
import sys
import fedspan
for name in fedspan.__all__:
    getattr(fedspan, name)
assert not {{"transformers", "torch._dynamo"}} & sys.modules.keys()
assert fedspan.load_config({str(path)!r}).federation.rounds
try:
    fedspan.load_config({str(path)!r}, ["federation.rounds=-1"])
except fedspan.FedspanError as error:
    assert error.field == "federation.rounds"
else:
    raise AssertionError
assert not {{"transformers", "peft", "accelerate", "datasets"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_run_takes_a_path_values_or_a_config(run: tuple[Path, RunReport], tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    adapters: set[bytes] = set()
    config = fedspan.load_config(path)
    for number, given in enumerate((str(path), values, config)):
        folder = tmp_path / f"run-{number}"
        overrides = ["federation.rounds=2"]
        report = fedspan.run(given, folder, overrides=overrides)
        assert report.rounds == 2
        adapters.add((folder / report.adapters["global"] / "adapter_model.safetensors").read_bytes())
    assert len(adapters) == 1
    assert adapters == {(run[0] / "adapter" / "adapter_model.safetensors").read_bytes()}
    assert values["federation"]["rounds"] == 1, "what is given is left as it is"


def test_resume(run: tuple[Path, RunReport], tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, federation={"rounds": 2})
    for number, go_on in enumerate((fedspan.resume, lambda folder: fedspan.run(values, folder, resume=True))):
        folder = tmp_path / str(number)
        with pytest.raises(KeyboardInterrupt):
            fedspan.run(values, folder, resume=True, listener=Notes(1))  # nothing there yet: a new run
        report = go_on(folder)
        assert report.scores == run[1].scores
        name = "adapter/adapter_model.safetensors"
        assert (folder / name).read_bytes() == (run[0] / name).read_bytes()
        began = (folder / "report.json").stat().st_mtime_ns
        assert go_on(folder) == report, "of a finished run, the report is read"
        assert (folder / "report.json").stat().st_mtime_ns == began
    with refused("seed", "the config with which this run began has 3"):
        fedspan.run({**values, "seed": 4}, folder, resume=True)


def test_what_is_measured_is_what_peft_gives(run: tuple[Path, RunReport]) -> None:
    folder, report = run
    metrics = fedspan.evaluate(folder)
    assert metrics["accuracy"] == report.scores["test"]["accuracy"]
    assert metrics["loss"] == pytest.approx(report.scores["test"]["loss"], abs=1e-5)
    answers = fedspan.predict(folder, [row["text"] for row in report.examples])
    assert [label for label, _ in answers] == [row["prediction"] for row in report.examples]


def test_predictions(run: tuple[Path, RunReport]) -> None:
    folder, _ = run
    assert fedspan.predict(folder, []) == []
    texts = [f"word{number % 12} admin{number % 8}" * (1 + number % 3) for number in range(150)]
    together = fedspan.predict(folder, texts)
    alone = [fedspan.predict(folder, [text])[0] for text in texts[:3]]
    assert [label for label, _ in together[:3]] == [label for label, _ in alone]
    assert [p for _, p in together[:3]] == pytest.approx([p for _, p in alone], abs=1e-5)
    grad = torch.is_grad_enabled()
    assert grad, "serving leaves torch as it was"


def test_labels_are_checked_when_the_data_changed(tiny_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "corpus.csv"
    data.write_text((tiny_folder / "corpus.csv").read_text())
    values = tiny.settings(tiny_folder, data={"train": str(data)}, federation={"rounds": 1})
    fedspan.run(values, tmp_path / "run")
    data.write_text(data.read_text().replace(",lab,", ",laboratory,"))
    with refused("data.train"):
        fedspan.evaluate(tmp_path / "run")
    values["data"]["test_fraction"] = 0
    fedspan.run(values, tmp_path / "untested")
    with refused("data", "no held-out test set"):
        fedspan.evaluate(tmp_path / "untested")


def test_export_leaves_nothing_behind_when_it_fails(run: tuple[Path, RunReport], tmp_path: Path) -> None:
    for form, client, round in (("zip", None, "best"), ("adapter", "weast", "best"), ("merged", None, 9)):
        with pytest.raises(FedspanError):
            fedspan.export(run[0], tmp_path / "out", form, client, round)
    assert list(tmp_path.iterdir()) == []
    merged = fedspan.export(run[0], tmp_path / "out", "merged")
    assert json.loads((merged / "fedspan.json").read_text())["labels"] == list(tiny.LABELS)
    with refused("form", "holds a merged model"):
        fedspan.export(merged, tmp_path / "again", "adapter")


def test_an_adapter_is_cut_to_a_lower_rank(run: tuple[Path, RunReport], tiny_folder: Path, tmp_path: Path) -> None:
    whole = fedspan.export(run[0], tmp_path / "whole")
    with refused("rank", "at most 2, the rank of this adapter"):
        fedspan.export(run[0], tmp_path / "cut", rank=3)
    for rank, form in ((0, "adapter"), (1, "merged")):
        with refused("rank", "rank"):
            fedspan.export(run[0], tmp_path / "cut", form, rank=rank)
    cut = fedspan.export(run[0], tmp_path / "cut", rank=1)
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (whole, cut))
    losses = json.loads((cut / "fedspan.json").read_text())["relative_error"]
    config = json.loads((cut / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (1, 1)
    assert "relative_error" not in json.loads((whole / "fedspan.json").read_text())
    assert any(loss > 0.01 for loss in losses.values())
    for layer, loss in losses.items():
        name = f"base_model.model.{layer}.lora_"
        W, W1 = (t[f"{name}B.weight"].double() @ t[f"{name}A.weight"].double() for t in (before, after))
        S = torch.linalg.svdvals(W)
        assert float((W - W1).norm()) == pytest.approx(float(S[1:].norm()), rel=1e-4, abs=1e-9)
        assert loss == pytest.approx(float((W - W1).norm() / W.norm()), rel=1e-4, abs=1e-6)
    assert fedspan.evaluate(cut, data=tiny_folder / "corpus.csv")["examples"] == 120


@pytest.mark.slow  # a process that imports everything
def test_extras_are_optional() -> None:
    """Without the packages of the extras everything imports that a run on the loop or batched engine uses."""
    extras = (
        *(
            "opacus",
            "flwr",
            "ray",
            "cryptography",
            "Crypto",
            "starlette",
            "uvicorn",
            "bitsandbytes",
            "plotly",
            "lm_eval",
        ),
        "tensorboard",
    )
    blocked = f"import sys; sys.modules.update(dict.fromkeys({extras!r}))"
    subprocess.run([sys.executable, "-c", f"{blocked}; import fedspan.runs.train, fedspan.cli"], check=True)
