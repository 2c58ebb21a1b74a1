"""The tokenizer of a run: loaded by name, taken from the resumed checkpoint, or trained on the training text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from windlass.cli.schema import Recipe, TokenizerTraining
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.optional import require

END_OF_TEXT = "<|endoftext|>"
PAD, UNKNOWN, CLASS, SEPARATOR, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
CLASSIFIER_TOKENS = {
    "pad_token": PAD, "unk_token": UNKNOWN, "cls_token": CLASS, "sep_token": SEPARATOR, "mask_token": MASK,
}  # fmt: skip
TRANSLATOR_TOKENS = {"pad_token": PAD, "unk_token": UNKNOWN, "eos_token": END_OF_TEXT}
WRITER_TOKENS = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
SPECIAL_TOKENS = {
    "causal-lm": WRITER_TOKENS,
    "sft": WRITER_TOKENS,
    "classification": CLASSIFIER_TOKENS,
    "masked-lm": CLASSIFIER_TOKENS,
    "seq2seq": TRANSLATOR_TOKENS,
}
# What is put around a text, and around a pair of them.
TEMPLATES = {
    "classification": (f"{CLASS} $A {SEPARATOR}", f"{CLASS} $A {SEPARATOR} $B:1 {SEPARATOR}:1"),
    "seq2seq": (f"$A {END_OF_TEXT}", f"$A $B:1 {END_OF_TEXT}:1"),
}


def build_tokenizer(recipe: Recipe, texts: Iterable[str], saved: Path | None = None) -> Any:
    """Return a `PreTrainedTokenizerFast` for `recipe`.

    Args:
        texts: the *training* text only: a tokenizer trained on the evaluation text lowers its loss. Read only if one
            is trained.
        saved: checkpoint with the tokenizer of this run, used instead of training a new one.
    """
    transformers = require("transformers", "run a recipe")
    training = recipe.tokenizer.train
    if recipe.task == "sft":
        training = _of_base(recipe)
    if training is not None and saved is not None:
        return transformers.AutoTokenizer.from_pretrained(str(saved))
    if training is not None:
        return _trained(training, list(texts), recipe.task)
    name = recipe.tokenizer.name or recipe.model.name
    assert name is not None  # `checks.py` asks for one of the two
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer {name!r} cannot be loaded: {error}") from error
    return _with_padding(tokenizer)


def _of_base(recipe: Recipe) -> TokenizerTraining | None:
    """The new tokenizer of a base that is trained first. A model that is named has its own, and a ready recipe, whose
    sections on the base apply without a name, can be used on it.
    """
    if recipe.model.name is not None or recipe.tokenizer.name is not None:
        return None
    return recipe.tokenizer.train or TokenizerTraining()


def _with_padding(tokenizer: Any) -> Any:
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            fix = "has neither a pad nor an end token"
            raise ConfigError(Problem("tokenizer.name", tokenizer.name_or_path, fix))
        tokenizer.pad_token = tokenizer.eos_token  # masked as padding, so it has no loss
    return tokenizer


def _trained(training: TokenizerTraining, texts: Sequence[str], task: str) -> Any:
    algorithm = training.algorithm
    if algorithm == "auto":
        algorithm = "bpe" if task in ("causal-lm", "seq2seq", "sft") else "wordpiece"
    special = SPECIAL_TOKENS[task]
    specials = list(dict.fromkeys(special.values()))
    if algorithm == "bpe":
        tokenizer = _byte_level_bpe(texts, training.vocab_size, specials)
    else:
        tokenizer = _wordpiece(texts, training, specials)
    if task in TEMPLATES:
        _add_special_tokens(tokenizer, *TEMPLATES[task])
    transformers = require("transformers", "run a recipe")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )


def _byte_level_bpe(texts: Sequence[str], vocab_size: int, specials: list[str]) -> Any:
    """Byte-pair encoding over bytes (Sennrich et al. 2016; Radford et al. 2019), which encodes any text."""
    tk = require("tokenizers", "train a tokenizer")
    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _wordpiece(texts: Sequence[str], training: TokenizerTraining, specials: list[str]) -> Any:
    """WordPiece over words separated by blanks and punctuation (Devlin et al. 2019)."""
    tk = require("tokenizers", "train a tokenizer")
    if UNKNOWN not in specials:
        specials = [*specials, UNKNOWN]
    tokenizer = tk.Tokenizer(tk.models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = tk.normalizers.BertNormalizer(lowercase=training.lowercase)
    tokenizer.pre_tokenizer = tk.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tk.decoders.WordPiece()
    # The trainer numbers letters within words in the order of a hash table, and breaks ties by number, so vocabularies
    # would differ between runs and processes. As special tokens the letters have an order.
    trainer = tk.trainers.WordPieceTrainer(
        vocab_size=training.vocab_size,
        special_tokens=[*specials, *_letters_within_words(tokenizer, texts)],
        show_progress=False,
    )
    learnt = tk.Tokenizer(tk.models.WordPiece(unk_token=UNKNOWN))
    learnt.normalizer, learnt.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    learnt.train_from_iterator(texts, trainer)
    tokenizer.model = tk.models.WordPiece(learnt.get_vocab(), unk_token=UNKNOWN)
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _letters_within_words(tokenizer: Any, texts: Sequence[str]) -> list[str]:
    """Return the letters within words of `texts`, as WordPiece spells them; sorted."""
    letters: set[str] = set()
    for text in texts:
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)):
            letters.update(word[1:])
    return [f"##{letter}" for letter in sorted(letters)]


def _add_special_tokens(tokenizer: Any, single: str, pair: str) -> None:
    tk = require("tokenizers", "train a tokenizer")
    marks = dict.fromkeys(word.partition(":")[0] for word in pair.split() if not word.startswith("$"))
    ids = [(mark, tokenizer.token_to_id(mark)) for mark in marks]
    tokenizer.post_processor = tk.processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
