"""What public scripts load from the Hub, made here under the same names: tiny models, tokenizers, datasets and metrics.

Scripts run in a folder that holds them: `from_pretrained` and `load_dataset` look for a folder of that name first.
Nothing in the models is random once their weights are made: all rates of dropout are zero.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]

_CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_GLUE_METRIC = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, **_):
        hits = [int(p) == int(r) for p, r in zip(predictions, references)]
        found = sum(hit for hit, r in zip(hits, references) if r == 1)
        f1 = 2 * found / max(1, sum(p == 1 for p in predictions) + sum(r == 1 for r in references))
        return {"accuracy": sum(hits) / len(hits), "f1": f1}
"""
_WORDS_METRIC = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": datasets.Sequence(text)})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, **_):
        pairs = [(set(p.split()), set(r[0].split())) for p, r in zip(predictions, references)]
        return {"score": 100 * sum(len(p & r) / max(1, len(p | r)) for p, r in pairs) / len(pairs)}
"""
_TAGS_METRIC = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        tags = datasets.Sequence(datasets.Value("string"))
        features = datasets.Features({"predictions": tags, "references": tags})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, **_):
        pairs = [pair for p, r in zip(predictions, references) for pair in zip(p, r)]
        found = sum(p == r != "O" for p, r in pairs)
        precision, recall = (found / max(1, sum(pair[side] != "O" for pair in pairs)) for side in (0, 1))
        f1 = 2 * precision * recall / max(1e-9, precision + recall)
        hits = sum(p == r for p, r in pairs) / len(pairs)
        return dict(overall_precision=precision, overall_recall=recall, overall_f1=f1, overall_accuracy=hits)
"""
_METRICS = {
    "glue": _GLUE_METRIC,
    "accuracy": _GLUE_METRIC,
    "sacrebleu": _WORDS_METRIC,
    "seqeval": _TAGS_METRIC,
}
_REWARD = """
def short(completions, **_):
    return [-float(len(completion[0]["content"])) for completion in completions]
"""


def make(folder: Path, data: Path) -> None:
    """Write all stand-ins into `folder`, from the texts in `data`."""
    texts = _Texts(data)
    _models(folder, [*texts.sentences(800), *(text for pair in texts.problems(300) for text in pair)])
    _glue(folder, texts)
    _conversations(folder, texts)
    _plain(folder, texts)
    hashed = folder / "hub" / "modules" / "evaluate_modules" / "metrics"
    for name, metric in _METRICS.items():
        place = hashed / f"evaluate-metric--{name}" / ("0" * 64)
        place.mkdir(parents=True)
        (place / f"{name}.py").write_text(metric.lstrip(), "utf-8")
        for package in (place, *list(place.parents)[:3]):
            (package / "__init__.py").touch()


class _Texts:
    """Real texts: sentences with a label, problems with their answers, and translated pairs."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def labelled(self, count: int) -> list[tuple[str, int]]:
        with (self._data / "sst2" / "train.tsv").open(encoding="utf-8", newline="") as file:
            rows = list(islice(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), count))
        return [(text, int(label)) for text, label in rows]

    def sentences(self, count: int) -> list[str]:
        return [text for text, _ in self.labelled(count)]

    def problems(self, count: int) -> list[tuple[str, str]]:
        with (self._data / "gsm8k" / "train.jsonl").open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in islice(file, count)]
        return [(row["question"], row["answer"]) for row in rows]

    def translations(self, count: int) -> list[tuple[str, str]]:
        def lines(language: str) -> Iterator[str]:
            with gzip.open(self._data / "multi30k" / f"train.{language}.gz", "rt", encoding="utf-8") as file:
                yield from (line.strip() for line in islice(file, count))

        return list(zip(lines("en"), lines("de"), strict=True))

    def plays(self, count: int) -> list[str]:
        with (self._data / "tinyshakespeare" / "input.txt").open(encoding="utf-8") as file:
            return [line.strip() for line in islice(file, count)]


def _tokenizer(texts: list[str], special: dict[str, str], first: str | None, last: str | None) -> Any:
    """A byte-level tokenizer of 1,000 tokens, which puts `first` and `last` around a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token=special["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = list(dict.fromkeys(special.values()))
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    around = " ".join(filter(None, (first, "$A", last)))
    ends = [(name, made.token_to_id(name)) for name in (first, last) if name]
    pair = " ".join(filter(None, (first, "$A", last, "$B:1", f"{last}:1" if last else None)))
    made.post_processor = processors.TemplateProcessing(single=around, pair=pair, special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=_CHAT, model_max_length=128, padding_side="right", **special
    )


def _models(folder: Path, texts: list[str]) -> None:
    import torch
    import transformers as hf

    for_llama = _tokenizer(
        texts,
        {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "<s>",
        None,
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    for_bert = _tokenizer(texts, {f"{key}_token": name for key, name in names.items()}, "[CLS]", "[SEP]")
    for_t5 = _tokenizer(
        texts, {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}, None, "</s>"
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
    llama = {"vocab_size": len(for_llama), **sizes, **ids}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 512}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
    gpt2 = {"vocab_size": len(for_llama), "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
    layers = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    t5 = {"vocab_size": len(for_t5), "dropout_rate": 0.0, "decoder_start_token_id": 0, **layers}
    bert = {"vocab_size": len(for_bert), **sizes, **still}
    judge = hf.LlamaConfig(num_labels=1, **llama)
    made = {
        "tiny-llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**llama), for_llama),
        "HuggingFaceTB/SmolLM-360M": (hf.LlamaForCausalLM, hf.LlamaConfig(**llama), for_llama),
        "tiny-reward": (hf.LlamaForSequenceClassification, judge, for_llama),
        "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(**gpt2, **quiet), for_llama),
        "bert-base-cased": (hf.BertForMaskedLM, hf.BertConfig(**bert), for_bert),
        "t5-small": (hf.T5ForConditionalGeneration, hf.T5Config(**t5), for_t5),
    }
    for name, (cls, config, its_tokenizer) in made.items():
        torch.manual_seed(0)
        cls(config).save_pretrained(folder / name)
        its_tokenizer.save_pretrained(folder / name)


def _glue(folder: Path, texts: _Texts) -> None:
    """Pairs of sentences, alike if both praise or both complain."""
    labelled = texts.labelled(480)
    pairs = [
        {"sentence1": a, "sentence2": b, "label": int(x == y), "idx": index}
        for index, ((a, x), (b, y)) in enumerate(zip(labelled[::2], labelled[1::2], strict=True))
    ]
    splits = {"train": pairs[:160], "validation": pairs[160:200], "test": pairs[200:]}
    files = "".join(f"  - split: {split}\n    path: mrpc/{split}.jsonl\n" for split in splits)
    names = "        names:\n          '0': not_equivalent\n          '1': equivalent\n"
    card = (
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}dataset_info:\n- config_name: mrpc\n  features:\n"
        "  - name: sentence1\n    dtype: string\n  - name: sentence2\n    dtype: string\n"
        f"  - name: label\n    dtype:\n      class_label:\n{names}  - name: idx\n    dtype: int32\n---\n"
    )
    for name in ("glue", "nyu-mll/glue"):
        (folder / name).mkdir(parents=True)
        (folder / name / "README.md").write_text(card, "utf-8")
        for split, rows in splits.items():
            _jsonl(folder / name / "mrpc" / f"{split}.jsonl", rows)
    for split, rows in splits.items():
        _jsonl(
            folder / "pairs" / f"{split}.json", [{k: v for k, v in row.items() if k != "idx"} for row in rows]
        )


def _conversations(folder: Path, texts: _Texts) -> None:
    """Problems and answers, in the forms that scripts of instruction tuning read."""
    problems = [(question[:120], answer[:120]) for question, answer in texts.problems(64)]
    chats: Rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in problems
    ]
    prompts: Rows = [
        {"prompt": chat["messages"][:1], "solution": a} for chat, (_, a) in zip(chats, problems, strict=True)
    ]
    answers: Rows = [
        {"chosen": chat["messages"][1:], "rejected": other["messages"][1:]}
        for chat, other in zip(chats, [*chats[1:], chats[0]], strict=True)
    ]
    preferences: Rows = [
        {"prompt": row["prompt"], **pair} for row, pair in zip(prompts, answers, strict=True)
    ]
    judged: Rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}
        for index, row in enumerate(preferences)
        for good in [index % 2 == 0]
    ]
    whole: Rows = [
        {side: [*row["prompt"], *row[side]] for side in ("chosen", "rejected")} for row in preferences
    ]
    forms = {
        "chats": chats,
        "prompts": prompts,
        "preferences": preferences,
        "judged": judged,
        "compared": whole,
    }
    for name, rows in forms.items():
        _jsonl(folder / name / "train.jsonl", rows[:48])
        _jsonl(folder / name / "test.jsonl", rows[48:])
    instructions = [{"instruction": q, "input": "", "output": a} for q, a in problems]
    _json(folder / "instructions.json", instructions)
    turns = [
        {"id": str(i), "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for i, (q, a) in enumerate(problems)
    ]
    _json(folder / "conversations.json", turns)
    _jsonl(folder / "conversations.jsonl", turns)
    (folder / "rewards.py").write_text(_REWARD.lstrip(), "utf-8")


def _plain(folder: Path, texts: _Texts) -> None:
    lines = [line for line in texts.plays(1200) if line]
    (folder / "play.txt").write_text("\n".join(lines[:600]) + "\n", "utf-8")
    (folder / "play-end.txt").write_text("\n".join(lines[600:800]) + "\n", "utf-8")
    wiki = folder / "Salesforce" / "wikitext"
    files = ""
    for split, part in (("train", lines[:600]), ("validation", lines[600:680]), ("test", lines[680:700])):
        _jsonl(wiki / f"{split}.jsonl", [{"text": line} for line in part])
        files += f"  - split: {split}\n    path: {split}.jsonl\n"
    names = ("wikitext-2-v1", "wikitext-2-raw-v1")
    configs = "".join(f"- config_name: {name}\n  data_files:\n{files}" for name in names)
    (wiki / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", "utf-8")
    tagged = [
        {"tokens": words, "ner_tags": ["B-NAME" if word[:1].isupper() else "O" for word in words]}
        for words in (line.split() for line in lines[:240])
    ]
    for name, rows in (
        ("tagged", tagged[:160]),
        ("tagged-dev", tagged[160:200]),
        ("tagged-test", tagged[200:]),
    ):
        _jsonl(folder / f"{name}.json", rows)
    pairs = [{"translation": {"en": en, "de": de}} for en, de in texts.translations(80)]
    _jsonl(folder / "translations.json", pairs)


def _json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), "utf-8")


def _jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
