"""The one place that knows what a secret looks like, and takes it out of what is written, logged or shown.

Secrets are: user information in a URL (`s3://user:token@bucket`), signatures and tokens in its query, the text under a
name that says so (`hub_token`, `--api-key`, `AWS_SECRET_ACCESS_KEY`), and texts with the known shape of a token
(`hf_...`, `AKIA...`, a JWT). What holds a secret keeps it; what leaves the process passes through here.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    r"\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?-----END [A-Z ]*PRIVATE KEY-----",
)
_NAMED = r"[A-Za-z_][\w.-]*"
_QUOTED_OR_PLAIN = r"(?:\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[^\s,;&)\]}'\"]+)"

_USER_INFO = re.compile(
    r"(\b[A-Za-z][A-Za-z0-9+.-]+://)(?:[^/\s?#@\"'<>]+|[^/\s:?#@\"'<>]*:(?!\d+/)[^\s@\"'<>]*)@"
)
_QUERY = re.compile(rf"([?&;](?:{_QUERY_NAMES})=)[^&;#\s\"'<>)\]]+", re.IGNORECASE)
_SHAPE = re.compile("|".join(_SHAPES))
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{12,}")
_ASSIGNED = re.compile(
    rf"(?P<name>{_NAMED})(?P<middle>[\"']?\s?[=:]\s?|\s(?<=[a-zA-Z0-9_-]\s))(?P<value>{_QUOTED_OR_PLAIN})"
)
_PLAIN_VALUE = re.compile(
    r"[\"']?(?:none|null|true|false|-?\d+(?:\.\d*)?(?:e-?\d+)?|\*\*\*|<[A-Za-z_|/]+>)?[\"']?", re.I
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
    """`text` without secrets; what holds none comes back as it is."""
    if "://" in text:
        text = _USER_INFO.sub(rf"\1{HIDDEN}@", text)
    if "=" in text:
        text = _QUERY.sub(rf"\1{HIDDEN}", text)
    text = _SHAPE.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return _ASSIGNED.sub(_hide_assigned, text) if _may_name(text) else text


def _may_name(text: str) -> bool:
    lower = text.lower()
    return any(word in lower for word in ("token", "key", "secret", "passw", "passphrase", "credential"))


def _hide_assigned(match: re.Match[str]) -> str:
    name, middle, value = match["name"], match["middle"], match["value"]
    if not is_secret_name(name) or _PLAIN_VALUE.fullmatch(value):
        return match[0]
    stripped = middle.strip(" \"'")
    # A word before a colon or a blank may be prose ("no such key: x"); a flag, a compound name or a quoted key is not.
    compound = len(_WORD.findall(name)) > 1 or middle[:1] in "\"'"
    flag = match.string[max(0, match.start() - 2) : match.start()].endswith("-")
    if (stripped == "" and not flag) or (stripped == ":" and not compound):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{middle}{quote}{HIDDEN}{quote}"


def redact_value(name: str, value: Any) -> Any:
    """`value`, as it may be shown under `name`: texts without secrets, in mappings and lists too.

    A number, a truth value or None under any name is no secret.
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


@contextlib.contextmanager
def redacted_argv() -> Iterator[None]:
    """Within it `sys.argv` holds no secrets: for packages that note the command line of the process."""
    before = sys.argv
    sys.argv = redact_command(before)
    try:
        yield
    finally:
        sys.argv = before


def is_hidden(text: str) -> bool:
    """Return True if `text` is what stands in place of a secret: it was read from something that was written."""
    return text == HIDDEN or re.fullmatch(r"<[A-Z_]+>", text) is not None


def has_hidden(url: str) -> bool:
    """Return True if credentials were taken out of this URL."""
    return f"{HIDDEN}@" in url or f"={HIDDEN}" in url
