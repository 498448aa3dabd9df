"""The trusted side: contract, Session API, sandbox, subjects, corpora, scorer.

Kept without imports: a sandboxed worker imports parts of this package and must stay light.
"""
