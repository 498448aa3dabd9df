"""A proposer behind any OpenAI-compatible ``/chat/completions`` endpoint.

Plain completions only: no streaming, tools or structured output, which half of the compatible servers lack or break.
The base URL and the key come from the environment and nowhere else; the key goes into the request header and into
nothing that this module returns, raises or logs. What a server refuses (a parameter, a path without ``/v1``) is found
out once and remembered. One call has one deadline, however often it is retried and however slowly the answer drips.
"""

from __future__ import annotations

import email.utils
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import openai

from forge.errors import ProposerError
from forge.proposers.base import ExplanationRequest, ProposalRequest, Reply
from forge.proposers.openai_answers import Answer, Failure, Kind, classify, read_answer
from forge.recipe import LanguageModel

__all__ = ["ClientSettings", "OpenAIProposer"]

DEFAULT_BASE_URL = "https://api.openai.com/v1"
MAX_ANSWER_BYTES = 8 << 20
MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How to reach a model; everything but the model has a default that suits most.

    base_url_env, key_env: *names* of environment variables.
    max_tokens: cap on the tokens of one reply, reasoning included.
    request_timeout_s: longest silence of the server. deadline_s: one call with all its retries and waits.
    prompt_price, completion_price: per million tokens; without them the cost is unknown unless the server tells it.
    """

    model: str
    base_url_env: str = "OPENAI_BASE_URL"
    key_env: str = "OPENAI_API_KEY"
    temperature: float | None = None
    max_tokens: int = 16_384
    request_timeout_s: float = 300.0
    deadline_s: float = 1200.0
    max_attempts: int = 8
    prompt_price: float | None = None
    completion_price: float | None = None


class OpenAIProposer:
    """Asks the model one message at a time; every request is complete in itself, nothing depends on a conversation.

    Args:
        settings: model and limits.
        environment: where base URL and key are read; the process's own by default.
        on_wait: told in a sentence whenever a retry is waited for.
        sleep, clock: for tests.

    Raises:
        ProposerError: the environment holds neither key nor base URL, or a base URL that is none.
    """

    name = "openai"

    def __init__(
        self,
        settings: ClientSettings,
        *,
        environment: Mapping[str, str] | None = None,
        on_wait: Callable[[str], None] = lambda message: None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        environment = os.environ if environment is None else environment
        given_url = environment.get(settings.base_url_env, "").strip()
        key = environment.get(settings.key_env, "").strip()
        if not key and not given_url:
            raise ProposerError(
                f"the environment variable {settings.key_env} is not set; export your key in it, and for a server "
                f"other than {DEFAULT_BASE_URL} its address in {settings.base_url_env}"
            )
        self._settings = settings
        # Local servers ask for no key, but the client library wants a word.
        self._secret = key
        self._base_url = _normalize_base_url(given_url or DEFAULT_BASE_URL, settings.base_url_env)
        self._client = openai.OpenAI(api_key=key or "none", base_url=self._base_url, max_retries=0)
        self._token_parameters = ["max_tokens", "max_completion_tokens"]
        if not given_url:
            self._token_parameters.reverse()
        self._sends_temperature = settings.temperature is not None
        self._path_is_settled = self._base_url.endswith("/v1")
        self._on_wait, self._sleep, self._clock = on_wait, sleep, clock

    @classmethod
    def from_recipe(
        cls, llm: LanguageModel, *, on_wait: Callable[[str], None] = lambda message: None
    ) -> OpenAIProposer:
        """Return the proposer that a recipe's `[llm]` section describes.

        Raises:
            ProposerError: no model is named, or the environment lacks what it needs.
        """
        if llm.model is None:
            raise ProposerError("proposer 'openai' needs the name of a model: model = \"...\" in section [llm]")
        settings = ClientSettings(
            model=llm.model,
            base_url_env=llm.base_url_env,
            key_env=llm.key_env,
            temperature=llm.temperature,
            max_tokens=llm.max_reply_tokens,
            request_timeout_s=llm.request_timeout_s,
            deadline_s=llm.deadline_s,
            prompt_price=llm.prompt_price,
            completion_price=llm.completion_price,
        )
        return cls(settings, on_wait=on_wait)

    def __repr__(self) -> str:
        return f"OpenAIProposer(model={self._settings.model!r}, base_url={_shown_url(self._base_url)!r})"

    @property
    def label(self) -> str:
        """Model and server, without credentials."""
        return f"language model {self._settings.model} at {_shown_url(self._base_url)}"

    def propose(self, request: ProposalRequest) -> Reply:
        """Answer a proposal prompt; see `complete`."""
        return self.complete(request.prompt)

    def explain(self, request: ExplanationRequest) -> Reply:
        """Answer an explanation prompt; see `complete`."""
        return self.complete(request.prompt)

    def complete(self, prompt: str) -> Reply:
        """Return the model's answer to one user message.

        An empty or cut-off answer is returned as it is, with its `finish_reason` and tokens: it was paid for, and the
        parser says what is wrong with it.

        Raises:
            ProposerError: key or model refused, no such endpoint, or no answer before the deadline.
        """
        start = self._clock()
        deadline = start + self._settings.deadline_s
        attempt = refused = 0
        last = "no attempt was made"
        while attempt < self._settings.max_attempts:
            attempt += 1
            answer = self._attempt(prompt, deadline)
            if isinstance(answer, Answer):
                return self._reply(answer, calls=attempt + refused, wall_s=self._clock() - start)
            if answer.kind is Kind.FATAL:
                raise ProposerError(self._clean(answer.message))
            if self._negotiate(answer):
                # A refused parameter says nothing about the server's health, so it does not use up the attempts.
                attempt, refused = attempt - 1, refused + 1
                continue
            if answer.kind is Kind.REFUSED:
                raise ProposerError(self._clean(f"{self.label} refuses the request: {answer.message}"))
            last = self._clean(answer.message)
            wait = _backoff(attempt) if answer.retry_after_s is None else answer.retry_after_s
            if attempt == self._settings.max_attempts:
                break
            if self._clock() + wait >= deadline:
                last += f"; it asks to wait {wait:.0f} s, which is beyond the deadline of this call"
                break
            self._on_wait(f"{last}; attempt {attempt + 1} of {self._settings.max_attempts} in {wait:.1f} s")
            self._sleep(wait)
        raise ProposerError(
            f"{self.label} gave no answer in {attempt} attempts and {self._clock() - start:.0f} s; last: {last}. "
            "Nothing of the evaluator's budget was used; resume the run when the server answers again"
        )

    def _attempt(self, prompt: str, deadline: float) -> Answer | Failure:
        remaining = deadline - self._clock()
        if remaining <= 0:
            return Failure(kind=Kind.TRANSIENT, message="the deadline of this call has passed")
        extra: dict[str, Any] = {}
        if self._token_parameters:
            extra[self._token_parameters[0]] = self._settings.max_tokens
        if self._sends_temperature:
            extra["temperature"] = self._settings.temperature
        try:
            with self._client.chat.completions.with_streaming_response.create(
                model=self._settings.model,
                messages=[{"role": "user", "content": prompt}],
                extra_body=extra,
                timeout=min(self._settings.request_timeout_s, remaining),
            ) as response:
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        return Failure(kind=Kind.TRANSIENT, message=f"the answer exceeds {MAX_ANSWER_BYTES} bytes")
                    if self._clock() > deadline:
                        return Failure(kind=Kind.TRANSIENT, message="the answer was still coming at the deadline")
                return read_answer(bytes(body), response.headers.get("content-type", ""))
        except openai.APIStatusError as err:
            return classify(
                err.status_code,
                _body_of(err),
                model=self._settings.model,
                retry_after_s=_retry_after(err.response.headers),
            )
        except openai.APITimeoutError:
            return Failure(kind=Kind.TRANSIENT, message="the server stayed silent until the timeout")
        except openai.APIConnectionError as err:
            reason = f" ({type(err.__cause__).__name__})" if err.__cause__ else ""
            return Failure(kind=Kind.TRANSIENT, message=f"no connection{reason}")
        except openai.OpenAIError as err:
            return Failure(kind=Kind.FATAL, message=f"the client library failed: {err}")
        except Exception as err:
            # While a body is read, errors of the HTTP library come through unwrapped, and which library that is (httpx
            # or its successor) depends on the version of openai.
            if type(err).__module__.split(".")[0] not in ("httpx", "httpx2") and not isinstance(err, OSError):
                raise
            return Failure(kind=Kind.TRANSIENT, message=f"the connection broke ({type(err).__name__})")

    def _negotiate(self, failure: Failure) -> bool:
        """Change what the server refused; whether there was something to change."""
        if failure.kind is Kind.NO_PATH:
            if self._path_is_settled:
                raise ProposerError(
                    f"there is no /chat/completions at {_shown_url(self._base_url)}; "
                    f"mend {self._settings.base_url_env} (it usually ends in /v1)"
                )
            self._path_is_settled = True
            self._base_url += "/v1"
            self._client = self._client.with_options(base_url=self._base_url)
            return True
        if failure.kind is not Kind.REFUSED:
            return False
        told = failure.message.lower()
        if self._token_parameters and self._token_parameters[0] in told:
            self._token_parameters.pop(0)
            return True
        if self._sends_temperature and "temperature" in told:
            self._sends_temperature = False
            return True
        return False

    def _reply(self, answer: Answer, *, calls: int, wall_s: float) -> Reply:
        settings, cost = self._settings, answer.cost
        prices = (settings.prompt_price, settings.completion_price)
        if cost is None and None not in (*prices, answer.prompt_tokens, answer.completion_tokens):
            assert answer.prompt_tokens is not None
            assert answer.completion_tokens is not None
            assert settings.prompt_price is not None
            assert settings.completion_price is not None
            cost = (
                answer.prompt_tokens * settings.prompt_price + answer.completion_tokens * settings.completion_price
            ) / 1e6
        return Reply(
            text=answer.text,
            model=answer.model or settings.model,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cost=cost,
            finish_reason=answer.finish_reason,
            calls=calls,
            wall_s=wall_s,
        )

    def _clean(self, message: str) -> str:
        """Take the key out of what a server echoed."""
        return message.replace(self._secret, "***") if self._secret else message


def _normalize_base_url(url: str, variable: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ProposerError(f"{variable} is no address of a server; it looks like https://host/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _shown_url(url: str) -> str:
    """Without user, password, query: any of them may be a secret."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _body_of(err: openai.APIStatusError) -> object:
    if err.body is not None:
        return err.body
    return err.response.text


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait: ``retry-after-ms``, or ``retry-after`` as seconds or as a date."""
    try:
        milliseconds = float(headers.get("retry-after-ms", ""))
        return max(0.0, milliseconds / 1000) if math.isfinite(milliseconds) else None
    except ValueError:
        pass
    value = headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _backoff(attempt: int) -> float:
    return float(min(MAX_BACKOFF_S, 2.0 ** (attempt - 1)) * random.uniform(0.7, 1.3))
