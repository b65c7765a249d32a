# ruff: noqa: RUF001
"""Encodings of files: Unicode by its own rules, older ones by rank, and what cannot be one."""

import codecs
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspan.data import encodings
from fedspan.data.builtin import find_corpus_file
from fedspan.data.config import DataConfig
from fedspan.data.encodings import convert_to_utf8, decode
from fedspan.data.loading import load

TEXTS = {
    "cp1252": "text;label\nLe café est fermé à l'été, où étiez-vous?;non\nIt’s a “great” film – really…;oui\n",
    "latin-1": "text;label\nDie Straße ist für Fußgänger gesperrt;gut\nÜbermäßig schön;schlecht\n",
    "cp1250": "text;label\nZażółć gęślą jaźń;tak\nŁódź jest piękna;nie\n",
    "cp1251": "текст;метка\nПривет, как дела;хорошо\nОчень плохо;плохо\n",
    "cp1253": "text;label\nΚαλημέρα κόσμε;καλό\nΠολύ κακό;κακό\n",
    "cp1254": "text;label\nGünaydın dünya, çok güzel şey;iyi\nKötü ığdır;kötü\n",
    "koi8-r": "текст;метка\nПривет, как дела;хорошо\nОчень плохо;плохо\n",
    "shift_jis": "text,label\nこんにちは世界、元気ですか,良い\nとても悪い映画です,悪い\n",
    "gb18030": "text,label\n你好世界，今天天气很好,好\n这部电影非常糟糕,坏\n",
    "euc_kr": "text,label\n안녕하세요 세계,좋아\n정말 나쁜 영화,나빠\n",
}
UNICODE = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")


@pytest.mark.parametrize("encoding", sorted(TEXTS))
def test_older_encodings_are_detected(encoding: str) -> None:
    assert decode(TEXTS[encoding].encode(encoding))[0] == TEXTS[encoding]
    assert decode(TEXTS[encoding].encode(encoding), encoding) == (TEXTS[encoding], encoding)


@pytest.mark.parametrize("encoding", UNICODE)
@pytest.mark.parametrize("text", ["text,label\nplain,a\n", TEXTS["cp1252"]])
def test_unicode_is_detected_with_a_mark_and_without(encoding: str, text: str) -> None:
    assert decode(text.encode(encoding))[0] == text
    assert convert_to_utf8(text.encode(encoding))[0] == text.encode()


@given(st.text())
def test_any_text_in_utf_8_is_read_as_it_is(text: str) -> None:
    content = text.encode(errors="ignore")
    if not content.startswith((codecs.BOM_UTF8, b"\0")) and content[:1000].count(0) * 4 <= len(content[:1000]):
        assert decode(content) == (content.decode(), "utf-8")


def test_a_short_word_in_latin_1() -> None:
    assert decode("text;label\né;a\n".encode("latin-1")) == ("text;label\né;a\n", "cp1252")


SPARSE = {
    "price": ("text,label\nWhy was I charged £5 for a transfer?,a\nWhere is my card?,b\n", "cp1252"),
    "euro": ("text,label\nI paid €1 more,a\nIt’s “great” – really,b\n", "cp1252"),
    "rights": ("text,label\n© 2020 Acme,a\nAcme® products…,b\nwait … what,a\n", "cp1252"),
    "celsius": ("text,label\nThe oven was at 180°C,a\n,b\n", "cp1252"),
    "dutch": ("text,label\néén keer geïnstalleerd,a\nHet hele idee is één grote ramp,b\n", "cp1252"),
    "turkish": (
        "text,label\nBu ürün çok kötü, iade ettim,kötü\nKargo hızlı geldi, teşekkürler,iyi\n"
        "Fiyatına göre iyi bir ürün değil,kötü\nGüzel ama küçük geldi,iyi\n",
        "cp1254",
    ),
    "polish": (
        "text,label\nDlaczego mój przelew się nie udał?,a\nJak mogę zwiększyć limit karty płatniczej,b\n",
        "cp1250",
    ),
    "macintosh": (TEXTS["cp1252"], "mac_roman"),
    "finnish": ("text,label\nMissä korttini on?,a\nMaksu epäonnistui tänään,b\nOnko se jo lähetetty?,a\n", "cp1252"),
    "dutch words": ("text,label\ngéén reactie gekregen,a\nHet hele idee is één grote ramp,b\n", "cp1252"),
    "swiss": ("text,label\nBäär in Zürich,a\nwhere is my card,b\n", "cp1252"),
    "msdos german": (
        "text;label\nSchöne Grüße aus München;a\nÜberweisung möglich?;b\nWo ist die Karte für das Konto?;a\n",
        "cp850",
    ),
    "msdos french": (
        "text;label\nLe café est fermé à l'été, où étiez-vous?;non\nJe n'ai pas reçu ma carte;a\n",
        "cp850",
    ),
    "msdos russian": (TEXTS["cp1251"], "cp866"),
    "macintosh swedish": ("text,label\nVar är mitt kort? Jag har väntat på det,a\nKöpet gick inte,b\n", "mac_roman"),
    "cantonese": ("text,label\n這部電影好好睇,a\nT恤,b\n", "big5"),
}


@pytest.mark.parametrize("name", SPARSE)
def test_few_characters_beyond_ascii_are_enough(name: str) -> None:
    """Signs alone are those of cp1252: other encodings have them in other places or not at all."""
    text, encoding = SPARSE[name]
    assert decode(text.encode(encoding)) == (text, encoding)


@pytest.mark.parametrize("name", ["Väänänen", "Jääskeläinen", "Mäkelä", "Höök", "géén", "één", "Zoë", "São Paulo"])
@pytest.mark.parametrize("lines", [0, 50])
def test_one_name_beyond_ascii(name: str, lines: int) -> None:
    """Letters that occur twice are no sign of another encoding, nor of an East Asian character."""
    text = "text,label\n" + lines * "where is my card,a\n" + f"{name},b\n"
    assert decode(text.encode("cp1252")) == (text, "cp1252")


def test_english_texts_with_names_of_swiss_towns() -> None:
    """The names alone fit cp1250, too, and the frequencies of English letters differ by chance."""
    rows = find_corpus_file("builtin:patient-messages", "train", "data.train").read_text(encoding="utf-8").splitlines()
    draws, towns = random.Random(0), ("Gen\u00e8ve", "Z\u00fcrich S\u00fcd", "Basel", "Bern", "Chur")
    lines = [f"{draws.choices(towns, (5, 4, 3, 2, 1))[0]};{row}\n" for row in rows if row.isascii()]
    content = "".join(lines).encode("cp1252")
    found = {length: decode(content[:length])[1] for length in range(2**13, len(content), 2**15)}
    assert set(found.values()) == {"cp1252"}, found


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_english_queries_with_a_few_currency_signs(real_data: Path, encoding: str) -> None:
    content = (real_data / "banking77" / "train.csv").read_text(encoding="utf-8").encode(encoding, errors="ignore")
    assert decode(content) == (content.decode("cp1252"), "cp1252")


def test_the_beginning_of_a_file_may_end_inside_a_character() -> None:
    for encoding in ("utf-8", "utf-16", "gb18030"):
        content = TEXTS["gb18030"].encode(encoding)
        for length in range(40, len(content)):
            text, _ = decode(content[:length], encoding, is_complete=False)
            assert TEXTS["gb18030"].startswith(text)
    assert decode(TEXTS["gb18030"].encode()[:41], is_complete=False)[1] == "utf-8"


def test_damaged_utf_8_is_not_taken_for_another_encoding() -> None:
    content = ("één, twee, drieën\n" * 20).encode() + b"\xe9n\n"
    with pytest.raises(ValueError, match=r"line 21 is not in utf-8 \(byte \d+, e9\)"):
        decode(content)
    assert decode(content, "latin-1")[1] == "latin-1"


def test_what_is_no_encoding() -> None:
    with pytest.raises(ValueError, match="the encoding 'utf-9' is unknown"):
        decode(b"text", "utf-9")
    with pytest.raises(ValueError, match="line 2 is not in ascii"):
        decode("a\né".encode(), "ascii")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "cp1251"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_files_of_text_are_read_in_their_encoding(tmp_path: Path, encoding: str, kind: str) -> None:
    texts = ["Die Straße ist für Fußgänger gesperrt", "Übermäßig schön, aber größer"]
    if encoding == "cp1251":
        texts = ["Привет, как дела сегодня", "Очень плохо, просто ужасно"]
    rows = [f'{{"text": "{text}", "label": "{label}"}}' for text, label in zip(texts, "ab", strict=True)]
    content = {
        "csv": "text;label\n" + "".join(f"{text};{label}\n" for text, label in zip(texts, "ab", strict=True)),
        "jsonl": "\n".join(rows),
        "json": f"[{', '.join(rows)}]",
    }[kind]
    path = tmp_path / f"t.{kind}"
    path.write_bytes(content.encode(encoding))
    data = load(DataConfig(train=str(path), test_fraction=0))
    assert data.train["text"][:] == texts
    assert "(data.encoding)" in data.notes[0]
    named = load(DataConfig(train=str(path), test_fraction=0, encoding=encoding))
    assert named.train["text"][:] == texts


@pytest.mark.parametrize("name", [*TEXTS, *UNICODE])
def test_a_file_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Characters of several bytes that lie across the end of a piece are whole."""
    text = 20 * TEXTS.get(name, TEXTS["cp1251"])
    content = text.encode(name)
    whole = convert_to_utf8(content, name)
    monkeypatch.setattr(encodings, "_PIECE", 7)
    assert convert_to_utf8(content, name) == whole
    assert whole[0].decode() == text


HUNGARIAN = """Miért nem érkezett meg a kártyám, amit két hete rendeltem?
A kártyámat elutasították a boltban, holott van rajta elég pénz.
Szeretném tudni, mikor írják jóvá az átutalást a számlámon.
Elveszett a bankkártyám, kérem tiltsák le minél előbb.
Sürgősen szükségem lenne egy új kártyára, mert a régi lejárt.
A fűtés díja kétszer lett levonva a számlámról.
Hűséges ügyfelük vagyok, mégis visszautasították a kérelmemet.
Mennyi idő alatt ér oda egy nemzetközi átutalás?
"""
ROMANIAN = """De ce nu a ajuns încă noul meu card bancar?
Cardul meu a fost respins în magazin, deşi am destui bani în cont.
Aş dori să ştiu când va fi creditată plata în contul meu.
De ce mi s-a perceput o taxă pentru retragerea de numerar?
Am nevoie urgentă de un card nou, fiindcă cel vechi a expirat.
"""
POLISH = """Dlaczego moja karta jeszcze nie dotarła?
Zgubiłem kartę, proszę ją natychmiast zablokować.
Jak mogę zmienić kod PIN będąc za granicą?
"""
CZECH = """Proč ještě nepřišla moje nová karta?
Moje karta byla v obchodě zamítnuta, přestože mám dost peněz.
"""
PORTUGUESE = """As transações não são exibidas, e a cobrança está pendente.
Perdi o cartão, por favor bloqueiem-no; há dúvidas, avós e pôr.
"""
ESTONIAN = """Miks mu kaart ei ole veel kohale jõudnud? Õigus on kliendil.
Võib-olla töötab see homme, aga ma ei jõua nii kaua oodata; küsin üle.
"""
NAMES = "name,city\nJosé Simões,Lisbon\nBjörn Müller,Köln\nFrançois Lefèvre,Orléans\nSøren Ångström,Malmö\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        *((text, "cp1250") for text in (HUNGARIAN, ROMANIAN, POLISH, CZECH, f"„Így van”, mondta – és…\n{HUNGARIAN}")),
        *((text, "cp1252") for text in (PORTUGUESE, ESTONIAN, NAMES)),
    ],
)
def test_letters_of_one_language_decide(text: str, encoding: str) -> None:
    """ő and ű of Hungarian are õ and û in cp1252, which are usual letters on their own."""
    assert decode(text.encode(encoding))[0] == text
