"""Does Tenfold's tokenizer give llama.cpp's ids? Prints a table, and every kind of difference with examples.

    python benchmarks/tokenizer_identity.py --peer-python benchmarks/venvs/llamacpp/bin/python MODEL.gguf ...

Each model, and small synthetic vocabularies for pre-tokenizers that no given model has, are run over the same
generated strings, with and without special tokens in the text. ``--transformers`` compares with transformers'
reading of the same files too. It loads slowly and differs by its conversion of GGUF files: single digits are
not cut off (SmolLM2: white space before a digit), runs of over 31 spaces and literal U+2581 are merged
another way (Gemma 3), and a byte without a token does not part its neighbours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import unicodedata
from pathlib import Path
from typing import Any

from synthetic_vocabularies import byte_level, read_gguf_metadata, sentence_piece, write_gguf
from varied_strings import varied_strings

from tenfold.checkpoint.tokenizer import Tokenizer

_PEER = Path(__file__).with_name("llama_cpp_ids.py")
Difference = tuple[str, list[int], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files")
    parser.add_argument("--peer-python", required=True, help="a Python with llama-cpp-python")
    parser.add_argument("--count", type=int, default=10_000, help="strings")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()

    strings = varied_strings(options.count, options.seed)
    characters = sum(map(len, strings))
    print(f"{len(strings):,} strings, {characters:,} characters, seed {options.seed}")
    with tempfile.TemporaryDirectory() as folder:
        vocabularies: dict[str, tuple[Path, dict[str, Any]]] = {
            path.name: (path, read_gguf_metadata(path)) for path in options.models
        }
        for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
            vocabularies[f"synthetic {pre}"] = Path(folder, f"{pre}.gguf"), byte_level(pre)
        for prefix in (True, False):
            name = f"synthetic llama, space prefix {'on' if prefix else 'off'}"
            vocabularies[name] = Path(folder, f"spm-{prefix}.gguf"), sentence_piece(prefix)
        print(
            "vocabulary | tokens | differ: special parsed, not parsed, pieces | build s | encode s, peer's s"
        )
        for name, (path, metadata) in vocabularies.items():
            if not path.exists():
                write_gguf(metadata, path)
            peer = _ask_peer(options.peer_python, path, strings, Path(folder))
            start = time.perf_counter()
            tokenizer = Tokenizer.from_gguf_metadata(metadata)
            build_s = time.perf_counter() - start
            start = time.perf_counter()
            ours = [tokenizer.encode(text, add_special_tokens=True) for text in strings]
            encode_s = time.perf_counter() - start
            plain = [
                tokenizer.encode(text, add_special_tokens=False, parse_special=False) for text in strings
            ]
            parsed = _differences(strings, ours, peer["with_special"])
            unparsed = _differences(strings, plain, peer["without_special"])
            pieces = sum(
                tokenizer.token_bytes(token) != bytes.fromhex(piece)
                for token, piece in enumerate(peer["pieces"])
            )
            print(
                f"{name} | {tokenizer.vocab_size:,} | {len(parsed)}, {len(unparsed)}, {pieces}"
                f" | {build_s:.3f} | {encode_s:.2f}, {peer['encode_s']:.2f}"
            )
            if set(peer["end_tokens"]) != set(tokenizer.eos_token_ids):
                print(f"    ends: {sorted(tokenizer.eos_token_ids)}, peer's {peer['end_tokens']}")
            _explain(parsed + unparsed)
            if options.transformers and path in options.models:
                _compare_transformers(tokenizer, path, strings)


def _ask_peer(python: str, model: Path, strings: list[str], folder: Path) -> dict[str, Any]:
    asked, answered = folder / "strings.json", folder / "ids.json"
    asked.write_text(json.dumps(strings), encoding="utf-8")
    command = [python, str(_PEER), str(model), str(asked), str(answered)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return result


def _differences(strings: list[str], ours: list[list[int]], theirs: list[list[int]]) -> list[Difference]:
    together = zip(strings, ours, theirs, strict=True)
    return [(text, mine, other) for text, mine, other in together if mine != other]


def _explain(differences: list[Difference]) -> None:
    kinds: dict[str, list[Difference]] = {}
    for difference in differences:
        text = difference[0]
        if "</s>" in text:
            kind = "has </s>"
        elif any(unicodedata.category(char) == "Cn" for char in text):
            kind = f"has a character that Unicode {unicodedata.unidata_version} does not know"
        else:
            kind = "other"
        kinds.setdefault(kind, []).append(difference)
    for kind, members in kinds.items():
        text, mine, theirs = min(members, key=lambda difference: len(difference[0]))
        print(f"    {len(members)} {kind}; {text[:60]!a}: {mine[:12]}, peer's {theirs[:12]}")


def _compare_transformers(tokenizer: Tokenizer, path: Path, strings: list[str]) -> None:
    from transformers import AutoTokenizer

    start = time.perf_counter()
    peer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    load_s = time.perf_counter() - start
    ours = [tokenizer.encode(text, add_special_tokens=False) for text in strings]
    found = _differences(strings, ours, [peer.encode(text, add_special_tokens=False) for text in strings])
    print(f"    transformers: {len(found)} differ, loaded in {load_s:.1f} s")
    _explain(found)


if __name__ == "__main__":
    main()
