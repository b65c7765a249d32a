"""The examples, each as a user runs it: a process of its own, with ``--smoke``, and what it says is what is there."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedspan

pytestmark = pytest.mark.slow  # together they take minutes
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENCODER = ("--layer", "1", "--model")
"""The tiny models of this file have two layers."""


def command(name: str, out: Path, *arguments: str | Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), "--smoke", "--out", str(out), *map(str, arguments)]


def environment(out: Path) -> dict[str, str]:
    path = os.pathsep.join(path for path in sys.path if path)
    shown = {"NO_COLOR": "1", "COLUMNS": "160"}
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **shown, "FEDSPAN_EXAMPLE": str(out)}


def run_example(name: str, out: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        command(name, out, *arguments), env=environment(out), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table(printed: str) -> dict[str, list[str]]:
    """The cells of every row of a printed table, by the first one."""
    lines = [re.split("[│┃|]", line)[1:-1] for line in printed.splitlines() if re.match("[│┃|]", line)]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def test_ten_banks(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run_example("ten_banks", out, *ENCODER, tiny_folder / "deep-bert")
    rows = table(printed)
    for method in ("fedit", "rolora", "flora"):
        report = fedspan.read_report(out / f"{method}-seed0")
        assert len(report.by_client) == 10
        assert rows[method][0] == percent(report.scores["test"]["accuracy"])
        assert rows[method][2] == percent(report.scores["clients"]["worst"]["accuracy"])
    # Whoever loads the adapter with PEFT alone gets the same label with the same probability.
    (_, *ours), (_, *theirs) = re.findall(r"  ([\w -]+): (\w+) \(([\d.]+)\)", printed)
    assert ours == theirs


@pytest.mark.parametrize("own", [True, False])
def test_instruction_tuning(own: bool, decoders: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "out", tmp_path / "alpaca.json"
    if not own:
        rows = [json.loads(line) for line in (decoders / "questions.jsonl").read_text().splitlines()]
        given.write_text(json.dumps([{"instruction": row["question"], "output": row["answer"]} for row in rows]))
    more = () if own else ("--data", given)
    printed = run_example("instruction_tuning", out, "--model", decoders / "llama-lm", *more)
    report = fedspan.read_report(out / "run")
    assert len(report.by_client) == 4
    assert not own or set(report.by_client) == {"sums", "capitals", "larger", "greetings"}
    assert f"round 1: held-out loss {report.scores['test']['loss']:.3f}" in printed
    assert f"perplexity {report.scores['test']['perplexity']:.2f}" in printed
    assert printed.count("    answered  ") == len(report.examples) + 1

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(decoders / "llama-lm").eval()
    ids = torch.arange(4, 12)[None]
    with torch.inference_mode():
        before = base(input_ids=ids).logits
        after = PeftModel.from_pretrained(base, str(out / "run" / "adapter")).eval()(input_ids=ids).logits
    assert (after - before).abs().max() > 1e-3  # it loads, and does something


def test_vision_domains(tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run_example("vision_domains", out)
    rows = table(printed)
    assert rows["method"] == ["chalk", "colors", "ink", "mean", "worst domain", "MB up"]
    for method in ("fedavg", "fedhm"):
        report = fedspan.read_report(out / method)
        *own, mean, worst, sent = rows[method]
        assert own == [percent(report.by_client[domain]["accuracy"]) for domain in ("chalk", "colors", "ink")]
        assert mean == percent(sum(scores["accuracy"] for scores in report.by_client.values()) / 3)
        assert percent(report.by_client[worst]["accuracy"]) == min(own, key=float)
        assert sent == f"{report.bytes['up'] / 1e6:.2f}"
    assert float(rows["fedhm"][-1]) < float(rows["fedavg"][-1])  # factors are smaller than what they make

    from transformers import AutoModelForImageClassification

    # So that transformers knows the architecture.
    importlib.import_module("fedspan.models.resnet")

    model = AutoModelForImageClassification.from_pretrained(out / "fedavg" / "adapter")
    assert sorted(model.config.label2id) == ["circle", "cross", "ring", "square", "triangle"]


def test_personalization(tiny_folder: Path, tmp_path: Path) -> None:
    out, methods = tmp_path / "out", ("local-only", "fedit", "fedsa-lora", "pfedloru")
    printed = run_example("personalization", out, *ENCODER, tiny_folder / "deep-bert")
    rows, reports = table(printed), {method: fedspan.read_report(out / f"{method}-seed0") for method in methods}
    clients = [f"client-{number:02}" for number in range(10)]
    for client in clients:
        assert rows[client] == [percent(reports[method].by_client[client]["accuracy"]) for method in methods]
    assert set(reports["fedit"].adapters) == {"global"}
    for method in ("local-only", "fedsa-lora", "pfedloru"):
        assert set(reports[method].adapters) == set(clients)
    first, second = (
        load_file(out / "fedsa-lora-seed0" / reports["fedsa-lora"].adapters[client] / "adapter_model.safetensors")
        for client in clients[:2]
    )
    alike = {name: bool((first[name] == second[name]).all()) for name in first if ".lora_" in name}
    assert alike == {name: ".lora_A" in name for name in alike}  # A is shared, B each client's own
    assert len(re.findall(r"  client-\d\d: \w+ \([\d.]+\), by ", printed)) == 3


def test_differential_privacy(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    out = tmp_path / "out"
    printed = run_example("differential_privacy", out, "--epsilon", "3", *ENCODER, tiny_folder / "deep-bert")
    plain, private = fedspan.read_report(out / "plain"), fedspan.read_report(out / "private")
    assert not plain.privacy
    assert 0 < private.privacy["epsilon"] <= 3
    assert f"epsilon {private.privacy['epsilon']:.3f} of 3 spent, at delta 0.0001" in printed
    scores = [f"{report.scores['test']['accuracy']:.1%}" for report in (plain, private)]
    assert f"held-out accuracy {scores[0]} without privacy, {scores[1]} with it" in printed


def test_own_method(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run_example("own_method", out, *ENCODER, tiny_folder / "deep-bert")
    for method in ("fedit", "slow-a"):
        report = fedspan.read_report(out / f"{method}-seed0")
        assert report.method == method
        assert f"{method}: held-out accuracy {report.scores['test']['accuracy']:.1%}" in printed
        assert f"{report.scores['validation']['loss']:.3f}" in printed


def test_named_entities(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run_example("named_entities", out, *ENCODER, tiny_folder / "deep-bert")
    report = fedspan.read_report(out)
    assert set(report.by_client) <= {"cardiology", "pharmacy", "orthopaedics", "village"}
    assert f"federated: entity F1 {report.scores['test']['entity_f1']:.1%}" in printed
    worst = report.baselines["local-only"]["scores"]["test"]["worst"]["entity_f1"]
    assert f"worst {worst:.1%}" in printed


def test_embedding_search(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run_example("embedding_search", out, *ENCODER, tiny_folder / "deep-bert")
    report = fedspan.read_report(out)
    alone = report.baselines["local-only"]["scores"]["test"]["spearman"]
    assert f"Spearman {report.scores['test']['spearman']:.3f}, one desk alone {alone:.3f}" in printed
    similarities = [float(value) for value in re.findall(r"^  (-?\d\.\d\d) ", printed, re.MULTILINE)]
    assert len(similarities) == 3
    assert similarities == sorted(similarities, reverse=True)


def test_own_task(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run_example("own_task", out, *ENCODER, tiny_folder / "deep-bert")
    report = fedspan.read_report(out / "median-regression")
    assert report.metric == "absolute_error"
    assert report.scores["test"]["absolute_error"] == pytest.approx(report.scores["test"]["loss"])
    assert f"median-regression: Pearson {report.scores['test'].get('pearson', 0.0):.2f}" in printed


def test_own_trainer(decoders: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the extra fedspan[trl] is not installed")
    out = tmp_path / "out"
    printed = run_example("own_trainer", out, "--model", decoders / "llama-lm")
    report = fedspan.read_report(out / "run")
    assert (report.method, report.rounds) == ("rolora", 4)  # of own_trainer.yaml
    assert f"loss {report.scores['validation']['loss']:.3f} on held-out letters" in printed


def processes_of(out: Path) -> list[int]:
    """What an example started and is still there: everything that inherited its environment."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            mine = f"FEDSPAN_EXAMPLE={out}\0".encode() in path.read_bytes()
        except OSError:  # somebody else's, or it has ended meanwhile
            continue
        found += [int(path.parent.name)] if mine else []
    return found


def test_three_machines(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra fedspan[deploy] is not installed")
    out, clinics = tmp_path / "out", ("clinic-a", "clinic-b", "clinic-c")
    printed = run_example("three_machines", out, *ENCODER, tiny_folder / "deep-bert")
    report = fedspan.read_report(out / "run")
    assert set(report.by_client) == set(clinics)
    assert not report.failures
    for clinic in clinics:
        assert f"{clinic}: {report.by_client[clinic]['accuracy']:.1%} on its own test part" in printed
    assert (out / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert processes_of(out) == []


def test_three_machines_leave_no_process_behind_when_asked_to_end(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra fedspan[deploy] is not installed")
    out = tmp_path / "out"
    process = subprocess.Popen(
        command("three_machines", out, *ENCODER, tiny_folder / "deep-bert"),
        env=environment(out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 400
        while not (out / "run" / "config.yaml").is_file():  # the federation has started
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        assert len(processes_of(out)) >= 7  # the script, the server and its worker, three nodes, the submission
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143
    finally:
        process.kill()
        process.wait()
    assert processes_of(out) == []


def test_plain_pytorch(tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run_example("plain_pytorch", out)
    report = fedspan.read_report(out)
    assert f"accuracy: {percent(report.scores['test']['accuracy'])} % after round {report.best_round}" in printed
    predicted = re.findall(r"predicted (\w+) ", printed)
    assert f"by PyTorch alone: {', '.join(predicted)}" in printed
    assert set(load_file(out / "adapter" / "state_dict.safetensors")) >= {"embed.weight", "classifier.bias"}
