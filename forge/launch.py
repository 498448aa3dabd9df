"""Starting and resuming campaigns: subject, corpus, evaluator, ledger and noise floor put together, then the loop.

What the user got wrong is found before anything is written: the recipe, the subject, the corpus and the sandbox are all
checked before the run folder is made.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evaluators.contract import CONTRACTS
from evaluators.corpora import Corpus, load_corpus
from evaluators.errors import HostError
from evaluators.evaluator import Evaluator, runtime_versions
from evaluators.pool import EvaluatorPool
from evaluators.sandbox import BubblewrapIsolation, Isolation, NoIsolation, require_sandbox
from evaluators.subjects import Subject, load_subject
from forge.asking import Asker
from forge.assembling import assemble
from forge.campaign import Ending
from forge.confirming import Confirmer
from forge.continuity import (
    REPAIR,
    recorded_recipe,
    require_same_recipe,
    require_same_surroundings,
    surroundings,
)
from forge.desk import Desk
from forge.errors import RecipeError
from forge.program_files import read_program
from forge.progress import Progress
from forge.proposers.base import Proposer
from forge.proposers.catalogue import CatalogueProposer, catalogue_hash
from forge.recipe import Recipe, dump, load_recipe
from forge.report import render_report
from forge.run_folder import RunFolder, describe_environment, write_atomically
from forge.screening import Screener
from forge.set_up import SetUpError, set_up
from forge.summary import Summary, summarize
from hypotheses.ledger import ENDED, Ledger, NewCampaign
from hypotheses.ledger.errors import LedgerStorageError


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a campaign ended, what it found and where it lies."""

    ending: Ending
    summary: Summary
    folder: RunFolder


def launch(recipe: Recipe, out: Path, progress: Progress) -> Outcome:
    """Run a new campaign into the folder `out`.

    Raises:
        ForgeError, UserError: recipe, subject, corpus, sandbox, proposer or folder cannot be used; nothing is left behind.
    """
    RunFolder.require_free(out)
    seed_source = read_program(recipe.campaign.seed_program)
    proposer = make_proposer(recipe)
    isolation = make_isolation(recipe)
    progress.say(f"loading {recipe.subject.reference}")
    subject = load_subject(recipe.subject.reference, device=recipe.subject.device)
    corpus = load_corpus(recipe.corpus, subject)
    require_pairs(corpus, "search", "confirm")
    environment = describe_environment(
        subject={"name": subject.name, "hash": subject.hash, **subject.config_summary},
        corpus={"hash": corpus.hash, "protocol": corpus.protocol},
        device=recipe.subject.device,
        sandbox=isolation.name,
        seed=recipe.campaign.seed,
        catalogue=catalogue_hash(),
    )
    campaign = campaign_record(recipe, subject, corpus, proposer.label, isolation)
    folder = RunFolder.create(
        out,
        recipe_toml=dump(recipe),
        environment=environment,
        fill=lambda made: Ledger.create(made.ledger, campaign).close(),
    )
    progress.milestone(f"run folder {folder.root}; `quantforge resume {folder.root}` goes on after an interruption")
    try:
        with Ledger.open(folder.ledger) as ledger, _told_how_to_resume(folder):
            return _run(recipe, folder, ledger, subject, corpus, isolation, proposer, seed_source, progress)
    except SetUpError:
        folder.discard()
        raise


def relaunch(root: Path, progress: Progress) -> Outcome:
    """Go on with the campaign in a run folder; one that is over is told to be, and nothing is run.

    Raises:
        RunFolderError: no run there. LedgerBusy: another process runs it.
        RecipeError: recipe, subject, corpus or surroundings are no longer what they were.
    """
    folder = RunFolder.open(root)
    recipe = load_recipe(folder.recipe)
    # The second one sees everything; what the first one sees grows with the replay.
    with Ledger.open(folder.ledger) as ledger, Ledger.open(folder.ledger, read_only=True) as record:
        folder.sweep()
        campaign = record.campaign()
        require_same_recipe(campaign.recipe, recipe, progress)
        ended = _ended(folder, record, progress)
        if ended is not None:
            return ended
        require_same_surroundings(record, recipe, progress)
        proposer = make_proposer(recipe)
        isolation = make_isolation(recipe)
        subject = load_subject(recipe.subject.reference, device=recipe.subject.device)
        corpus = load_corpus(recipe.corpus, subject)
        for what, then, now in (
            ("subject", campaign.subject_hash, subject.hash),
            ("corpus", campaign.corpus_hash, corpus.hash),
            ("sandbox", campaign.sandbox, isolation.name),
        ):
            if then != now:
                raise RecipeError(f"the {what} of this run was {then} and is now {now}: {REPAIR}")
        progress.milestone(f"walking again through what {folder.root} holds; nothing recorded is paid for twice")
        seeds = record.programs(origin="seed")
        seed_source = seeds[0].source if seeds else read_program(recipe.campaign.seed_program)
        with _told_how_to_resume(folder):
            return _run(recipe, folder, ledger, subject, corpus, isolation, proposer, seed_source, progress)


@contextlib.contextmanager
def _told_how_to_resume(folder: RunFolder) -> Iterator[None]:
    """Note on what stops a campaign from outside how it goes on."""
    try:
        yield
    except (KeyboardInterrupt, HostError, LedgerStorageError) as stop:
        stop.add_note(f"`quantforge resume {shlex.quote(str(folder.root))}` goes on where it stopped")
        raise


def make_isolation(recipe: Recipe) -> Isolation:
    """Return the isolation that the recipe asks for.

    Raises:
        SandboxUnavailableError: this host cannot isolate.
    """
    isolation: Isolation = NoIsolation() if recipe.sandbox.mode == "none" else BubblewrapIsolation()
    require_sandbox(isolation)
    return isolation


def require_pairs(corpus: Corpus, *splits: str) -> None:
    """Check that programs can be compared chunk by chunk.

    Raises:
        RecipeError: a split has a single chunk, whose spread nobody can know.
    """
    for split in splits:
        if len(corpus.splits[split]) < 2:
            raise RecipeError(
                f"split {split!r} has 1 chunk; a comparison needs at least 2: raise it in section [corpus]"
            )


def make_proposer(recipe: Recipe) -> Proposer:
    """Return the proposer that the recipe names."""
    if recipe.campaign.proposer == "openai":
        # Imported here: the client's package is slow to load, and only these campaigns need it.
        from forge.proposers.openai_client import OpenAIProposer

        return OpenAIProposer.from_recipe(recipe.llm)
    return CatalogueProposer()


def open_evaluators(
    recipe: Recipe, subject: Subject, corpus: Corpus, isolation: Isolation, artifacts: Path
) -> EvaluatorPool:
    """Return the evaluators of a recipe, as many as it has workers; their waiting workers end with the pool."""

    def make() -> Evaluator:
        return Evaluator(
            subject,
            corpus,
            CONTRACTS[recipe.campaign.contract],
            isolation,
            recipe.limits.build(),
            artifacts,
            calibration_chunks=recipe.evaluation.calibration_chunks,
            threads=recipe.evaluation.threads,
        )

    return EvaluatorPool(make, recipe.evaluation.workers)


def campaign_record(
    recipe: Recipe, subject: Subject, corpus: Corpus, proposer: str, isolation: Isolation
) -> NewCampaign:
    """Return what a ledger says of its campaign; proposer: its label."""
    return NewCampaign(
        recipe=recorded_recipe(recipe),
        seed=recipe.campaign.seed,
        budget=recipe.campaign.budget_calls,
        contract=recipe.campaign.contract,
        subject_name=subject.name,
        subject_hash=subject.hash,
        corpus_hash=corpus.hash,
        corpus_protocol=corpus.protocol,
        proposer=proposer,
        sandbox=isolation.name,
    )


def _run(
    recipe: Recipe,
    folder: RunFolder,
    ledger: Ledger,
    subject: Subject,
    corpus: Corpus,
    isolation: Isolation,
    proposer: Proposer,
    seed_source: str,
    progress: Progress,
) -> Outcome:
    ledger.record_environment(device=recipe.subject.device, versions=runtime_versions(), details=surroundings(recipe))
    with open_evaluators(recipe, subject, corpus, isolation, folder.artifacts) as evaluators:
        desk = Desk(ledger, evaluators, progress)
        screener = Screener(ledger, desk, recipe.campaign.seed)
        noise = set_up(recipe, ledger, desk, screener, seed_source, progress)
        asker = Asker(
            proposer,
            ledger,
            progress,
            max_tokens_total=recipe.llm.max_tokens_total,
            max_cost=recipe.llm.max_cost,
        )
        campaign = assemble(recipe, ledger, desk, screener, asker, noise, progress)
        ending = campaign.run()
        # One that was only stopped has declared nothing yet.
        best = campaign.incumbent() if ending.failed else campaign.declared().best
    if ending.failed:
        progress.milestone(f"`quantforge resume {shlex.quote(str(folder.root))}` goes on once that is mended")
    return _leave(folder, ledger, ending, best.program.source)


def _ended(folder: RunFolder, record: Ledger, progress: Progress) -> Outcome | None:
    """Return the outcome of a campaign that is over, its report and best program written if they are missing.

    None while it is not over, and when the artifact of its best program is gone: walking again makes it again.
    """
    notes = [note for note in record.notes() if note.topic == ENDED]
    confirmer = Confirmer.of(record)
    declaration = confirmer.declare() if confirmer is not None else None
    if not notes or declaration is None:
        return None
    best = declaration.best
    if not (folder.artifacts / f"{best.result.artifact_hash}.safetensors").is_file():
        return None
    progress.milestone(f"already ended, nothing to do: {notes[-1].text}")
    return _leave(folder, record, Ending(reason=notes[-1].text), best.program.source)


def _leave(folder: RunFolder, ledger: Ledger, ending: Ending, best: str) -> Outcome:
    """Write what a run leaves beside its ledger, unless it is there already."""
    summary = summarize(ledger)
    for path, text in ((folder.best, best), (folder.report, render_report(summary))):
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
    return Outcome(ending=ending, summary=summary, folder=folder)
