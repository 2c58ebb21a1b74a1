"""`windlass generate`: continue a prompt with a trained model."""

from __future__ import annotations

from windlass.cli.command_line import DTYPES, CommandParser, standard_input, typed_text
from windlass.core.activity import Activity


def generate_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    # Before the model is loaded: who types the text need not wait for it.
    text = typed_text(lambda: standard_input().read() if options.prompt == "-" else options.prompt)
    with Activity("loading the model"):
        from windlass.cli.text_writer import Writer

        writer = Writer(options)
    is_chat = writer.tokenizer.chat_template is not None and not options.raw
    writer.write(text, [{"role": "user", "content": text}] if is_chat else [])
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass generate",
        description="Continue a prompt with a trained model. If its tokenizer has a chat template, the prompt is the "
        "user's turn, and the model answers.",
        example='windlass generate runs/python-docs "The statement"',
    )
    add_options(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text, or - to read it from standard input")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text itself, without a chat template"
    )
    return parser


def add_options(parser: CommandParser) -> None:
    """Add the model and the options of sampling."""
    add_model_options(parser)
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=200, metavar="N", help="at most so many tokens (default: 200)")
    add("--temperature", type=float, metavar="T", help="0: always the likeliest token (default: the model's)")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens with this total probability",
    )
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add("--seed", type=int, metavar="N", help="the same text each time (default: another one)")


def add_model_options(parser: CommandParser) -> None:
    """Add the model, and how it is loaded."""
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a run's folder (its best checkpoint, else the newest), a checkpoint, an adapter, a folder with a model, "
        "or a name on the Hub",
    )
    add(
        "--base", metavar="MODEL", help="the model below an adapter (default: the one that the adapter names)"
    )
    add("--dtype", choices=DTYPES, help="of the weights (default: as they are stored)")
