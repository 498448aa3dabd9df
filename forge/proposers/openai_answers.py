"""What came back from a chat endpoint, as data: an answer, or a failure by what can be done about it.

Compatible servers differ in every detail, so nothing is taken for granted: content may be text, a list of blocks, or
missing; errors come as status codes, as bodies under status 200, as HTML. Pure functions; no network here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Answer", "Failure", "Kind", "classify", "read_answer"]

MAX_SHOWN_CHARS = 300


class Kind(StrEnum):
    """What can be done about a failure."""

    FATAL = "fatal"  # the user must mend something
    REFUSED = "refused"  # the request as it was; another parameter may help
    NO_PATH = "no_path"  # no such endpoint; another path may help
    TRANSIENT = "transient"  # waiting may help


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A call that gave no answer. `retry_after_s`: what the server asked for."""

    kind: Kind
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A completion; `text` may be empty. Unknown counts are None."""

    text: str
    model: str
    finish_reason: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None


def read_answer(body: bytes, content_type: str) -> Answer | Failure:
    """Read the body of a successful response."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        if "html" in content_type.lower() or body.lstrip()[:1] == b"<":
            return Failure(kind=Kind.NO_PATH, message="the address answers with a web page, not with JSON")
        return Failure(kind=Kind.TRANSIENT, message=f"the answer is no whole JSON ({len(body)} bytes)")
    if not isinstance(data, dict):
        return Failure(kind=Kind.TRANSIENT, message="the answer is no JSON object")
    error = data.get("error")
    if error:
        # Some routers report an upstream error under status 200.
        code = error.get("code") if isinstance(error, dict) else None
        return classify(code if isinstance(code, int) and 400 <= code < 600 else 502, error, model="")
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    usage = data.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    cost = usage.get("cost")
    return Answer(
        text=_text(message.get("content")) or _text(message.get("refusal")),
        model=_text(data.get("model")),
        finish_reason=_text(choice.get("finish_reason")) or ("stop" if choice else "no_choice"),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cost=float(cost) if isinstance(cost, int | float) and not isinstance(cost, bool) and cost >= 0 else None,
    )


def classify(status: int, body: object, *, model: str, retry_after_s: float | None = None) -> Failure:
    """Sort an error response by what can be done about it."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    fields = error if isinstance(error, Mapping) else {}
    told = str(fields.get("message") or (json.dumps(error, default=str) if isinstance(error, Mapping) else error or ""))
    told = " ".join(told.split())[:MAX_SHOWN_CHARS]
    code = str(fields.get("code") or fields.get("type") or "").lower()
    parameter = str(fields.get("param") or "")
    lower = told.lower()
    shown = f"status {status}: {told}" if told else f"status {status}"
    if status in (401, 403):
        return Failure(kind=Kind.FATAL, message=f"the server refuses the key ({shown}); export a valid key")
    if status == 402 or "insufficient_quota" in code or "insufficient_quota" in lower:
        return Failure(
            kind=Kind.FATAL, message=f"the account has no credit left ({shown}); add credit or use another key"
        )
    if "model_not_found" in code or (status in (400, 404, 422) and _is_about_the_model(lower)):
        name = f" {model!r}" if model else ""
        return Failure(
            kind=Kind.FATAL,
            message=f"the server does not know the model{name} ({shown}); set [llm] model to one it has",
        )
    if status in (404, 405):
        return Failure(kind=Kind.NO_PATH, message=shown)
    if "context_length" in code or "context length" in lower or "context window" in lower or status == 413:
        return Failure(
            kind=Kind.FATAL,
            message=f"the prompt does not fit the model ({shown}); use a model with a longer context, or a smaller "
            "[llm] max_reply_tokens",
        )
    if status in (408, 409, 425, 429) or status >= 500:
        return Failure(kind=Kind.TRANSIENT, message=shown, retry_after_s=retry_after_s)
    return Failure(kind=Kind.REFUSED, message=f"{shown} {parameter}".strip())


def _is_about_the_model(told: str) -> bool:
    words = (
        "not found",
        "does not exist",
        "unknown model",
        "no such model",
        "not a valid model",
        "not supported by this",
    )
    return "model" in told and any(word in told for word in words)


def _text(value: object) -> str:
    """Text as it is, or the text blocks of a list joined; reasoning blocks are no answer."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [block if isinstance(block, str) else _block_text(block) for block in value]
        return "".join(parts)
    return ""


def _block_text(block: object) -> str:
    if not isinstance(block, dict) or block.get("type", "text") not in ("text", "output_text"):
        return ""
    text = block.get("text")
    if isinstance(text, dict):
        text = text.get("value")
    return text if isinstance(text, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
