from __future__ import annotations

import pytest

from windlass import ConfigError, HfArgumentParser, Seq2SeqTrainingArguments


def test_flags_of_a_command_line() -> None:
    words = "--output_dir out --predict_with_generate --generation_num_beams 3 --generation_config folder --no_cuda"
    (args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(words.split())
    assert args.predict_with_generate
    assert (args.generation_num_beams, args.generation_max_length, args.generation_config) == (
        3,
        None,
        "folder",
    )
    assert args.use_cpu, "old names are accepted too"


def test_similar_lengths_together() -> None:
    assert Seq2SeqTrainingArguments("out", sortish_sampler=True).train_sampling_strategy == "group_by_length"
    args = Seq2SeqTrainingArguments("out")
    assert args.train_sampling_strategy == "random"
    args.sortish_sampler = True
    assert args.train_sampling_strategy == "group_by_length"
    assert Seq2SeqTrainingArguments(**args.to_dict()).to_dict() == args.to_dict()
    with pytest.raises(
        ConfigError, match=r"sortish_sampler=True: groups samples by length, which contradicts"
    ):
        Seq2SeqTrainingArguments("out", sortish_sampler=True, train_sampling_strategy="sequential")


def test_every_problem_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Seq2SeqTrainingArguments(
            "out", generation_num_beams=0, generation_max_length="long", generation_confg=1
        )
    fields = {problem.field for problem in caught.value.problems}
    assert fields == {"generation_num_beams", "generation_max_length", "generation_confg"}
