"""Paths below a home, wherever one is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from windlass.accelerator.value_files import on_this_machine
from windlass.cli.checkpoint_listing import local_path
from windlass.config import documents
from windlass.core.errors import ConfigError
from windlass.core.locations import at_home, local_folder
from windlass.finetuning.templates import take_over_template
from windlass.finetuning.trained_model import find_model
from windlass.recipes.built_in_recipes import recipe_path
from windlass.text.token_store import kept


@pytest.mark.parametrize(
    "read",
    [
        at_home,
        documents.load,
        recipe_path,
        find_model,
        local_path,
        on_this_machine,
        lambda path: take_over_template(path, None),
        lambda path: kept(path, "key", list),
    ],
)
def test_the_home_of_a_user_that_does_not_exist_is_named(read: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match=r"~no-such-user/x\.jinja"):
        read("~no-such-user/x.jinja")


def test_each_url_has_a_staging_folder_whatever_its_credentials_are() -> None:
    """Also one whose path looks like a token, as of a model from Slovak to Czech: two runs would be mixed."""
    urls = ["s3://bucket/sk-cs-translation-1", "s3://bucket/sk-cs-translation-2", "s3://bucket/token=a/1"]
    assert len({local_folder(url) for url in urls}) == len(urls)
    for url in urls:
        renewed = url.replace("bucket", "name:word@bucket") + "?token=x"
        assert local_folder(renewed) == local_folder(renewed.replace("word", "other").replace("=x", "=y"))
