"""Traffic for drafters: prompts of two kinds, answered by the target itself, kept in a file.

    python benchmarks/suffix_traffic.py --data TAU_BENCH_FOLDER --write traffic.jsonl

`agent`: turns of airline agents (tau-bench, trial 0, one conversation a task, shuffled), the system prompt
cut to 600 tokens and the window slid to the newest 900 tokens whenever it passes 1,500. `narrow`: a docstring
for, and an explanation of, functions of Python's standard library without their docstrings, shuffled. Answers
of at most 128 tokens. Each line is an answer: class, conversation, temperature, prompt and output as token
ids.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tenfold import LLM
from tenfold.bench.script import run_script
from tenfold.checkpoint.locate import locate
from tenfold.protocol import SamplingParams
from tenfold.server.text import Text, load_text

SYSTEM_TOKENS, WINDOW_LIMIT, WINDOW_KEPT, ANSWER_TOKENS = 600, 1500, 900, 128
TASKS = (
    "Write a short docstring for this Python function.\n\n```python\n{}\n```",
    "Explain what this Python function does.\n\n```python\n{}\n```",
)


def agent_prompts(text: Text, path: Path, conversations: int, turns: int) -> Iterator[tuple[int, list[int]]]:
    """(conversation, prompt) of the first assistant turns after the opening of each conversation."""
    recorded = [each for each in json.loads(path.read_text()) if each["trial"] == 0]
    random.Random(7).shuffle(recorded)
    for number, each in enumerate(recorded[:conversations]):
        system, *rest = [_message(message) for message in each["traj"]]
        tokens = text.tokenizer.encode(system["content"], add_special_tokens=False, parse_special=False)
        kept = b"".join(text.tokenizer.token_bytes(token) for token in tokens[:SYSTEM_TOKENS])
        system["content"] = kept.decode(errors="ignore")
        window: list[dict[str, str]] = []
        found = 0
        for message in rest:
            if message["role"] == "assistant" and found < turns and len(window) > 1:
                yield number, text.encode_chat([system, *window])
                found += 1
            window.append(message)
            if len(text.encode_chat([system, *window])) > WINDOW_LIMIT:
                while len(window) > 1 and len(text.encode_chat(window)) > WINDOW_KEPT:
                    window.pop(0)


def narrow_prompts(text: Text, functions: int) -> Iterator[tuple[int, list[int]]]:
    """(function, prompt): two tasks for each function."""
    sources = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text(errors="ignore"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and 8 <= (node.end_lineno or 0) - node.lineno + 1 <= 60:
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:] or [ast.Pass()]
                sources.append(ast.unparse(node))
    sources = sorted(set(sources))
    random.Random(7).shuffle(sources)
    for number, source in enumerate(sources[:functions]):
        for task in TASKS:
            yield number, text.encode_chat([{"role": "user", "content": task.format(source)}])


def _message(message: dict[str, Any]) -> dict[str, str]:
    content = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        content += json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of {message.get('name')}: {content}"}
    return {"role": message["role"], "content": content}


def main() -> int:
    """Generates and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of tau-bench's recorded conversations"
    )
    parser.add_argument("--write", type=Path, required=True, help="the file of answers; longer by each run")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--functions", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    text = load_text(str(locate(args.model)))
    classes = {
        "agent": agent_prompts(text, args.data / "gpt-4o-airline.json", args.conversations, args.turns),
        "narrow": narrow_prompts(text, args.functions),
    }
    params = SamplingParams(temperature=args.temperature, max_tokens=ANSWER_TOKENS, seed=7)
    with LLM(args.model, threads=1) as llm, args.write.open("a") as file:
        for name, prompts in classes.items():
            waiting = list(prompts)
            for first in range(0, len(waiting), 8):
                some = waiting[first : first + 8]
                answers = llm.generate([prompt for _, prompt in some], params)
                for (number, prompt), answer in zip(some, answers, strict=True):
                    output = list(answer.token_ids)
                    if answer.finish_reason == "stop":
                        output.append(text.tokenizer.eos_token_ids[0])
                    line = {"class": name, "conversation": number, "temperature": args.temperature}
                    file.write(json.dumps({**line, "prompt": prompt, "output": output}) + "\n")
                file.flush()
    return 0


if __name__ == "__main__":
    run_script(main)
