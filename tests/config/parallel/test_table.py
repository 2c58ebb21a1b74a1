"""Every setting has one name, and every spelling one setting."""

from __future__ import annotations

import dataclasses

import pytest
from tests.versions import needs

from windlass import TrainingArguments
from windlass.config.parallel import rows_launch, rows_loop
from windlass.config.parallel.keys import FAMILIES, Key
from windlass.config.parallel.table import FLAGS, KEYS, SECTIONS, TOP_LEVEL, TRAINING, VARIABLES


def test_no_two_settings_share_a_spelling() -> None:
    flags = [word for key in KEYS.values() for word in key.flags]
    variables = [word for key in TRAINING for word in key.variables]
    assert len(flags) == len(set(flags)) == len(FLAGS)
    assert len(variables) == len(set(variables)) == len(VARIABLES)
    rows = [*TRAINING, *rows_launch.LAUNCH, *rows_launch.DEEPSPEED, *rows_launch.MEGATRON]
    assert len(rows) == len(KEYS)


@pytest.mark.parametrize("key", [*KEYS.values(), *rows_loop.LOOP], ids=lambda key: key.name)
def test_defaults_are_canonical_and_rows_are_whole(key: Key) -> None:
    assert key.doc.endswith(".")
    assert key.words
    assert not (key.refused and key.idle)
    if key.default is not None and not key.refused:
        assert key.read(key.default) == key.default
    assert set(key.fields) <= {field.name for field in dataclasses.fields(TrainingArguments)}


@needs("accelerate", "1.10", "older ones have keys that are gone")
def test_the_peers_file_has_no_key_that_is_unknown() -> None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    own = {"compute_environment", "mpirun_config", *SECTIONS, *TOP_LEVEL}
    for kind in (ClusterConfig, SageMakerConfig):
        assert {field.name for field in dataclasses.fields(kind)} - own == set()


@needs("accelerate", "1.10", "older ones have no ParallelismConfig")
def test_the_peers_plugin_has_no_field_that_is_unknown() -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    # What the plugin's own file turns into plain words, or refuses.
    objects = {"mixed_precision_policy", "state_dict_config", "optim_state_dict_config", "param_init_fn"}
    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert fields - objects - {"kwargs"} - set(SECTIONS["fsdp_config"]) == set()
    sizes = {field.name for field in dataclasses.fields(ParallelismConfig)}
    assert {name for name in sizes if not name.startswith("_")} - set(SECTIONS["parallelism_config"]) <= {
        "device_mesh"
    }


def test_groups_are_used() -> None:
    assert {key.family for key in (*KEYS.values(), *rows_loop.LOOP)} == set(FAMILIES)
