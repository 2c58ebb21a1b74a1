from __future__ import annotations

import base64
import http.server
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.finetuning.vision_families import picture

from windlass.core.errors import DataError
from windlass.text.image_files import ImageFiles, source_of


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_every_way_to_give_an_image_opens_the_same(tmp_path: Path) -> None:
    image = picture(1, 5, 3)
    content = encoded(image)
    (tmp_path / "a.png").write_bytes(content)
    text = base64.b64encode(content).decode()
    spaced = tmp_path / "ä b#1.png"
    spaced.write_bytes(content)
    files = ImageFiles(str(tmp_path))
    ways = [
        image, content, "a.png", Path("a.png"), f"file://{tmp_path}/a.png", spaced.as_uri(), np.asarray(image),
        f"data:image/png;base64,{text}", {"bytes": content, "path": None}, {"bytes": None, "path": "a.png"},
        {"type": "image", "image": {"path": "a.png"}}, {"type": "image", "base64": text},
        {"type": "image", "url": "a.png"},
    ]  # fmt: skip
    for way in ways:
        opened = files.open(source_of(way))
        assert opened.tobytes() == image.tobytes()
        assert files.size(source_of(way)) == (5, 3)


def test_colours_and_orientation(tmp_path: Path) -> None:
    grey = Image.new("LA", (4, 2), (9, 100))
    assert ImageFiles().open(grey).getpixel((0, 0)) == (9, 9, 9)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    turned = encoded(picture(0, 8, 4), "JPEG", exif=exif)
    assert ImageFiles().size(turned) == ImageFiles().open(turned).size == (4, 8)


def test_what_does_not_open_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    files = ImageFiles(str(tmp_path))
    with pytest.raises(DataError, match=r"the image 'missing\.png' does not open: there is no such file"):
        files.size("missing.png")
    with pytest.raises(DataError, match=r"the image 'text\.png' does not open: cannot identify image file"):
        files.size("text.png")
    for kind in ("png", "jpeg", "webp"):
        whole = encoded(picture(0, 64, 64), kind)
        (tmp_path / f"part.{kind}").write_bytes(whole[: len(whole) // 2])
        (tmp_path / f"more.{kind}").write_bytes(whole + bytes(500))
        assert files.size(f"more.{kind}") == (64, 64)
        for look in (files.size, files.open):
            with pytest.raises(DataError, match=rf"the image 'part\.{kind}' does not open: "):
                look(f"part.{kind}")
    for values in (np.uint16, np.float32):  # Pillow would cut the first at 255, and make the second black
        deep = Image.fromarray(np.linspace(0, 1, 16).reshape(4, 4).astype(values))
        deep.save(tmp_path / "deep.tiff")
        for look in (files.size, files.open):
            with pytest.raises(DataError, match=r"'deep\.tiff' does not open: .* 8 bits \(mode '"):
                look("deep.tiff")
    with pytest.raises(DataError, match="the int does not open: a int is not an image"):
        files.size(3)
    with pytest.raises(DataError, match=r"an image with the keys \['path'\] has no content"):
        source_of({"path": None})


@pytest.fixture
def address() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(encoded(picture(2, 6, 6)))

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/x.png"
    server.shutdown()
    thread.join()
    server.server_close()


def test_addresses_are_read_only_if_they_are_allowed(address: str) -> None:
    with pytest.raises(DataError, match=r"addresses are not read.*allow_image_urls"):
        ImageFiles().size(address)
    assert ImageFiles(allow_urls=True).open(address).tobytes() == picture(2, 6, 6).tobytes()
