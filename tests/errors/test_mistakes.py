"""The form of error messages; every mistake of the catalogue is answered with one line, and messages.md has it."""

import ast
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

import fedspan
from fedspan.clients.store import LostStateError
from fedspan.deployment.handshake import Introduction
from fedspan.errors import (
    FedspanError,
    build_install_command,
    escape_controls,
    find_similar,
    require_printable,
    suggest_nearest,
)
from fedspan.federation.protocol import _ReplyHeader
from fedspan.files import DamagedFileError
from helpers.mistakes import SECTIONS
from helpers.mistakes.messages import PAGE, format_entry, format_row
from helpers.mistakes.world import Mistake, World

SOURCE = Path(fedspan.__file__).parent


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FedspanError("a.b", 3, "at most 2"), "`a.b`: 3 is not accepted. Expected at most 2."),
        (FedspanError("--out", None, "a folder"), "`--out`: no value is given. Expected a folder."),
        (FedspanError("a", "x", problem="no column named 'x'"), "`a`: no column named 'x'."),
        (FedspanError("a", "x", "one of y", problem="no 'x'."), "`a`: no 'x'. Expected one of y."),
        (FedspanError("a", "x", problem="no 'x'. Did you mean 'y'?"), "`a`: no 'x'. Did you mean 'y'?"),
        (FedspanError("a", "line\nbreak", "one\n line"), r"`a`: 'line\nbreak' is not accepted. Expected one line."),
    ],
)
def test_a_message_is_one_line_of_sentences(error: FedspanError, message: str) -> None:
    assert str(error) == message


def test_errors_of_all_classes_pass_between_processes() -> None:
    errors = (
        FedspanError("a.b", 3, "at most 2"),
        LostStateError("site-1", 3, "it is missing"),
        DamagedFileError(Path("f"), "cut"),
    )
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_values_without_a_representation_are_named_by_their_type() -> None:
    assert str(FedspanError("seed", 10**5000, "less")) == "`seed`: <int> is not accepted. Expected less."
    assert str(FedspanError("name", "x" * 500, "less")) == f"`name`: '{'x' * 196}... is not accepted. Expected less."
    assert str(FedspanError("name", "\ud7ff\udcff", "text")).encode()


def test_an_error_can_be_moved_and_annotated() -> None:
    error = FedspanError("data.label", "x", "one of y")
    assert str(error.relocate("label")) == "`label`: 'x' is not accepted. Expected one of y."
    moved = error.relocate(note="This is in the run a.")
    assert str(moved) == "`data.label`: 'x' is not accepted. Expected one of y. This is in the run a."
    assert (moved.field, moved.value, moved.expected) == ("data.label", "x", "one of y. This is in the run a.")


def test_the_nearest_names_are_suggested() -> None:
    assert suggest_nearest("lable", ["text", "label"]) == "Did you mean 'label'?"
    assert (
        suggest_nearest("learning_rate", ["lr", "min_lr", "local_steps"])
        == "Did you mean 'lr', 'min_lr' or 'local_steps'?"
    )
    assert suggest_nearest("fedsa", ["fedsa-lora", "qqq"]) == "Did you mean 'fedsa-lora'?"
    assert suggest_nearest("zzz", ["a", "b"]) == "Possible values: 'a', 'b'."
    assert suggest_nearest("zzz", "abcdefgh") == "Possible values: 'a', 'b', 'c', 'd', 'e', 'f', ..."
    assert suggest_nearest("zzz", []) == ""
    assert find_similar("zzz", "ab") == []


def test_a_name_has_no_invisible_characters() -> None:
    assert require_printable("klinik-süd 2") == "klinik-süd 2"
    with pytest.raises(ValueError, match=r"invisible characters, not a\\u200db"):
        require_printable("a\u200db")


def test_texts_of_other_machines_do_nothing_to_a_terminal() -> None:
    attack = "\x1b]0;owned\x07\x1b[2J\r\n\u202etxt\x9b31m\u200b\ud800 ok"
    shown = escape_controls(attack)
    assert shown == r"\x1b]0;owned\x07\x1b[2J\r\n\u202etxt\x9b31m\u200b\ud800 ok"
    assert shown.isprintable()
    assert escape_controls(shown) == shown
    assert escape_controls("Größe zu klein: 3 < 5 — 日本") == "Größe zu klein: 3 < 5 — 日本"


@pytest.mark.parametrize("place", ["field", "value", "expected", "problem"])
def test_an_error_shows_texts_of_other_machines_and_obeys_none(place: str) -> None:
    texts: dict[str, str] = {"field": "data.label", "value": "lable", "expected": "a name", place: "\x1b[2J\u202ex"}
    error = FedspanError(texts["field"], texts["value"], texts["expected"], problem=texts.get("problem"))
    assert r"\x1b[2J\u202ex" in str(error)
    assert str(error).isprintable()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (_ReplyHeader, {"task": "train", "round": 0, "attempt": 0, "id": "a", "failed": "\x1b[2J"}),
        (Introduction, {"id": "a", "version": "1", "refused": "\x1b[2J"}),
    ],
)
def test_reasons_of_a_node_are_escaped_where_they_are_read(kind: type[BaseModel], values: dict[str, Any]) -> None:
    read = kind.model_validate_json(json.dumps(values))
    assert (getattr(read, "failed", None) or getattr(read, "refused", None)) == r"\x1b[2J"


def phrases() -> list[tuple[str, str]]:
    """Places in the source outside of ``data`` and the literal text of every ``expected`` that is written there."""
    found: list[tuple[str, str]] = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent.name == "data" or path.name == "init.py":
            continue
        text = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text)) if "FedspanError(" in text else ():
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "FedspanError" and len(call.args) > 2:
                literal = call.args[2]
                if isinstance(literal, ast.JoinedStr):
                    parts = [str(part.value) if isinstance(part, ast.Constant) else "X" for part in literal.values]
                    found.append((f"{path.name}:{call.lineno}", "".join(parts)))
                elif isinstance(literal, ast.Constant):
                    found.append((f"{path.name}:{call.lineno}", str(literal.value)))
    return found


def test_what_is_expected_can_follow_the_word_expected() -> None:
    """No clause of its own after a semicolon, no sentence, no advice to leave a field out."""
    clause = r"is|are|it|its|this (is|file|one|model)|no|nothing|left out|needs?|matches|false \w"
    wrong = re.compile(rf"; |^({clause})\b|\. [A-Z]|(?<!\.\.)\.$")
    found = phrases()
    assert len(found) > 80
    assert [f"{place} {phrase}" for place, phrase in found if wrong.search(phrase)] == []


def test_one_function_writes_how_to_install_an_extra() -> None:
    assert build_install_command("web") == "pip install 'fedspan[web]'"
    written = {path for path in SOURCE.rglob("*.py") if "pip install 'fedspan" in path.read_text(encoding="utf-8")}
    assert written == {SOURCE / "errors.py"}


ROWS = [(title, mistake) for title, mistakes in SECTIONS.items() for mistake in mistakes]


@pytest.fixture(scope="module")
def tables() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, *lines = part.splitlines()
        found[title] = [line for line in lines if line.startswith("| ")][1:]
    return found


@pytest.mark.parametrize(("title", "mistake"), ROWS, ids=[mistake.what for _, mistake in ROWS])
def test_a_mistake_is_answered_as_the_file_says(
    world: World, tables: dict[str, list[str]], title: str, mistake: Mistake
) -> None:
    field, message = world.said(mistake)
    assert field == mistake.field
    assert message.splitlines() == [message]
    assert message.startswith(f"`{field}`: ")
    assert format_row(mistake, message) in tables[title], "python tests/helpers/mistakes/messages.py writes it"
    entry = format_entry(mistake, message)
    assert entry is None or entry in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_file_has_these_rows_and_no_others(tables: dict[str, list[str]]) -> None:
    assert {title: len(rows) for title, rows in tables.items()} == {
        title: len(mistakes) for title, mistakes in SECTIONS.items()
    }
    for title, mistakes in SECTIONS.items():
        assert all(len(cell) <= 120 for line in tables[title] for cell in line.strip("| ").split(" | ")), title
        assert [line.split(" | ")[0] for line in tables[title]] == [f"| {mistake.what}" for mistake in mistakes]


def test_no_two_mistakes_of_a_section_have_one_name() -> None:
    for mistakes in SECTIONS.values():
        assert len({mistake.what for mistake in mistakes}) == len(mistakes)


def test_the_command_line_says_it_behind_error_and_exits_with_2(tmp_path: Path) -> None:
    from fedspan.cli import app

    result = CliRunner().invoke(app, ["run", str(tmp_path / "no.yaml")])
    line, page = result.stderr.splitlines()
    assert (result.exit_code, page) == (2, f"see {Path(__file__).parents[2] / 'docs' / 'config.md'}")
    assert line.startswith("error: `config`: ")
    assert "Traceback" not in result.output
