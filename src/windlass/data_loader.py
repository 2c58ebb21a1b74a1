"""Names that scripts import from here: loaders of several processes (`windlass.data`).

A prepared loader shares its batches out by itself, whatever it reads from, so one class stands for both kinds that
scripts tell apart.
"""

from windlass.data.prepared_loader import PreparedLoader
from windlass.data.samplers import SeedableRandomSampler
from windlass.data.shards import BatchSamplerShard, IterableDatasetShard
from windlass.data.skip import SkipBatchSampler, skip_first_batches

DataLoaderShard = PreparedLoader
DataLoaderDispatcher = PreparedLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "skip_first_batches",
]
