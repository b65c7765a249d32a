"""Who participates, and rounds run in turns."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.stage import read_processor_seconds

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contender:
    """A program that runs rounds on request.

    Args:
        name: Name in the tables.
        command: Command that starts it.
        variables: Variables of its environment.
    """

    name: str
    command: Sequence[str]
    variables: Mapping[str, str]


@dataclass
class Measured:
    """The answers of one contender.

    Args:
        ready: Line after the warm-up: ``losses`` of its rounds, ``warm_up`` seconds, ``first`` client's loss.
        rounds: One line for each: ``seconds``, ``processor`` seconds, ``examples``, ``loss``, maybe ``training``.
    """

    ready: dict[str, Any]
    rounds: list[dict[str, float]] = field(default_factory=list)

    def milliseconds(self, key: str = "seconds") -> list[float]:
        """Per example, by round."""
        return [1000 * round[key] / round["examples"] for round in self.rounds if key in round]


def get_fedspan_variables(threads: int) -> dict[str, str]:
    """Environment variables of fedspan's own processes."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


class _Process:
    """A contender's process with its children, in a session of their own.

    They are stopped while others run: Ray's processes poll even when there is nothing to do.
    """

    def __init__(self, contender: Contender, log: Path) -> None:
        self.contender, self.log = contender, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                list(contender.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=dict(contender.variables),
                start_new_session=True,
            )

    def hear(self) -> dict[str, Any]:
        """The next line, after which all stands still.

        Raises:
            RuntimeError: If the process has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.contender.name} ended with {self.process.wait()}; see {self.log}")
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def run_round(self) -> dict[str, float]:
        """One round, with the processor's seconds that it took beside those of the clock."""
        assert self.process.stdin is not None
        before = read_processor_seconds(self.process.pid)
        self._signal(signal.SIGCONT)
        self.process.stdin.write("round\n")
        self.process.stdin.flush()
        answer = self.hear()
        return {**answer, "processor": read_processor_seconds(self.process.pid) - before}

    def close(self) -> None:
        """End the session: no more answers are awaited."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for pid in list_session_members(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def list_session_members(session: int) -> list[int]:
    """Ids of the processes of a session."""
    processes: list[int] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):  # ended in between
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[3]) == session:
                processes.append(int(folder.name))
    return processes


def take_turns(contenders: Sequence[Contender], repetitions: int, logs: Path) -> dict[str, Measured]:
    """A round of everybody, and again: what slows the machine for a while slows all of a repetition alike.

    Args:
        contenders: The contenders; their warm-ups come first, one after another.
        repetitions: Number of timed rounds of each.
        logs: Folder for what the processes print.
    """
    with ExitStack() as stack:
        processes: dict[str, _Process] = {}
        results: dict[str, Measured] = {}
        for number, contender in enumerate(contenders):
            process = _Process(contender, logs / f"{number:02d}.log")
            stack.callback(process.close)
            processes[contender.name] = process
            results[contender.name] = Measured(process.hear())
            print(f"  {contender.name}: {results[contender.name].ready}", flush=True)
        for repetition in range(repetitions):
            for name, process in processes.items():
                results[name].rounds.append(process.run_round())
            line = ", ".join(f"{name} {result.milliseconds()[-1]:.2f}" for name, result in results.items())
            print(f"  repetition {repetition + 1}, ms an example: {line}", flush=True)
    return results


def run_once(script: str, arguments: Sequence[str], threads: int, log: Path) -> dict[str, Any]:
    """A process of fedspan that says one line and ends."""
    command = [sys.executable, str(HERE / script), *arguments]
    process = _Process(Contender(script, command, get_fedspan_variables(threads)), log)
    try:
        return process.hear()
    finally:
        process.close()
