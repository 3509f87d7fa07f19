"""A model in this process: ``LLM("smollm2").generate("Once upon a time")``."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tenfold.config import ServeConfig
from tenfold.constraints.checker import Checker, CheckFailed
from tenfold.llm_input import Prompt, as_messages, as_params, as_pooling, as_prompt, as_prompts, check_room
from tenfold.protocol import FinishReason, PoolingKind, Request, SamplingParams, TokenLogprob
from tenfold.server.output import Output, Piece
from tenfold.server.text import Text, load_text
from tenfold.shared_engine import GenerationError, Inbox, SharedEngine
from tenfold.worker.loop import EngineLike

__all__ = ["LLM", "Completion", "GenerationError", "Prompt"]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or in `LLM.stream` a piece of one."""

    text: str
    token_ids: list[int]
    """The tokens behind the text; one that merely ended the answer is not among them."""
    finish_reason: FinishReason | None
    """None while more is to come."""
    logprobs: list[TokenLogprob]
    """One for each of ``token_ids`` if they were asked for, else empty."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens generated so far, the one that ended the answer included."""
    cached_tokens: int
    """Prompt tokens that were in the cache: left there by an earlier request, or by another prompt of the
    same call."""


class LLM:
    """One model, its engine and its text side. Close it, or use ``with``.

    It may be used from several threads at once: calls share steps, and no call changes another's answer. A
    forked child needs an LLM of its own.

    ``model`` is a name, a folder or a GGUF file; the other arguments are those of `ServeConfig`. Several
    prompts given at once are computed together. Raises ValueError for a model or setting that cannot be used.
    """

    def __init__(
        self,
        model: str,
        *,
        threads: int = 0,
        isa: str = "auto",
        format: str = "auto",
        kv_format: str = "auto",
        kv_memory_bytes: int | None = None,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        speculate: str = "auto",
        drafter: str | None = None,
    ) -> None:
        from tenfold.checkpoint.locate import locate
        from tenfold.worker.build import build_engine

        config = ServeConfig(
            model=model,
            threads=threads,
            isa=isa,
            format=format,
            kv_format=kv_format,
            kv_memory_bytes=kv_memory_bytes,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            speculate=speculate,
            drafter=drafter,
        )
        path = str(locate(model))
        engine, info = build_engine(config.engine_settings(path))
        self._setup(engine, load_text(path), info.max_context)
        self.info = info
        """What the model was compiled to: a `backends.base.ProgramInfo`."""

    def _setup(self, engine: EngineLike, text: Text, max_context: int) -> None:
        self._shared = SharedEngine(engine)
        self._text = text
        # This process may not die of what a constraint does to its compiler.
        self._checker = Checker(lambda: text.tokenizer, text.tokenizer.vocab_size)
        self._max_context = max_context
        self._ids = itertools.count(1)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Completes each prompt, in the order given; a single one gives a list of one.

        Without a seed every prompt gets its own random one. Raises TypeError or ValueError for a prompt or
        parameter that cannot be served, or for a prompt that with ``max_tokens`` would go beyond the model's
        context (then nothing was generated), GenerationError when the engine fails.
        """
        many = [self._encode(prompt) for prompt in as_prompts(prompts)]
        return self._complete(many, self._checked(many, params))

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """The assistant's next message for one conversation, or for each of several; else as `generate`."""
        several = (
            isinstance(messages, list | tuple) and len(messages) > 0 and isinstance(messages[0], list | tuple)
        )
        conversations = (
            [as_messages(f"messages[{index}]", each) for index, each in enumerate(messages)]
            if several
            else [as_messages("messages", messages)]
        )
        many = [self._text.encode_chat(each) for each in conversations]
        return self._complete(many, self._checked(many, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Completion]:
        """Completes one prompt piece by piece; the last piece has a finish reason. Errors as `generate`."""
        tokens = self._encode(as_prompt("prompt", prompt))
        return self._stream(tokens, self._checked([tokens], params))

    def stream_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[Completion]:
        """`stream` for a conversation."""
        tokens = self._text.encode_chat(as_messages("messages", messages))
        return self._stream(tokens, self._checked([tokens], params))

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: PoolingKind | None = None, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """A vector for each text (or list of token ids), in the order given: float32, ``[texts, width]``.

        ``pooling``: the ``mean`` of all tokens' final hidden states, or the ``last`` token's; None: what the
        model says, and where it says nothing the mean. ``normalize``: to length 1. Raises TypeError or
        ValueError for what cannot be embedded, GenerationError when the engine fails.
        """
        many = [self._encode(text) for text in as_prompts(texts, "texts")]
        asked = as_pooling(pooling, normalize, self._text.pooling)
        requests = {
            id: Request(id=id, prompt=tuple(prompt), params=SamplingParams(seed=0), pooling=asked)
            for prompt, id in zip(many, map(str, self._ids), strict=False)
        }
        vectors: dict[str, npt.NDArray[np.float32]] = {}
        inbox = Inbox()
        try:
            if requests:
                self._shared.add(requests.values(), inbox)
            while len(vectors) < len(requests):
                chunk = self._shared.next(inbox)
                if chunk.finish == "error":
                    raise GenerationError(chunk.error or "the engine gave no reason")
                if chunk.embedding is not None:
                    vectors[chunk.id] = np.frombuffer(chunk.embedding, "<f4")
        finally:
            self._shared.leave(requests.keys() - vectors.keys())
        return np.stack([vectors[id] for id in requests]) if requests else np.zeros((0, 0), np.float32)

    def close(self) -> None:
        """Frees the model. Nothing can be generated afterwards; streams and calls under way fail."""
        self._shared.close()
        self._checker.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        return self._text.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)

    def _checked(self, prompts: list[list[int]], params: SamplingParams | None) -> SamplingParams:
        checked = as_params(params)
        if checked.constraint is not None:
            try:
                self._checker.check(checked.constraint)
            except CheckFailed as error:
                raise GenerationError(f"the constraint was not checked: {error}") from None
        for prompt in prompts:
            check_room(len(prompt), checked, self._max_context)
        return checked

    def _complete(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
        whole = [Piece() for _ in prompts]
        outputs: dict[int, Output] = {}
        for index, piece, output in self._run(prompts, params):
            whole[index].text += piece.text
            whole[index].tokens += piece.tokens
            whole[index].logprobs += piece.logprobs
            outputs[index] = output
        return [
            _completion(whole[index], outputs[index], len(prompt)) for index, prompt in enumerate(prompts)
        ]

    def _stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Completion]:
        for _, piece, output in self._run([prompt], params):
            if piece.tokens or output.finish is not None:
                yield _completion(piece, output, len(prompt))

    def _run(self, prompts: list[list[int]], params: SamplingParams) -> Iterator[tuple[int, Piece, Output]]:
        """Runs all prompts to their end; if the caller stops before, what is left is aborted."""
        shared = self._shared
        open_: dict[str, tuple[int, Output]] = {}
        requests = []
        for index, prompt in enumerate(prompts):
            seed = secrets.randbits(63) if params.seed is None else params.seed
            request = Request(
                id=str(next(self._ids)),
                prompt=tuple(prompt),
                params=msgspec.structs.replace(params, seed=seed),
                eos_token_ids=tuple(self._text.tokenizer.eos_token_ids),
            )
            requests.append(request)
            open_[request.id] = index, Output(self._text.stream(params.stop))
        inbox = Inbox()
        try:
            shared.add(requests, inbox)
            while open_:
                chunk = shared.next(inbox)
                if chunk.id not in open_:  # it hit a stop string, and this was under way already
                    continue
                index, output = open_[chunk.id]
                piece = output.push([chunk])
                if output.finish is not None:
                    del open_[chunk.id]
                    # After a stop string the engine is still at work.
                    shared.leave([chunk.id], output.completion_tokens if output.finish == "stop" else None)
                if output.finish == "error":
                    raise GenerationError(output.error or "the engine gave no reason")
                yield index, piece, output
        finally:
            shared.leave(open_)


def _completion(piece: Piece, output: Output, prompt_tokens: int) -> Completion:
    return Completion(
        text=piece.text,
        token_ids=piece.tokens,
        finish_reason=output.finish,
        logprobs=piece.logprobs,
        prompt_tokens=prompt_tokens,
        completion_tokens=output.completion_tokens,
        cached_tokens=output.cached_tokens or 0,
    )
