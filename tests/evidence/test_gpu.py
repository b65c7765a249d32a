"""The pages of the GPU and of the engines on tiny shapes on the CPU: every part runs, nothing is judged."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from evidence.pages.engines.watch import Watch
from fedspan.errors import FedspanError
from fedspan.models.quantized import dequantize, is_quantized
from helpers.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("evidence/pages/gpu.py")


def page(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--page", str(folder / "gpu.md")])
    script.main()
    return (folder / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_part_is_measured(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(script, tmp_path, monkeypatch, "--smoke", "--device", "cpu", "--batches", "1", "--clients", "1", "2")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| tiny")]
    both = ["| tiny RoBERTa", "| tiny Llama"]
    assert [row[0] for row in rows] == [*both, "| tiny Llama", "| tiny Llama", *both]
    for row in rows[:2]:
        loop, one, two = (float(cell.replace(",", "")) for cell in row[2:5])
        assert float(row[5]) == pytest.approx(two / loop, rel=0.1, abs=0.06)
        assert one > 0
    assert [row[1] for row in rows[2:4]] == ["float32", "NF4"]
    if importlib.util.find_spec("bitsandbytes") is not None:
        assert all(float(cell.replace(",", "")) > 0 for row in rows[2:4] for cell in row[2:4])
    for row in rows[4:]:
        assert row[1] == row[2]  # the device is the CPU
        assert row[3] == row[4]
        assert 0 < float(row[1]) < 1e-4
    assert "--sections" not in text
    assert "| pass |" not in text
    assert "FAIL" not in text


def test_a_base_in_four_bits_keeps_its_head(script: ModuleType) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra fedspan[quantization] is not installed")
    shape = script.SMOKE[1]
    plain = script.build(shape, torch.float32, torch.device("cpu"))
    quantized = script.quantize(script.build(shape, torch.float32, torch.device("cpu")), torch.float32)
    weights = {path: module.weight for path, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    stored = {path for path in weights if is_quantized(quantized.get_submodule(path))}
    assert set(weights) - stored == {"lm_head"}
    for path in stored:
        found = dequantize(quantized.get_submodule(path))
        assert torch.allclose(found, weights[path], atol=0.01)
        assert not torch.equal(found, weights[path])
    bench = script.Bench.prepare(shape, script.adapt(shape, quantized), 2, 1)
    assert len(bench.train()) == 2


def test_results_farther_away_than_the_cpus_own_rounding_fail(script: ModuleType) -> None:
    def agrees(sgd: tuple[float, float], adamw: tuple[float, float]) -> bool:
        return script.Agreement({"sgd": sgd, "adamw": adamw}, {}).agrees

    assert agrees((9e-5, 1e-9), (1.9e-3, 1e-3))
    assert not agrees((1.1e-4, 1e-9), (0.0, 0.0))
    assert not agrees((0.0, 0.0), (2.1e-3, 1e-3))
    assert not agrees((float("nan"), 1.0), (0.0, 0.0))


@pytest.mark.slow
def test_too_little_memory_halves_the_clients_of_a_pass(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, cpu = script.SMOKE[0], torch.device("cpu")
    adapted = script.adapt(shape, script.build(shape, torch.float32, cpu))
    prepare = script.Bench.prepare

    def fail(*args: Any, clients_per_pass: int) -> Any:
        if clients_per_pass > limit:
            try:
                raise torch.OutOfMemoryError("no memory left")
            except torch.OutOfMemoryError as error:
                raise FedspanError("engine.clients_per_pass", clients_per_pass, problem="too large") from error
        return prepare(*args, clients_per_pass=clients_per_pass)

    monkeypatch.setattr(script.Bench, "prepare", fail)
    limit = 2
    found = script.measure_clients(shape, adapted, 5, 1, cpu)
    assert found.clients_per_pass == 2  # 5, 3, 2
    assert found.rate > 0
    limit = 0
    assert script.measure_clients(shape, adapted, 5, 1, cpu) == script.Measured(None, None, 1)


def test_the_engine_s_seconds_leave_out_what_it_calls_back() -> None:
    def train_all(examples: Any, sizes: Any, opened: Any, finished: Any) -> None:
        time.sleep(0.1)
        opened("client")
        finished(None, None)

    engine = SimpleNamespace(train_all=train_all, predict=lambda: time.sleep(0.1), stacking=None)
    watch = Watch(engine)
    engine.train_all(None, {}, lambda _: time.sleep(0.3), lambda *_: time.sleep(0.3))
    assert 0.1 <= watch.take() < 0.3
    engine.predict()
    assert 0.1 <= watch.take() < 0.3
    assert watch.take() == 0.0


@pytest.mark.slow
def test_a_page_comes_of_every_section(tmp_path: Path) -> None:
    for name, count in (("train", 64), ("test", 8)):
        rows = [
            f"how do I change the {'limit' if number % 2 else 'address'} {number},{number % 2}"
            for number in range(count)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,category", *rows]) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    sizes = ["--clients", "2", "--threads", "1", "--examples", "4", "4", "--examples", "32", "32", "--registered", "20"]
    runs = ["--at-once", "2", "--accuracy-examples", "16", "--accuracy-rounds", "1", "--accuracy-seeds", "0"]
    places = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]
    command = [sys.executable, "-m", "evidence.pages.engines", *places, *sizes, *runs, "--repetitions", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "FAIL" not in page
    judged = [line for line in page.splitlines() if line.endswith(("| pass |", "| not judged |"))]
    assert [line for line in judged if line.endswith("| pass |")] == [
        line for line in judged if "float32 losses" in line
    ]
