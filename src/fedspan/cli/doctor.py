"""``fedspan doctor``: a check of the installation on this machine: packages, accelerator, memory, disk, port, model."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Literal

import typer
from packaging.requirements import Requirement
from rich.text import Text

from fedspan.cli.commands import Json, option, register_command
from fedspan.cli.formatting import create_console, create_table
from fedspan.errors import FedspanError, build_install_command

_LEAST_MEMORY = 4.0
"""Free memory in GiB: torch, Transformers and a small model."""
_LEAST_DISK = 5.0
"""Free disk space in GiB: a model of a few hundred million parameters, and checkpoints."""
_NOT_FOR_USERS = {"dev", "docs", "fuzz"}
_PORT = 9092
_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("MISSING", "red")}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        state: ``ok``; ``missing``, which prevents something from working; ``note``, which may be intended.
        advice: Advice for the user; empty if nothing is to be done.
    """

    name: str
    state: Literal["ok", "missing", "note"]
    finding: str
    advice: str = ""


def run_checks(folder: Path) -> tuple[Check, ...]:
    """Run all checks."""
    return (
        *_check_packages(),
        *_check_torch(),
        _check_memory(),
        _check_disk(folder),
        _check_port(),
        _check_model(),
        _check_hub(),
    )


def _check_packages() -> Iterator[Check]:
    """Check the core packages, and the packages of each extra, with one result for each group."""
    core: list[Requirement] = []
    extras: dict[str, list[Requirement]] = {}
    for text in requires("fedspan") or ():
        requirement = Requirement(text)
        name = _get_extra(requirement)
        if name is None:
            core.append(requirement)
        elif name not in _NOT_FOR_USERS:
            extras.setdefault(name, []).append(requirement)
    mismatches = _describe_wrong(core)
    versions = (
        "; ".join(mismatches)
        or f"{version('fedspan')} with torch {version('torch')}, Python {platform.python_version()}"
    )
    yield Check("fedspan", "missing" if mismatches else "ok", versions, build_install_command() if mismatches else "")
    for name, requirements in sorted(extras.items()):
        mismatches = _describe_wrong(requirements)
        versions = "; ".join(mismatches) or ", ".join(
            f"{installed_requirement.name} {version(installed_requirement.name)}"
            for installed_requirement in requirements
        )
        yield Check(
            f"extra {name}",
            "note" if mismatches else "ok",
            versions,
            build_install_command(name) if mismatches else "",
        )


def _get_extra(requirement: Requirement) -> str | None:
    """Return the extra that a requirement belongs to; None: the core."""
    _, separator, rest = str(requirement.marker or "").partition("extra ==")
    return rest.strip(" \"'") if separator else None


def _describe_wrong(requirements: Sequence[Requirement]) -> list[str]:
    mismatches: list[str] = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": _get_extra(requirement) or ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            mismatches.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            mismatches.append(f"{requirement.name} is {installed}, not {requirement.specifier}")
        nested = [Requirement(text) for text in (requires(requirement.name) or ()) if requirement.extras]
        mismatches += _describe_wrong(
            [
                requirement_of_extra
                for requirement_of_extra in nested
                if _get_extra(requirement_of_extra) in requirement.extras
            ]
        )
    return mismatches


def _check_torch() -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        yield Check("accelerator", "ok", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    elif torch.backends.mps.is_available():
        yield Check("accelerator", "ok", "Apple's (mps)")
    else:
        description = f"none; {torch.get_num_threads()} threads on {os.cpu_count()} cores"
        built = "" if torch.version.cuda or torch.version.hip else "this torch is built for CPUs (pytorch.org: others)"
        yield Check("accelerator", "note", description, built)


def _check_memory() -> Check:
    names = ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES", "SC_PAGE_SIZE")
    try:
        free, total, page = (os.sysconf(name) for name in names)
    except (AttributeError, ValueError, OSError):
        return Check("memory", "note", "not known on this system")
    free, total = free * page / 2**30, total * page / 2**30
    low = free < _LEAST_MEMORY
    advice = (
        f"{_LEAST_MEMORY:g} GiB is the least that small runs need; fedspan plan prints what a run needs" if low else ""
    )
    return Check("memory", "note" if low else "ok", f"{free:.1f} of {total:.1f} GiB free", advice)


def _check_disk(folder: Path) -> Check:
    existing = next((parent for parent in (folder, *folder.resolve().parents) if parent.is_dir()), Path("/"))
    free = shutil.disk_usage(existing).free / 2**30
    if not os.access(existing, os.W_OK):
        return Check("disk", "missing", f"{existing} can't be written", "choose another folder, or its permissions")
    low = free < _LEAST_DISK
    return Check(
        "disk",
        "note" if low else "ok",
        f"{free:.1f} GiB free in {existing.resolve()}",
        "models are large" if low else "",
    )


def _check_port() -> Check:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", _PORT))
        except OSError as error:
            advice = "fedspan server --port N, if it is not fedspan's own"
            return Check("port", "note", f"{_PORT} is taken ({error.strerror})", advice)
    return Check("port", "ok", f"{_PORT} is free for fedspan server")


def _check_model() -> Check:
    """Check the model of the demo and of configs that name no model."""
    from fedspan.models.names import resolve_model

    try:
        resolve_model("builtin:all-minilm-l6-v2")
    except FedspanError as error:
        return Check("demo model", "note", "not here; fedspan demo needs it, your own models don't", str(error))
    return Check("demo model", "ok", "all-MiniLM-L6-v2, its weights as published")


def _check_hub() -> Check:
    cache = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    description = "offline by HF_HUB_OFFLINE" if offline else "contacted if a config names a model or data set on it"
    return Check("hub", "note" if offline else "ok", f"{description}; cache in {cache}")


@register_command("doctor", "fedspan doctor", "fedspan doctor --folder /data/runs --json")
def doctor(
    folder: Annotated[Path, option("DIR", "Folder for runs.")] = Path(),
    as_json: Json = False,
) -> None:
    """Check the installation: packages and extras, accelerator, memory, disk, port, models. Nothing is changed.

    Exits with 1 if a required component is missing.
    """
    screen = create_console()
    screen.quiet = as_json
    with screen.status("checking the installation"):
        results = run_checks(folder)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in results], indent=2, ensure_ascii=False))
    else:
        table = create_table()
        table.add_column("", no_wrap=True)
        table.add_column("component", style="cyan", no_wrap=True)
        table.add_column("finding", overflow="fold")
        for check in results:
            text, style = _MARKS[check.state]
            table.add_row(Text(text, style), check.name, check.finding + (f"\n{check.advice}" if check.advice else ""))
        screen.print(table)
    if any(check.state == "missing" for check in results):
        raise typer.Exit(1)
