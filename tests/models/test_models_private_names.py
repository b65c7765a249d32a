"""Private names of torch, Accelerate, PEFT and Transformers on which ``fedspan.models`` and the planner rely.

Each failure names what a release broke, and what fedspan needs it for.
"""

import ast
import inspect
import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch
from torch import Tensor, nn

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedspan"

IMPORTS = {
    ("torch.utils._python_dispatch", "TorchDispatchMode"): "seeing every operation of a pass",
    ("torch.utils._pytree", "tree_leaves"): "the tensors in the arguments of an operation",
    ("peft.tuners.tuners_utils", "_maybe_include_all_linear_layers"): "target_modules: all-linear",
}
"""Private modules and functions that are imported, and what for."""

ATTRIBUTES = {
    "_attn_implementation": "passes without padding, which replace a model's attention",
    "_cdata": "telling apart storages that hold no values",
    "_hf_hook": "the device of a base that is offloaded",
    "_local_scalar_dense": "planning models that branch on the values of tensors",
    "_no_split_modules": "offloading whole blocks",
    "_overloadpacket": "the FLOPs of an operation",
    "_schema": "finding the operations that draw a new head",
}
"""Private attributes of torch, Accelerate and Transformers that are read or written, and what for."""


def broken(package: str, name: str, purpose: str) -> NoReturn:
    pytest.fail(
        f"{package} {version(package)} no longer has {name} as fedspan.models expects it; it is needed for {purpose}",
        pytrace=False,
    )


def require(is_met: bool, package: str, name: str) -> None:
    if not is_met:
        broken(package, name, ATTRIBUTES[name])


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-z]\w*", name) is not None


def test_no_other_private_name_is_used() -> None:
    """A private name that is missing from the lists above has no contract."""
    imports, attributes = set[tuple[str, str]](), set[str]()
    for path in (*SOURCE.glob("models/*.py"), SOURCE / "planning" / "compute.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        own = {"self", "cls"}
        ours = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own
        }
        for node in nodes:
            match node:
                case ast.ImportFrom(module=str(module), level=0) if not module.startswith("fedspan"):
                    for alias in node.names:
                        if any(is_private(part) for part in (*module.split("."), alias.name)):
                            imports.add((module, alias.name))
                case ast.Attribute(attr=name) | ast.Constant(value=str(name)) if is_private(name) and name not in ours:
                    attributes.add(name)
                case _:
                    pass
    assert imports == set(IMPORTS)
    assert attributes == set(ATTRIBUTES)


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_private_modules_and_functions(module: str, name: str) -> None:
    package = module.partition(".")[0]
    try:
        getattr(import_module(module), name)
    except (ImportError, AttributeError):
        broken(package, f"{module}.{name}", IMPORTS[module, name])


def test_a_dispatch_mode_sees_operations_with_their_schema_and_packet() -> None:
    mode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode
    seen: list[Any] = []

    class Watching(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        torch.empty(2).normal_()
    drawing = [func for func in seen if torch.Tag.nondeterministic_seeded in func.tags]
    require(bool(drawing) and all(hasattr(func, "_schema") for func in drawing), "torch", "_schema")
    require(drawing[0]._schema.name == "aten::normal_", "torch", "_schema")
    require(drawing[0]._overloadpacket is torch.ops.aten.normal_, "torch", "_overloadpacket")


def test_values_that_a_model_branches_on_and_storages_without_values() -> None:
    require(hasattr(torch.ops.aten, "_local_scalar_dense"), "torch", "_local_scalar_dense")
    require(hasattr(torch.ops.aten._local_scalar_dense, "default"), "torch", "_local_scalar_dense")
    first, second = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    addresses = [getattr(value.untyped_storage(), "_cdata", None) for value in (first, second, first.view(1, 2))]
    require(isinstance(addresses[0], int) and addresses[0] == addresses[2] != addresses[1], "torch", "_cdata")


def test_leaves_of_a_tree() -> None:
    leaves = import_module("torch.utils._pytree").tree_leaves(((torch.zeros(1), 2), {"a": [torch.ones(1)]}))
    if [type(leaf) for leaf in leaves] != [Tensor, int, Tensor]:
        broken("torch", "torch.utils._pytree.tree_leaves", IMPORTS["torch.utils._pytree", "tree_leaves"])


def test_all_linear_names_the_linear_layers() -> None:
    from peft import LoraConfig

    include: Any = import_module("peft.tuners.tuners_utils")._maybe_include_all_linear_layers
    purpose = IMPORTS["peft.tuners.tuners_utils", "_maybe_include_all_linear_layers"]
    if list(inspect.signature(include).parameters)[:2] != ["peft_config", "model"]:
        broken("peft", "peft.tuners.tuners_utils._maybe_include_all_linear_layers", purpose)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    found = include(LoraConfig(target_modules="all-linear"), model)
    if set(cast("set[str]", found.target_modules)) != {"0", "2"}:
        broken("peft", "peft.tuners.tuners_utils._maybe_include_all_linear_layers", purpose)


def test_a_config_names_its_attention_and_a_model_the_blocks_to_keep_whole() -> None:
    from transformers import BertConfig, BertModel

    sizes: dict[str, int] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=10, intermediate_size=8, attn_implementation="eager", **sizes)
    model = BertModel(config)
    require(getattr(config, "_attn_implementation", None) == "eager", "transformers", "_attn_implementation")
    model.config._attn_implementation = "sdpa"
    require(model.config._attn_implementation == "sdpa", "transformers", "_attn_implementation")
    require(hasattr(model, "_no_split_modules"), "transformers", "_no_split_modules")


def test_a_hook_names_the_device_that_an_offloaded_layer_computes_on() -> None:
    from accelerate import cpu_offload
    from accelerate.utils import has_offloaded_params

    layer = nn.Linear(2, 2)
    cpu_offload(nn.Sequential(layer), torch.device("cpu"))
    require("_hf_hook" in vars(layer), "accelerate", "_hf_hook")
    hook: Any = vars(layer)["_hf_hook"]
    require(has_offloaded_params(layer) and torch.device(hook.execution_device).type == "cpu", "accelerate", "_hf_hook")
