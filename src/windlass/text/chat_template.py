"""Render conversations with the chat template of a tokenizer, and find what the assistant wrote in the text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windlass.core.errors import DataError
from windlass.core.optional import require

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK_IT = "put {% generation %} and {% endgeneration %} around it in the template, or train on all tokens"
# Content of a message that represents an assistant's turn while its borders are searched for. A character of the
# private use area: templates that trim or split a content leave it whole, and text does not hold it.
_MARK = "\ue000"

# Renders the original template as a macro, and prints its text in pieces: what follows the generation prompt of each
# assistant turn, up to the end of the turn, is between generation markers. The text is the original's by construction.
#
# A turn is proven in one of two ways. If the conversation up to the turn, with the generation prompt, is a prefix of
# the text, and so is the conversation up to and including the turn, their difference is the turn. Otherwise (templates
# that remove the reasoning of former turns, or end the last turn in another way) the turn is replaced by a mark:
# - It begins where the generation prompt and the text before the mark diverge, which is a constant of the template.
#   Text that diverges before that prompt is not the assistant's: some templates write the system message, or the tools,
#   into the last message of the user, which is another one in the past of a turn than in the whole conversation.
#   If the conversation begins with the turn, there is no such prompt, and the turn begins at the mark.
# - What follows the mark is the end of a turn and then the rest, which must be the end of the text. A turn ends with
#   what follows the mark if the conversation ends there, or with what is between the mark and a generation prompt. The
#   prompt is what the turn's past gets in addition; for a first turn, the messages up to the first of another role.
_WRAPPER = """\
{% macro training_render(messages, add_generation_prompt) %}
@ORIGINAL@{{ '' }}{% endmacro %}
{%- macro training_unasked(messages, asked) -%}
{%- set training_bare = training_render(messages, false) -%}
{%- if not asked.startswith(training_bare) and eos_token and training_bare.endswith(eos_token) -%}
{%- set training_bare = training_bare[:(training_bare | length) - (eos_token | length)] -%}
{%- endif -%}
{{- training_bare -}}
{%- endmacro -%}
{%- set training_asked = add_generation_prompt | default(false) -%}
{%- set training = namespace(text=training_render(messages, training_asked), at=0, start=-1, end=-1, shared=0) -%}
{%- for training_message in messages -%}
{%- if training_message['role'] == 'assistant' -%}
{%- set training.start = -1 -%}
{%- set training_past = messages[:loop.index0] -%}
{%- set training_before = training_render(training_past, true) if training_past else '' -%}
{%- set training_after = training_render(messages[:loop.index], false) if training_past else '' -%}
{%- if training_past
    and training.text.startswith(training_after) and training_after.startswith(training_before) -%}
{%- set training.start = training_before | length -%}
{%- set training.end = training_after | length -%}
{%- else -%}
{%- set training_mark = [{'role': 'assistant', 'content': @CONTENT@}] -%}
{%- set training_whole = training_past + training_mark + messages[loop.index:] -%}
{%- set training_marked = training_render(training_whole, training_asked).split('@MARK@') -%}
{%- set training_ended = training_render(training_past + training_mark, false).split('@MARK@') -%}
{%- if training_marked | length == 2 and training_ended | length == 2 -%}
{%- set training_close = training_ended[1] -%}
{%- if not training_past -%}{%- set training_before = training_marked[0] -%}{%- endif -%}
{%- if not training_marked[1].startswith(training_close) -%}
{%- set training.lead = training_past if training_past | rejectattr('role', 'equalto', 'assistant') | list else [] -%}
{%- for training_later in training_whole -%}
{%- if not training.lead and training_later['role'] != 'assistant' -%}
{%- set training.lead = training_whole[:loop.index] -%}
{%- endif -%}
{%- endfor -%}
{%- if training.lead -%}
{%- set training_asked_for = training_render(training.lead, true) -%}
{%- set training_asks = training_render(training_past + training_mark, true).split('@MARK@')[1] -%}
{%- set training_bare = training_unasked(training.lead, training_asked_for) -%}
{%- set training_header = training_asked_for[training_bare | length:] -%}
{%- if training_asked_for.startswith(training_bare) and training_header and training_asks.endswith(training_header) -%}
{%- set training_close = training_asks[:(training_asks | length) - (training_header | length)] -%}
{%- endif -%}
{%- endif -%}
{%- endif -%}
{%- set training.shared = training_before | length -%}
{%- set training_plain = training_unasked(training_past, training_before) if training_past else training_before -%}
{%- set training_from = (training_plain if training_before.startswith(training_plain) else training_before) | length -%}
{%- for training_cut in training_before[training_from:] -%}
{%- if training_marked[0].startswith(training_before[:training.shared]) -%}{%- break -%}{%- endif -%}
{%- set training.shared = training.shared - 1 -%}
{%- endfor -%}
{%- set training_rest = training_marked[1][training_close | length:] -%}
{%- set training.end = (training.text | length) - (training_rest | length) -%}
{%- if training_marked[1].startswith(training_close) and training.text.endswith(training_rest)
    and training.text.startswith(training_before[:training.shared])
    and training.text[training.shared:training.end].endswith(training_close) -%}
{%- set training.start = training.shared -%}
{%- endif -%}
{%- endif -%}
{%- endif -%}
{%- if training.start < training.at -%}
{{- raise_exception('the text of the assistant in message ' ~ loop.index0 ~ ' has no provable borders: @MARK_IT@') -}}
{%- endif -%}
{{- training.text[training.at:training.start] -}}
{%- generation -%}{{- training.text[training.start:training.end] -}}{%- endgeneration -%}
{%- set training.at = training.end -%}
{%- endif -%}
{%- endfor -%}
{{- training.text[training.at:] -}}
"""
_USER, _REPLY = {"role": "user", "content": "Good day?"}, {"role": "assistant", "content": "Yes, it is."}
_SYSTEM = {"role": "system", "content": "Be brief."}
# The template has to be right for the first of these. It may refuse the others, as some refuse system messages, and so
# may the wrapped one, which then refuses such rows, too.
_PROBES: tuple[list[dict[str, str]], ...] = (
    [_USER, _REPLY],
    [_SYSTEM, _USER, _REPLY],
    [_USER, _REPLY, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": " Sun\n"}],
)


class ChatTemplate:
    """The template that renders conversations, with generation markers if the assistant's spans are needed.

    Args:
        tokenizer: a `transformers` tokenizer; its special tokens are known to the template.
        template: Jinja text; None for the tokenizer's own.

    Raises:
        DataError: there is no template, or the assistant's spans cannot be proven.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer, self._own = tokenizer, template
        if template is None and not tokenizer.chat_template:
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise DataError(
                f"the dataset holds conversations, and the tokenizer {name!r} has no chat template. "
                "Set tokenizer.chat_template, or chat_template_path to a Jinja file or to a model that has one."
            )
        self._trainable: dict[str, str] = {}
        self._wants_parts = not self._shows(_MARK) and self._shows([{"type": "text", "text": _MARK}])

    def text(self, messages: Messages, *, add_generation_prompt: bool = False, **options: Any) -> str:
        """Return the text of a conversation. `options`: tools, and arguments of the template."""
        return self._rendered(messages, None, add_generation_prompt, options)[0]

    def text_and_spans(self, messages: Messages, **options: Any) -> tuple[str, Spans]:
        """Return the text, and the (start, end) characters of what the assistant wrote."""
        template = self._tokenizer.get_chat_template(self._own, options.get("tools"))
        if template not in self._trainable:
            self._trainable[template] = (
                template
                if has_generation_markers(template)
                else make_trainable(template, self._tokenizer, as_parts=self._wants_parts)
            )
        return self._rendered(messages, self._trainable[template], False, options)

    def trains_ends(self) -> bool:
        """Return False if the assistant's spans end with its text, so that a model would not learn to stop."""
        try:
            text, spans = self.text_and_spans([_USER, _REPLY, _USER])
        except DataError:  # the template has another kind of conversation
            return True
        return not spans or not text[slice(*spans[-1])].rstrip().endswith(_REPLY["content"])

    def calls_date(self) -> bool:
        """Return True if the template, or one of several, has the function that writes the date of today."""
        return "strftime_now" in str(self._own or self._tokenizer.chat_template)

    def _shows(self, content: Any) -> bool:
        """Return True if the template renders a content of this kind. Others print Python's notation, or nothing."""
        try:
            asked = [{"role": "user", "content": content}]
            return _MARK in self._tokenizer.apply_chat_template(
                asked, tokenize=False, chat_template=self._own
            )
        except Exception:  # of the template, which has another kind of conversation
            return False

    def _rendered(
        self, messages: Messages, template: str | None, prompted: bool, options: Mapping[str, Any]
    ) -> tuple[str, Spans]:
        messages = [_with_content(message, self._wants_parts) for message in messages]
        with rendering():
            text, spans = self._raw(messages, template, prompted, options)
            # Any key of a message may hold half of a surrogate pair, which tokenizers refuse without naming the row.
            text.encode()
            return text, spans

    def _raw(
        self, messages: Messages, template: str | None, prompted: bool, options: Mapping[str, Any]
    ) -> tuple[str, Spans]:
        if template is not None:
            return render(self._tokenizer, template, messages, **options)
        text = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=prompted,
            **{"chat_template": self._own, **options},
        )
        return text, []


@contextlib.contextmanager
def rendering() -> Iterator[None]:
    """Within the body, a chat template renders a conversation. Raises DataError for what it raises: jinja2 has several
    types, and its expressions have others.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise DataError(f"the chat template cannot render the conversation: {error}") from None


def _with_content(message: Mapping[str, Any], as_parts: bool) -> dict[str, Any]:
    """The message with its content as one text, or as a list of parts. What a tool returned is left as it is."""
    content: Any = message.get("content")
    is_parts = isinstance(content, list) and all(isinstance(p, Mapping) and "text" in p for p in content)
    if as_parts and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if is_parts and not as_parts:
        return {**message, "content": "".join(part["text"] for part in content)}
    return dict(message)


def has_generation_markers(template: str | None) -> bool:
    """Return True if a template marks what the assistant wrote with `{% generation %}`."""
    return template is not None and _MARKERS.search(template) is not None


def render(tokenizer: Any, template: str, messages: Messages, **options: Any) -> tuple[str, Spans]:
    """Return the text of a conversation, and the character spans between generation markers."""
    library = require("transformers.utils.chat_template_utils", "render chat templates")
    # `apply_chat_template` removes what is None as well: templates test only if a key exists
    plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
    texts, spans = library.render_jinja_template(
        conversations=[plain],
        chat_template=template,
        return_assistant_tokens_mask=has_generation_markers(template),
        **{**tokenizer.special_tokens_map, **options},
    )
    return texts[0], list(spans[0]) if spans else []


def make_trainable(template: str, tokenizer: Any, *, as_parts: bool = False) -> str:
    """Return `template` with generation markers around what the assistant writes; the text that it renders is the same.

    Works for any template: the spans are found from what the template renders, see the comment on the wrapper. Raises
    DataError if the markers cannot be proven on example conversations.

    Args:
        as_parts: it renders contents that are lists of parts, and no plain text.
    """
    original = template.removesuffix("\n")  # Jinja removes it at the end of a template, but not in a macro
    content = "[{'type': 'text', 'text': '@MARK@'}]" if as_parts else "'@MARK@'"
    wrapped = _WRAPPER.replace("@CONTENT@", content).replace("@MARK@", _MARK).replace("@MARK_IT@", _MARK_IT)
    wrapped = wrapped.replace("@ORIGINAL@", original)
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    failed = f"the chat template of {name!r} cannot be made trainable on the assistant's turns: "
    proven, refusal = 0, "it renders none of the conversations that it was tried on"
    for plain in _PROBES:
        probe = [_with_content(message, as_parts) for message in plain]
        try:
            expected, _ = render(tokenizer, template, probe)
        except Exception:
            continue  # the template itself refuses it, for example because of a system message
        try:
            problem = _problem_of(plain, *render(tokenizer, wrapped, probe), expected)
        except Exception as error:
            if _MARK_IT not in str(error):
                raise DataError(f"{failed}{error}. Or {_MARK_IT}") from None
            refusal = str(error)
            continue
        if problem:
            raise DataError(f"{failed}{problem}: {_MARK_IT}")
        proven += 1
    if not proven:
        raise DataError(failed + refusal)
    return wrapped


def _problem_of(messages: Messages, text: str, spans: Spans, expected: str) -> str:
    if text != expected:
        return "it renders another text inside a macro"
    parts = [text[slice(*span)] for span in spans]
    said = [message["content"].strip() for message in messages if message["role"] == "assistant"]
    asked = [message["content"] for message in messages if message["role"] != "assistant"]
    whole = len(parts) == len(said) and all(map(str.__contains__, parts, said))
    foreign = any(content in part for content in asked for part in parts)
    return "the assistant's text is not where it is expected" if foreign or not whole else ""
