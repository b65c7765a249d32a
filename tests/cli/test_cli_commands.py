"""Every command, on a run of the tiny model."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import peft
import pytest
import transformers
import typer
import yaml
from click.testing import CliRunner, Result

import fedspan
from fedspan.cli.live_run import find_unused_folder
from fedspan.methods.describe import describe
from fedspan.methods.registry import METHODS
from fedspan.wrappers.describe import describe as describe_wrappers
from fedspan.wrappers.registry import WRAPPERS
from helpers import tiny, tiny_decoders
from helpers.command_line import get_program

Call = Callable[..., Result]
Write = Callable[..., Path]


def done(result: Result) -> str:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_run_shows_every_round_and_closes_with_the_comparison(finished: Path) -> None:
    screen = (finished.parent / "screen.txt").read_text()
    report = json.loads((finished / "report.json").read_text())
    for round in (1, 2):
        assert f" {round}/2 " in screen
    for shown in ("fedit", "local only", "centralized", "held-out", "client tests", "worst client"):
        assert shown in screen
    assert f"{100 * report['scores']['test']['accuracy']:.1f}%" in screen
    assert str(finished / "adapter") in screen.replace("\n", "")
    assert "kB down" in screen
    for row in report["examples"]:
        assert row["text"].split()[0] in screen
    lines = screen.splitlines()
    warnings = [f"warning: {warning}" for warning in report["warnings"]]
    assert [line for line in lines if line.startswith("warning: ")] == warnings  # each on one line, however long
    assert max(len(line) for line in lines if "/" not in line and line not in warnings) <= 80


def test_the_snippet_that_it_closes_with_loads_the_adapter(finished: Path, personal: Path) -> None:
    for folder, head in ((finished, "classifier"), (personal, "classifier")):
        screen = (folder.parent / "screen.txt").read_text()
        lines = [line.strip() for line in screen.splitlines() if "import peft" in line or "from_pretrained" in line]
        assert len(lines) == 3
        names: dict[str, Any] = {}
        exec("\n".join(lines), names)
        assert isinstance(names["model"], peft.PeftModel)
        assert head in names["model"].peft_config["default"].modules_to_save


def test_run_chooses_a_new_folder(tmp_path: Path) -> None:
    assert find_unused_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert find_unused_folder(tmp_path / "demo") == tmp_path / "demo-2"
    (tmp_path / "demo-2").mkdir()
    assert find_unused_folder(tmp_path / "demo") == tmp_path / "demo-3"


def test_resume_continues_to_the_same_adapter(call: Call, stopped: Path, finished: Path) -> None:
    screen = done(call("run", "--resume", stopped))
    assert "resumed after round 1 of 2" in screen
    assert " 1/2 " in screen
    name = Path("adapter") / "adapter_model.safetensors"
    assert (stopped / name).read_bytes() == (finished / name).read_bytes()


def test_resume_says_what_changed_since(call: Call, stopped: Path) -> None:
    environment = json.loads((stopped / "environment.json").read_text())
    (stopped / "environment.json").write_text(json.dumps({**environment, "torch": "1.0"}))
    assert "note: torch was 1.0 and is " in done(call("run", "--resume", stopped))


def test_resume_of_a_finished_run_shows_its_report_again(call: Call, finished: Path) -> None:
    began = (finished / "report.json").stat().st_mtime_ns
    screen = done(call("run", "--resume", finished))
    assert screen.strip() in (finished.parent / "screen.txt").read_text()
    assert (finished / "report.json").stat().st_mtime_ns == began


@pytest.mark.slow  # a step of its own in .ci/run, too
def test_demo(call: Call, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = [
        f"model.name={tiny_folder / 'bert'}",
        "model.layers_to_transform=null",
        "method.r=2",
        "data.max_examples=40",
        "partition.clients=2",
        "partition.min_examples=4",
        "federation.rounds=1",
        "baselines=[]",
    ]
    settings = [part for change in changes for part in ("--set", change)]
    for folder in ("demo", "demo-2"):
        shown = " ".join(done(call("demo", *settings)).split())
        assert f"runs/{folder}/adapter" in shown
        assert "In the federation, no example left its client: the clients sent " in shown
        assert f"runs/{folder}/report.html" in shown
        assert (tmp_path / "runs" / folder / "report.json").is_file()
        assert (tmp_path / "runs" / folder / "report.html").is_file()


def test_demo_shows_its_config(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(done(call("demo", "--show-config")))
    config = fedspan.load_config(path)
    assert config.model.name == "builtin:all-minilm-l6-v2"
    assert config.data.train == "builtin:banking-queries"
    assert (config.method.name, config.baselines) == ("fedit", ["local", "centralized"])


def test_methods(call: Call) -> None:
    shown = done(call("methods"))
    rows = json.loads(done(call("methods", "--json")))
    assert [(row["role"], row["key"]) for row in rows] == [
        *(("method", key) for key in sorted(METHODS)),
        *(("wrapper", key) for key in sorted(WRAPPERS)),
    ]
    for row in rows:
        assert row["key"] in shown
        assert row["cls"] == {**METHODS, **WRAPPERS}[row["key"]].__name__
    one = done(call("methods", "fedloru"))
    assert "method.tau" in one
    assert "rounds between accumulations" in one
    wrapper = done(call("methods", "fedprox"))
    assert "wrappers: [{name: fedprox, mu: 0.01}]" in wrapper
    assert "strength" in wrapper
    assert [row["key"] for row in json.loads(done(call("methods", "fedprox", "--json")))] == ["fedprox"]


def test_the_table_of_methods_is_that_of_the_registry() -> None:
    path = Path(fedspan.__file__).parent / "methods" / "table.json"
    assert json.loads(path.read_text()) == describe(), "write it anew: python -m fedspan.methods.describe"
    for row in describe():
        assert row["name"]
        assert row["idea"]


def test_the_table_of_wrappers_is_that_of_the_registry() -> None:
    path = Path(fedspan.__file__).parent / "wrappers" / "table.json"
    rows = describe_wrappers()
    assert json.loads(path.read_text()) == rows, "write it anew: python -m fedspan.wrappers.describe"
    for row in rows:
        assert row["name"]
        assert row["idea"]
        assert all(option["help"] for option in row["options"])
        assert all(option["help"] for option in row["options"]), f"describe each option of {row['cls']} under Args:"


def test_partition(call: Call, write: Write, tmp_path: Path) -> None:
    config, png = write(), tmp_path / "p.png"
    shown = done(call("partition", config, "--png", png))
    content = json.loads(done(call("partition", config, "--json")))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert content["labels"] == list(tiny.LABELS)
    assert [client["id"] for client in content["clients"]] == sorted(tiny.SITES)
    for client in content["clients"]:
        line = next(line for line in shown.splitlines() if line.startswith(client["id"]))
        assert f"{client['train']}+{client['validation']}+{client['test']}" in line
        assert [0 if cell == "." else int(cell) for cell in line.split()[2:]] == client["counts"]
        assert sum(client["counts"]) == client["train"] + client["validation"] + client["test"]
    assert max(map(len, shown.replace(str(png), "").splitlines())) <= 80


def test_partition_with_many_labels(call: Call, tmp_path: Path) -> None:
    demo = Path(fedspan.__file__).parent / "demo.yaml"
    twenty = done(call("partition", demo, "--set", "data.train=builtin:patient-messages"))
    assert "20 waiting_list" in twenty
    rows = [f"text {number},a_label_with_a_long_name_{number % 77:02}" for number in range(770)]
    (tmp_path / "many.csv").write_text("text,label\n" + "\n".join(rows))
    many = done(call("partition", demo, "--set", f"data.train={tmp_path / 'many.csv'}"))
    assert "most frequent" in many
    assert max(map(len, (twenty + many).splitlines())) <= 80


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


def test_version_and_help(call: Call) -> None:
    assert done(call("--version")) == f"fedspan {fedspan.__version__}\n"
    assert "Usage" in call().output
    listed = done(call("--help"))
    for command in ("demo", "run", "methods", "partition", "predict", "evaluate", "export"):
        assert command in listed
        said = done(call(command, "--help"))
        assert f"fedspan {command}" in said
        assert "Examples" in said


def test_help_truncates_no_word_in_80_columns() -> None:
    runner, program = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}), get_program()
    assert isinstance(program, click.Group)
    cut = {name for name in program.commands if "…" in runner.invoke(get_program(), [name, "--help"]).output}
    assert cut == set()


def test_help_shows_texts_as_they_are_written() -> None:
    """Rich takes ``[report]`` for markup, unless it is escaped."""
    runner, program = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}), get_program()
    assert isinstance(program, click.Group)
    bracketed = 0
    for name, command in program.commands.items():
        shown = " ".join(runner.invoke(get_program(), [name, "--help"]).output.split())
        texts = [command.help or "", *(getattr(option, "help", None) or "" for option in command.params)]
        for text in texts:
            plain = " ".join(text.replace("\\[", "[").split())
            assert plain in shown, (name, plain)
            bracketed += "[" in plain
    assert bracketed
    assert "fedspan[report]" in runner.invoke(get_program(), ["report", "--help"]).output


def cpu_seconds(*arguments: str, enough: float = 0.0) -> float:
    """Of a process's own, the first that is enough or the quickest of three: other jobs on the machine do not count."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    quickest = once()
    for _ in range(2):
        if quickest < enough:
            break
        quickest = min(quickest, once())
    return quickest


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        pytest.param(["methods"], marks=pytest.mark.slow),
        ["run", "--help"],
        pytest.param(["--version"], marks=pytest.mark.slow),
    ],
)
def test_quick_commands_are_quick(arguments: list[str]) -> None:
    assert cpu_seconds("-m", "fedspan", *arguments, enough=1) < 1
    script = "import sys; from fedspan.cli import app; app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True)
    assert not {"torch", "transformers", "datasets", "numpy", "pydantic", "yaml"} & set(
        loaded.stdout.splitlines()[-1].split()
    )


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_loads_no_parser_of_markdown_or_code(arguments: list[str]) -> None:
    """The look stays Rich's; each of these modules would take a tenth of the time of ``fedspan --help`` or more."""
    script = "import sys; from fedspan.cli import app; app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True)
    assert "╭─ Options ─" in loaded.stdout
    modules = set(loaded.stdout.splitlines()[-1].split())
    assert "typer.rich_utils" in modules
    assert not {"markdown_it", "pygments", "rich.markdown", "rich.traceback"} & modules


def test_typer_draws_markdown_and_tracebacks_after_fedspan_s_help() -> None:
    """The contract of ``fedspan.cli.rich_help``: another program of Typer in the same process is drawn as ever."""
    script = """
from fedspan.cli.rich_help import import_rich_help
import_rich_help()
import sys, typer.rich_utils
from rich.markdown import Markdown
from rich.traceback import Traceback
from typer.models import DeveloperExceptionConfig

assert sys.modules["rich.markdown"].__file__
text = typer.rich_utils._make_rich_text(text="**bold**", markup_mode="markdown")
assert type(text) is Markdown, type(text)
try:
    raise ValueError
except ValueError as error:
    drawn = typer.rich_utils.get_traceback(error, DeveloperExceptionConfig(), [])
assert type(drawn) is Traceback, type(drawn)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_help_describes_every_argument_and_option() -> None:
    group = get_program()
    assert isinstance(group, typer.core.TyperGroup)
    without = [
        (name, param.name)
        for name, command in group.commands.items()
        for param in command.params
        if not getattr(param, "help", None)
    ]
    assert without == []


def test_help_fills_its_lines(call: Call) -> None:
    """Line ends within a docstring's paragraph are not those of the help."""
    lines = [line.strip() for line in call("run", "--help").stdout.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("Every round is saved"))
    assert len(lines[start + 1]) > 60


def test_import_is_quick() -> None:
    script = "import sys, fedspan; assert not {'torch', 'pydantic', 'typer'} & set(sys.modules)"
    assert cpu_seconds("-c", script) - cpu_seconds("-c", "pass") < 0.1


def test_configs_of_runs_are_configs(finished: Path) -> None:
    assert fedspan.load_config(finished / "config.yaml").method.name == "fedit"
    assert yaml.safe_load((finished / "config.yaml").read_text())["method"]["r"] == 2


def test_a_language_model_closes_with_prompts_and_answers(call: Call, decoders: Path, tmp_path: Path) -> None:
    """A line each, and the snippet loads a causal language model."""
    config = tmp_path / "lm.yaml"
    config.write_text(yaml.safe_dump(tiny_decoders.settings(decoders, federation={"rounds": 1})))
    result = call("run", config, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    for row in report["examples"]:
        for name, key in (("prompt", "text"), ("answer", "label"), ("model", "prediction")):
            assert f"{name:<8}{row[key]}".rstrip() in [line.rstrip() for line in result.stdout.splitlines()]
    assert "AutoModelForCausalLM" in result.stdout
    for shown in ("perplexity", "match", "measured by loss"):
        assert shown in " ".join(result.stdout.split())
