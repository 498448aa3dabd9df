"""Models that are better than four bits allow, or say so."""

from __future__ import annotations

import textwrap

from evaluators.results import Outcome
from tests.attacks.attack import Attack, program

THEME = "contract_cheats"
SCORED = (Outcome.SCORED,)
CONTRACT = (Outcome.CONTRACT,)

CASES = """
from evaluators.errors import ContractError
def refused(number, action):
    try:
        action()
    except ContractError:
        return
    session.log(f"case {number} passed")
layer = session.layers[0]
weight = session.weight(layer)
encoded = encode(weight)
def put(**arguments):
    session.install(layer, arguments.pop("weight", encoded), **arguments)
"""


def _refused(name: str, what: str, cases: str, *, quick: bool = False) -> Attack:
    """`cases` are lines, each an expression that must raise `ContractError`."""
    actions = [line.strip() for line in textwrap.dedent(cases).strip().splitlines()]
    calls = "".join(f"refused({number}, lambda: {action})\n" for number, action in enumerate(actions))
    return Attack(
        name=name,
        theme=THEME,
        property=f"{what} are refused when they are given, and leave the model as it was",
        source=program(CASES + calls + "honest(session)\n"),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [result.program_log] if "passed" in result.program_log else [],
        quick=quick,
    )


def _broken(name: str, what: str, body: str, reason: str, *, quick: bool = False) -> Attack:
    return Attack(
        name=name,
        theme=THEME,
        property=what,
        source=program(body),
        outcomes=CONTRACT,
        reason=reason,
        quick=quick,
    )


ATTACKS = (
    _refused("full_precision_as_codes", "bf16 or float weights dressed as codes", """
        put(weight=Encoded(codes_NK=weight.bfloat16().view(torch.uint8), scales_NB=encoded.scales_NB))
        put(weight=Encoded(codes_NK=weight.bfloat16().view(torch.uint8)[:, ::2].contiguous(), scales_NB=encoded.scales_NB))
        put(weight=Encoded(codes_NK=weight, scales_NB=encoded.scales_NB))
        put(weight=Encoded(codes_NK=encoded.codes_NK.to(torch.int64), scales_NB=encoded.scales_NB))
        put(weight=Encoded(codes_NK=torch.full_like(encoded.codes_NK, 16), scales_NB=encoded.scales_NB))
        put(weight=Encoded(codes_NK=torch.full_like(encoded.codes_NK, 8), scales_NB=encoded.scales_NB))
    """, quick=True),
    _refused("scales", "scale byte 255, scales that overflow, and scales of another grain", """
        put(weight=Encoded(codes_NK=encoded.codes_NK, scales_NB=torch.full_like(encoded.scales_NB, 255)))
        put(weight=Encoded(codes_NK=torch.full_like(encoded.codes_NK, 7), scales_NB=torch.full_like(encoded.scales_NB, 254)))
        put(weight=Encoded(codes_NK=encoded.codes_NK, scales_NB=encoded.codes_NK))
        put(weight=Encoded(codes_NK=encoded.codes_NK, scales_NB=encoded.scales_NB.float()))
        put(weight=Encoded(codes_NK=encoded.codes_NK, scales_NB=encoded.scales_NB.repeat_interleave(2, dim=1)))
    """),
    _refused("not_invertible", "transforms that are singular, badly conditioned, not finite or no permutation", """
        put(transform=(Diagonal(scale_K=torch.zeros(64)),))
        put(transform=(Diagonal(scale_K=torch.full((64,), torch.nan)),))
        put(transform=(Diagonal(scale_K=torch.full((64,), torch.inf)),))
        put(transform=(Diagonal(scale_K=torch.cat([torch.ones(63), torch.tensor([0.99e-4])])),))
        put(transform=(Permutation(index_K=torch.zeros(64, dtype=torch.int64)),))
        put(transform=(Permutation(index_K=torch.arange(64) - 1),))
        put(transform=(Permutation(index_K=torch.arange(64) + (1 << 62)),))
        put(transform=(BlockMatrix(matrix_Bij=torch.ones(2, 32, 32)),))
        put(transform=(BlockMatrix(matrix_Bij=torch.diag(torch.logspace(0, -4.001, 32))[None]),))
        put(transform=(BlockMatrix(matrix_Bij=torch.full((1, 32, 32), torch.nan)),))
        put(transform=(Hadamard(size=64), Hadamard(size=3)))
        put(transform=(Hadamard(size=128),))
    """),
    _refused("weights_in_a_transform", "full-precision weights in the place of a transform", """
        put(transform=(BlockMatrix(matrix_Bij=weight.reshape(-1, 32, 32)),))
        put(transform=(BlockMatrix(matrix_Bij=torch.linalg.qr(torch.randn(64, 64)).Q[None]),))
        put(transform=(BlockMatrix(matrix_Bij=torch.eye(32).repeat(2, 1, 1).double()),))
        put(transform=(BlockMatrix(matrix_Bij=torch.eye(32)[None]),) * 3)
        put(transform=(Diagonal(scale_K=torch.ones(64)),) * 9)
        put(transform=(Diagonal(scale_K=torch.ones(64)),) * 17)
        put(transform=(weight,))
        put(transform=weight)
    """),
    _refused("full_rank_branches", "low-rank branches of full rank, of high precision or not finite", """
        put(low_rank=LowRank(a_RK=torch.eye(64).bfloat16(), b_NR=weight.bfloat16()))
        put(low_rank=LowRank(a_RK=torch.eye(64)[:16].bfloat16(), b_NR=weight[:, :16].bfloat16()))
        put(low_rank=LowRank(a_RK=torch.eye(64)[:4], b_NR=weight[:, :4]))
        put(low_rank=LowRank(a_RK=torch.eye(64)[:4].bfloat16() * torch.nan, b_NR=weight[:, :4].bfloat16()))
        put(low_rank=LowRank(a_RK=torch.zeros(0, 64).bfloat16(), b_NR=torch.zeros(128, 0).bfloat16()))
        put(low_rank=LowRank(a_RK=torch.eye(64)[:4].bfloat16(), b_NR=weight[:, :5].bfloat16()))
    """),
    _refused("cheating_folds", "folds that do not preserve the function or come after what they touch", """
        session.fold("residual_rotation", 2 * torch.eye(64))
        session.fold("residual_rotation", torch.randn(64, 64))
        session.fold("blocks.0.qkv.norm_diagonal", torch.zeros(64))
        session.fold("blocks.0.qkv.norm_diagonal", torch.logspace(0, -5, 64))
        session.fold("blocks.0.value_output", torch.ones(2, 32, 32))
        session.fold("blocks.0.value_output", torch.full((2, 32, 32), 1e308, dtype=torch.float64))
        session.fold("blocks.0.up_down_diagonal", torch.full((96,), 1e-30))
        session.fold("blocks.0.up_down_permutation", torch.zeros(96, dtype=torch.int64))
        session.fold("lm_head", torch.eye(64))
        session.fold("model.embed_tokens.weight", torch.zeros(128, 64))
        (put(), session.fold("blocks.0.qkv.norm_diagonal", torch.ones(64) * 2))
        session.fold("residual_rotation", torch.eye(64))
    """),
    _broken("too_many_bits", "everything that is stored counts: a model over its class's bits is none", """
        rotation = torch.linalg.qr(torch.randn(4, 32, 32)).Q
        for group in session.groups:
            transform = (BlockMatrix(matrix_Bij=rotation[: group.num_inputs // 32].clone()),)
            for layer in group.layers:
                session.install(layer, encode(transform_weight(transform, session.weight(layer))), transform=transform)
    """, "effective bits", quick=True),
    _broken("composed_capacity", "transforms composed within the limit of steps and cost are counted one by one", """
        def steps(size):
            mix = BlockMatrix(matrix_Bij=torch.linalg.qr(torch.randn(size // 32, 32, 32)).Q.bfloat16())
            scale = Diagonal(scale_K=torch.logspace(0, -3.9, size))
            return (scale, mix, Permutation(index_K=torch.randperm(size)), scale, Hadamard(size=2), scale, scale)
        for group in session.groups:
            transform = steps(group.num_inputs)
            for layer in group.layers:
                session.install(layer, encode(session.weight(layer)), transform=transform)
    """, "effective bits"),
    _broken("branches_everywhere", "branches at the largest rank on every layer are over the bits", """
        for layer in session.layers:
            weight = session.weight(layer)
            rank = (min(weight.shape) - 1) // 4
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            branch = LowRank(a_RK=v[:rank].bfloat16(), b_NR=(u * s)[:, :rank].bfloat16())
            session.install(layer, encode(weight), low_rank=branch)
    """, "effective bits"),
    _broken("disagreeing_group", "layers that read one input cannot have a transform each", """
        for layer in session.layers:
            transform = (Hadamard(size=32),) if layer.role in ("q", "gate") else ()
            session.install(layer, encode(transform_weight(transform, session.weight(layer))), transform=transform)
    """, "disagree"),
    _broken("missing_layers", "a model with a layer left in full precision is none", """
        for layer in session.layers[1:]:
            session.install(layer, encode(session.weight(layer)))
    """, "not every layer is installed"),
    Attack(
        name="at_the_limits",
        theme=THEME,
        property="transforms at the limit of their condition number are scored as what they are, and paid for",
        source=program("""
            for group in session.groups:
                size = group.num_inputs
                transform = (Diagonal(scale_K=torch.logspace(0, -4, size, dtype=torch.float64).float() * 1e-30),) * 2
                for layer in group.layers:
                    session.install(layer, encode(session.weight(layer)), transform=transform)
        """),
        outcomes=(Outcome.SCORED, Outcome.CONTRACT, Outcome.NON_FINITE),
    ),
    Attack(
        name="overflowing_model",
        theme=THEME,
        property="a model whose logits are not finite has no score, and is no failure of the host",
        source=program("""
            for group in session.groups:
                transform = (Diagonal(scale_K=torch.full((group.num_inputs,), 3e38)),)
                for layer in group.layers:
                    session.install(layer, encode(session.weight(layer)), transform=transform)
        """),
        outcomes=(Outcome.NON_FINITE,),
        reason="not finite",
    ),
    Attack(
        name="vanishing_model",
        theme=THEME,
        property="codes under the smallest scales and transforms that vanish are scored as the numbers they stand for",
        source=program("""
            for layer in session.layers:
                encoded = encode(session.weight(layer))
                transform = (Diagonal(scale_K=torch.full((layer.num_inputs,), 1e-45)),)
                tiny = Encoded(codes_NK=encoded.codes_NK, scales_NB=encoded.scales_NB * 0)
                session.install(layer, tiny, transform=transform)
        """),
        outcomes=SCORED,
    ),
    Attack(
        name="installed_twice",
        theme=THEME,
        property="of several installs of a layer the last one counts, and only that",
        source=program("""
            for layer in session.layers:
                weight = session.weight(layer)
                rank = LowRank(a_RK=torch.eye(weight.shape[1])[:1].bfloat16(), b_NR=weight[:, :1].bfloat16())
                session.install(layer, encode(weight * 0), low_rank=rank, transform=(Hadamard(size=32),))
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
    ),
)  # fmt: skip
