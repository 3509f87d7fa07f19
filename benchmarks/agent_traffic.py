"""Agent-like traffic of tau-bench's airline conversations, for `tenfold train-drafter` and `tenfold replay`.

    python benchmarks/agent_traffic.py --data TAU_BENCH_FOLDER -o agent.jsonl
    cat traffic.jsonl agent.jsonl > mixed.jsonl

Every turn of the agent is a request with all that was said before it; what the recorded agent (GPT-4o) said
is its `answer`. Tool calls stand as JSON in the agent's text, their results as the user's messages, for tools
are not supported yet. Requests whose conversation has grown beyond --most characters are left out. The data:
github.com/sierra-research/tau-bench (MIT licence), historical_trajectories/gpt-4o-airline.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tenfold.bench.script import run_script
from tenfold.bench.stdlib_traffic import FIRST_TIME, write_traffic


def agent_traffic(recorded: list[dict[str, Any]], conversations: int, most: int) -> Iterator[dict[str, Any]]:
    """Lines of traffic, conversation after conversation; every other one is sampled at temperature 0.7."""
    for number, each in enumerate(recorded[:conversations]):
        messages = [_message(message) for message in each["traj"]]
        for turn, message in enumerate(messages):
            before = messages[:turn]
            if message["role"] != "assistant" or sum(len(one["content"]) for one in before) > most:
                continue
            yield {
                "messages": before,
                "temperature": 0.7 if number % 2 else 0,
                "max_tokens": 256,
                "class": "agent",
                "conversation": f"tau-{each['task_id']}-{each['trial']}",
                "time": FIRST_TIME + 600 * number + 10 * turn,
                "answer": message["content"],
            }


def _message(message: dict[str, Any]) -> dict[str, str]:
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])})
        for call in message.get("tool_calls") or ()
    ]
    content = "\n".join(filter(None, [message.get("content"), *calls]))
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of {message.get('name')}:\n{content}"}
    return {"role": message["role"], "content": content}


def main() -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of tau-bench's recorded conversations"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--most", type=int, default=16_000, help="characters of a request's messages")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    args = parser.parse_args()
    recorded = json.loads((args.data / "gpt-4o-airline.json").read_text(encoding="utf-8"))
    count = write_traffic(args.output, agent_traffic(recorded, args.conversations, args.most), args.force)
    print(f"{args.output}: {count} requests")
    return 0


if __name__ == "__main__":
    run_script(main)
