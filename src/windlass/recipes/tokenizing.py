"""The tokenizer of a run: loaded by name, taken from the resumed checkpoint, or trained on the training text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.config.arguments import TrainingArguments
from windlass.core.activity import looking_for
from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import at_home, is_url, loading
from windlass.core.optional import require
from windlass.recipes.schema import Recipe, TokenizerTraining

END_OF_TEXT = "<|endoftext|>"
PAD, UNKNOWN, CLASS, SEPARATOR, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
_READER_TOKENS = {
    "pad_token": PAD,
    "unk_token": UNKNOWN,
    "cls_token": CLASS,
    "sep_token": SEPARATOR,
    "mask_token": MASK,
}


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    algorithm: str  # the one for `tokenizer.train.algorithm: auto`
    special_tokens: Mapping[str, str]  # name of transformers -> token
    # Templates of the tokens around a text and around a pair of them; None: no tokens are added
    around: tuple[str, str] | None = None


WRITER = TokenizerKind("bpe", {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": END_OF_TEXT})
TRANSLATOR = TokenizerKind(
    "bpe",
    {"pad_token": PAD, "unk_token": UNKNOWN, "eos_token": END_OF_TEXT},
    (f"$A {END_OF_TEXT}", f"$A $B:1 {END_OF_TEXT}:1"),
)
READER = TokenizerKind("wordpiece", _READER_TOKENS)
CLASSIFIER = TokenizerKind(
    "wordpiece", _READER_TOKENS, (f"{CLASS} $A {SEPARATOR}", f"{CLASS} $A {SEPARATOR} $B:1 {SEPARATOR}:1")
)


def build_tokenizer(
    recipe: Recipe, kind: TokenizerKind, texts: Iterable[str], saved: Path | None = None
) -> Any:
    """Return a `PreTrainedTokenizerFast` for `recipe`.

    Args:
        kind: what is trained, if the recipe trains one.
        texts: the *training* text only: a tokenizer trained on the evaluation text lowers its loss. Read only if one
            is trained.
        saved: checkpoint with the tokenizer of this run, used instead of training a new one.
    """
    training = recipe.tokenizer.train
    if training is not None and saved is not None:
        return load_tokenizer(str(saved))
    if training is not None:
        return train_tokenizer(training, kind, list(texts))
    name = recipe.tokenizer.name or recipe.model.name
    assert name is not None  # `checks.py` asks for one of the two
    return _with_padding(load_tokenizer(name))


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a name or folder. Raises ModelError if it cannot be loaded."""
    transformers = require("transformers", "load a tokenizer")
    with loading("tokenizer", name), looking_for(name):
        return transformers.AutoTokenizer.from_pretrained(name)


def saved_tokenizer(args: TrainingArguments, resume: bool | str | None) -> Path | None:
    """Return the checkpoint with the tokenizer of a resumed run, or None if it has none. One in a remote folder is
    fetched, by one process of each machine.
    """
    if not resume:
        return None
    path = at_home(str(resume))
    if not isinstance(resume, str) or resume == "auto" or is_url(resume):
        is_remote = is_url(args.output_path) or is_url(str(resume))
        with args.main_process_first(desc="fetching the checkpoint") if is_remote else nullcontext():
            found = _checkpoint(args.output_path, str(resume))
        if found is None:
            return None
        path = found
    return path if (path / "tokenizer.json").is_file() else None


def _checkpoint(place: str, resume: str) -> Path | None:
    """The checkpoint at a URL, or else the newest one of a run."""
    from windlass.checkpoint.nodes import Disks
    from windlass.checkpoint.opening import open_store, store_of_checkpoint
    from windlass.dist.gang import Gang

    if not is_url(resume):
        return open_store(place).newest_verified()[0]
    store, path = store_of_checkpoint(resume, Gang(), Disks.shared(1))
    return store.verify(path).path


def _with_padding(tokenizer: Any) -> Any:
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            fix = "has neither a pad nor an end token"
            raise ConfigError(Problem("tokenizer.name", tokenizer.name_or_path, fix))
        tokenizer.pad_token = tokenizer.eos_token  # masked as padding, so it has no loss
    return tokenizer


def train_tokenizer(training: TokenizerTraining, kind: TokenizerKind, texts: Sequence[str]) -> Any:
    """Return a `PreTrainedTokenizerFast` of this kind that is trained on `texts`."""
    algorithm = kind.algorithm if training.algorithm == "auto" else training.algorithm
    specials = list(dict.fromkeys(kind.special_tokens.values()))
    if algorithm == "bpe":
        tokenizer = _byte_level_bpe(texts, training.vocab_size, specials)
    else:
        tokenizer = _wordpiece(texts, training, specials)
    if kind.around is not None:
        _add_special_tokens(tokenizer, *kind.around)
    transformers = require("transformers", "run a recipe")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **kind.special_tokens
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
        # All 256 bytes, also those that the text lacks: evaluation and prompts may have them.
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
