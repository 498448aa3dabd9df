"""Time what isolation costs: the same evaluations in sandboxed workers and in one process: ``python -m evaluators.bench``.

All sides run the same programs on the same subject and text, through the same session server, artifact code and scorer, in
rounds taken alternately, so that a busy machine slows every side. Only where a program runs differs:

    in process   called directly, with everything imported and the subject loaded
    template     in a single-use worker under bubblewrap, forked from a template (`evaluators.template`)
    direct       in a single-use worker under bubblewrap that imports torch for itself

A round of workers ends when the next worker is ready, so that it pays for as many starts as it has programs; the first round
also pays for the template. Wall time is what a campaign waits for. CPU time is that of this process, of the workers with
their sandboxes, and of the template. Programs run in this process too: give it only those that you trust.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import torch

from evaluators.bench_sides import IN_PROCESS, SIDES, STAGES, Side, open_side
from evaluators.contract import CONTRACTS
from evaluators.corpora import Corpus, load_corpus
from evaluators.corpus_spec import SampledCorpus, TextCorpus
from evaluators.results import Outcome
from evaluators.subjects import Subject, load_subject

CONTRACT: Final = CONTRACTS["mxfp4-w4a4/1"]
SAMPLED: Final = SampledCorpus(kind="sampled", gate=8)
SAMPLED_CALIBRATION: Final = 32
"""The protocol of the quickstart."""
TEXT_LENGTH: Final = 512
TEXT_RANGES: Final = {
    "calibration": (0, 8), "gate": (8, 10), "search": (10, 18), "confirm": (18, 20), "sealed": (20, 22),
}  # fmt: skip


@dataclass
class Times:
    """Seconds of one side: of every round, of every evaluation by program, and of the stages of all evaluations."""

    round_wall_s: list[float] = field(default_factory=list)
    round_cpu_s: list[float] = field(default_factory=list)
    programs_s: dict[str, list[float]] = field(default_factory=dict)
    stages_s: dict[str, float] = field(default_factory=dict)


def measure(
    subject: Subject, corpus: Corpus, programs: dict[str, str], *, sides: tuple[str, ...], rounds: int, chunks: int
) -> dict[str, Times]:
    """Run every program once per round and side.

    Raises:
        RuntimeError: a program was not scored, or not alike on all sides: the times would be of different work.
    """
    times = {name: Times() for name in sides}
    scores: dict[str, tuple[float, ...]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quantforge-bench-")))
        opened = {
            name: stack.enter_context(
                open_side(name, subject, corpus, CONTRACT, folder / name.replace(" ", "-"), chunks)
            )
            for name in sides
        }
        with open_side(IN_PROCESS, subject, corpus, CONTRACT, folder / "first", chunks) as unmeasured:
            # What the first evaluation of a process sets up for all later ones belongs to no side.
            unmeasured.evaluate(next(iter(programs.values())))
        for index in range(rounds):
            for name in sides[index % len(sides) :] + sides[: index % len(sides)]:
                _run_round(opened[name], times[name], programs, scores)
        for name, side in opened.items():
            times[name].stages_s = side.stages_s
    return times


def _run_round(side: Side, times: Times, programs: dict[str, str], scores: dict[str, tuple[float, ...]]) -> None:
    start, cpu_start = time.perf_counter(), side.cpu_seconds()
    for program, source in programs.items():
        began = time.perf_counter()
        result = side.evaluate(source)
        times.programs_s.setdefault(program, []).append(time.perf_counter() - began)
        if result.outcome is not Outcome.SCORED:
            raise RuntimeError(f"{program}, {side.name}: {result.outcome}: {result.reason}")
        if scores.setdefault(program, result.chunk_nll) != result.chunk_nll:
            raise RuntimeError(f"{program}, {side.name}: another score than on the side before")
    side.settle()
    times.round_wall_s.append(time.perf_counter() - start)
    times.round_cpu_s.append(side.cpu_seconds() - cpu_start)


def report(times: dict[str, Times]) -> list[str]:
    """Return the lines of the tables: sides, programs, stages; ratios are to the first side."""
    base, *others = times
    num_evaluations = sum(map(len, times[base].programs_s.values()))
    lines = [f"{'side':12}{'wall s':>9}{'ratio':>8}{'of rounds':>15}{'cpu s':>9}{'ratio':>8}{'of rounds':>15}"]
    for name, side in times.items():
        wall, cpu = (_ratio(side, times[base], pick) for pick in (_wall, _cpu))
        lines.append(f"{name:12}{sum(side.round_wall_s):9.2f}{wall}{sum(side.round_cpu_s):9.2f}{cpu}")
    lines += ["", f"{'program':16}" + "".join(f"{name + ' s':>16}" for name in times) + f"{'ratios':>10}"]
    for program in times[base].programs_s:
        medians = [statistics.median(side.programs_s[program]) for side in times.values()]
        ratios = "".join(f"{median / medians[0]:8.3f}" for median in medians[1:])
        lines.append(f"{program:16}" + "".join(f"{median:16.3f}" for median in medians) + "  " + ratios)
    lines += ["", f"{'ms per evaluation':36}" + "".join(f"{name:>12}" for name in times)]
    for stage in STAGES:
        values = [1e3 * side.stages_s[stage] / num_evaluations for side in times.values()]
        lines.append(f"{stage:36}" + "".join(f"{value:12.1f}" for value in values))
    lines.append(
        f"{'the rest: programs, messages':36}"
        + "".join(f"{_rest_ms(t, num_evaluations):12.1f}" for t in times.values())
    )
    return lines


def _wall(times: Times) -> list[float]:
    return times.round_wall_s


def _cpu(times: Times) -> list[float]:
    return times.round_cpu_s


def _ratio(side: Times, base: Times, pick: Callable[[Times], list[float]]) -> str:
    """Ratio of the sums, and the range of the ratios of single rounds."""
    ratios = [one / other for one, other in zip(pick(side), pick(base), strict=True)]
    return f"{sum(pick(side)) / sum(pick(base)):8.3f}{f'{min(ratios):.3f}-{max(ratios):.3f}':>15}"


def _rest_ms(times: Times, num_evaluations: int) -> float:
    whole = sum(map(sum, times.programs_s.values()))
    return (
        1e3
        * (whole - sum(s for stage, s in times.stages_s.items() if not stage.startswith("beside")))
        / num_evaluations
    )


def main() -> None:
    """Print ratios and stages as tables, or everything as JSON."""
    parser = argparse.ArgumentParser(prog="python -m evaluators.bench", description=main.__doc__)
    parser.add_argument("--programs", type=Path, required=True, help="folder of programs (trusted: they run here too)")
    parser.add_argument("--subject", default="nano-llama", help="shipped subject, or folder of a model")
    parser.add_argument("--corpus", type=Path, help="text file; left out for a shipped subject")
    parser.add_argument("--rounds", type=int, default=4, help="evaluations of every program, per side")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[IN_PROCESS, "template"], help="the first is 1")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    programs = {path.stem: path.read_text(encoding="utf-8") for path in sorted(arguments.programs.glob("*.py"))}
    if arguments.rounds < 1 or not programs:
        parser.error(f"{arguments.rounds} rounds of {len(programs)} programs in {arguments.programs}: nothing to time")
    subject = load_subject(arguments.subject)
    if arguments.corpus is None:
        corpus, chunks = load_corpus(SAMPLED, subject), SAMPLED_CALIBRATION
    else:
        spec = TextCorpus.model_validate(
            {"kind": "text", "path": arguments.corpus, "sequence_length": TEXT_LENGTH, **TEXT_RANGES}
        )
        corpus, chunks = load_corpus(spec, subject), TEXT_RANGES["calibration"][1]
    times = measure(
        subject, corpus, programs, sides=tuple(dict.fromkeys(arguments.sides)), rounds=arguments.rounds, chunks=chunks
    )
    environment = {
        "subject": f"{subject.name} ({subject.num_parameters / 1e6:.1f} M)",
        "evaluations": f"{arguments.rounds} x {len(programs)} per side",
        "calibration": f"{chunks} chunks",
        "scored on": f"{len(corpus.splits['search'])} chunks of {corpus.sequence_length}",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if arguments.json:
        print(json.dumps({"environment": environment, "sides": {k: asdict(v) for k, v in times.items()}}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print("\n".join(report(times)))


if __name__ == "__main__":
    main()
