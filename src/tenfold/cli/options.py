"""What several commands share: options, how errors are shown, how results are printed."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from msgspec.structs import replace

from tenfold.config import FORMATS, ISAS, KV_FORMATS, LIMITS, SPECULATE, OptionError, ServeConfig, parse_size
from tenfold.protocol import KVTransport

MAX_SEED = 2**64 - 1
"""Of commands that make something at random."""

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A number, perhaps from a range. NaN and infinity are none; click finds NaN in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click's."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number that can be reckoned with.", param, ctx)
        return number


def size(value: str) -> int:
    """`parse_size`, for an option."""
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def within(field: str) -> click.IntRange:
    """The integers that a setting of `ServeConfig` may be, for its option."""
    lowest, highest = LIMITS[field]
    return click.IntRange(int(lowest), int(highest))


_KV_MEMORY = click.option(
    "--kv-memory",
    "kv_memory_bytes",
    type=size,
    metavar="SIZE",
    help="Memory for the KV cache, like 2GiB. Default: up to a quarter of what is free.",
)

_MAX_RUNNING = click.option(
    "--max-running", type=within("max_running"), default=64, help="Most requests computed at once."
)


def engine_options(command: F, kv_memory: bool = True, max_running: bool = True) -> F:
    """The options that decide how a model is loaded; without those for KV memory and for how many requests
    are computed at once where they would do nothing."""
    left_out = {
        option for option, taken in ((_KV_MEMORY, kv_memory), (_MAX_RUNNING, max_running)) if not taken
    }
    for option in reversed(
        (
            click.option(
                "--threads",
                type=within("threads"),
                default=0,
                help="Threads that compute. 0: one per usable core, within the CPU quota.",
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
            _KV_MEMORY,
            click.option(
                "--max-batch-tokens",
                type=within("max_batch_tokens"),
                default=512,
                help="Most tokens in a step.",
            ),
            _MAX_RUNNING,
        )
    ):
        if option not in left_out:
            command = option(command)
    return command


def speculation_options(command: F) -> F:
    """The options that decide what tokens are drafted from."""
    command = click.option(
        "--drafter",
        metavar="DIR",
        help="A drafter for this model, made by `tenfold train-drafter`. Default: drafts from earlier text.",
    )(command)
    return click.option(
        "--speculate",
        type=click.Choice(SPECULATE),
        default="auto",
        help="auto: draft tokens where it pays; off: never. The answers are the same.",
    )(command)


def kv_transport_option(command: F) -> F:
    """The option for how KV pages go from prefill to decode workers."""
    return click.option(
        "--kv-transport",
        type=click.Choice(get_args(KVTransport)),
        help="How KV pages come from prefill to decode workers. auto (the default): within a machine by "
        "memory, between machines by TCP or NIXL, whichever is measured to be faster. NIXL has to be "
        "installed, and lets whoever reaches its ports at the worker's memory: docs/cluster.md.",
    )(command)


def kv_options(command: F) -> F:
    """The options that decide where a worker's KV pages go beside its memory, and who is told of them."""
    for option in reversed(
        (
            click.option(
                "--kv-disk",
                metavar="DIR",
                help="Keep KV pages in this folder too: prompts stay cached when memory is full and "
                "over a restart. All workers share it, and several servers may. What it holds tells of "
                "prompts; the owner alone may read it.",
            ),
            click.option(
                "--kv-disk-size",
                "kv_disk_bytes",
                type=size,
                metavar="SIZE",
                help="Most that all files there may take, like 20GiB. Default: a quarter of what is free, "
                "up to 32GiB.",
            ),
            click.option(
                "--kv-events",
                metavar="tcp://HOST:PORT",
                help="Tell other routers of KV pages here, as vLLM does; further workers take the next "
                "ports. Whoever reaches it can read prompts. Needs tenfold[kv-events].",
            ),
            click.option(
                "--kv-events-replay",
                metavar="tcp://HOST:PORT",
                help="Where they ask for events that they missed; further workers take the next ports.",
            ),
        )
    ):
        command = option(command)
    return command


class NewPath(click.Path):
    """What is to be written: its folder must be there."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r} to write {path.name!r} to", param, ctx)
        return path


class Stopped(click.ClickException):
    """Ended by Ctrl-C, with something to say."""

    exit_code = 130


class Commands(click.Group):
    """Shows an expected error as one line; exit code 1, or 2 when the command line is at fault. What the
    message calls by its name in Python is called by its option here. With ``--json`` the error is on standard
    output too, as one JSON object: ``{"error": {"message": ...}}``."""

    def invoke(self, ctx: click.Context) -> Any:
        options = ctx.args[: ctx.args.index("--")] if "--" in ctx.args else ctx.args
        try:
            return self._invoke(ctx)
        except click.ClickException as error:
            if "--json" in options:
                say(json.dumps({"error": {"message": error.format_message()}}, ensure_ascii=False))
            raise

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            from tenfold.limits import RequestError

            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            fields: tuple[str, ...] = ()
            if isinstance(error, OptionError):
                fields = error.fields
            elif isinstance(error, RequestError):
                fields = (error.field.partition("[")[0],)
            text, ours = _by_options(_without_number(error), fields, command)
            raise click.UsageError(text) if ours else click.ClickException(text) from None


def _without_number(error: ValueError | OSError) -> str:
    """Its text; of the system's errors the file before what is wrong, and no number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def _by_options(text: str, fields: tuple[str, ...], command: click.Command | None) -> tuple[str, bool]:
    """An error's text with options in the place of fields, and whether one of them is of this command."""
    ours = False
    for param in command.params if command is not None else ():
        if param.name in fields:
            ours = True
            option = (
                max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name
            )
            text = re.sub(rf"(?<![\w./-]){param.name}(?![\w/-])", option, short(text))
    return short(text), ours


def short(text: str) -> str:
    """Where a message has a field with its option behind it, the option alone."""
    return re.sub(r"\b\w+ \((--[a-z-]+)\)", r"\1", text)


def say(text: str, nl: bool = True) -> None:
    """Prints, and ends the command where nothing can be printed: silently when the reader has had enough."""
    try:
        click.echo(text, nl=nl)
    except OSError as error:
        # What is left in the buffer must not fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        raise click.ClickException(f"cannot write to standard output: {error.strerror}") from None


def configs_of(models: Sequence[str], options: dict[str, Any]) -> list[ServeConfig]:
    """The settings of each of several models, which may be written ``NAME=MODEL``: the options apply to each.
    Raises UsageError also for two of one name, and for options that are for one model alone."""
    if len(models) > 1:
        for field, option in (
            ("drafter", "--drafter"),
            ("learn", "--learn"),
            ("accept_workers", "--accept-workers"),
            ("kv_events", "--kv-events"),
            ("kv_events_replay", "--kv-events-replay"),
        ):
            if options.get(field):
                raise click.UsageError(f"{option} is for one model; serve that one by itself")
        if options.get("served_name") is not None:
            raise click.UsageError("--name is for one model; with several write NAME=MODEL for each")
    configs = []
    for given in models:
        name, model = _named(given)
        if name is not None and options.get("served_name") is not None:
            raise click.UsageError(f"{given} has a name, and so has --name; leave one of them out")
        named = options if name is None else {**options, "served_name": name}
        configs.append(config_of(model, named))
    known: dict[str, str] = {}
    for config in configs:
        called = config.model_name
        if called in known:
            raise click.UsageError(
                f"two models are called {called}: {known[called]} and {config.model}; call one of them "
                f"something else, like {called}-2={config.model}"
            )
        known[called] = config.model
    return configs


def _named(given: str) -> tuple[str | None, str]:
    """Name and model of ``NAME=MODEL``. A path may have an equals sign: what is there, or has a slash before
    the sign, is a path."""
    name, sign, model = given.partition("=")
    if not sign or not name or not model or "/" in name or os.path.exists(given):
        return None, given
    return name, model


def config_of(model: str, options: dict[str, Any], streams: int = 1) -> ServeConfig:
    """The settings that the options make up, for an engine that computes ``streams`` conversations at once
    at least. Raises OptionError for one that is out of range."""
    config = ServeConfig(model=model, **options)
    return replace(config, max_running=max(config.max_running, streams))
