"""``fedspan plan``: what it shows is the planner's, and mistakes name what was typed."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import fedspan
from fedspan.methods.registry import METHODS
from helpers import tiny
from helpers.command_line import get_program


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


@pytest.mark.parametrize("task", ["causal-lm", "regression"])
def test_other_tasks(task: str, tiny_folder: Path) -> None:
    model = str(tiny_folder / ("gpt2" if task == "causal-lm" else "bert"))
    result = invoked("--model", model, "--task", task, "--methods", "fedit", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plans"]["fedit"]["trainable"] > 0


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
