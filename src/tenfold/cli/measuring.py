"""Commands that look at a model and measure it: `inspect`, `bench` and `synth`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from tenfold.bench.shapes import SHAPES, SYNTH_FORMATS, SynthFormat
from tenfold.cli.options import MAX_SEED, NewPath, config_of, engine_options, say
from tenfold.config import FORMATS


@click.command(short_help="Show the weights and the graph of MODEL, and what they cost.")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option(
    "--format", "requested", type=click.Choice(FORMATS), default="auto", help="As it would be served."
)
@click.option("--context", type=click.IntRange(1), default=512, help="Context of the steps that are costed.")
def inspect(model: str, as_json: bool, requested: str, context: int) -> None:
    """Show what MODEL is made of: every weight and how it would be held, the graph and what a step costs.

    \b
    Examples:
      tenfold inspect smollm2
      tenfold inspect ./model.gguf --format q8
      tenfold inspect smollm2 --json | jq .steps
    """
    from tenfold.inspection import inspect_model

    report = inspect_model(model, requested, context)
    say(json.dumps(report.to_json()) if as_json else report.text())


@click.command(short_help="Measure the engine with MODEL, without HTTP.")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@partial(engine_options, kv_memory=False)
def bench(model: str, as_json: bool, **options: Any) -> None:
    """Measure the engine with MODEL on this machine, without HTTP.

    \b
    Example:
      tenfold bench smollm2 --json
    """
    config = config_of(model, options)
    from tenfold.bench.engine_bench import run

    say(run(config, as_json=as_json))


@click.command(
    short_help="Write a model file of random weights, to measure with.",
    epilog="Embedding and output matrix are Q8_0 beside 4-bit formats, as is usual; q4_k becomes Q5_0, and "
    "q6_k Q8_0, where the columns of a matrix are not whole blocks of 256. The tokenizer is smollm2's, "
    "filled up with unused tokens to the size of the shape's vocabulary.",
)
@click.argument("shape", type=click.Choice(tuple(SHAPES)), metavar="SHAPE")
@click.option(
    "--format", "requested", type=click.Choice(SYNTH_FORMATS), default="q4_0", help="Type of the matrices."
)
@click.option("-o", "--output", type=NewPath(), required=True, help="The GGUF file to write.")
@click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), default=0, help="The same seed gives the same file."
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print path, bytes and parameters as JSON.")
def synth(shape: str, requested: SynthFormat, output: Path, seed: int, force: bool, as_json: bool) -> None:
    """Write a model file of random weights in the SHAPE of a known model, to measure speed with.

    Its text is noise. SHAPE is tiny, smollm2-135m, gemma3-270m, qwen2.5-0.5b, qwen3-0.6b, llama-1b or
    llama-8b.

    \b
    Examples:
      tenfold synth smollm2-135m -o small.gguf
      tenfold synth llama-1b --format q4_0 -o llama-1b-q4_0.gguf
      tenfold bench llama-1b-q4_0.gguf
    """
    from tenfold.bench.synth import run

    say(run(shape, requested, output, seed, force, as_json))
