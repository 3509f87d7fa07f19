"""llama.cpp's side of tokenizer_identity.py: reads strings, writes what llama.cpp makes of them.

Runs under any Python that has llama-cpp-python; imports nothing of Tenfold.

    python llama_cpp_ids.py MODEL.gguf STRINGS.json OUT.json
"""

import json
import sys
import time

import llama_cpp


def main(model_path: str, strings_path: str, out_path: str) -> None:
    start = time.perf_counter()
    model = llama_cpp.Llama(model_path, vocab_only=True, verbose=False)
    load_s = time.perf_counter() - start
    with open(strings_path, encoding="utf-8") as file:
        strings = json.load(file)
    data = [text.encode("utf-8") for text in strings]
    start = time.perf_counter()
    with_special = [model.tokenize(text, add_bos=True, special=True) for text in data]
    encode_s = time.perf_counter() - start
    vocab = llama_cpp.llama_model_get_vocab(model._model.model)
    buffer = (llama_cpp.ctypes.c_char * 1024)()
    count = llama_cpp.llama_vocab_n_tokens(vocab)
    pieces = []
    for token in range(count):
        size = llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
        pieces.append(buffer.raw[:size].hex())
    result = {
        "version": llama_cpp.__version__,
        "load_s": load_s,
        "encode_s": encode_s,
        "with_special": with_special,
        "without_special": [model.tokenize(text, add_bos=False, special=False) for text in data],
        "pieces": pieces,
        "end_tokens": [token for token in range(count) if llama_cpp.llama_vocab_is_eog(vocab, token)],
    }
    with open(out_path, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
