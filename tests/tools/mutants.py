"""Measure the power of the tests by mutation: the share of small faults in the source that a quick test detects.

    python tests/tools/mutants.py --work FOLDER                      # 200 mutants, seed 0; run again, it goes on
    python tests/tools/mutants.py --work FOLDER --table              # only the table
    cp BEFORE/sample.json AFTER/ && python tests/tools/mutants.py --work AFTER    # the same mutants after a change

A mutant is one change within a function of the packages below (``mutator.Mutator`` lists the operators). The sample is
stratified: each package has its share of the lines. All mutants are compiled into the modules at import, each behind a
switch: one run of the quick tests records which tests reach which mutant, and a process that has collected the tests is
forked for every mutant. A mutant is run against the tests that reach it, at most the 60 fastest and 40 others from
different files, until the first failure. A timeout or a crash is a kill, too. Not detected is what a test observes only
in another process (Ray's workers, subprocesses) or at import. Every test that killed a mutant is run once
more without any: if it fails, it does not count.

FOLDER has sample.json, coverage-*.json and fates.jsonl, a line for every mutant as soon as its fate is known.
tests/tools/mutants.yaml has the survivors that no input could tell from the original, with the reason. Needs os.fork.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import yaml
from mutator import SOURCE, SWITCH, mutate

HERE = Path(__file__).resolve().parent
PACKAGES = ("core", "methods", "wrappers", "federation/aggregation", "federation/secagg", "clients", "crypto")
FASTEST, SPREAD = 60, 40
"""Largest number of a mutant's tests: the fastest ones, and a draw from the files of the others."""
SECONDS, FACTOR = 60.0, 5.0
"""A mutant times out after this, or after this multiple of its tests' recorded durations if that is more."""
KILLS = ("killed", "timeout", "crash")


def draw_sample(count: int, seed: int) -> list[str]:
    """Draw the ids of mutants, for each package in proportion to its lines."""
    modules = [sorted((SOURCE / package).rglob("*.py")) for package in PACKAGES]
    lines = [sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths) for paths in modules]
    rng = random.Random(seed)
    sample: list[str] = []
    for index, paths in enumerate(modules):
        end = round(count * sum(lines[: index + 1]) / sum(lines))
        sample += rng.sample([id for path in paths for id in mutate(path)[1]], end - len(sample))
    return sample


def read_fates(work: Path) -> dict[str, dict[str, Any]]:
    """Read the last fate of every mutant, and of every test that fails without any."""
    path = work / "fates.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {fate["id"]: fate for fate in map(json.loads, lines)}


def add_fate(work: Path, **fate: object) -> None:
    with (work / "fates.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(fate) + "\n")


def get_file(test: str) -> str:
    return test.partition("::")[0]


def choose_tests(names: Iterable[str], durations: Mapping[str, float], seed: int) -> list[str]:
    """Choose the tests to run, those of a file side by side, and the fastest files first."""
    ordered = sorted(names, key=lambda name: (durations[name], name))
    others = ordered[FASTEST:]
    random.Random(seed).shuffle(others)
    chosen = [*ordered[:FASTEST], *list({get_file(name): name for name in others}.values())[:SPREAD]]
    totals: Counter[str] = Counter()
    for name in chosen:
        totals[get_file(name)] += durations[name]
    return sorted(chosen, key=lambda name: (totals[get_file(name)], name))


class Plugin:
    """Pytest's plugin, which records the tests of each mutant, or forks a process for each.

    Args:
        work: Folder of the sample and of all that is known about it.
        records: Whether the tests are run and recorded.
    """

    def __init__(self, work: Path, records: bool) -> None:
        self.work, self.records = work, records
        self.sample: list[str] = json.loads((work / "sample.json").read_text(encoding="utf-8"))
        self.numbers = {id: number for number, id in enumerate(self.sample)}
        self.active: int | None = None
        self.context = ""
        self.reached: defaultdict[str, set[str]] = defaultdict(set)
        self.durations: Counter[str] = Counter()
        self.failures: list[str] = []
        self.caches: list[Any] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """Find a module of the packages, for ``sys.meta_path``, and have it loaded with its mutants."""
        spec = PathFinder.find_spec(name, path) if name.startswith("fedspan.") else None
        if spec is None or not any(SOURCE / package in Path(str(spec.origin)).parents for package in PACKAGES):
            return None
        spec.loader = Loader(name, str(spec.origin), self)
        return spec

    def is_active(self, number: int) -> bool:
        """Whether a mutant that is reached is the one to run."""
        if self.context:
            self.reached[self.sample[number]].add(self.context)
        return number == self.active

    @contextlib.contextmanager
    def _within(self, context: str) -> Iterator[None]:
        outer, self.context = self.context, context
        yield
        self.context = outer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record what a test reaches; what earlier ones have cached is computed again."""
        for cached in self.caches:
            cached.cache_clear()
        with self._within(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Record what a shared fixture reaches, for all tests that use it."""
        if fixturedef.scope == "function":
            return (yield)
        with self._within(f"{fixturedef.baseid}\0{fixturedef.argname}"):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test's duration and failure; a mutant's process ends with the first one."""
        self.durations[report.nodeid] += report.duration
        if report.failed:
            self.failures.append(report.nodeid)
            if self.active is not None:
                self._end_process()

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded."""
        if self.records:
            passed = {name: seconds for name, seconds in self.durations.items() if name not in self.failures}
            reached = {id: sorted(contexts) for id, contexts in self.reached.items()}
            text = json.dumps({"reached": reached, "passed": passed, "failed": self.failures}, indent=1)
            (self.work / f"coverage-{os.getpid()}.json").write_text(text, encoding="utf-8")

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the mutants instead of the tests, until all their killers pass without any."""
        if self.records or session.testsfailed:
            return None
        items = {item.nodeid: item for item in session.items}
        tests = self._find_tests(items)
        while True:
            fates = read_fates(self.work)
            unreliable = {id for id, fate in fates.items() if fate["fate"] == "unreliable"}
            pending = [id for id in self.sample if id not in fates or fates[id]["test"] in unreliable]
            if not pending:
                return True
            random.Random(0).shuffle(pending)  # stopped early, the fates are still those of a sample of all packages
            for id in pending:
                self._run_mutant(id, [name for name in tests[id] if name not in unreliable], items)
            killers = {str(fate["test"]) for fate in read_fates(self.work).values() if fate["fate"] == "killed"}
            process = self._fork([items[name] for name in sorted(killers)], None)
            os.waitpid(process, 0)
            for test in self._read_failures(process):
                add_fate(self.work, id=test, fate="unreliable", test=test)

    def _find_tests(self, items: Mapping[str, pytest.Item]) -> dict[str, list[str]]:
        """Find the tests that reach each mutant, themselves or by a shared fixture, and pass without it."""
        reached: defaultdict[str, set[str]] = defaultdict(set)
        for path in self.work.glob("coverage-*.json"):
            record = json.loads(path.read_text(encoding="utf-8"))
            self.durations |= record["passed"]
            for id, contexts in record["reached"].items():
                reached[id].update(contexts)
        used = {name: getattr(item, "fixturenames", ()) for name, item in items.items() if name in self.durations}
        tests: dict[str, list[str]] = {}
        for id in self.sample:
            shared = [context.split("\0") for context in reached[id] if "\0" in context]
            tests[id] = [
                name
                for name, fixtures in used.items()
                if name in reached[id] or any(name.startswith(base) and fixture in fixtures for base, fixture in shared)
            ]
        return tests

    def _run_mutant(self, id: str, names: Sequence[str], items: Mapping[str, pytest.Item]) -> None:
        """Run tests that reach a mutant, and add its fate."""
        number = self.numbers[id]
        chosen = choose_tests(names, self.durations, number)
        fate = {"id": id, "tests": len(chosen), "reached_by": len(names), "test": ""}
        if not chosen:
            add_fate(self.work, **fate, fate="not covered")
            return
        limit = max(SECONDS, FACTOR * sum(self.durations[name] for name in chosen))
        began, ended, status = time.monotonic(), 0, 0
        process = self._fork([items[name] for name in chosen], number)
        while not ended and (seconds := time.monotonic() - began) < limit:
            time.sleep(0.05)
            ended, status = os.waitpid(process, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # with what its tests have started
        if not ended:
            os.waitpid(process, 0)
        failures = self._read_failures(process)
        outcome = "killed" if failures else "timeout" if not ended else "crash" if status else "survived"
        add_fate(self.work, **fate | {"test": failures[0] if failures else ""}, fate=outcome, seconds=seconds)

    def _fork(self, items: Sequence[pytest.Item], active: int | None) -> int:
        """Run tests in a new process, with one mutant active or none."""
        if process := os.fork():
            return process
        os.setsid()
        self.active = active
        folder = self.work / f"process-{os.getpid()}"
        folder.mkdir()
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
        try:
            for item, following in zip(items, [*items[1:], None], strict=False):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._end_process()
        finally:
            os._exit(2)

    def _end_process(self) -> None:
        text = json.dumps(self.failures)
        (self.work / f"process-{os.getpid()}" / "failures.json").write_text(text, encoding="utf-8")
        os._exit(0)

    def _read_failures(self, process: int) -> list[str]:
        """Read the failures of a process that has ended, and remove its files."""
        folder = self.work / f"process-{process}"
        path = folder / "failures.json"
        failures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        shutil.rmtree(folder, ignore_errors=True)
        return failures


class Loader(SourceFileLoader):
    """Loads a module with its mutants, never from stored bytecode."""

    def __init__(self, name: str, path: str, plugin: Plugin) -> None:
        super().__init__(name, path)
        self.plugin = plugin

    def get_code(self, fullname: str) -> CodeType:
        return compile(mutate(Path(self.path), self.plugin.numbers)[0], self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, SWITCH, self.plugin.is_active)
        super().exec_module(module)
        self.plugin.caches += [value for value in vars(module).values() if hasattr(value, "cache_clear")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", type=Path)
    parser.addoption("--record", action="store_true")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before any file of the tests imports a module of the package."""
    options = early_config.known_args_namespace
    plugin = Plugin(options.mutants, options.record)
    early_config.pluginmanager.register(plugin)
    sys.meta_path.insert(0, plugin)


def run_pytest(work: Path, *arguments: str) -> None:
    paths = os.pathsep.join([str(HERE), str(SOURCE.parent)])
    options = ["-p", "mutants", "-p", "no:cacheprovider", f"--mutants={work}", "-n", "0", *arguments]
    command = [sys.executable, "-m", "pytest", *options]
    subprocess.run(command, cwd=HERE.parents[1], env={**os.environ, "PYTHONPATH": paths}, check=False)


def print_table(work: Path) -> None:
    """Print the fates by package, as a Markdown table."""
    sample: list[str] = json.loads((work / "sample.json").read_text(encoding="utf-8"))
    fates = read_fates(work)
    equivalent = set(yaml.safe_load((HERE / "mutants.yaml").read_text(encoding="utf-8")) or ())
    existing = {id for package in PACKAGES for path in (SOURCE / package).rglob("*.py") for id in mutate(path)[1]}
    print("| package | mutants | killed | survived | not covered | equivalent | killed of the others |")
    print("|---|---|---|---|---|---|---|")
    for package in ("", *PACKAGES):
        counts: Counter[str] = Counter()
        for id in sample:
            if id.startswith(f"{package}/" if package else ""):
                fate = fates[id]["fate"] if id in fates else "unknown"
                counts["killed" if fate in KILLS else "equivalent" if id in equivalent else fate] += 1
                counts["gone"] += id not in existing
        others = counts["killed"] + counts["survived"] + counts["not covered"]
        shown = [counts[name] for name in ("killed", "survived", "not covered", "equivalent")]
        share = f"{counts['killed'] / max(others, 1):.1%}"
        print("|", " | ".join(map(str, [package or "all", others + counts["equivalent"], *shown, share])), "|")
    tried = [fates[id] for id in sample if id in fates]
    print()
    print(f"Timeouts: {sum(fate['fate'] == 'timeout' for fate in tried)}.")
    print(f"Crashes: {sum(fate['fate'] == 'crash' for fate in tried)}.")
    print(f"Reached by more tests than were run: {sum(fate['tests'] < fate['reached_by'] for fate in tried)}.")
    print(f"No longer in the source: {len(set(sample) - existing)}.")


def main() -> None:
    """Serve as the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the sample and the fates")
    parser.add_argument("--count", type=int, default=200, help="mutants of a new sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("tests", nargs="*", help="paths of the tests; default: all quick ones")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "sample.json").exists():
        sample = draw_sample(arguments.count, arguments.seed)
        (work / "sample.json").write_text(json.dumps(sample, indent=1), encoding="utf-8")
    if not arguments.table:
        if not any(work.glob("coverage-*.json")):
            run_pytest(work, "--record", *arguments.tests)
        run_pytest(work, *arguments.tests)
    print_table(work)


if __name__ == "__main__":
    main()
