"""From a body to a job: what a request's choices are computed from, and what reads their tokens."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from tenfold.config import PAGE_ROWS
from tenfold.limits import PromptTooLong, check_prompt
from tenfold.protocol import EnginePlan, Request
from tenfold.server.answer_stream import Sections
from tenfold.server.chat_setup import ChatSetup, new_answer
from tenfold.server.choices import Choice
from tenfold.server.endpoints import Endpoint, Opening
from tenfold.server.errors import invalid
from tenfold.server.requests import ApiRequest
from tenfold.server.shapes import Shape
from tenfold.server.text import Text
from tenfold.server.tool_formats.choose import write_out
from tenfold.server.tools import ToolUse


class Job(msgspec.Struct, frozen=True):
    """A checked request, ready to run."""

    parsed: ApiRequest
    choices: list[Choice]
    """In the order of their indices; at least one."""
    shape: Shape


class Preparer:
    """Prepares requests for one model. Safe to use from several threads."""

    def __init__(self, model: str, plan: EnginePlan, text: Text, chat: ChatSetup) -> None:
        self._model = model
        self._plan = plan
        self._text = text
        self._chat = chat

    def job(self, endpoint: Endpoint, body: bytes, id: str) -> Job:
        """The job of a body; ``id`` is the request's.

        Raises ApiError: a field is wrong, there are too many tokens or none, or the template refuses.
        """
        parsed = endpoint.parse(body, (self._model,), self._plan.vocab_size)
        sections = Sections()
        if parsed.messages is not None:
            ids, sections = self._conversation(parsed)
            prompts = [self._checked(parsed, ids, parsed.prompt_field)]
        else:
            prompts = [self._prompt(parsed, index) for index in range(len(parsed.prompts))]
        choices = [
            Choice(
                index=number * parsed.n + choice,
                # The client's id may be used twice; the engine's must not be.
                request=Request(
                    id=f"{id}-{secrets.token_hex(4)}",
                    prompt=prompt,
                    params=parsed.params_of(choice),
                    eos_token_ids=tuple(self._text.tokenizer.eos_token_ids),
                ),
                answer=new_answer(self._text, parsed.params.stop, sections),
                first=not choice,
            )
            for number, prompt in enumerate(prompts)
            for choice in range(parsed.n)
        ]
        echoes = [""] * len(choices)
        if parsed.echo:
            echoes = [self._echo(prompt) for prompt in parsed.prompts for _ in range(parsed.n)]
        opening = Opening(id, int(time.time()), self._model, self._text, parsed, echoes)
        return Job(parsed, choices, endpoint.shape(opening))

    def count(self, endpoint: Endpoint, body: bytes) -> int:
        """The tokens of a conversation's prompt, whether there is room to answer it or not. Raises
        ApiError."""
        return len(self._conversation(endpoint.parse(body, (self._model,), self._plan.vocab_size))[0])

    def _conversation(self, parsed: ApiRequest) -> tuple[tuple[int, ...], Sections]:
        messages = parsed.messages
        assert messages is not None
        tools = parsed.tools
        setup = self._chat.tools
        given: list[dict[str, Any]] = []
        if tools is not None and tools.choice != "none":
            self._check_tools(tools)
            given = tools.tools
        variables = {**parsed.template_variables, **self._thinking(parsed)}
        template = self._text.template
        if "reasoning_effort" in variables and template and "reasoning_effort" not in template.variables:
            effort = parsed.name("reasoning_effort")
            raise invalid(
                effort,
                f"{effort}: the chat template of {self._model} has no such setting",
                code="unsupported_value",
            )
        if setup.form is not None and not setup.native:
            messages, native = write_out(messages, given, setup.form), None
        else:
            native = given or None
        field = parsed.prompt_field
        try:
            prompt = self._text.chat_prompt(messages, self._plan.max_context, native, variables)
        except PromptTooLong as error:
            raise invalid(field, str(error), code="context_length_exceeded") from None
        except ValueError as error:
            raise invalid(field, str(error)) from None
        reasoning = self._chat.reasoning
        sections = Sections(
            tools=setup.form if given else None,
            tool_names=tools.names if tools is not None else frozenset(),
            one_call=tools is not None and not tools.parallel,
            reasoning=reasoning,
            opened=reasoning is not None and reasoning.opened_by(prompt.text),
        )
        return tuple(prompt.ids), sections

    def _thinking(self, parsed: ApiRequest) -> dict[str, Any]:
        """The template's variables for a model that is to think, or not to."""
        wanted, template = parsed.thinking, self._text.template
        if wanted is None or template is None:
            return {}
        if "enable_thinking" in template.variables:
            return {"enable_thinking": wanted}
        if wanted != (self._chat.reasoning is not None):
            why = "does not reason before it answers" if wanted else "reasons whatever it is told"
            raise invalid("thinking", f"thinking: {self._model} {why}", code="unsupported_value")
        return {}

    def _check_tools(self, tools: ToolUse) -> None:
        setup = self._chat.tools
        if setup.form is None:
            raise invalid(
                "tools", f"tools: {self._model} cannot call tools: {setup.why}", code="unsupported_value"
            )
        if tools.choice == "required":
            raise invalid(
                "tool_choice",
                "tool_choice: a call cannot be forced: that needs constraints, which are not supported yet; "
                'use "auto"',
                code="unsupported_value",
            )
        if tools.strict:
            raise invalid(
                "tools",
                "tools: strict needs constraints, which are not supported yet; leave it out",
                code="unsupported_value",
            )

    def _prompt(self, parsed: ApiRequest, index: int) -> tuple[int, ...]:
        prompt = parsed.prompts[index]
        field = "prompt" if len(parsed.prompts) == 1 else f"prompt[{index}]"
        if not isinstance(prompt, str):
            return self._checked(parsed, prompt, field)
        try:
            ids = self._text.encode_prompt(prompt, self._plan.max_context)
        except PromptTooLong as error:
            raise invalid(field, str(error), code="context_length_exceeded") from None
        except ValueError as error:
            raise invalid(field, str(error)) from None
        return self._checked(parsed, tuple(ids), field)

    def _checked(self, parsed: ApiRequest, ids: tuple[int, ...], field: str) -> tuple[int, ...]:
        plan = self._plan
        try:
            check_prompt(ids, 0, plan.vocab_size, plan.max_context, plan.kv_pages * PAGE_ROWS)
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
        stream = self._text.stream(())
        return stream.push(prompt) + stream.finish()
