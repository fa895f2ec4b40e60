"""Episodes for people: recorded as JSON, shown as one HTML page with the clicks drawn."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

from PIL import ImageDraw

from crossrl_gui_agent.actions import Action, to_pixels
from crossrl_gui_agent.envs import Episode
from crossrl_gui_agent.prompting import open_screen

MARK = (215, 30, 60)
_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 24px; color: #222; max-width: 1200px }
table { border-collapse: collapse } td, th { padding: 3px 12px 3px 0; text-align: left }
.episode { display: inline-block; vertical-align: top; border: 1px solid #ddd; margin: 6px; padding: 8px }
.success { border-left: 5px solid #2a8a3a } .other { border-left: 5px solid #c33 }
.step { display: inline-block; vertical-align: top; width: 200px; margin-right: 8px }
.step img { width: 200px; border: 1px solid #eee } code { font-size: 11px; word-break: break-all }
"""


class Recorder:
    """Writes episodes into `RUN_DIR/episodes/STEP/`: the first `most` seeds of each task that it is shown."""

    def __init__(self, run_dir: str, most: int) -> None:
        self.folder, self.most = Path(run_dir) / "episodes", most
        self.kept: dict[tuple[int, str], set[int]] = {}

    def keep(self, episode: Episode, step: int) -> None:
        """Record an episode that was played with the weights of training step `step`, if there is room for it."""
        seeds = self.kept.setdefault((step, episode.task), set())
        if len(seeds) >= self.most:
            return
        seeds.add(episode.seed)
        path = self.folder / f"{step:06d}" / f"{episode.task}-{episode.seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_record(episode)))


def page(run_dir: Path, curves: dict[str, list[tuple[int, float]]], picture: str | None) -> Path:
    """Write `RUN_DIR/episodes.html`: success by task before and after, the curve, the recorded episodes.

    `curves`: task -> (step, held-out success). Shown are the first and the last recorded step.
    """
    steps = sorted(p for p in (run_dir / "episodes").glob("*") if p.is_dir())
    shown = [steps[0], steps[-1]] if len(steps) > 1 else steps
    parts = [f"<!doctype html><meta charset=utf-8><title>GUI agent</title><style>{_STYLE}</style><h1>GUI agent</h1>"]
    rows = "".join(
        f"<tr><td>{html.escape(task)}<td>{points[0][1]:.2f}<td>{points[-1][1]:.2f}<td>{points[-1][0]}"
        for task, points in sorted(curves.items())
    )
    parts.append(f"<h2>Success on held-out seeds</h2><table><tr><th>task<th>first<th>last<th>at step{rows}</table>")
    if picture:
        parts.append(f"<p><img src='{html.escape(picture)}' alt='success against step'>")
    for folder in shown:
        parts.append(f"<h2>Episodes after {int(folder.name)} training steps</h2>")
        parts += [_episode(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    path = run_dir / "episodes.html"
    path.write_text("\n".join(parts))
    return path


def _record(episode: Episode) -> dict[str, Any]:
    steps = [
        {
            "screen": base64.b64encode(_marked(step.screen, step.action)).decode(),
            "answer": step.answer,
            "action": step.action.short() if step.action else "not readable",
            "reward": step.reward,
        }
        for step in episode.steps
    ]
    last = base64.b64encode(episode.last).decode() if episode.last else None
    about = {"task": episode.task, "seed": episode.seed, "goal": episode.goal, "stop": str(episode.stop)}
    return about | {"reward": episode.reward, "steps": steps, "last": last}


def _marked(screen: bytes, action: Action | None) -> bytes:
    """The screen with the action's points drawn."""
    if action is None or (action.x is None and action.x2 is None):
        return screen
    image = open_screen(screen)
    draw = ImageDraw.Draw(image)
    for x, y in ((action.x, action.y), (action.x2, action.y2)):
        if x is not None:
            px, py = to_pixels(x, y, *image.size)
            radius = max(3, image.width // 40)
            draw.ellipse((px - radius, py - radius, px + radius, py + radius), outline=MARK, width=2)
            draw.line((px - 2 * radius, py, px + 2 * radius, py), fill=MARK)
            draw.line((px, py - 2 * radius, px, py + 2 * radius), fill=MARK)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _episode(record: dict[str, Any]) -> str:
    steps = "".join(
        f"<div class=step><img src='data:image/png;base64,{step['screen']}'>"
        f"<div>{html.escape(step['action'])}, reward {step['reward']:g}</div>"
        f"<code>{html.escape(step['answer'][:400])}</code></div>"
        for step in record["steps"]
    )
    if record["last"]:
        steps += f"<div class=step><img src='data:image/png;base64,{record['last']}'><div>at the end</div></div>"
    kind = "success" if record["stop"] == "success" else "other"
    title = f"{record['task']} {record['seed']}: {record['goal']}"
    return (
        f"<div class='episode {kind}'><b>{html.escape(title)}</b><br>{html.escape(record['stop'])}, "
        f"reward {record['reward']:g}<br>{steps}</div>"
    )
