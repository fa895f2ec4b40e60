"""Videos are written for people to see and read back whole, or not at all."""

import av
import numpy as np
import pytest
from PIL import Image

from crossrl import media
from crossrl.errors import DataError

FORMATS = {
    "last.mp4": {},
    "first.mp4": {"movflags": "faststart"},
    "fragments.mp4": {"movflags": "frag_keyframe+empty_moov"},
    "video.mkv": {},
    "video.avi": {},
}


def clip(frames=33, height=64, width=64):
    """A gradient that drifts: compresses well, changes in every frame."""
    t, y, x = np.ogrid[:frames, :height, :width]
    channels = (3 * x + 4 * t + 0 * y, 2 * y + t + 0 * x, x + y + 2 * t)
    return (np.stack(channels, -1) % 256).astype(np.uint8)


def write(path, video, **options):
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.height, stream.width, stream.pix_fmt = *video.shape[1:3], "yuv420p"
        stream.options = {"g": "8", "qscale": "2"}
        for frame in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def refused(path, *args):
    with pytest.raises(DataError) as caught:
        media.read_video(path, *args)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_what_is_written_is_read_back(tmp_path, monkeypatch, codec):
    if codec not in av.codecs_available:
        pytest.skip("no such encoder here")
    if codec == "mpeg4":
        monkeypatch.setattr(av, "codecs_available", set(av.codecs_available) - {"libx264"})
    y, x = np.mgrid[:48, :62]
    video = np.stack([np.stack([x * 2 + t, y * 3, 120 + 0 * x], -1) for t in range(9)]).astype(np.uint8)
    media.write_mp4(tmp_path / "v.mp4", video, 12.5, tile=1)
    read = media.read_video(tmp_path / "v.mp4", expect_frames=9)
    assert read.shape == video.shape and read.dtype == np.uint8
    assert np.abs(read.astype(int) - video).mean() < 4
    with av.open(str(tmp_path / "v.mp4")) as container:
        assert container.streams.video[0].average_rate == 12.5
        assert container.streams.video[0].codec_context.name == {"libx264": "h264"}.get(codec, codec)


def test_small_videos_are_enlarged_and_odd_sizes_padded(tmp_path):
    media.write_mp4(tmp_path / "v.mp4", clip(5, 32, 32), 8)
    assert media.read_video(tmp_path / "v.mp4").shape == (5, 128, 128, 3)
    media.write_mp4(tmp_path / "v.mp4", clip(5, 129, 201), 8)
    assert media.read_video(tmp_path / "v.mp4").shape == (5, 130, 202, 3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_file_is_never_read_in_part(tmp_path, name):
    video = clip()
    write(tmp_path / name, video, **FORMATS[name])
    assert len(media.read_video(tmp_path / name)) == 33
    content = (tmp_path / name).read_bytes()
    cut = tmp_path / f"cut-{name}"
    for size in [*range(0, len(content), len(content) // 50), len(content) - 1]:
        cut.write_bytes(content[:size])
        try:
            assert len(media.read_video(cut)) == 33, f"{size} of {len(content)} bytes: a part was returned"
        except DataError as error:
            assert str(cut) in str(error)
    assert "33" in refused(cut) if name == "first.mp4" else True


def test_frames_got_and_expected_are_named(tmp_path):
    write(tmp_path / "v.mp4", clip(9))
    assert "9 frames, expected 16" in refused(tmp_path / "v.mp4", 16)
    assert "9 frames, expected 4" in refused(tmp_path / "v.mp4", 4)
    write(tmp_path / "f.mp4", clip(16), **FORMATS["fragments.mp4"])
    content = (tmp_path / "f.mp4").read_bytes()
    between = content.rindex(b"moof") - 4  # exactly between two fragments nothing tells that more should follow
    (tmp_path / "g.mp4").write_bytes(content[:between])
    assert "frames, expected 16" in refused(tmp_path / "g.mp4", 16)


def test_what_is_no_video_is_refused(tmp_path):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("hello")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert "cannot be read" in refused(tmp_path / "empty.mp4")
    assert "cannot be read" in refused(tmp_path / "text.mp4")
    assert "cannot be read" in refused(tmp_path / "absent.mp4")
    assert "no video" in refused(tmp_path / "sound.mp4")


def test_a_huge_video_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    write(tmp_path / "v.mp4", clip(9))
    monkeypatch.setattr(media, "MAX_PIXELS", 64 * 63)
    assert "64x64 pixels are too large" in refused(tmp_path / "v.mp4")
    monkeypatch.setattr(media, "MAX_PIXELS", 64 * 64)
    monkeypatch.setattr(media, "MAX_BYTES", 64 * 64 * 3 * 8)
    assert "9 frames" in refused(tmp_path / "v.mp4")


def test_sampled_frames_run_from_first_to_last():
    video = clip(33)
    shown = media.sample_frames(video, 4)
    assert len(shown) == 4 and (shown[0] == video[0]).all() and (shown[-1] == video[-1]).all()
    assert len(media.sample_frames(video[:2], 4)) == 2


def test_pictures_show_every_video_and_its_label(tmp_path):
    videos = [np.full((9, 32, 32, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 160, 0), (0, 0, 255))]
    texts = ["red", "a green thing " * 30, "蓝"]
    media.write_gif(tmp_path / "v.gif", videos, 8, texts)
    media.write_sheet(tmp_path / "sheet.png", videos, texts, frames=3)
    media.write_comparison(tmp_path / "c.png", texts, videos, videos[::-1], [(0.1, 0.2)] * 3, frames=2)
    with Image.open(tmp_path / "v.gif") as gif:
        assert gif.n_frames in (1, 9) and gif.width > 2 * 128  # Pillow joins frames that are equal
        assert gif.convert("RGB").getpixel((20, 20))[0] > 240
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 3 * 128 and sheet.height > 3 * 128
    with Image.open(tmp_path / "c.png") as sheet:
        assert sheet.getpixel((20, 20)) == (255, 0, 0) and sheet.getpixel((sheet.width - 20, 20)) == (0, 0, 255)
        below = np.asarray(sheet.crop((0, 140, 140, 156)))
        assert (below < 100).all(-1).any(), "a label is there"


def test_a_moving_gif_keeps_its_frames_and_large_videos_are_reduced(tmp_path):
    media.write_gif(tmp_path / "v.gif", [clip(5, 480, 832)], 8, ["big"])
    with Image.open(tmp_path / "v.gif") as gif:
        assert gif.n_frames == 5 and gif.width < 300 and gif.info["duration"] == 120
