"""A pretend accelerator in CPU memory: PyTorch's Python backend for PrivateUse1 (``torch.utils.backend_registration``).

Importing this module registers the device ``pretend:0`` for the whole process; do so before the first backward pass
(autograd starts its device threads then) and only in a process of its own (``helpers.pretend_runs``). A tensor on it
wraps a CPU tensor, and every operator runs the CPU's kernel on what is wrapped. So results equal the CPU's, and what
an accelerator refuses is refused: tensors of two devices in one operator, and NumPy views of tensors on the device.

What it does not cover: kernels, streams and memory of a real device; operators that only CUDA has (varlen attention,
fused kernels); autocast; random numbers drawn on the device; in-place changes of shape.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class _Module:
    """``torch.pretend``."""

    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    manual_seed = manual_seed_all = staticmethod(lambda *_: None)
    empty_cache = staticmethod(lambda: None)
    get_rng_state = staticmethod(lambda *_: torch.zeros(16, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda *_: None)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        for counter in _counters:
            counter["synchronize"] += 1


_setup_privateuseone_for_python_backend("pretend", backend_module=_Module())
DEVICE = torch.device("pretend:0")

_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::lift_fresh"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"}
"""Operators after which the host waits for an accelerator: it needs a value or a shape."""

_MATERIALIZED = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
"""Lazy views, whose bits are not seen below the wrapper, with the operators that compute them."""

_ALLOCATIONS = ("aten::empty", "aten::new_empty")

_counters: list[Counter[str]] = []
_work: list[Counter[str]] = []


@contextmanager
def count_work() -> Generator[Counter[str]]:
    """Count operators that compute on the device, copies to and from it, bytes to the host, and waits of the host."""
    counter: Counter[str] = Counter()
    _work.append(counter)
    try:
        with count_synchronizations() as waits:
            yield counter
    finally:
        _work.remove(counter)
    counter["waits"] = sum(waits.values())


@contextmanager
def count_synchronizations() -> Generator[Counter[str]]:
    """Count how often the host would wait for an accelerator within this context, in all threads.

    The keys name the operator and the module that called it.
    """
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


class Pretend(Tensor):
    """A tensor on the pretend device.

    Args:
        raw: The CPU tensor with its values; views share memory as their wrapped tensors do.
    """

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "Pretend":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=DEVICE,
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """``Tensor.data``, whose setter must replace the wrapped tensor, too."""
        return self.detach()

    @data.setter
    def data(self, value: "Pretend") -> None:
        Tensor.data.__set__(self, value)
        self.raw = value.raw

    def tolist(self) -> Any:
        """``Tensor.tolist``, which refuses subclasses."""
        return self.to("cpu").tolist()


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Change the tensors among an operator's arguments or results; quicker than ``torch.utils._pytree``."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(item, change) for item in value])
    return value


def _unwrap(value: Tensor) -> Tensor:
    return value.raw if isinstance(value, Pretend) else value


def _run(operator: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    name: str = operator._schema.name
    tensors: list[Tensor] = []
    _mapped([*args, *options.values()], tensors.append)
    here = [value for value in tensors if isinstance(value, Pretend)]
    requested = options.get("device")
    on_device = bool(here) if requested is None else torch.device(requested).type == DEVICE.type
    _require_one_device(name, args, tensors, here)
    for counter in _counters:
        if (here and name in _WAITING) or _reads_back(name, args, options, here, on_device):
            counter[f"{name.removeprefix('aten::')} in {_find_caller()}"] += 1
        elif _is_blocking_upload(name, args):
            counter[f"upload in {_find_caller()}"] += 1
    for counter in _work:
        _count_work(counter, operator, here, tensors, on_device)
    own = {key: _mapped(value, _unwrap) for key, value in options.items()}
    if requested is not None:
        own["device"] = torch.device("cpu")
    if "pin_memory" in own:
        own["pin_memory"] = False
    result = _MATERIALIZED.get(operator, operator)(*_mapped(args, _unwrap), **own)
    wrappers = {id(value.raw): value for value in here}  # operators that write return the tensor that they were given

    if any(value.shape != value.raw.shape for value in here):
        raise NotImplementedError(f"{name}: the pretend device cannot change a tensor's shape in place")

    def wrap(value: Tensor) -> Tensor:
        if id(value) in wrappers:
            return wrappers[id(value)]
        return Pretend(value) if on_device else value

    return _mapped(result, wrap)


def _count_work(
    counter: Counter[str], operator: Any, here: list[Pretend], tensors: list[Tensor], on_device: bool
) -> None:
    """Count an operator, unless it only allocates or returns views."""
    name, returns = operator._schema.name, operator._schema.returns
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    if is_view or name.startswith(_ALLOCATIONS) or not (here or on_device):
        return
    crosses = name in _COPIES and (len(here) < len(tensors) or not on_device)
    counter["copies" if crosses else "operators"] += 1
    if crosses and here and not on_device:
        counter["bytes to the host"] += sum(value.numel() * value.element_size() for value in here)


def _find_caller() -> str:
    """Return the module whose code called the operator, other than PyTorch."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "helpers"):
            return module
        frame = frame.f_back
    return "autograd"


def _is_blocking_upload(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operator copies from memory that is not pinned, or waits for its copy."""
    if name != "aten::copy_" or not isinstance(args[0], Pretend) or isinstance(args[1], Pretend):
        return False
    return not (len(args) > 2 and args[2] and getattr(args[1], "pinned", False))


def _require_one_device(name: str, args: tuple[Any, ...], tensors: list[Tensor], here: list[Pretend]) -> None:
    """Refuse what CUDA refuses: scalars on the CPU may stand beside tensors on the device, and so may indices."""
    away = [value for value in tensors if not isinstance(value, Pretend) and value.dim()]
    if not here or not away or name in _COPIES or (name in _INDEXING and isinstance(args[0], Pretend)):
        return
    raise RuntimeError(f"{name}: a CPU tensor of shape {tuple(away[0].shape)} beside tensors on {DEVICE}")


def _reads_back(
    name: str, args: tuple[Any, ...], options: Mapping[str, Any], here: list[Pretend], on_device: bool
) -> bool:
    """Whether an operator copies from the device to the CPU, or selects by a mask, whose result's shape it needs."""
    if name in _COPIES and here:
        return not on_device or not isinstance(args[1] if name == "aten::_copy_from" else args[0], Pretend)
    return name in _INDEXING and any(value.dtype in (torch.bool, torch.uint8) for value in here[1:])


def _pin_memory(tensor: Tensor) -> Tensor:
    """``Tensor.pin_memory``: a marked copy."""
    pinned = tensor.clone()
    pinned.pinned = True
    return pinned


Tensor.pin_memory = _pin_memory
_LIBRARY = torch.library.Library("_", "IMPL")


def _fallback(operator: Any, *args: Any, **options: Any) -> Any:
    return _run(operator, args, options)


_LIBRARY.fallback(_fallback, "PrivateUse1")
_FACTORIES = torch.library.Library("aten", "IMPL")
for _name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm.generator"):
    # Their own kernels for all devices resize an empty tensor.
    _packet, _, _overload = _name.partition(".")
    _operator = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    _FACTORIES.impl(_name, functools.partial(_fallback, _operator), "PrivateUse1")


_make_tensor = torch.tensor
_device_constructors()  # cached with the original: `with torch.device(...)` recognizes constructors by identity


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """``torch.tensor``, which fails on Python backends in PyTorch 2.13: it dispatches without an interpreter."""
    if device is not None and torch.device(device).type == DEVICE.type:
        return _make_tensor(data, **options).to(DEVICE)
    return _make_tensor(data, device=device, **options)


torch.tensor = _tensor
