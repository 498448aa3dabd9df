"""Recipes: everything that decides a campaign, in one TOML file, validated whole before anything starts.

There is one way to configure a run: its recipe. The few flags of the command line (`Overrides`) are put into the recipe
before it is checked, and the run keeps the copy that `dump` writes, so that a run folder says by itself what was run.
Secrets are not in it: the `[llm]` section holds *names* of environment variables. Relative paths are taken from the
folder the command is given in and made absolute, so that a resumed run finds them from anywhere.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from evaluators.corpus_spec import CorpusSpec, DatasetCorpus, SampledCorpus, TextCorpus
from evaluators.limits import Limits
from evaluators.results import ContractClass
from forge.errors import RecipeError

__all__ = ["LanguageModel", "Overrides", "Recipe", "RecipeError", "Statistics", "dump", "load_recipe", "parse_recipe"]

ProposerName = Literal["catalogue", "openai"]
SandboxMode = Literal["bubblewrap", "none"]
PROPOSERS: tuple[ProposerName, ...] = get_args(ProposerName)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Campaign(_Section):
    """What is searched, by whom, for how long.

    seed_program: name of a shipped program, or the path of a file. contract_class: the widest class that a candidate
    may have. max_consecutive_refusals: turns in a row without a program to evaluate, after which the campaign gives up.
    out: the run folder; without it one is made under ``runs/out``.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    budget_calls: Count
    proposer: ProposerName = "catalogue"
    seed_program: Annotated[str, Field(min_length=1)] = "rtn"
    contract: Literal["mxfp4-w4a4/1"] = "mxfp4-w4a4/1"
    contract_class: ContractClass = "online"
    max_turns: Count = 200
    max_consecutive_refusals: Count = 5
    out: Annotated[Path | None, Field(strict=False)] = None


class SubjectChoice(_Section):
    """The model: a shipped name, a folder, a GGUF file or a hub id; and where it runs."""

    reference: Annotated[str, Field(min_length=1)]
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"


class Evaluation(_Section):
    """How programs are evaluated.

    calibration_chunks: sequences of one calibration draw. noise_draws: calibration draws of the seed program that
    measure the program-level variance at the start (set-up, not budget). workers: evaluations that run side by side.
    threads: of one worker.
    """

    calibration_chunks: Count = 32
    noise_draws: Annotated[int, Field(ge=5)] = 5
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    threads: Count = 1


class RunLimits(_Section):
    """Limits of one run of a program."""

    wall_s: Positive = 900.0
    memory_gb: Positive = 8.0
    output_mb: Positive = 4.0
    processes: Count = 512

    def build(self) -> Limits:
        """Return them in the evaluator's units."""
        return Limits(
            wall_s=self.wall_s,
            memory_bytes=int(self.memory_gb * 2**30),
            output_bytes=int(self.output_mb * 2**20),
            processes=self.processes,
        )


class SandboxChoice(_Section):
    """How programs are kept apart; ``none`` is shown in the ledger and in every report."""

    mode: SandboxMode = "bubblewrap"


class Statistics(_Section):
    """The rules of evidence; all sigmas are standard errors of the paired effect, program-level variance included.

    promotion_sigma: a candidate is promoted beyond this. trigger_sigma: a difference beyond this is confirmed and
    explained.
    confirm_sigma: what it must still be on the confirm split to become an observation. error_rate: per observation,
    over its hypotheses x controls. explain_losses: whether surprising losses are explained too.
    """

    promotion_sigma: Positive = 2.0
    trigger_sigma: Positive = 5.0
    confirm_sigma: Positive = 3.0
    error_rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.02
    explain_losses: bool = True


class LanguageModel(_Section):
    """The model behind proposer ``openai``. Keys are read from the environment; here stand the variables' names.

    max_reply_tokens: of one reply. max_tokens_total, max_cost: of the campaign, resumed ones included; cost in the
    currency of the prices. prompt_price, completion_price: per million tokens; without them the cost is shown as
    unknown.
    """

    model: Annotated[str, Field(min_length=1)] | None = None
    base_url_env: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")] = "OPENAI_BASE_URL"
    key_env: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")] = "OPENAI_API_KEY"
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_reply_tokens: Count = 16_384
    max_tokens_total: Count | None = None
    max_cost: Positive | None = None
    prompt_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    completion_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    request_timeout_s: Positive = 300.0
    deadline_s: Positive = 1200.0

    @model_validator(mode="after")
    def _cost_needs_prices(self) -> Self:
        if self.max_cost is not None and (self.prompt_price is None or self.completion_price is None):
            raise ValueError(
                "max_cost needs prompt_price and completion_price: a cap on an unknown cost would never hold"
            )
        return self


class Recipe(BaseModel):
    """One campaign, whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    campaign: Campaign
    subject: SubjectChoice
    corpus: CorpusSpec
    evaluation: Evaluation = Evaluation()
    limits: RunLimits = RunLimits()
    sandbox: SandboxChoice = SandboxChoice()
    statistics: Statistics = Statistics()
    llm: LanguageModel = LanguageModel()

    @model_validator(mode="after")
    def _openai_needs_a_model(self) -> Self:
        if self.campaign.proposer == "openai" and self.llm.model is None:
            raise ValueError("proposer 'openai' needs the name of a model: model = \"...\" in section [llm]")
        return self


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What a command line may change; None leaves the recipe's value."""

    budget_calls: int | None = None
    seed: int | None = None
    subject: str | None = None
    corpus_path: Path | None = None
    proposer: str | None = None
    sandbox: str | None = None
    workers: int | None = None
    out: Path | None = None


_FLAGS = {
    ("campaign", "budget_calls"): "--budget",
    ("campaign", "seed"): "--seed",
    ("campaign", "proposer"): "--proposer",
    ("campaign", "out"): "--out",
    ("subject", "reference"): "--subject",
    ("sandbox", "mode"): "--sandbox",
    ("evaluation", "workers"): "--workers",
    ("corpus", "path"): "--corpus",
}
_CORPORA: dict[str, type[BaseModel]] = {"sampled": SampledCorpus, "text": TextCorpus, "dataset": DatasetCorpus}


def load_recipe(path: Path, overrides: Overrides | None = None) -> Recipe:
    """Return the recipe of a TOML file with the overrides put in.

    Raises:
        RecipeError: no such file, not TOML, an unknown or missing key, a value of the wrong type or out of range.
    """
    try:
        data = tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as err:
        raise RecipeError(f"recipe {str(path)!r} does not exist; give the path of a TOML file") from err
    except OSError as err:
        raise RecipeError(f"recipe {str(path)!r} cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise RecipeError(
            f"recipe {str(path)!r} is no UTF-8 text: byte {err.start} is {err.object[err.start]:#04x}"
        ) from err
    except tomllib.TOMLDecodeError as err:
        raise RecipeError(f"recipe {str(path)!r} is no valid TOML: {err}") from err
    return parse_recipe(data, overrides, name=str(path))


def parse_recipe(data: Mapping[str, Any], overrides: Overrides | None = None, *, name: str = "recipe") -> Recipe:
    """Return the recipe of plain data; see `load_recipe`."""
    data = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    _apply(data, overrides or Overrides())
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as err:
        raise RecipeError("\n".join(f"{name}: {_sentence(detail, data)}" for detail in err.errors())) from err
    try:
        return _with_absolute_paths(recipe)
    except RuntimeError as err:  # pathlib's word for a home folder of nobody
        raise RecipeError(f"{name}: a path begins with '~' and names no user's home folder: {err}") from err


def dump(recipe: Recipe) -> str:
    """Return the recipe as TOML that loads back to an equal one: every value written out, in a fixed order."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def _apply(data: dict[str, Any], overrides: Overrides) -> None:
    values = {
        ("campaign", "budget_calls"): overrides.budget_calls,
        ("campaign", "seed"): overrides.seed,
        ("campaign", "proposer"): overrides.proposer,
        ("campaign", "out"): None if overrides.out is None else str(overrides.out),
        ("subject", "reference"): overrides.subject,
        ("sandbox", "mode"): overrides.sandbox,
        ("evaluation", "workers"): overrides.workers,
        ("corpus", "path"): None if overrides.corpus_path is None else str(overrides.corpus_path),
    }
    for (section, key), value in values.items():
        if value is None:
            continue
        table = data.setdefault(section, {})
        if not isinstance(table, dict):
            continue  # validation says what is wrong with it
        if key == "path" and table.get("kind") != "text":
            raise RecipeError(
                f'--corpus {value!r} needs a recipe whose [corpus] has kind = "text" with its chunk ranges; '
                f"this one has kind = {table.get('kind')!r}"
            )
        table[key] = value


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    changes: dict[str, Any] = {}
    if isinstance(recipe.corpus, TextCorpus):
        changes["corpus"] = recipe.corpus.model_copy(update={"path": recipe.corpus.path.expanduser().absolute()})
    reference = recipe.subject.reference
    if reference.startswith(("/", "./", "../", "~")) or (os.path.exists(reference) and not _is_shipped(reference)):
        absolute = str(Path(reference).expanduser().absolute())
        changes["subject"] = recipe.subject.model_copy(update={"reference": absolute})
    campaign: dict[str, Any] = {}
    if recipe.campaign.out is not None:
        campaign["out"] = recipe.campaign.out.expanduser().absolute()
    seed_program = recipe.campaign.seed_program
    if "/" in seed_program or seed_program.endswith(".py"):
        campaign["seed_program"] = str(Path(seed_program).expanduser().absolute())
    if campaign:
        changes["campaign"] = recipe.campaign.model_copy(update=campaign)
    return recipe.model_copy(update=changes)


def _is_shipped(reference: str) -> bool:
    from evaluators.subjects import SHIPPED  # imports torch: only where a path of that name exists

    return reference in SHIPPED


def _sentence(detail: ErrorDetails, data: Mapping[str, Any]) -> str:
    """Say in one sentence what is wrong, where, what was given and what would work."""
    place = [part for part in detail["loc"] if not (part in _CORPORA and detail["loc"][0] == "corpus")]
    where = f" in section [{place[0]}]" if len(place) > 1 else ""
    key = ".".join(str(part) for part in place[1:] or place)
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    kind = detail["type"]
    if kind == "extra_forbidden":
        known = _known_keys(place[:-1], data)
        near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        what = "section" if len(place) == 1 else "key"
        return f"unknown {what} {str(place[-1])!r}{where}; {hint}known: {', '.join(known)}"
    if kind == "missing":
        if len(place) == 1:
            return f"section [{place[0]}] is missing"
        flag = _FLAGS.get((str(place[0]), str(place[-1])))
        return f"key {key!r} is missing{where}" + (f"; give it there or with {flag}" if flag else "")
    if kind == "union_tag_not_found":
        return f"key 'kind' is missing in section [corpus]; known: {', '.join(_CORPORA)}"
    if kind == "union_tag_invalid":
        return f"unknown kind {data['corpus'].get('kind')!r} in section [corpus]; known: {', '.join(_CORPORA)}"
    if kind == "value_error" and (not place or isinstance(detail["input"], dict | BaseModel)):
        return f"{message}" + (f" (section [{place[0]}])" if place else "")
    if kind in ("model_type", "model_attributes_type", "dict_type") and len(place) == 1:
        return f"{place[0]!r} is {detail['input']!r}; it must be a section [{place[0]}]"
    given = repr(detail["input"])
    return f"{key} = {given if len(given) <= 80 else given[:77] + '...'}{where}: {message}"


def _known_keys(place: Sequence[object], data: Mapping[str, Any]) -> list[str]:
    if not place:
        return list(Recipe.model_fields)
    if place[0] == "corpus":
        kind = data["corpus"].get("kind") if isinstance(data.get("corpus"), Mapping) else None
        return list(_CORPORA[str(kind)].model_fields) if str(kind) in _CORPORA else []
    section = Recipe.model_fields[str(place[0])].annotation
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []
