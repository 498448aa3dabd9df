"""`evaluators/SECURITY.md` cannot drift from the attacks: every attack has its row, every row its attack."""

from __future__ import annotations

import re
from pathlib import Path

from evaluators.seccomp import MACHINES
from tests.attacks import ATTACKS
from tests.attacks.artifacts import FILE_ATTACKS
from tests.attacks.table import row, table

ROOT = Path(__file__).resolve().parents[2]
SECURITY = (ROOT / "evaluators" / "SECURITY.md").read_text()
THEMES = [path.stem for path in (ROOT / "tests" / "attacks").glob("*.py")]


def test_every_attack_has_the_row_that_it_says() -> None:
    missing = [attack.name for attack in ATTACKS if row(attack) not in SECURITY]
    assert missing == [], "run python -m tests.attacks.table and put what it prints into evaluators/SECURITY.md"
    assert SECURITY.rstrip().endswith(table()), "the tables at the end differ from python -m tests.attacks.table"


def test_every_row_names_an_attack() -> None:
    named = re.findall(r"^\| `(\w+)`", SECURITY.split("## Attacks")[1], re.MULTILINE)
    known = [attack.name for attack in (*ATTACKS, *FILE_ATTACKS)]
    assert sorted(named) == sorted(known)
    assert len(set(known)) == len(known), "two attacks have one name"


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", SECURITY)
    assert len(named) >= 10
    for path, name in named:
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"def {name}\b", text), f"{path} has no {name}"


def test_attacks_say_what_they_are() -> None:
    for attack in ATTACKS:
        assert attack.name.isidentifier(), attack.name
        assert attack.theme in THEMES, attack.name
        assert attack.outcomes, attack.name
        compile(re.sub(r"@[A-Z]+@", "1", attack.source), attack.name, "exec")
        assert not (attack.harm and attack.needs_isolation) or attack.theme == "processes", attack.name
    quick = {attack.theme for attack in ATTACKS if attack.quick}
    assert quick == {attack.theme for attack in ATTACKS}, "every theme has an attack in the default suite"


def test_the_filter_that_the_document_tells_of_is_there() -> None:
    for machine in MACHINES.values():
        assert {"sendmsg", "socketpair"} <= machine.unshared.keys()
        assert {"memfd_create", "ptrace", "unshare", "bpf"} <= machine.refused.keys()
