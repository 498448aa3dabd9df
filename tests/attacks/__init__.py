"""Attacks on the sandbox, the channel, the contract and the scorer, by theme."""

from __future__ import annotations

from tests.attacks import (
    artifacts,
    caches,
    channel,
    contract_cheats,
    endings,
    endless,
    imports_and_patches,
    network,
    processes,
    resources,
    secrets_and_files,
    texts,
)
from tests.attacks.attack import Attack

ATTACKS: tuple[Attack, ...] = (
    *secrets_and_files.ATTACKS,
    *network.ATTACKS,
    *resources.ATTACKS,
    *endless.ATTACKS,
    *processes.ATTACKS,
    *imports_and_patches.ATTACKS,
    *channel.ATTACKS,
    *endings.ATTACKS,
    *caches.ATTACKS,
    *texts.ATTACKS,
    *artifacts.ATTACKS,
    *contract_cheats.ATTACKS,
)
