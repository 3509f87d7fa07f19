"""Commands about speculation: `example-traffic`, `train-drafter` and `replay`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from tenfold.cli.options import MAX_SEED, NewPath, Number, Stopped, config_of, engine_options, say, within

TRAFFIC = click.Path(path_type=Path, exists=True, dir_okay=False)
TRAFFIC_HELP = "Recorded requests: a JSON object a line, the body of a chat completion."


@click.command("example-traffic", short_help="Write traffic to try train-drafter and replay with.")
@click.option("-o", "--output", type=NewPath(), required=True, help="The JSONL file to write.")
@click.option("--requests", type=click.IntRange(9), default=900, help="Three for each function.")
@click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), default=0, help="The same seed gives the same file."
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def example_traffic(output: Path, requests: int, seed: int, force: bool) -> None:
    """Write traffic to try things with, in the form that train-drafter and replay read.

    It is about the functions of Python's own library, as a programmers' tool would send it: each is to be
    documented and explained, and fields are to be extracted from a page of its manual.

    \b
    Examples:
      tenfold example-traffic -o traffic.jsonl
      tenfold train-drafter smollm2 --traffic traffic.jsonl -o drafter
    """
    from tenfold.bench.stdlib_traffic import stdlib_traffic, write_traffic

    say(f"{output}: {write_traffic(output, stdlib_traffic(requests, seed), force)} requests")


@click.command("train-drafter", short_help="Train a drafter for MODEL on recorded traffic.")
@click.argument("model")
@click.option("--traffic", type=TRAFFIC, required=True, help=TRAFFIC_HELP)
@click.option("-o", "--output", type=NewPath(), required=True, help="The drafter's folder.")
@click.option(
    "--answers",
    multiple=True,
    metavar="[CLASS=]HOW",
    help="How MODEL answers: own (the body's parameters, the default), greedy, sampled (temperature 0.7), or "
    "several with commas; may be given for each class.",
)
@click.option("--max-answer", type=click.IntRange(2), default=256, help="Most tokens of an answer.")
@click.option("--streams", type=within("max_running"), default=16, help="Conversations answered at once.")
@click.option(
    "--held-out",
    type=Number(0, 1, min_open=True, max_open=True),
    default=0.15,
    help="Share of each class's conversations, the newest, that nothing is learnt from.",
)
@click.option("--force", is_flag=True, help="Replace a drafter that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the evidence as JSON.")
@partial(engine_options, max_running=False)
def train_drafter(
    model: str,
    traffic: Path,
    output: Path,
    answers: tuple[str, ...],
    max_answer: int,
    streams: int,
    held_out: float,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a drafter for MODEL on recorded traffic, and show what it gains on traffic it has not seen.

    MODEL answers the traffic itself, for a drafter must learn what MODEL would say. Ctrl-C may come at any
    time (exit code 130): the same command goes on where it was stopped. Needs torch, and 256 tokens of
    answers at the very least.

    \b
    Examples:
      tenfold train-drafter smollm2 --traffic traffic.jsonl -o drafter
      tenfold train-drafter smollm2 --traffic t.jsonl -o d --answers greedy,sampled --answers agent=greedy
    """
    config = config_of(model, options, streams)
    from tenfold.optimize.train_drafter import TrainSettings
    from tenfold.optimize.train_drafter import train_drafter as run

    settings = TrainSettings(
        traffic=traffic,
        output=output,
        answers=answers,
        max_answer=max_answer,
        streams=streams,
        held_out=held_out,
        force=force,
    )
    try:
        evidence = run(config, settings)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; the same command goes on from what is in {output}") from None
    say(json.dumps(evidence.to_json()) if as_json else evidence.text())


@click.command(short_help="Compare recorded traffic with and without speculation.")
@click.argument("model")
@click.option("--traffic", type=TRAFFIC, required=True, help=TRAFFIC_HELP)
@click.option(
    "--drafter",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder that train-drafter wrote.",
)
@click.option("--streams", type=within("max_running"), default=1, help="Conversations computed at once.")
@click.option(
    "--newest",
    "share",
    type=Number(0, 1, min_open=True),
    default=0.15,
    help="Share of each class's conversations to replay; 1 for all.",
)
@click.option("--max-answer", type=click.IntRange(1), default=256, help="Most tokens of an answer.")
@click.option("--json", "as_json", is_flag=True, help="Print everything, down to each request, as JSON.")
@partial(engine_options, max_running=False)
def replay(
    model: str,
    traffic: Path,
    drafter: Path | None,
    streams: int,
    share: float,
    max_answer: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Compute recorded traffic with speculation and without, in turns, and show what it gains.

    Conversations that the drafter has learnt from are left out. Exit code 1 if any answer is not the same
    both ways.

    \b
    Examples:
      tenfold replay smollm2 --traffic traffic.jsonl
      tenfold replay smollm2 --traffic traffic.jsonl --drafter drafter --json
    """
    config = config_of(model, options, streams)
    from tenfold.bench.replay_run import ReplaySettings, run_replay

    settings = ReplaySettings(
        traffic=traffic, drafter=drafter, streams=streams, share=share, max_answer=max_answer
    )
    report = run_replay(config, settings)
    say(json.dumps(report.to_json()) if as_json else report.text())
    if report.overall.all.differ:
        sys.exit(1)
