"""What stands before the first turn: programs by name or path, the noise floor, and refusals that leave nothing behind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from evaluators.corpora import Corpus
from evaluators.evaluator import Evaluator
from evaluators.pool import EvaluatorPool
from evaluators.results import EvaluationResult, Evidence, Outcome
from evaluators.sandbox import NoIsolation
from forge.desk import Desk
from forge.errors import RecipeError
from forge.launch import make_isolation, require_pairs
from forge.noise import NoiseModel
from forge.program_files import read_program, shipped_programs
from forge.progress import QuietProgress
from forge.recipe import Recipe, parse_recipe
from forge.screening import Screener
from forge.set_up import SetUpError, set_up
from hypotheses.ledger import Ledger
from tests.ledger_builders import new_campaign
from tests.tiny_models import make_tiny_corpus, make_tiny_subject

RTN = read_program("rtn")
GPTQ = read_program("gptq")


def recipe(**campaign: object) -> Recipe:
    return parse_recipe(
        {
            "campaign": {"name": "t", "budget_calls": 4, "seed": 7, **campaign},
            "subject": {"reference": "nano-llama"},
            "corpus": {"kind": "sampled"},
            "sandbox": {"mode": "none"},
        }
    )


@dataclass
class ToldEvaluator:
    """Scores as it is told: chunk losses by program and draw."""

    losses: Callable[[str, int], tuple[float, ...] | None]
    seen: list[tuple[str, int, int]] = field(default_factory=list)

    def evaluate(
        self, source: str, *, split: str, draw: int = 0, seed: int = 0, reference_artifact: str | None = None
    ) -> EvaluationResult:
        name = "rtn" if source == RTN else "gptq"
        self.seen.append((name, draw, seed))
        losses = self.losses(name, draw)
        outcome = Outcome.CRASHED if losses is None else Outcome.SCORED
        return EvaluationResult(
            outcome=outcome, reason="" if losses else "of its own", split="search", draw=draw, seed=seed,
            chunk_nll=losses or (), contract_class="online" if losses else None,
            effective_bits=4.25 if losses else None, evidence=Evidence(),
        )  # fmt: skip

    def full_precision_nll(self, split: str) -> tuple[float, ...]:
        return (2.0, 2.4, 1.6, 2.2)

    def smoke(self, source: str, *, seed: int = 0) -> EvaluationResult:
        return EvaluationResult(outcome=Outcome.SCORED, split="search", draw=0, seed=seed, contract_class="online")

    def has_artifact(self, artifact_hash: str) -> bool:
        return True


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign(budget=4)) as ledger:
        yield ledger


def measure(ledger: Ledger, evaluator: ToldEvaluator, seed_source: str = RTN) -> NoiseModel:
    desk = Desk(ledger, EvaluatorPool(lambda: evaluator), QuietProgress())  # type: ignore[arg-type,return-value]
    screener = Screener(ledger, desk, 7)
    return set_up(recipe(), ledger, desk, screener, seed_source, QuietProgress())


def shifted(name: str, draw: int) -> tuple[float, ...]:
    """Chunk losses: the seed's fixed, the calibrated program's better and moved by its draw."""
    seed = (3.0, 3.5, 2.5, 3.2)
    if name == "rtn":
        return seed
    better = (0.11, 0.14, 0.08, 0.13)
    return tuple(a - b + 0.01 * (draw - 2) ** 2 for a, b in zip(seed, better, strict=True))


def test_the_noise_floor_is_the_error_of_an_effect_between_calibrated_programs(ledger: Ledger) -> None:
    noise = measure(ledger, ToldEvaluator(shifted))
    means = [statistics.fmean(shifted("gptq", draw)) for draw in range(5)]
    differences = [a - b for a, b in zip(shifted("rtn", 0), shifted("gptq", 0), strict=True)]
    assert noise.num_draws == 5
    assert noise.draw_variance == pytest.approx(statistics.variance(means))
    chunk = statistics.variance(differences) / 4
    assert noise.floor == pytest.approx(math.sqrt(chunk + 2 * statistics.variance(means)))
    (stored,) = ledger.noise()
    assert (stored.floor, stored.draw_variance, stored.num_chunks) == (noise.floor, noise.draw_variance, 4)
    assert stored.chunk_variance == pytest.approx(statistics.variance(differences))
    assert stored.body["draw_means"] == pytest.approx(means)
    assert len(stored.evaluation_ids) == 5
    assert noise.full_precision == pytest.approx(2.05)
    assert noise.reference_damage == pytest.approx(statistics.fmean(means) - 2.05)


def test_set_up_costs_no_call_and_makes_the_seed_incumbent(ledger: Ledger) -> None:
    evaluator = ToldEvaluator(shifted)
    measure(ledger, evaluator)
    assert evaluator.seen == [("rtn", 0, 7), *(("gptq", draw, 7) for draw in range(5))]
    budget = ledger.budget()
    assert (budget.used, budget.reserved, budget.free, budget.num_setup) == (0, 0, 4, 7)
    incumbent = ledger.incumbent()
    assert incumbent is not None
    assert ledger.program(incumbent.program_id).source == RTN
    assert ledger.check_invariants() == []


def test_set_up_again_measures_nothing_again(ledger: Ledger) -> None:
    evaluator = ToldEvaluator(shifted)
    first = measure(ledger, evaluator)
    digest = ledger.content_hash()
    assert measure(ledger, evaluator) == first
    assert len(evaluator.seen) == 6
    assert ledger.content_hash() == digest


def test_equal_draws_leave_the_chunks(ledger: Ledger) -> None:
    noise = measure(ledger, ToldEvaluator(lambda name, draw: shifted(name, 2)))
    assert noise.draw_variance == 0.0
    assert noise.floor > 0.0


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("rtn", "seed program 'rtn' cannot be scored on this subject: of its own"),
        ("gptq", "the noise floor cannot be measured: program 'gptq' ended crashed: of its own"),
    ],
)
def test_a_program_that_set_up_needs_and_that_fails_is_told(ledger: Ledger, fails: str, words: str) -> None:
    with pytest.raises(SetUpError) as info:
        measure(ledger, ToldEvaluator(lambda name, draw: None if name == fails else shifted(name, draw)))
    assert str(info.value) == words


def test_shipped_programs_are_read_by_name() -> None:
    assert {"rtn", "hadamard_rtn", "smoothquant", "gptq", "wush_gptq"} <= set(shipped_programs())
    for name in shipped_programs():
        assert "def quantize(session)" in read_program(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is neither a shipped one (gptq, hadamard_rtn, rtn,"),
        ("MECHANISMS = ()\n", "cannot be run: The program has no top-level function quantize(session)."),
        ("MECHANISMS = ()\nimport os\n\ndef quantize(session):\n    pass\n", "import of os"),
        (b"\xff\xfe", "nor a readable file: 'utf-8' codec"),
    ],
)
def test_a_program_that_cannot_be_read_or_run_is_told(tmp_path: Path, text: str | bytes | None, words: str) -> None:
    path = tmp_path / "program.py"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as info:
        read_program(str(path))
    assert words in str(info.value)


@pytest.mark.parametrize("reference", ["~nobody-of-this-name/p.py", "p" * 300, "."])
def test_odd_paths_are_told_too(reference: str) -> None:
    with pytest.raises(RecipeError, match="nor a readable file"):
        read_program(reference)


def test_paths_are_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "nano-llama"):
        (tmp_path / name).mkdir()
    data = {
        "campaign": {"name": "t", "budget_calls": 4, "seed_program": "seed.py", "out": "run"},
        "subject": {"reference": "mine"},
        "corpus": {"kind": "sampled"},
    }
    loaded = parse_recipe(data)
    assert loaded.campaign.seed_program == str(tmp_path / "seed.py")
    assert loaded.campaign.out == tmp_path / "run"
    assert loaded.subject.reference == str(tmp_path / "mine")
    shipped = parse_recipe(data | {"subject": {"reference": "nano-llama"}})
    assert shipped.subject.reference == "nano-llama", "a folder of that name does not hide what is shipped"
    assert parse_recipe(data | {"campaign": {"name": "t", "budget_calls": 4}}).campaign.seed_program == "rtn"


def test_a_split_of_one_chunk_is_refused() -> None:
    subject = make_tiny_subject()
    corpus: Corpus = make_tiny_corpus(subject, counts={"search": 1})
    require_pairs(corpus, "confirm")
    with pytest.raises(RecipeError, match=r"split 'search' has 1 chunk; a comparison needs at least 2"):
        require_pairs(corpus, "search", "confirm")


def test_isolation_is_what_the_recipe_says() -> None:
    assert isinstance(make_isolation(recipe()), NoIsolation)


def test_the_told_evaluator_has_the_calls_of_the_real_one() -> None:
    assert all(hasattr(Evaluator, name) for name in ("evaluate", "smoke", "has_artifact"))
