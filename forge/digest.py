"""The ledger in a page: what a proposer is told of the campaign so far, verdicts first, oldest detail dropped first."""

from __future__ import annotations

from forge.plain_text import first_line
from hypotheses.ledger import Ledger, Settlement

MAX_PROGRAM_LINES = 30


def ledger_digest(ledger: Ledger) -> str:
    """Return the digest: every verdict, then the programs evaluated, the newest kept when there are many."""
    lines = ["Verdicts:"]
    for observation in ledger.observations():
        title = ledger.program(observation.program_id).title
        lines.append(
            f"- {observation.id}, turn {observation.turn}: {title} {observation.confirmed_effect:+.4f} "
            f"+- {observation.confirmed_se:.4f} nats/token, confirmed"
        )
        names = {hypothesis.id: hypothesis for hypothesis in ledger.hypotheses(observation.id)}
        for verdict in ledger.verdicts(observation.id):
            hypothesis = names[verdict.hypothesis_id]
            lines.append(f"  - {hypothesis.cause} ({hypothesis.mechanism}): {verdict.status}")
    if len(lines) == 1:
        lines.append("- none yet")
    programs = []
    for evaluation in ledger.evaluations():
        if evaluation.kind != "candidate" or evaluation.result is None or evaluation.program_id is None:
            continue
        program = ledger.program(evaluation.program_id)
        programs.append(f"- turn {evaluation.turn}: {program.title} ({program.id}): {_score(evaluation.result)}")
    lines.append("Programs evaluated:")
    if len(programs) > MAX_PROGRAM_LINES:
        lines.append(f"- {len(programs) - MAX_PROGRAM_LINES} older ones left out")
    lines += programs[-MAX_PROGRAM_LINES:] or ["- the seed only"]
    refused = [p for p in ledger.proposals(status="refused") if p.kind == "candidate"]
    if refused:
        lines.append("Refused before any call, newest last:")
        lines += [f"- turn {p.turn}: {p.stage}: {first_line(p.reason)}" for p in refused[-5:]]
    return "\n".join(lines)


def _score(result: Settlement) -> str:
    if result.nll is None:
        return result.outcome
    bits = "" if result.effective_bits is None else f", {result.effective_bits:.2f} bits"
    return f"{result.nll:.4f} nats/token{bits}"
