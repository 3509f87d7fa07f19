"""Commands that use a model: `serve` and `generate`."""

from __future__ import annotations

import json
import signal
import sys
import time
from functools import partial
from typing import Any

import click

from tenfold.cli.options import (
    Number,
    config_of,
    configs_of,
    engine_options,
    kv_options,
    say,
    short,
    speculation_options,
    within,
)
from tenfold.cli.signals import ends_quietly
from tenfold.config import LOG_FORMATS, REASONING_FORMATS, TOOL_FORMATS, ServerPlan
from tenfold.limits import RANGES
from tenfold.router.policies import POLICIES

GENERATE_MAX_TOKENS = 512
"""Of `generate`, unless it is told otherwise: a small model may well go on to its context's end."""


def _in_range(parameter: str) -> Number:
    """The numbers that a sampling parameter may be, for its option."""
    return Number(RANGES[parameter].low, RANGES[parameter].high)


@click.command(short_help="Serve models over OpenAI's and Anthropic's APIs.")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=within("port"), default=8000, help="0: a free one.")
@click.option(
    "--name", "served_name", help="The name of the one MODEL in the API. Default: MODEL without its folder."
)
@engine_options
@speculation_options
@click.option(
    "--learn",
    is_flag=True,
    help="Train the drafter's head on this server's answers, in a process that gives way. Keeps "
    "recent answers on disk, in DIR/live: at most 1 GiB, readable by the owner alone. Needs --drafter and "
    "torch.",
)
@kv_options
@click.option(
    "--tool-format",
    type=click.Choice(TOOL_FORMATS),
    default="auto",
    help="How the model writes tool calls; auto: as its chat template shows.",
)
@click.option(
    "--reasoning-format",
    type=click.Choice(REASONING_FORMATS),
    default="auto",
    help="How the model marks its reasoning, which is then apart from the answer's text; none: it is text.",
)
@click.option(
    "--workers",
    type=within("workers"),
    default=1,
    help="Processes with an engine each. Threads are divided among them, and KV memory, also where "
    "--kv-memory says how much. 0, with --accept-workers: none but those that join.",
)
@click.option(
    "--accept-workers",
    metavar="HOST:PORT",
    help="Let workers of other machines join here (`tenfold worker --join`). Authenticated, not encrypted: "
    "an address of a network of your own.",
)
@click.option(
    "--secret-file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="The secret that such workers have too: one line of 32 or more characters, readable by its owner "
    "alone.",
)
@click.option(
    "--prefill",
    type=within("prefill"),
    default=0,
    help="With --decode, instead of --workers: so many processes compute long prompts, and hand their pages "
    "to the others, whose streams are not held up by them. 0: every worker does both.",
)
@click.option(
    "--decode",
    type=within("decode"),
    default=0,
    help="With --prefill: processes that answer, and compute short prompts themselves.",
)
@click.option(
    "--routing",
    type=click.Choice(POLICIES),
    default="cache-aware",
    help="Which of several workers gets a request; the others than cache-aware are for comparison.",
)
@click.option(
    "--log-level",
    type=click.Choice(("info", "debug")),
    default="info",
    help="debug: also why each request went to which worker.",
)
@click.option(
    "--max-queue",
    type=within("max_queue"),
    help="Most requests that wait; beyond it 429. Default: a quarter of those that run, so that who is taken "
    "waits for a quarter of the time that a request takes.",
)
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Keys that clients must send, one a line; # begins a comment. Default: nobody is asked for a key.",
)
@click.option(
    "--admin-keys",
    "admin_key_file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Keys that may load and unload models at run time, one a line. Default: nobody may.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="A web page's origin, like https://chat.example.com, whose scripts may use the server; may be given "
    "several times. Default: none.",
)
@click.option(
    "--log-format", type=click.Choice(LOG_FORMATS), default="text", help="Of the log, one line a request."
)
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="An OpenTelemetry collector that is sent a span for each request, like http://127.0.0.1:4318. Needs "
    "tenfold[otel].",
)
@click.option("--json", "as_json", is_flag=True, help="Print the resolved plan as JSON.")
@ends_quietly(signal.SIGHUP)
def serve(models: tuple[str, ...], as_json: bool, log_level: str, **options: Any) -> None:
    """Serve one MODEL or several over HTTP, with OpenAI's and Anthropic's APIs.

    Of several each is asked for by its name: NAME=MODEL gives it one. Options apply to each of them; each has
    workers and KV memory of its own.

    \b
    Examples:
      tenfold serve smollm2
      tenfold serve smollm2 gemma3-270m
      tenfold serve small=./model-q4.gguf large=./model-q8.gguf --kv-memory 1GiB
      tenfold serve ./model.gguf --port 9000 --name my-model --kv-memory 2GiB
      tenfold serve ./Llama-3.2-1B --format q8 --host 0.0.0.0

    A page to try the model is at /. Endpoints: /v1/chat/completions, /v1/completions, /v1/embeddings,
    /v1/messages, /v1/messages/count_tokens, /v1/responses, /v1/models, /tokenize, /detokenize, /health,
    /ready, /metrics, /stats, /openapi.json; with --admin-keys /admin/models.
    Ctrl-C stops it; running requests may end first. SIGHUP replaces the workers one after another.
    """
    configs = configs_of(models, options)
    config = configs[0]
    import logging
    import shlex

    from tenfold.checkpoint.locate import locate
    from tenfold.server.access_log import log_handler
    from tenfold.server.host import StartError
    from tenfold.server.serve import serve as run
    from tenfold.server.text import load_text

    began = time.monotonic()
    logging.basicConfig(level=logging.INFO, handlers=[log_handler(config.log_format)])
    logging.getLogger("tenfold").setLevel(log_level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)

    def ready(plan: ServerPlan, url: str) -> None:
        if as_json:
            click.echo(json.dumps({"url": url, **plan.to_json()}))
            return
        body = json.dumps({"model": config.model_name, "messages": [{"role": "user", "content": "Hello!"}]})
        click.echo(plan.text())
        click.echo(f"\nReady after {time.monotonic() - began:.1f} s. Talk to it at {url}/ in a browser, or:")
        click.echo(f"  {shlex.join(['curl', f'{url}/v1/chat/completions', '-d', body])}")

    try:
        paths = [str(locate(each.model)) for each in configs]
        others = list(zip(configs[1:], paths[1:], strict=True))
        run(config, paths[0], load_text, ready, others=others)
    except StartError as error:
        raise click.ClickException(short(str(error))) from None


@click.command(short_help="Answer PROMPT, or standard input, with MODEL.")
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
    help=f"Most tokens to generate. Default: {GENERATE_MAX_TOKENS}, or what the context leaves.",
)
@click.option(
    "--temperature",
    type=Number(0, 2),
    default=1.0,
    help="Divides the logits: higher is more varied. 0: always the most likely token.",
)
@click.option(
    "--top-p",
    type=_in_range("top_p"),
    default=1.0,
    help="Draw from the fewest likely tokens that hold this much of the probability. 1: off.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    default=0,
    help="Draw from this many most likely tokens. 0, or more than the vocabulary has: off.",
)
@click.option(
    "--min-p",
    type=_in_range("min_p"),
    default=0.0,
    help="Draw from tokens at least this likely, against the likeliest. 0: off.",
)
@click.option(
    "--repetition-penalty",
    type=_in_range("repetition_penalty"),
    default=1.0,
    help="Divides positive logits of tokens in prompt or answer, and multiplies negative ones. 1: off.",
)
@click.option(
    "--presence-penalty",
    type=_in_range("presence_penalty"),
    default=0.0,
    help="Taken off the logit of each token that is in the answer. 0: off.",
)
@click.option(
    "--frequency-penalty",
    type=_in_range("frequency_penalty"),
    default=0.0,
    help="The same, times how often the token is there. 0: off.",
)
@click.option(
    "--seed",
    type=int,
    help="The same seed, of 64 bits, signed or not, gives the same text. Default: a random one.",
)
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end.")
@partial(engine_options, max_running=False)
@speculation_options
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
    config_of(model, options)
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
                say(piece.text, nl=False)
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
        say(json.dumps(result, ensure_ascii=False))
    else:
        say("" if stream else "".join(texts))
