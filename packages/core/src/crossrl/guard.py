"""The guard: notices from the metrics of every iteration that a run goes wrong, and says what shall follow.

A rule is a measure (a number and the words for it) and three settings: once the measure was over `limit` in `patience`
iterations in a row, `action` follows, and again at each doubling of that streak. All that the guard knows is a function
of the metrics so far, so a resumed or rolled-back run gets its guard back by replaying its history. The job acts
(`crossrl.job`); this module only judges. `docs/guard.md` has the table of rules and what to do about each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from crossrl import measures
from crossrl.section import PositiveInt, Section, merged
from crossrl.types import Metrics

_yaml_off = BeforeValidator(lambda value: "off" if value is False else value)  # YAML reads a bare `off` as false


class Rule(Section):
    """What follows once the rule's measure was over `limit` (None: off) in `patience` iterations in a row."""

    action: Annotated[Literal["off", "warn", "cut_lr", "rollback", "stop"], _yaml_off]
    limit: Annotated[float, Field(ge=0)] | None
    patience: PositiveInt


class SkipRule(Rule):
    """`skip`: workers leave out optimizer steps over the limit; `patience` such iterations in a row cut the lr."""

    action: Annotated[Literal["off", "warn", "skip", "cut_lr", "rollback", "stop"], _yaml_off]


class GuardConfig(Section):
    """The guard's rules, the acting ones first; docs/guard.md says what each limit is a limit of."""

    enabled: bool = True
    nan: Rule = Rule(action="rollback", limit=0, patience=3)
    grad_norm: SkipRule = SkipRule(action="skip", limit=6, patience=5)
    reward_drop: Rule = Rule(action="rollback", limit=4, patience=3)
    heldout_drop: Rule = Rule(action="rollback", limit=3, patience=2)
    hacking: Rule = Rule(action="stop", limit=2, patience=3)
    kl: Rule = Rule(action="cut_lr", limit=None, patience=3)
    ratio: Rule = Rule(action="warn", limit=1e-4, patience=3)
    log_ratio_bias: Rule = Rule(action="warn", limit=0.7, patience=5)
    clip_asymmetry: Rule = Rule(action="warn", limit=10, patience=5)
    zero_std: Rule = Rule(action="warn", limit=0.5, patience=5)
    diversity: Rule = Rule(action="warn", limit=0.7, patience=5)
    drift: Rule = Rule(action="warn", limit=8, patience=5)
    memory: Rule = Rule(action="warn", limit=0.1, patience=20)
    warmup: Annotated[int, Field(ge=8)] = 20  # iterations that tell what is normal; until then such rules are silent
    lr_cut: Annotated[float, Field(gt=0, lt=1)] = 0.5  # factor on the learning rate of `cut_lr` and of a rollback
    max_rollbacks: Annotated[int, Field(ge=0)] = 3  # one more stops the run

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """A rule of which a job sets one key keeps its others."""
        if not isinstance(values, dict):
            raise ValueError("guard is a section: to switch it off, set guard.enabled=false")
        rules = {n: f.default.model_dump() for n, f in cls.model_fields.items() if isinstance(f.default, Rule)}
        return {key: merged(rules.get(key), value) for key, value in dict(values).items()}


ADVICE = {
    "nan": "Look for the first bad metric; lower optimizer.lr.",
    "grad_norm": "If it recurs, lower optimizer.lr.",
    "reward_drop": "Lower optimizer.lr or use a larger batch.",
    "heldout_drop": "Train on more prompts, or less long.",
    "hacking": "Change or mix the trained rewards, or add a KL term.",
    "kl": "Lower optimizer.lr, or raise the weight of the KL term.",
    "ratio": "Rollout and training compute differently: compare precision, attention and micro-batches.",
    "log_ratio_bias": "Use fewer batch.updates, a lower optimizer.lr, or algorithm=grpo_guard.",
    "clip_asymmetry": "Check the precision of log-probabilities; use fewer batch.updates or algorithm=grpo_guard.",
    "zero_std": "Use prompts of other difficulty, algorithm.drop_zero_std with batch.refill, or larger batch.samples.",
    "diversity": "Draw with more noise, use larger batch.samples, or add a KL term.",
    "drift": "Look at the videos: is the reward being hacked?",
    "memory": "Something leaks: stop and go on with resume=auto before memory runs out.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule saw after iteration `step` (counted from 1), and the action that follows."""

    step: int
    rule: str
    seen: str
    action: str

    def __str__(self) -> str:
        advice = ADVICE[self.rule]
        return f"guard, step {self.step}: {self.seen} -> {self.action} (set by guard.{self.rule}.*). {advice}"


class Guard:
    """Judges one run; `gold` names the rewards of weight 0, which are watched and never trained on."""

    def __init__(self, config: GuardConfig, gold: Sequence[str] = (), history: Iterable[Metrics] = ()) -> None:
        c, n = config, config.warmup
        self.step = 0
        self._norms = measures.GradNorm(c.grad_norm.limit, c.grad_norm.patience, n)
        watches = (
            _Watch("nan", c.nan, measures.not_finite, meanwhile="warn"),
            _Watch("grad_norm", c.grad_norm, self._norms),
            _Watch("reward_drop", c.reward_drop, measures.RewardDrop(n)),
            _Watch("heldout_drop", c.heldout_drop, measures.HeldoutDrop(), lag=0),
            _Watch("hacking", c.hacking, measures.Hacking(gold), lag=0),
            _Watch("kl", c.kl, measures.kl),
            _Watch("ratio", c.ratio, measures.first_ratio),
            _Watch("log_ratio_bias", c.log_ratio_bias, measures.log_ratio_bias),
            _Watch("clip_asymmetry", c.clip_asymmetry, measures.clip_asymmetry),
            _Watch("zero_std", c.zero_std, measures.zero_std),
            _Watch("diversity", c.diversity, measures.Diversity(n)),
            _Watch("drift", c.drift, measures.Drift(n)),
            _Watch("memory", c.memory, measures.Leak()),
        )
        self._watches = [w for w in watches if c.enabled and w.rule.action != "off" and w.rule.limit is not None]
        for metrics in history:
            self.observe(metrics)

    def observe(self, metrics: Metrics) -> list[Finding]:
        """What the metrics of the next iteration show."""
        self.step += 1
        found = (watch.see(self.step, metrics) for watch in self._watches)
        return [finding for finding in found if finding is not None]

    @property
    def levels(self) -> Metrics:
        """The last measure of every rule by name, in the units of its limit."""
        return {watch.name: watch.value for watch in self._watches if watch.value is not None}

    @property
    def skip_above(self) -> float | None:
        """The gradient norm over which the workers shall skip an optimizer step of the next iteration."""
        active = any(w.name == "grad_norm" and w.rule.action == "skip" for w in self._watches)
        return self._norms.largest if active else None

    @property
    def may_roll_back(self) -> bool:
        """Whether any rule may send the run back to a checkpoint."""
        return any(watch.rule.action == "rollback" for watch in self._watches)

    @property
    def healthy(self) -> bool:
        """Whether every rule that may cut, roll back or stop is at less than half its limit."""
        return not self._worried

    @property
    def good_step(self) -> int:
        """The last step whose policy no such rule holds anything against: trouble began after it.

        An iteration's samples are those of the policy before it, so the present policy is not yet known.
        """
        return min((watch.good for watch in self._worried), default=self.step - 1)

    @property
    def _worried(self) -> list[_Watch]:
        return [w for w in self._watches if w.rule.action in ("cut_lr", "rollback", "stop") and not w.calm]


@dataclass(slots=True)
class _Watch:
    """A rule at work."""

    name: str
    rule: Rule
    measure: Callable[[Metrics], measures.Seen | None]
    lag: int = 1  # the measure of iteration t is about the policy after iteration t - lag
    meanwhile: str | None = None  # action while the measure is over the limit, besides the rule's own
    value: float | None = None
    streak: int = 0
    calm: bool = True
    good: int = 0  # the last step whose policy was calm

    def see(self, step: int, metrics: Metrics) -> Finding | None:
        if (seen := self.measure(metrics)) is None:
            return None
        self.value, words = seen
        self.calm = self.value <= self.rule.limit / 2
        if self.calm:
            self.good = step - self.lag
        self.streak = self.streak + 1 if self.value > self.rule.limit else 0
        if not self.streak:
            return None
        turns, rest = divmod(self.streak, self.rule.patience)
        action = "skip" if self.rule.action == "skip" else self.meanwhile
        if rest == 0 and turns.bit_count() == 1:
            action = "cut_lr" if self.rule.action == "skip" else self.rule.action
        words = f"{words} (limit {self.rule.limit:g}), {self.streak} in a row"
        return Finding(step, self.name, words, action) if action else None


@dataclass(slots=True)
class Report:
    """`guard_report.json` and `.md` of a run that was stopped."""

    step: int
    reason: str
    lr_scale: float
    rollbacks: int
    healthy_checkpoint: str | None  # the newest one from before the trouble
    findings: list[Finding]
    levels: Metrics = field(default_factory=dict)  # the last measure of every rule

    def write(self, run_dir: Path) -> None:
        """Both files, into `run_dir`."""
        (run_dir / "guard_report.json").write_text(json.dumps(asdict(self), indent=2))
        lines = [
            f"# The guard stopped this run after step {self.step}",
            "",
            self.reason,
            "",
            f"- rollbacks: {self.rollbacks}; learning rate scaled by {self.lr_scale:g}",
            f"- go on from: {self.healthy_checkpoint or 'no checkpoint is from before the trouble'}",
            "",
            "| step | rule | seen | action | advice |",
            "|---|---|---|---|---|",
            *(f"| {f.step} | `guard.{f.rule}` | {f.seen} | {f.action} | {ADVICE[f.rule]} |" for f in self.findings),
        ]
        (run_dir / "guard_report.md").write_text("\n".join(lines) + "\n")
