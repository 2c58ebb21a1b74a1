"""What a model is fed with. Scripts import collators from here; they are loaded when they are first asked for."""

from windlass.core.lazy import loader_of, reverse

# Strings: what lies on higher floors is not imported by this room.
_HOMES = {
    "windlass.data.collate_default": ("DefaultDataCollator", "default_data_collator"),
    "windlass.data.collate_flatten": ("DataCollatorWithFlattening",),
    "windlass.data.collate_mlm": ("DataCollatorForLanguageModeling",),
    "windlass.data.collate_pad": (
        "DataCollatorForMultipleChoice", "DataCollatorForSeq2Seq", "DataCollatorForTokenClassification",
        "DataCollatorWithPadding",
    ),
    "windlass.data.collate_permutation": ("DataCollatorForPermutationLanguageModeling",),
    "windlass.compat.script_helpers": (
        "DataCollator", "DataCollatorMixin", "InputDataClass", "numpy_default_data_collator",
        "pad_without_fast_tokenizer_warning", "to_numpy", "torch_default_data_collator",
    ),
}  # fmt: skip
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES)
__all__ = sorted(_NAMES)
