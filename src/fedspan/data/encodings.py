"""Text encodings of files: set by the user, marked in the file, or detected.

UTF-8 and UTF-16 are recognized by their own rules. Older encodings of one or two bytes a character are ranked by
charset-normalizer, among those that are in use: of two that fit equally well, the more common one is selected.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Generator, Mapping

from charset_normalizer import from_bytes

__all__ = ["convert_to_utf8", "decode", "decode_all"]

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LEGACY = (
    *("cp1252", "cp1250", "cp1251", "cp1254", "cp1253", "cp1257", "cp1255", "cp1256"),
    *("shift_jis", "gb18030", "euc_kr", "big5", "euc_jp", "koi8_r", "tis_620", "cp1258", "mac_roman"),
)
"""Encodings that are tried for files that are not Unicode, the most common first."""
_SAMPLE = 1 << 16
"""Number of bytes that the ranking examines."""
_PIECE = 1 << 20
"""Number of bytes that are decoded at a time."""


def decode(content: bytes, encoding: str | None = None, *, is_complete: bool = True) -> tuple[str, str]:
    """Decode a file.

    Args:
        content: The file's bytes, or its beginning.
        encoding: The encoding; None: it is detected.
        is_complete: Whether `content` is the whole file. A partial file may end inside a character, which is dropped.

    Returns:
        The text without a byte order mark, and the name of the encoding.

    Raises:
        ValueError: If the encoding is unknown, the content is not in it, or no encoding fits.
    """
    name = encoding or _detect_encoding(content, is_complete=is_complete)
    try:
        decoder = codecs.getincrementaldecoder(name)()
        text = decoder.decode(content, final=is_complete)
    except LookupError:
        raise ValueError(f"the encoding {name!r} is unknown") from None
    except UnicodeError as error:
        raise ValueError(_describe_position(error, name, content)) from None
    return text.removeprefix("\ufeff"), name


def decode_all(contents: Mapping[str, bytes], encoding: str | None = None) -> list[tuple[str, str]]:
    """Decode related files; all files that are not Unicode have the same encoding.

    Args:
        contents: The files' bytes by name.
        encoding: The encoding; None: detected.

    Raises:
        ValueError: As `decode`; the message begins with the name of the file.
    """
    shared = encoding
    if encoding is None and (legacy := [content for content in contents.values() if not _is_unicode(content)]):
        shared = _detect_legacy_encoding(b"\n".join(legacy))
    decoded: list[tuple[str, str]] = []
    for name, content in contents.items():
        file_encoding = shared if encoding is not None or not _is_unicode(content) else None
        try:
            decoded.append(decode(content, file_encoding))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return decoded


def _is_unicode(content: bytes) -> bool:
    if any(content.startswith(mark) for mark, _ in _MARKS) or _detect_utf16(content[:4096]) is not None:
        return True
    try:
        content.decode()
    except UnicodeDecodeError:
        return _is_damaged_utf8(content)  # `decode` reports the position
    return True


def convert_to_utf8(content: bytes, encoding: str | None = None, *, is_complete: bool = True) -> tuple[bytes, str]:
    """Return a file's content in UTF-8 without a byte order mark, and the name of its encoding; raises as `decode`."""
    if encoding is None and content.isascii() and b"\0" not in content[:_SAMPLE]:
        return content, "utf-8"
    name = encoding or _detect_encoding(content, is_complete=is_complete)
    try:
        decoder = codecs.getincrementaldecoder(name)()
        pieces = _decode_with(decoder, content, is_complete)
        if name == "utf-8" and is_complete:  # the same bytes: no second copy of a large file
            deque(pieces, maxlen=0)
            return content.removeprefix(codecs.BOM_UTF8), name
        return b"".join(piece.encode() for piece in pieces).removeprefix(codecs.BOM_UTF8), name
    except (LookupError, UnicodeError):
        return decode(content, encoding, is_complete=is_complete)[0].encode(), name  # its error describes the problem


def _decode_with(decoder: codecs.IncrementalDecoder, content: bytes, is_complete: bool) -> Generator[str]:
    """Decode a file in pieces: a large file as one text takes up to four times its size."""
    for start in range(0, max(1, len(content)), _PIECE):
        end = start + _PIECE
        yield decoder.decode(content[start:end], final=is_complete and end >= len(content))


def _detect_encoding(content: bytes, *, is_complete: bool) -> str:
    for mark, name in _MARKS:
        if content.startswith(mark):
            return name
    if (name := _detect_utf16(content[:4096])) is not None:
        return name
    try:
        deque(_decode_with(codecs.getincrementaldecoder("utf-8")(), content, is_complete), maxlen=0)
        return "utf-8"
    except UnicodeDecodeError:
        if _is_damaged_utf8(content):
            return "utf-8"  # decoding reports the position
    return _detect_legacy_encoding(content)


def _detect_utf16(head: bytes) -> str | None:
    """Recognize UTF-16 without a mark by the zero byte of each ASCII character."""
    high, low = head[0::2].count(0), head[1::2].count(0)
    if max(high, low) * 4 <= len(head) or min(high, low) * 20 > len(head):
        return None
    return "utf-16-le" if low > high else "utf-16-be"


def _is_damaged_utf8(content: bytes) -> bool:
    """Check whether the non-ASCII characters of a file are nearly all valid UTF-8, which chance does not produce."""
    text = content.decode("utf-8", errors="replace")
    invalid = text.count("\ufffd")
    valid = sum(map(len, re.findall(r"[^\x00-\x7f\ufffd]+", text)))
    return valid >= 8 * invalid


def _detect_legacy_encoding(content: bytes) -> str:
    # Only lines with non-ASCII characters distinguish the candidates.
    lines = (line for line in content.splitlines(keepends=True) if not line.isascii())
    sample = bytearray()
    for line in lines:
        sample += line
        if len(sample) >= _SAMPLE:
            break
    ranked: list[tuple[float, float, int, str]] = []
    for match in from_bytes(bytes(sample), cp_isolation=list(_LEGACY)):
        candidates = [name for name in match.could_be_from_charset if name in _LEGACY]
        ranked += [(match.chaos, -match.coherence, _LEGACY.index(name), name) for name in candidates]
    for *_, name in sorted(ranked):
        try:
            content.decode(name)
        except UnicodeDecodeError as error:
            if error.end < len(content) - 4:  # the last character of a beginning may be cut
                continue
        return name
    raise ValueError("no encoding fits: the file may not be text")


def _describe_position(error: UnicodeError, name: str, content: bytes) -> str:
    if not isinstance(error, UnicodeDecodeError):
        return f"the content is not in {name}: {error}"
    line = 1 + content.count(b"\n", 0, error.start)
    invalid_bytes = error.object[error.start : error.end]
    return f"line {line} is not in {name} (byte {error.start}, {invalid_bytes.hex(' ')})"
