"""Every code block of README.md, CONTRIBUTING.md and docs/ does what its page says; so do notebooks' cells.

Commands and Python are run, configs are parsed (those of methods, privacy and simulation run, too), and pieces of a
module are compared with it.
"""

import csv
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub.constants
import nbformat
import openpyxl
import pytest
import ray
import torch
import yaml
from click.testing import CliRunner
from ray.cluster_utils import Cluster
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import fedspan
from fedspan.config import parse_config
from fedspan.config.node import NodeConfig, load_node
from fedspan.core.method import Method
from fedspan.deployment.node import NodeService
from fedspan.methods import registry
from fedspan.transports.http import node as nodes
from fedspan.transports.http.admissions import read_admissions
from fedspan.transports.http.server import prepare_folder
from helpers import tiny, tiny_decoders
from helpers.code_blocks import COMMANDS, PAGES, ROOT, Block, blocks_of, calls
from helpers.command_line import done, get_program
from helpers.hub import save_hub
from helpers.node_service import introduced
from helpers.scripts import load_script

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
DEPLOYED = (
    *("admit", "approve", "audit", "budget", "flower-app", "health", "host"),
    *("join", "renew", "revoke", "server", "status", "submit"),
)
FRAGMENTS = {
    Path("docs/adding-a-method.md"): (
        "src/fedspan/methods/ffa_lora.py",
        "src/fedspan/methods/pfedlora.py",
        "src/fedspan/methods/registry.py",
    ),
    Path("docs/your-task.md"): ("examples/own_task.py",),
    Path("docs/models.md"): ("examples/plain_pytorch.py",),
}
"""Pages whose Python is a module in pieces, and the modules."""
TRANSCRIPT = Path("docs/first-hour.md")
"""A page with what its commands print; test_the_commands_print_what_the_page_says runs it."""
FRONT = Path("README.md")
"""A page with what its Python prints."""
ON_A_CLUSTER = Path("docs/cluster.md")
"""A page whose Python needs a Ray cluster that runs already."""
LOOKING = {Path("docs/report.md"), Path("docs/diagnostics.md"), Path("docs/language-models.md")}
"""Pages about runs that are there."""
NOT_RUN = {"demo", "watch", *DEPLOYED}
"""Commands that take minutes, serve a page until Ctrl-C, or need a federation: their options are only parsed."""
TASK = """
task: own_task
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [" a1", " b2 b3"]
doc_to_target: right
metric_list: [{metric: acc}]
"""
"""One of lm-evaluation-harness, for docs/language-models.md."""

SHAPES = {
    "FacebookAI/roberta-base": {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 50265},
    "meta-llama/Llama-2-7b-hf": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": 11008,
    },
}
"""Models of the hub that pages plan for: folders of the same names, with what is needed of their configs."""


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def stories() -> list[Path]:
    pages = dict.fromkeys(block.page for block in BLOCKS if block.language in ("bash", "python"))
    return [page for page in pages if page not in FRAGMENTS and page != TRANSCRIPT]


def configs_of_runs() -> list[Block]:
    """The configs that a run on any model and data can have: those of methods, privacy and simulated conditions."""
    pages = {"privacy.md", "simulation.md"}
    return [block for block in of("yaml") if block.page.parent.name == "methods" or block.page.name in pages]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_says_what_it_is_and_nothing_to_run_hides_in_a_text(block: Block) -> None:
    assert block.language in ("bash", "python", "yaml", "bibtex", "text", "indented")
    if block.language in ("text", "indented"):
        first = {line.split()[0] for line in block.text.splitlines() if line.strip()}
        prints_commands = block.page.name == "CONTRIBUTING.md" or block.page == TRANSCRIPT
        assert prints_commands or not first & set(COMMANDS)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_a_config_is_one(block: Block) -> None:
    values: dict[str, Any] = yaml.safe_load(block.text)
    if "server" in values:
        NodeConfig.model_validate(values)
        return
    data = values.get("data", {})
    if "dataset" not in data:
        data = {"train": "train.csv", **data}
    if values.get("task") == "causal-lm" and "prompt" not in data and "dataset" not in data:
        data = {"prompt": "{question}", **data}
    model = {"name": "org/model", "target_modules": ["query"], **values.get("model", {})}
    dumped = parse_config({**values, "data": data, "model": model}).model_dump(mode="json")
    assert says(dumped, values)


def says(whole: Any, part: Any) -> bool:
    """Whether checked values hold what a page's config gave; a bare name stands for a section with that name."""
    if isinstance(part, dict):
        return all(name in whole and says(whole[name], value) for name, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(says, whole, part))
    return whole == part or (isinstance(whole, dict) and whole.get("name") == part)


@pytest.mark.parametrize("page", FRAGMENTS, ids=str)
def test_pieces_of_a_module_are_its_own(page: Path) -> None:
    modules = [(ROOT / name).read_text(encoding="utf-8") for name in FRAGMENTS[page]]
    pieces = [block.text for block in blocks_of(page) if block.language == "python"]
    assert pieces
    for piece in pieces:
        parts = [part.strip('\n "') for part in piece.split("...")]
        assert parts[0]
        assert all(any(part in module for module in modules) for part in parts), piece


def test_adding_a_method_explains_all_that_a_method_may_define() -> None:
    page = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
    definable = {name for name in vars(Method) if not name.startswith("_")} - {"declare_claims", "get_rank"}
    assert {"init", "update"} < definable
    assert {name for name in definable if re.search(rf"\b{name}\b", page) is None} == set()


def test_the_lines_of_an_own_trainer_are_the_example_s() -> None:
    """So are the line that they replace, and the config."""
    script = (ROOT / "examples" / "own_trainer.py").read_text(encoding="utf-8")
    lines = {line.strip() for line in script.splitlines()}
    blocks = blocks_of(Path("docs/your-trainer.md"))
    shown = [block.text.splitlines() for block in (*blocks, *blocks_of(FRONT)) if "+ report = fedspan." in block.text]
    diff, in_readme = shown
    assert in_readme == diff
    assert {line[2:].strip() for line in diff} <= lines
    body = script.partition("def federate(")[2].partition("\n\n\n")[0].splitlines()[1:]
    assert [line[2:] for line in diff[1:]] == [line.removeprefix("    ") for line in body if line]
    assert [line[0] for line in diff] == ["-", *"++++"]
    config, _ = [block.text for block in blocks if block.language == "yaml"]
    comment, _, values = (ROOT / "examples" / "own_trainer.yaml").read_text(encoding="utf-8").partition("\n")
    assert comment.startswith("# ")
    assert config.strip() == values.strip()


def test_the_plain_loop_of_an_own_trainer_trains(tiny_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    rows = [{"input_ids": torch.tensor([5, 6, 7, at]), "labels": torch.tensor(at % 4)} for at in range(5, 13)]
    values = {"fedspan": fedspan, "model": tiny.fresh_classifier(tiny_folder / "bert"), "data": rows, "held_out": rows}
    values |= {"loader": DataLoader(rows, batch_size=4), "evaluate": lambda: {"loss": 1.5}}
    values["tokenizer"] = AutoTokenizer.from_pretrained(tiny_folder / "bert")
    (loop,) = [block for block in blocks_of(Path("docs/your-trainer.md")) if "def train(round):" in block.text]
    exec(loop.text, values)
    config = {"model": {"target_modules": tiny.BERT}, "method": {"name": "fedit", "r": 2}, "federation": {"rounds": 1}}
    report = fedspan.simulate(config, tmp_path / "run", trainers={"east": values["trainer"]})
    assert report.scores["validation"]["loss"] == pytest.approx(1.5)


def test_the_first_pieces_of_adding_a_method_are_a_method_that_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file, as a reader pastes them, they train what FFA-LoRA trains."""
    page = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8").partition("\n## 6")[0]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pasted.py").write_text("\n".join(re.findall(r"(?ms)^```python\n(.*?)^```", page)), encoding="utf-8")
    pasted = importlib.import_module("pasted").FFALoRA
    monkeypatch.setitem(registry._methods, "pasted", pasted)
    fedspan.register("pasted", pasted)
    trained: list[dict[str, torch.Tensor]] = []
    for key in ("pasted", "ffa-lora"):
        fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 1}, method={"name": key}), tmp_path / key)
        trained.append(load_file(tmp_path / key / "adapter" / "adapter_model.safetensors"))
    assert trained[0].keys() == trained[1].keys()
    assert all(torch.equal(tensor, trained[1][name]) for name, tensor in trained[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("block", configs_of_runs(), ids=str)
def test_a_config_trains(block: Block, tiny_folder: Path, tmp_path: Path) -> None:
    """Beside the sections of a tiny run, which it changes: two of its rounds."""
    values = yaml.safe_load(block.text)
    values["federation"] = {"rounds": 2, **values.get("federation", {})}
    if values.get("method", {}).get("r", 0) > 16:
        values["method"]["r"] = 16  # no rank fits that is above a layer's shorter side, 16 of the tiny model
    ranks = values["federation"].get("ranks")
    if isinstance(ranks, list):
        values["federation"]["ranks"] = [min(rank, 16) for rank in ranks]
        values["partition"] = {"partitioner": "iid", "clients": len(ranks), "column": None}
        values["federation"] = {"clients_per_round": None, **values["federation"]}
    elif isinstance(values["federation"].get("clients_per_round"), int) or "present" in values.get("simulation", {}):
        values["partition"] = {"partitioner": "iid", "clients": 40, "column": None}
    report = fedspan.run(tiny.settings(tiny_folder, **values), tmp_path / "run")
    assert report.rounds == 2


@pytest.mark.slow  # together they take minutes
@pytest.mark.parametrize("page", stories(), ids=str)
def test_a_page_runs_from_its_first_block_to_its_last(
    page: Path,
    desk: Path,
    hub: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    if page == ON_A_CLUSTER:
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("cluster").address)
    names: dict[str, Any] = {}
    blocks = blocks_of(page)
    for at, block in enumerate(blocks):
        if block.language == "python":
            capsys.readouterr()
            exec(compile(block.text, str(block), "exec"), names)
            if page == FRONT and blocks[at + 1].language == "text":
                printed, shown = capsys.readouterr().out.splitlines(), blocks[at + 1].text.splitlines()
                printed = printed[-len(shown) :]
                assert without_scores(printed) == without_scores(shown)
                assert list_scores(printed) == pytest.approx(list_scores(shown), abs=0.02)
        elif block.language == "bash":
            for command in calls(block.text, desk):
                called(command, block)


def test_the_commands_of_a_data_owner_run_in_the_order_of_the_page(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand in its sentences; between them are the operator's steps, and the server is not reached."""
    page = Path("docs/own-a-node.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nodes, "check_server", lambda *_: "reached")
    monkeypatch.setattr(nodes, "serve", lambda *_: None)
    server = prepare_folder(tmp_path / "fedspan-server", 9092, ["fl.example.org"], insecure=False)
    shutil.copy("fedspan-server/ca.crt", "ca.crt")
    shutil.copy(tiny_folder / "corpus.csv", "messages.csv")
    file = blocks_of(page)[0].text
    Path("node.yaml").write_text(file, encoding="utf-8")
    names, printed = {"NEW": "b.key", "OLD": "node.key", "NEW.pub": "b.key.pub", "NAME": "clinic-a"}, dict[str, str]()
    for command in re.findall(r"(?<!`)`(fedspan [^`]+)`", (ROOT / page).read_text(encoding="utf-8")):
        words = [names.get(word, word) for word in shlex.split(command)]
        if command not in ("fedspan budget", "fedspan submit --offer-base"):  # these name an option or a command
            printed[command] = done(CliRunner().invoke(get_program(), words[1:]))
        if "--new-key" in words:
            admission = ["admit", f"{words[3]}.pub", "--as", "clinic-a"]
            assert CliRunner().invoke(get_program(), admission).exit_code == (2 if "--replaces" in words else 0)
        elif command == "fedspan join node.yaml":
            (config,) = [block.text for block in blocks_of(Path("docs/deployment.md")) if block.language == "yaml"]
            assert introduced(NodeService(load_node("node.yaml")), yaml.safe_load(config)).waiting
        elif command == "fedspan approve node.yaml":
            names["3f9c12"] = printed[command].split()[1][:6]
        elif "--replace" in words:
            Path("node.yaml").write_text(file.replace("node.key", "b.key"), encoding="utf-8")
    assert "server: reached" in printed["fedspan join node.yaml --check"]
    assert printed["fedspan approve node.yaml 3f9c12"].startswith("approved job ")
    assert printed["fedspan budget node.yaml"].startswith("fl.example.org, data set ")
    admitted = [one.key for one in read_admissions(server).values() if not one.revoked]
    assert admitted == [Path("b.key.pub").read_text(encoding="utf-8").strip()]


@pytest.mark.slow  # a minute
def test_the_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    texts = [block.text for block in blocks_of(FRONT) if block.language == "text"]
    (shown,) = [text.splitlines() for text in texts if "local-only" in text]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    command = [sys.executable, "-m", "fedspan", "demo"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.split() == ["client"])
    printed = lines[start : start + len(shown)]
    assert [re.sub("client-[0-9]+", "client", line) for line in without_scores(printed)] == [
        re.sub("client-[0-9]+", "client", line) for line in without_scores(shown)
    ]
    assert list_scores(printed) == pytest.approx(list_scores(shown), abs=2.0)


_SCORE = r"[+-]?\d+\.\d+"


def without_scores(lines: list[str]) -> list[str]:
    """Printed lines without scores and probabilities, which depend on the machine; bytes and labels remain."""
    return [re.sub(_SCORE, "#", line) for line in lines]


def list_scores(lines: list[str]) -> list[float]:
    return [float(score) for score in re.findall(_SCORE, " ".join(lines))]


def called(words: list[str], block: Block) -> None:
    if words[0] == "fedspan" and words[1] in NOT_RUN:
        command = get_program().commands[words[1]]
        command.make_parser(command.context_class(command)).parse_args(words[2:])
    elif words[0] == "fedspan":
        result = CliRunner().invoke(get_program(), words[1:])
        assert result.exit_code == 0, f"{block}: {' '.join(words)}\n{result.output}\n{result.exception!r}"
    elif words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    else:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert words[:2] == ["pip", "install"]
        for extras in re.findall(r"^(?:fedspan|\.)\[(.+)\]$", words[-1]):
            assert set(extras.split(",")) <= project["optional-dependencies"].keys(), words


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def worked(tiny_folder: Path, decoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A desk on which some things have been done: configs, data, a model's shape, runs and a series."""
    folder = tmp_path_factory.mktemp("desk")
    values = tiny.settings(tiny_folder, federation={"rounds": 2})
    for name in ("config", "my"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    rows = (tiny_folder / "corpus.csv").read_text(encoding="utf-8")
    for name in ("messages.csv", "new.csv"):
        (folder / name).write_text(rows, encoding="utf-8")
    save_workbook(rows, folder / "export.xlsx")
    for name, shape in SHAPES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    for name in ("first", "second"):
        fedspan.run(values, folder / "runs" / name, overrides=[] if name == "first" else ["method.name=rolora"])
    instruct = tiny_decoders.settings(decoders, "llama", federation={"rounds": 1}, evaluation={"generate": False})
    fedspan.run(instruct, folder / "runs" / "instruct")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "own_task.yaml").write_text(TASK, encoding="utf-8")
    questions = [{"question": f"a{number} b{number}", "right": number % 2} for number in range(6)]
    (folder / "tasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
    save_reviews(folder / "data" / "glue" / "SST-2")
    fedspan.compare(values, folder / "runs" / "three", ["fedit", "rolora", "flora"], seeds=[0])
    return folder


def save_workbook(rows: str, path: Path) -> None:
    """The rows of a csv text as the second sheet of a workbook, "Answers"."""
    book = openpyxl.Workbook()
    book.active.append(["exported by", "a survey tool"])
    sheet = book.create_sheet("Answers")
    for row in csv.reader(rows.splitlines()):
        sheet.append(row)
    book.save(path)


def save_reviews(folder: Path) -> None:
    """A small SST-2: sentences with the columns of the real one."""
    folder.mkdir(parents=True)
    for name, count in (("train", 640), ("dev", 40)):
        rows = [f"{('a dull', 'a fine')[at % 2]} film number {at}\t{at % 2}\n" for at in range(count)]
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(rows), encoding="utf-8")


@pytest.fixture
def desk(page: Path, worked: Path, tmp_path: Path) -> Path:
    """A copy of the desk, so that no page sees what another left, nor runs that its reader has not."""
    left_out = shutil.ignore_patterns(*([] if page in LOOKING else ["runs"]))
    return Path(shutil.copytree(worked, tmp_path / "desk", ignore=left_out))


PAGE = Path("docs/first-hour.md")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("docs/generate_first_hour.py")


def printed() -> Iterator[str]:
    return (block.text.rstrip("\n") for block in blocks_of(PAGE) if block.language in ("text", "yaml"))


def test_the_page_has_the_script_s_words_and_commands(script: ModuleType) -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    stamp = re.search(r"shows its output \(([^)]*)\)", text)
    assert text == script.page(printed(), stamp[1]), "run: python docs/generate_first_hour.py"


@pytest.mark.slow
def test_the_commands_print_what_the_page_says(script: ModuleType, tmp_path: Path) -> None:
    """Apart from numbers, which depend on the machine, and from predictions."""
    *found, predicted = script.run_blocks(tmp_path)
    *expected, _ = printed()
    (run,) = (block for block in found if "run folder" in block)
    assert re.findall(r"^ *(\d+)/12 ", run, re.MULTILINE) == [str(number) for number in range(1, 13)]
    is_last_best = re.search(r"^round +12,", run, re.MULTILINE) is not None
    assert ("Validation still improves: extend with" in run) == is_last_best
    assert [shape(block, script.CLINICS) for block in found] == [shape(block, script.CLINICS) for block in expected]
    assert re.fullmatch(r"(0\.\d\d  \w+\n?){3}", predicted)


def shape(block: str, clinics: dict[str, int]) -> list[str]:
    """The lines of a block without numbers, lines of progress, repeated rows and example predictions.

    Which stages took long enough to be printed before the first round, and whether the last round is the best one,
    depend on the machine as well.
    """
    lines: list[str] = []
    block = re.sub(r"Validation still improves: .*?\n\n", "", block, flags=re.DOTALL)
    for line in block.partition("a held-out text")[0].splitlines():
        if "elapsed" in line or line.startswith(("once, before", "before the first round:")):
            continue
        line = re.sub("|".join(clinics), "CLINIC", line)
        line = re.sub(r"\d[\d.,:]*%?( [kMG]?B)?", "#", line)
        line = re.sub(r"(above|below|equal to)", "BESIDE", " ".join(line.replace("─", "").split()))
        if line and (not lines or line != lines[-1]):
            lines.append(line)
    return lines


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script("docs/generate_notebooks.py")


def test_the_notebooks_are_current(generator: ModuleType) -> None:
    for path, text in generator.build_notebooks().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, "run docs/generate_notebooks.py"


def test_every_notebook_shows_what_it_prints_and_plots(generator: ModuleType) -> None:
    for path in generator.PAGES:
        cells = nbformat.read(ROOT / path, as_version=4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        assert outputs, f"run docs/generate_notebooks.py --run {path}"
        assert any("image/png" in output.get("data", ()) for output in outputs), path
        assert not any(output.get("name") == "stderr" or output.output_type == "error" for output in outputs), path
        assert not re.search(r"/(tmp|home|root|var)/", str(outputs)), path


def run_notebook(generator: ModuleType, path: Path, folder: Path, **settings: Any) -> str:
    """Run a copy of a notebook in a folder, with other settings in its cell of parameters; returns what it printed."""
    notebook = nbformat.read(ROOT / path, as_version=4)
    generator.run_cells(notebook, folder, **settings)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


@pytest.mark.slow
def test_one_round_step_by_step(generator: ModuleType, tmp_path: Path) -> None:
    assert "'round': 1" in run_notebook(generator, Path("docs/tour.ipynb"), tmp_path)
    assert (tmp_path / "runs" / "tour" / "adapter" / "adapter_model.safetensors").is_file()


LOSSES = r"slow-a: \d\.\d{3}, \d\.\d{3}$"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "made", "model", "settings", "lines"),
    [
        ("own_method", "slow-a-seed0", "deep-bert", {"layer": 1, "examples": 120}, ["slow-a: held-out acc", LOSSES]),
        ("own_trainer", "run/adapter", "llama-lm", {"texts": 16, "rounds": 2}, [".* on held-out letters"]),
        ("instruction_tuning", "run/adapter", "llama-lm", {"each": 10}, ["round 1: held-out loss "]),
        ("three_machines", "run/adapter", "deep-bert", {"layer": 1, "texts": 360}, 3 * [".* on its own test part"]),
    ],
)
def test_an_example(
    name: str, made: str, model: str, settings: dict[str, Any], lines: list[str], generator: ModuleType,
    tiny_folder: Path, decoders: Path, tmp_path: Path,
) -> None:  # fmt: skip
    if extra := {"own_trainer": "trl", "three_machines": "uvicorn"}.get(name):
        pytest.importorskip(extra, reason="an extra of fedspan is not installed")
    folder = decoders if model == "llama-lm" else tiny_folder
    settings = {"model": str(folder / model), "rounds": 1, **settings}
    printed = run_notebook(generator, Path(f"examples/{name}.ipynb"), tmp_path, **settings)
    assert len(re.findall("|".join(f"^{line}" for line in dict.fromkeys(lines)), printed, re.MULTILINE)) == len(lines)
    assert (tmp_path / "runs" / name / made).is_dir()
