"""Episodes to play, as verl's dataset: `data.train_files` names pages and seeds instead of files."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset

from crossrl_gui_agent.seeds import alternating, ranges_of


class GuiDataset(Dataset):
    """One row an episode: `task`, `seed`, whether it is held out, and the few columns that verl asks for.

    `data_files`: one or more of "TASK:FIRST-LAST" (seeds, both included). Rows of several tasks alternate. Raises
    `ConfigError` for anything else.
    """

    def __init__(self, data_files: Any, config: DictConfig, max_samples: int = -1, **_: Any) -> None:
        self.held_out = data_files == config.val_files
        rows = alternating(ranges_of(data_files, "data.val_files" if self.held_out else "data.train_files"))
        self.rows = rows[:max_samples] if max_samples > 0 else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task, seed = self.rows[index]
        return {
            "index": index,
            "task": task,
            "seed": seed,
            "held_out": self.held_out,
            "data_source": task,
            "raw_prompt": [{"role": "user", "content": f"{task} {seed}"}],
            "reward_model": {"style": "environment", "ground_truth": ""},
        }
