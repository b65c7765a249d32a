# ruff: noqa: RUF001
"""Dialects of delimited files, as they were written, and encodings: Unicode by its rules, older ones by rank."""

import codecs
import csv
import io
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspan.data import encodings
from fedspan.data.builtin import find_corpus_file
from fedspan.data.config import DataConfig
from fedspan.data.dialects import detect_dialect, has_header
from fedspan.data.encodings import convert_to_utf8, decode
from fedspan.data.loading import load
from helpers.refusals import refused

REVIEWS = ["Great film, really", "Too long; too slow", "I liked it | mostly", 'He said "no"', "Fine", "A\tB test, ok"]
LABELS = ["pos", "neg", "pos", "neg", "pos", "neg"]


def written(rows: list[list[str]], delimiter: str, end: str = "\n", **style: Any) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, lineterminator=end, **style).writerows(rows)
    return out.getvalue()


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["t.csv", "t.txt"])
def test_a_file_in_any_delimiter_and_line_end(tmp_path: Path, delimiter: str, end: str, name: str) -> None:
    rows = [["review", "stars"], *([text, label] for text, label in zip(REVIEWS, LABELS, strict=True))]
    (tmp_path / name).write_text(written(rows, delimiter, end), newline="")
    config = DataConfig(train=str(tmp_path / name), text="review", label="stars", test_fraction=0)
    data = load(config)
    assert data.train["text"][:] == REVIEWS
    assert data.labels == ("neg", "pos")
    assert len(data.notes) == (delimiter != ",")
    assert all("data.delimiter" in note for note in data.notes)


@pytest.mark.parametrize("quoting", [csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
def test_a_tsv_in_quotes_is_read_without_them(quoting: Any) -> None:
    rows = [["text", "label"], *([f"{text}\tmore", label] for text, label in zip(REVIEWS, LABELS, strict=True))]
    found = detect_dialect(written(rows, "\t", quoting=quoting), tabs=True)
    assert (found.delimiter, found.quoting, found.names) == ("\t", "double", ("text", "label"))


def test_fields_in_single_quotes() -> None:
    found = detect_dialect('text\tlabel\n"one\ta\ntwo "\tb\n"both"\ta\nnone\tb\n', tabs=True)
    assert found.quoting == "none"
    rows = [["text", "label"], *([text, label] for text, label in zip(REVIEWS, LABELS, strict=True))]
    found = detect_dialect("text,label\n'a, b',x\n'c, d, e',y\n'f',x\n", tabs=False)
    assert (found.delimiter, found.quoting) == (",", "single")
    assert detect_dialect(written(rows, ","), tabs=False).quoting == "double"
    assert detect_dialect("text,label\n'a b',x\n'it''s d',y\n", tabs=False).quoting == "single"
    assert detect_dialect("text,label\nit's late,x\nwe don't know,y\n", tabs=False).quoting == "double"


def test_a_csv_whose_quotes_are_text() -> None:
    found = detect_dialect('text,label\n"one,a\ntwo,b\nthree,a\nfour,b\n', tabs=False)
    assert (found.delimiter, found.quoting) == (",", "none")


def test_the_line_that_excel_writes_first(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("sep=;\ntext;label\na, b;x\nc, d;y\n")
    data = load(DataConfig(train=str(tmp_path / "t.csv"), test_fraction=0))
    assert data.train.to_dict() == {"text": ["a, b", "c, d"], "label": [0, 1]}


def test_what_is_named_is_not_detected() -> None:
    sample = "text;label,more\na;b,c\nd;e,f\n"
    assert detect_dialect(sample, tabs=False).delimiter == ","
    assert detect_dialect(sample, tabs=False, delimiter=";", header=False).names == ("column_1", "column_2")
    assert detect_dialect("'a;b';c\n'd;e';f\n", tabs=False, quoting="single").delimiter == ";"


@pytest.mark.parametrize(
    ("lines", "header"),
    [
        ("text,label\none,a\ntwo,b", True),
        ("note,kind\none,a\ntwo,b", True),
        ("great,yes\nbad,no\nfine,yes\nawful,no\nlovely,yes", False),
        ("review,stars\ngreat,5\nbad,1\nfine,4", True),
        ("great,5\nbad,1\nfine,4", False),
        ("0,1\ngreat,5\nbad,1\nfine,4", True),  # pandas' names of columns without any
        (",text,label\n0,one,a\n1,two,b", True),  # pandas' index
        ("the food was cold and late,x\nwe waited for an hour at least,y\nnice,z", False),
        ("What did you think of our service?,How many stars?\ngood,5\nbad,1\nbad,2", True),
        ("2019,2020\ngood,5\nbad,1\nbad,2", False),
        ("question,answer\nwho?,me\nwhat?,that", True),
        ("text,label", True),
        ("message,spam\ncall me,ham\nwin now,spam\nhello,ham\nfree money,spam", True),  # named as one of its values
        ("email,spam\ncall me,ham\nwin now,spam\nhello,ham\nfree money,spam", True),
        ("what is it,question\nwho,question\nno,comment\nyes,comment\nhow,question", False),
    ],
)
def test_whether_the_first_line_is_a_header(lines: str, header: bool) -> None:
    assert has_header([line.split(",") for line in lines.splitlines()]) is header


def test_a_first_line_with_a_column_that_the_user_names_is_a_header() -> None:
    rows = [line.split(",") for line in ("great,yes", "bad,no", "fine,yes", "awful,no", "lovely,yes")]
    assert has_header(rows, {"great"})
    assert not has_header(rows, {"text"})


def test_columns_without_a_header_are_named_by_position(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("great,yes\nbad,no\nfine,yes\nawful,no\nlovely,yes\n")
    data = load(DataConfig(train=str(path), text="column_1", label="column_2", test_fraction=0))
    assert data.train["text"][:] == ["great", "bad", "fine", "awful", "lovely"]
    assert "the first line looks like an example: the columns are named column_1, column_2" in data.notes[0]
    named = load(DataConfig(train=str(path), text="great", label="yes", header=True, test_fraction=0))
    assert named.train["text"][:] == ["bad", "fine", "awful", "lovely"]
    assert named.notes == ()


FIELDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
LONG = st.lists(st.tuples(FIELDS, FIELDS), min_size=4, max_size=9)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(LONG, st.sampled_from([",", ";", "\t", "|"]), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_rows_written_in_quotes_are_read_again(
    tmp_path: Path, drawn: list[tuple[str, str]], delimiter: str, end: str, bom: bool
) -> None:
    """Every field is in quotes, as a spreadsheet can write it, so that any text is possible, line ends included."""
    rows = [["text", "label"], *([f"w {text}\n{more}", "ab"[at % 2]] for at, (text, more) in enumerate(drawn))]
    path = tmp_path / "t.csv"
    path.write_text(
        written(rows, delimiter, end, quoting=csv.QUOTE_ALL), newline="", encoding="utf-8-sig" if bom else "utf-8"
    )
    train = load(DataConfig(train=str(path), test_fraction=0)).train
    assert train["text"][:] == [row[0] for row in rows[1:]]


_ROWS = [f"{text.replace(',', ' ')},{label}" for text, label in zip(REVIEWS, LABELS, strict=True)]


@pytest.mark.parametrize("kind", ["csv", "txt"])
@pytest.mark.parametrize("headed", ["train", "test"])
def test_a_header_in_one_of_two_files(tmp_path: Path, headed: str, kind: str) -> None:
    """The columns of the file without one are those of the other one, by position."""
    for part in ("train", "test"):
        lines = ["remark,verdict"] * (part == headed) + _ROWS
        (tmp_path / f"{part}.{kind}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns = {"text": "remark", "label": "verdict"} if headed == "train" else {"text": "column_1", "label": "column_2"}
    config = DataConfig(train=str(tmp_path / f"train.{kind}"), test=str(tmp_path / f"test.{kind}"), **columns)
    data = load(config)
    assert data.test["text"][:] == data.train["text"][:] == [row.partition(",")[0] for row in _ROWS]
    (note,) = [one for one in data.notes if one.startswith(str(tmp_path / "test")) and "by position" in one]
    assert f"of {tmp_path / 'train'}.{kind} by position" in note
    assert "remark, verdict" in note
    assert not [one for one in data.notes if "data.header: true" in one and one.startswith(str(tmp_path / "test"))]


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_header_that_would_be_read_as_an_example_is_refused(tmp_path: Path, part: str) -> None:
    for one in ("train", "test"):
        lines = ["text,label"] * (one == part) + _ROWS
        (tmp_path / f"{one}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns: dict[str, Any] = {"text": "column_1", "label": "column_2", "header": False}
    config = DataConfig(train=str(tmp_path / "train.csv"), test=str(tmp_path / "test.csv"), **columns)
    with refused("data.header", f"{part}.csv names the columns: text, label. Leave this field out"):
        load(config)


def test_other_numbers_of_columns_are_not_matched_by_position(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("\n".join(["remark,verdict", *_ROWS]) + "\n", encoding="utf-8")
    (tmp_path / "test.csv").write_text("\n".join(f"{row},{row}" for row in _ROWS) + "\n", encoding="utf-8")
    config = DataConfig(
        train=str(tmp_path / "train.csv"), test=str(tmp_path / "test.csv"), text="remark", label="verdict"
    )
    with refused("data.text"):
        load(config)
    (tmp_path / "test.csv").write_text("\n".join(_ROWS) + "\n", encoding="utf-8")
    with refused("data.text"):
        load(config.model_copy(update={"header": True}))


@pytest.mark.parametrize("titles", ["Survey 2026, part 1;;\n", "# exported by «tool»\n\n", "One;;\nTwo;;\n"])
def test_title_rows_above_the_header(titles: str) -> None:
    table = "id;comment;category\n1;good;a\n2;bad;b\n3;so so;a\n"
    found = detect_dialect(titles + table, tabs=False)
    assert (found.delimiter, found.header, found.names) == (";", True, ("id", "comment", "category"))
    assert found.titles == tuple(line.rstrip(";") for line in titles.split("\n") if line)
    assert (titles + table).encode()[found.skip :].strip() == table.encode().strip()


@pytest.mark.parametrize(
    "text",
    [
        "late,\nearly,a\nlate,b\nearly,a\nlate,b\n",  # a first example without a label
        "On Monday it was late,\n" + "On Tuesday it was early,a\nOn Friday it was late,b\n" * 20,
        "text,\nlate,a\nearly,b\nlate,a\n",  # an unnamed column
        ",text\n0,late\n1,early\n",  # an index
        "Survey,\nlate,\n",
    ],
)
def test_a_first_row_with_one_value_that_is_no_title(text: str) -> None:
    assert detect_dialect(text, tabs=False).titles == ()


def test_the_columns_that_a_user_names_are_no_title() -> None:
    text = "remark,\nid,label\n1,a\n2,b\n"
    assert detect_dialect(text, tabs=False).titles == ("remark",)
    assert detect_dialect(text, tabs=False, requested={"remark"}).titles == ()
    assert detect_dialect(text, tabs=False, header=True).names == ("remark", "")


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
    "swiss": ("text,label\nBäär in Zürich,a\nwhere is my card,b\n", "cp1252"),
    "msdos german": (
        "text;label\nSchöne Grüße aus München;a\nÜberweisung möglich?;b\nWo ist die Karte für das Konto?;a\n",
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


def test_a_beginning_may_end_inside_a_character_and_damaged_utf_8_is_no_other_encoding() -> None:
    for encoding in ("utf-8", "utf-16", "gb18030"):
        content = TEXTS["gb18030"].encode(encoding)
        for length in range(40, len(content)):
            text, _ = decode(content[:length], encoding, is_complete=False)
            assert TEXTS["gb18030"].startswith(text)
    assert decode(TEXTS["gb18030"].encode()[:41], is_complete=False)[1] == "utf-8"
    content = ("één, twee, drieën\n" * 20).encode() + b"\xe9n\n"
    with pytest.raises(ValueError, match=r"line 21 is not in utf-8 \(byte \d+, e9\)"):
        decode(content)
    assert decode(content, "latin-1")[1] == "latin-1"


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
