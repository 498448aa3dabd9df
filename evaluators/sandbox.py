"""The ways to run a program: under bubblewrap, or, labelled as such, without isolation; and what this host can do.

`bubblewrap` documents what a worker sees and why, `sandbox_process` how it is watched and ended, `seccomp` and
`cgroup` what the kernel refuses it, `worker_host` how a run ends.
"""

from __future__ import annotations

from evaluators.bubblewrap import BubblewrapIsolation
from evaluators.isolation import Isolation, NoIsolation
from evaluators.sandbox_checks import Check, diagnose_sandbox, require_sandbox

__all__ = ["BubblewrapIsolation", "Check", "Isolation", "NoIsolation", "diagnose_sandbox", "require_sandbox"]
