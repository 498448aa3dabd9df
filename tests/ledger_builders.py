"""Builders for ledger tests: small records, and one deterministic campaign that uses every writer."""

from __future__ import annotations

from typing import Any

from hypotheses.ledger import (
    BudgetExhausted,
    Evaluation,
    Ledger,
    NewCampaign,
    NewControl,
    NewDesign,
    NewErrorMap,
    NewEvaluation,
    NewHypothesis,
    NewIncumbent,
    NewLlmCall,
    NewNoise,
    NewNote,
    NewObservation,
    NewPrediction,
    NewProbeResult,
    NewProgram,
    NewProposal,
    NewRequiredEdit,
    NewScreening,
    NewVerdict,
    Observation,
    Program,
    Registration,
    Settlement,
)


def new_campaign(*, budget: int = 10, **changes: Any) -> NewCampaign:
    fields: dict[str, Any] = {
        "recipe": {"name": "test", "budget": {"calls": budget}},
        "seed": 7,
        "budget": budget,
        "contract": "mxfp4-w4a4/1",
        "subject_name": "nano-llama",
        "subject_hash": "5" * 64,
        "corpus_hash": "c" * 64,
        "corpus_protocol": "512 tokens per sequence, no BOS",
        "proposer": "catalogue",
        "sandbox": "bubblewrap",
    }
    return NewCampaign(**(fields | changes))


def new_program(number: int = 0, **changes: Any) -> NewProgram:
    fields: dict[str, Any] = {
        "source": f"MECHANISMS = ()\n\ndef quantize(session):\n    return {number}\n",
        "origin": "seed" if number == 0 else "candidate",
        "ast_hash": f"a{number}",
        "normalized_ast_hash": f"n{number}",
        "title": f"program {number}",
    }
    return NewProgram(**(fields | changes))


def scored(*losses: float, **changes: Any) -> Settlement:
    fields: dict[str, Any] = {
        "outcome": "scored",
        "chunk_nll": losses or (3.0, 3.5),
        "tokens_per_chunk": 512,
        "contract": "mxfp4-w4a4/1",
        "contract_class": "online",
        "effective_bits": 4.25,
        "artifact_hash": "f" * 64,
        "evidence": {"events": [{"index": 0, "op": "install", "layer": "blocks.0.q"}], "layers": {}},
        "metered_tokens": 4096,
        "route": "reference",
        "log_tail": "done\n",
        "wall_s": 1.25,
        "device": "cpu",
        "versions": {"torch": "2.13"},
    }
    return Settlement(**(fields | changes))


def candidate(program: Program, **changes: Any) -> NewEvaluation:
    return NewEvaluation(**({"kind": "candidate", "split": "search", "program_id": program.id} | changes))


def evaluate(ledger: Ledger, new: NewEvaluation, result: Settlement) -> Evaluation:
    """Reserve and settle, unless it is settled already."""
    evaluation = ledger.reserve_evaluation(new)
    return evaluation if evaluation.is_settled else ledger.settle_evaluation(evaluation.id, result)


def observe(ledger: Ledger, *, number: int = 1, loss: float = 2.5) -> Observation:
    """Store a seed, a child of it, its evaluation and confirmation, and the observation."""
    seed = ledger.add_program(new_program(0))
    child = ledger.add_program(new_program(number, parent_id=seed.id))
    evaluate(ledger, candidate(child, turn=number), scored(loss, loss))
    confirmation = evaluate(
        ledger,
        candidate(child, kind="confirmation", split="confirm", draw=1, turn=number, reference_artifact="f" * 64),
        scored(loss, loss, reference_chunk_nll=(3.0, 3.5)),
    )
    return ledger.add_observation(
        NewObservation(
            turn=number,
            program_id=child.id,
            parent_id=seed.id,
            search_effect=0.7,
            search_se=0.01,
            confirmed_effect=0.75,
            confirmed_se=0.02,
            confirmation_id=confirmation.id,
        )
    )


RIVALS = (
    NewHypothesis(name="spreading", mechanism="rotation", cause="outlier_spreading", statement="spreads outliers"),
    NewHypothesis(name="averaging", mechanism="rotation", cause="error_averaging", statement="averages errors"),
)


def predictions(control: str, *rivals: str) -> tuple[NewPrediction, ...]:
    names = rivals or ("spreading", "averaging")
    return tuple(
        NewPrediction(hypothesis=name, control=control, low=0.4 * index, high=0.4 * index + 0.2)
        for index, name in enumerate(names)
    )


def register(ledger: Ledger, observation: Observation, **changes: Any) -> Registration:
    fields: dict[str, Any] = {
        "hypotheses": RIVALS,
        "controls": (NewControl(name="without-rotation", kind="knockout", mechanism="rotation"),),
        "predictions": predictions("without-rotation"),
        "design": NewDesign(chosen=("without-rotation",), cost=1),
    }
    return ledger.register_explanation(observation.id, **(fields | changes))


def control_evaluation(registration: Registration, program: Program) -> NewEvaluation:
    return NewEvaluation(
        kind="control",
        split="search",
        program_id=program.id,
        control_id=registration.controls[0].id,
        observation_id=registration.observation_id,
    )


def play(ledger: Ledger, *, wall_s: float = 1.0, loss: float = 2.5) -> None:
    """Walk through a small campaign with every kind of record. What it writes depends on what it reads on the way.

    wall_s stands for everything about the host and the clock; loss for a measured number.
    """
    seed = ledger.add_program(new_program(0))
    draws = [
        evaluate(ledger, candidate(seed, kind="setup", draw=draw), scored(3.0 + draw / 100, 3.5, wall_s=wall_s))
        for draw in range(2)
    ]
    evaluate(ledger, NewEvaluation(kind="setup", split="search", program_id=None), scored(2.0, 2.1, wall_s=wall_s))
    ledger.record_noise(
        NewNoise(
            program_id=seed.id,
            split="search",
            floor=0.01,
            chunk_variance=1e-4,
            draw_variance=2e-5,
            num_chunks=2,
            evaluation_ids=tuple(draw.id for draw in draws),
        )
    )
    base = evaluate(ledger, candidate(seed, turn=0), scored(3.0, 3.5, wall_s=wall_s))
    ledger.set_incumbent(NewIncumbent(turn=0, program_id=seed.id, evaluation_id=base.id, reason="the seed"))
    ledger.record_error_map(NewErrorMap(artifact_hash="f" * 64, rows=({"layer": "blocks.0.q", "joint": 0.25},)))
    call = ledger.record_llm_call(
        NewLlmCall(purpose="turn-1/propose/0", prompt="improve", reply="edit", model="catalogue", tokens_in=1)
    )
    ledger.record_proposal(
        NewProposal(turn=1, attempt=0, status="refused", stage="edits", reason="no match", llm_call_id=call.id)
    )
    ledger.add_note(NewNote(turn=1, topic="budget", text=f"{ledger.budget().free} calls are free"))
    observation = observe(ledger, loss=loss)
    child = ledger.program(observation.program_id)
    proposal = ledger.record_proposal(
        NewProposal(
            turn=1,
            attempt=1,
            status="accepted",
            program_id=child.id,
            claims=({"mechanism": "rotation", "cause": "outlier_spreading"},),
        )
    )
    ledger.record_screening(
        NewScreening(program_id=child.id, proposal_id=proposal.id, passed=True, smoke_outcome="scored")
    )
    best = ledger.evaluations(program_id=child.id, kind="candidate")[0]
    incumbent = ledger.incumbent()
    assert incumbent is not None
    ledger.set_incumbent(
        NewIncumbent(turn=1, program_id=child.id, evaluation_id=best.id, reason=f"beats {incumbent.program_id}")
    )
    registration = register(ledger, observation)
    without = ledger.add_program(new_program(9, origin="control", parent_id=child.id))
    measured = evaluate(ledger, control_evaluation(registration, without), scored(2.9, 3.4, wall_s=wall_s))
    ledger.record_probe_result(
        NewProbeResult(
            target_id=registration.controls[0].id,
            program_id=without.id,
            evaluation_id=measured.id,
            kind="artifact",
            status="executed",
            provisional=False,
        )
    )
    verdicts = ledger.record_verdicts(
        [
            NewVerdict(hypothesis_id=hypothesis.id, status=status, rule="verdict/1", reason="by the interval")
            for hypothesis, status in zip(registration.hypotheses, ("refuted", "supported"), strict=True)
        ]
    )
    edit = ledger.add_required_edit(
        NewRequiredEdit(
            observation_id=observation.id,
            hypothesis_id=verdicts[1].hypothesis_id,
            kind="extend",
            mechanism="rotation",
            cause="error_averaging",
            text="carry the rotation to the down projections",
            turn=1,
            blocking=True,
            probe={"kind": "call"},
        )
    )
    ledger.add_note(NewNote(turn=1, topic="edits", text=f"open: {[e.id for e in ledger.required_edits(state='open')]}"))
    later = ledger.add_program(new_program(2, parent_id=child.id))
    paid = evaluate(ledger, candidate(later, turn=2), Settlement(outcome="crashed", reason="ZeroDivisionError"))
    ledger.record_probe_result(
        NewProbeResult(
            target_id=edit.id,
            program_id=later.id,
            evaluation_id=paid.id,
            kind="call",
            status="executed",
            provisional=False,
        )
    )
    ledger.change_required_edit(edit.id, "discharged", turn=2, reason="executed", program_id=later.id)
    ledger.add_note(NewNote(turn=2, topic="declared", text=f"{child.id} is declared the best"))
    try:
        for number in range(100, 200):
            evaluate(ledger, candidate(ledger.add_program(new_program(number)), turn=number), scored(wall_s=wall_s))
    except BudgetExhausted as err:
        ledger.add_note(NewNote(turn=3, topic="end", text=str(err)))
