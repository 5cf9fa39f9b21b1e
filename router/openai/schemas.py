"""Bodies of the requests, field by field; the only pydantic in the project.

Strict types: no strings for numbers, no booleans for numbers, no NaN. `null` means not given. What the fields mean
together (limits of the context, unsupported combinations) is judged in `params.py`. Unknown fields are kept apart for
counting or refusing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from k3.types import SAMPLING_RANGES

INT64 = 1 << 63
MAX_TOKENS = 1 << 31


def _in_range(name: str) -> Any:
    """The constraint of a sampling parameter, the one engines judge by too."""
    least, most = SAMPLING_RANGES[name]
    return Field(ge=least, le=most)


StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, _in_range("logit_bias")]
JsonObject = dict[str, Any]


class Body(BaseModel):
    """Rules all bodies share."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    """What a stream carries besides tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """Fields of both generation endpoints."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=MAX_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=MAX_TOKENS)] | None = None
    temperature: Annotated[float, _in_range("temperature")] | None = None
    top_p: Annotated[float, _in_range("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, _in_range("min_p")] | None = None
    presence_penalty: Annotated[float, _in_range("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _in_range("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, _in_range("repetition_penalty")] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    timeout_ms: Annotated[int, Field(ge=1, lt=MAX_TOKENS)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    metadata: JsonObject | None = None
    cache_salt: Annotated[str, Field(max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    service_tier: str | None = None
    store: bool | None = None
    return_spec_stats: bool | None = None
    draft_tokens: Annotated[int, Field(ge=0, lt=MAX_TOKENS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None


class TextPart(Body):
    """A part of a message's content; only text is served."""

    type: str
    text: str | None = None


class FunctionCall(Body):
    """Name and arguments of a call in the conversation."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    arguments: str | JsonObject | None = None


class ToolCall(Body):
    """A call the assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[JsonObject] | None = None


class ChatRequest(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    audio: JsonObject | None = None
    modalities: list[str] | None = None
    prediction: JsonObject | None = None
    web_search_options: JsonObject | None = None
    functions: list[JsonObject] | None = None
    function_call: str | JsonObject | None = None


class CompletionRequest(GenerationBody):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=128)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=128)
        ]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages as the chat endpoint would render them."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[JsonObject] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error of every endpoint."""

    error: ErrorObject
