"""Videos and pictures that people look at."""

import av
import numpy as np
import pytest
from PIL import Image

from crossrl import media


def clip(frames=33, height=64, width=64):
    """A gradient that drifts: compresses well, changes in every frame."""
    t, y, x = np.ogrid[:frames, :height, :width]
    channels = (3 * x + 4 * t + 0 * y, 2 * y + t + 0 * x, x + y + 2 * t)
    return (np.stack(channels, -1) % 256).astype(np.uint8)


def read(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_what_is_written_is_read_back(tmp_path, monkeypatch, codec):
    if codec not in av.codecs_available:
        pytest.skip("no such encoder here")
    if codec == "mpeg4":
        monkeypatch.setattr(av, "codecs_available", set(av.codecs_available) - {"libx264"})
    y, x = np.mgrid[:48, :62]
    video = np.stack([np.stack([x * 2 + t, y * 3, 120 + 0 * x], -1) for t in range(9)]).astype(np.uint8)
    media.write_mp4(tmp_path / "v.mp4", video, 12.5, tile=1)
    got = read(tmp_path / "v.mp4")
    assert got.shape == video.shape and got.dtype == np.uint8
    assert np.abs(got.astype(int) - video).mean() < 4
    with av.open(str(tmp_path / "v.mp4")) as container:
        assert container.streams.video[0].average_rate == 12.5
        assert container.streams.video[0].codec_context.name == {"libx264": "h264"}.get(codec, codec)


def test_small_videos_are_enlarged_and_odd_sizes_padded(tmp_path):
    media.write_mp4(tmp_path / "v.mp4", clip(5, 32, 32), 8)
    assert read(tmp_path / "v.mp4").shape == (5, 128, 128, 3)
    media.write_mp4(tmp_path / "v.mp4", clip(5, 129, 201), 8)
    assert read(tmp_path / "v.mp4").shape == (5, 130, 202, 3)


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
