"""What all tests share: no network, one thread, and the tiny models in a folder.

Fixtures import what they need when they are used: under pytest-xdist the process that only hands out the tests reads
this file, too, and all others wait for it; torch and Transformers would take it ten seconds.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers.captured_log import CapturedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from click.testing import Result

    from fedspan.assembly.run import Prepared

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # with Ray's default its workers starve on a busy machine
LONGEST = [
    f"tests/{path}.py"
    for path in (
        "deployment/test_flower_app",
        "transports/http/test_deployment",
        "training/test_devices",
        "transports/http/test_trainer_deployment",
        "transports/http/test_secure_deployment",
        "transports/ray/test_worker",
        "transports/ray/test_team",
        "transports/http/test_attacks",
        "examples/test_examples",
        "docs/test_blocks",
        "cli/test_commands",
        "cli/test_train",
        "cli/test_reproduce",
        "evidence/test_claims",
        "wrappers/test_wrapper",
        "assembly/test_own_trainers",
        "methods/test_method_claims",
        "errors/test_mistakes",
        "runs/test_trained_models",
        "reproduction/test_presets",
    )
]
"""Files that take more than 15 seconds, with the slow tests of a step or without, to be handed out first."""
LOG = CapturedLog()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the tests themselves: trainers collect often, which took 20 seconds a test.

    Nor does it run meanwhile, or in the end: among imports and thousands of tests it found next to nothing, in a third
    of the time. During the tests it looks more rarely than by default, which took a twentieth of theirs.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """A share of the tests, for machines with little time."""
    parser.addoption(
        "--part", metavar="K/N", type=parse_part, help="run the K-th of N parts of the tests, drawn by their names"
    )


def parse_part(text: str) -> tuple[int, int]:
    """The numbers K and N of ``K/N``."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N")
    return int(number), int(parts)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other parts, and hand out long files first: a worker takes one file after another."""
    if config.getoption("part") is not None:
        number, parts = config.getoption("part")
        by_part: list[list[pytest.Item]] = [[] for _ in range(parts)]
        for item in items:
            by_part[zlib.crc32(item.nodeid.encode()) % parts].append(item)
        items[:] = by_part.pop(number - 1)
        config.hook.pytest_deselected(items=[item for part in by_part for item in part])
    places = {path: place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what loggers said beside a failure."""
    report = yield
    if report.failed and LOG.records:
        report.sections.append(("Captured log", LOG.text))
    return report


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    """Small matrices are fastest on one thread, which .ci/as-machine changes; inputs are read once; no disk is awaited.

    No test cuts the power, and what a process has written outlives it, flushed or not.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    from fedspan.data import loading as data_loading
    from fedspan.models import loading
    from helpers.loaded_inputs import store_data, store_models

    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger().addHandler(LOG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(loading, "load_pretrained", store_models(loading.load_pretrained))
        patch.setattr(data_loading, "load", store_data(data_loading.load))
        yield


@pytest.fixture(autouse=True)
def no_mode_outlives_its_test() -> Iterator[None]:
    """Autocast that stays active would change the numbers of all further tests, and of a user's process."""
    LOG.clear()
    yield
    if (torch := sys.modules.get("torch")) is not None:
        is_active = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", False)
        torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # a run may have set its own
        assert not is_active


@pytest.fixture
def caplog() -> CapturedLog:
    """What loggers said since this fixture was asked for."""
    LOG.clear()
    return LOG


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds ``bert``, ``deep-bert``, ``roberta``, ``distilbert``, ``gpt2`` and ``corpus.csv``."""
    from helpers import tiny

    folder = tmp_path_factory.mktemp("tiny")
    for kind in ("bert", "deep-bert", "roberta", "distilbert", "gpt2"):
        tiny.save_model(kind, folder)
    tiny.save_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a causal language model of each family (``llama-lm`` ...), ``questions.jsonl`` and ``corpus.csv``."""
    from helpers import tiny, tiny_decoders

    folder = tmp_path_factory.mktemp("decoders")
    for family in tiny_decoders.FAMILIES:
        tiny_decoders.save_decoder(family, folder)
    tiny_decoders.save_questions(folder)
    tiny.save_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the image models ``vit`` and ``resnet``, and the folder ``pictures``."""
    from helpers import tiny_images

    folder = tmp_path_factory.mktemp("images")
    for kind in ("vit", "resnet"):
        tiny_images.save_model(kind, folder)
    tiny_images.save_pictures(folder)
    return folder


@pytest.fixture(scope="session")
def image_runs(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs, not to be changed: ``vit``, ``resnet``, and ``scratch`` on builtin:resnet-8."""
    import fedspan
    from helpers import tiny_images

    folder = tmp_path_factory.mktemp("image-runs")
    for name, kind in (("vit", "vit"), ("resnet", "resnet"), ("scratch", "builtin:resnet-8")):
        fedspan.run(tiny_images.settings(images, kind), folder / name)
    return folder


@pytest.fixture(scope="session")
def prepared(tiny_folder: Path) -> Prepared:
    """FedIT on the tiny BERT, whose model tests may share: values of a federation leave nothing behind in it."""
    from fedspan.assembly.run import prepare
    from helpers import tiny

    return prepare(tiny.config(tiny_folder, federation={"rounds": 3}))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients shared each pass."""
    from fedspan.training.worker import Worker

    found, advance = list[int](), Worker.advance

    def counted(self: Worker, group: Sequence[Any], examples: Any) -> None:
        advance(self, group, examples)
        found.append(len(group))

    monkeypatch.setattr(Worker, "advance", counted)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium or Chrome; a test is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    paths = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not paths:
        pytest.skip("there is no Chromium or Chrome on this machine")
    with sync_api.sync_playwright() as playing:
        made = playing.chromium.launch(executable_path=paths[0], args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="session")
def call() -> Callable[..., Result]:
    """``fedspan`` with arguments, in 80 columns."""
    from click.testing import CliRunner

    from helpers.command_line import get_program

    runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})

    def called(*arguments: object, input: str | None = None) -> Result:
        return runner.invoke(get_program(), [str(argument) for argument in arguments], input=input)

    return called


@pytest.fixture
def refused(call: Callable[..., Result]) -> Callable[..., str]:
    """``fedspan`` with arguments that are wrong: the one line that it prints."""
    from fedspan.cli.commands import find_page

    def called(*arguments: object) -> str:
        result = call(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("error: ")
        line, *rest = result.stderr.splitlines()
        assert rest in ([], [f"see {find_page(line.removeprefix('error: `').partition('`')[0])}"])
        assert "Traceback" not in result.output
        assert isinstance(result.exception, SystemExit)
        return line.removeprefix("error: ")

    return called
