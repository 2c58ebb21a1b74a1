"""Untrusted YAML: limited in depth and in the size to which its aliases expand."""

from __future__ import annotations

from typing import Any

import yaml

_MAX_NODES = 1 << 17


def load_yaml(
    text: str, loader_class: type[yaml.SafeLoader] = yaml.SafeLoader
) -> tuple[Any, yaml.Node | None]:
    """Return the plain value in a YAML text, and its node. Raises yaml.YAMLError if it is not valid, nested too deeply,
    or its aliases would expand to too much.
    """
    loader = loader_class(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_extent(node)
        return loader.construct_document(node), node
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # An invalid date, a number with too many digits, or a text that is not of the type that its tag names.
        raise yaml.YAMLError(
            f"it has a value that is not of its type ({type(error).__name__}: {error})"
        ) from None
    finally:
        loader.dispose()


def _check_extent(node: yaml.Node) -> None:
    """Refuse a node that has too many nodes with its aliases expanded; one that contains itself has no end."""
    visited, waiting = 0, [node]
    while waiting:
        visited += 1
        if visited > _MAX_NODES:
            raise yaml.YAMLError("its aliases refer to each other too often")
        here = waiting.pop()
        if isinstance(here, yaml.SequenceNode):
            waiting.extend(here.value)
        elif isinstance(here, yaml.MappingNode):
            waiting.extend(part for pair in here.value for part in pair)
