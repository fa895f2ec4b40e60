"""`crossrl`: list, doctor, check, run, sft, eval, export."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossrl.errors import ConfigError, CrossRLError

if TYPE_CHECKING:
    from crossrl.launch import Job

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Post-train video, image and multimodal models with RL on verl: any algorithm on any backend, by name.",
)

Config = Annotated[str, typer.Argument(help="A known config (see `crossrl list`) or a path to a .yaml file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, e.g. backend=veomni algorithm=dance_grpo workers=2 seed=1 run_dir=DIR resume=auto"),
]


def main() -> None:
    """Entry point: CrossRL's own errors are one message and exit status 2, never a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("absl").setLevel(logging.WARNING)
    try:
        app()
    except CrossRLError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(2) from None


@app.command("list")
def list_plugins(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False) -> None:
    """Show what is installed: backends, algorithms, models, rewards, data, configs."""
    from crossrl.launch import known_configs
    from crossrl.registry import status

    rows = status()
    configs = sorted(known_configs().keys() - {"crossrl"})  # that one is the base that others build on
    if as_json:
        plugins = [
            {
                **{key: getattr(row, key) for key in ("group", "name", "state", "summary", "distribution", "version")},
                "capabilities": asdict(row.plugin.capabilities) if row.plugin and row.plugin.capabilities else None,
            }
            for row in rows
        ]
        typer.echo(json.dumps({"plugins": plugins, "configs": configs}, indent=2))
        return
    group = None
    for row in rows:
        if row.group != group:
            group = row.group
            typer.secho(group, bold=True)
        typer.echo(f"  {row.name:<16} {row.summary if row.ok else row.state}")
    typer.secho("configs (crossrl run NAME)", bold=True)
    typer.echo("  " + ", ".join(configs))


@app.command()
def doctor() -> None:
    """Report versions and devices, and load every plug-in in its own process; exit status 1 if any is broken."""
    from crossrl.doctor import examine

    broken = False
    for line, ok in examine():
        typer.secho(line, fg=None if ok else typer.colors.RED)
        broken |= not ok
    raise typer.Exit(int(broken))


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    gate: Annotated[bool, typer.Option("--gate", help="Also load the model and pass the start-up gate here.")] = False,
) -> None:
    """Validate a config with its overrides, plug-ins and data files, and show the verl command it stands for."""
    from crossrl.launch import prepare

    job = prepare(config, overrides or [])
    typer.echo(job.run.model_dump_json(indent=2))
    typer.echo(f"workers: {job.workers}\n\n" + " \\\n  ".join(job.command))
    _show_advice(job)
    if gate:
        from crossrl.single import gate_config

        gate_config(job.run)


@app.command()
def run(config: Config, overrides: Overrides = None) -> None:
    """Validate, then train through verl's own entry point. Everything lands in `run_dir`.

    Ctrl-C stops after the current step and saves; `resume=auto` goes on from there.
    """
    from crossrl.launch import prepare, start

    job = prepare(config, overrides or [])
    _show_advice(job)
    typer.echo(f"{job.title}, {job.workers} worker(s) -> {job.run.run_dir}")
    raise typer.Exit(start(job, typer.echo))


@app.command()
def sft(config: Config, overrides: Overrides = None) -> None:
    """Supervised warm start: flow matching on captioned videos (`data.sft`), or cloning a GUI expert (`gui.sft`)."""
    from crossrl.launch import kind_of, prepare

    warm_start = kind_of(config).warm_start
    if warm_start is None:
        run(config, ["algorithm=flow_matching", *(overrides or [])])
    else:
        warm_start(prepare(config, overrides or []), typer.echo)


def _show_advice(job: Job) -> None:
    for advice in job.advice:
        typer.secho(str(advice), fg=typer.colors.YELLOW, err=True)


@app.command("eval")
def evaluate_run(config: Config, overrides: Overrides = None) -> None:
    """Evaluate a config's model, or with resume=auto the last checkpoint of its run_dir, on the held-out prompts."""
    from crossrl.single import evaluate_config

    typer.echo(json.dumps(evaluate_config(config, overrides or []), indent=2))


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="A config, as for `run`, or the folder of a pipeline to convert.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    overrides: Overrides = None,
    to: Annotated[str, typer.Option("--to", help="Whose names the tensors get: diffusers, veomni, mindspeed.")] = (
        "diffusers"
    ),
    slot: Annotated[str, typer.Option(help="Weights to export: policy or ema.")] = "policy",
) -> None:
    """Write the weights that `resume` names (auto or a checkpoint folder) as a pipeline; or convert a pipeline."""
    from crossrl.layouts import convert
    from crossrl.single import export_config

    if Path(source).is_dir():
        if overrides:
            raise ConfigError(f"a folder takes no {overrides[0]!r}", where="command line", fix="give a config's name")
        convert(Path(source), out, to)
    else:
        export_config(source, overrides or [], to, out, slot)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
