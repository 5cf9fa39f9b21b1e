"""From a checked body to a `Job`: defaults filled in, combinations judged, prompts made by `prompts.py`.

Everything a client can get wrong beyond types is refused here, before admission. What the system does not serve yet is
refused when it is not at its neutral value, never ignored.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3.config.router_sections import HttpConfig
from k3.errors import RequestRejected
from k3.types import NO_BIAS, LogprobParams, SamplingParams
from router.openai.prompts import check_ids, render_chat, text_prompts, unsupported
from router.openai.schemas import ChatRequest, CompletionRequest, GenerationBody
from router.text.folder import ModelFolder
from router.text.reasoning import Channel
from router.text.stop import StopAutomaton

MAX_SESSION_CHARS = 256
TEXT_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest prompt + output, and longest output per prompt length that some instance can hold."""

    max_model_len: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request for generation, ready to run. Prompts and max_tokens go together.

    start: the channel generation begins in (chat), None without channels. timeout_s: this request's deadline.
    """

    model: str
    is_chat: bool
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    n: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    automaton: StopAutomaton | None
    include_stop: bool
    logprobs: LogprobParams
    salt: bytes
    session: str
    start: Channel | None
    skip_special_tokens: bool
    return_token_ids: bool
    spec_stats: str
    draft_tokens: int | None
    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    timeout_s: float

    @property
    def n_choices(self) -> int:
        """Choices of the answer: prompts times samples."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request says beside its body.

    principal: whose key it came with, empty without keys. session: what the client says belongs together, or empty.
    timeout_s: this request's deadline.
    """

    principal: bytes
    session: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """What does not change between requests."""

    http: HttpConfig
    folder: ModelFolder


def chat_job(body: ChatRequest, settings: Settings, limits: Limits, caller: Caller) -> Job:
    """Job of a chat request. Raises RequestRejected. Renders and tokenizes: may take long for long prompts."""
    _refuse_chat_extras(body)
    prompt = render_chat(
        body.messages,
        settings.folder,
        effort=body.reasoning_effort,
        kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    if body.top_logprobs and not body.logprobs:
        raise RequestRejected(
            f"top_logprobs={body.top_logprobs} needs logprobs=true", param="top_logprobs"
        )
    asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, name = body.max_tokens, "max_tokens"
    elif body.max_tokens not in (None, asked):
        raise RequestRejected(
            f"max_tokens={body.max_tokens} and max_completion_tokens={asked} differ; give one of them",
            param="max_tokens",
        )
    return _job(
        body,
        settings,
        limits,
        prompts=[settings.folder.tokenizer.encode_segments(prompt.segments)],
        asked=asked,
        asked_name=name,
        default=settings.http.default_max_tokens or None,
        logprobs=LogprobParams(bool(body.logprobs), body.top_logprobs or 0),
        start=prompt.start,
        is_chat=True,
        caller=caller,
    )


def completion_job(
    body: CompletionRequest, settings: Settings, limits: Limits, caller: Caller
) -> Job:
    """Job of a text request. Raises RequestRejected."""
    _refuse_text_extras(body)
    return _job(
        body,
        settings,
        limits,
        prompts=text_prompts(body.prompt, settings.folder),
        asked=body.max_tokens,
        asked_name="max_tokens",
        default=TEXT_DEFAULT_MAX_TOKENS,
        logprobs=LogprobParams(body.logprobs is not None, body.logprobs or 0),
        start=None,
        is_chat=False,
        caller=caller,
    )


def timeout_s(body_ms: int | None, header: str | None, limit_s: float) -> float:
    """The deadline of a request: header and body lower the server's limit, never raise it."""
    limits = [limit_s]
    if body_ms is not None:
        limits.append(body_ms / 1000)
    if header is not None:
        if not header.isascii() or not header.isdigit() or not 0 < int(header) < 1 << 31:
            raise RequestRejected(
                f"X-Request-Timeout-Ms: {header[:40]!r} is not a positive number of milliseconds",
                param="X-Request-Timeout-Ms",
            )
        limits.append(int(header) / 1000)
    return min(limits)


def session_of(headers: Mapping[str, str]) -> str:
    """What the client says belongs together; at most MAX_SESSION_CHARS of it."""
    named = headers.get("x-session-affinity") or headers.get("x-session-id") or ""
    return named[:MAX_SESSION_CHARS]


def _job(
    body: GenerationBody,
    settings: Settings,
    limits: Limits,
    *,
    prompts: Sequence[Sequence[int]],
    asked: int | None,
    asked_name: str,
    default: int | None,
    logprobs: LogprobParams,
    start: Channel | None,
    is_chat: bool,
    caller: Caller,
) -> Job:
    _refuse_extras(body)
    folder = settings.folder
    max_tokens = tuple(
        output_limit(
            len(prompt), asked, default, limits, asked_name, "messages" if is_chat else "prompt"
        )
        for prompt in prompts
    )
    min_tokens = body.min_tokens or 0
    if min_tokens > min(max_tokens):
        raise RequestRejected(
            f"min_tokens={min_tokens} exceeds the output limit of {min(max_tokens)} tokens",
            param="min_tokens",
        )
    options = body.stream_options
    if options is not None and not body.stream:
        raise RequestRejected("stream_options needs stream=true", param="stream_options")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stop_ids = tuple(body.stop_token_ids or ())
    check_ids(stop_ids, folder.vocab_size, "stop_token_ids")
    return Job(
        model=body.model or folder.name,
        is_chat=is_chat,
        prompts=tuple(tuple(prompt) for prompt in prompts),
        max_tokens=max_tokens,
        n=body.n or 1,
        sampling=_sampling(body, folder, min_tokens),
        eos_token_ids=folder.eos_token_ids,
        stop_token_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        automaton=StopAutomaton(stops) if stops else None,
        include_stop=bool(body.include_stop_str_in_output),
        logprobs=logprobs,
        salt=cache_salt(caller.principal, body.cache_salt),
        session=caller.session,
        start=start,
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=bool(body.return_token_ids),
        spec_stats=_spec_stats(body.return_spec_stats, settings.http.per_request_spec_stats),
        draft_tokens=body.draft_tokens,
        is_stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        timeout_s=caller.timeout_s,
    )


def _spec_stats(asked: bool | None, configured: str) -> str:
    """off, summary or detailed: a request chooses whether, the server how much; a summary at least."""
    if asked is False:
        return "off"
    return "summary" if asked and configured == "off" else configured


def _sampling(body: GenerationBody, folder: ModelFolder, min_tokens: int) -> SamplingParams:
    top_k = body.top_k or 0
    return SamplingParams(
        temperature=folder.default_temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(top_k, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_bias(body.logit_bias, folder.vocab_size),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        min_tokens=min_tokens,
    )


def output_limit(
    prompt_len: int,
    asked: int | None,
    default: int | None,
    limits: Limits,
    asked_name: str,
    prompt_name: str,
) -> int:
    """Output tokens at most. Raises RequestRejected (context_length_exceeded)."""
    room = limits.max_model_len - prompt_len
    if room < 1 or (asked is not None and asked > room):
        wanted = f" and asks for {asked} output tokens" if asked is not None else ""
        raise RequestRejected(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, the request has "
            f"{prompt_len} prompt tokens{wanted}. Shorten the prompt or lower {asked_name}.",
            code="context_length_exceeded",
            param=asked_name if room >= 1 else prompt_name,
        )
    if asked is not None:
        return asked
    capacity = max(limits.capacity_tokens - prompt_len, 1)
    return min(room, capacity, default or room)


def _bias(bias: Mapping[str, float] | None, vocab_size: int) -> Mapping[int, float]:
    if not bias:
        return NO_BIAS
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= vocab_size:
            raise RequestRejected(
                f"logit_bias: key {key[:40]!r} is not a token id 0..{vocab_size - 1}",
                param="logit_bias",
            )
        result[int(key)] = value
    return result


def cache_salt(principal: bytes, asked: str | None) -> bytes:
    """What separates prefix caches: the caller, and within a caller what it asks for. Empty = shared by everybody.

    The caller's own string never stands alone: nobody can name the salt of another.
    """
    if not principal and not asked:
        return b""
    return hashlib.sha256(
        len(principal).to_bytes(4, "little") + principal + (asked or "").encode()
    ).digest()


def _refuse_extras(body: GenerationBody) -> None:
    """Fields of both endpoints that must be at their neutral value."""
    neutral: Mapping[str, tuple[Any, ...]] = {
        "prompt_logprobs": (None,),
        "structured_outputs": (None,),
        "store": (None, False),
        "priority": (None, 0),
        "service_tier": (None, "auto", "default"),
    }
    _refuse(body, neutral)
    if body.return_spec_stats and (body.n or 1) > 1:
        raise unsupported("return_spec_stats", "statistics are of one choice; ask with n=1")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise unsupported("response_format", "only {'type': 'text'} is served yet")


def _refuse_chat_extras(body: ChatRequest) -> None:
    neutral: Mapping[str, tuple[Any, ...]] = {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
    }
    _refuse(body, neutral)


def _refuse_text_extras(body: CompletionRequest) -> None:
    _refuse(body, {"echo": (None, False), "suffix": (None, ""), "best_of": (None, body.n or 1)})


def _refuse(body: GenerationBody, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    given = {name: value for name, value in body if name in neutral}
    for name, value in given.items():
        if value not in neutral[name]:
            raise unsupported(name, "not served yet; leave it out")
