"""A refuted mechanism in other words, as a real program in the real sandbox: known again by what it installs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from evaluators.corpora import load_corpus
from evaluators.subjects import load_subject
from forge.desk import Desk
from forge.edits import apply_edits, parse_blocks
from forge.launch import make_isolation, open_evaluators
from forge.program_files import read_program
from forge.program_identity import ast_hash, mechanism_fingerprint
from forge.progress import QuietProgress
from forge.proposers.base import Reply
from forge.screening import Refusal, Rules, Screener, read_draft
from hypotheses.ledger import Ledger, Program
from hypotheses.required_edits import BarredClaim
from tests.campaign_builders import tiny_recipe
from tests.fake_campaigns import blocks_of, proposal
from tests.ledger_builders import new_campaign

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RTN = read_program("rtn")
IMPORT = "from forge_kernels import ActivationRule, encode, transform_weight"
HADAMARD = IMPORT.replace("ActivationRule,", "ActivationRule, Hadamard,")


def mechanism(name: str, body: str, parameters: str = "session, group") -> list[tuple[str, str]]:
    """Return the blocks that put a rotation of this name and body into the seed."""
    code = f"def {name}({parameters}):\n{body}\n\n\ndef without_{name}({parameters}):\n    return ()"
    return [
        (IMPORT, HADAMARD),
        ("MECHANISMS = ()", f'MECHANISMS = ("{name}",)\n\n\n{code}'),
        ("    steps = ()", f"    steps = {name}(session, group)"),
    ]


@dataclass(frozen=True)
class Table:
    """A screener over real workers, and the program whose rotation stands refuted."""

    screener: Screener
    seed: Program
    barred: BarredClaim

    def screen(self, edits: list[tuple[str, str]], name: str, cause: str) -> None:
        rules = Rules(
            incumbent=RTN,
            open_edits=(),
            barred=frozenset({self.barred}),
            earlier_ast_hashes=frozenset(),
            earlier_smoke_digests=frozenset(),
            allowed_class="corrected",
        )
        draft = read_draft(Reply(text=proposal(edits, claims=[(name, cause)]), model="m"), rules)
        program = self.screener.store(draft.source, origin="candidate", title=name, parent=self.seed)
        self.screener.run_draft(draft, program, rules)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    folder = tmp_path_factory.mktemp("renamed")
    recipe = tiny_recipe(folder)
    subject = load_subject("nano-llama")
    corpus = load_corpus(recipe.corpus, subject)
    with (
        Ledger.create(folder / "ledger.sqlite", new_campaign()) as ledger,
        open_evaluators(recipe, subject, corpus, make_isolation(recipe), folder / "artifacts") as pool,
    ):
        screener = Screener(ledger, Desk(ledger, pool, QuietProgress()), 12)
        seed = screener.store(RTN, origin="seed", title="seed", parent=None)
        source = apply_edits(RTN, parse_blocks(blocks_of(*mechanism("spin", "    return (Hadamard(size=32),)"))))
        child = screener.store(source, origin="candidate", title="spin", parent=seed)
        barred = BarredClaim(
            mechanism="spin", cause="spreading", fingerprint=mechanism_fingerprint(source, "spin"), program=child.id
        )
        assert ast_hash(source) != ast_hash(RTN)
        yield Table(screener, seed, barred)


@pytest.mark.parametrize(
    ("body", "parameters"),
    [
        ("    return (Hadamard(size=32),)", "unit, where"),
        ("    return (Hadamard(size=16 + 16),)", "session, group"),
        ("    size = 32\n    turned = Hadamard(size=size)\n    return (turned,)", "session, group"),
        ("    return tuple(Hadamard(size=32) for _ in range(1))", "session, group"),
    ],
)
def test_other_words_for_the_refuted_mechanism_are_refused(table: Table, body: str, parameters: str) -> None:
    with pytest.raises(Refusal) as info:
        table.screen(mechanism("turn", body, parameters), "turn", "spreading")
    assert info.value.stage == "barred claim"
    assert "'turn' acts through 'spreading' stands refuted (as 'spin')" in info.value.problems[0]


def test_another_rotation_or_another_cause_passes(table: Table) -> None:
    table.screen(mechanism("small", "    return (Hadamard(size=16),)"), "small", "spreading")
    table.screen(mechanism("again", "    return (Hadamard(size=16 + 16),)"), "again", "averaging")
