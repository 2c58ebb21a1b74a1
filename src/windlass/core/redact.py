"""The one place that knows what a secret looks like, and takes it out of what is written, logged or shown.

Secrets are: user information in a URL (`s3://user:token@bucket`), signatures and tokens in its query, the text under a
name that says so (`hub_token`, `--api-key`, `AWS_SECRET_ACCESS_KEY`), and texts with the known shape of a token
(`hf_...`, `AKIA...`, a JWT). What holds a secret keeps it; what leaves the process passes through here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from windlass.core.attributes import attributes_of

HIDDEN = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Za-z]?[a-z]+|[0-9]+")
_ALWAYS = frozenset(("secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey"))
# What comes before "token" or "key" in names of ordinary things: special tokens, columns, keys of mappings.
_SPECIAL_TOKENS = """eos bos pad unk mask sep cls image audio video start end special per each every next last first by
    stop class language decoder forced model"""
_KEYS_OF_THINGS = """sort label labels text image column prompt metric best group dict cache primary foreign input
    output target feature query public state main name config data dataset field chosen rejected id map json index"""
_ORDINARY = {"token": frozenset(_SPECIAL_TOKENS.split()), "key": frozenset(_KEYS_OF_THINGS.split())}
_TAIL = frozenset(("value", "string", "str", "text", "base64", "b64"))

_QUERY_NAMES = (
    r"X-(?:Amz|Goog|Oss|Obs|Cos|Ms)-(?:Signature|Credential|Security-Token)|(?:AWS|OSS|Google)?Access(?:Key)?Id|sig|signature"
    r"|se?cret|pass(?:word|wd)?|token|key|auth|(?:[\w.-]*[_.-])(?:token|key|secret|password|signature)"
)
_SHAPES = (
    r"\bhf_[A-Za-z0-9]{16,}\b",
    r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b",
    r"\bgh[pousr]_[A-Za-z0-9]{16,}\b",
    r"\bgithub_pat_\w{16,}\b",
    r"\bglpat-[\w-]{16,}",
    r"\bsk-[A-Za-z0-9][\w-]{14,}",
    r"\bxox[a-z]-[A-Za-z0-9-]{8,}",
    r"\bAIza[\w-]{30,}",
)
# Begins where no name goes on, so that a long text without a value takes one pass.
_NAMED = r"(?<![\w.-])(?P<name>[\w.-]+)"
_WORDS_IN_NAMES = ("token", "key", "secret", "passw", "passphrase", "credential")
_QUOTED_OR_PLAIN = r"(?:\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[^\s,;&)\]}'\"]+)"

# A text that repeats the beginning of a secret must not be read again for each of them: what may reach far is searched
# for once (`_user_info` and its siblings).
_SCHEME = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]+://")
_BORDER = re.compile(r"[\s@\"'<>]")
_USER_END = re.compile(r"[/\s:?#@\"'<>]")
_PORT = re.compile(r":\d+/")
_BEGIN_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_END_KEY = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_LONGEST_KEY = 20_000  # characters
_DOTTED = re.compile(r"(?<![\w-])(?P<first>[\w-]++)\.[\w-]{5,}+\.[\w-]*+")
_WEB_TOKEN = re.compile(r"\beyJ[\w-]{5}")  # a JWT
_QUERY = re.compile(rf"([?&;](?:{_QUERY_NAMES})=)[^&;#\s\"'<>)\]]+", re.IGNORECASE)
_SHAPE = re.compile("|".join(_SHAPES))
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{12,}")
_ASSIGNED = re.compile(rf"{_NAMED}(?P<middle>[\"']?\s?[=:]\s?|(?<=\w)\s(?!-))")
_VALUE = re.compile(_QUOTED_OR_PLAIN)
_PLAIN_VALUE = re.compile(
    r"[\"']?(?:none|null|true|false|-?\d+(?:\.\d*)?(?:e-?\d+)?|\*\*\*|<[A-Za-z_|/]+>)?[\"']?:?", re.I
)


def is_secret_name(name: str) -> bool:
    """Return True if a field, flag or variable of this name holds a secret.

    Whole words decide: `hub_token` and `WANDB_API_KEY` do; `tokenizer`, `num_input_tokens_seen`, `key_padding_mask`,
    `pad_token` and `sort_key` do not.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and words[-1] in _TAIL:
        words.pop()
    if not words or words[-1] in ("file", "path", "id", "name", "dropout", "type", "env"):
        return False
    if _ALWAYS.intersection(words):
        return True
    before = words[-2] if len(words) > 1 else ""
    return words[-1] in _ORDINARY and before not in _ORDINARY[words[-1]]


def redact_text(text: str) -> str:
    """`text` without secrets; what holds none comes back as it is. The time is proportional to its length."""
    text = without_credentials(text)
    if "PRIVATE KEY-----" in text:
        text = _without(text, _private_keys(text))
    if "eyJ" in text:
        text = _without(text, _web_tokens(text))
    text = _SHAPE.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    lower = text.lower()
    return _redact_assigned(text) if any(word in lower for word in _WORDS_IN_NAMES) else text


def without_credentials(text: str) -> str:
    """`text` without what opens the places that its URLs name. Their paths stay, whatever they look like."""
    if "://" in text:
        text = _without(text, _user_info(text))
    return _QUERY.sub(rf"\1{HIDDEN}", text) if "=" in text else text


def _without(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """`text` with a placeholder for each span; spans are in order."""
    parts, position = [], 0
    for start, end in spans:
        parts += [text[position:start], HIDDEN]
        position = end
    return "".join([*parts, text[position:]])


def _user_info(text: str) -> Iterator[tuple[int, int]]:
    """What is between a scheme and `@`: a user or token, or a user and a password, in which slashes may be. What looks
    like a host with a port and a path is neither.
    """
    border, done = -1, 0
    for scheme in _SCHEME.finditer(text):
        start = scheme.end()
        if border < start:
            border = _start(_BORDER, text, start)
        user = _start(_USER_END, text, start)
        has_password = text.startswith(":", user) and not _PORT.match(text, user)
        if text.startswith("@", border) and done <= start < border and (has_password or user == border):
            yield start, border
            done = border


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    last, done = _END_KEY.search(text), 0
    for begin in _BEGIN_KEY.finditer(text):
        while last is not None and last.start() < begin.end():
            last = _END_KEY.search(text, last.start() + 1)
        if last is None:
            return
        if done <= begin.start() and last.start() - begin.end() <= _LONGEST_KEY:
            yield begin.start(), last.end()
            done = last.end()


def _web_tokens(text: str) -> Iterator[tuple[int, int]]:
    position = 0
    while dotted := _DOTTED.search(text, position):
        position = dotted.end("first")
        if token := _WEB_TOKEN.search(text, dotted.start(), position):
            position = dotted.end()
            yield token.start(), position


def _start(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Where `pattern` is first found from `position` on; the end of the text if it is not."""
    found = pattern.search(text, position)
    return len(text) if found is None else found.start()


def _redact_assigned(text: str) -> str:
    """Hide the values under secret names; the value of any other name may itself hold a secret name."""
    parts, position = [], 0
    while match := _ASSIGNED.search(text, position):
        parts.append(text[position : match.end()])
        position = match.end()
        value = _VALUE.match(text, position) if _announces_secret(match) else None
        if value is not None and not _PLAIN_VALUE.fullmatch(value[0]):
            quote = value[0][0] if value[0][0] in "\"'" else ""
            parts.append(f"{quote}{HIDDEN}{quote}")
            position = value.end()
    return "".join([*parts, text[position:]])


def _announces_secret(match: re.Match[str]) -> bool:
    name, middle = match["name"], match["middle"]
    if not is_secret_name(name):
        return False
    sign = middle.strip(" \"'\t\n")
    if not sign:
        return name.startswith("-")  # a flag; else it is prose
    # A single word before a colon may be prose ("no such key: x"); a compound name is not.
    if middle[0] in "\"'":  # a quoted key, and not the end of a quoted path
        return match.string[match.start() - 1] == middle[0]
    return sign == "=" or len(_WORD.findall(name)) > 1


def redact_value(name: str, value: Any) -> Any:
    """`value`, as it may be shown under `name`: texts without secrets, in mappings and lists too.

    A number, a truth value or None under any name is not a secret.
    """
    if isinstance(value, str):
        return HIDDEN if value and is_secret_name(name) and not is_hidden(value) else redact_text(value)
    if isinstance(value, bytes):
        return HIDDEN.encode() if is_secret_name(name) else value
    if isinstance(value, Mapping):
        return {
            key: redact_value(str(key) if not is_secret_name(name) else name, item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(redact_value(name, item) for item in value)
    return value


def redact_command(words: Sequence[str]) -> list[str]:
    """A command line without the values of secret flags: `--hub_token x`, `--api-key=x`, `training.hub_token=x`."""
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = is_secret_name(name.lstrip("-")) and " " not in name
        if hide and not word.startswith("--"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={HIDDEN}" if secret and equals else redact_text(word))
        hide = secret and not equals and name.startswith("-")
    return shown


def redacted_argv() -> AbstractContextManager[None]:
    """Within it `sys.argv` holds no secrets: for packages that note the command line of the process."""
    return attributes_of(sys, argv=redact_command(sys.argv))


def is_hidden(text: str) -> bool:
    """Return True if `text` is the placeholder of a secret: it was read from something that was written."""
    return text == HIDDEN or re.fullmatch(r"<[A-Z_]+>", text) is not None


def has_hidden(url: str) -> bool:
    """Return True if credentials were taken out of this URL."""
    return f"{HIDDEN}@" in url or f"={HIDDEN}" in url
