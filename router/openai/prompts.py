"""Prompts of all endpoints: messages rendered and tokenized, text and ids checked.

Chats go through the segment renderer. Text prompts may name special tokens: they have no roles to guard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3.errors import RequestRejected
from router.openai.schemas import ChatMessage, TokenizeRequest
from router.text.folder import ModelFolder
from router.text.template import ChatOptions, Prompt


def render_chat(
    messages: Sequence[ChatMessage],
    folder: ModelFolder,
    *,
    effort: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Prompt:
    """Segments of a conversation. Raises RequestRejected."""
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    if continue_final_message:
        if add_generation_prompt:
            raise RequestRejected(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        if messages[-1].role != "assistant" or messages[-1].tool_calls:
            raise RequestRejected(
                "continue_final_message needs an assistant message without tool_calls at the end",
                param="continue_final_message",
            )
    thinking, effort = _thinking(effort, kwargs or {}, folder)
    options = ChatOptions(
        tools=tools,
        thinking=thinking,
        thinking_effort=effort,
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=continue_final_message,
    )
    try:
        return folder.template.render([m.model_dump(exclude_none=True) for m in messages], options)
    except RecursionError as error:
        raise RequestRejected(
            "tools or arguments of tool_calls are nested too deeply; keep them below 500 levels",
            param="messages",
        ) from error


def text_prompts(
    prompt: str | list[str] | list[int] | list[list[int]], folder: ModelFolder
) -> list[list[int]]:
    """Ids of every prompt. Special tokens written out in a text prompt are special tokens: it has no roles to guard."""
    if isinstance(prompt, str):
        return [encode_prompt(prompt, folder)]
    prompts: list[list[int]] = []
    if isinstance(prompt[0], int):
        prompts.append([token for token in prompt if isinstance(token, int)])
    else:
        for item in prompt:
            prompts.append(
                encode_prompt(item, folder) if isinstance(item, str) else list(item)  # type: ignore[arg-type]
            )
    for ids in prompts:
        check_ids(ids, folder.vocab_size, "prompt")
        forbidden = folder.chat_format.media_ids.intersection(ids)
        if forbidden:
            raise RequestRejected(
                f"prompt holds media tokens {sorted(forbidden)}: this server is text only",
                param="prompt",
            )
    return prompts


def encode_prompt(text: str, folder: ModelFolder) -> list[int]:
    """Ids of a text prompt; an empty one is the BOS token."""
    return folder.tokenizer.encode(text, allow_special=True) or [folder.chat_format.control.bos]


def tokenize_ids(body: TokenizeRequest, folder: ModelFolder) -> list[int]:
    """Ids for POST /tokenize. Raises RequestRejected."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestRejected("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        if body.prompt == "" and body.add_special_tokens is False:
            return []
        return encode_prompt(body.prompt, folder)
    prompt = render_chat(
        body.messages or [],
        folder,
        effort=body.reasoning_effort,
        kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        tools=body.tools or (),
    )
    return folder.tokenizer.encode_segments(prompt.segments)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises RequestRejected for the first id outside the vocabulary."""
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestRejected(
            f"{param}: token id {wrong} is outside 0..{vocab_size - 1}", param=param
        )


def _thinking(
    effort: str | None, kwargs: Mapping[str, Any], folder: ModelFolder
) -> tuple[bool, str | None]:
    """Whether the model thinks, and with which of its efforts."""
    unknown = kwargs.keys() - {"thinking"}
    if unknown:
        raise RequestRejected(
            f"chat_template_kwargs: unknown keys {sorted(unknown)}; this model's template knows 'thinking'",
            code="unsupported_parameter",
            param="chat_template_kwargs",
        )
    thinking = kwargs.get("thinking", True)
    if not isinstance(thinking, bool):
        raise RequestRejected(
            f"chat_template_kwargs.thinking={thinking!r}: must be true or false",
            code="invalid_type",
            param="chat_template_kwargs.thinking",
        )
    if effort is None:
        return thinking, folder.chat_format.default_effort if thinking else None
    if effort == "none":
        return False, None
    known = folder.chat_format.effort(effort)
    if known is None:
        choices = ", ".join(
            ("none", *folder.chat_format.effort_aliases, *folder.chat_format.efforts)
        )
        raise RequestRejected(
            f"reasoning_effort={effort[:40]!r}: must be one of {choices}", param="reasoning_effort"
        )
    return thinking, known


def _check_message(message: ChatMessage, path: str) -> None:
    if message.tools is not None:
        raise unsupported(f"{path}.tools", "tools are not served yet")
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            at = f"{path}.content[{index}]"
            if part.type != "text":
                raise unsupported(
                    f"{at}.type", f"part type {part.type[:40]!r}: this server is text only"
                )
            if part.text is None:
                raise RequestRejected(
                    f"{at}.text is required", code="missing_required_parameter", param=f"{at}.text"
                )
    if message.content is None and message.role != "assistant":
        raise RequestRejected(
            f"{path}.content is required for role {message.role}",
            code="missing_required_parameter",
            param=f"{path}.content",
        )
    if message.role != "assistant" and message.tool_calls:
        raise RequestRejected(
            f"{path}.tool_calls: only assistant messages have tool calls",
            param=f"{path}.tool_calls",
        )


def unsupported(param: str, why: str) -> RequestRejected:
    """A field this server knows and does not serve."""
    return RequestRejected(f"{param}: {why}", code="unsupported_parameter", param=param)
