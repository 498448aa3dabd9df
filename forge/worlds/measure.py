"""Measure the losses that generated worlds are made of: ``python -m forge.worlds.measure --out FILE``. Some ten minutes.

The shipped programs on the shipped subjects under the protocol of the quickstart, each with several calibration draws (those
that read no calibration text with one), on the search and the confirm split. Programs run in the sandbox.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from evaluators.contract import CONTRACTS
from evaluators.corpora import load_corpus
from evaluators.corpus_spec import SampledCorpus
from evaluators.evaluator import Evaluator
from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.sandbox import BubblewrapIsolation
from evaluators.subjects import load_subject
from forge.program_files import read_program
from forge.worlds.losses import SEARCH, SPLITS

SUBJECTS: Final = ("nano-llama", "nano-qwen3")
DRAWS: Final = {"rtn": 1, "hadamard_rtn": 1, "smoothquant": 1, "gptq": 8, "wush_gptq": 8}
DIGITS: Final = 6


def measure(subject_name: str) -> dict[str, Any]:
    """Return mean losses per chunk, nats per token: full precision by split, and every program by split and draw.

    Raises:
        RuntimeError: a program was not scored.
    """
    subject = load_subject(subject_name)
    corpus = load_corpus(SampledCorpus(kind="sampled", gate=8), subject)
    found: dict[str, Any] = {"full_precision": {}, "programs": {}}
    with (
        tempfile.TemporaryDirectory(prefix="quantforge-losses-") as folder,
        Evaluator(
            subject,
            corpus,
            CONTRACTS["mxfp4-w4a4/1"],
            BubblewrapIsolation(),
            Limits(),
            Path(folder),
            calibration_chunks=32,
        ) as evaluator,
    ):
        for split in SPLITS:
            found["full_precision"][split] = _rounded(evaluator.full_precision_nll(split))
        for name, num_draws in DRAWS.items():
            found["programs"][name] = {split: [] for split in SPLITS}
            for draw in range(num_draws):
                result = evaluator.evaluate(read_program(name), split=SEARCH, draw=draw)
                if result.outcome is not Outcome.SCORED or result.artifact_hash is None:
                    raise RuntimeError(f"{name}, draw {draw}: {result.outcome}: {result.reason}")
                for split in SPLITS:
                    losses = evaluator.score_artifact(result.artifact_hash, split)
                    found["programs"][name][split].append(_rounded(losses))
                print(f"{subject_name} {name} draw {draw}", flush=True)
    return found


def _rounded(losses: tuple[float, ...]) -> list[float]:
    return [round(loss, DIGITS) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the losses that generated worlds are made of.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    document = {
        "what": "mean loss per chunk, nats per token, by subject, program, split and calibration draw",
        "torch": torch.__version__,
        "subjects": {name: measure(name) for name in SUBJECTS},
    }
    out.write_text(json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
