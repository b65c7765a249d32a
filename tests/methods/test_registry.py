"""A method of one's own is run like any other; what is none is refused; and every method's page is whole."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from safetensors.torch import load_file

import fedspan
from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.core.method import Claims, RegisteredMethod
from fedspan.methods import registry
from fedspan.methods.describe import MethodRow, list_methods
from fedspan.methods.fedit import FedIT
from fedspan.methods.registry import METHODS, get_method_class, register
from fedspan.wrappers.describe import WrapperRow, list_wrappers
from helpers import tiny
from helpers.refusals import refused
from helpers.scripts import load_script

PACKAGE = """
from dataclasses import dataclass
from typing import ClassVar
from fedspan.config import parse_config
from fedspan.core.method import Claims, RegisteredMethod
from fedspan.methods.fedit import FedIT

@dataclass(frozen=True, kw_only=True)
class Packaged(RegisteredMethod):
    claims: ClassVar[Claims] = Claims(paper="none", exact=False)
    init_A: ClassVar[str] = "kaiming"  # read by FedIT.init
    init, sync, start, finish = FedIT.init, FedIT.sync, FedIT.start, FedIT.finish
    contribute, update = FedIT.contribute, FedIT.update
"""


@dataclass(frozen=True, kw_only=True)
class Own(RegisteredMethod):
    """FedIT by another name, with an option that does nothing.

    Args:
        strength: Strength of an effect that the method does not have.
    """

    claims: ClassVar[Claims] = Claims(paper="none", exact=False)
    strength: float = 1.0
    init_A: ClassVar[str] = "kaiming"  # read by FedIT.init
    init, sync, start, finish = FedIT.init, FedIT.sync, FedIT.start, FedIT.finish
    contribute, update = FedIT.contribute, FedIT.update


class Loose(Own):
    """No dataclass of its own."""


@dataclass(frozen=True, kw_only=True)
class Unfinished(RegisteredMethod):
    claims: ClassVar[Claims] = Claims(paper="none", exact=False)


@dataclass(frozen=True, kw_only=True)
class Silent(RegisteredMethod):
    init_A: ClassVar[str] = "kaiming"  # read by FedIT.init
    init, sync, start, finish = FedIT.init, FedIT.sync, FedIT.start, FedIT.finish
    contribute, update = FedIT.contribute, FedIT.update


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = dict(METHODS)
    yield
    registry._methods.clear()
    registry._methods.update(before)


def test_it_is_run_compared_and_planned_like_any_other(tiny_folder: Path, tmp_path: Path) -> None:
    fedspan.register("own", Own)
    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    fedspan.compare(values, tmp_path, ["fedit", "own", "own+fedprox"], seeds=[0])
    adapters = [tmp_path / f"{name}-seed0" / "adapter" / "adapter_model.safetensors" for name in ("fedit", "own")]
    theirs, own = map(load_file, adapters)
    assert theirs.keys() == own.keys()
    assert all(bool((theirs[name] == own[name]).all()) for name in own)
    plan = fedspan.plan(values | {"method": {"name": "own", "r": 2}}, labels=4, clients=4)
    assert plan.method == "own"
    assert fedspan.resume(tmp_path / "own-seed0").method == "own"


def test_its_fields_are_options(tiny_folder: Path) -> None:
    register("own", Own)
    values = tiny.settings(tiny_folder)
    made = parse_config(values | {"method": {"name": "own", "strength": 2.5}})
    assert made.method.options == {"strength": 2.5}
    with refused("method.strength"):
        parse_config(values | {"method": {"name": "own", "strength": -1}})


def test_an_installed_package_s_is_found_by_its_entry_point(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, {"packaged": "own_package:Packaged", "lost": "own_package:Nothing"}, monkeypatch)
    with refused("method.name"):
        register("packaged", Own)  # also before anything has asked for the package's
    fedspan.run(tiny.settings(tiny_folder, method={"name": "packaged"}, federation={"rounds": 1}), tmp_path / "run")
    assert get_method_class("packaged").__module__ == "own_package"
    with refused("method.name"):
        get_method_class("lost")
    with refused("method.name"):
        get_method_class("own_package:Packaged")  # no module by its name: a server could name one


def installed(folder: Path, entries: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own_package.py").write_text(PACKAGE, encoding="utf-8")
    info = folder / "own_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"{key} = {value}" for key, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[fedspan.methods]", *lines]), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "own_package", raising=False)


@pytest.mark.parametrize(
    ("key", "cls", "expected"),
    [
        ("fedit", Own, "'fedit' is already the key of FedIT"),
        ("Own", Own, "lower case letters and digits"),
        ("all", Own, "not the word all"),
        ("own+more", Own, "lower case letters and digits"),
        ("own", dict, "a subclass of fedspan.core.method.RegisteredMethod"),
        ("own", Unfinished, "it lacks init, start"),
        ("own", Loose, "lacks @dataclass"),
        ("own", Silent, "declares no claims"),
    ],
)
def test_what_is_no_method_or_has_a_taken_key_is_refused(key: str, cls: Any, expected: str) -> None:
    with pytest.raises(FedspanError, match=expected):
        register(key, cls)
    assert METHODS.get(key) is not cls


def test_twice_is_once() -> None:
    register("own", Own)
    register("own", Own)
    assert METHODS["own"] is Own


def test_a_wrapper_s_key_breaks_no_wrapper(tiny_folder: Path) -> None:
    register("fedprox", Own)
    values = tiny.settings(tiny_folder)
    assert parse_config(values | {"method": {"name": "fedit", "wrappers": ["fedprox"]}}).method.title == "fedit+fedprox"
    with refused("method.name"):
        parse_config(values | {"method": {"name": "fedprox"}})


ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "methods"
COMMON = {"r", "lora_alpha", "use_rslora"}
"""Options of every method; docs/config.md says what they are."""
SNIPPET = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
ROWS: tuple[MethodRow | WrapperRow, ...] = (*list_methods(), *list_wrappers())
each = pytest.mark.parametrize("row", ROWS, ids=[row.key for row in ROWS])


def plain(text: str) -> str:
    """For comparing names: HetLoRA's, LoRA-A²'s."""
    return re.sub(r"[^a-z0-9]", "", text.lower().replace("²", "2"))


def test_the_pages_of_methods_are_current() -> None:
    pages = load_script("docs/generate_methods.py").list_pages()
    assert {path.stem for path in PAGES.glob("*.md")} == {row.key for row in ROWS}
    for path, written in pages.items():
        assert path.read_text(encoding="utf-8") == written, "run: python docs/generate_methods.py"


@each
def test_a_page_has_equations_and_its_source(row: MethodRow | WrapperRow) -> None:
    page = (PAGES / f"{row.key}.md").read_text(encoding="utf-8")
    assert plain(row.name) in plain(page.splitlines()[0])
    assert re.search(r"^    ", page.partition("\n## ")[0], re.MULTILINE), "no equation"
    arxiv = re.search(r"arXiv:(\d+\.\d+)", row.paper)
    if arxiv:
        assert arxiv[1] in page.partition("## Reference")[2]


@each
def test_what_it_shows_is_a_config_of_its_own(row: MethodRow | WrapperRow) -> None:
    snippets = SNIPPET.findall((PAGES / f"{row.key}.md").read_text(encoding="utf-8"))
    assert snippets
    named: set[str] = set()
    for snippet in snippets:
        values: dict[str, Any] = yaml.safe_load(snippet)
        method = parse_config({"data": {"train": "train.csv"}, **values}).method
        named |= {method.name, *(wrapper.name for wrapper in method.wrappers)}
        given = values["method"]
        for option in row.options:  # what the config keeps of an option is what the page says
            if method.name == row.key and option.name in given and option.name not in COMMON:
                assert method.model_dump()[option.name] == given[option.name]
    assert row.key in named


def test_the_common_options_are_those_of_every_method() -> None:
    for row in list_methods():
        assert {option.name for option in row.options} >= COMMON
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert all(re.search(rf"`{name}`", text) for name in COMMON)
