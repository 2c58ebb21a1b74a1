"""The arguments by topic. Each section is a dataclass mixin; `TrainingArguments` is all of them."""
