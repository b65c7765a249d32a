"""The digests' cases and what makes records differ; every mutant's change, only while it is active, and its fate."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import digest_cases
import digests
import pytest

from fedspan.tasks.registry import BUILT_IN
from fedspan.tasks.trainer import TRAINER


@pytest.mark.parametrize("host", ["loop", "batched"])
def test_every_task_has_a_case(host: str, tmp_path: Path) -> None:
    configs = digest_cases.build_configs(tmp_path, host).values()
    tasks = {values.get("task", "sequence-classification") for values in configs}
    assert tasks == {task.name for task in BUILT_IN} - ({TRAINER.name} if host != "loop" else set())


def test_a_record_of_lists_of_words_is_equal_to_itself_and_to_no_other(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{}, {}]
    for number, record in enumerate(records):
        folder = tmp_path / str(number)
        (folder / "inputs").mkdir(parents=True)
        digests.save_inputs(folder / "inputs")
        digests.record_host("loop", folder, "^token-classification$", record.update)
    first, second = ({"loop": record} for record in records)
    assert "refused" not in records[0]["token-classification"]
    assert not list(digests.compare(first, second))
    assert digests.count_compared(first, second) == 1
    (name,) = (name for name in records[1]["token-classification"] if name.startswith("adapter/"))
    records[1]["token-classification"][name]["tensors"].popitem()
    assert len(list(digests.compare(first, second))) == 1


FOLDER = Path(__file__).parent
SOURCE = '''
import logging

log = logging.getLogger("nobody")
LIMIT = 3


class Box:
    """Holds 4 numbers."""

    size: int = 4

    def __init__(self, first: int = 7) -> None:
        self.first = first
        self.calls = []

    def clear(self) -> None:
        self.first = 0
        self.calls.append("clear")

    def __repr__(self) -> str:
        return f"Box({self.first + 1})"


def weigh(value: int, other: int) -> int:
    if value < 0:
        raise ValueError(f"{value + 1} of " + str(2))
    log.info("weighed %d", value * 2)
    total: int = min(value, other)
    total += value
    if value and not other:
        total = 5
    return total


def observe(value: int, other: int) -> object:
    box = Box()
    box.clear()
    try:
        return weigh(value, other), box.first, box.calls
    except ValueError as error:
        return str(error)
'''


@pytest.fixture(scope="module")
def mutator() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import mutator

        yield mutator


def test_every_mutant_changes_a_result_and_none_does_when_it_is_not_active(mutator: Any) -> None:
    found = mutator.Mutator("m.py", SOURCE)
    assert ast.unparse(found.visit(ast.parse(SOURCE))) == ast.unparse(ast.parse(SOURCE))
    assert [id.removeprefix("m.py ").partition(": ")[0] for id in found.ids] == [
        "Box.clear constant 1",
        "Box.clear statement 1",
        "Box.clear statement 2",
        "weigh constant 1",
        "weigh compare 1",
        "weigh guard 1",
        "weigh extreme 1",
        "weigh arithmetic 1",
        "weigh statement 1",
        "weigh not 1",
        "weigh logic 1",
        "weigh constant 2",
        "weigh statement 2",
        "weigh result 1",
        "observe statement 1",
    ]
    tree = mutator.Mutator("m.py", SOURCE, {id: number for number, id in enumerate(found.ids)}).visit(ast.parse(SOURCE))
    code = compile(ast.fix_missing_locations(tree), "m.py", "exec")

    def observe(active: int | None) -> list[object]:
        module: dict[str, Any] = {mutator.SWITCH: lambda number: number == active}
        exec(code, module)
        return [module["observe"](value, other) for value, other in ((-1, 2), (0, 3), (2, 0), (2, 4), (4, 2))]

    original: dict[str, Any] = {}
    exec(SOURCE, original)
    assert observe(None) == [original["observe"](*pair) for pair in ((-1, 2), (0, 3), (2, 0), (2, 4), (4, 2))]
    for number, id in enumerate(found.ids):
        assert observe(number) != observe(None), id


@pytest.mark.slow
def test_fates_of_two_mutants(mutator: Any, tmp_path: Path) -> None:
    ids = mutator.mutate(mutator.SOURCE / "crypto" / "masks.py")[1]
    killed = next(id for id in ids if "add_mask statement" in id)
    equivalent = next(id for id in mutator.mutate(mutator.SOURCE / "crypto" / "shares.py")[1] if "strict=True" in id)
    (tmp_path / "sample.json").write_text(json.dumps([killed, equivalent]))
    command = [sys.executable, str(FOLDER / "mutants.py"), "--work", str(tmp_path), "tests/crypto"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| crypto | 2 | 1 | 0 | 0 | 1 | 100.0% |" in table, table
    fates = [json.loads(line) for line in (tmp_path / "fates.jsonl").read_text().splitlines()]
    assert {fate["id"]: fate["fate"] for fate in fates} == {killed: "killed", equivalent: "survived"}
    assert fates[0]["test"].startswith("tests/crypto/test_crypto.py::")
