"""Reader of the weights in folders that DeepSpeed wrote.

    latest                                           the newest tag, which names one of the folders beside it
    TAG/mp_rank_00_model_states.pt                   up to stage 2: all tensors in the precision of the forwards
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt    stage 3: buffers, and rank R's parts of frozen parameters
    TAG/*zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's parts of the fp32 values, one flat tensor for each group

Parameters have fp32 values where the optimizer kept some, and those of the forwards otherwise. Up to stage 2 the ranks
divide each group of the optimizer, at stage 3 each parameter; the layout is that of `deepspeed/utils/zero_to_fp32.py`
(0.19). The files are of `torch.save`; of objects in them nothing is created (see `torch_reader`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import Shaped, TensorSource, empty_host
from windlass.compat.readers.torch_file import StoredTensor, TorchFile, open_torch_file
from windlass.core.errors import CheckpointError
from windlass.dist.sharded import Part

LATEST = "latest"
WHOLE, OF_RANK = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_OTHER_LAYOUT = re.compile(
    r"mp_rank_(?!00)\d+_.*|.*_mp_rank_(?!00)\d+_.*|layer_.*\.pt|.*expert.*\.pt|expp_.*\.pt"
)
_TAG = re.compile(r"[^/\\\0]{1,200}")


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements of a flat tensor in a file."""

    file: TorchFile
    tensor: StoredTensor
    start: int
    count: int


_Flat = tuple[TorchFile, StoredTensor]
_States = Sequence[tuple[TorchFile, Mapping[str, Any]]]


class DeepSpeedWeights(TensorSource):
    """The tensors of a model, put together from the parts of all ranks when they are read.

    Attributes:
        aliases: tied name -> the name that it is stored under.
    """

    def __init__(self, folder: Path, files: Files, opened: ExitStack) -> None:
        self._folder, self._files, self._opened = folder, files, opened
        self._check_layout()
        model_files = self._model_files()
        self._models = [self._content(file) for file in model_files]
        self._tensors: dict[str, tuple[Shaped, Sequence[_Run]]] = {}
        self._same_memory: dict[str, str] = {}  # a name -> the first with the same stored tensor
        states = self._optimizer_states()
        # One file of model states may also be of stage 3, which a single rank wrote.
        if len(model_files) == 1 and not any("fp32_flat_groups" in state for _, state in states):
            self._add_whole(model_files[0], states)
        else:
            self._add_divided(model_files, states)
        tied = self._map(self._models[0].get("shared_params") or {}, "shared_params")
        if not all(isinstance(kept, str) for kept in tied.values()):
            raise self._error("shared_params is not a map of names to names")
        shared = {**self._same_memory, **tied}
        self.aliases = {name: kept for name, kept in shared.items() if name != kept and kept in self._tensors}
        for name in self.aliases:
            self._tensors.pop(name, None)
        super().__init__({name: shaped for name, (shaped, _) in self._tensors.items()})

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        """A tensor, put together whole, or this part of it."""
        shaped, runs = self._tensors[name]
        flat = empty_host((math.prod(shaped.shape),), shaped.dtype, f"{self._folder}: tensor {name[:100]!r}")
        done = 0
        for run in runs:
            flat[done : done + run.count] = run.file.read_run(run.tensor, run.start, run.count)
            done += run.count
        tensor = flat.reshape(shaped.shape)
        return tensor if wanted is None else wanted.of(tensor)

    # --- files --------------------------------------------------------------------------------------------------------

    def _error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._folder}, which DeepSpeed wrote, cannot be read: {why}")

    def _names(self) -> list[str]:
        return sorted(entry.name for entry in self._folder.iterdir())

    def _check_layout(self) -> None:
        other = next((name for name in self._names() if _OTHER_LAYOUT.fullmatch(name)), None)
        if other is not None:
            raise self._error(
                f"{other} is a part of a model that was divided by tensor, pipeline or expert parallelism. Convert it "
                "with DeepSpeed's own tools, and load what they write"
            )

    def _open(self, name: str) -> TorchFile:
        if not (self._folder / name).is_file():
            raise self._error(f"{name} is missing")
        return self._opened.enter_context(open_torch_file(self._folder / name, self._files, objects=True))

    def _content(self, file: TorchFile) -> Mapping[str, Any]:
        return self._map(file.tree, "its content")

    def _map(self, value: Any, what: str) -> Mapping[str, Any]:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise self._error(f"{what} is not a map of names")
        return value

    def _model_files(self) -> list[TorchFile]:
        if (self._folder / WHOLE).exists():
            return [self._open(WHOLE)]
        return [self._open(OF_RANK.format(rank)) for rank in range(len(self._of_ranks(_MODEL, "model")))]

    def _of_ranks(self, pattern: re.Pattern[str], what: str) -> list[str]:
        """The files of ranks 0, 1, ...; checked to be without a gap."""
        found = {int(match[1]): name for name in self._names() if (match := pattern.fullmatch(name))}
        ranks = sorted(found)
        # As many names as files, whatever number a name has.
        missing = next((rank for rank in range(len(ranks)) if ranks[rank] != rank), None if ranks else 0)
        if missing is not None:
            raise self._error(f"the {what} states of rank {missing} are missing")
        return [found[rank] for rank in ranks]

    def _optimizer_states(self) -> _States:
        """The state of each rank's optimizer under ZeRO; none at stage 0."""
        if not self._models[0].get("param_shapes"):
            return []
        key = "optimizer_state_dict"
        files = [self._open(name) for name in self._of_ranks(_OPTIMIZER, "optimizer")]
        states = [(file, self._map(self._content(file).get(key), key)) for file in files]
        counts = states[0][1].get("partition_count")
        ranks = counts[0] if isinstance(counts, list) and counts else counts
        if isinstance(counts, list) and any(count != ranks for count in counts):
            raise self._error("its groups were divided among different numbers of ranks (experts)")
        if type(ranks) is not int:
            raise self._error("the number of ranks that wrote it is missing (partition_count)")
        if ranks != len(states):
            raise self._error(f"{ranks} ranks wrote it, and there are optimizer states of {len(states)}")
        return states

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _add_whole(self, file: TorchFile, states: _States) -> None:
        """Up to stage 2: the values of the forwards, and in their place the fp32 ones of the groups."""
        first: dict[StoredTensor, str] = {}
        for name, tensor in self._map(self._models[0].get("module"), "module").items():
            if isinstance(tensor, StoredTensor):
                self._add_stored(name, tensor, file)
                if tensor.nbytes:
                    self._same_memory[name] = first.setdefault(tensor, name)
        if not states:
            return
        groups = [self._flat(file, state, "single_partition_of_fp32_groups") for file, state in states]
        shapes = self._shapes()
        paddings = states[0][1].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
        listed = isinstance(paddings, list) and len(paddings) == len(shapes)
        if not listed or any(len(ranks) != len(shapes) for ranks in groups):
            raise self._error("its ranks have different numbers of groups")
        for number, group in enumerate(shapes):
            flat = [ranks[number] for ranks in groups]
            self._add_group(group, paddings[number], flat)

    def _add_group(self, group: Mapping[str, tuple[int, ...]], paddings: Any, flat: Sequence[_Flat]) -> None:
        """Parameters one behind another, in the flat tensors of all ranks one behind another."""
        fits = isinstance(paddings, list) and len(paddings) == len(group)
        if not fits or not all(type(padding) is int and padding >= 0 for padding in paddings):
            raise self._error("its paddings do not fit its parameters")
        begin = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            self._add(name, shape, _between(flat, begin, math.prod(shape)))
            begin += math.prod(shape) + padding
        align = 2 * len(flat)  # DeepSpeed pads each group to a multiple of it
        self._check_used(-(-begin // align), -(-_elements(flat) // align))

    def _add_divided(self, model_files: Sequence[TorchFile], states: _States) -> None:
        """Stage 3: each parameter is divided into as many runs as ranks, the last ones padded."""
        if len(model_files) != len(states):
            found = f"model states of {len(model_files)} ranks, and optimizer states of {len(states)}"
            raise self._error(f"there are {found}")
        module = self._map(self._models[0].get("module"), "module")
        names = self._models[0].get("buffer_names") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._error("buffer_names is not a list of names")
        for name in names:
            if isinstance(module.get(name), StoredTensor):
                self._add_stored(name, module[name], model_files[0])
        frozen = self._map(self._models[0].get("frozen_param_shapes") or {}, "frozen_param_shapes")
        for name, shape in frozen.items():
            parts = [
                self._map(state.get("frozen_param_fragments"), "fragments").get(name)
                for state in self._models
            ]
            self._add_padded(
                name,
                self._shape(shape, name),
                [
                    _Run(file, part, 0, math.prod(part.shape))
                    for file, part in zip(model_files, parts, strict=True)
                    if isinstance(part, StoredTensor)
                ],
            )
        flat = [self._flat(file, state, "fp32_flat_groups") for file, state in states]
        begin = 0
        for group in self._shapes():
            for name, shape in group.items():
                # Rounded up: DeepSpeed pads each parameter to as many elements on all ranks.
                length = -(-math.prod(shape) // len(states))
                self._add_padded(
                    name, shape, [run for of_rank in flat for run in _between(of_rank, begin, length)]
                )
                begin += length
        for of_rank in flat:
            self._check_used(begin, _elements(of_rank))

    def _check_used(self, used: int, there: int) -> None:
        """Check that parameters and paddings fill the flat tensors: with other paddings all values would be shifted."""
        if used != there:
            raise self._error("the shapes and paddings of its parameters do not fill its flat tensors")

    def _add_padded(self, name: str, shape: tuple[int, ...], runs: Sequence[_Run]) -> None:
        """Add a tensor of which each rank has runs, one behind another, and padding at the end."""
        left, found = math.prod(shape), list[_Run]()
        for run in runs:
            if left:
                found.append(replace(run, count=min(run.count, left)))
                left -= found[-1].count
        self._add(name, shape, found)

    def _add_stored(self, name: str, tensor: StoredTensor, file: TorchFile) -> None:
        self._add(name, tensor.shape, [_Run(file, tensor, 0, math.prod(tensor.shape))])

    def _add(self, name: str, shape: tuple[int, ...], runs: Sequence[_Run]) -> None:
        if sum(run.count for run in runs) != math.prod(shape):
            raise self._error(f"its ranks do not hold all elements of {name[:100]!r}")
        dtype = runs[0].tensor.dtype if runs else torch.float32
        self._tensors[name] = Shaped(dtype, shape), runs

    def _flat(self, file: TorchFile, state: Mapping[str, Any], key: str) -> list[_Flat]:
        found = state.get(key)
        if not isinstance(found, list) or not all(isinstance(tensor, StoredTensor) for tensor in found):
            raise self._error(f"the optimizer states of a rank hold no {key}")
        return [(file, tensor) for tensor in found]

    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of the trained parameters by name, of each group of the optimizer."""
        groups = self._models[0].get("param_shapes")
        if not isinstance(groups, list):
            raise self._error("the names and shapes of its parameters are missing (param_shapes)")
        return [
            {name: self._shape(shape, name) for name, shape in self._map(group, "param_shapes").items()}
            for group in groups
        ]

    def _shape(self, shape: Any, name: str) -> tuple[int, ...]:
        if not isinstance(shape, tuple) or not all(
            type(size) is int and 0 <= size < 1 << 62 for size in shape
        ):
            raise self._error(f"the shape of {name[:100]!r} is malformed")
        return shape


def _elements(flat: Sequence[_Flat]) -> int:
    return sum(math.prod(tensor.shape) for _, tensor in flat)


def _between(flat: Sequence[_Flat], begin: int, length: int) -> list[_Run]:
    """The elements from `begin` on of flat tensors that lie one behind another."""
    found, position = [], 0
    for file, tensor in flat:
        size = math.prod(tensor.shape)
        first, last = max(begin, position), min(begin + length, position + size)
        if first < last:
            found.append(_Run(file, tensor, first - position, last - first))
        position += size
    return found


@contextmanager
def open_weights(path: Path, files: Files) -> Iterator[DeepSpeedWeights]:
    """Open the weights of a folder by its file `latest`, or by the model states in the folder of a tag. Raises
    CheckpointError if files are missing, damaged, or of a layout that is not read.
    """
    folder = path.parent
    if path.name == LATEST:
        with files.reading(path) as file:
            tag = file.read(1000).decode("utf-8", "replace").strip()
        if not _TAG.fullmatch(tag) or not (folder / tag).is_dir():
            raise CheckpointError(
                f"{path} names {tag[:100]!r}, which is not a folder beside it: the checkpoint is incomplete"
            )
        folder = folder / tag
    with ExitStack() as opened:
        yield DeepSpeedWeights(folder, files, opened)
