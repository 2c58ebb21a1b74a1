"""What Windlass uses of the streams of the `datasets` package beyond their public methods.

A stream of theirs is a chain of nodes (read, map, filter, ...), and each node holds the state of the pass that runs.
Everything here uses the attributes of the objects, and leaves any other dataset unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

_SHUFFLE_BUFFERS = {"BufferShuffledExamplesIterable"}


def with_nodes_of_its_own(dataset: Any) -> Any:
    """The same stream with its own nodes: its passes do not disturb streams that were made from the same nodes.

    `stream.skip(1000)` to train on and `stream.take(1000)` to evaluate on share the nodes below: an evaluation would
    leave the training's state pointing to the wrong place. The number of the epoch is its own as well: theirs lies in
    memory that worker processes share, and two that add to it at once count it up twice.
    """
    nodes = getattr(dataset, "_ex_iterable", None)
    if nodes is None or not hasattr(dataset, "_starting_state_dict"):
        return dataset
    # Not `copy.copy`: theirs shares the attributes between the two.
    clone = object.__new__(type(dataset))
    own = {"_ex_iterable": _copied(nodes), "_starting_state_dict": None, "_epoch": dataset.epoch}
    clone.__dict__.update(vars(dataset) | own)
    return clone


def has_shuffle_buffer(dataset: Any) -> bool:
    """Return True if a node shuffles samples in a buffer of two or more, which its state does not hold."""
    return any(
        type(node).__name__ in _SHUFFLE_BUFFERS and getattr(node, "buffer_size", 2) > 1
        for node in _walk(getattr(dataset, "_ex_iterable", None))
    )


def _copied(node: Any) -> Any:
    clone = copy.copy(node)
    if hasattr(node, "ex_iterable"):
        clone.ex_iterable = _copied(node.ex_iterable)
    if hasattr(node, "ex_iterables"):
        clone.ex_iterables = [_copied(part) for part in node.ex_iterables]
    return clone


def _walk(node: Any) -> Iterator[Any]:
    if node is None:
        return
    yield node
    yield from _walk(getattr(node, "ex_iterable", None))
    for part in getattr(node, "ex_iterables", ()):
        yield from _walk(part)
