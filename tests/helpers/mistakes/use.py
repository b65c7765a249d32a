"""Mistakes in using what was trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedspan

from ..mistakes.world import LONG_NAME, Mistake, World, cut, edit_json


def _predict(client: str | None = None, kind: str = "finished") -> Callable[[World], object]:
    return lambda world: fedspan.predict(world.run(kind), ["word1"], client)


def _exported(change: Callable[[Path], object]) -> Callable[[World], object]:
    def provoke(world: World) -> None:
        folder = world.export()
        change(folder)
        fedspan.predict(folder, ["word1"])

    return provoke


def _notes(**changes: Any) -> Callable[[World], object]:
    return _exported(lambda folder: edit_json(folder / "fedspan.json", **changes))


def _export(kind: str = "finished", out: str = "out", **options: Any) -> Callable[[World], object]:
    return lambda world: fedspan.export(world.run(kind), out, **options)


def _evaluate(content: str | None = None, kind: str = "finished", **options: Any) -> Callable[[World], object]:
    def provoke(world: World) -> None:
        if content is not None:
            options["data"] = world.file("new.csv", content)
        fedspan.evaluate(world.run(kind), **options)

    return provoke


def _cli(*texts: str, **options: Any) -> Callable[[World], object]:
    from fedspan.cli.trained_model import predict

    return lambda world: predict(Path("run"), list(texts), **options)


def _file(content: str | bytes) -> Callable[[World], object]:
    from fedspan.cli.trained_model import predict

    return lambda world: predict(Path("run"), file=Path(world.file("texts.txt", content)))


def _other_labels(world: World) -> None:
    folder = world.run()
    config, corpus = folder / "config.yaml", str(world.tiny / "corpus.csv")
    world.file("two.csv", "text,label\n" + "word1,a\nword2,b\n" * 9)
    config.write_text(config.read_text().replace(corpus, "two.csv"))
    fedspan.evaluate(folder)


def _merged_adapter(world: World) -> None:
    merged = fedspan.export(world.run(), world.folder / "merged", "merged")
    fedspan.export(merged, world.folder / "out")


FEDSPAN = "FOLDER/adapter/fedspan.json"
USING = [
    Mistake("The folder does not exist.", "folder", lambda world: fedspan.predict("nothing", ["word1"])),
    Mistake(
        "The name of the folder to read is too long.", "folder", lambda world: fedspan.predict(LONG_NAME, ["word1"])
    ),
    Mistake("A folder without a model.", "folder", lambda world: fedspan.predict(world.folder, ["word1"])),
    Mistake("The run is not finished.", "run folder", _predict(kind="stopped")),
    Mistake("A client is misspelt.", "client", _predict("weast")),
    Mistake("Each client has its own model, and no client is named.", "client", _predict(kind="personal")),
    Mistake("fedspan.json is truncated.", FEDSPAN, _exported(lambda f: cut(f / "fedspan.json")), "fedspan.json`: "),
    Mistake("fedspan.json is a list.", FEDSPAN, _exported(lambda f: (f / "fedspan.json").write_text("[1, {}]"))),
    Mistake("fedspan.json names no model.", f"{FEDSPAN}.base_model", _notes(base_model=7)),
    Mistake("fedspan.json's kept is a number.", f"{FEDSPAN}.kept", _notes(kept=7)),
    Mistake("fedspan.json's max_length is negative.", f"{FEDSPAN}.max_length", _notes(max_length=-1)),
    Mistake("fedspan.json's task is unknown.", f"{FEDSPAN}.task", _notes(task="chess")),
    Mistake("fedspan.json's metric is another task's.", f"{FEDSPAN}.metric", _notes(metric="perplexity")),
    Mistake(
        "fedspan.json's pattern is not a regular expression.", f"{FEDSPAN}.answer_pattern", _notes(answer_pattern="(")
    ),
    Mistake("fedspan.json's labels belong to another model.", "folder", _notes(labels=["a", "b"]), "this adapter ("),
    Mistake(
        "The adapter is truncated.",
        "folder",
        _exported(lambda folder: cut(folder / "adapter_model.safetensors")),
        "this adapter (",
    ),
    Mistake(
        "The adapter's config is a list.",
        "folder",
        _exported(lambda folder: (folder / "adapter_config.json").write_text("[]")),
        "this adapter (",
    ),
    Mistake(
        "The base model no longer exists.", "model.name", _notes(base_model="nobody/nothing"), "cannot be loaded ("
    ),
    Mistake("`fedspan predict RUN` without texts.", "TEXT", _cli()),
    Mistake("`--file` does not exist.", "--file", _cli(file=Path("no.txt"))),
    Mistake("`--file` holds no text but bytes.", "--file", _file(b"\x00\x01\x02"), "a readable text file ("),
    Mistake("`--file` holds no text.", "--file", _file("\n\n")),
]
EXPORT = [
    Mistake("An unknown form.", "form", _export(form="onnx")),
    Mistake("The folder is not empty.", "out", _export(out=".")),
    Mistake("A part of the path is a file.", "out", _export(out="train.csv/out")),
    Mistake("The name is too long for the file system.", "out", _export(out=LONG_NAME)),
    Mistake("A round without a checkpoint.", "round", _export(round=7)),
    Mistake("A round that is a word.", "round", _export(round="first")),
    Mistake("Each client has its own model, and no client is named.", "client", _export("personal")),
    Mistake("An adapter from merged weights.", "form", _merged_adapter),
]
EVALUATE = [
    Mistake("An exported model without data.", "data", lambda world: fedspan.evaluate(world.export())),
    Mistake("The file does not exist.", "data", _evaluate(data="no.csv")),
    Mistake("The file's name is empty.", "data", _evaluate(data="")),
    Mistake("There is no column of texts.", "text", _evaluate("message,label\nword1,lab\n")),
    Mistake("There is no column of labels.", "label", _evaluate("text,intent\nword1,lab\n")),
    Mistake("Text and label are the same column.", "label", _evaluate("text,label\nword1,lab\n", text="a", label="a")),
    Mistake("A label that the model does not know.", "data", _evaluate("text,label\nword1,gossip\n")),
    Mistake("There is no column of answers.", "answer", _evaluate("question\na1\n", "answering")),
    Mistake("The labels in the run's data changed.", "data.train", _other_labels),
]
