"""The arguments of a run by topic; `TrainingArguments` inherits from all sections."""
