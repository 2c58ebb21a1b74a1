"""`windlass data`: show what a model would be trained on, and prepare it before training."""

from __future__ import annotations

from windlass.cli.command_line import CommandParser


def data_command(words: list[str]) -> int:
    parser = build_parser()
    options, rest = parser.parse_known_args(words)
    # argparse collects positional arguments up to the first option only.
    others = [word for word in rest if word.startswith("-") or "=" not in word]
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    options.overrides += rest
    from windlass.cli.data_show import prepare_command, show_command

    return show_command(options) if options.action == "show" else prepare_command(options)


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass data",
        example="windlass data show data.jsonl",
        description="Show what a model would be trained on, or prepare it before training.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="show | prepare")
    show = actions.add_parser(
        "show", help="print samples as the model gets them, with the trained tokens marked"
    )
    prepare = actions.add_parser(
        "prepare",
        help="tokenize a dataset, and keep the result for training",
        description="Tokenize a dataset, and keep the result for training in $WINDLASS_HOME/text, else in "
        "~/.cache/windlass/text.",
    )
    for action in (show, prepare):
        action.add_argument("source", metavar="RECIPE.yaml | FILE", help="a recipe, or a file with data")
        action.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="key=value",
            help="keys of the recipe; for a file: tokenizer=NAME, max_length=512, assistant_only_loss=true, ...",
        )
        action.add_argument("--json", action="store_true", help="as one JSON object")
    show.add_argument("--rows", type=int, default=3, metavar="N", help="how many (default: 3)")
    show.add_argument("--start", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    tiny = "a recipe in the form of `windlass train --tiny`: no model is downloaded for its tokenizer"
    show.add_argument("--tiny", action="store_true", help=tiny)
    show.add_argument(
        "--split", default="train", help="train, eval or test; of a mixture 'train FILE' (default: train)"
    )
    return parser
