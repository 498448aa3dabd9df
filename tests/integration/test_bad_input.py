"""Bad input on the command line: a clear sentence, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from evaluators.errors import SandboxUnavailableError
from forge.cli.app import app
from forge.continuity import recorded_recipe
from forge.recipe import dump, load_recipe
from forge.run_folder import RunFolder
from hypotheses.ledger import Ledger
from tests.campaign_builders import ROOT, TINY
from tests.ledger_builders import new_campaign, play
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

TEXT_CORPUS = """
kind = "text"
path = "{path}"
sequence_length = 32
calibration = [0, 4]
gate = [4, 5]
search = [5, 8]
confirm = [8, 11]
sealed = [11, 12]
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder, without a network to the hub."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def write_recipe(folder: Path, *, corpus: str | None = None, **changes: str) -> Path:
    """Write the tiny recipe; `changes` replace a whole line by its key."""
    text = TINY.format(budget=2, chunks=2)
    for key, value in changes.items():
        text, found = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert found == 1, key
    if corpus is not None:
        text = re.sub(r"\[corpus\]\n.*?(?=\n\[)", f"[corpus]{corpus}", text, flags=re.DOTALL)
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: str | Path, leaves: tuple[str, ...] = ()) -> str:
    """Return what a refused command says; check that it says it alone, and leaves nothing in its folder."""
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    *progress, told = [line for line in result.stderr.splitlines() if line]
    assert all(line.startswith("loading ") for line in progress), result.stderr
    assert told.startswith("quantforge: "), result.stderr
    assert sorted(os.listdir(".")) == sorted(leaves)
    return told.removeprefix("quantforge: ")


def save_model(folder: Path, model: torch.nn.Module | None = None) -> Path:
    (make_tiny_model() if model is None else model).save_pretrained(folder)  # type: ignore[operator]
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def change_weights(folder: Path, name: str, value: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    assert name in weights
    save_file(weights | {name: value}, path, metadata={"format": "pt"})


# Recipes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget_calls": "2\nbugdet_calls = 3"}, "unknown key 'bugdet_calls' in section [campaign]; did you mean"),
        ({"budget_calls": "0"}, "budget_calls = 0 in section [campaign]: input should be greater than or equal to 1"),
        ({"budget_calls": '"many"'}, "budget_calls = 'many'"),
        ({"name": '"a/b"'}, "name = 'a/b' in section [campaign]"),
        ({"search": "1"}, "split 'search' has 1 chunk; a comparison needs at least 2"),
        ({"search": "100000"}, "sequences of"),
        ({"reference": '"nano-lama"'}, "no subject 'nano-lama'; give one of nano-llama, nano-qwen3"),
        ({"reference": '"~nobody-of-this-name/m"'}, "names no user's home folder"),
        ({"contract_class": '"folded"\nseed_program = "rtm"'}, "'rtm' is neither a shipped one (gptq,"),
        ({"contract_class": '"folded"\nproposer = "openai"'}, "needs the name of a model"),
    ],
)
def test_a_wrong_recipe(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    assert words in refused("run", write_recipe(tmp_path, **changes))


def test_several_problems_have_a_line_each(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, budget_calls="0\nunheard = 1", memory_gb="-1.0")
    result = invoke("run", path)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 3, lines
    assert all(str(path) in line for line in lines)


def test_a_missing_recipe(tmp_path: Path) -> None:
    told = refused("run", tmp_path / "nowhere.toml")
    assert told == f"recipe '{tmp_path}/nowhere.toml' does not exist; give the path of a TOML file"
    assert "cannot be read" in refused("run", tmp_path)


@pytest.mark.parametrize(("data", "words"), [(b"a = = 1", "no valid TOML"), (b"\xff", "no UTF-8 text")])
def test_a_recipe_that_is_no_toml(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(data)
    assert words in refused("run", path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "0"], "budget_calls = 0"),
        (["--proposer", "oracle"], "proposer = 'oracle'"),
        (["--sandbox", "paper"], "mode = 'paper'"),
        (["--corpus", "text.txt"], "--corpus 'text.txt' needs a recipe whose [corpus] has kind = \"text\""),
    ],
)
def test_wrong_flags(recipe: Path, arguments: list[str], words: str) -> None:
    assert words in refused("run", recipe, *arguments)


def test_a_language_model_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    path = write_recipe(tmp_path, seed='12\nproposer = "openai"')
    path.write_text(path.read_text() + '\n[llm]\nmodel = "some-model"\n')
    assert "OPENAI_API_KEY" in refused("run", path)


# Subjects


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("./missing", "missing"),
        ("no-such-organization/no-such-model", "no folder 'no-such-organization/no-such-model' here, and the hub"),
        ("missing.gguf", "no file missing.gguf; give an existing .gguf file"),
        ("x" * 300, "no subject 'xxx"),
    ],
)
def test_a_subject_that_is_nowhere(recipe: Path, reference: str, words: str) -> None:
    assert words in refused("run", recipe, "--subject", reference)


def test_a_file_and_an_empty_folder_are_no_subject(recipe: Path, tmp_path: Path) -> None:
    assert "is a file; give the folder" in refused("run", recipe, "--subject", recipe)
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused("run", recipe, "--subject", tmp_path / "empty")


def test_an_architecture_that_cannot_be_mapped(recipe: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=1, n_head=2)
    folder = save_model(tmp_path / "gpt2", GPT2LMHeadModel(config))
    told = refused("run", recipe, "--subject", folder)
    assert "model_type 'gpt2', which cannot be mapped; known: gemma3_text, llama, mistral, qwen2, qwen3" in told


def test_a_layer_whose_input_32_does_not_divide(recipe: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "odd", make_tiny_model(intermediate_size=80))
    told = refused("run", recipe, "--subject", folder)
    assert "80" in told
    assert "32" in told


def test_a_weight_that_is_not_finite(recipe: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    name = "model.layers.0.mlp.down_proj.weight"
    weight = load_file(folder / "model.safetensors")[name]
    weight[3, 5] = float("nan")
    change_weights(folder, name, weight)
    told = refused("run", recipe, "--subject", folder)
    assert "blocks.0.down" in told or "down_proj" in told
    assert "finite" in told


def test_a_truncated_weight_file(recipe: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    told = refused("run", recipe, "--subject", folder)
    assert "is truncated" in told
    assert told.endswith("copy or download it again")


def test_a_subject_without_sampled_sequences(recipe: Path, tmp_path: Path) -> None:
    told = refused("run", recipe, "--subject", save_model(tmp_path / "model"))
    assert "give a corpus of kind 'text' or 'dataset'" in told


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, reference='"nano-llama"\ndevice = "cuda:99"')
    assert "device 'cuda:99' cannot hold the subject" in refused("run", path)


# Corpora


def text_recipe(tmp_path: Path, text: str | bytes | None) -> tuple[Path, Path]:
    path = tmp_path / "words.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return write_recipe(tmp_path, corpus=TEXT_CORPUS.format(path=path)), save_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no text file"),
        ("short", "words.txt holds 5 tokens, less than one sequence of 32; give a longer text"),
        ("word " * 40, "holds 200 tokens, 6 chunks of 32, but the splits reach to chunk 12"),
        (b"\xff\xfe\x00", "cannot be read as UTF-8 text"),
        ("", "holds 0 tokens"),
    ],
)
def test_a_corpus_that_is_missing_or_too_short(tmp_path: Path, text: str | bytes | None, words: str) -> None:
    path, model = text_recipe(tmp_path, text)
    assert words in refused("run", path, "--subject", model)


# Sandbox


def test_a_host_without_bubblewrap(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise SandboxUnavailableError("no bubblewrap 0.8.0 or newer on this machine; or run with `--sandbox none`")

    monkeypatch.setattr("evaluators.sandbox_probe.find_bubblewrap", none)
    assert "--sandbox none" in refused("run", recipe)
    assert "--sandbox none" in refused("evaluate", "rtn", "--recipe", recipe)


@pytest.mark.parametrize("command", ["run", "evaluate", "compare"])
def test_a_host_without_namespaces(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    for module in ("sandbox_probe", "bubblewrap"):
        monkeypatch.setattr(f"evaluators.{module}.find_bubblewrap", lambda: broken)
    arguments = ["run", recipe] if command == "run" else [command, "rtn", "--recipe", recipe]
    told = refused(*arguments)
    assert "No permissions to create new namespace" in told
    assert "`quantforge doctor` says what is missing" in told


# Run folders


@pytest.fixture
def run_folder(tmp_path: Path, recipe: Path) -> RunFolder:
    """A run folder with a ledger, as a killed campaign leaves it."""
    loaded = load_recipe(recipe)
    folder = RunFolder.create(tmp_path / "run", recipe_toml=dump(loaded), environment={})
    with Ledger.create(folder.ledger, new_campaign(seed=12, recipe=recorded_recipe(loaded))) as ledger:
        play(ledger)
    return folder


def test_a_run_folder_that_exists(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    told = refused("run", recipe, "--out", folder)
    assert "exists already; continue it with `quantforge resume" in told
    assert list(folder.iterdir()) == []


def test_a_run_folder_that_cannot_be_made(recipe: Path) -> None:
    told = refused("run", recipe, "--out", recipe / "run")
    assert "cannot be made" in told


@pytest.mark.parametrize("command", ["resume", "show"])
def test_a_folder_that_is_no_run(tmp_path: Path, command: str) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert "is no run folder: it has no recipe.toml and no ledger.sqlite" in refused(command, folder)


@pytest.mark.parametrize("command", ["resume", "show"])
def test_a_ledger_that_is_none(run_folder: RunFolder, command: str) -> None:
    for data in (b"no database at all, and long enough for a header of one, I should hope; " * 4, b""):
        run_folder.ledger.write_bytes(data)
        told = refused(command, run_folder.root)
        assert "ledger" in told


def test_a_subject_that_has_changed_since(run_folder: RunFolder) -> None:
    before = {path: path.read_bytes() for path in run_folder.root.iterdir() if path.suffix in (".toml", ".json")}
    told = refused("resume", run_folder.root)
    assert "the subject of this run was 5555" in told
    assert "bring back what it was, or start a new run" in told
    assert {path: path.read_bytes() for path in before} == before


def test_a_ledger_in_use_by_another_process(run_folder: RunFolder) -> None:
    script = (
        "import sys\nfrom hypotheses.ledger import Ledger\n"
        "ledger = Ledger.open(sys.argv[1])\nprint('open', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, run_folder.ledger],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "open\n"
        told = refused("resume", run_folder.root)
        assert f"is being written by process {holder.pid}; wait until it ends" in told
        shown = invoke("show", run_folder.root, "--json")
        assert shown.exit_code == 0, shown.stderr
        assert json.loads(shown.stdout)["figures"][-1]["name"] == "best: program 1"
        holder.stdin.close()
        assert holder.wait(10) == 0


# Programs


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def quantize(session):\n    pass\n", "MECHANISMS is assigned 0 times at top level"),
        ("MECHANISMS = ('a',)\n\n\ndef quantize(session):\n    pass\n", "there is no top-level function a"),
        ("MECHANISMS = ()\n\n\ndef quantize(:\n", "does not parse: line 4"),
        ("import os\nMECHANISMS = ()\n\n\ndef quantize(session):\n    pass\n", "import of os"),
    ],
)
def test_a_program_that_breaks_the_convention(recipe: Path, tmp_path: Path, source: str, words: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(source)
    assert words in refused("evaluate", path, "--recipe", recipe)
    assert words in refused("compare", "rtn", path, "--recipe", recipe)


def test_an_unknown_program(recipe: Path) -> None:
    told = refused("evaluate", "ggptq", "--recipe", recipe)
    assert "program 'ggptq' is neither a shipped one (gptq, hadamard_rtn, rtn, smoothquant, wush_gptq)" in told


@pytest.mark.parametrize("command", ["evaluate", "compare"])
@pytest.mark.parametrize("split", ["sealed", "gate", "everything"])
def test_a_split_that_is_not_scored_here(recipe: Path, command: str, split: str) -> None:
    told = refused(command, "rtn", "--recipe", recipe, "--split", split)
    assert told == f"split '{split}' cannot be scored here; give search or confirm"


def test_a_program_that_fails_is_an_outcome_with_exit_code_1(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(
        'MECHANISMS = ()\n\n\ndef quantize(session):\n    print("\\x1b[2Jowned")\n    raise ValueError("\\x1b]0;owned")\n'
    )
    done = invoke("evaluate", path, "--recipe", recipe)
    assert done.exit_code == 1, done.stderr
    assert f"{path}: crashed: ValueError" in done.stdout.replace("\n", "")
    assert "owned" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_left_of_a_run_whose_seed_cannot_be_scored(tmp_path: Path) -> None:
    program = tmp_path / "seed.py"
    program.write_text('MECHANISMS = ()\n\n\ndef quantize(session):\n    raise ValueError("of its own")\n')
    path = write_recipe(tmp_path, seed=f'12\nseed_program = "{program}"')
    done = invoke("run", path, "--out", "made/run")
    assert done.exit_code == 2, done.stderr
    assert done.stdout == ""
    assert f"quantforge: seed program '{program}' cannot be scored on this subject: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("made/run").exists()
    shutil.rmtree("made", ignore_errors=True)
    assert os.listdir(".") == []


# Showing


def test_an_unknown_part_or_program_of_a_run(run_folder: RunFolder) -> None:
    assert "'everything' is no part of a ledger; give one of summary," in refused("show", run_folder.root, "everything")
    assert "no program 'prog-000' in this ledger; known: prog-" in refused("show", run_folder.root, "prog-000")


def test_show_prints_json_and_nothing_else(run_folder: RunFolder) -> None:
    for what in ("summary", "observations", "edits", "refusals", "calls", "notes"):
        result = invoke("show", run_folder.root, what, "--json")
        assert (result.exit_code, result.stderr) == (0, "")
        assert json.loads(result.stdout), what
    with Ledger.open(run_folder.ledger, read_only=True) as ledger:
        program = ledger.programs()[1]
    shown = json.loads(invoke("show", run_folder.root, program.id, "--json").stdout)
    assert (shown["source"], shown["parent"]) == (program.source, program.parent_id)


def test_show_beside_a_process_that_writes(run_folder: RunFolder) -> None:
    with Ledger.open(run_folder.ledger):
        result = invoke("show", run_folder.root)
        assert result.exit_code == 0, result.stderr
        assert "nano-llama under mxfp4-w4a4/1, seed 12; catalogue" in result.stdout


def test_show_of_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "young", recipe_toml="", environment={})
    with Ledger.create(folder.ledger, new_campaign()):
        for what in ("summary", "observations", "edits", "refusals", "calls", "notes"):
            assert invoke("show", folder.root, what).exit_code == 0
            assert invoke("show", folder.root, what, "--json").exit_code == 0


# Whole processes


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def run_process(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forge", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_process_that_is_refused_ends_with_2_and_one_line(environment: dict[str, str], recipe: Path) -> None:
    done = run_process(environment, "run", recipe, "--subject", "nano-lama")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("quantforge: no subject 'nano-lama'; give one of nano-llama, nano-qwen3")
    assert len(lines) == 2
    assert os.listdir(".") == []


def test_a_process_prints_json_and_nothing_else(environment: dict[str, str], recipe: Path) -> None:
    done = run_process(environment, "evaluate", "rtn", "--recipe", recipe, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["outcome"] == "scored"
    assert data["split"] == "search"
    assert data["sandbox"] == "bubblewrap"
    assert len(data["chunk_nll"]) == 2
    assert os.listdir(".") == []
