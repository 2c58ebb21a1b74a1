from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.redact import has_hidden, is_secret_name, redact_command, redact_text, redact_value

C = "cAnArY0123456789abcdEF"


@pytest.mark.parametrize(
    "name",
    [
        "hub_token", "push_to_hub_token", "HF_TOKEN", "--api-key", "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY", "apiKey",
        "training.hub_token", "password", "db_password", "client_secret", "secret", "token", "key",
        "accessToken",
        "secret_key_base64", "my_key",
    ],
)  # fmt: skip
def test_names_that_say_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer", "tokenizer_name", "num_input_tokens_seen", "include_num_input_tokens_seen",
        "key_padding_mask",
        "key_padding", "pad_token", "eos_token", "pad_token_id", "keys", "keyboard",
        "average_tokens_across_devices",
        "max_new_tokens", "sort_key", "label_key", "monkey", "keep_best", "token_type_ids",
        "rdzv_token_file", "secretary",
        "loss_per_token", "turkey", "key_value_heads",
    ],
)  # fmt: skip
def test_names_of_ordinary_things(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        f"s3://user:{C}@bucket/run", f"s3://{C}@bucket/run", f"s3://user:a/b/{C}@bucket/run",
        f"https://u:a%2F{C}@h:8080/x?y=1", f"see ('gs://u:{C}@b/r')",
        f"https://h/x?X-Amz-Signature={C}&y=1", f"https://h/x?y=1&sig={C}",
        f"https://h/x?X-Goog-Signature={C}",
        f"az://c/x?se=1&sp=r&sig={C}%3D", f"https://h/x?access_token={C}", f"hub_token={C}",
        f"hub_token='{C}'",
        f"hub_token='{C}': cannot be read", f'{{"hub_token": "{C}"}}', f"{{'api_key': '{C}'}}",
        f"--hub_token {C}",
        f"--hub-token={C}", f"api_key: {C}", f"WANDB_API_KEY={C} python x.py", f"PASSWORD={C}",
        f"Authorization: Bearer {C}",
        f"hf_{C}", f"AKIA{C[:16].upper()}", f"ghp_{C}", f"sk-{C}", f"sk-proj-{C}", f"xoxb-123-{C}",
        f"eyJhbGciOi.eyJzdWIi.{C}", f"a url with s3://u:{C}@b and then https://h?token={C}.",
        f"password = '{C} {C}'",
    ],
)  # fmt: skip
def test_no_secret_is_left_in_a_text(text: str) -> None:
    found = redact_text(text)
    assert C not in found
    assert C.upper()[:16] not in found
    assert redact_text(found) == found, "taking out twice changes nothing more"


@pytest.mark.parametrize(
    "text",
    [
        "no such key: learning_rat; did you mean learning_rate?", "tokenizer=bert-base-uncased",
        "pad_token='[PAD]'",
        "num_input_tokens_seen: 1234", "key_padding_mask=mask", "s3://bucket/run@v2",
        "https://h/x?a=1&b=2", "user@host",
        "{'eos_token': '</s>', 'max_tokens': 5}", "hub_token=None", "hub_token=None: log in", "token 5 of 7",
        "the file '/run/token': cannot be read",
        "git@github.com:a/b.git", "task-force",
        "hf_deepspeed_config_of_a_run", "risk-taking-behaviour-of-the-best", "the key is missing",
        "checkpoint-20/model.safetensors: key layer.weight: shape (3, 4)",
    ],
)  # fmt: skip
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redact_text(text) == text


FRAGMENTS = (
    "eyJ", "eyJaaaaa", "bbbbbb", "ccccc", ".", "-", "_", " ", "\n", "'", '"', "\\", "=", ":", "?", "&", "@", "/", "://",
    "s3://", "http://a:8080/", "u:p", "token", "hub_token", "--api-key", "-----BEGIN PRIVATE KEY-----", "-----", "12/",
    "-----END RSA PRIVATE KEY-----", "PRIVATE KEY-----", "hf_", "sk-", "A" * 16, "None", "Bearer ", ",", "(", "<", "#",
)  # fmt: skip
USER_INFO = re.compile(
    r"((?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]+://)"
    r"(?:[^/\s?#@\"'<>]{1,2000}|[^/\s:?#@\"'<>]{0,2000}:(?!\d+/)[^\s@\"'<>]{0,2000})@"
)
FAR_REACHING = (
    re.compile(r"\beyJ[\w-]{5,4000}\.[\w-]{5,4000}\.[\w-]*"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]{0,20000}?-----END [A-Z ]*PRIVATE KEY-----"),
)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join))
def test_what_one_pattern_each_would_find_is_not_left(text: str) -> None:
    """The patterns as they would be written if hostile text did not matter."""
    found = redact_text(text)
    assert all(match[0].endswith("***@") for match in USER_INFO.finditer(found))
    assert not any(pattern.search(found) for pattern in FAR_REACHING)


@pytest.mark.parametrize(
    "repeated",
    ["-eyJ", "eyJaaaaa.", "-----BEGIN PRIVATE KEY-----", "x://", "x://:", "x://a:", "token:", "token='", "a=", "?a.",
     "?_", "-----BEGIN ", "Bearer ", "hf_", "--key ", 'token="\\'],
)  # fmt: skip
def test_hostile_text_takes_one_pass(repeated: str) -> None:
    """Read again for each repetition, half a million characters take longer than a test may."""
    text = repeated * (500_000 // len(repeated))
    for end in ("", " -----END PRIVATE KEY----- token=x"):
        redact_text(text + end)


def test_values_are_known_by_their_names_at_any_depth() -> None:
    found = redact_value(
        "x",
        {
            "hub_token": C,
            "n": 3,
            "token": 5,
            "inner": [{"api_key": C, "url": f"s3://a:{C}@b/c"}],
            "secret": {"a": C},
        },
    )
    assert found == {
        "hub_token": "***", "n": 3, "token": 5, "inner": [{"api_key": "***", "url": "s3://***@b/c"}],
        "secret": {"a": "***"},
    }  # fmt: skip


def test_a_command_line() -> None:
    words = [
        "train.py",
        "--hub_token",
        C,
        f"--api-key={C}",
        "--tokenizer",
        "bert",
        f"training.hub_token={C}",
        "--key",
        "--x",
    ]
    assert redact_command(words) == [
        "train.py", "--hub_token", "***", "--api-key=***", "--tokenizer", "bert", "training.hub_token=***",
        "--key", "--x",
    ]  # fmt: skip


def test_a_url_whose_credentials_are_gone_is_known() -> None:
    assert has_hidden(redact_text(f"s3://u:{C}@b/c"))
    assert not has_hidden("s3://b/c")
