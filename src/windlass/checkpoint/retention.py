"""Retention: removes surplus checkpoints after a new one is committed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.checkpoint.manifest import CheckpointInfo
from windlass.core.logs import get_logger

if TYPE_CHECKING:  # it needs torch, and a list of checkpoints does not
    from windlass.checkpoint.store import Store

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """The checkpoints to keep; all by default, and always the newest."""

    limit: int | None = None  # number in all, including protected ones; ephemeral ones do not count
    last: int | None = None  # number of the newest
    # Number of the best by the `metric` in their manifests, beside the newest one or `last`
    best: int | None = None
    greater_is_better: bool = False  # a higher metric is better

    @property
    def keeps_all(self) -> bool:
        return (self.limit or 0) <= 0 and not self.last and not self.best

    def apply(self, store: Store, protected: Iterable[Path]) -> None:
        """Remove surplus checkpoints, but for `protected` ones; on the writer rank. Damaged ones do not count and are
        not removed. An error of the disk is logged, not raised.
        """
        try:
            for info in surplus(store.whole(), self, [*protected, *store.spared()]):
                store.remove(info.path)
        except OSError as error:
            _logger.warning("An old checkpoint in %s could not be removed: %s", store.root, error)


def surplus(
    whole: list[CheckpointInfo], policy: Retention, protected: Iterable[Path] = ()
) -> list[CheckpointInfo]:
    """The complete checkpoints (in order of their commits) to remove.

    Ephemeral ones serve to resume an interrupted run, so only the newest of all checkpoints may be one.
    """
    if not whole:
        return []
    names = {_lasting_name(path) for path in protected}
    kept = {info.path for info in whole if _lasting_name(info.path) in names} | {whole[-1].path}
    permanent = [info for info in whole if not info.meta.get("ephemeral")]
    if policy.keeps_all:
        kept |= {info.path for info in permanent}
    elif (policy.limit or 0) > 0:
        others = [info.path for info in permanent if info.path not in kept]
        room = (policy.limit or 0) - (len(permanent) - len(others))
        kept.update(others[-room:] if room > 0 else [])
    else:
        kept |= {info.path for info in permanent[-(policy.last or 1) :]}
        kept |= {info.path for info in best_of(permanent, policy.best or 0, policy.greater_is_better)}
    return [info for info in whole if info.path not in kept]


def best_of(whole: list[CheckpointInfo], count: int, greater_is_better: bool) -> list[CheckpointInfo]:
    """The best by the `metric` in their manifests, best first; of equals the earlier one."""
    rated = [(metric_of(info), info) for info in whole]
    known = [(value, info) for value, info in rated if value is not None]
    known.sort(key=lambda pair: -pair[0] if greater_is_better else pair[0])
    return [info for _, info in known[:count]]


def metric_of(info: CheckpointInfo) -> float | None:
    """The metric of an evaluation at the step of this checkpoint; None if there is none, or it is not finite."""
    value = info.meta.get("metric")
    if not isinstance(value, float):
        return None
    return value if math.isfinite(value) else None


def _lasting_name(path: Path) -> str:
    """The name of a checkpoint, which is another one between the two renames of its replacement."""
    return path.name.removeprefix("replaced-")
