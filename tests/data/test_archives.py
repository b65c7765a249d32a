"""Archives: images and texts by class are read, and nothing leads out of them, links or fills the memory."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from PIL import Image

from fedspan.data import archives
from fedspan.data.archives import read_archive
from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.errors import FedspanError
from fedspan.tasks.registry import get_task

Refused = Callable[..., FedspanError]
SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def png(shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("L", (4, 5), shade).save(out, "PNG")
    return out.getvalue()


def packed(path: Path, files: Mapping[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    kind = {".tar": "", ".gz": "gz", ".tgz": "gz", ".bz2": "bz2", ".xz": "xz"}[path.suffix]
    with tarfile.open(path, f"w:{kind}") as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_images_by_class(tmp_path: Path, suffix: str) -> None:
    files = {f"flowers/{label}/{number}.png": png(10 * number) for label in ("rose", "tulip") for number in range(3)}
    files |= {"flowers/README.md": b"notes", "__MACOSX/flowers/rose/._0.png": b"x", "flowers/.DS_Store": b"x"}
    path = packed(tmp_path / f"flowers{suffix}", files)
    data = load(DataConfig(train=str(path), test_fraction=0), task=get_task("image-classification").columns)
    assert data.labels == ("rose", "tulip")
    assert data.train["label"][:] == [0, 0, 0, 1, 1, 1]
    assert [image.getpixel((0, 0)) for image in data.train["image"]] == [0, 10, 20] * 2
    assert "left out 3 files that are not examples" in data.notes[0]


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_braces_in_the_path_of_archives(tmp_path: Path, suffix: str) -> None:
    """An archive a domain, as PACS is packed; its name in the archive, too."""
    for shade, domain in enumerate(("photo", "sketch")):
        packed(tmp_path / f"{domain}{suffix}", {f"{domain}/{label}/1.png": png(shade) for label in ("cat", "dog")})
    path = str(tmp_path / f"{{domain}}{suffix}")
    data = load(DataConfig(train=path, test_fraction=0), task=get_task("image-classification").columns)
    assert (data.train["label"][:], data.train["domain"][:]) == ([0, 1, 0, 1], ["photo", "photo", "sketch", "sketch"])
    assert [image.getpixel((0, 0)) for image in data.train["image"]] == [0, 0, 1, 1]


def test_a_damaged_archive_among_several(tmp_path: Path, refused: Refused) -> None:
    packed(tmp_path / "photo.tar", {f"{label}/1.png": png(0) for label in ("cat", "dog")})
    broken = tmp_path / "sketch.tar"
    broken.write_bytes(b"no archive")
    refused(
        "data.train",
        str(broken),
        ["cannot be read as an archive"],
        load,
        DataConfig(train=f"{tmp_path}/{{domain}}.tar"),
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_texts_by_domain_and_class(tmp_path: Path, suffix: str) -> None:
    files = {f"{site}/{label}/1.txt": f"{site} {label} é".encode("latin-1") for site in "ab" for label in ("no", "yes")}
    data = load(DataConfig(train=str(packed(tmp_path / f"t{suffix}", files)), test_fraction=0))
    assert data.train.to_dict() == {
        "text": ["a no é", "a yes é", "b no é", "b yes é"],
        "label": [0, 1, 0, 1],
        "domain": ["a", "a", "b", "b"],
        "file": ["a/no/1.txt", "a/yes/1.txt", "b/no/1.txt", "b/yes/1.txt"],
    }
    assert data.notes == (f"{tmp_path / f't{suffix}'}: detected encoding cp1252 in 4 of 4 files (data.encoding)",)


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
def test_files_that_are_no_examples_are_left_out_and_counted(tmp_path: Path, suffix: str) -> None:
    """A README at the top, as nearly every download has one."""
    files = {f"mails/{label}/{number}.txt": b"some words" for label in ("ham", "spam") for number in range(2)}
    about = ["mails/README.txt", "mails/LICENSE", "__MACOSX/mails/._ham", "mails/ham/.DS_Store"]
    path = packed(tmp_path / f"mails{suffix}", {**{name: b"about" for name in about}, **files, "notes.txt": b"about"})
    data = load(DataConfig(train=str(path), test_fraction=0))
    assert (data.labels, len(data.train)) == (("ham", "spam"), 4)
    words = "left out 5 files that are not examples (mails/README.txt, mails/LICENSE, __MACOSX/mails/._ham, ...)"
    assert data.notes[0] == f"{path}: {words}"


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
@pytest.mark.parametrize(
    "name", ["../rose/1.png", "a/../../1.png", "/etc/rose/1.png", "C:/rose/1.png", "..\\rose\\1.png"]
)
def test_a_name_that_leads_out_of_the_archive(tmp_path: Path, refused: Refused, suffix: str, name: str) -> None:
    path = packed(tmp_path / f"t{suffix}", {"a/1.png": png(0), name: png(0)})
    refused("data.train", str(path), ["leads out of the archive"], load, DataConfig(train=str(path)))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("rose/1.png")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(ValueError, match=r"rose/1\.png is a link or a device"):
        read_archive(path, {".png"})


def test_a_link_in_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("rose/1.png")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(ValueError, match=r"rose/1\.png is a link or a device"):
        read_archive(path, {".png"})


@pytest.mark.parametrize("suffix", [".zip", ".tar.xz"])
def test_contents_beyond_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """A few bytes that unpack to many; the bound is on what is read, not on what the archive promises."""
    bomb = packed(tmp_path / f"bomb{suffix}", {"rose/1.png": bytes(1 << 22), "rose/2.png": bytes(1 << 22)})
    assert bomb.stat().st_size < 10_000
    monkeypatch.setattr(archives, "_FILE_BYTES", 1 << 21)
    with pytest.raises(ValueError, match=r"rose/1\.png exceeds the bounds \(2 MiB a file"):
        read_archive(bomb, {".png"})
    monkeypatch.setattr(archives, "_FILE_BYTES", 1 << 28)
    monkeypatch.setattr(archives, "_TOTAL_BYTES", 6 << 20)
    with pytest.raises(ValueError, match=r"rose/2\.png exceeds the bounds"):
        read_archive(bomb, {".png"})
    monkeypatch.setattr(archives, "_FILES", 1)
    with pytest.raises(ValueError, match="more than 1 files"):
        read_archive(bomb, {".png"})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_archive_that_is_damaged_or_none(tmp_path: Path, refused: Refused, suffix: str) -> None:
    path = packed(tmp_path / f"t{suffix}", {f"rose/{number}.png": png(number) for number in range(40)})
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"no archive", b""):
        path.write_bytes(damaged)
        with pytest.raises(FedspanError) as caught:
            load(DataConfig(train=str(path)), task=get_task("image-classification").columns)
        assert caught.value.field == "data.train"


def test_an_archive_without_images_or_texts(tmp_path: Path, refused: Refused) -> None:
    path = packed(tmp_path / "t.zip", {"a/b.pdf": b"text"})
    refused("data.train", str(path), ["t.zip holds none"], load, DataConfig(train=str(path)))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a/b.csv": b"text,label\n"}, "it holds a/b.csv, and tables are not read inside archives. Unpack it"),
        ({"images/1.png": b"", "images/2.png": b"", "labels.csv": b"file,label\n"}, "it holds labels.csv, and tables"),
        ({f"{part}/{label}/1.png": b"" for part in ("train", "test") for label in "ab"}, "unpack an archive before"),
    ],
)
def test_an_archive_that_must_be_unpacked(
    tmp_path: Path, refused: Refused, files: Mapping[str, bytes], words: str
) -> None:
    path = packed(tmp_path / "t.zip", files)
    refused("data.train", str(path), [words], load, DataConfig(train=str(path)))
