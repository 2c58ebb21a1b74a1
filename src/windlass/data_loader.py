"""Re-exports of the old library: loaders of several processes (`windlass.data`).

A prepared loader deals its batches to the ranks whatever it reads from, so one class replaces all of the old library;
`windlass.compat.loaders` has those that scripts construct.
"""

from windlass.compat.loaders import DataLoaderDispatcher as DataLoaderDispatcher
from windlass.compat.loaders import DataLoaderShard as DataLoaderShard
from windlass.compat.loaders import DataLoaderStateMixin as DataLoaderStateMixin
from windlass.compat.loaders import SkipDataLoader as SkipDataLoader
from windlass.compat.loaders import get_sampler as get_sampler
from windlass.compat.loaders import prepare_data_loader as prepare_data_loader
from windlass.compat.refused_names import WHY
from windlass.core.lazy import loader_of
from windlass.data.samplers import SeedableRandomSampler as SeedableRandomSampler
from windlass.data.shards import BatchSamplerShard as BatchSamplerShard
from windlass.data.shards import IterableDatasetShard as IterableDatasetShard
from windlass.data.skip import SkipBatchSampler as SkipBatchSampler
from windlass.data.skip import skip_first_batches as skip_first_batches

__getattr__ = loader_of(__name__, {}, WHY)
