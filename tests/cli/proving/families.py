"""Families of decoders, each as large as one that is trained, and what `prove` finds of them on some layouts.

`python families.py FOLDER LAYOUT[;...] [FAMILY ...]` writes FOLDER/found.json: family -> layout -> status, detail.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

_GQA: dict[str, Any] = {"num_key_value_heads": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GQA,
    "llama-tied": {**_GQA, "model_type": "llama", "tie_word_embeddings": True, "attention_bias": True},
    "mistral": {"sliding_window": 4096},
    "qwen2": {**_GQA, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 16},
    "qwen3": {**_GQA, "tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 1024},
    "gpt2": {},
    "phi3": {},
    "smollm3": {},
    "olmo": {},
    "olmo2": {},
    "starcoder2": {"sliding_window": 4096},
    "mixtral": {},
    "mixtral-balanced": {"model_type": "mixtral", "output_router_logits": True},
    "qwen3_moe": {"decoder_sparse_step": 2},
    "olmoe": {},
    "gpt_neox": {},
    "falcon": {"num_attention_heads": 64, "hidden_size": 4096, "multi_query": False},
    "cohere": {},
    "cohere2": {},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "bloom": {},
    "opt": {},
    "phi": {},
    "stablelm": {},
    "gptj": {},
    "gpt_oss": {},
    "deepseek_v3": {},
}


def config_of(family: str) -> Any:
    import transformers

    options = dict(FAMILIES[family])
    kind = options.pop("model_type", family)
    return transformers.CONFIG_MAPPING[kind](**options)


def main() -> None:
    from windlass.cli.proving.proving_processes import EndedTraining, ProvingProcesses, judge
    from windlass.cli.proving.subject import Subject
    from windlass.core.errors import ModelError
    from windlass.proofs.record import Claim
    from windlass.proofs.small_config import AxisLayout

    folder, layouts = Path(sys.argv[1]), [AxisLayout.parse(text) for text in sys.argv[2].split(";")]
    found: dict[str, dict[str, list[Any]]] = {}
    for family in sys.argv[3:] or FAMILIES:
        subject = Subject(family, config_of(family), AxisLayout(()), {"clips": True})
        found[family] = {}
        alone: dict[str, EndedTraining] = {}  # by the trial, which several layouts have in common
        with tempfile.TemporaryDirectory() as place:
            ranks = ProvingProcesses(Path(place), subject.module)
            for layout in layouts:
                try:
                    claim = Claim.of(subject.config, layout, {})
                except ModelError as error:
                    found[family][str(layout)] = ["unfit", str(error)]
                    continue
                joined = "ep" in layout.axes
                one, of_layout = (subject.trial(claim, each, joined) for each in (AxisLayout(()), layout))
                started = ranks.start(of_layout)
                try:
                    if repr(one) not in alone:
                        alone[repr(one)] = ranks.start(one).wait()
                    verdict = judge(alone[repr(one)], started.wait())
                finally:
                    started.end()
                detail = verdict.detail or (str(verdict.first) if verdict.first else f"{verdict.largest:.1g}")
                found[family][str(layout)] = [verdict.status, detail]
                print(family, layout, verdict.status, " ".join(detail.split())[:300], flush=True)
            ranks.close()
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
