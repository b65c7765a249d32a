"""Lists of methods, data, parts, reports and plans; ``fedspan init``, whose config reads its file up to predictions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import fedspan
from fedspan.config import RunConfig, load_config, parse_config
from fedspan.data.catalogue import DatasetEntry, list_datasets
from fedspan.methods.describe import describe
from fedspan.methods.registry import METHODS
from fedspan.runs.report import read_partition
from fedspan.wrappers.describe import describe as describe_wrappers
from fedspan.wrappers.registry import WRAPPERS
from helpers import tiny
from helpers.command_line import Call, Write, done, get_program
from helpers.written_data import write_table


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


@pytest.mark.parametrize("kind", ["methods", "wrappers"])
def test_the_table_of_methods_or_wrappers_is_that_of_the_registry(kind: str) -> None:
    path = Path(fedspan.__file__).parent / kind / "table.json"
    rows = describe() if kind == "methods" else describe_wrappers()
    assert json.loads(path.read_text()) == rows, f"generate it: python -m fedspan.{kind}.describe"
    for row in rows:
        assert row["name"]
        assert row["idea"]
        assert all(option["help"] for option in row["options"]), f"describe each option of {row['cls']} under Args:"


def test_the_list_is_legible_in_80_columns(call: Call) -> None:
    result = call("data")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    for entry in list_datasets():
        line = next(line for line in lines if line.split()[:1] == [entry.key])
        assert entry.metric in line
        assert entry.license in line
        if entry.hub is not None:
            assert entry.hub.id in line or entry.hub.id.split("/")[0] in line


@pytest.mark.parametrize("key", ["sst2", "cola", "gsm8k", "boolq", "mnist", "review-sentences", "patient-messages"])
def test_one_is_shown_with_configs_to_paste(call: Call, key: str) -> None:
    entry = next(entry for entry in list_datasets() if entry.key == key)
    result = call("data", key)
    assert result.exit_code == 0
    for shown in (entry.title, entry.metric, entry.license, entry.source, str(entry.rows.train)):
        assert shown in result.stdout
    pasted = [part.split("\n\n")[0] for part in result.stdout.split("\n  data:\n")[1:]]
    assert len(pasted) == {"boolq": 1, "review-sentences": 1, "patient-messages": 1}.get(key, 2)
    for part in pasted:
        config = parse_config(yaml.safe_load(f"  data:\n{part}"))
        assert (config.data.dataset, config.task) == (key, entry.task)


def test_json_holds_all_there_is_to_know(call: Call) -> None:
    content = json.loads(call("data", "--json").stdout)
    assert tuple(DatasetEntry.model_validate(entry) for entry in content) == list_datasets()
    (one,) = json.loads(call("data", "mrpc", "--json").stdout)
    assert (one["key"], one["files"]["columns"]["text"]) == ("mrpc", "#1 String")


def test_partition_says_what_was_left_out(call: Call, tmp_path: Path) -> None:
    rows = [{"text": "" if row == 3 else f"text {row}", "label_text": "ab"[row % 2]} for row in range(20)]
    (tmp_path / "groups.json").write_text(json.dumps(rows))
    data = {"dataset": "20newsgroups", "train": str(tmp_path / "groups.json")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": data, "partition": {"clients": 2}}))
    result = call("partition", tmp_path / "run.yaml")
    assert result.exit_code == 0
    assert "rows left out (data.invalid: skip): 1 without a text" in result.stdout
    assert json.loads(call("partition", tmp_path / "run.yaml", "--json").stdout)["dropped"] == 1


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
    config = tmp_path / "run.yaml"
    partition = {"partitioner": "dirichlet", "alpha": 0.3}
    config.write_text(yaml.safe_dump({"data": {"train": "builtin:patient-messages"}, "partition": partition}))
    twenty = done(call("partition", config))
    assert "20 waiting_list" in twenty
    rows = [f"text {number},a_label_with_a_long_name_{number % 77:02}" for number in range(770)]
    (tmp_path / "many.csv").write_text("text,label\n" + "\n".join(rows))
    many = done(call("partition", config, "--set", f"data.train={tmp_path / 'many.csv'}"))
    assert "most frequent" in many
    assert max(map(len, (twenty + many).splitlines())) <= 80


def test_a_report_gets_its_options(call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def report(runs: list[Path], out: Path, *, diagnostics: bool, data: bool) -> Path:
        calls.append((runs, out, diagnostics, data))
        (tmp_path / "page.html").write_bytes(bytes(2_340_000))
        return tmp_path / "page.html"

    monkeypatch.setattr(fedspan, "report", report)
    result = call("report", "runs/first")
    assert result.exit_code == 0, result.output
    assert "".join(result.output.split()).startswith("wrote" + str(tmp_path / "page.html"))
    assert "(2.3 MB)" in " ".join(result.output.split())
    assert call("report", "a", "b", "--out", "both.html", "--diagnose", "--no-data").exit_code == 0
    assert calls == [
        ([Path("runs/first")], Path("report.html"), False, True),
        ([Path("a"), Path("b")], Path("both.html"), True, False),
    ]


def test_a_run_that_is_missing_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "there is no folder" in refused("report", tmp_path / "missing", "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(get_program(), ["plan", *arguments])


@pytest.fixture(scope="module")
def bare(tiny_folder: Path) -> str:
    """A folder with a model's config alone."""
    folder = tiny_folder / "config-alone"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((tiny_folder / "deep-bert" / "config.json").read_text())
    return str(folder)


ASKED = ["--rank", "2", "--clients", "3", "--rounds", "4", "--examples", "100"]


def test_the_table_has_methods_side_by_side_for_a_model_without_weights(bare: str) -> None:
    result = invoked("--model", bare, *ASKED, "--methods", "fedit,flora,pfedlora")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "4 target layers; 3 clients, all a round, 4 rounds" in shown
    assert all(key in shown for key in ("fedit", "flora", "pfedlora"))
    assert "…" not in result.output


def test_without_methods_all_are_planned(bare: str) -> None:
    plain = json.loads(invoked("--model", bare, *ASKED, "--json").stdout)
    assert set(plain["plans"]) | set(plain["refused"]) == set(METHODS)
    fedit = plain["plans"]["fedit"]
    head = 4 * (2 * 16 + 2)
    assert fedit["first_up"] == 4 * 4 * 2 * 32 + head
    assert fedit["client"]["total"] == sum(value for key, value in fedit["client"].items() if key != "total")
    assert fedit["steps"] is not None


def test_the_plan_of_two_nodes_says_that_their_metrics_select_no_round(bare: str) -> None:
    def note(clients: int) -> bool:
        shown = " ".join(invoked("--model", bare, "--methods", "fedit", "--clients", str(clients)).output.split())
        return "with two nodes the run exports its last round, and early stopping has no effect" in shown

    assert note(2)
    assert not note(3)


def test_what_it_shows_is_what_python_gives(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, method={"name": "ffa-lora"})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    count = len(tiny.LABELS)
    labels = ["--labels", str(count), "--clients", "4"]
    found = json.loads(invoked(str(path), "--rank", "3", *labels, "--json").stdout)["plans"]
    plan = fedspan.plan(values, overrides=["method.r=3"], labels=count, clients=4)
    assert list(found) == ["ffa-lora"]
    assert found["ffa-lora"]["bytes_up"] == plan.bytes_up
    assert found["ffa-lora"]["server"]["total"] == plan.server.total
    several = json.loads(
        invoked(str(path), "--methods", "fedit,flora", "--set", "method.r=3", *labels, "--json").stdout
    )
    assert list(several["plans"]) == ["fedit", "flora"]
    assert (
        several["plans"]["flora"]["bytes_up"]
        == fedspan.plan(values, overrides=["method={name: flora, r: 3}"], labels=count, clients=4).bytes_up
    )


def test_flops_time_and_transfers_are_shown_as_far_as_they_are_known(bare: str) -> None:
    given = ["--model", bare, "--methods", "fedit,ffa-lora", "--clients", "4", "--rank", "2"]
    only_a_step = invoked(*given).output
    assert "FLOPs" in only_a_step
    assert "total" in only_a_step  # bytes
    assert "one device" not in only_a_step
    assert "tokens (the maximum; set the mean with --length)" in " ".join(only_a_step.split())
    asked = [*given, "--examples", "400", "--length", "20", "--device", "A100", "--utilization", "0.5", "--mbit", "10"]
    shown = invoked(*asked).output
    assert "on examples of 20 tokens" in shown
    assert "Time: for training on A100" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100
    found = json.loads(invoked(*asked, "--json").stdout)["plans"]["fedit"]
    assert found["compute"]["length"] == 20
    assert found["compute"]["client"] == 80 * found["compute"]["example"]
    assert found["time"]["client"] >= found["compute"]["client"] / (0.5 * 19.5e12)  # more where weights are waited for
    assert found["transfer"] == pytest.approx(
        8 * (found["bytes_down"] + found["bytes_up"]) / (4 * 10 * 10e6)
    )  # 4 clients, 10 rounds


def test_a_client_that_does_not_fit_is_named(tmp_path: Path) -> None:
    large = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2, "num_attention_heads": 32}
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, **large}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["--task", "causal-lm", "--methods", "fedit", "--set", "model.max_length=4096", "--device", "T4"]
    shown = " ".join(invoked("--model", str(tmp_path), *given).output.split())
    assert "fedit: a client needs" in shown
    assert "T4 has 16.0 GB" in shown


def test_a_method_that_can_not_is_named_beside_those_that_can(bare: str) -> None:
    given = ["--model", bare, "--methods", "fedit,hetlora", "--set", "federation.ranks=[2,3]", "--clients", "4"]
    found = json.loads(invoked(*given, "--json").stdout)
    assert set(found["plans"]) == {"hetlora"}
    assert "fedit" in found["refused"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "--model"),
        (["--model", "{bare}", "--rank", "0"], "method.r"),
        (["--model", "{bare}", "--rank", "17", "--methods", "fedit"], "method.r"),
        (["--model", "{bare}", "--rounds", "0"], "federation.rounds"),
        (["--model", "{bare}", "--clients", "0"], "partition.clients"),
        (["--model", "{bare}", "--labels", "0"], "--labels"),
        (["--methods", "fedit", "--model", "{bare}", "--targets", "kwery"], "model.target_modules"),
        (["--model", "{bare}", "--methods", "fedot"], "--methods"),
        (["--model", "{bare}", "--task", "chess"], "--task"),
        (["no.yaml", "--task", "causal-lm"], "--task"),
        (["--methods", "fedit", "--model", "{bare}", "--device", "B1000"], "--device"),
        (["--methods", "fedit", "--model", "{bare}", "--utilization", "0.3"], "--utilization"),
        (["--methods", "fedit", "--model", "{bare}", "--device", "A100", "--utilization", "3"], "--utilization"),
        (["--methods", "fedit", "--model", "{bare}", "--length", "100000"], "--length"),
        (["--methods", "fedit", "--model", "{bare}", "--mbit", "0"], "--mbit"),
        (["--methods", "fedit", "--model", "{bare}/none"], "model.name"),
    ],
)
def test_mistakes(arguments: list[str], field: str, bare: str) -> None:
    result = invoked(*(word.replace("{bare}", bare) for word in arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: `{field}`: "), result.stderr


def test_overrides_name_the_method(bare: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = {"model": {"name": bare}, "data": {"train": "unread.csv"}, "method": {"name": "fedit"}}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    facts = ["--examples", "100", "--labels", "2", "--clients", "3"]
    result = invoked(str(path), *facts, "--set", "method.name=ffa-lora", "--json")
    assert list(json.loads(result.output)["plans"]) == ["ffa-lora"]
    result = invoked(str(path), *facts, "--set", "method.name=fedot")
    assert "`method.name`: no method is named 'fedot'" in " ".join(result.output.split())


def test_a_wrong_method_is_blamed_on_where_it_was_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"method": {"name": "fedot"}}), encoding="utf-8")
    for arguments, problem in (
        ([], "`method.name`: no method is named 'fedot'"),
        (["--methods", "rolor"], "`--methods`: no method is named 'rolor'"),
    ):
        assert problem in " ".join(invoked(str(path), *arguments).output.split())


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
def test_mistakes_of_init(arguments: list[str], said: str, refused: Callable[..., str], tmp_path: Path) -> None:
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
