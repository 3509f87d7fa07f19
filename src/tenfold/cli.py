"""The command line. What a command needs is imported when it runs: help must be quick."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from tenfold.bench.shapes import SHAPES, SYNTH_FORMATS, SynthFormat
from tenfold.config import FORMATS, ISAS, KV_FORMATS, ResolvedPlan, ServeConfig

F = TypeVar("F", bound=Callable[..., Any])

GENERATE_MAX_TOKENS = 512
"""Of `generate`, unless it is told otherwise: a small model may well go on to its context's end."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(value: str) -> int:
    """Bytes, with a binary unit: 512MiB, 1.5G."""
    text = value.strip().upper().removesuffix("B").removesuffix("I")
    unit = text[-1:] if text[-1:] in "KMGT" else ""
    try:
        return int(float(text.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is not a size; write it like 512MiB or 2GiB. Units are KiB, MiB, GiB and TiB "
            "(or K, M, G and T, meaning the same); a number alone is bytes"
        ) from None


def engine_options(command: F) -> F:
    """The options that decide how a model is loaded."""
    for option in reversed(
        (
            click.option(
                "--threads",
                type=int,
                default=0,
                help="0: one per usable core, within the CPU quota.",
            ),
            click.option("--isa", type=click.Choice(ISAS), default="auto", help="Instruction set."),
            click.option(
                "--format",
                type=click.Choice(FORMATS),
                default="auto",
                help="Number format of the weights; auto keeps what the file has.",
            ),
            click.option(
                "--kv-format",
                type=click.Choice(KV_FORMATS),
                default="auto",
                help="What the KV cache is held in: bf16, or f32 with f32 weights; q8 takes half of bf16.",
            ),
            click.option(
                "--kv-memory",
                "kv_memory_bytes",
                type=size,
                metavar="SIZE",
                help="Memory for the KV cache, like 2GiB. Default: up to a quarter of what is free.",
            ),
            click.option("--max-batch-tokens", type=int, default=512, help="Most tokens in a step."),
            click.option("--max-running", type=int, default=64, help="Most requests computed at once."),
        )
    ):
        command = option(command)
    return command


class Commands(click.Group):
    """Shows an expected error as one line; exit code 1, or 2 when the command line is at fault."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            raise click.ClickException(str(error)) from None


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


@main.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=int, default=8000, help="0: a free one.")
@click.option("--name", "served_name", help="The model's name in the API. Default: MODEL without its folder.")
@engine_options
@click.option("--max-queue", type=int, default=256, help="Most requests that wait; beyond it 429.")
@click.option("--json", "as_json", is_flag=True, help="Print the resolved plan as JSON.")
def serve(model: str, as_json: bool, **options: Any) -> None:
    """Serve MODEL over HTTP, with OpenAI's API.

    \b
    Examples:
      tenfold serve smollm2
      tenfold serve ./model.gguf --port 9000 --name my-model --kv-memory 2GiB
      tenfold serve ./Llama-3.2-1B --format q8 --host 0.0.0.0

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /ready, /metrics. Ctrl-C stops
    it; running requests may end first.
    """
    config = _config(model, options)
    import logging
    import shlex

    from tenfold.checkpoint.locate import locate
    from tenfold.server.serve import serve as run
    from tenfold.server.supervisor import StartError
    from tenfold.server.text import load_text

    began = time.monotonic()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)

    def ready(plan: ResolvedPlan, url: str) -> None:
        if as_json:
            click.echo(json.dumps({"url": url, **plan.to_json()}))
            return
        body = json.dumps({"model": config.model_name, "messages": [{"role": "user", "content": "Hello!"}]})
        click.echo(plan.text())
        click.echo(f"\nReady after {time.monotonic() - began:.1f} s at {url}. Try:")
        click.echo(f"  {shlex.join(['curl', f'{url}/v1/chat/completions', '-d', body])}")

    try:
        run(config, str(locate(model)), load_text, ready)
    except StartError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option(
    "--chat/--raw",
    default=True,
    help="As a message in the model's chat template, or as bare text to be continued.",
)
@click.option("--stream/--no-stream", default=True, help="Print text as it comes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with text, usage and times.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help=f"Default: {GENERATE_MAX_TOKENS}, or what the context leaves.",
)
@click.option(
    "--temperature", type=click.FloatRange(0, 2), default=1.0, help="0: always the most likely token."
)
@click.option("--top-p", type=float, default=1.0)
@click.option("--top-k", type=int, default=0, help="0, or more than the vocabulary has: off.")
@click.option("--min-p", type=float, default=0.0)
@click.option("--repetition-penalty", type=float, default=1.0)
@click.option("--presence-penalty", type=float, default=0.0)
@click.option("--frequency-penalty", type=float, default=0.0)
@click.option("--seed", type=int, help="The same seed gives the same text. Default: a random one.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end.")
@engine_options
def generate(model: str, prompt: str | None, chat: bool, stream: bool, as_json: bool, **options: Any) -> None:
    """Answer PROMPT, or what comes on standard input, with MODEL.

    \b
    Examples:
      tenfold generate smollm2 "Why is the sky blue?" --max-tokens 100
      tenfold generate smollm2 --raw "Once upon a time" --temperature 0
      cat question.txt | tenfold generate smollm2 --json
    """
    from msgspec.structs import replace

    from tenfold.protocol import SamplingParams

    sampling = {name: options.pop(name) for name in SamplingParams.__struct_fields__ if name in options}
    _config(model, options)
    if prompt is None:
        if sys.stdin.isatty():
            raise click.UsageError("there is no PROMPT; give one, or send it on standard input")
        prompt = sys.stdin.read()
    if not (prompt.strip() if chat else prompt):
        raise click.UsageError("the PROMPT is empty; give some text, as an argument or on standard input")
    from tenfold.limits import PromptTooLong
    from tenfold.llm import LLM

    with LLM(model, **options) as llm:
        params = SamplingParams(**sampling)
        began = time.monotonic()
        first: float | None = None
        texts = []
        talk = [{"role": "user", "content": prompt}]
        ask = partial(llm.stream_chat, talk) if chat else partial(llm.stream, prompt)
        try:
            pieces = ask(replace(params, max_tokens=params.max_tokens or GENERATE_MAX_TOKENS))
        except PromptTooLong:
            if params.max_tokens is not None:
                raise
            pieces = ask(params)
        for piece in pieces:
            first = first or time.monotonic()
            texts.append(piece.text)
            if stream and not as_json:
                _say(piece.text, nl=False)
    ended = time.monotonic()
    assert first is not None  # every request has at least its last piece
    if as_json:
        decode_s = ended - first
        result = {
            "text": "".join(texts),
            "finish_reason": piece.finish_reason,
            "prompt_tokens": piece.prompt_tokens,
            "completion_tokens": piece.completion_tokens,
            "ttft_ms": round((first - began) * 1e3, 2),
            "decode_tokens_per_s": round((piece.completion_tokens - 1) / decode_s, 2) if decode_s else None,
        }
        _say(json.dumps(result, ensure_ascii=False))
    else:
        _say("" if stream else "".join(texts))


@main.command()
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
    _say(json.dumps(report.to_json()) if as_json else report.text())


@main.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@engine_options
def bench(model: str, as_json: bool, **options: Any) -> None:
    """Measure the engine with MODEL on this machine, without HTTP.

    \b
    Example:
      tenfold bench smollm2 --json
    """
    config = _config(model, options)
    from tenfold.bench.engine_bench import run

    _say(run(config, as_json=as_json))


@main.command(
    epilog="Embedding and output matrix are Q8_0 beside 4-bit formats, as is usual; q4_k becomes Q5_0, and "
    "q6_k Q8_0, where the columns of a matrix are not whole blocks of 256. The tokenizer is smollm2's, "
    "filled up with unused tokens to the size of the shape's vocabulary."
)
@click.argument("shape", type=click.Choice(tuple(SHAPES)), metavar="SHAPE")
@click.option(
    "--format", "requested", type=click.Choice(SYNTH_FORMATS), default="q4_0", help="Type of the matrices."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The GGUF file to write."
)
@click.option("--seed", type=click.IntRange(0), default=0, help="The same seed gives the same file.")
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

    _say(run(shape, requested, output, seed, force, as_json))


def _say(text: str, nl: bool = True) -> None:
    """Prints, and ends the command where nothing can be printed: silently when the reader has had enough."""
    try:
        click.echo(text, nl=nl)
    except OSError as error:
        # What is left in the buffer must not fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        raise click.ClickException(f"cannot write to standard output: {error.strerror}") from None


def _config(model: str, options: dict[str, Any]) -> ServeConfig:
    try:
        return ServeConfig(model=model, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
