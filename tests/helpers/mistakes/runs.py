"""Mistakes with run folders, and what disks and networks do."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import fedspan
from fedspan.run_folder import RunFolder

from ..mistakes.world import LONG_NAME, Mistake, World, cut

CONFIG = "FOLDER/stopped/config.yaml"


def _resume(change: Callable[[RunFolder], object]) -> Callable[[World], object]:
    return lambda world: world.resume(change)


def _config(old: str, new: str) -> Callable[[World], object]:
    def change(run: RunFolder) -> None:
        text = run.config.read_text()
        assert old in text
        run.config.write_text(text.replace(old, new))

    return _resume(change)


def _run_into(name: str) -> Callable[[World], object]:
    return lambda world: fedspan.run(world.values(), name)


def _other_config(world: World) -> None:
    fedspan.run(world.values(training={"lr": 0.5}), world.run("stopped"), resume=True)


def _other_data(world: World) -> None:
    folder = world.run("stopped")
    corpus = world.tiny / "corpus.csv"
    shorter = world.file("corpus.csv", "".join(corpus.read_text().splitlines(keepends=True)[:-20]))
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(str(corpus), str(world.folder / shorter)))
    fedspan.resume(folder)


def refusing(code: int, after: int = 0) -> Callable[..., object]:
    """os.write or os.open of a disk that refuses; the first few calls go through."""
    calls = [0]

    def refuse(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            calls[0] += 1
            if calls[0] > after:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)

        return call

    return refuse


def _full(after: int) -> Callable[[World], object]:
    def provoke(world: World) -> None:
        values = world.values(federation={"rounds": 1})
        with mock.patch("os.write", refusing(errno.ENOSPC, after)(os.write)):
            fedspan.run(values, world.folder / "run")

    return provoke


def _full_at_export(world: World) -> None:
    folder = world.run("stopped")
    with mock.patch.object(Path, "write_bytes", refusing(errno.ENOSPC)(Path.write_bytes)):
        fedspan.resume(folder)


def _full_copy(world: World) -> None:
    folder = world.run()
    with mock.patch("shutil.copytree", refusing(errno.ENOSPC)(os.write)):
        fedspan.export(folder, world.folder / "out")


def _full_merge(world: World) -> None:
    folder = world.export()
    out = world.folder / "merged"
    with mock.patch("transformers.PreTrainedModel.save_pretrained", refusing(errno.ENOSPC)(os.write)):
        fedspan.export(folder, out, "merged")


def _read_only(world: World) -> None:
    values = world.values()
    with mock.patch.object(Path, "mkdir", refusing(errno.EROFS)(Path.mkdir)):
        fedspan.run(values, world.folder / "run")


def _below_file(world: World) -> None:
    world.file("notes", "x")
    fedspan.run(world.values(), world.folder / "notes" / "run")


def _picture(world: World) -> None:
    from fedspan.cli.data import partition

    partition(
        Path(world.file("my.yaml", "data: {train: train.csv}\npartition: {clients: 2}\n")),
        world.folder / "no" / "p.png",
    )


def _offline_data(world: World) -> None:
    world.load(train="nobody/nothing")


FOLDERS = [
    Mistake("The folder is a file.", "run folder", _run_into("train.csv")),
    Mistake("The name is too long for the file system.", "run folder", _run_into(LONG_NAME)),
    Mistake("A folder without a run to resume.", "run folder", lambda world: fedspan.resume("nothing")),
    Mistake("The name of the folder to read is too long.", "run folder", lambda world: fedspan.resume(LONG_NAME)),
    Mistake("The config differs from the run's.", "training.lr", _other_config),
    Mistake("config.yaml is no longer valid YAML.", "config", _config("seed: 3", "seed: ["), "valid YAML ("),
    Mistake("config.yaml was emptied.", "config", _resume(lambda run: run.config.write_text(""))),
    Mistake("The seed in config.yaml was changed to a word.", "seed", _config("seed: 3", "seed: three")),
    Mistake(
        "config.yaml is not UTF-8.", "FOLDER/stopped/config.yaml", _resume(lambda run: run.config.write_bytes(b"\xff"))
    ),
    Mistake(
        "The learning rate in config.yaml was changed.", f"{CONFIG}, training.lr", _config("\n  lr: ", "\n  lr: 1")
    ),
    Mistake(
        "partition.json is truncated.",
        "FOLDER/stopped/partition.json",
        _resume(lambda run: cut(run.partition)),
        "stopped/partition.json`: ",
    ),
    Mistake("The data file lost rows.", "data.train", _other_data),
    Mistake(
        "environment.json is truncated.",
        "FOLDER/stopped/environment.json",
        _resume(lambda run: cut(run.environment)),
        "environment.json`: ",
    ),
]
DISK = [
    Mistake("The disk is full at the start.", "run folder", _full(0)),
    Mistake("The disk is full after the first files.", "run folder", _full(3)),
    Mistake("The disk is full when the adapter is written.", "run folder", _full_at_export),
    Mistake("The disk is full in `fedspan export`.", "out", _full_copy),
    Mistake("The disk is full when weights are merged.", "out", _full_merge),
    Mistake("The file system is read-only.", "run folder", _read_only),
    Mistake("A part of the path is a file.", "run folder", _below_file),
    Mistake("A picture in a folder that does not exist.", "--png", _picture),
]
NETWORK = [
    Mistake("A data set on the hub without a network.", "data.train", _offline_data, "read from the hub: "),
    Mistake(
        "data.dataset without a network.",
        "data.train",
        lambda world: world.load(train=None, dataset="sst2"),
        "read from the hub: ",
    ),
]
