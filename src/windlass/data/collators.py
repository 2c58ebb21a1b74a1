"""All collators under the names that scripts know."""

from windlass.data.collate_default import DefaultDataCollator, default_data_collator
from windlass.data.collate_flatten import DataCollatorWithFlattening
from windlass.data.collate_mlm import DataCollatorForLanguageModeling
from windlass.data.collate_pad import (
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)
from windlass.data.collate_permutation import DataCollatorForPermutationLanguageModeling

__all__ = [
    "DataCollatorForLanguageModeling",
    "DataCollatorForMultipleChoice",
    "DataCollatorForPermutationLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "default_data_collator",
]
