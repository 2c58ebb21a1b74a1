"""`windlass config`: ask how training is distributed, and write the launch file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from windlass.cli.command_line import CommandParser, local_place, standard_input, typed_text
from windlass.config.parallel import rows_launch, rows_training
from windlass.config.parallel.keys import Key, Setting, Settings
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.locations import at_home
from windlass.core.output import STDOUT, say
from windlass.recipes.from_files import (
    basic_settings,
    default_file,
    find_file,
    from_file,
    updated,
    write_file,
)


class LinePrompter:
    """Prints questions and reads lines. An empty answer, or the end of the input, selects the default."""

    def __init__(self, source: TextIO | None = None, sink: TextIO | None = None) -> None:
        self._source, self._sink = source or standard_input(), sink or STDOUT

    def ask(self, question: str, default: str, read: Callable[[str], Any]) -> Any:
        """Ask until `read` accepts the answer, and return what it returns."""
        while True:
            print(f"{question} [{default}]: ", end="", file=self._sink, flush=True)
            answer = typed_text(self._source.readline)
            if not self._source.isatty():
                print(file=self._sink)  # no Enter was echoed
            try:
                return read(answer.strip() or default)
            except ValueError as error:
                print(f"  {error}", file=self._sink)


Answers = dict[str, Any]


def _many(answers: Answers) -> bool:
    return bool(answers["launch.machines"] > 1)


def _if(name: str, value: str) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(name) == value


_sharded = _if("strategy", "fsdp")


@dataclass(frozen=True, slots=True)
class Question:
    key: Key  # the setting
    text: str  # of the question
    default: str = ""  # of an empty answer; "no" for a setting that is true or false
    words: tuple[str, ...] = ()  # the choices; empty for any text
    # Returns True if it is to be asked, given the answers so far
    when: Callable[[Answers], bool] = lambda answers: True

    @property
    def choices(self) -> tuple[str, ...]:
        return ("no", "yes") if isinstance(self.key.default, bool) else self.words

    @property
    def shown(self) -> str:
        """The question, with its choices."""
        listed = ", ".join(f"{number}) {choice}" for number, choice in enumerate(self.choices))
        return f"{self.text} {listed}".rstrip()

    def read(self, text: str) -> Any:
        """Return the value of an answer: a choice, its number, or any text. Raises ValueError for another one."""
        if self.choices and text not in self.choices:
            if not (text.isdecimal() and int(text) < len(self.choices)):
                known = f"{', '.join(self.choices)}, or a number from 0 to {len(self.choices) - 1}"
                raise ValueError(f"must be one of {known}")
            text = self.choices[int(text)]
        return self.key.read(text)

    def default_after(self, answers: Answers) -> str:
        if self.key is rows_launch.PROCESSES:
            return str(answers["launch.machines"] * (2 if answers["cpu"] else max(_devices(), 2)))
        return self.default or ("no" if isinstance(self.key.default, bool) else "")


QUESTIONS = (
    Question(rows_training.STRATEGY, "Does every process hold the whole model (ddp), or its share of it (fsdp)?",
             "ddp", ("ddp", "fsdp")),
    Question(rows_launch.MACHINES, "How many machines take part?", "1"),
    Question(rows_launch.MACHINE_RANK, "Which of them is this one, from 0?", "0", when=_many),
    Question(rows_launch.MAIN_ADDRESS, "What is the address of machine 0?", "127.0.0.1", when=_many),
    Question(rows_launch.MAIN_PORT, "Which port is free on machine 0?", "29500", when=_many),
    Question(rows_launch.RENDEZVOUS, "Do machines have the ranks given to them (static), or whichever they get (c10d)?",
             "static", ("static", "c10d"), _many),
    Question(rows_training.CPU, "Leave accelerators alone and train on the CPU?"),
    Question(rows_launch.PROCESSES, "How many processes on all machines together?"),
    Question(rows_training.FSDP_SHARDING, "What is sharded?", "full_shard",
             ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard"), _sharded),
    Question(rows_training.FSDP_WRAP,
             "Which parts are gathered on their own: layers by class, those above a size, or only the whole?",
             "transformer", ("transformer", "size", "none"), _sharded),
    Question(rows_training.FSDP_LAYERS, "Classes of the layers, with commas (empty: the model's own list)?",
             when=_if("fsdp.wrap", "transformer")),
    Question(rows_training.FSDP_MIN_PARAMETERS, "From how many parameters on?", "100000000",
             when=_if("fsdp.wrap", "size")),
    Question(rows_training.FSDP_OFFLOAD, "Keep the model in host memory between uses?", when=_sharded),
    Question(rows_training.FSDP_STATE, "Do checkpoints hold whole tensors (full), or every rank's shards?",
             "full", ("full", "sharded"), _sharded),
    Question(rows_training.FSDP_RECOMPUTE, "Recompute layers to save memory?", when=_sharded),
    Question(rows_training.FSDP_RAM_EFFICIENT, "Read the weights on the first rank only?", when=_sharded),
    Question(rows_training.PRECISION, "Which precision?", "no", rows_training.PRECISIONS),
)  # fmt: skip


def _devices() -> int:
    from windlass.core.device import visible_devices

    return visible_devices()


def config_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    named = options.config_file
    if named == "":
        raise ConfigError(Problem("--config_file", named, "is empty; name a file, or leave the flag out"))
    path = at_home(default_file(os.environ)) if named is None else local_place(named)
    if path.is_dir():  # before the questions are answered
        raise ConfigError(Problem("--config_file", named, "is a folder; name a file in it"))
    asks_nothing = options.action == "default" or options.default
    if options.mixed_precision is not None and (not asks_nothing or options.action == "update"):
        fix = "is for the default file: add --default, or leave it out"
        raise ConfigError(Problem("--mixed_precision", options.mixed_precision, fix))
    if options.action == "update":
        _update(named)
        return 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # before the questions, too
    except OSError as error:
        fix = f"its folder cannot be made ({error.strerror}); name a file elsewhere"
        raise ConfigError(Problem("--config_file", str(path), fix)) from error
    settings = (
        basic_settings(options.mixed_precision or "no", _devices(), "--mixed_precision")
        if asks_nothing
        else asked(LinePrompter())
    )
    write_file(settings, path)
    flag = f"--config_file {shlex.quote(named)} " if named else ""
    say(f"wrote {path}\nstart a script with it: windlass launch {flag}script.py")
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass config",
        description="Ask how training is distributed, and write the file that `windlass launch` reads.",
    )
    add = parser.add_argument
    add(
        "action",
        nargs="?",
        choices=("default", "update"),
        help="default: ask nothing; update: remove unknown keys from an existing file",
    )
    where = "the file to write (default: in the cache folder)"
    add("--config_file", "--config-file", metavar="FILE", help=where)
    add("--default", action="store_true", help="ask nothing")
    add("--mixed_precision", "--mixed-precision", metavar="WORD", help="for the default file")
    return parser


def asked(prompt: LinePrompter) -> Settings:
    answers: Answers = {}
    for question in QUESTIONS:
        if question.when(answers):
            default = question.default_after(answers)
            answers[question.key.name] = prompt.ask(question.shown, default, question.read)
    # An empty answer leaves the setting to its default, which may change with the version.
    given = {name: value for name, value in answers.items() if value not in ((), None)}
    return Settings({name: Setting(name, value, "windlass config", "file") for name, value in given.items()})


def _update(named: str | None) -> None:
    path = at_home(named) if named else find_file(os.environ)[0]
    if path is None:
        fix = "no launch file to update; `windlass config` writes one"
        raise ConfigError(Problem("--config_file", None, fix))
    settings = from_file(path)
    refuse(problem for problem in settings.problems if problem.field == "--config_file")
    for name in updated(path):
        say(f"removed {name}, which means nothing here")
    say(f"updated {path}")
