"""The command line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

import tenfold.llm
from tenfold.cli import main
from tenfold.cli.options import Number, config_of
from tenfold.llm import Completion
from tenfold.llm_input import check_room
from tenfold.protocol import SamplingParams
from tenfold.server.endpoints import COUNT_TOKENS_PATH, ENDPOINTS
from tests.helpers.model_files import random_weights, tiny_config, write_gguf_model


def run(*args: str, input: str | None = None) -> Any:
    return CliRunner().invoke(main, args, input=input)


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """A command and all below it, by what is written after ``tenfold``."""
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, (*path, name))


every_command = pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands(main)]
)


@every_command
def test_help_teaches_with_an_example(path: tuple[str, ...], command: click.Command) -> None:
    """Every command shows how it is used, with one of its own lines."""
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert any(
        line.startswith("    " + " ".join(("tenfold", *path)) + " ") for line in result.output.split("\n")
    )


@every_command
def test_help_explains_every_option(path: tuple[str, ...], command: click.Command) -> None:
    """What it is for; a number shows its range, unless that is told in words."""
    for option in command.params:
        if isinstance(option, click.Option) and "--help" not in option.opts:
            assert option.help, option.opts
            if option.type in (click.INT, click.FLOAT):
                assert "64 bits" in option.help, option.opts


@every_command
def test_help_sums_every_command_up(path: tuple[str, ...], command: click.Command) -> None:
    """On a terminal of 80 columns the line that a command has in the list of commands is not cut off."""
    if isinstance(command, click.Group):
        _, _, listed = (
            CliRunner().invoke(main, [*path, "--help"], env={"COLUMNS": "80"}).output.partition("Commands:")
        )
        assert listed and "..." not in listed


def test_help_needs_nothing_heavy() -> None:
    """So that it is quick: none of the libraries that only some commands need."""
    code = (
        "import sys, tenfold, tenfold.cli; "
        "print([name for name in ('numpy', 'uvicorn', 'uvloop', 'asyncio', 'tokenizers', 'jinja2', 'torch',"
        " 'prometheus_client') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve"], "MODEL"),
        (["serve", "m", "--port", "70000"], "'--port': 70000 is not in the range 0<=x<=65535"),
        (["serve", "m", "--max-running", "0"], "'--max-running': 0 is not in the range 1<=x"),
        (["serve", "m", "--kv-memory", "much"], "512MiB"),
        (["serve", "m", "--kv-memory", "5PiB"], "TiB"),
        (["serve", "m", "--kv-memory", "1e30"], "--kv-memory is 1000"),
        (["serve", "m", "--kv-memory", "nan"], "not a size"),
        (["serve", "m", "--format", "q3"], "q3"),
        (["serve", "m", "--speed", "9"], "--speed"),
        (["generate", "m", "Hi", "--max-tokens", "0"], "max-tokens"),
        (["generate", "m", "Hi", "--temperature", "3"], "--temperature"),
        (["generate", "m", ""], "PROMPT is empty"),
        (["generate", "m", " \n"], "PROMPT is empty"),
        (["generate", "m", "--raw", ""], "PROMPT is empty"),
        (["generate", "m"], "PROMPT is empty"),
        (["frobnicate"], "frobnicate"),
        (["replay", "m"], "--traffic"),
        (["replay", "m", "--traffic", __file__, "--newest", "0"], "--newest"),
        (["train-drafter", "m", "--traffic", __file__], "--output"),
        (["serve", "m", "--learn"], "--learn is given without --drafter"),
        (["serve", "m", "--learn", "--drafter", "d", "--workers", "2"], "--workers is 2"),
        (["serve", "m", "--drafter", "d", "--speculate", "off"], "--drafter is given and --speculate is off"),
        (["serve", "m", "--kv-disk-size", "1GiB"], "--kv-disk-size is given without --kv-disk;"),
        (["serve", "m", "--kv-disk", "d", "--kv-disk-size", "0"], "--kv-disk-size is 0; it must be from"),
        (["serve", "smollm2", "--kv-disk", "/dev/null/d"], "--kv-disk is '/dev/null/d'"),
        (["serve", "smollm2", "--kv-memory", "900TiB"], "--kv-memory is 900.0 TiB, but this machine"),
        (["serve", "m", "--name", ""], "--name is ''; it must be 1 to 256"),
        (["serve", "m", "--name", "a\tb"], "--name is 'a\\tb'; it must be"),
        (["serve", "smollm2", "--cors-origin", "*"], "--cors-origin: '*' is not an origin"),
        (["serve", "smollm2", "--cors-origin", "ftp://x"], "--cors-origin: 'ftp://x' is not an origin"),
        (
            ["serve", "smollm2", "--accept-workers", "127.0.0.1:0", "--secret-file", "/nowhere"],
            "--secret-file /nowhere: cannot be read (No such file",
        ),
        (
            ["worker", "smollm2", "--join", "127.0.0.1:1", "--secret-file", "/dev/null"],
            "--secret-file /dev/null: not a regular file",
        ),
        (["serve", "smollm2", "--api-key-file", "/nowhere"], "--api-key-file /nowhere: cannot be read"),
        (["serve", "smollm2", "--api-key-file", "/dev/null"], "--api-key-file /dev/null: not a regular file"),
        (["serve", "smollm2", "--otlp-endpoint", "x"], "--otlp-endpoint is 'x'"),
        (["generate", "smollm2", "Hi", "--top-p", "3"], "'--top-p': 3.0 is not in the range"),
        (["generate", "smollm2", "Hi", "--seed", "1" + "0" * 30], "--seed is 1000"),
        (["generate", "m", "Hi", "--threads", "-1"], "'--threads': -1 is not in the range 0<=x"),
        (["bench", "m", "--kv-memory", "1GiB"], "No such option"),
        (["generate", "m", "Hi", "--max-running", "1"], "No such option"),
        (["replay", "m", "--traffic", __file__, "--max-running", "1"], "No such option"),
        (["train-drafter", "m", "--traffic", __file__, "-o", "d", "--streams", "4097"], "--streams"),
        (
            ["serve", "m", "--workers", "0"],
            "--workers is 0; it must be from 1 to 256, or --accept-workers must be given",
        ),
        (["simulate", "--trace", __file__, "--workers", "1001"], "1<=x<=1000"),
        (["simulate", "--trace", __file__, "--prefill", "2", "--decode", "999"], "make 1001 workers; 1000"),
        (["synth", "tiny", "-o", "x", "--seed", str(2**64)], "--seed"),
        (["example-traffic", "-o", "x", "--seed", str(2**64)], "--seed"),
        (["simulate", "--trace", __file__, "--seed", "-1"], "--seed"),
        (["train-drafter", "m", "--traffic", __file__, "-o", "d", "--held-out", "1"], "--held-out"),
        (["simulate", "--trace", __file__, "--speedup", "nan"], "--speedup"),
        (["simulate", "--trace", __file__, "--speedup", "inf"], "--speedup"),
        (["simulate", "--trace", __file__, "--event-lag", "nan"], "--event-lag"),
        (["generate", "m", "Hi", "--temperature", "nan"], "--temperature"),
        (["serve", "m", "--kv-memory", "nan"], "--kv-memory"),
        (["serve", "m", "--kv-memory", "infGiB"], "--kv-memory"),
        (["example-traffic"], "--output"),
    ],
)
def test_a_wrong_command_line_is_one_clear_error(args: list[str], says: str) -> None:
    """Exit code 2, the option and the remedy, no traceback."""
    result = run(*args)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_signal_before_anything_is_served_ends_in_order(command: str, number: int, tmp_path: Path) -> None:
    """Promise: while a command that serves still imports or looks for its model, Ctrl-C or SIGTERM ends it
    with exit code 0 and without a traceback; a SIGHUP for `serve` is no end."""
    looking = (
        "import time, tenfold.checkpoint.locate as module\n"
        "module.locate = lambda model: (print('looking', flush=True), time.sleep(300))\n"
        "from tenfold.cli import main\nmain()"
    )
    joins = ["--join", "127.0.0.1:1", "--secret-file", "s"] if command == "worker" else []
    process = subprocess.Popen(
        [sys.executable, "-c", looking, command, "m", *joins],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "looking\n"
        if command == "serve":
            process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        output, error = process.communicate(timeout=120)
    assert (process.returncode, output, error) == (0, "", "")


def test_no_option_takes_nan_for_a_number() -> None:
    """Every option that takes a number with a fraction refuses NaN and infinity; click's own types do not."""
    commands: list[click.Command] = [main]
    options: list[click.Parameter] = []
    while commands:
        command = commands.pop()
        commands += command.commands.values() if isinstance(command, click.Group) else ()
        options += [param for param in command.params if isinstance(param.type, click.types.FloatParamType)]
    assert len(options) > 5
    assert [param.name for param in options if not isinstance(param.type, Number)] == []


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("512MiB", 512 << 20), ("1.5g", 3 << 29), ("900TiB", 900 << 40)]
)
def test_sizes_have_units(text: str, size: int, fake: dict[str, Any]) -> None:
    """Binary ones, however they are written."""
    assert run("generate", "m", "Hi", "--kv-memory", text).exit_code == 0
    assert fake["options"]["kv_memory_bytes"] == size


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model that answers in three pieces; what it was asked ends up in the dictionary."""
    asked: dict[str, Any] = {}

    class FakeLLM:
        def __init__(self, model: str, **options: Any) -> None:
            asked.update(model=model, options=options)

        def __enter__(self) -> FakeLLM:
            return self

        def __exit__(self, *error: object) -> None:
            asked["closed"] = True

        def stream(self, prompt: Any, params: SamplingParams) -> Iterator[Completion]:
            asked.update(prompt=prompt, params=params)
            check_room(7, params, asked.get("context", 8192))
            return self.answer()

        def answer(self) -> Iterator[Completion]:
            for count, text in enumerate(["one ", "two ", "three"], 1):
                yield Completion(
                    text=text,
                    token_ids=[count],
                    finish_reason="stop" if count == 3 else None,
                    logprobs=[],
                    prompt_tokens=7,
                    completion_tokens=count,
                    cached_tokens=0,
                )

        stream_chat = stream

    monkeypatch.setattr(tenfold.llm, "LLM", FakeLLM)
    return asked


def test_generate_prints_the_answer(fake: dict[str, Any]) -> None:
    """As it comes or at the end, the same text; the model is closed."""
    for option in ("--stream", "--no-stream"):
        result = run("generate", "m", "Hi", option)
        assert (result.exit_code, result.output) == (0, "one two three\n")
        assert fake["closed"]
    assert fake["prompt"] == [{"role": "user", "content": "Hi"}]


def test_generate_passes_on_every_option(fake: dict[str, Any]) -> None:
    """Sampling and engine options, by name."""
    line = (
        "generate m Hi --raw --max-tokens 9 --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1"
        " --repetition-penalty 1.5 --presence-penalty 0.2 --frequency-penalty 0.3 --seed 8 --stop a --stop b"
        " --ignore-eos --threads 3 --isa avx2 --format q8 --kv-format q8 --max-batch-tokens 64"
        " --speculate off"
    )
    assert run(*line.split()).exit_code == 0
    assert fake["prompt"] == "Hi"
    assert fake["params"] == SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=8,
        stop=("a", "b"),
        max_tokens=9,
        ignore_eos=True,
    )
    assert fake["options"] == {
        "threads": 3,
        "isa": "avx2",
        "format": "q8",
        "kv_format": "q8",
        "kv_memory_bytes": None,
        "max_batch_tokens": 64,
        "speculate": "off",
        "drafter": None,
    }


def test_generate_reads_standard_input_and_writes_json(fake: dict[str, Any]) -> None:
    """For scripts: one object with text, usage and times."""
    result = run("generate", "m", "--json", input="What is this?")
    found = json.loads(result.output)
    assert fake["prompt"] == [{"role": "user", "content": "What is this?"}]
    assert (found["text"], found["finish_reason"], found["completion_tokens"]) == ("one two three", "stop", 3)
    assert found["ttft_ms"] >= 0


def test_generate_ends_without_a_limit_given(fake: dict[str, Any]) -> None:
    """After 512 tokens, or where the context ends; a limit that is given and does not fit is refused."""
    assert run("generate", "m", "Hi").exit_code == 0
    assert fake["params"].max_tokens == 512
    fake["context"] = 500
    assert run("generate", "m", "Hi").exit_code == 0
    assert fake["params"].max_tokens is None
    result = run("generate", "m", "Hi", "--max-tokens", "494")
    assert (result.exit_code, result.output.count("the model's context is 500")) == (2, 1)


def test_a_reader_that_has_enough_is_no_error_and_a_full_disk_is_one(tmp_path: Path) -> None:
    """As with ``| head``: silence. Otherwise one line that says what could not be written."""
    config = tiny_config("llama")
    model = write_gguf_model(tmp_path / "m.gguf", config, random_weights(config))
    command = [sys.executable, "-c", "from tenfold.cli import main; main()", "inspect", str(model)]
    read, write = os.pipe()
    os.close(read)
    enough = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (enough.returncode, enough.stderr) == (1, "")
    with open("/dev/full", "w") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    said = "Error: cannot write to standard output: No space left on device\n"
    assert (failed.returncode, failed.stderr) == (1, said)


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    """One line with the remedy and no number of the system's, exit code 1."""
    (tmp_path / "m.gguf").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", str(tmp_path / "m.gguf"), "--port", str(port))
    assert result.exit_code == 1
    assert f"Error: port {port} of 127.0.0.1 is in use" in result.output
    assert "--port" in result.output
    assert "Errno" not in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("name", ["plain", "it's", 'a "b" $(c) \\d', "ü"])
def test_the_printed_curl_line_is_what_a_shell_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the model is called and wherever it listens, its words are curl, the URL, -d and the body."""
    (tmp_path / "m.gguf").touch()

    def serve(config: Any, path: str, load_text: Any, ready: Any, **more: Any) -> None:
        ready(SimpleNamespace(text=lambda: "the plan"), "http://[::1]:8000")

    monkeypatch.setattr("tenfold.server.serve.serve", serve)
    result = run("serve", str(tmp_path / "m.gguf"), "--name", name)
    (line,) = [line for line in result.output.splitlines() if line.startswith("  curl ")]
    *command, body = shlex.split(line)
    assert command == ["curl", "http://[::1]:8000/v1/chat/completions", "-d"]
    assert "'http://[" in line, "brackets are patterns for some shells"
    assert json.loads(body)["model"] == name


def test_an_address_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    """Another machine's: the same, with --host."""
    (tmp_path / "m.gguf").touch()
    result = run("serve", str(tmp_path / "m.gguf"), "--host", "192.0.2.1", "--port", "0")
    assert result.exit_code == 1
    assert "Error: cannot listen on 192.0.2.1:0: " in result.output
    assert "--host" in result.output and "Errno" not in result.output


def test_a_worker_must_know_whom_to_join_and_by_which_secret(tmp_path: Path) -> None:
    """Each missing or wrong part is said with what to do, before anything is loaded."""
    secret = tmp_path / "secret"
    secret.write_text("short")
    secret.chmod(0o600)
    (tmp_path / "m.gguf").touch()
    command = ["worker", str(tmp_path / "m.gguf")]
    for more, code, said in (
        ([], 2, "--join HOST:PORT"),
        (["--join", "10.0.0.1:7001"], 2, "--secret-file FILE"),
        (["--join", "10.0.0.1", "--secret-file", str(secret)], 2, "write it like 10.0.0.1:7001"),
        (["--join", "10.0.0.1:7001", "--secret-file", str(secret)], 2, "has 5 characters"),
        (["--join", "10.0.0.1:7001", "--secret-file", str(tmp_path / "none")], 2, "--secret-file /"),
        (["--join", "h:1", "--secret-file", str(secret), "--name", "a b"], 2, "--name is 'a b'"),
    ):
        result = run(*command, *more)
        assert result.exit_code == code and said in result.output, result.output


def test_a_transport_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--kv-transport where no pages go, without a secret, or with NIXL that is not installed: what to do is
    said before anything is loaded."""
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    secret.chmod(0o600)
    (tmp_path / "m.gguf").touch()
    monkeypatch.setattr("tenfold.kv.nixl.find_spec", lambda name: None)
    model = str(tmp_path / "m.gguf")
    cluster = ["worker", model, "--cluster", "dynamo", "--etcd", "http://127.0.0.1:1", "--namespace", "mine"]
    shared = ["--secret-file", str(secret)]
    for command, code, said in (
        (["worker", model, "--join", "h:1", *shared, "--kv-transport", "tcp"], 2, "needs --cluster"),
        ([*cluster, "--kv-transport", "tcp"], 2, "is for prefill and decode workers"),
        ([*cluster, "--role", "decode", "--kv-transport", "tcp"], 2, "--secret-file FILE"),
        ([*cluster, "--role", "decode", *shared, "--kv-transport", "nixl"], 1, "pip install --no-deps nixl"),
        (["cluster", "up", model, "--kv-transport", "nixl"], 2, "is for prefill and decode workers"),
    ):
        result = run(*command)
        assert result.exit_code == code and said in " ".join(result.output.split()), result.output


def test_help_names_every_kind_of_model() -> None:
    """Whatever `locate` takes can be found out without reading the documentation."""
    output = " ".join(run("--help").output.split())
    for kind in ("GGUF file", "config.json", "smollm2", "gemma3-270m", "owner/name", "goes before a name"):
        assert kind in output


def test_help_of_serve_names_every_endpoint() -> None:
    """What answers requests is found by who asks for help."""
    help = run("serve", "--help").output
    for path in (*ENDPOINTS, COUNT_TOKENS_PATH):
        assert path in help, path


@pytest.mark.parametrize(("streams", "running"), [(1, 64), (64, 64), (65, 65)])
def test_as_many_conversations_run_as_were_asked_for(streams: int, running: int) -> None:
    """--streams of a command is what the engine computes at once, also beyond what it takes by default."""
    assert config_of("m", {}, streams).max_running == running
