"""Where mistakes are made: a folder for each, tiny models and data, and runs that are finished or were stopped."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.data.loading import LoadedData, load
from fedspan.data.partition import Partition, partition
from fedspan.errors import FedspanError
from fedspan.run_folder import RunFolder

from .. import tiny, tiny_decoders, tiny_images

LONG_NAME = "x" * 300
"""A name that no file system takes."""
GOOD = "text,label\none,a\ntwo,b\nthree,a\nfour,b\nfive,a\nsix,b\n"
QUESTIONS = '{"question": "a1 b2", "answer": "b1"}\n{"question": "c3", "answer": "d3"}\n'


@dataclass(frozen=True)
class Mistake:
    """Something that a user does wrong.

    Args:
        what: Description of the mistake.
        field: Field of the expected error.
        provoke: Function that makes the mistake in a fresh folder of the world.
        until: Text after which the message is a library's and differs between its versions.
    """

    what: str
    field: str
    provoke: Callable[["World"], object]
    until: str | None = None


class World:
    """Args: root: an empty folder. Whatever is made, is made in it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.folder = self.root

    @contextlib.contextmanager
    def place(self) -> Generator[None]:
        """A new folder to make one mistake in, which is the working directory meanwhile."""
        before = Path.cwd()
        self.folder = Path(tempfile.mkdtemp(dir=self.root, prefix="at-"))
        os.chdir(self.folder)
        try:
            self.file("train.csv", GOOD)
            yield
        finally:
            os.chdir(before)

    def said(self, mistake: Mistake) -> tuple[str, str]:
        """Field and message of the error that a mistake ends in, without what differs from machine to machine."""
        with self.place():
            try:
                mistake.provoke(self)
            except FedspanError as error:
                return self._plain(error.field), self._plain(str(error), mistake.until)
        raise AssertionError(f"{mistake.what}: no error was raised")

    def _plain(self, text: str, until: str | None = None) -> str:
        for folder in (self.folder, self.root):
            text = text.replace(str(folder), "FOLDER")
        text = re.sub(r"FOLDER/at-\w+", "FOLDER", text)
        text = text.replace(LONG_NAME, "LONG_NAME")
        text = re.sub(r"process \d+", "process 4711", text)
        text = re.sub(r"SHA-256 [0-9a-f]{64}", "SHA-256 ...", text)
        if until is not None:
            assert until in text, text
            text = text[: text.index(until) + len(until)] + "..."
        return text

    def file(self, name: str, content: str | bytes) -> str:
        """Write a file into the folder of the moment."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    def load(
        self, content: str | bytes | None = None, name: str = "t.csv", task: Any = None, **data: Any
    ) -> LoadedData:
        """Read data of a config; ``content`` goes into a file first."""
        if content is not None:
            data = {"train": self.file(name, content), **data}
        config = parse_config({"task": task or "sequence-classification", "data": {"train": "train.csv", **data}})
        return load(config.data, task=config.task_columns)

    def partition(
        self, content: str = GOOD, task: Any = None, data: dict[str, Any] | None = None, **how: Any
    ) -> Partition:
        """Read data and partition them among clients."""
        config = parse_config({"task": task or "sequence-classification", "data": {"train": "t.csv"}, "partition": how})
        rows = self.load(content, task=task, **(data or {}))
        return partition(rows.train, config.partition, 0)

    @cached_property
    def tiny(self) -> Path:
        """The tiny encoders, with their corpus."""
        folder = self.root / "tiny"
        folder.mkdir()
        for kind in ("bert", "gpt2"):
            tiny.save_model(kind, folder)
        for family in ("llama", "opt"):
            tiny_decoders.save_decoder(family, folder)
        tiny.save_corpus(folder)
        tiny_decoders.save_questions(folder)
        return folder

    @cached_property
    def images(self) -> Path:
        """The tiny image models, with their pictures."""
        folder = self.root / "images"
        folder.mkdir()
        for kind in ("vit", "resnet"):
            tiny_images.save_model(kind, folder)
        tiny_images.save_pictures(folder)
        return folder

    def values(self, **changes: Any) -> dict[str, Any]:
        """A run on the tiny BERT, with changes in its sections."""
        top = {name: changes.pop(name) for name in ("threads", "device", "task") if name in changes}
        return {**tiny.settings(self.tiny, **changes), **top}

    def prepare(self, **changes: Any) -> Prepared:
        """Build that run."""
        return prepare(parse_config(self.values(**changes)))

    def decoder(self, family: str = "llama", **changes: Any) -> Prepared:
        """Build a run of instruction tuning."""
        return prepare(parse_config(tiny_decoders.settings(self.tiny, family, **changes)))

    def model(self, change: Callable[[Path], object], kind: str = "bert") -> Prepared:
        """Build a run on a copy of a tiny model that was changed."""
        copy = Path(shutil.copytree(self.tiny / kind, self.folder / "model"))
        change(copy)
        if kind.endswith("-lm"):
            return self.decoder(kind.removesuffix("-lm"), model={"name": "model"})
        return self.prepare(model={"name": "model"})

    @cached_property
    def _finished(self) -> Path:
        folder = self.root / "finished-run"
        fedspan.run(self.values(federation={"rounds": 2}, evaluation={"batch_size": 64}), folder)
        return folder

    @cached_property
    def _personal(self) -> Path:
        folder = self.root / "personal-run"
        fedspan.run(self.values(federation={"rounds": 1}, method={"name": "fedsa-lora"}), folder)
        return folder

    @cached_property
    def _answering(self) -> Path:
        folder = self.root / "answering-run"
        changes: dict[str, Any] = {"federation": {"rounds": 1}, "evaluation": {"generate": False}}
        fedspan.run(tiny_decoders.settings(self.tiny, **changes), folder)
        return folder

    @cached_property
    def _seeing(self) -> Path:
        folder = self.root / "seeing-run"
        fedspan.run(tiny_images.settings(self.images, federation={"rounds": 1}), folder)
        return folder

    def run(self, kind: str = "finished") -> Path:
        """A copy of a run: ``finished``, ``personal`` (one a client), ``answering``, ``seeing``, ``stopped``."""
        folder = Path(
            shutil.copytree(getattr(self, f"_{'finished' if kind == 'stopped' else kind}"), self.folder / kind)
        )
        if kind == "stopped":
            (folder / "report.json").unlink()
            shutil.rmtree(folder / "adapter")
            shutil.rmtree(folder / "checkpoints" / "round-00002")
        return folder

    def export(self) -> Path:
        """The finished run's adapter, alone in a folder."""
        return fedspan.export(self.run(), self.folder / "adapter")

    def resume(self, change: Callable[[RunFolder], object]) -> object:
        """Resume a stopped run in which something was changed."""
        folder = self.run("stopped")
        change(RunFolder(folder))
        return fedspan.resume(folder)


def edit_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON object in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path, bytes: int = 100) -> None:
    """Take the end off a file."""
    path.write_bytes(path.read_bytes()[:-bytes])
