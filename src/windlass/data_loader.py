"""Names that scripts import from here: loaders of several processes (`windlass.data`).

A prepared loader shares its batches out by itself, whatever it reads from, so one class stands for both kinds that
scripts tell apart.
"""

from typing import NoReturn

from windlass.data.prepared_loader import PreparedLoader
from windlass.data.samplers import SeedableRandomSampler
from windlass.data.skip import SkipBatchSampler, skip_first_batches

DataLoaderShard = PreparedLoader
DataLoaderDispatcher = PreparedLoader

__all__ = [
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "skip_first_batches",
]


def __getattr__(name: str) -> NoReturn:
    if name in ("BatchSamplerShard", "IterableDatasetShard"):
        raise ImportError(
            f"windlass.data_loader has no {name}: loaders share their batches out when they are prepared; "
            "call accelerator.prepare(loader)"
        )
    raise AttributeError(f"module 'windlass.data_loader' has no attribute {name!r}")
