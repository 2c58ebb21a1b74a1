"""Where an output folder is: a path of this machine, or the URL of a remote folder with a local one beside it.

The one place where a path is looked at for a scheme.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from windlass.core.errors import ConfigError, ModelError, Problem, WindlassError, first_line
from windlass.core.redact import without_credentials

STAGING = "WINDLASS_STAGING"
# With which a file begins that stands in a clone for a large one.
LFS_BEGIN = b"version https://git-lfs"
LFS_FIX = "is a pointer of Git LFS, and not the file itself, which `git lfs pull` in its folder fetches"
# A scheme has two letters at least: `C:\\runs` is a path.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.+)", re.DOTALL)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether it names a remote folder (`s3://bucket/run`), not one of this machine."""
    return _URL.fullmatch(os.fspath(path)) is not None


def is_folder_name(model: str) -> bool:
    """Return True if a model's name can only be a folder: on the Hub it is `NAME` or `OWNER/NAME`."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def scheme_of(url: str) -> str:
    """`s3` of `s3://bucket/run`."""
    return url.partition("://")[0].lower()


def parent_of(url: str) -> tuple[str, str]:
    """The folder that a URL's last part lies in, and that part."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return parent, name


def at_home(path: str | os.PathLike[str]) -> Path:
    """Return a path with a folder in place of `~` or `~NAME`. Raises ConfigError if that user has no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        fix = "begins with the home of a user who has none: write the whole path, or set HOME"
        raise ConfigError(Problem("path", os.fspath(path), fix)) from None


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder in which programs of this user cache files."""
    return at_home(environ.get("XDG_CACHE_HOME") or "~/.cache")


def home_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of Windlass's own files of this user: `$WINDLASS_HOME`, else `~/.cache/windlass`."""
    home = environ.get("WINDLASS_HOME") or cache_folder(environ) / "windlass"
    return at_home(home)


def shown_path(path: Path | str) -> str:
    """Return a path as messages show it: relative within the working directory, else absolute."""
    whole, here = Path(path).absolute(), working_folder()
    return os.path.relpath(whole, here) if here and whole.is_relative_to(here) else str(whole)


@contextlib.contextmanager
def loading(what: str, name: str, *handled: type[Exception]) -> Iterator[None]:
    """Within the body, `what` (such as "model") is loaded by its name or folder. Raises ModelError, with the reason,
    for what its libraries raise, of many types if a file is damaged. A RuntimeError, as of a device, is passed on.

    Args:
        handled: errors that the caller handles.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (WindlassError, RuntimeError, *handled)):
            raise
        reason = f"there is no such folder, and the Hub did not help: {first_line(error)}"
        if os.path.isdir(folder := os.path.expanduser(name)):
            # transformers words these two for its users; the text of others says little without their type.
            is_worded = isinstance(error, OSError | ValueError)
            reason = str(error) if is_worded else f"{type(error).__name__}: {' '.join(str(error).split())}"
            if (pointer := _lfs_pointer(Path(folder))) is not None:
                reason = f"{pointer} {LFS_FIX}"
        raise ModelError(f"the {what} {name!r} cannot be loaded: {reason}") from error


def _lfs_pointer(folder: Path) -> Path | None:
    """A file in a folder that Git LFS has not fetched: readers take its text for a damaged file."""
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            if path.is_file() and path.open("rb").read(len(LFS_BEGIN)) == LFS_BEGIN:
                return path
    return None


def working_folder() -> str:
    """The working directory; "" if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def named(path: Path) -> Path:
    """Return a path whose last part is the name of its file or folder, as `.` and `..` are not."""
    return path.resolve() if path.name in ("", "..") else path


def anchored(path: str, base: str) -> str:
    """A path that does not depend on the working directory: a relative one is taken to start at `base`."""
    return path if is_url(path) else os.path.join(base, os.path.expanduser(path))


def lies_in(path: str, folder: str) -> bool:
    """Whether a path is written as a relative folder's or as that of something in it."""
    parts, of_folder = Path(path).parts, Path(folder).parts
    return not Path(path).is_absolute() and parts[: len(of_folder)] == of_folder


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of this machine in which a run works: the path itself, or the staging folder of a URL.

    Staging folders lie in `$WINDLASS_STAGING`, else in the cache folder; each URL has its own.
    """
    text = os.fspath(path)
    if not is_url(text):
        return at_home(text)
    # Credentials stay out of the name, and a run finds its folder again after they were renewed.
    url = without_credentials(text).rstrip("/")
    root = os.environ.get(STAGING) or cache_folder(os.environ) / "windlass" / "staging"
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", parent_of(url)[1])[:40]
    return at_home(root) / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def unwritable(output_dir: str, error: OSError) -> ConfigError:
    """The error of an output folder that can't be written, as a problem of the configuration."""
    fix = (
        f"it can't be written ({error.strerror or error}): choose another folder, or make room and permission"
    )
    # Of such a link the system says that the file exists.
    if isinstance(error, FileExistsError) and os.path.islink(output_dir) and not os.path.exists(output_dir):
        fix = f"it is a link to {os.readlink(output_dir)}, which is not there: remove the link, or make that folder"
    return ConfigError(Problem("output_dir", output_dir, fix))
