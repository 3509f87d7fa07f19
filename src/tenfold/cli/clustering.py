"""Commands for many machines: `cluster up`, and the worker of a cluster."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from msgspec.structs import replace

from tenfold.cli.options import config_of, engine_options, speculation_options
from tenfold.config import ServeConfig
from tenfold.protocol import EngineSettings

if TYPE_CHECKING:
    from tenfold.cluster.up import Cluster


def dynamo_worker(
    config: ServeConfig,
    role: str,
    namespace: str,
    etcd: str,
    discovery: str,
    events: str,
    address: str,
    secret_file: str | None,
) -> None:
    """Runs ``tenfold worker --cluster dynamo``. Raises UsageError for options that do not fit."""
    if bool(etcd) == bool(discovery):
        raise click.UsageError(
            "say where the cluster is found: either --etcd URL or --discovery DIR, as `tenfold cluster up` "
            "prints it"
        )
    with ended_by_signals():
        from tenfold.checkpoint.locate import locate
        from tenfold.cluster.alone import keep_worker
        from tenfold.cluster.runtime import Runtime

        log_to_stderr()
        runtime = Runtime(
            namespace=namespace,
            discovery="etcd" if etcd else "file",
            folder=str(Path(discovery).absolute()) if discovery else "",
            etcd=etcd,
            address=address,
            events=events,
        )
        engine = config.engine_settings(str(locate(config.model)))
        settings = cluster_settings(engine, role, address, secret_file)
        keep_worker(settings, config.model_name, role, runtime)


def cluster_settings(
    settings: EngineSettings, role: str, address: str, secret_file: str | None
) -> EngineSettings:
    """The engine's part of a worker that a router of another make reads. Raises UsageError, ValueError,
    OSError."""
    # A cluster's worker changes its folder: see `tenfold.cluster.dynamo.run_worker`.
    paths = {
        field: str(Path(path).absolute())
        for field in ("model", "drafter", "kv_disk")
        if (path := getattr(settings, field)) is not None
    }
    settings = replace(settings, **paths, routed=True, page_tokens=True, transfer=role != "mixed")
    if secret_file is None:
        return settings
    if not settings.transfer:
        raise click.UsageError("--secret-file is for prefill and decode workers, which send each other pages")
    from tenfold.worker.secret import load_secret

    load_secret(secret_file)
    return replace(settings, transfer_address=address, transfer_secret=str(Path(secret_file).absolute()))


@click.group()
def cluster() -> None:
    """Many machines: Tenfold's workers under NVIDIA Dynamo.

    \b
    Examples:
      tenfold cluster up smollm2 --workers 2
      tenfold cluster up smollm2 --workers 1 --etcd --address 10.0.0.1 --host 0.0.0.0
      tenfold worker smollm2 --cluster dynamo ...      (on a further machine, as that prints it)
    """


@cluster.command()
@click.argument("model")
@click.option("--workers", type=click.IntRange(1, 64), help="Workers on this machine. Default: 1.")
@click.option("--prefill", type=click.IntRange(1, 64), help="Workers that compute prompts alone.")
@click.option("--decode", type=click.IntRange(1, 64), help="Workers that go on with what those computed.")
@click.option("--host", default="127.0.0.1", help="Address of the HTTP front; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Port of the HTTP front.")
@click.option("--name", "served_name", help="The model's name in the API. Default: MODEL without its folder.")
@click.option(
    "--address",
    default="127.0.0.1",
    help="Of this machine in the cluster's network, which must be private: nothing there is authenticated.",
)
@click.option("--etcd", is_flag=True, help="Start an etcd: workers of other machines need one.")
@click.option(
    "--launcher",
    type=click.Choice(("local", "ray")),
    default="local",
    help="Who places workers and starts them again: local, on this machine; ray, on the nodes of a Ray "
    "cluster.",
)
@click.option(
    "--ray-address",
    metavar="HOST:PORT",
    help="With --launcher ray: the cluster's head; local for a Ray of its own on this machine. Default: "
    "RAY_ADDRESS, or what `ray start` has begun here, or else local.",
)
@click.option("--namespace", default="tenfold", help="Tells clusters apart that share an etcd.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="For logs and the registry of workers, of this cluster alone. Default: a temporary one, removed "
    "when all has ended in order.",
)
@click.option(
    "--secret-file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="With --prefill and --decode: pages also go to and from workers of other machines that have this "
    "secret, over TCP. One line of 32 or more characters, readable by its owner alone.",
)
@engine_options
@speculation_options
def up(
    model: str,
    workers: int | None,
    prefill: int | None,
    decode: int | None,
    address: str,
    etcd: bool,
    launcher: Literal["local", "ray"],
    ray_address: str | None,
    namespace: str,
    folder: Path | None,
    secret_file: str | None,
    **options: Any,
) -> None:
    """Start Dynamo's front and workers with MODEL on this machine.

    \b
    Examples:
      tenfold cluster up smollm2 --workers 2
      tenfold cluster up smollm2 --prefill 1 --decode 1
      tenfold cluster up smollm2 --workers 1 --etcd --address 10.0.0.1 --host 0.0.0.0
      tenfold cluster up smollm2 --workers 8 --launcher ray --etcd --address 10.0.0.1

    What ends is started again; requests of a worker that dies or hangs go on at another. Ctrl-C ends all.
    Needs tenfold[dynamo] and ai-dynamo 1.6.1: see docs/cluster.md.
    """
    if (prefill is None) != (decode is None):
        raise click.UsageError("--prefill and --decode belong together: a prompt needs both")
    if workers is not None and prefill is not None:
        raise click.UsageError("say --workers N, or --prefill P --decode D")
    if ray_address is not None and launcher != "ray":
        raise click.UsageError("--ray-address needs --launcher ray")
    roles = ("mixed",) * (workers or 1)
    if prefill is not None and decode is not None:
        roles = ("prefill",) * prefill + ("decode",) * decode
    config = config_of(model, {**options, "workers": len(roles)})
    with ended_by_signals(), contextlib.ExitStack() as stack:
        from tenfold.checkpoint.locate import locate
        from tenfold.cluster.up import Cluster, ClusterConfig

        log_to_stderr()
        made = folder or stack.enter_context(temporary_folder())
        here = Cluster(
            ClusterConfig(
                settings=cluster_settings(
                    config.engine_settings(str(locate(model))), roles[0], address, secret_file
                ),
                served_name=config.model_name,
                model=model,
                roles=roles,
                folder=made.absolute(),
                host=config.host,
                port=config.port,
                address=address,
                namespace=namespace,
                etcd=etcd,
                launcher=launcher,
                ray_address=ray_address,
                shared=folder is not None,
            )
        )
        kinds = ", ".join(sorted(set(roles)))
        click.echo(f"Starting {len(roles)} workers ({kinds}) and the front at {here.url}")
        here.run(lambda seconds: say_ready(here, seconds, kept=folder is not None))


def say_ready(here: Cluster, seconds: float, kept: bool) -> None:
    """What can be done with a cluster now; ``kept``: its folder is, when it ends."""
    name, ray = here.config.served_name, here.config.launcher == "ray"
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    curl = ["curl", f"{here.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    where = f"{here.config.folder}/logs{', each of its own node' if ray else ''}"
    where += "" if kept else "; they go when this ends, or give --dir"
    click.echo(f"Ready after {seconds:.1f} s. Logs are in {where}. Try:\n  {shlex.join(curl)}")
    if (command := here.further()) is not None:
        click.echo(f"On further machines, with the same Tenfold and model:\n  {command}")
    else:
        click.echo("For workers on further machines start this with --etcd and --address.")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is within in order and without an error, also while it is starting: later
    `tenfold.cluster.processes.keep` takes them."""

    came: list[int] = []

    def end(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException:  # a module that is interrupted while it is imported may raise whatever it likes
        if not came:
            raise
        click.echo("Ended before it had started.")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """For a cluster; it stays where its logs say why a process was never up."""
    from tenfold.cluster.processes import NeverUp

    made = Path(tempfile.mkdtemp(prefix="tenfold-cluster-"))
    try:
        yield made
    except NeverUp:
        raise
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    shutil.rmtree(made, ignore_errors=True)


def log_to_stderr() -> None:
    """What ends and is started again."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
