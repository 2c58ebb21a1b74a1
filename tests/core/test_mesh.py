"""The axes of a job's ranks, and the views that they make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.errors import ConfigError
from windlass.core.mesh import AXES, VIEWS, Mesh, View

sizes = st.integers(1, 3)
meshes = st.builds(
    Mesh,
    replicate=sizes,
    shard=sizes,
    expert=sizes,
    context=sizes,
    sequence=sizes,
    tensor=sizes,
    pipeline=sizes,
).filter(lambda mesh: mesh.size() <= 216)  # all axes may have two ranks


def test_data_axes_alone_make_one_view_of_all_and_models_of_one() -> None:
    mesh = Mesh(replicate=2, shard=3)
    assert {view: mesh.size(view) for view in VIEWS} == {
        "data": 6,
        "loss": 6,
        "expert": 1,
        "same_experts": 6,
        "context": 1,
        "ring": 1,
        "heads": 1,
        "tensor": 1,
        "pipeline": 1,
        "model": 1,
        "stage": 6,
        "all": 6,
    }
    assert mesh.parts("data") == mesh.parts("loss") == mesh.parts("all") == [(0, 1, 2, 3, 4, 5)]
    assert mesh.parts("model") == [(rank,) for rank in range(6)]
    assert [mesh.index("replicate", rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [mesh.index("shard", rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_place_of_a_rank_is_named_if_ranks_compute_together() -> None:
    assert Mesh(replicate=2, context=2, tensor=2).place(6) == "replicate 1, context 1, tensor 0"
    assert Mesh(replicate=2, shard=2).place(1) == ""


def test_neighbours_compute_one_model_with_parts_of_its_tensors() -> None:
    mesh = Mesh(replicate=2, tensor=2)
    assert mesh.parts("model") == [(0, 1), (2, 3)]
    assert mesh.parts("data") == mesh.parts("loss") == [(0, 2), (1, 3)]
    assert (mesh.ranks("data", 3), mesh.ranks("model", 3)) == ((1, 3), (2, 3))


def test_parts_of_a_sequence_have_different_targets_of_the_same_samples() -> None:
    mesh = Mesh(shard=2, context=2, tensor=2, pipeline=2)
    assert {view: mesh.size(view) for view in VIEWS} == {
        "data": 2,
        "loss": 4,
        "expert": 1,
        "same_experts": 4,
        "context": 2,
        "ring": 2,
        "heads": 1,
        "tensor": 2,
        "pipeline": 2,
        "model": 8,
        "stage": 8,
        "all": 16,
    }
    assert mesh.ranks("loss", 0) == (0, 2, 4, 6)
    assert mesh.ranks("data", 0) == (0, 4)
    assert mesh.ranks("model", 0) == (0, 1, 2, 3, 8, 9, 10, 11)


@given(meshes)
def test_every_view_divides_the_job_and_data_and_model_make_all_of_it(mesh: Mesh) -> None:
    everyone = list(range(mesh.size()))
    for view in VIEWS:
        parts = mesh.parts(view)
        assert sorted(rank for part in parts for rank in part) == everyone
        assert {len(part) for part in parts} == {mesh.size(view)}
        assert all(mesh.ranks(view, rank) == part for part in parts for rank in part)
    assert mesh.size("data") * mesh.size("model") == mesh.size()
    for rank in everyone:
        assert set(mesh.ranks("data", rank)) & set(mesh.ranks("model", rank)) == {rank}
        assert set(mesh.ranks("data", rank)) <= set(mesh.ranks("loss", rank))
    places = {tuple(mesh.index(axis, rank) for axis in AXES) for rank in everyone}
    assert len(places) == mesh.size()


def test_replicas_divide_the_ranks_with_data_and_change_no_view() -> None:
    mesh = Mesh(replicate=4, tensor=2)
    divided = mesh.with_replicas(2)
    assert divided == Mesh(replicate=2, shard=2, tensor=2)
    assert all(divided.parts(view) == mesh.parts(view) for view in VIEWS)
    with pytest.raises(ConfigError, match=r"dp_replicate_size=3: must divide the number of processes, 4"):
        mesh.with_replicas(3)


def test_neighbours_divide_experts_and_have_different_samples() -> None:
    mesh = Mesh(replicate=2, expert=2)
    assert mesh.parts("expert") == [(0, 1), (2, 3)]
    assert mesh.parts("same_experts") == [(0, 2), (1, 3)]
    assert mesh.parts("data") == mesh.parts("loss") == [(0, 1, 2, 3)]
    assert mesh.place(3) == "replicate 1, expert 1"
    assert mesh.with_replicas(1) == Mesh(shard=2, expert=2)
    with pytest.raises(
        ConfigError, match=r"dp_replicate_size=4: must divide the number of processes, 4, 2 to the exp"
    ):
        mesh.with_replicas(4)


def test_what_makes_no_mesh_is_refused_with_all_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match="must be at least 1") as found:
        Mesh(replicate=0, tensor=-1)
    assert [problem.field for problem in found.value.problems] == ["Mesh.replicate", "Mesh.tensor"]
    unknown: View = "batch"  # type: ignore[assignment]
    with pytest.raises(
        ConfigError,
        match="view='batch': must be one of data, loss, expert, same_experts, context, ring, heads",
    ):
        Mesh().ranks(unknown, 0)
