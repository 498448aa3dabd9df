"""Results that stand already when predictions are registered: what a program is known by, and where it was measured.

A prediction made after the result is no prediction, whoever asked for the run and on whichever text it was scored. Programs
are the same when their AST is, when it is after renaming of identifiers, or when they install the same. The truncated subject
shows the latter only as far as it goes, so where it shows no difference the whole one is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypotheses.ledger import Evaluation, LedgerReader, Program


@dataclass(frozen=True, kw_only=True)
class KnownResults:
    """Settled runs by what their programs are known by, of several the first; by digest, one for each program that has it."""

    by_ast: dict[str, Evaluation]
    by_normalized_ast: dict[str, Evaluation]
    by_smoke_digest: dict[str, dict[str, Evaluation]]

    @classmethod
    def of(cls, ledger: LedgerReader, child_id: str) -> KnownResults:
        """Return every settled run of a program, controls of other observations included.

        Args:
            ledger: as far as it is visible.
            child_id: the program that is explained; only its confirmation, which no prediction is about, is left out.
        """
        found = cls(by_ast={}, by_normalized_ast={}, by_smoke_digest={})
        digests = {
            screening.program_id: str(screening.evidence["smoke_digest"])
            for screening in ledger.screenings()
            if screening.passed and "smoke_digest" in screening.evidence
        }
        for evaluation in ledger.evaluations():
            if evaluation.program_id is None or not evaluation.is_settled:
                continue
            if evaluation.kind == "confirmation" and evaluation.program_id == child_id:
                continue
            program = ledger.program(evaluation.program_id)
            found.by_ast.setdefault(program.ast_hash, evaluation)
            found.by_normalized_ast.setdefault(program.normalized_ast_hash, evaluation)
            if program.id in digests:
                found.by_smoke_digest.setdefault(digests[program.id], {}).setdefault(program.id, evaluation)
        return found

    def of_program(
        self, program: Program, smoke_digest: str, *, installs_as: Callable[[Evaluation], str]
    ) -> str | None:
        """Return where the result of a program is known from; None when nothing like it was measured.

        Args:
            program: to look for.
            smoke_digest: of what it installs on the truncated subject.
            installs_as: on which subject it installs what a run installed that is like it on the truncated one; empty where
                the two differ.
        """
        for found, same in (
            (self.by_ast.get(program.ast_hash), "is the same program"),
            (self.by_normalized_ast.get(program.normalized_ast_hash), "is the same program under other names"),
        ):
            if found is not None:
                return _tell(found, same)
        for found in self.by_smoke_digest.get(smoke_digest, {}).values():
            if where := installs_as(found):
                return _tell(found, f"installs the same on the {where} subject")
        return None


def _tell(found: Evaluation, same: str) -> str:
    return f"{found.program_id} {same}, and {found.id} ({found.kind}, {found.split} split) measured it"
