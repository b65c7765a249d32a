"""``fedspan watch``: the page's address, the browser, and its end."""

import time
import webbrowser
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

web = pytest.importorskip("fedspan.monitoring.web")
pytest.importorskip("uvicorn", reason="the extra fedspan[web] is not installed")


@pytest.mark.parametrize("is_opened", [False, True])
def test_the_page_is_shown_until_ctrl_c(
    is_opened: bool, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    class Page:
        url = "http://127.0.0.1:7/secret"

        def __init__(self, read: Callable[[], Any], port: int) -> None:
            events.append(port)

        def __enter__(self) -> "Page":
            return self

        def __exit__(self, *_: object) -> None:
            events.append("closed")

    @contextmanager
    def write_redirect(url: str) -> Generator[Path]:
        assert url == Page.url
        yield tmp_path / "redirect.html"

    monkeypatch.setattr(web, "WebPage", Page)
    monkeypatch.setattr(web, "write_redirect", write_redirect)
    monkeypatch.setattr(webbrowser, "open", events.append)
    monkeypatch.setattr(time, "sleep", Mock(side_effect=KeyboardInterrupt))
    result = call("watch", tmp_path / "run", "--port", 9, *(["--open"] if is_opened else []))
    assert result.exit_code == 0, result.output
    assert "is shown at\n  http://127.0.0.1:7/secret\nuntil Ctrl-C" in result.output
    assert "stopped; the run itself is not affected" in result.output
    assert events == [9, *([(tmp_path / "redirect.html").as_uri()] if is_opened else []), "closed"]
