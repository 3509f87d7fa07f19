"""`tenfold worker`: an engine for a front on another machine."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import replace

from tenfold.cli.options import config_of, engine_options, size, speculation_options


@click.command()
@click.argument("model")
@click.option(
    "--join",
    metavar="HOST:PORT",
    help="The front to work for: what its `tenfold serve --accept-workers` was given.",
)
@click.option(
    "--secret-file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="The secret that front and workers share: one line of 32 or more characters, readable by its owner "
    "alone.",
)
@click.option(
    "--name", metavar="NAME", help="What the front calls this worker. Default: this machine's name."
)
@engine_options
@speculation_options
@click.option(
    "--kv-disk", metavar="DIR", help="Keep KV pages in this folder too; see `tenfold serve --help`."
)
@click.option(
    "--kv-disk-size",
    "kv_disk_bytes",
    type=size,
    metavar="SIZE",
    help="Most that all files there may take, like 20GiB.",
)
@click.option(
    "--kv-events",
    metavar="tcp://HOST:PORT",
    help="Tell other routers of KV pages here, as vLLM does.",
)
@click.option(
    "--kv-events-replay", metavar="tcp://HOST:PORT", help="Where they ask for events that they missed."
)
def worker(model: str, join: str | None, secret_file: str | None, name: str | None, **options: Any) -> None:
    """Run one engine with MODEL for a front on another machine.

    \b
    Examples:
      openssl rand -hex 32 > secret; chmod 600 secret      (and copy it to both machines)
      tenfold serve smollm2 --accept-workers 10.0.0.1:7001 --secret-file secret     (there)
      tenfold worker smollm2 --join 10.0.0.1:7001 --secret-file secret              (here)

    The front must have the same model file, number formats and Tenfold. A front that is away is tried
    again and again. Ctrl-C or SIGTERM: requests here may end, or go on elsewhere; then this ends. What the
    two say is authenticated and not encrypted: use a network of your own, or a tunnel.
    """
    if join is None:
        raise click.UsageError("say whom to work for, with --join HOST:PORT")
    if secret_file is None:
        raise click.UsageError("--join needs --secret-file FILE, with the secret that the front has too")
    config = config_of(model, options)
    import logging
    import sys

    from tenfold.checkpoint.locate import locate
    from tenfold.worker.join import Joining, work
    from tenfold.worker.loop import JoinRefused

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s worker: %(message)s")
    settings = replace(config.engine_settings(str(locate(model))), routed=True)
    try:
        work(settings, Joining.of(join, secret_file, name))
    except JoinRefused as error:
        raise click.ClickException(str(error)) from None
