"""A run notices when a file is not what it wrote; its folder: what it refuses, who may use it, and whole files."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

import fedspan
from fedspan.config import parse_config
from fedspan.core.values import ServerState
from fedspan.deployment.status import read_status
from fedspan.errors import FedspanError
from fedspan.logs import JsonLines, read_lines
from fedspan.reports.run_data import read_runs
from fedspan.run_folder import RunFolder, describe_missing_run, require_intact_model, suggest_folder
from fedspan.runs.checkpoint_format import Checkpoint
from fedspan.runs.integrity import compute_input_digests, describe_config, require_intact, require_same_run
from fedspan.runs.report import read_report
from helpers import tiny
from helpers.listeners import Notes
from helpers.mistakes.world import World, flip
from helpers.refusals import refused
from helpers.run_content import content

Damage = Callable[[RunFolder], object]


def replaced(name: str, old: str, new: str) -> Damage:
    def damage(run: RunFolder) -> None:
        path = run.path / name
        content = path.read_text()
        assert old in content
        path.write_text(content.replace(old, new, 1))

    return damage


def rewritten(run: RunFolder) -> None:
    """The whole of metrics.jsonl, with a chain of its own."""
    rows = list(read_lines(run.metrics))
    run.metrics.unlink()
    with JsonLines(run.metrics) as lines:
        for row in rows:
            lines.append({**row, "cohort": list(reversed(cast("list[str]", row["cohort"])))})
        lines.commit()


def shortened(run: RunFolder) -> None:
    run.ledger.write_bytes(b"".join(run.ledger.read_bytes().splitlines(keepends=True)[:-1]))


def linked(run: RunFolder) -> None:
    run.checkpoints.rename(run.path.parent / "elsewhere")
    run.checkpoints.symlink_to(run.path.parent / "elsewhere")


def linked_round(run: RunFolder) -> None:
    newest = max(run.checkpoints.iterdir())
    newest.rename(run.path.parent / "elsewhere")
    newest.symlink_to(run.path.parent / "elsewhere")


def cut_config(run: RunFolder) -> None:
    run.config.write_bytes(run.config.read_bytes()[:-40])


BOTH: dict[str, tuple[Damage, str]] = {
    "metric": (replaced("metrics.jsonl", '"loss": ', '"loss": 1'), r"metrics\.jsonl, line 1`: the line was changed"),
    "ledger": (replaced("ledger.jsonl", '"bytes": ', '"bytes": 9'), r"ledger\.jsonl, line 1`: the line was changed"),
    "rewritten": (rewritten, r"metrics\.jsonl`: .*rewritten as a whole"),
    "rate": (
        replaced("config.yaml", "\n  lr: ", "\n  lr: 1"),
        r"config\.yaml, training\.lr`: it is 1.* now, and the run began with ",
    ),
    "weights": (replaced("config.yaml", "weights: examples", "weights: uniform"), r"federation\.weights`"),
    "cut": (cut_config, r"config\.yaml`: the end of the file is missing"),
    "partition": (replaced("partition.json", '"train":', '"train": '), r"partition\.json`: the file was changed"),
    "linked": (linked, r"checkpoints`: it is a link to "),
    "linked-round": (linked_round, r"round-\d+`: it is a link to "),
}
FINISHED: dict[str, tuple[Damage, str]] = {
    "adapter": (
        lambda run: flip(run.adapter / "adapter_model.safetensors"),
        r"adapter/adapter_model\.safetensors`: the file was changed after the run wrote it",
    ),
    "environment": (
        replaced("environment.json", '"seed": ', '"seed": 1'),
        r"environment\.json`: the file was changed after the run wrote it: .*report\.json names\. Restore the file\.$",
    ),
    "report": (replaced("report.json", '"best_round": ', '"best_round": 1'), r"report\.json`: the file was changed"),
    "shortened": (shortened, r"ledger\.jsonl`: at the checkpoint a line ended at byte"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("integrity"))


def copied(world: World, tmp_path: Path, kind: str, damage: Damage) -> Path:
    world.folder = tmp_path
    folder = world.run(kind)
    damage(RunFolder(folder))
    return folder


@pytest.mark.parametrize("name", BOTH)
def test_a_stopped_run_refuses_to_continue(world: World, tmp_path: Path, name: str) -> None:
    damage, expected = BOTH[name]
    folder = copied(world, tmp_path, "stopped", damage)
    with pytest.raises(FedspanError, match=expected):
        fedspan.resume(folder)


@pytest.mark.parametrize("name", [*BOTH, *FINISHED])
def test_a_finished_run_is_neither_read_nor_reported_nor_exported(world: World, tmp_path: Path, name: str) -> None:
    damage, expected = {**BOTH, **FINISHED}[name]
    folder = copied(world, tmp_path, "finished", damage)
    with pytest.raises(FedspanError, match=expected):
        fedspan.resume(folder)
    with pytest.raises(FedspanError, match=expected):
        read_runs([folder])
    with pytest.raises(FedspanError, match=expected):
        fedspan.export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["rate", "partition"])
def test_a_finished_run_needs_no_checkpoint_to_notice_an_edit(world: World, tmp_path: Path, name: str) -> None:
    damage, expected = BOTH[name]
    folder = copied(world, tmp_path, "finished", damage)
    shutil.rmtree(folder / "checkpoints")
    shutil.rmtree(folder / "best")
    with pytest.raises(FedspanError, match=expected):
        read_runs([folder])
    with pytest.raises(FedspanError, match=expected):
        fedspan.evaluate(folder)
    with pytest.raises(FedspanError, match=expected):
        fedspan.export(folder, tmp_path / "out")


def test_every_exported_file_is_checked_in_each_of_its_parts(world: World, tmp_path: Path) -> None:
    folder = copied(world, tmp_path, "finished", lambda run: None)
    (folder / "adapter" / "README.md").write_text("a card of the user's own")
    require_intact(RunFolder(folder))
    exported = [path for path in (folder / "adapter").rglob("*") if path.is_file() and path.name != "README.md"]
    names = {path.name for path in exported}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "fedspan.json", "tokenizer.json"}
    for path in exported:
        intact = path.read_bytes()
        for place in (0, len(intact) // 2, -1):
            damaged = bytearray(intact)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(FedspanError, match=f"{path.name}`: the file was changed"):
                require_intact(RunFolder(folder))
            with pytest.raises(FedspanError, match=f"{path.name}`: the file was changed"):
                require_intact_model(folder / "adapter")
        path.unlink()
        with pytest.raises(FedspanError, match=f"{path.name}`: the file is missing, and report.json names it"):
            require_intact_model(folder / "adapter")
        path.write_bytes(intact)
    require_intact(RunFolder(folder))


def test_a_damaged_adapter_is_not_used(world: World, tmp_path: Path) -> None:
    folder = copied(world, tmp_path, "finished", FINISHED["adapter"][0])
    expected = FINISHED["adapter"][1]
    for model in (folder, folder / "adapter"):
        with pytest.raises(FedspanError, match=expected):
            fedspan.predict(model, ["word1"])
        with pytest.raises(FedspanError, match=expected):
            fedspan.evaluate(model, data=world.tiny / "corpus.csv")
        with pytest.raises(FedspanError, match=expected):
            fedspan.export(model, tmp_path / "out")
    with pytest.raises(FedspanError, match=expected):
        world.prepare(model={"adapter": str(folder / "adapter")})
    shutil.rmtree(folder / "checkpoints")  # without them, a resumed run cannot write it
    with pytest.raises(FedspanError, match=r"names\. Restore the file\.$"):
        fedspan.predict(folder, ["word1"])


def test_a_client_s_model_is_used_beside_a_damaged_one(world: World, tmp_path: Path) -> None:
    folder = copied(world, tmp_path, "personal", lambda run: None)
    damaged, intact = list(fedspan.read_report(folder).adapters)[:2]
    flip(folder / fedspan.read_report(folder).adapters[damaged] / "adapter_model.safetensors")
    assert len(fedspan.predict(folder, ["word1"], intact)) == 1
    with pytest.raises(FedspanError, match=r"adapter_model\.safetensors`: the file was changed"):
        fedspan.predict(folder, ["word1"], damaged)


def test_a_damaged_adapter_is_exported_again_from_its_checkpoint(world: World, tmp_path: Path) -> None:
    before = content(copied(world, tmp_path, "finished", lambda run: None))
    folder = tmp_path / "finished"
    (folder / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(FedspanError, match=r"missing.* Restore the file, or delete \S+report\.json and resume the run"):
        fedspan.resume(folder)
    (folder / "report.json").unlink()
    fedspan.resume(folder)
    assert content(folder) == before


def test_a_chosen_learning_rate_cannot_be_edited(world: World, tmp_path: Path) -> None:
    run, config = RunFolder(tmp_path), parse_config(world.values())
    run.learning_rate.write_text('{"lr": 0.1}')
    kept = Checkpoint(ServerState(1, {}), inputs=compute_input_digests(run), extra={"config": describe_config(config)})
    require_same_run(run, config, kept)
    run.learning_rate.write_text('{"lr": 0.2}')
    with pytest.raises(FedspanError, match=r"learning_rate\.json`: the file was changed after the run wrote it"):
        require_same_run(run, config, kept)


@pytest.mark.parametrize(
    ("section", "change", "field"),
    [
        ("federation", {"ranks": [2, 4, 2, 4, 2]}, "federation.ranks"),
        ("federation", {"rounds": 9}, None),  # as in a run that was extended (test_extension.py)
        ("privacy", {"mechanism": "central", "noise": 1.0}, "privacy"),
        ("method", {"wrappers": [{"name": "fedprox"}]}, "method.wrappers"),
        ("partition", {"validation": 0.2}, "partition.validation"),
        ("federation", {"retries": 7, "deadline": 9.0}, None),
        ("engine", {"workers": 2}, None),
        ("cluster", {"workers": 2, "address": "auto"}, None),  # on other machines
        ("evaluation", {"batch_size": 3}, None),
    ],
)
def test_what_a_run_is_and_what_may_change(
    world: World, tmp_path: Path, section: str, change: dict[str, object], field: str | None
) -> None:
    values = world.values()
    began = describe_config(parse_config({**values, "federation": {**values["federation"], "weights": "uniform"}}))
    kept = Checkpoint(ServerState(1, {}), extra={"config": began})
    given = {**values, "federation": {**values["federation"], "weights": "uniform"}}
    now = parse_config({**given, section: {**given.get(section, {}), **change}})
    if field is None:
        require_same_run(RunFolder(tmp_path), now, kept)
        return
    with pytest.raises(FedspanError, match=f"config.yaml, {field}.*the run began with"):
        require_same_run(RunFolder(tmp_path), now, kept)


def test_the_rate_of_centralized_training_may_change_until_it_begins(world: World, tmp_path: Path) -> None:
    run, values = RunFolder(tmp_path), world.values()
    kept = Checkpoint(ServerState(1, {}), extra={"config": describe_config(parse_config(values))})
    now = parse_config({**values, "centralized_lr": 0.5})
    require_same_run(run, now, kept)
    (run.baselines / "centralized").mkdir(parents=True)
    with pytest.raises(FedspanError, match=r"config.yaml, centralized_lr.*it is 0\.5 now"):
        require_same_run(run, now, kept)


def test_an_intact_run_is_used_as_before_and_files_of_the_user_may_lie_in_it(world: World, tmp_path: Path) -> None:
    folder = copied(world, tmp_path, "finished", lambda run: (run.adapter / "notes.txt").write_text("mine"))
    require_intact(RunFolder(folder))
    assert (fedspan.export(folder, tmp_path / "out") / "notes.txt").read_text() == "mine"
    moved = tmp_path / "corpus.csv"
    shutil.copyfile(world.tiny / "corpus.csv", moved)
    replaced("config.yaml", str(world.tiny / "corpus.csv"), str(moved))(RunFolder(folder))
    (run,) = read_runs([folder])
    assert run.rounds == run.report.rounds
    heads = json.loads((folder / "report.json").read_text())["logs"]
    assert heads["metrics.jsonl"][0] == (folder / "metrics.jsonl").stat().st_size


def test_a_linked_run_folder_is_fine(world: World, tmp_path: Path) -> None:
    folder = copied(world, tmp_path, "stopped", lambda run: None)
    link = tmp_path / "linked"
    link.symlink_to(folder)
    assert fedspan.resume(link).rounds == 2


def test_a_run_works_from_every_directory(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its paths are relative to the directory in which it was started."""
    start, other = tmp_path / "start", tmp_path / "other"
    shutil.copytree(tiny_folder / "bert", start / "models" / "bert")
    other.mkdir()
    shutil.copy(tiny_folder / "corpus.csv", start / "all.csv")
    values = tiny.settings(Path("models"), data={"train": "{part}.csv"})
    monkeypatch.chdir(start)
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values, "run", listener=Notes(1))
    assert "models/bert" in (start / "run" / "config.yaml").read_text()
    monkeypatch.chdir(other)
    report = fedspan.resume(start / "run")
    assert fedspan.evaluate(start / "run")["accuracy"] == report.scores["test"]["accuracy"]
    assert fedspan.predict(start / "run", ["admin1"])
    fedspan.export(start / "run", "merged", form="merged")
    assert fedspan.report(start / "run", "report.html")
    monkeypatch.chdir(start)
    assert fedspan.run(values, "run", resume=True) == report


CONFIG = "seed: 1  # ключ\n"


def test_a_new_folder_is_made_with_its_parents_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er run"
    with RunFolder.create(path, CONFIG) as run:
        assert run.read_config_text() == CONFIG
    with RunFolder.resume(path) as again:
        assert again.read_config_text() == CONFIG


def test_what_a_killed_creation_leaves_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("1\nelsewhere\n")
    (tmp_path / "config.yaml.tmp-77").write_text("seed")
    with RunFolder.create(tmp_path, CONFIG) as run:
        assert sorted(file.name for file in run.path.iterdir()) == ["config.yaml", "run.lock"]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, CONFIG).close()
    with refused("run folder", r"already holds a run. Choose another folder, or continue this run with --resume"):
        RunFolder.create(tmp_path, "seed: 2\n")
    assert RunFolder(tmp_path).read_config_text() == CONFIG


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with refused("run folder", r"thesis\.tex"):
        RunFolder.create(tmp_path, CONFIG)
    with refused("run folder", "Leave --resume out"):
        RunFolder.resume(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_similar_folder_is_suggested(tmp_path: Path) -> None:
    for name, file in (("first", "config.yaml"), ("frist-notes", "notes.txt"), ("export", "fedspan.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    missing, meant = tmp_path / "firsst", tmp_path / "first"
    described = f"there is no folder {str(missing)!r}. Did you mean {str(meant)!r}?"
    assert describe_missing_run(missing) == described
    for read in (RunFolder.resume, read_report, read_status, lambda path: read_runs([path]), fedspan.diagnose):
        with pytest.raises(FedspanError, match=re.escape(described)):
            read(missing)
    with pytest.raises(FedspanError, match=re.escape(f"Did you mean {str(tmp_path / 'export')!r}? Expected a run")):
        fedspan.predict(tmp_path / "exprt", ["word1"])
    assert suggest_folder(tmp_path / "frist-notes") == ""
    assert suggest_folder(tmp_path / "no" / "first") == ""


LOCK_HOLDER = """
import sys
from fedspan.run_folder import (RunFolder)
with RunFolder.resume(sys.argv[1]):
    print("holding", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, CONFIG).close()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", LOCK_HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout.readline() == "holding\n"
        with pytest.raises(FedspanError, match=f"process {other.pid} is working on this run"):
            RunFolder.resume(tmp_path)
        with refused("run folder", "is working on this run"):  # being refused costs the holder no lock
            RunFolder.resume(tmp_path)
        other.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
    RunFolder.resume(tmp_path).close()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x\ny\n"])
def test_a_lock_holder_that_left_no_name(tmp_path: Path, content: bytes) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.lock.write_bytes(content)
        with refused("run folder", "another process is working on this run"):
            RunFolder.resume(tmp_path)


def test_a_lock_holder_on_another_machine(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.lock.write_text("12\nhospital-3\n")
        with refused("run folder", "process 12 on hospital-3"):
            RunFolder.resume(tmp_path)


def test_a_failed_creation_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refusing(errno.ENOSPC))
        with refused("run folder", r"the disk is full\. Choose another folder"):
            RunFolder.create(tmp_path, CONFIG)
    RunFolder.create(tmp_path, CONFIG).close()


def refusing(code: int) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.write_json(run.report, {"score": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, step, refusing(errno.ENOSPC))
            with refused("run folder", r"the disk is full\. The last finished round is intact") as caught:
                run.write_json(run.report, {"score": 2})
        assert str(tmp_path) in str(caught.value)
        assert run.read_json(run.report) == {"score": 1}
        assert not list(tmp_path.glob("*.tmp-*"))


def test_json_files_are_strict(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.write_json(
            run.report, {"loss": float("nan"), "bound": [float("inf"), -1.5], "by_round": {3: (1, 2)}, "s": "é"}
        )
        assert run.read_json(run.report) == {"loss": None, "bound": [None, -1.5], "by_round": {"3": [1, 2]}, "s": "é"}
        with pytest.raises(TypeError):
            run.write_json(run.report, {"tensor": torch.ones(1)})


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[" * 100_000, None])
def test_json_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None) -> None:
    run = RunFolder(tmp_path)
    if content is not None:
        run.partition.write_bytes(content)
    with pytest.raises(FedspanError, match=r"partition\.json"):
        run.read_json(run.partition)
