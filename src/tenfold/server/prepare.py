"""From a body to a job: what a request's choices are computed from, and what reads their tokens."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from tenfold.limits import PromptTooLong, check_prompt
from tenfold.protocol import Request
from tenfold.server.answer_stream import Sections
from tenfold.server.chat_setup import ChatSetup, new_answer
from tenfold.server.choices import Choice
from tenfold.server.embeddings import MAX_INPUT_TOKENS, EmbeddingAnswer, EmbeddingRequest, pooling_of
from tenfold.server.endpoints import COUNT_TOKENS, Endpoint, Opening
from tenfold.server.errors import ApiError, invalid
from tenfold.server.fields import Fields
from tenfold.server.requests import ApiRequest
from tenfold.server.shapes import Shape
from tenfold.server.text import ChatPrompt, Text
from tenfold.server.tool_constraint import chat_constraint
from tenfold.server.tool_formats.choose import write_out
from tenfold.server.tools import ToolUse


class Job(msgspec.Struct, frozen=True):
    """A checked request, ready to run."""

    parsed: ApiRequest
    choices: list[Choice]
    """In the order of their indices; at least one."""
    shape: Shape


class Room(Protocol):
    """What of a plan decides which prompts there is room for."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def state_width(self) -> int: ...


class Preparer:
    """Prepares requests for one model. Safe to use from several threads."""

    def __init__(
        self,
        model: str,
        plan: Room,
        text: Text,
        chat: ChatSetup,
        kv_tokens: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``kv_tokens``: how many tokens the KV memory holds, of the largest worker that there is now; None:
        not known, and every prompt that fits the context may come."""
        self.model = model
        self.plan = plan
        self.text = text
        self._chat = chat
        self._kv_tokens = kv_tokens

    def job(self, endpoint: Endpoint, body: bytes | Fields, id: str) -> Job:
        """The job of a body; ``id`` is the request's.

        Raises ApiError: a field is wrong, there are too many tokens or none, or the template refuses.
        """
        parsed = endpoint.parse(body, (self.model,), self.plan.vocab_size)
        if isinstance(parsed, EmbeddingRequest):
            opening = Opening(id, int(time.time()), self.model, self.text, parsed, [])
            return Job(parsed, self._inputs(parsed, id), endpoint.shape(opening))
        sections = Sections()
        if parsed.messages is not None:
            prompt = self.prompt_of(parsed)
            sections = self.sections(parsed.tools, prompt.text)
            prompts = [self._checked(parsed, tuple(prompt.ids), parsed.prompt_field)]
            parsed = self.constrained(parsed, sections)
        else:
            prompts = [self._prompt(parsed, index) for index in range(len(parsed.prompts))]
        choices = [
            Choice(
                index=number * parsed.n + choice,
                # The client's id may be used twice; the engine's must not be.
                request=Request(
                    id=f"{id}-{secrets.token_hex(4)}",
                    prompt=ids,
                    params=parsed.params_of(choice),
                    eos_token_ids=tuple(self.text.tokenizer.eos_token_ids),
                ),
                answer=new_answer(self.text, parsed.params.stop, sections),
                first=not choice,
            )
            for number, ids in enumerate(prompts)
            for choice in range(parsed.n)
        ]
        echoes = [""] * len(choices)
        if parsed.echo:
            echoes = [self._echo(prompt) for prompt in parsed.prompts for _ in range(parsed.n)]
        opening = Opening(id, int(time.time()), self.model, self.text, parsed, echoes)
        return Job(parsed, choices, endpoint.shape(opening))

    def _inputs(self, parsed: EmbeddingRequest, id: str) -> list[Choice]:
        """The inputs of a request for embeddings. Raises ApiError."""
        parsed.check_width(self.plan.state_width)
        pooling = pooling_of(parsed, self.text.pooling)
        prompts = []
        for index in range(len(parsed.prompts)):
            try:
                prompts.append(self._prompt(parsed, index))
            except ApiError as error:
                raise parsed.blamed(error, index) from None
        total = sum(map(len, prompts))
        if total > MAX_INPUT_TOKENS:
            raise invalid(
                "input",
                f"input has {total} tokens in all; a request can have up to {MAX_INPUT_TOKENS}. Send it in "
                "several requests",
            )
        return [
            Choice(
                index=index,
                request=Request(
                    id=f"{id}-{secrets.token_hex(4)}", prompt=prompt, params=parsed.params, pooling=pooling
                ),
                answer=EmbeddingAnswer(parsed.encoding),
                first=True,
            )
            for index, prompt in enumerate(prompts)
        ]

    def count(self, body: bytes | Fields) -> bytes:
        """What answers a body of ``/v1/messages/count_tokens``: the tokens of its prompt, whether there is
        room to answer it or not. Raises ApiError."""
        parsed = COUNT_TOKENS.parse(body, (self.model,), self.plan.vocab_size)
        return msgspec.json.encode({"input_tokens": len(self.prompt_of(parsed).ids)})

    def prompt_of(self, parsed: ApiRequest) -> ChatPrompt:
        """The prompt of a chat, by the model's template. Raises ApiError."""
        assert parsed.messages is not None
        variables = {**parsed.template_variables, **self._thinking(parsed)}
        try:
            return self.conversation(parsed.messages, parsed.tools, variables)
        except ApiError as error:
            raise parsed.in_own_words(error) from None

    def _thinking(self, parsed: ApiRequest) -> dict[str, Any]:
        """The template's variables for a model that is to think, or not to."""
        wanted, template = parsed.thinking, self.text.template
        if wanted is None or template is None:
            return {}
        if "enable_thinking" in template.variables:
            return {"enable_thinking": wanted}
        if wanted != (self._chat.reasoning is not None):
            why = "does not reason before it answers" if wanted else "reasons whatever it is told"
            raise invalid("thinking", f"thinking: {self.model} {why}", code="unsupported_value")
        return {}

    def conversation(
        self,
        messages: list[dict[str, Any]],
        tools: ToolUse | None,
        variables: dict[str, Any],
        add_generation_prompt: bool = True,
    ) -> ChatPrompt:
        """A conversation as the model takes it. Raises ApiError."""
        setup = self._chat.tools
        given: list[dict[str, Any]] | None = None
        if tools is not None and tools.choice != "none":
            self._check_tools(tools)
            given = tools.tools
        template = self.text.template
        if "reasoning_effort" in variables and template and "reasoning_effort" not in template.variables:
            raise invalid(
                "reasoning_effort",
                f"reasoning_effort: the chat template of {self.model} has no such setting",
                code="unsupported_value",
            )
        if setup.form is not None and not setup.native:
            if given or any("tool_calls" in message for message in messages):
                messages = write_out(messages, given or [], setup.form)
            given = None
        try:
            return self.text.chat_prompt(
                messages, self.plan.max_context, given, variables, add_generation_prompt
            )
        except PromptTooLong as error:
            raise invalid("messages", str(error), code="context_length_exceeded") from None
        except ValueError as error:
            raise invalid("messages", str(error)) from None

    def sections(self, tools: ToolUse | None, prompt: str) -> Sections:
        """What the answer to this prompt may have beside text."""
        reasoning = self._chat.reasoning
        asked = tools is not None and tools.choice != "none"
        return Sections(
            tools=self._chat.tools.form if asked else None,
            tool_names=tools.names if tools is not None else frozenset(),
            one_call=tools is not None and not tools.parallel,
            reasoning=reasoning,
            opened=reasoning is not None and reasoning.opened_by(prompt),
        )

    def constrained(self, parsed: ApiRequest, sections: Sections) -> ApiRequest:
        """The request with all that constrains its answer: its format, and the tools that must be called.
        Raises ApiError."""
        params = parsed.params
        try:
            constraint = chat_constraint(params.constraint, parsed.tools, sections, self.text.special_tokens)
        except ApiError as error:
            raise parsed.in_own_words(error) from None
        if constraint is None or constraint is params.constraint:
            return parsed
        if params.ignore_eos:
            raise invalid(
                "ignore_eos", f"ignore_eos is true, but with {constraint.field} the answer has an end"
            )
        return replace(parsed, params=replace(params, constraint=constraint))

    def _check_tools(self, tools: ToolUse) -> None:
        setup = self._chat.tools
        if setup.form is None:
            raise invalid(
                "tools", f"tools: {self.model} cannot call tools: {setup.why}", code="unsupported_value"
            )

    def _prompt(self, parsed: ApiRequest, index: int) -> tuple[int, ...]:
        prompt = parsed.prompts[index]
        field = "prompt" if len(parsed.prompts) == 1 else f"prompt[{index}]"
        if not isinstance(prompt, str):
            return self._checked(parsed, prompt, field)
        try:
            ids = self.text.encode_prompt(prompt, self.plan.max_context)
        except PromptTooLong as error:
            raise invalid(field, str(error), code="context_length_exceeded") from None
        except ValueError as error:
            raise invalid(field, str(error)) from None
        return self._checked(parsed, tuple(ids), field)

    def _checked(self, parsed: ApiRequest, ids: tuple[int, ...], field: str) -> tuple[int, ...]:
        plan = self.plan
        try:
            kv_tokens = self._kv_tokens() or plan.max_context
            check_prompt(ids, 0, plan.vocab_size, plan.max_context, kv_tokens, generates=parsed.generates)
            wanted = parsed.params.max_tokens or 0
            if len(ids) + wanted > plan.max_context:
                raise PromptTooLong(
                    "prompt",
                    f"has {len(ids)} tokens and {wanted} were asked for; the model's context is "
                    f"{plan.max_context}. Shorten the prompt, or lower {parsed.name('max_tokens')}",
                )
        except PromptTooLong as error:
            raise invalid(field, str(error), code="context_length_exceeded") from None
        except ValueError as error:
            raise invalid(field, str(error)) from None
        return ids

    def _echo(self, prompt: str | tuple[int, ...]) -> str:
        if isinstance(prompt, str):
            return prompt
        stream = self.text.stream(())
        return stream.push(prompt) + stream.finish()
