"""A parent and a child of it with two mechanisms, and edits as text: what controls are made of in tests."""

from __future__ import annotations

from forge.edits import EditBlock, render_blocks

PARENT = """
from forge_kernels import ActivationRule, encode

MECHANISMS = ()


def quantize(session):
    for layer in session.layers:
        weight = session.weight(layer)
        session.install(layer, encode(weight, scale_rule="even"), activation=ActivationRule(scale_rule="even"))
"""
CHILD = """
from forge_kernels import ActivationRule, encode

MECHANISMS = ("shrink", "flip")


def shrink(weight):
    return weight * 0.5


def without_shrink(weight):
    return weight


def flip(weight):
    return -weight


def without_flip(weight):
    return weight


def quantize(session):
    for layer in session.layers:
        weight = flip(shrink(session.weight(layer)))
        session.install(layer, encode(weight, scale_rule="even"), activation=ActivationRule(scale_rule="even"))
"""


def blocks(search: str, replace: str) -> str:
    return render_blocks([EditBlock(search=search, replace=replace)])
