"""Small samples of benchmarks in the layout of `evaluate.benchmark_data`, and their folders."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl.workflows.evaluate.harness.benchmark import Benchmark

Row = Mapping[str, Any]
CHOICE = {"question": "1+1?", "choices": ["1", "2", "3", "4"], "answer": 1}
LETTERS = {"question": "1+1?", "A": "1", "B": "2", "C": "3", "D": "4", "answer": "B"}
CHINESE = {"Question": "1+1?", "A": "1", "B": "2", "C": "3", "D": "4", "Answer": "B"}
LABELED = {"text": ["1", "2", "3", "4"], "label": ["A", "B", "C", "D"]}
SCIENCE = {"question": "1+1?", "choices": LABELED, "answerKey": "B"}
TESTS = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n"
# Rows of each split. Those of a benchmark with subjects are the rows of each subject.
ROWS: dict[str, dict[str, Sequence[Row]]] = {
    "agieval": {"test": [{"query": "1+1?", "choices": ["1", "2"], "gold": [1], "answer": "2"}]},
    "arc_challenge": {"test": [SCIENCE, SCIENCE]},
    "arc_easy": {"test": [SCIENCE]},
    "bbh": {"test": [{"input": "not True is", "target": "False"}]},
    "boolq": {"validation": [{"passage": "Snow is white.", "question": "is it", "label": 1}]},
    "ceval": {"dev": [LETTERS] * 5, "val": [LETTERS]},
    "cmmlu": {"dev": [CHINESE] * 5, "test": [CHINESE]},
    "gsm8k": {
        "train": [{"question": f"{i}+1?", "answer": f"It is.\n#### {i + 1}"} for i in range(6)],
        "test": [{"question": f"{i}+2?", "answer": f"It is.\n#### {i + 2}"} for i in range(3)],
    },
    "hellaswag": {
        "validation": [
            {
                "ind": 0,
                "ctx_a": "A man sits.",
                "ctx_b": "he",
                "activity_label": "Sitting",
                "endings": ["stands.", "falls.", "sings.", "is a fish."],
                "label": "0",
            }
        ]
    },
    "humaneval": {
        "test": [
            {
                "task_id": "HumanEval/0",
                "prompt": 'def double(x):\n    """Return 2 x."""\n',
                "canonical_solution": "    return 2 * x\n",
                "test": TESTS,
                "entry_point": "double",
            }
        ]
    },
    "ifeval": {
        "train": [
            {
                "key": 1,
                "prompt": "Write two sentences without commas.",
                "instruction_id_list": [
                    "punctuation:no_comma",
                    "length_constraints:number_sentences",
                ],
                "kwargs": [{}, {"num_sentences": 500, "relation": "less than"}],
            },
            {
                "key": 2,
                "prompt": "Write the word snow.",
                "instruction_id_list": ["keywords:existence"],
                "kwargs": [{"keywords": ["snow"]}],
            },
        ]
    },
    "lambada": {"test": [{"text": "She opened the door"}, {"text": "He ate the cake"}]},
    "math500": {
        "test": [{"problem": "What is 1+1?", "solution": "It is $\\boxed{2}$.", "answer": "2"}]
    },
    "mmlu": {"dev": [CHOICE] * 5, "test": [CHOICE]},
    "openbookqa": {"test": [{"question_stem": "1+1 is", "choices": LABELED, "answerKey": "B"}]},
    "piqa": {"validation": [{"goal": "eat", "sol1": "open the mouth", "sol2": "run", "label": 0}]},
}


def subjects(name: str) -> list[str]:
    """Return the folders of a benchmark's subjects, which the harness names; one without name."""
    if name not in ("agieval", "bbh", "ceval", "cmmlu", "mmlu"):
        return [""]
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "tasks" / Benchmark.read(name).folder
    key = "dataset_path" if name == "agieval" else "dataset_name"
    pattern = re.compile(rf'^"?{key}"?: "?(?:hails/agieval-)?([\w-]+)"?$', re.MULTILINE)
    texts = (file.read_text() for file in sorted(folder.glob("*.yaml")))
    return sorted({match[1] for text in texts for match in pattern.finditer(text)})


def write_rows(folder: Path, name: str) -> None:
    """Write the sample of a benchmark."""
    for subject in subjects(name):
        for split, rows in ROWS[name].items():
            file = folder / name / subject / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sentence_rules(folder: Path) -> None:
    """Write NLTK's resource punkt_tab with no abbreviations and collocations."""
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (english / name).write_text("")
