"""Small files that decode to huge images."""

import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

from fedspan.data import DataConfig
from fedspan.data.files import read_source
from fedspan.data.images import MAX_PIXELS, decode_image, find_readable_images
from fedspan.tasks import images as tasks

SIDE = 13_000


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A black PNG of half a megabyte in a folder of a class, whose 500 MB take seconds to compress."""

    def make_chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + 3 * SIDE)) for _ in range(SIDE)) + packer.flush()
    chunks = {b"IHDR": SIDE.to_bytes(4) * 2 + bytes([8, 2, 0, 0, 0]), b"IDAT": rows, b"IEND": b""}
    path = tmp_path_factory.mktemp("images") / "cat" / "bomb.png"
    path.parent.mkdir()
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(make_chunk(*chunk) for chunk in chunks.items()))
    assert path.stat().st_size < 600_000
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(bomb: Path) -> None:
    code = r"""
import pathlib, re, sys
from fedspan.data.images import decode_image
try:
    decode_image({"bytes": None, "path": sys.argv[1]})
except ValueError as error:
    print(error)
status = pathlib.Path("/proc/self/status").read_text()  # getrusage would count the process that forked this one
print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code, str(bomb)], capture_output=True, text=True, check=True)
    reason, mebibytes = done.stdout.splitlines()
    assert reason == "13000 x 13000 pixels are more than 50 million"
    assert int(mebibytes) < 600


def test_such_an_image_is_not_readable(bomb: Path) -> None:
    Image.new("RGB", (4, 4)).save(bomb.with_name("small.png"))
    source = read_source(DataConfig(train=str(bomb.parents[1]), image="image"), "train", "data")
    assert find_readable_images(source, "image") == [False, True]


def test_an_image_of_a_large_camera_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    Image.new("1", (10_000, MAX_PIXELS // 10_000)).save(path)
    assert decode_image({"bytes": None, "path": str(path)}).size == (10_000, MAX_PIXELS // 10_000)


def test_few_large_images_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_CHUNK", 3)
    monkeypatch.setattr(tasks, "_CHUNK_PIXELS", 100)
    images = [Image.new("RGB", (width, 10)) for width in (5, 5, 1, 20, 1, 1, 1, 1)]
    chunks = list(tasks._split(iter(images)))
    assert [image for chunk in chunks for image in chunk] == images
    assert [[image.width for image in chunk] for chunk in chunks] == [[5, 5], [1], [20], [1, 1, 1], [1]]
