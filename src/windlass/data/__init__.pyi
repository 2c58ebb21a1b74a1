from windlass.compat.script_helpers import (
    DataCollator as DataCollator, DataCollatorMixin as DataCollatorMixin, InputDataClass as InputDataClass,
    numpy_default_data_collator as numpy_default_data_collator,
    pad_without_fast_tokenizer_warning as pad_without_fast_tokenizer_warning, to_numpy as to_numpy,
    torch_default_data_collator as torch_default_data_collator,
)
from windlass.data.collate_pad import (
    DataCollatorForMultipleChoice as DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq as DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification as DataCollatorForTokenClassification,
    DataCollatorWithPadding as DataCollatorWithPadding, DefaultDataCollator as DefaultDataCollator,
    default_data_collator as default_data_collator,
)
from windlass.data.collate_flatten import DataCollatorWithFlattening as DataCollatorWithFlattening
from windlass.data.collate_mlm import (
    DataCollatorForLanguageModeling as DataCollatorForLanguageModeling,
    DataCollatorForPermutationLanguageModeling as DataCollatorForPermutationLanguageModeling,
)
