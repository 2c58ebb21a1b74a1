"""The errors that Windlass raises. Each says what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.core.output import shown
from windlass.core.redact import redact_value
from windlass.core.tracebacks import printed


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration: the field, the value it has, and the fix."""

    field: str
    value: object
    fix: str

    def __str__(self) -> str:
        value = redact_value(self.field.rpartition(".")[2], self.value)
        return shown(f"{self.field}={value!r}: {self.fix}")


def _as_made(error: BaseException) -> tuple[Any, ...]:
    """How an error is copied and sent to another process. By default Python calls the constructor with the message
    alone: most of these take something else, and a pool whose worker sends such an error waits without end.
    """
    return _again, (type(error), error.args), vars(error)


def _again(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args  # which subclasses of OSError leave to their constructor
    return error


class WindlassError(Exception):
    """Base of every error that is the user's to mend; the command line exits with code 2 on it.

    Its text may quote a file or a setting: it is shown without secrets and control characters.
    """

    # Read by `core.tracebacks`, which cannot import this class.
    is_explained = True

    def __str__(self) -> str:
        return shown(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_made(self)

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of its own traceback."""
        return printed(self).splitlines()


class ConfigError(WindlassError, ValueError):
    """A configuration that cannot be honoured. Carries *all* `problems` found, never only the first."""

    def __init__(self, problems: Iterable[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} in the configuration:\n" + "\n".join(f"  - {p}" for p in self.problems))


class RankMismatchError(WindlassError, ValueError):
    """Settings, objects or calls that must be alike on every rank differ between ranks. Raised on all ranks.

    Args:
        found: the sentence before the differences.
        fix: the sentences after them.

    Attributes:
        differences: one line for each field, with its values and their ranks.
    """

    def __init__(
        self,
        differences: Iterable[str],
        found: str = "these differ between the ranks of the job, and must be the same on all of them",
        fix: str = "Give every rank the same values: look for a setting that is computed from the rank, from the host "
        "or from an environment variable that only some of them have, and for data that is drawn without a seed or "
        "divided by the script.",
    ) -> None:
        self.differences = list(differences)
        listed = "".join(f"\n  - {line}" for line in self.differences)
        super().__init__(f"{found}:{listed}\n{fix}")


class DataError(WindlassError, ValueError):
    """A dataset, a batch or a data file that cannot be trained on."""


class WorkerError(WindlassError, RuntimeError):
    """A data worker process died or could not be started."""


class ModelError(WindlassError, ValueError):
    """A model or a hook that does not do what training needs (no loss, raw backward, ...)."""


class CheckpointError(WindlassError, ValueError):
    """A checkpoint that is damaged, incomplete, or belongs to another model."""


class NonFiniteError(WindlassError, FloatingPointError):
    """The loss or the gradient norm became NaN or infinite, and the policy is to stop."""


class PeerError(WindlassError, RuntimeError):
    """Another rank failed, so the work they share cannot be finished here."""


class MemoryShortError(WindlassError, MemoryError):
    """Memory does not hold a batch, and this process cannot continue with a smaller one by itself."""


# "Temporary failure, try again" of sysexits.h: a scheduler may start the job again.
EXIT_PREEMPTED = 75


class Preempted(SystemExit):
    """A scheduler requested that the job exit. Ends the process with code 75 unless the script catches it.

    Attributes:
        step: optimizer updates done.
        folder: the newest checkpoint of the run; None if there is none.
    """

    def __init__(self, step: int, folder: Path | None) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.step, self.folder = step, folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_made(self)


class MissingDependencyError(WindlassError, ImportError):
    """An optional package is needed and not installed."""


class OutdatedDependencyError(MissingDependencyError):
    """A package is installed in a release that is too old.

    Attributes:
        package: its import name.
        found: the release that is installed.
        needed: the oldest release that works.
    """

    def __init__(self, package: str, found: str, needed: str, command: str) -> None:
        super().__init__(
            f"{package} {found} is too old: {package}>={needed} is needed. Install it with: {command}"
        )
        self.package, self.found, self.needed = package, found, needed


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to `word`; None if none is similar."""
    candidates = {name.lower().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), candidates, n=1, cutoff=0.6)
    return candidates[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` to append to a sentence; empty if no word is similar."""
    found = nearest(word, known)
    return f"; did you mean {found!r}?" if found else ""


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError with the problems, if there are any."""
    if found := list(problems):
        raise ConfigError(found)


def unknown(
    given: Mapping[str, object],
    known: Collection[str],
    field: Callable[[str], str] = str,
    what: str = "there is no such option",
) -> list[Problem]:
    """A problem for each name in `given` that is not known, with the name that is meant; `field` is its place."""
    return [
        Problem(field(name), value, f"{what}{did_you_mean(str(name), known)}")
        for name, value in given.items()
        if name not in known
    ]


def named(error: BaseException) -> str:
    """Return the type and the text of an error, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error, or the name of its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
