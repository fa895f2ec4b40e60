"""Videos on disk and pictures for people. A video is uint8 [F, H, W, 3], RGB.

Pictures enlarge small videos without smoothing, so that a 32 pixel toy is visible. PyAV and Pillow do the work.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from crossrl.types import Metrics

TILE = 128  # pixels: videos with a smaller long side are enlarged to about this
FONTS = ("NotoSansCJK-Regular.ttc", "wqy-zenhei.ttc", "DejaVuSans.ttf")  # the first that the system has
GAP, LINE = 8, 16
INK, PAPER, FAINT = (20, 20, 20), (255, 255, 255), (140, 140, 140)


@functools.cache
def font(size: int = 12) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """A font with as many scripts as the system offers, or Pillow's own."""
    for name in FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:  # not installed here
            continue
    return ImageFont.load_default(size)


def enlarge(video: np.ndarray, tile: int = TILE) -> np.ndarray:
    """[F, H, W, 3] with every pixel repeated until the long side has about `tile` pixels."""
    factor = max(1, round(tile / max(video.shape[1:3])))
    return video.repeat(factor, axis=1).repeat(factor, axis=2)


def thumbnail(video: np.ndarray) -> np.ndarray:
    """[F, H, W, 3] at a size for a grid: small videos enlarged, those beyond two tiles reduced."""
    factor = -(-max(video.shape[1:3]) // (2 * TILE))
    if factor == 1:
        return enlarge(video)
    return np.stack([np.asarray(Image.fromarray(frame).reduce(factor)) for frame in video])


def write_mp4(path: str | Path, video: np.ndarray, fps: float, tile: int = TILE) -> None:
    """Write H.264 (MPEG-4 part 2 where PyAV has no encoder for it); `tile=1` keeps the size."""
    import av

    frames = enlarge(video, tile)
    odd = [(0, n % 2) for n in frames.shape[1:3]]  # 4:2:0 chroma needs even sides
    frames = np.pad(frames, [(0, 0), *odd, (0, 0)], mode="edge")
    with av.open(str(path), "w") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.options = {"crf": "16"} if codec == "libx264" else {"qscale": "2"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))


def sample_frames(video: np.ndarray, count: int) -> np.ndarray:
    """`count` frames spread evenly from the first to the last (all of them if there are fewer)."""
    return video[np.linspace(0, len(video) - 1, min(count, len(video))).round().astype(int)]


def statistics(videos: np.ndarray) -> Metrics:
    """What videos [n, F, H, W, 3] look like, in [0, 1]: means over all of them, cheap enough for every rollout.

    brightness and saturation (largest less smallest channel) are means, detail and motion the root mean squares of the
    difference of neighbours in a row and of consecutive frames. Looks at ~128 rows of four pairs of frames a video.
    """
    rows = slice(None, None, -(-videos.shape[2] // 128))
    first = np.unique(np.linspace(0, max(len(videos[0]) - 2, 0), 4).round().astype(int))
    sums = np.zeros(4)
    for video in videos:  # one at a time: a few frames in fp32, whatever the batch
        frames = video[np.stack([first, np.minimum(first + 1, len(video) - 1)]), rows].astype(np.float32) / 255
        r, g, b = np.moveaxis(frames, -1, 0)
        luma, spread = (r + g + b) / 3, np.maximum(np.maximum(r, g), b) - np.minimum(np.minimum(r, g), b)
        detail, motion = np.square(np.diff(luma, axis=-1)).mean(), np.square(luma[1] - luma[0]).mean()
        sums += luma.mean(), spread.mean(), detail, motion
    brightness, saturation, detail, motion = (float(s) for s in sums / len(videos))
    return {"brightness": brightness, "saturation": saturation, "detail": detail**0.5, "motion": motion**0.5}


def wrapped(text: str, width: int, most: int = 3) -> list[str]:
    """`text` in at most `most` lines of about `width` pixels."""
    text = " ".join(text.split()) or " "
    letters = max(4, int(0.95 * width * len(text) / font().getlength(text)))
    return textwrap.wrap(text, letters, max_lines=most, placeholder="...")


def labelled(pictures: Sequence[np.ndarray], labels: Sequence[str], columns: int) -> Image.Image:
    """A grid of equal pictures [H, W, 3], each with its label wrapped beneath."""
    height, width = pictures[0].shape[:2]
    texts = [wrapped(label, width) for label in labels]
    below = LINE * max(map(len, texts)) + 4
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (width + GAP) + GAP, rows * (height + below + GAP) + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, (picture, lines) in enumerate(zip(pictures, texts, strict=True)):
        x, y = GAP + i % columns * (width + GAP), GAP + i // columns * (height + below + GAP)
        sheet.paste(Image.fromarray(picture), (x, y))
        draw.multiline_text((x, y + height + 2), "\n".join(lines), fill=INK, font=font(), spacing=2)
    return sheet


def strip(video: np.ndarray, frames: int) -> np.ndarray:
    """Sampled frames side by side: one picture [H, W', 3]."""
    shown = thumbnail(sample_frames(video, frames))
    return np.concatenate([np.pad(frame, ((0, 0), (0, 2), (0, 0)), constant_values=255) for frame in shown], axis=1)


def write_sheet(path: str | Path, videos: Sequence[np.ndarray], texts: Sequence[str], frames: int = 6) -> None:
    """PNG contact sheet: a strip of `frames` frames over time for each video, its text beneath."""
    labelled([strip(video, frames) for video in videos], texts, columns=1).save(path)


def write_gif(path: str | Path, videos: Sequence[np.ndarray], fps: float, texts: Sequence[str]) -> None:
    """Animated grid of videos of equal shape, the text of each beneath it."""
    tiles = [thumbnail(video) for video in videos]
    columns = math.ceil(math.sqrt(len(tiles)))
    first, *rest = (labelled(frames, texts, columns) for frames in zip(*tiles, strict=True))
    first.save(path, save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)


def write_comparison(
    path: str | Path,
    texts: Sequence[str],
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    rewards: Sequence[tuple[float, float]] | None = None,
    frames: int = 4,
) -> None:
    """PNG, a row a prompt: on the left before, on the right after, with the two `rewards` of each row if given."""
    pictures, labels = [], []
    for i, (text, old, new) in enumerate(zip(texts, before, after, strict=True)):
        pictures += [strip(old, frames), strip(new, frames)]
        was, now = (f", reward {value:.3f}" for value in rewards[i]) if rewards else ("", "")
        labels += [f"before{was}: {text}", f"after{now}: {text}"]
    labelled(pictures, labels, columns=2).save(path)
