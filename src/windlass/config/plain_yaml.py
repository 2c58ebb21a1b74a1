"""YAML that anybody may have written: bounded in depth and in what its aliases unfold to."""

from __future__ import annotations

from typing import Any

import yaml

_MAX_NODES = 1 << 17


def load_yaml(
    text: str, loader_class: type[yaml.SafeLoader] = yaml.SafeLoader
) -> tuple[Any, yaml.Node | None]:
    """The plain value in a YAML text, and the node that it was made of.

    Raises:
        yaml.YAMLError: it is not valid, nested too deeply, or its aliases would unfold to more than there is room for.
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
    except ValueError as error:  # a date that is none, a number of absurdly many digits
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()


def _check_extent(node: yaml.Node) -> None:
    """Count what a walk that knows nothing of aliases would visit: one that contains itself has no end."""
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
