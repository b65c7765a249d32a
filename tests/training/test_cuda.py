"""Every method, wrapper, task and way of training on a CUDA GPU, with the CPU's results up to rounding.

    python -m pytest -m slow tests/training/test_cuda.py                     (one GPU; -n 8 for several processes on it)

What ``test_devices.py`` cannot cover on its pretend device: CUDA's kernels, memory and waits, attention of variable
length, 4- and 8-bit bases.
"""

import gc
import linecache
import warnings
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fedspan
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.models.layout import TokenLayout
from helpers import planned_memory, tiny, tiny_decoders
from helpers.device_runs import ENGINES, RUNS, WAITS, inner_waits, result, save_models
from helpers.trainer_clients import with_trainers
from helpers.watched_rounds import OPTIONS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA GPU")]
CUDA = "cuda:0"
CLOSE, NARROW = 1e-3, 0.05
"""Relative distance from the CPU's results after two rounds in float32, and with a base in bfloat16."""
UNDER_SGD = ("task images", "task images, batch norm", "bfloat16")
"""Runs whose gradients are close to zero in the second round, or coarse, so that AdamW shows their rounding alone."""
NEEDS = {
    "task seq2seq": ("rouge_score", "seq2seq"),
    "privacy dp-sgd": ("opacus", "privacy"),
    "secure aggregation": ("cryptography", "secagg"),
}
"""Packages that a run needs, with the extra that installs them: a machine with a GPU may lack them."""
ALL = [f"{name}/{engine}" for name in RUNS for engine in ENGINES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models and data of the runs."""
    place = tmp_path_factory.mktemp("cuda")
    save_models(place)
    return place


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in float32 (PyTorch lets cuDNN round their inputs to TF32)."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def require_packages(run: str) -> None:
    """Skip a run whose extra is not installed."""
    if run in NEEDS:
        package, extra = NEEDS[run]
        pytest.importorskip(package, reason=f"the extra fedspan[{extra}] is not installed")


def require_close(found: Mapping[str, Any], expected: Mapping[str, Any], limit: float) -> None:
    """Check the tensors and losses of two results, up to a relative distance, and that all else is there.

    Other scores count examples, of which a few may lie on either side of a boundary.
    """
    assert found.keys() == expected.keys()
    far: dict[str, float] = {}
    for path, value in expected.items():
        gap = 0.0
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert found[path].device.type == value.device.type == "cpu", path
            gap = float((found[path].double() - value.double()).norm() / value.double().norm().clamp(min=1e-3))
        elif isinstance(value, float) and path.endswith("loss]"):
            gap = abs(found[path] - value) / max(abs(value), 1e-3)
        if not gap <= limit:
            far[path] = gap
    assert not far


@contextmanager
def count_waits() -> Generator[Counter[str]]:
    """Count, by the line that waits, how often the host waits for the GPU within this context."""
    counter: Counter[str] = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield counter
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in found:
        if "synchronizing CUDA operation" in str(warning.message):
            line = linecache.getline(warning.filename, warning.lineno).strip()
            counter[f"{Path(warning.filename).name}:{warning.lineno}: {line}"] += 1


@pytest.mark.parametrize("name", ALL)
def test_a_run_ends_as_on_the_cpu(name: str, folder: Path) -> None:
    run, _, engine = name.partition("/")
    require_packages(run)
    values = RUNS[run](folder)
    if run in UNDER_SGD:
        values["training"]["optimizer"] = "sgd"
    elif values["training"].get("optimizer", "adamw") == "adamw":
        values["training"]["eps"] = 1e-4  # AdamW divides gradients that are nothing but rounding by their own size
    values["engine"] = {**ENGINES[engine], **values["engine"], "name": engine}
    require_close(result(values, CUDA), result(values, "cpu"), NARROW if run == "bfloat16" else CLOSE)


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_for_no_step(name: str, folder: Path) -> None:
    require_packages(name)
    waits = inner_waits(RUNS[name](folder), CUDA, count_waits)
    expected = ("masking_utils.py", "client_slot.py")  # Transformers' check of a mask, and results of jobs
    assert not {place for place in waits if not place.startswith(expected)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "name", ["method fedit", "method fedgalore", "task causal-lm", "task images", "dropout", "embeddings"]
)
def test_a_run_repeats_to_the_bit(name: str, engine: str, folder: Path) -> None:
    values = {**RUNS[name](folder), "engine": ENGINES[engine]}
    first, second = result(values, CUDA), result(values, CUDA)
    assert first.keys() == second.keys()
    for path, value in first.items():
        same = torch.equal(value, second[path]) if isinstance(value, torch.Tensor) else value == second[path]
        assert same, path


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["method fedit", "task causal-lm", "task images", "task images, batch norm"])
def test_fused_attention_and_convolutions_repeat_where_they_are_asked_to(
    name: str, deterministic: bool, folder: Path
) -> None:
    values = RUNS[name](folder)
    values |= {"engine": ENGINES["batched"], "deterministic": deterministic}
    if name != "task images, batch norm":  # a ResNet has no attention
        values["model"]["attention"] = "sdpa"
    before = torch.are_deterministic_algorithms_enabled()
    try:
        first, second = result(values, CUDA), result(values, CUDA)
    finally:
        torch.use_deterministic_algorithms(before)
    require_close(first, second, 0.0 if deterministic else CLOSE)


@pytest.mark.parametrize("key", ["fedit", "rolora", "florg", "fed-sb", "slora", "pfedloru"])
def test_users_own_trainers_end_as_the_loop_engine(key: str, folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(
        folder,
        method={"name": key, **OPTIONS.get(key, {})},
        training={"optimizer": "sgd", "group_by_length": False},
        federation={"rounds": 2, "clients_per_round": 2},
    )
    config = parse_config({**values, "device": CUDA})
    prepared = prepare(config)
    expected = tiny.final_tensors(tiny.variant(prepared, config))
    require_close(tiny.final_tensors(with_trainers(prepared, config, tmp_path, use_cpu=False)), expected, CLOSE)


@pytest.mark.parametrize("key", ["fedit", "flora"])
def test_a_base_in_the_memory_of_the_cpu_trains_as_one_on_the_gpu(key: str, folder: Path) -> None:
    values = tiny.settings(folder, method={"name": key}, training={"optimizer": "sgd"})
    offload = {"device_map": "auto", "max_memory": {"device": 4 / (1 << 20), "cpu": 1}}
    apart = result({**values, "model": {**values["model"], **offload}}, CUDA)
    require_close(apart, result(values, CUDA), CLOSE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with heads of a width that fused kernels take, and questions."""
    place = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    words: dict[str, Any] = {"vocab_size": 2000, "max_position_embeddings": 64, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**words, **shape)).save_pretrained(place / "llama-lm")
    tiny.save_tokenizer(place / "llama-lm", pairs=False)
    tiny_decoders.save_questions(place)
    return place


def test_attention_of_variable_length_gives_what_padding_gives(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[TokenLayout] = []
    pack = TokenLayout.pack

    def watch(self: TokenLayout, x: torch.Tensor) -> torch.Tensor:
        layouts.append(self)
        return pack(self, x)

    monkeypatch.setattr(TokenLayout, "pack", watch)
    values = tiny_decoders.settings(
        llama, "llama", model={"dtype": "bfloat16", "attention": "sdpa"}, training={"optimizer": "sgd"}
    )
    padded, packed = (
        result({**values, "engine": {**ENGINES["batched"], "padding_free": padding_free}}, CUDA)
        for padding_free in (False, True)
    )
    assert layouts
    assert all(layout.variable for layout in layouts)
    require_close(packed, padded, NARROW)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_base_trains_as_on_the_cpu(kind: str, engine: str, llama: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra fedspan[quantization] is not installed")
    values = tiny_decoders.settings(
        llama,
        "llama",
        model={"quantization": kind},
        training={"optimizer": "sgd"},
        evaluation={"generate": False},
        engine=ENGINES[engine],
    )
    # LLM.int8() rounds its inputs to 8 bits, each kernel in its own way
    require_close(result(values, CUDA), result(values, "cpu"), {"nf4": CLOSE, "int8": NARROW}[kind])


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and texts of the runs whose memory is planned."""
    place = tmp_path_factory.mktemp("planned")
    planned_memory.save_models(place)
    return place


@pytest.mark.parametrize("name", planned_memory.CASES)
def test_memory_of_a_client_is_what_the_gpu_holds(name: str, planned: Path) -> None:
    changes = {**planned_memory.CASES[name], "engine": {"name": "loop"}, "device": CUDA}
    values = planned_memory.settings(planned, changes)
    peaks: list[int] = []
    for _ in range(2):  # the first run also loads what libraries keep
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        prepared = prepare(parse_config(values))
        prepared.federation.run_round(prepared.federation.begin())
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del prepared
    labels, examples = None if values.get("task") else 2, planned_memory.EXAMPLES
    estimate = fedspan.plan(values, labels=labels, examples=examples, device="H100").client
    assert peaks[-1] == pytest.approx(estimate.total, rel=planned_memory.TOLERANCE), estimate
