"""What ``reply_path.py`` runs inside every process: it records which functions take or return the round's reply.

A reply is recognized by its content, whatever it is called and wherever it is: by the numbers that training returned
and did not begin with, as tensors and arrays, and in bytes, which hold the same numbers (the encoded message, and the
requests and answers around it). Bytes of the same length that a function makes of such bytes are another form of the
reply: it is enciphered between machines. So orders, logs, books and digests are no reply, however long they are. All
processes learn the forms of the replies in a folder that they share.

In the process that reduces the replies, what they are reduced to is followed in the same way to checkpoints and
adapters. Encoded messages that hold it are orders to evaluate it.
"""

import dataclasses
import hashlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["LEFT_OUT", "Recorder", "ReplyForms", "list_contents", "read_files", "start"]

LEFT_OUT = ("cli/", "config/", "core/", "methods/", "wrappers/", "models/", "tasks/", "data/", "errors.py", "analysis/")
"""Where a reply is made and used, not what it passes: the mathematics and the model."""
_WINDOW = 48
"""Bytes by which a form of the reply is recognized within other bytes."""
_SMALLEST = 16
"""Size in bytes of the smallest tensor by which a reply is recognized."""
_DEPTH, _MOST = 14, 5000
"""How deep, and how many, the parts of a value are looked at."""
_TYPES = "Job", "Trained", "Reduced"
"""Types by which numbers are learned: what a training begins with, what it returns, and what replies are reduced to."""
_MESSAGE = b'\\"kind\\":\\"message\\"'
"""What the header of an encoded message has."""
_PLAIN = (str, int, float, complex, type, type(None))


def list_contents(value: Any) -> Iterator[Any]:
    """Yield the bytes, tensors and arrays in a value, and its objects by which numbers are learned.

    What is looked through: containers and dataclasses.
    """
    left, seen = deque([(value, 0)]), set[int]()
    while left and len(seen) < _MOST:
        part, depth = left.popleft()
        if isinstance(part, _PLAIN) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, bytes | bytearray | memoryview) or _is_numbers(part):
            yield part
            continue
        if type(part).__name__ in _TYPES:
            yield part
        if depth < _DEPTH:
            left.extend((inner, depth + 1) for inner in _list_parts(part))


def _is_numbers(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    # `hasattr`: while they are imported, they are in `sys.modules`, too
    is_tensor = torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)
    return is_tensor or (numpy is not None and hasattr(numpy, "ndarray") and isinstance(value, numpy.ndarray))


def _list_parts(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return list(value.values())
    if isinstance(value, list | tuple | deque):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return []


def _read_numbers(value: Any) -> bytes | None:
    """Return the bytes of a tensor or an array, as safetensors stores them; None: it has none of its own."""
    try:
        if hasattr(value, "detach"):
            torch = sys.modules["torch"]
            return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return value.tobytes()
    except Exception:  # a tensor without storage, such as one under vmap
        return None


def _compute_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _find_window(content: bytes, before: bytes = b"") -> bytes:
    """Return bytes of a content by which it is recognized within others; those of ``before`` do not have them."""
    for start in range(len(content) // 2, len(content) - _WINDOW + 1):
        window = content[start : start + _WINDOW]
        if window not in before:
            return window
    return b""


class ReplyForms:
    """The forms of the round's replies, in a folder that all processes of a run share.

    Args:
        folder: The folder; empty before the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begun: dict[str, bytes] = {}
        self._known: dict[str, bytes] = {}

    def observe(self, value: Any) -> None:
        """Learn from what a training begins with, or returned."""
        contents = [content for tensor in value.tensors.values() if (content := _read_numbers(tensor)) is not None]
        by_digest = {_compute_digest(content): content for content in contents if len(content) >= _SMALLEST}
        if type(value).__name__ == "Job":
            self._begun |= by_digest
            return
        before = b"".join(self._begun.values())
        for digest in by_digest.keys() - self._begun.keys() - self._list_known().keys():
            self._learn(digest, _find_window(by_digest[digest], before))

    def learn_form(self, content: bytes) -> None:
        """Learn that bytes are a reply in another form."""
        self._learn(_compute_digest(content), _find_window(content))

    def are_in(self, content: bytes | bytearray | memoryview) -> bool:
        """Return whether bytes hold a reply in any form."""
        return _has_window(content, self._list_known().values())

    def list_digests(self) -> set[str]:
        """Return the digests of the replies' tensors."""
        return set(self._list_known())

    def _learn(self, digest: str, window: bytes) -> None:
        path = self.folder / f".{os.getpid()}-{threading.get_ident()}"
        path.write_bytes(window)
        path.replace(self.folder / digest)

    def _list_known(self) -> dict[str, bytes]:
        """Return windows by the digests of the forms; too small a form has none."""
        for name in os.listdir(self.folder):
            if name not in self._known and not name.startswith("."):
                self._known[name] = (self.folder / name).read_bytes()
        return self._known


def _has_window(content: bytes | bytearray | memoryview, windows: Iterable[bytes]) -> bool:
    if len(content) < _WINDOW:
        return False
    data = bytes(content)
    return any(window and window in data for window in windows)


class Recorder:
    """Records the files of functions that take or return a reply, or what replies are reduced to.

    Of a file with tensors, their digests are recorded, because the last steps of a training have the reply's tensors
    before it returns them; ``read_files`` decides.

    Args:
        root: Folder of the source files, with a separator at its end.
        out: Folder of the records.
        forms: The forms of the replies.
    """

    def __init__(self, root: str, out: Path, forms: ReplyForms) -> None:
        self.root, self.out, self.forms = root, out, forms
        self._seen = set[tuple[str, str]]()
        self._reduced = dict[str, bytes]()

    def record(self, frame: FrameType, event: str, result: Any) -> None:
        """Record a call or a return (``sys.setprofile``)."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self.root):
            return
        file = code.co_filename[len(self.root) :]
        if code.co_name != "<module>" and not file.startswith(LEFT_OUT):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = frame.f_locals
            given = [values[name] for name in names if name not in ("self", "cls") and name in values]
            self.classify(file, given, result)

    def classify(self, file: str, given: list[Any], result: Any) -> None:
        """Record a function's file if what it was given, or its result, holds the reply.

        Args:
            file: The function's file.
            given: The arguments without its object; those of a function that returns as they are then.
            result: What it returns; None: it was called.
        """
        has_bytes = False
        for content in list_contents(given):
            has_bytes |= self._classify(file, content)
        for content in list_contents(result):
            is_reply = self._classify(file, content)
            if has_bytes and not is_reply and content is result and isinstance(content, bytes):
                taken = [one for one in given if isinstance(one, bytes) and len(one) == len(content)]
                if any(map(self.forms.are_in, taken)):
                    self.forms.learn_form(content)

    def _classify(self, file: str, content: Any) -> bool:
        """Record what a function has if it may be a reply; return whether it is bytes that hold one."""
        if isinstance(content, bytes | bytearray | memoryview):
            is_reply = self.forms.are_in(content)
            if is_reply or (_has_window(content, self._reduced.values()) and _MESSAGE not in bytes(content)):
                self._write("", file)
            return is_reply
        if type(content).__name__ == "Reduced":
            numbers = filter(None, map(_read_numbers, filter(_is_numbers, list_contents(vars(content)))))
            self._reduced |= {_compute_digest(one): _find_window(one) for one in numbers if len(one) >= _SMALLEST}
        elif type(content).__name__ in _TYPES:
            self.forms.observe(content)
        else:
            numbers = _read_numbers(content)
            if numbers is not None and len(numbers) >= _SMALLEST:
                digest = _compute_digest(numbers)
                self._write("" if digest in self._reduced else digest, file)
        return False

    def _write(self, digest: str, file: str) -> None:
        if (digest, file) not in self._seen:
            self._seen.add((digest, file))
            with (self.out / str(os.getpid())).open("a") as records:  # a process may be killed at any time
                records.write(f"{digest} {file}\n")


def read_files(out: Path, forms: ReplyForms) -> set[str]:
    """Return the files that were recorded with the reply.

    Args:
        out: Folder of the records.
        forms: The forms of the reply.
    """
    digests = {"", *forms.list_digests()}
    lines = (line.split(" ", 1) for path in out.iterdir() for line in path.read_text().splitlines())
    return {file for digest, file in lines if digest in digests}


def start(root: str, out: str, forms: str) -> None:
    """Record in all threads of this process from now on."""
    recorder = Recorder(root, Path(out), ReplyForms(Path(forms)))
    sys.setprofile(recorder.record)
    threading.setprofile(recorder.record)
