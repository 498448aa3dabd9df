"""Carries out attacks: an evaluation of the attack, one of an honest program after it, and everything compared.

What holds after every attack, whatever it is: the outcome is one that it may have, within its limit and five seconds;
no process, descriptor, thread, file or connection is left; no secret is in anything that was recorded; a score is that of
the artifact as it lies on the disk, and its bits are those of the bytes that are stored; the next honest program is
evaluated to the same losses, artifact and evidence, bit for bit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evaluators.contract import MXFP4_W4A4
from evaluators.evaluator import Evaluator
from evaluators.limits import Limits
from evaluators.results import EvaluationResult, Outcome
from evaluators.sandbox import Isolation
from tests.attacks.artifacts import read_safetensors
from tests.attacks.attack import HONEST, Attack, Pace
from tests.attacks.world import World, make_secret_corpus, survivors, waiting_worker
from tests.tiny_models import make_tiny_subject

CONTRACT = replace(MXFP4_W4A4, max_calls=3_000)
LIMITS = Limits(
    wall_s=90.0, memory_bytes=1 << 30, processes=60, output_bytes=1 << 20, file_bytes=1 << 26, open_files=512
)
HASTY_WALL_S = 5.0
GRACE_S = 5.0
SHARING = 6
"""Attacks without isolation that share the honest program after them."""


class Range:
    """Two evaluators with one subject and corpus, the world around them, and what honesty gives; a context manager."""

    def __init__(self, folder: Path, isolation: Isolation) -> None:
        artifacts = folder / "artifacts"
        self.world = World(folder, artifacts, is_isolated=isolation.name != "none")
        self.isolation = isolation
        subject = make_tiny_subject()
        corpus = make_secret_corpus(subject)
        self.evaluators: dict[Pace, Evaluator] = {}
        for pace, wall_s in (("patient", LIMITS.wall_s), ("hasty", HASTY_WALL_S)):
            limits = replace(LIMITS, wall_s=wall_s)
            self.evaluators[pace] = Evaluator(subject, corpus, CONTRACT, isolation, limits, artifacts)  # type: ignore[index]
        self.honest: EvaluationResult

    def __enter__(self) -> Range:
        self.world.__enter__()
        self.honest = self.evaluators["patient"].evaluate(HONEST, split="search")
        assert self.honest.outcome is Outcome.SCORED, self.honest
        self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        for evaluator in self.evaluators.values():
            evaluator.close()
        self.world.__exit__()

    def settle(self) -> None:
        """Wait until each evaluator has a worker that waits, so that what is open can be compared."""
        for evaluator in self.evaluators.values():
            waiting_worker(evaluator)

    def carry_out(self, attack: Attack, *, honest_after: bool = True) -> list[str]:
        """Evaluate an attack and an honest program after it; name everything that is not as it must be.

        honest_after: without the honest program, which `compare_an_honest_run` evaluates at another time.
        """
        evaluator = self.evaluators[attack.pace]
        self.settle()
        before, artifacts = _footprint(), os.listdir(self.world.artifacts)
        begin = time.monotonic()
        result = evaluator.evaluate(self.world.fill(attack.source), split="search")
        seconds = time.monotonic() - begin
        problems = self._judge(attack, result, seconds)
        problems += self.world.damage(result, artifacts)
        if attack.check is not None:
            problems += attack.check(self.world, evaluator, result)
        if attack.then:
            found = evaluator.evaluate(self.world.fill(attack.then), split="search").program_log
            problems += [f"the next program found something: {found[:300]}"] if found else []
        if honest_after:
            problems += self.compare_an_honest_run(attack.pace)
        problems += survivors(self.world, list(self.evaluators.values()))
        self.settle()
        after = _footprint()
        if after != before:
            problems.append(f"(descriptors, threads) were {before} before and are {after} after")
        return problems

    def compare_an_honest_run(self, pace: Pace) -> list[str]:
        """Evaluate the honest program; name everything that is not as it was before any attack."""
        result = self.evaluators[pace].evaluate(HONEST, split="search")
        return self._compare_with_honest(result, "the next honest program")

    def _judge(self, attack: Attack, result: EvaluationResult, seconds: float) -> list[str]:
        problems = []
        if result.outcome not in attack.outcomes or attack.reason not in result.reason:
            allowed = " or ".join(attack.outcomes)
            problems.append(
                f"expected {allowed} because of {attack.reason!r}, got {result.outcome}: {result.reason[:500]}"
            )
        limit = self.evaluators[attack.pace].limits.wall_s + GRACE_S
        if seconds > limit:
            problems.append(f"it took {seconds:.1f} s; {limit:g} s are allowed")
        if bool(result.chunk_nll) != result.outcome.is_scored:
            problems.append(f"{result.outcome} with the losses {result.chunk_nll}")
        if attack.scores_as_honest and result.outcome.is_scored:
            problems += self._compare_with_honest(result, "the attack", with_events=False)
        if result.outcome.is_scored and result.artifact_hash is not None:
            problems += self._check_score(result, result.artifact_hash)
        return problems

    def _check_score(self, result: EvaluationResult, artifact_hash: str) -> list[str]:
        problems = []
        again = self.evaluators["patient"].score_artifact(artifact_hash, "search")
        if again != result.chunk_nll:
            problems.append(f"the artifact scores {again}, recorded is {result.chunk_nll}")
        bits = stored_bits(self.world.artifacts / f"{artifact_hash}.safetensors")
        if result.effective_bits is None or abs(bits - result.effective_bits) > 1e-9:
            problems.append(f"{result.effective_bits} effective bits are recorded, {bits} are stored")
        return problems

    def _compare_with_honest(self, result: EvaluationResult, whose: str, *, with_events: bool = True) -> list[str]:
        honest = self.honest
        problems = []
        for name in ("outcome", "chunk_nll", "artifact_hash", "effective_bits", "contract_class"):
            if getattr(result, name) != getattr(honest, name):
                problems.append(
                    f"{name} of {whose}: {getattr(result, name)}, honest {getattr(honest, name)}; {result.reason[:300]}"
                )
        if with_events and result.evidence != honest.evidence:
            problems.append(f"evidence of {whose} differs from that of the honest program")
        if not with_events and result.evidence.layers != honest.evidence.layers:
            problems.append(f"layers in the evidence of {whose} differ from those of the honest program")
        return problems


def stored_bits(path: Path) -> float:
    """Return the bits per quantized weight that a file stores for layers and transforms, counted from its bytes."""
    header, _ = read_safetensors(path)
    sizes = {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name.startswith(("layers.", "groups."))
    }
    num_weights = sum(2 * size for name, size in sizes.items() if name.endswith(".packed"))
    return 8 * sum(sizes.values()) / num_weights


def _footprint() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def run_all(folder: Path, isolation: Isolation, attacks: Sequence[Attack]) -> dict[str, list[str]]:
    """Carry out attacks one after another; return what was wrong after each.

    Without a template every evaluation costs the imports of a worker, so several attacks share the honest program after
    them. When it differs, each of them is carried out again with one of its own.
    """
    problems: dict[str, list[str]] = {}
    with Range(folder, isolation) as range_:
        for group in _groups(attacks):
            found = {attack.name: range_.carry_out(attack, honest_after=False) for attack in group}
            if not all(found.values()) and range_.compare_an_honest_run(group[0].pace):
                found = {attack.name: found[attack.name] + range_.carry_out(attack) for attack in group}
            problems |= found
    return problems


def _groups(attacks: Sequence[Attack]) -> list[list[Attack]]:
    """Return the attacks in groups that meet one evaluator; those that are listed as succeeding come alone, and last."""
    groups: list[list[Attack]] = []
    for pace in ("patient", "hasty"):
        together = [attack for attack in attacks if attack.pace == pace and not attack.needs_isolation]
        groups += [together[start : start + SHARING] for start in range(0, len(together), SHARING)]
    return groups + [[attack] for attack in attacks if attack.needs_isolation]
