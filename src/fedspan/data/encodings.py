"""Text encodings of files: set by the user, marked in the file, or detected.

UTF-8 and UTF-16 are recognized by their own rules. Older encodings of one or two bytes a character are ranked by
charset-normalizer, among those that are in use: of two that fit about equally well, the more common one is selected.
Candidates that yield characters which words do not contain are left out beforehand.
An encoding in which all letters beyond ASCII are those of one language precedes cp1252 where they are those of none.
Windows' quotation marks, dashes, and signs such as £ and © do not distinguish encodings, and are not ranked.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter, deque
from collections.abc import Generator, Mapping

from charset_normalizer import from_bytes

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LEGACY = (
    *("cp1252", "cp1250", "cp1251", "cp1254", "cp1253", "cp1257", "cp1255", "cp1256"),
    *("shift_jis", "gb18030", "euc_kr", "big5", "euc_jp", "koi8_r", "tis_620", "cp1258"),
    *("mac_roman", "cp850", "cp866"),
)
"""Encodings that are tried for files that are not Unicode, the most common first."""
_TOLERANCE = 0.02
"""Difference of charset-normalizer's shares, from 0 to 1, below which they are equal."""
_LEAD = 0.3
"""Difference in coherence that another encoding needs against the most common one if that one has only usual letters:
English texts with a few French names differ by up to 0.23, by chance."""
_MAX_CHAOS = 0.3
"""Share of unlikely characters from which a file is no text in an encoding."""
_QUOTES = rb"\x80\x82\x84-\x87\x8b\x91-\x97\x99\x9b\xa2\xa7\xa9\xab\xae\xb0\xb1\xb7\xbb\xbd\xd7\xf7"
_SIGNS = re.compile(
    # Not inside a word, where these bytes are letters of Mac OS, nor beside another byte beyond ASCII.
    rb"(?<![A-Za-z\x80-\xff])[" + _QUOTES + rb"](?![\x80-\xff])"
    rb"|(?<![\x80-\xff])[" + _QUOTES + rb"](?![A-Za-z\x80-\xff])"
    rb"|(?<=[A-Za-z])[\x85\x92](?=[A-Za-z])"
    # Not beside a word either, where they are letters of cp1250: L and l with stroke, A with ogonek, z with dot.
    rb"|(?<![A-Za-z\x80-\xff])[\xa1\xa3\xa5\xb2\xb3\xbc\xbe\xbf](?![A-Za-z\x80-\xff])"
)
"""Signs of cp1252 where they are hardly letters of another encoding."""
_CAPITALS = "".join(filter(str.isupper, map(chr, range(0x80, 0x530))))
_LETTER, _CJK = r"[^\W\d_]", r"[\u3001-\u9fff\uac00-\ud7ff\uff01-\uffef]"
_MISREAD = re.compile(
    # A sign after a letter, such as a superscript three, but for marks of accents and vowels.
    rf"(?<={_LETTER})"
    r"(?:[^\w\s\x00-\x7f\u0300-\u036f\u0591-\u05c7\u064b-\u0670\u0e31-\u0e4e\u2013-\u2026\xab\xbb\xae\u2122\xa9]"
    r"|[\xb2\xb3\xb9])"
    # A quotation mark, a dagger or a bullet between letters.
    rf"|(?<={_LETTER})[\u201a\u201c-\u2022](?={_LETTER})"
    # A capital inside a word.
    rf"|(?<=[a-z\xdf-\xff])[{_CAPITALS}]"
    # Letters of two scripts in a word.
    r"|[A-Za-z\xc0-\u024f][\u0370-\u0e7f]|[\u0370-\u0e7f][A-Za-z\xc0-\u024f]"
    # A single character of East Asia beside a small letter.
    rf"|(?<![^\x00-\x7f]){_CJK}(?=[a-z])|(?<=[a-z]){_CJK}(?![^\x00-\x7f])"
)
"""Characters where words do not have them, so that the encoding is likely another one."""
_MAX_MISREAD = 0.05
"""Difference in the share of such characters from which an encoding is left out."""
_DOUBLED = re.compile(rb"(?<![\x80-\xff])([\xc0-\xff])\1(?![\x80-\xff])")
"""A letter of one byte twice (Finnish, Dutch), which charset-normalizer takes for an unlikely one."""
_MULTIBYTE = frozenset({"shift_jis", "gb18030", "euc_kr", "big5", "euc_jp"})
_RARE = re.compile("[\u00d0\u00dd\u00de\u00f0\u00fd\u00fe\u0152\u0153\u0160\u0161\u0178\u017d\u017e]")
"""Letters of cp1252 that are more likely Turkish, Polish or Czech letters of other encodings."""
_ALPHABETS: Mapping[str, tuple[str, ...]] = {
    "cp1252": (
        *("äöüß", "àâæçéèêëîïôœùûüÿ", "áéíñóúüªº", "áâãàçéêíóôõúüªº", "àèéìíîòóùúªº", "åäöé", "æøåéèêòóô"),
        *("áéëïíóöúüèê", "áðéíóúýþæö", "àçèéíïòóúü·ºª", "õäöüšž"),
    ),
    "cp1250": ("ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "áéíóöőúüű", "ăâîşţ", "čćđšž"),
    "cp1254": ("âçğıîöşüû",),
    "cp1257": ("ąčęėįšųūž", "āčēģīķļņšūž", "äõöüšž"),
}
"""Letters beyond ASCII of the languages that are written in an encoding.

cp1252: German, French, Spanish, Portuguese, Italian, Swedish, Danish, Norwegian, Dutch, Icelandic, Catalan, Estonian.
cp1250: Polish, Czech, Slovak, Hungarian, Romanian, Croatian. cp1254: Turkish. cp1257: Lithuanian, Latvian, Estonian.
"""
_PUNCTUATION = b"\x80\x82\x84\x85\x8b\x91\x92\x93\x94\x95\x96\x97\x9b\xa7\xa9\xab\xae\xb0\xbb".decode("cp1252")
"""Signs beside letters that all of these encodings have."""
_COVERED, _UNCOVERED = 0.99, 0.97
"""Share of a text's letters beyond ASCII from which an alphabet covers it, and below which none of cp1252 does."""
_DISTINCT = 4
"""Number of different letters beyond ASCII that show a language."""
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
    whole, sample = bytearray(), bytearray()
    for line in content.splitlines(keepends=True):
        if not line.isascii():
            whole += line if len(whole) < _SAMPLE else b""
            sample += b"" if (letters := _SIGNS.sub(b" ", line)).isascii() else letters
        if len(sample) >= _SAMPLE:
            break
    ranked = _rank_encodings(bytes(sample), bytes(whole)) if sample else list(_LEGACY)
    if (by_alphabet := _find_by_alphabet(bytes(sample))) is not None and ranked[:1] != [by_alphabet]:
        ranked.insert(0, by_alphabet)
    for name in ranked:
        try:
            content.decode(name)
        except UnicodeDecodeError as error:
            if error.end < len(content) - 4:  # the last character of a beginning may be cut
                continue
        return name
    raise ValueError("no encoding fits: the file may not be text")


def _rank_encodings(sample: bytes, whole: bytes) -> list[str]:
    """Rank the encodings of a text with letters beyond ASCII, the best first; those that cannot decode it are missing.

    The criteria are the share of characters that words do not have, charset-normalizer's share of unlikely characters
    (chaos), how much the letters are those of a language (coherence), and the order of `_LEGACY`. If a text has only
    usual letters in the most common encoding, another one needs a clear lead in coherence.

    Args:
        sample: Lines with letters beyond ASCII, without the signs of cp1252.
        whole: The first lines with characters beyond ASCII, unchanged.
    """
    misread = {name: count for name in _LEGACY if (count := _measure_misread(whole, name)) is not None}
    least = min(misread.values(), default=0.0)
    single = _DOUBLED.sub(rb"\1", sample)
    chaos: dict[str, float] = {}
    coherence: dict[str, float] = {}
    for (
        name,
        share,
    ) in misread.items():  # one at a time: of several, those similar to one that does not fit are left out
        if share > least + _MAX_MISREAD:
            continue
        content = sample if name in _MULTIBYTE else single
        for match in from_bytes(content, cp_isolation=[name], threshold=_MAX_CHAOS, enable_fallback=False):
            chaos[name], coherence[name] = match.chaos, match.coherence
    common = sample.decode(_LEGACY[0], errors="ignore")
    usual = {_LEGACY[0]} if not _MISREAD.search(common) and not _RARE.search(common) else set[str]()
    ranked: list[str] = []
    while remaining := [name for name in chaos if name not in ranked]:
        best = min(chaos[name] for name in remaining)
        near = [name for name in remaining if chaos[name] <= best + _TOLERANCE]
        most = max(coherence[name] for name in near)
        near = [name for name in near if coherence[name] >= most - (_LEAD if name in usual else _TOLERANCE)]
        ranked.append(min(near, key=lambda name: misread[name]))  # the first of equal ones
    return ranked


def _measure_misread(lines: bytes, name: str) -> float | None:
    """Return the share of characters beyond ASCII that words do not have; None if the text is not in the encoding."""
    try:
        text = lines.decode(name)
    except UnicodeDecodeError as error:
        if error.end < len(lines) - 4:  # the last character of a beginning may be cut
            return None
        text = lines.decode(name, errors="ignore")
    return len(_MISREAD.findall(text)) / max(1, sum(not char.isascii() for char in text))


def _find_by_alphabet(sample: bytes) -> str | None:
    """Find the encoding in which the letters beyond ASCII are those of one language, where cp1252 has none for them.

    Hungarian in cp1250 has the bytes of õ and û for ő and ű: each is a usual letter of cp1252, and no language has
    them beside á and ö.
    """
    uncovered: dict[str, float] = {}
    for name, alphabets in _ALPHABETS.items():
        text = sample.decode(name, errors="replace").lower()
        letters = Counter(char for char in text if not char.isascii() and char not in _PUNCTUATION)
        if len(letters) < _DISTINCT:
            return None
        count = letters.total()
        missing = min(count - sum(letters[char] for char in alphabet) for alphabet in alphabets)
        if name == _LEGACY[0] and (missing < 2 or missing <= (1 - _UNCOVERED) * count):
            return None
        uncovered[name] = missing / count
    covered = [name for name, share in uncovered.items() if share <= 1 - _COVERED]
    return covered[0] if len(covered) == 1 else None


def _describe_position(error: UnicodeError, name: str, content: bytes) -> str:
    if not isinstance(error, UnicodeDecodeError):
        return f"the content is not in {name}: {error}"
    line = 1 + content.count(b"\n", 0, error.start)
    invalid_bytes = error.object[error.start : error.end]
    return f"line {line} is not in {name} (byte {error.start}, {invalid_bytes.hex(' ')})"
