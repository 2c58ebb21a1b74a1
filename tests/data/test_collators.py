"""Every collator gives what the one of the same name in transformers gives, draws included."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.versions import with_pinned

from windlass import data as ours
from windlass.core.errors import DataError
from windlass.data.collate_pad import auto_collate

theirs = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##a", "##b", "##c"]


@pytest.fixture(params=["right", "left"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    pair = [("[CLS]", 2), ("[SEP]", 3)]
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=pair
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return theirs.PreTrainedTokenizerFast(tokenizer_object=inner, padding_side=request.param, **special)


def texts(count: int = 6) -> list[str]:
    draw = random.Random(3)
    words = ["a", "bab", "cc", "d", "eabc", "f", "g", "hc"]
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(count)]


def seeded(call: Any, *args: Any, **kwargs: Any) -> Any:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return call(*args, **kwargs)


def assert_same(mine: Any, other: Any) -> None:
    mine, other = dict(mine), dict(other)
    assert list(mine) == list(other)
    for name, value in other.items():
        assert type(mine[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert mine[name].dtype == value.dtype, name
            assert torch.equal(mine[name], value), name
        elif isinstance(value, np.ndarray):
            assert mine[name].dtype == value.dtype, name
            np.testing.assert_array_equal(mine[name], value)
        else:
            assert mine[name] == value, name


def both(name: str, **options: Any) -> tuple[Any, Any]:
    return getattr(ours, name)(**options), getattr(theirs, name)(**options)


def compare(
    name: str, features: list[Any], frameworks: tuple[str, ...] = ("pt", "np"), **options: Any
) -> None:
    """Both collators on the same features, twice in a row (a stateful generator must go on alike)."""
    for framework in frameworks:
        mine, other = both(name, return_tensors=framework, **options)
        for _ in range(2):
            given = [dict(f) if hasattr(f, "keys") else list(f) for f in features]
            again = [dict(f) if hasattr(f, "keys") else list(f) for f in features]
            assert_same(seeded(mine, given), seeded(other, again))


def default_cases() -> Iterator[list[Any]]:
    yield [{"label": i, "x": [i, 2], "text": "no", "none": None} for i in range(3)]
    yield [{"label": i / 2, "x": np.arange(3) + i} for i in range(3)]
    yield [{"label_ids": [i, 1], "x": torch.ones(2) * i} for i in range(3)]
    yield [{"label_ids": [i / 2, 1.0], "x": i} for i in range(3)]
    yield [{"label": torch.tensor(i), "y": i > 1} for i in range(3)]
    yield [{"label": np.int64(i), "x": 0.5} for i in range(3)]


@pytest.mark.parametrize("features", list(default_cases()))
@with_pinned("transformers")
def test_default(features: list[Any]) -> None:
    assert_same(ours.default_data_collator(features), theirs.default_data_collator(features))
    mine, other = both("DefaultDataCollator")
    assert_same(mine(features), other(features))
    if not any(isinstance(value, torch.Tensor) for value in features[0].values()):
        assert_same(mine(features, return_tensors="np"), other(features, return_tensors="np"))


@pytest.mark.parametrize(
    "values", [[torch.zeros(4), torch.zeros(5)], [[1, 2], [1]], [np.zeros(2), np.zeros(3)]]
)
def test_default_names_the_column_that_is_ragged(values: list[Any]) -> None:
    with pytest.raises(DataError, match=r"column 'x' .*shapes \[\d\] and \[\d\].*data_collator"):
        ours.default_data_collator([{"x": value, "fits": 1} for value in values])


@pytest.mark.parametrize("name", ["label", "label_ids"])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_targets_of_which_the_first_is_whole_keep_their_fractions(name: str, framework: str) -> None:
    # JSON writes 1 for 1.0, and the first sample alone would make class numbers of all.
    targets: list[Any] = [1, 2.5] if name == "label" else [[1, 2], [0, 2.5]]
    batch = ours.default_data_collator([{name: value} for value in targets], framework)
    assert batch["labels"].tolist() == targets


def test_default_names_a_column_of_ragged_nests() -> None:
    with pytest.raises(DataError, match=r"column 'x' cannot be stacked"):
        ours.default_data_collator([{"x": [[1], [1, 2]]}] * 2)


def test_default_takes_objects_with_attributes() -> None:
    point = dataclasses.make_dataclass("Point", [("label", int), ("x", list)])
    features = [point(i, [i, i]) for i in range(3)]
    assert_same(ours.default_data_collator(features), theirs.default_data_collator(features))
    assert_same(auto_collate(features), theirs.default_data_collator(features))


def test_values_of_classes_with_attributes_are_collated_as_values() -> None:
    class Values(tuple[int, ...]):
        pass

    class Image(torch.Tensor):
        pass

    assert torch.equal(auto_collate([torch.ones(2).as_subclass(Image)] * 3), torch.ones(3, 2))
    assert [part.tolist() for part in auto_collate([Values((1, 2)), Values((3, 4))])] == [[1, 3], [2, 4]]


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'tf'.*'pt'"):
        ours.DefaultDataCollator("tf")([{"x": 1}])


@pytest.mark.parametrize(
    "options", [{}, {"pad_to_multiple_of": 8}, {"padding": "max_length", "max_length": 24}]
)
class TestPadding:
    @pytest.mark.parametrize("label", ["label", "label_ids"])
    def test_with_padding(self, tokenizer: Any, options: dict[str, Any], label: str) -> None:
        features = [{**tokenizer(text), label: i} for i, text in enumerate(texts())]
        compare("DataCollatorWithPadding", features, tokenizer=tokenizer, **options)

    @pytest.mark.parametrize("label", ["label", "labels", None])
    def test_token_classification(self, tokenizer: Any, options: dict[str, Any], label: str | None) -> None:
        features = [dict(tokenizer(text)) for text in texts()]
        for feature in features:
            if label:
                feature[label] = list(range(len(feature["input_ids"])))
        compare("DataCollatorForTokenClassification", features, tokenizer=tokenizer, **options)

    def test_multiple_choice(self, tokenizer: Any, options: dict[str, Any]) -> None:
        features = [{**tokenizer(texts(8)[2 * i : 2 * i + 2]), "label": i % 2} for i in range(4)]
        compare("DataCollatorForMultipleChoice", features, ("pt",), tokenizer=tokenizer, **options)

    @pytest.mark.parametrize("kind", [list, np.array, None])
    def test_seq2seq(self, tokenizer: Any, options: dict[str, Any], kind: Any) -> None:
        class Model:
            def prepare_decoder_input_ids_from_labels(self, labels: Any) -> Any:
                return labels * 2

        features = [dict(tokenizer(text)) for text in texts()]
        for i, feature in enumerate(features):
            feature["labels"] = kind(range(i + 2)) if kind is list else kind and kind(list(range(i + 2)))
        compare("DataCollatorForSeq2Seq", features, tokenizer=tokenizer, model=Model(), **options)


def test_seq2seq_without_padding(tokenizer: Any) -> None:
    features = [{**tokenizer("a bab"), "labels": [1, i, 3]} for i in range(3)]
    compare("DataCollatorForSeq2Seq", features, tokenizer=tokenizer, padding=False)


@pytest.mark.parametrize(
    "options",
    [
        {"mlm": False},
        {"mlm": False, "pad_to_multiple_of": 8},
        {},
        {"mlm_probability": 0.6, "mask_replace_prob": 0.3, "random_replace_prob": 0.5},
        {"mlm_probability": 0.6, "mask_replace_prob": 1, "random_replace_prob": 0},
        {"mlm_probability": 0.5, "seed": 7},
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_language_modeling(tokenizer: Any, options: dict[str, Any], special: bool) -> None:
    features = [tokenizer(text, return_special_tokens_mask=special) for text in texts()]
    compare("DataCollatorForLanguageModeling", features, tokenizer=tokenizer, **options)
    plain = [feature["input_ids"] for feature in features]
    compare("DataCollatorForLanguageModeling", plain, tokenizer=tokenizer, **options)


@pytest.mark.filterwarnings("ignore:Random token")
def test_whole_words(tokenizer: Any) -> None:
    wanted = {"return_special_tokens_mask": True, "return_offsets_mapping": True}
    wanted |= {"padding": "max_length", "max_length": 24}  # `pad` leaves offsets as they are
    features = [tokenizer(text, **wanted) for text in texts()]
    options = {
        "whole_word_mask": True,
        "mlm_probability": 0.5,
        "mask_replace_prob": 1,
        "random_replace_prob": 0,
    }
    compare("DataCollatorForLanguageModeling", features, tokenizer=tokenizer, **options)
    with pytest.raises(ValueError, match="offset_mapping"):
        ours.DataCollatorForLanguageModeling(tokenizer, whole_word_mask=True)([tokenizer("a")])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mlm_probability": 1.5}, "mlm_probability=1.5"),
        ({"mlm_probability": None}, "mlm_probability=None"),
        ({"mask_replace_prob": -1}, "mask_replace_prob=-1"),
        ({"random_replace_prob": 0.5}, "must not exceed 1"),
        ({"mlm": False, "whole_word_mask": True}, "needs mlm=True"),
    ],
)
def test_impossible_masking_is_refused(tokenizer: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ours.DataCollatorForLanguageModeling(tokenizer, **options)


def test_masking_and_padding_need_their_tokens() -> None:
    class Bare:
        mask_token = pad_token = pad_token_id = None
        padding_side = "right"

    with pytest.raises(ValueError, match="mlm=False"):
        ours.DataCollatorForLanguageModeling(Bare())
    with pytest.raises(ValueError, match="has no pad token"):
        ours.DataCollatorForLanguageModeling(Bare(), mlm=False)([[1], [1, 2]])
    assert ours.DataCollatorForLanguageModeling(Bare(), mlm=False)([[1], [2]])["labels"].tolist() == [
        [1],
        [2],
    ]


def even(tokenizer: Any) -> list[dict[str, Any]]:
    ids = [tokenizer(text)["input_ids"] for text in texts()]
    return [{"input_ids": row[: len(row) // 2 * 2]} for row in ids]


def test_permutation(tokenizer: Any) -> None:
    compare("DataCollatorForPermutationLanguageModeling", even(tokenizer), ("pt",), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="even number"):
        ours.DataCollatorForPermutationLanguageModeling(tokenizer)([[5, 6, 7]])
    for options in ({"plm_probability": 0}, {"plm_probability": 1.5}, {"max_span_length": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.*: "):
            ours.DataCollatorForPermutationLanguageModeling(tokenizer, **options)


def test_permutation_in_numpy_follows_the_same_rules(tokenizer: Any) -> None:
    """Not the same draws: there, a span may be one token longer than the limit."""
    options = {"plm_probability": 0.5, "max_span_length": 3, "return_tensors": "np"}
    mine, other = both("DataCollatorForPermutationLanguageModeling", tokenizer=tokenizer, **options)
    features = even(tokenizer)
    batch, model = mine(features), other(features)
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        k: (v.shape, v.dtype) for k, v in model.items()
    }
    hidden = batch["labels"] != -100
    assert hidden.any()
    assert (batch["input_ids"][hidden] == tokenizer.mask_token_id).all()
    assert (batch["perm_mask"].any(axis=1) == hidden).all(), (
        "only hidden tokens are unseen, and each by itself at least"
    )
    assert (batch["target_mapping"] == np.eye(hidden.shape[1])).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"separator_id": -7, "position_ids_start": 2},
        {"return_position_ids": False},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    ],
)
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_flattening(options: dict[str, Any], labels: bool, kind: Any) -> None:
    rows = [[1, 2, 3], [4], [5, 6]]
    features = [{"input_ids": kind(r), **({"labels": kind([9, *r[1:]])} if labels else {})} for r in rows]
    for framework in ("pt", "np"):
        mine, other = both("DataCollatorWithFlattening", return_tensors=framework, **options)
        assert_same(mine(features), other(features))
        assert_same(mine(features, separator_id=-3), other(features, separator_id=-3))
