"""Every kind of image is read as a viewer shows it, or refused with what to do."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from mmdecode.errors import InputError, MissingExtraError
from mmdecode.vlm.images import digest, read_image

RED, WHITE = (255, 0, 0), (255, 255, 255)


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(item):
    return np.asarray(read_image(item))


def halves(left, right, mode="RGB", size=(8, 4)):
    image = Image.new(mode, size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


@pytest.fixture
def photo(kit):
    return kit.image(3, (20, 12))


# What is simply read


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP", "JPEG", "JPEG2000"])
def test_every_common_format_is_read(photo, kind):
    smooth = photo.resize((3, 2)).resize((20, 12), Image.Resampling.BICUBIC)
    found = read_image(saved(smooth, kind))
    assert (found.mode, found.size) == ("RGB", (20, 12))
    assert np.abs(np.asarray(found, int) - np.asarray(smooth, int)).mean() < 8


def test_paths_bytes_images_and_arrays_are_the_same_image(photo, tmp_path):
    path = tmp_path / "a.png"
    photo.save(path)
    array = np.asarray(photo)
    planes = np.moveaxis(array, -1, 0)
    for item in (
        path,
        str(path),
        path.read_bytes(),
        bytearray(path.read_bytes()),
        Image.open(path),
        photo,
        array,
        array.astype(np.int64),
        planes,
        array / 255,
        torch.tensor(array),
        torch.tensor(planes / 255),
    ):
        assert pixels(item).tolist() == array.tolist()
        assert digest(read_image(item)) == digest(photo)
    assert digest(read_image(255 - array)) != digest(photo)


def test_the_ending_of_a_name_does_not_count(photo, tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(saved(photo, "PNG"))
    assert pixels(path).tolist() == np.asarray(photo).tolist()


def test_one_pixel_is_an_image():
    assert pixels(saved(Image.new("RGB", (1, 1), RED))).tolist() == [[list(RED)]]


def test_transparency_lies_over_white():
    sheer = halves((255, 0, 0, 255), (0, 0, 0, 0), "RGBA")
    for item in (sheer, saved(sheer), saved(sheer, "WEBP", lossless=True), np.asarray(sheer)):
        assert pixels(item)[0, [0, -1]].tolist() == [list(RED), list(WHITE)]
    half = pixels(Image.new("RGBA", (2, 2), (0, 0, 0, 128)))
    assert half[0, 0].tolist() == [127, 127, 127]
    grey = halves((10, 255), (10, 0), "LA")
    assert pixels(saved(grey))[0, [0, -1]].tolist() == [[10] * 3, list(WHITE)]


def test_palettes_are_looked_up():
    indexed = Image.new("P", (4, 4), 1)
    indexed.putpalette([0, 0, 255, *RED, 0, 255, 0])
    indexed.putpixel((0, 0), 2)
    for data in (saved(indexed), saved(indexed, "GIF")):
        assert pixels(data)[0, :2].tolist() == [[0, 255, 0], list(RED)]
    assert pixels(saved(indexed, transparency=2))[0, :2].tolist() == [list(WHITE), list(RED)]


def test_bilevel_and_grey_become_grey():
    assert pixels(saved(halves(0, 1, "1")))[0, [0, -1]].tolist() == [[0] * 3, [255] * 3]
    assert pixels(saved(halves(7, 200, "L")))[0, [0, -1]].tolist() == [[7] * 3, [200] * 3]


def test_cmyk_becomes_rgb():
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    for data in (saved(ink, "TIFF"), saved(ink, "JPEG", quality=95)):
        assert np.abs(pixels(data).astype(int) - RED).max() <= 4


def test_sixteen_bits_are_scaled_to_eight_and_not_clipped():
    levels = np.array([[0, 1000], [40_000, 65535]], np.uint16)
    image = Image.fromarray(levels)
    for item in (saved(image), saved(image, "TIFF"), image, levels):
        assert pixels(item)[..., 0].tolist() == [[0, 4], [156, 255]]


def test_levels_without_a_fixed_scale_are_stretched():
    assert pixels(Image.fromarray(np.array([[0.0, 0.5], [1.0, 0.25]], np.float32)))[
        ..., 1
    ].tolist() == [[0, 128], [255, 64]]
    deep = Image.fromarray(np.array([[-100, -20], [100, 60]], np.int32))
    assert pixels(saved(deep, "TIFF"))[..., 1].tolist() == [[0, 102], [255, 204]]
    assert pixels(Image.new("F", (2, 2), 7.0)).max() == 0


@pytest.mark.parametrize("turn", range(2, 9))
def test_the_turn_that_a_camera_noted_is_applied(photo, turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    turned = read_image(saved(photo, exif=exif.tobytes()))
    assert turned.size == ((12, 20) if turn > 4 else (20, 12))
    noted = photo.copy()
    noted.info["exif"] = exif.tobytes()
    assert digest(turned) == digest(ImageOps.exif_transpose(noted)) != digest(photo)


def test_the_first_frame_of_an_animation_is_used_with_a_warning(photo):
    frames = [photo, ImageOps.invert(photo)]
    for kind, options in (("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})):
        data = saved(photo, kind, save_all=True, append_images=frames[1:], **options)
        with pytest.warns(UserWarning, match=r"^film: has 2 frames or pages.*several images"):
            found = read_image(data, "film")
        assert digest(found) == digest(photo)


def test_a_photograph_followed_by_a_preview_is_no_animation(photo):
    found = read_image(saved(photo, "MPO", save_all=True, append_images=[photo.resize((4, 4))]))
    assert found.size == photo.size


def test_channels_may_come_first_or_last():
    array = np.zeros((3, 5, 4), np.uint8)  # as in numpy and PIL, the last axis wins
    assert read_image(array).size == (5, 3)
    assert read_image(np.zeros((3, 5, 7), np.uint8)).size == (7, 5)
    assert read_image(np.zeros((1, 5, 7), bool)).size == (7, 5)


# What is refused, and how


def damaged_png(photo):
    data = bytearray(saved(photo))
    data[60] ^= 0xFF
    return bytes(data)


def header_of(width, height):
    """A PNG that says how large it is and holds one row."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(3 * width + 1)))
        + chunk(b"IEND", b"")
    )


BROKEN = {
    "empty": (lambda photo: b"", "is empty"),
    "truncated": (lambda photo: saved(photo)[:200], "truncated"),
    "truncated jpeg": (lambda photo: saved(photo, "JPEG")[:-40], "truncated"),
    "damaged": (damaged_png, "damaged"),
    "header": (lambda photo: saved(photo)[:12], "no image that Pillow reads"),
    "noise": (lambda photo: bytes(range(7, 250)), "no image that Pillow reads"),
    "huge": (lambda photo: header_of(30_000, 30_000), "MAX_IMAGE_PIXELS"),
    "large": (lambda photo: header_of(10_000, 10_000), "MAX_IMAGE_PIXELS"),
    "mp4": (lambda photo: b"\0\0\0\x20ftypisom" + bytes(40), "is a video.*several images"),
    "webm": (lambda photo: b"\x1a\x45\xdf\xa3" + bytes(40), "is a video.*several images"),
    "heic": (lambda photo: b"\0\0\0\x20ftypheic" + bytes(40), "HEIC.*convert it"),
    "pdf": (lambda photo: b"%PDF-1.7 " + bytes(40), "PDF.*png"),
    "postscript": (lambda photo: b"%!PS-Adobe-3.0 EPSF-3.0\n" + bytes(40), "PostScript.*png"),
    "svg": (lambda photo: b'<?xml version="1.0"?>\n<svg width="3">', "SVG.*png"),
    "page": (lambda photo: b"\n<!DOCTYPE html><p>404", "web page.*download"),
    "sound": (lambda photo: b"RIFF\x24\0\0\0WAVEfmt ", "audio.*transcribe"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_whole_image_is_refused_by_name(photo, name, tmp_path):
    make, message = BROKEN[name]
    path = tmp_path / "a.png"
    path.write_bytes(make(photo))
    with pytest.raises(InputError, match=message) as caught:
        read_image(path)
    assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(InputError, match=rf"^image 2: .*{message}"):
        read_image(path.read_bytes(), "image 2")


def test_the_limit_is_pillows_own(monkeypatch):
    data = saved(Image.new("RGB", (30, 30)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 800)
    with pytest.raises(InputError, match=r"MAX_IMAGE_PIXELS allows \(800\); resize it"):
        read_image(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert read_image(data).size == (30, 30)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("https://example.com/a.png", "nothing is downloaded.*curl"),
        ("HTTP://example.com/a.png", "nothing is downloaded.*curl"),
        ("data:image/png;base64,AAAA", "b64decode"),
        ("file:///tmp/a.png", "leave out file://"),
        ("no/such/file.png", "does not exist; check the path"),
        ("a\0b.png", "cannot be read"),
        (".", "is a folder"),
        ("/dev/null", "no regular file"),
        (None, "is NoneType; expected a path"),
        ({"a": 1}, "is dict; expected a path"),
        (["a.png"], "expected a path"),
        (np.zeros((2, 2, 3), complex), "expected a path"),
        (np.zeros((5, 6, 7)), r"shape \(5, 6, 7\)"),
        (np.zeros((1, 2, 3, 3)), "one image at a time"),
        (np.zeros(7), r"shape \(7,\)"),
        (np.zeros((0, 4, 3)), "at least one pixel"),
        (np.full((2, 2), np.nan), "NaN"),
        (np.full((2, 2, 3), 200.0), "floats from 200 to 200; expected 0..1: divide"),
        (np.full((2, 2, 3), -1.7), "before a processor normalised"),
        (np.full((2, 2, 3), 300), "integers from 300 to 300; expected 0..255"),
        (Image.new("F", (2, 2), float("nan")), "NaN"),
        (Image.new("La", (2, 2)), "'La'"),
        (Image.new("RGB", (0, 4)), "0 x 4 pixels"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_image_is_refused_with_what_to_do(item, message):
    with pytest.raises(InputError, match=message):
        read_image(item)


def test_a_file_that_was_opened_before_it_was_cut_is_refused(photo):
    with pytest.raises(InputError, match=r"^seventh: is truncated or damaged"):
        read_image(Image.open(io.BytesIO(saved(photo)[:200])), "seventh")


def test_damaged_maker_notes_leave_the_image(photo, monkeypatch):
    def broken(image):
        raise struct.error("unpack requires a buffer of 2 bytes")

    monkeypatch.setattr(ImageOps, "exif_transpose", broken)
    with pytest.warns(UserWarning, match="EXIF data is damaged"):
        assert digest(read_image(photo)) == digest(photo)


def test_reading_leaves_the_filters_of_warnings_as_they_were(photo):
    before = list(warnings.filters)
    read_image(saved(photo))
    assert warnings.filters == before


def test_without_pillow_the_extra_is_named(monkeypatch):
    import mmdecode.vlm.images as module

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"mmdecode\[vlm\]"):
        read_image("a.png")


# A fuzz: broken files are read or refused, never anything else


def broken(data, random):
    """Cut, with bytes changed, with a stretch removed, or with its head missing."""
    way = random.integers(4)
    start = int(random.integers(len(data)))
    if way == 0:
        return data[:start]
    if way == 1:
        changed = bytearray(data)
        for spot in random.integers(len(data), size=8):
            changed[spot] = random.integers(256)
        return bytes(changed)
    if way == 2:
        return data[:start] + data[start + int(random.integers(1, 60)) :]
    return data[min(start, 64) :]


@pytest.mark.filterwarnings("ignore:.*(frames or pages|EXIF)")
def test_three_hundred_broken_images_are_read_or_refused(kit):
    random = np.random.default_rng(0)
    photo = kit.image(3, (24, 18))
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = [saved(photo, kind) for kind in ("PNG", "BMP", "TIFF", "GIF", "WEBP", "JPEG2000")]
    whole += [
        saved(photo, "JPEG", exif=exif.tobytes()),
        saved(photo, "PNG", save_all=True, append_images=[ImageOps.invert(photo)]),
        saved(photo.convert("RGBA"), "PNG"),
        saved(photo.convert("P"), "PNG"),
        saved(photo.convert("I;16"), "TIFF"),
    ]
    ended = {"read": 0, "refused": 0}
    for number in range(300):
        data = broken(whole[number % len(whole)], random)
        try:
            found = read_image(data, "it")
        except InputError as error:
            assert str(error).startswith("it: ")
            assert ";" in str(error)
            ended["refused"] += 1
        else:
            assert found.mode == "RGB" and min(found.size) >= 1
            ended["read"] += 1
    assert ended["refused"] > 150
