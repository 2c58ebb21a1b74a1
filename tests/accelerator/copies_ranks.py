"""One rank of a job that copies its prepared loaders, and constructs a dispatcher."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from tests.data.cases import Numbers
from torch.utils.data import DataLoader

from windlass import Accelerator
from windlass.config.plugins import DataLoaderConfiguration
from windlass.data_loader import DataLoaderDispatcher, SkipDataLoader


def values(loader: Any) -> list[Any]:
    return [(batch.tolist(), loader.samples_everywhere) for batch in loader]


def main() -> None:
    for dispatch in (False, True):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        for make in (DataLoader, SkipDataLoader):
            loader = accelerator.prepare(make(Numbers(10), batch_size=2))
            copies = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
            expected = values(loader)
            assert sum(count for _, count in expected) == 10
            assert all(values(other) == expected for other in copies)
    rank = accelerator.process_index
    assert [batch for batch, _ in values(DataLoaderDispatcher(Numbers(8), batch_size=2))] == [
        [2 * rank, 2 * rank + 1],
        [4 + 2 * rank, 5 + 2 * rank],
    ]
    print("the copies are right")


if __name__ == "__main__":
    main()
