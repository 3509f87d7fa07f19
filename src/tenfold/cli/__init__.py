"""The command line. What a command needs is imported when it runs: help must be quick."""

from __future__ import annotations

import click

from tenfold.cli.clustering import cluster
from tenfold.cli.measuring import bench, inspect, synth
from tenfold.cli.options import Commands
from tenfold.cli.serving import generate, serve
from tenfold.cli.simulating import simulate
from tenfold.cli.speculating import example_traffic, replay, train_drafter
from tenfold.cli.working import worker


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog="MODEL is a GGUF file, a folder with config.json and safetensors, smollm2, gemma3-270m, or "
    "owner/name on the Hugging Face hub. A file or folder that is there goes before a name.",
)
@click.version_option(package_name="tenfold")
def main() -> None:
    """Tenfold serves a language model fast, with the same answers.

    \b
    Try:
      tenfold generate smollm2 "Why is the sky blue?"
      tenfold serve smollm2
      tenfold inspect smollm2
    """


for command in (
    serve,
    worker,
    generate,
    inspect,
    bench,
    synth,
    example_traffic,
    train_drafter,
    replay,
    simulate,
    cluster,
):
    main.add_command(command)
