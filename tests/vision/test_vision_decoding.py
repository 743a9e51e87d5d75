"""Checks of image files in a process that can be killed."""

import os
import signal
import struct
import zlib
from pathlib import Path

import pytest

from msrl.vision import decoding
from msrl.vision.decoding import CheckedImage, DecodingLimits, check_images
from msrl.vision.errors import ImageError
from support import assert_mentions
from vision_folders import encoded, picture


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height):
    """Return a black PNG image of any size in few bytes."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = zlib.compress(bytes((1 + 3 * width) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_pictures_and_other_files_are_told_apart():
    files = [
        encoded(picture(30, 20), "JPEG"),
        b"no image",
        encoded(picture(91, 81), "JPEG")[:-2000],
        encoded(picture(32, 22), "WEBP"),
    ]
    jpeg, text, cut, webp = check_images(files)
    assert jpeg == CheckedImage(20, 30, "JPEG")
    assert webp == CheckedImage(22, 32, "WEBP")
    assert isinstance(text, ImageError) and text.reason == "not an image"
    assert isinstance(cut, ImageError) and cut.reason == "damaged image"
    assert check_images(files[2:3], must_decode=False) == [CheckedImage(81, 91, "JPEG")]
    assert check_images([]) == []


@pytest.mark.slow
def test_a_picture_beyond_the_memory_is_one_line_and_the_others_are_checked(monkeypatch):
    monkeypatch.setattr(decoding, "LIMITS", DecodingLimits(memory_bytes=64 << 20))
    large, small = check_images([png(6000, 6000), png(20, 30)])
    assert_mentions(large, "64 MiB")
    assert large.reason == "hostile image"
    assert small == CheckedImage(30, 20, "PNG")


def test_a_picture_beyond_the_time_is_one_line_and_the_others_are_checked(monkeypatch):
    monkeypatch.setattr(decoding, "LIMITS", DecodingLimits(time_s=0.02))
    first, late, last = check_images([png(20, 30), png(7000, 7000), png(30, 20)])
    assert first == CheckedImage(30, 20, "PNG")
    assert_mentions(late, "0.02 s")
    assert late.reason == "hostile image"
    assert last == CheckedImage(20, 30, "PNG")


def test_a_process_that_is_killed_is_replaced(monkeypatch):
    monkeypatch.setattr(decoding, "LIMITS", DecodingLimits(time_s=29.0))
    data = encoded(picture(30, 20))
    assert check_images([data]) == [CheckedImage(20, 30, "PNG")]
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    assert check_images([data, data]) == [CheckedImage(20, 30, "PNG")] * 2


def children():
    """Return the processes that check images for this one."""
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text("ascii")
    names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in listed.split()}
    found = [pid for pid, name in names.items() if b"decoding_process" in name]
    assert found
    return found
