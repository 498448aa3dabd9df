"""Finding the text that programs are scored on, and spending more measurements than the contract allows.

The splits that score hold only tokens that neither calibration nor gate text holds, drawn with the entropy of the
system, so that one row of an activation tells which split its token is from.
"""

from __future__ import annotations

import re

import torch

from evaluators.evaluator import Evaluator
from evaluators.results import EvaluationResult, Outcome
from tests.attacks.attack import Attack, program
from tests.attacks.secrets_and_files import FIND
from tests.attacks.world import SCORING_TOKENS, World

THEME = "texts"
SCORED = (Outcome.SCORED,)


def _no_chunk_was_guessed(world: World, evaluator: Evaluator, result: EvaluationResult) -> list[str]:
    guessed = {
        tuple(map(int, line.split())) for line in re.findall(r"^guess ([\d ]+)$", result.program_log, re.MULTILINE)
    }
    chunks = {tuple(tokens[:8]) for tokens_CL in evaluator.corpus.splits.values() for tokens in tokens_CL.tolist()}
    problems = [] if guessed else ["it made no guess"]
    return problems + [f"it found the chunk that begins {chunk}" for chunk in guessed & chunks]


def _no_row_is_of_scored_text(world: World, evaluator: Evaluator, result: EvaluationResult) -> list[str]:
    """The input of the first block depends on the token alone, so every token has one fingerprint."""
    decoder = evaluator.subject.map
    norm = decoder.input_norm(decoder.groups[0])
    assert norm is not None
    with torch.no_grad():
        rows = norm.module(decoder.embedding(torch.arange(decoder.vocab_size)))
    fingerprints = {f"{float(row[0]):.4f} {float(row[1]):.4f}": token for token, row in enumerate(rows)}
    seen = {fingerprints.get(line) for line in re.findall(r"^row (\S+ \S+)$", result.program_log, re.MULTILINE)}
    known = {token for token in seen if token is not None}
    problems = [] if known else ["no row of its measurements was recognized"]
    return problems + [f"it measured on tokens {sorted(known & set(SCORING_TOKENS))}"] * bool(
        known & set(SCORING_TOKENS)
    )


ATTACKS = (
    Attack(
        name="text_files",
        theme=THEME,
        property="no file of a corpus, a shipped subject or a split is readable",
        source=program("""
            import evaluators, importlib.resources
            read("@CORPUS@")
            folders = [os.path.dirname(evaluators.__file__), "@CHECKOUT@", *sys.path]
            for folder in folders:
                for part in ("evaluators/nano", "nano", "../evaluators/nano"):
                    walk(os.path.join(folder, part), time.time() + 5)
            for name in ("evaluators", "evaluators.nano"):
                tried(lambda: [show(path.read_bytes()) for path in importlib.resources.files(name).iterdir()])
            tried(lambda: __import__("evaluators.corpora"))
            honest(session)
        """, head=FIND),
        outcomes=SCORED,
        scores_as_honest=True,
        quick=True,
        needs_isolation=True,
    ),
    Attack(
        name="text_by_seed",
        theme=THEME,
        property="the text of no split comes out of a generator that a program can seed",
        source=program("""
            guesses = set()
            for seed in [*range(200), session._seed, session.rng("blocks.0.q", "x").initial_seed(), 1234, 0xC0FFEE]:
                for low, high in ((0, 128), (3, 128), (3, 64), (64, 128)):
                    torch.manual_seed(seed)
                    guesses.add(tuple(torch.randint(low, high, (24, 32)).flatten()[:8].tolist()))
                    generator = torch.Generator().manual_seed(seed)
                    guesses.add(tuple(torch.randint(low, high, (17, 32), generator=generator).flatten()[:8].tolist()))
            for guess in guesses:
                print("guess", *guess)
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=_no_chunk_was_guessed,
    ),
    Attack(
        name="text_by_measuring",
        theme=THEME,
        property="no call, with whatever arguments, measures on text that is scored",
        source=program("""
            from evaluators.errors import ContractError
            rows = set()
            def measure(*args, **kwargs):
                for row in session.inputs(*args, **kwargs).unique(dim=0):
                    rows.add(f"{float(row[0]):.4f} {float(row[1]):.4f}")
            first = session.groups[0]
            for limit in (None, 32, 33, 10**6, (1 << 40) - 1):
                for stream in ("quantized", "reference"):
                    tried(lambda: measure(first, stream=stream, max_tokens=limit))
            for stream in ("search", "confirm", "sealed", "gate", "calibration"):
                tried(lambda: measure(first, stream=stream))
                tried(lambda: measure(f"{stream}.{first.name}"))
            for limit in (0, -1, 1.5, True):
                tried(lambda: measure(first, max_tokens=limit))
            for row in rows:
                print("row", row)
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=_no_row_is_of_scored_text,
    ),
    Attack(
        name="activation_tables",
        theme=THEME,
        property="an activation rule holds no data: no table by token, position or text can be installed",
        source=program("""
            from evaluators.errors import ContractError
            layer = session.layers[0]
            encoded = encode(session.weight(layer))
            inputs = session.inputs(layer.group)
            class Rule(ActivationRule):
                codes = encode(inputs).codes_NK
            for arguments in (
                {"transform": (Diagonal(scale_K=inputs.abs() + 1),)},
                {"transform": (BlockMatrix(matrix_Bij=torch.eye(32).repeat(len(inputs), 1, 1)),)},
                {"transform": (Permutation(index_K=inputs.argsort()),)},
                {"activation": ActivationRule(scale_rule="static")},
                {"activation": ActivationRule(code_rule="table")},
                {"activation": {"scales": [1] * 64}},
                {"low_rank": LowRank(a_RK=inputs.bfloat16(), b_NR=torch.zeros(128, len(inputs)).bfloat16())},
            ):
                try:
                    session.install(layer, encoded, **arguments)
                    session.log(f"{list(arguments)} passed")
                except ContractError:
                    pass
            session.install(layer, encoded, activation=Rule())
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [result.program_log] if result.program_log else [],
    ),
    Attack(
        name="unmetered_measurements",
        theme=THEME,
        property="tokens beyond the contract's cap end the run, and catching the error gains nothing",
        source=program("""
            for layer in session.layers * 100:
                session.install(layer, encode(session.weight(layer)))
                try:
                    session.second_moment(session.groups[-1])
                except BaseException:
                    pass
        """),
        outcomes=(Outcome.OVER_METERED,),
        reason="subject-forward tokens",
        quick=True,
    ),
    Attack(
        name="unmetered_folds",
        theme=THEME,
        property="passes through the subject that folds cause are metered, those of refused folds too",
        source=program("""
            from evaluators.errors import ContractError
            for _ in range(3000):
                try:
                    session.fold("residual_rotation", torch.zeros(64, 64))
                except ContractError:
                    pass
        """),
        outcomes=(Outcome.OVER_METERED,),
        reason="subject-forward tokens",
    ),
)  # fmt: skip
