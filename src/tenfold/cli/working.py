"""`tenfold worker`: an engine for a front on another machine, Tenfold's own or a cluster's."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import replace

from tenfold.cli.options import (
    config_of,
    engine_options,
    kv_options,
    kv_transport_option,
    speculation_options,
)
from tenfold.cli.signals import ends_quietly
from tenfold.cluster.options import ROLES
from tenfold.config import ServeConfig


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
    "--name",
    metavar="NAME",
    help="With --join, what the front calls this worker; default: this machine's name. With --cluster, the "
    "model's name in the API; default: MODEL without its folder.",
)
@click.option(
    "--cluster",
    type=click.Choice(("dynamo",)),
    help="Work in a cluster of NVIDIA Dynamo instead, as `tenfold cluster up` prints it.",
)
@click.option(
    "--role", type=click.Choice(ROLES), help="In the cluster; mixed (the default) does all of a request."
)
@click.option(
    "--namespace",
    help="With --cluster: that of its workers, as `tenfold cluster up` prints it. It says which model and "
    "formats they have.",
)
@click.option(
    "--etcd", metavar="URL", help="With --cluster: the etcd server by which its processes find each other."
)
@click.option(
    "--discovery",
    metavar="DIR",
    help="With --cluster, on one machine and without etcd: the folder by which they do.",
)
@click.option(
    "--events",
    metavar="HOST:PORT:PORT",
    help="With --cluster: its event broker, with the ports that events come in and go out by.",
)
@click.option("--address", help="With --cluster: this machine's in its network. Default: 127.0.0.1.")
@kv_transport_option
@engine_options
@speculation_options
@kv_options
def worker(
    model: str,
    join: str | None,
    secret_file: str | None,
    name: str | None,
    cluster: str | None,
    role: str | None,
    namespace: str | None,
    etcd: str | None,
    discovery: str | None,
    events: str | None,
    address: str | None,
    kv_transport: str | None,
    **options: Any,
) -> None:
    """Run one engine with MODEL for a front on another machine.

    \b
    Examples:
      openssl rand -hex 32 > secret; chmod 600 secret      (and copy it to both machines)
      tenfold serve smollm2 --accept-workers 10.0.0.1:7001 --secret-file secret     (there)
      tenfold worker smollm2 --join 10.0.0.1:7001 --secret-file secret              (here)
      tenfold worker smollm2 --cluster dynamo ...           (as `tenfold cluster up` prints it)

    With less KV memory than others this worker gets the requests that fit it.
    The front must have the same model file, number formats and Tenfold. A front that is away is tried
    again and again. Ctrl-C or SIGTERM: requests here may end, or go on elsewhere; then this ends. What the
    two say is authenticated and not encrypted: use a network of your own, or a tunnel. In a cluster nothing
    is authenticated: docs/cluster.md.
    """
    if cluster is not None:
        joining = {"--join": join}
        for field in ("kv_events", "kv_events_replay"):
            joining[f"--{field.replace('_', '-')}"] = options.pop(field)
        _none_of(joining, "is for --join, and does nothing with --cluster")
        if namespace is None:
            raise click.UsageError(
                "--cluster needs --namespace, as `tenfold cluster up` prints it: it says which model and "
                "formats the workers of the cluster have"
            )
        from tenfold.cli.clustering import dynamo_worker

        config = config_of(model, {**options, "served_name": name})
        dynamo_worker(
            config,
            role=role or "mixed",
            namespace=namespace,
            etcd=etcd or "",
            discovery=discovery or "",
            events=events or "",
            address=address or "127.0.0.1",
            secret_file=secret_file,
            kv_transport=kv_transport,
        )
        return
    places = {"--etcd": etcd, "--discovery": discovery, "--events": events, "--address": address}
    others = {"--role": role, "--namespace": namespace, "--kv-transport": kv_transport}
    _none_of({**others, **places}, "needs --cluster")
    if join is None:
        raise click.UsageError("say whom to work for, with --join HOST:PORT")
    if secret_file is None:
        raise click.UsageError("--join needs --secret-file FILE, with the secret that the front has too")
    _join(config_of(model, options), join, secret_file, name)


@ends_quietly()
def _join(config: ServeConfig, join: str, secret_file: str, name: str | None) -> None:
    from tenfold.checkpoint.locate import locate
    from tenfold.log_format import log_to_stderr
    from tenfold.worker.join import Joining, work
    from tenfold.worker.loop import JoinRefused

    log_to_stderr("%(asctime)s worker: %(message)s")
    settings = replace(config.engine_settings(str(locate(config.model))), routed=True)
    try:
        work(settings, Joining.of(join, secret_file, name))
    except JoinRefused as error:
        raise click.ClickException(str(error)) from None


def _none_of(options: dict[str, str | None], why: str) -> None:
    """Raises UsageError for the first option that was given."""
    for name, value in options.items():
        if value is not None:
            raise click.UsageError(f"{name} {why}")
