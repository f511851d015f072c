"""A search over settings (`hydra/sweeper=search`), by Optuna's ask and tell, an extra: which point
to run next follows from what the points before it came to.

There is no database: what is known of earlier points is read from the sweep's own folder, as
points.csv lists it, so the same command resumes it. Several objectives make a Pareto front.
Seeds are repeats of a setting, whose mean counts. A setting whose planned step time or memory
breaks a bound is refused before it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from xcloud.base.errors import ConfigError, RunFailed
from xcloud.base.overrides import read
from xcloud.base.settings import NotNegative, Positive, PositiveFloat, ReadPath, settings
from xcloud.base.terminal import say
from xcloud.base.units import human_bytes, human_seconds
from xcloud.job.config import Settings
from xcloud.record.summary import main_score, read_summary
from xcloud.study.points import Overrides, read_points

Objective = Literal["quality", "bytes", "step_time"]
Values = Mapping[str, str]  # the text of each setting that is searched
MAX_ASKED = 50  # for a setting that has not been tried; then the space is taken for exhausted
FIRST_AT_RANDOM = 8  # at most: before the sampler has seen anything


@settings("hydra.sweeper")
class SearchSettings:
    """The settings of a search.

    runs: the number of settings to try, earlier commands of the same sweep included.
    objectives: the goals, one or several: "quality" is the task's main score, "bytes" the bytes
        that cross between clouds for a token (for a step, where tokens are not counted),
        "step_time" the median seconds of a step.
    seeds: the number of runs of each setting, with seeds 1, 2 and so on.
    sampler_seed: the seed of the sampler. This seed and the results so far decide which setting is
        tried next.
    max_step_s: a setting is refused if its planned step takes more seconds than this.
    max_memory_mb: a setting is refused if its fullest rank is planned to take more megabytes than
        this.
    profile: the file to plan with (docs/planning.md); null makes trial runs.
    """

    runs: Positive = 20
    objectives: Annotated[Sequence[Objective], Field(min_length=1)] = ("quality", "bytes")
    seeds: Positive = 1
    sampler_seed: NotNegative = 1
    max_step_s: PositiveFloat | None = None
    max_memory_mb: PositiveFloat | None = None
    profile: ReadPath | None = None

    def __post_init__(self) -> None:
        if len({*self.objectives}) < len(self.objectives):
            raise ConfigError("hydra.sweeper.objectives: each may be named once")


@dataclass(frozen=True)
class SearchSpace:
    """The settings that a search varies, by key as typed, and the words that all points share."""

    varied: Mapping[str, Any]
    shared: Overrides

    @classmethod
    def of(cls, words: Sequence[str]) -> SearchSpace:
        """Read the words of a command line. Raises ConfigError for what cannot be searched."""
        optuna = imported()
        varied: dict[str, Any] = {}
        shared: list[str] = []
        for word in words:
            found = read(word)
            if found is None or not found.is_sweep_override():
                shared.append(word)
                continue
            key = found.get_key_element().lstrip("+")
            # The grammar is that of sweeps: choices, range and interval.
            value: Any = found.value()
            is_log = "log" in getattr(value, "tags", ())
            if found.is_choice_sweep():
                texts = [*found.sweep_string_iterator()]
                varied[key] = optuna.distributions.CategoricalDistribution(texts)
            elif found.is_range_sweep():
                # range() of Hydra leaves its end out, and optuna's distribution has it.
                stop = value.stop - (1 if float(value.stop).is_integer() else 0)
                whole = all(float(n).is_integer() for n in (value.start, value.stop, value.step))
                if not whole:
                    raise ConfigError(f"{word}: range() takes whole numbers; use interval(a,b)")
                # On a log scale optuna knows no steps.
                varied[key] = optuna.distributions.IntDistribution(
                    int(value.start), int(stop), log=is_log, step=1 if is_log else int(value.step)
                )
            elif found.is_interval_sweep():
                varied[key] = optuna.distributions.FloatDistribution(
                    float(value.start), float(value.end), log=is_log
                )
            else:
                raise ConfigError(f"{word}: a search takes a,b,c or range(a,b) or interval(a,b)")
        if not varied:
            raise ConfigError(
                "hydra/sweeper=search: no setting varies; give choices (compression=none,int8), "
                "range(1,9) or interval(0.1,0.9), tag(log, interval(1e-5,1e-2)) on a log scale"
            )
        # A seed that varies would make luck a setting.
        if "seed" in varied:
            raise ConfigError("seed is no setting to search: hydra.sweeper.seeds=N repeats each")
        return cls(varied=varied, shared=tuple(shared))

    def words(self, values: Values, seed: int) -> Overrides:
        """Return the words of a point."""
        own = [f"{key}={text}" for key, text in values.items()]
        # The search gives the seeds itself.
        shared = [word for word in self.shared if not word.startswith(("seed=", "+seed="))]
        return (*shared, *own, f"seed={seed}")

    def read(self, overrides: Sequence[str]) -> dict[str, Any] | None:
        """Return the values that a point of this search has, as the sampler knows them; None for
        another point."""
        given = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
        # A point of another command in this folder.
        if not self.varied.keys() <= given.keys():
            return None
        rest = {word for word in overrides if word.lstrip("+").split("=")[0] not in self.varied}
        others = {word for word in rest if not word.startswith(("seed=", "sweep="))}
        # Other shared words: its result is of another experiment.
        if others != {w for w in self.shared if not w.startswith(("seed=", "+seed=", "sweep="))}:
            return None
        found: dict[str, Any] = {}
        for key, kind in self.varied.items():
            text = given[key]
            try:
                # Words are texts; optuna compares the numbers that it knows.
                value: Any = type(kind.low)(float(text)) if hasattr(kind, "low") else text
                # A space that has become smaller since leaves earlier points out.
                if not kind._contains(kind.to_internal_repr(value)):
                    return None
            except ValueError:
                return None
            found[key] = value
        return found


def imported() -> Any:
    """Return optuna, which is an extra."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "hydra/sweeper=search needs optuna: pip install 'xcloud[search]'"
        ) from None
    # One line for each trial is written here.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def objectives_of(summary: Mapping[str, Any], names: Sequence[Objective]) -> list[float]:
    """Return the values of a finished run; of each less is better. Raises RunFailed where the run
    does not have one."""
    return [_objective(summary, name) for name in names]


def _objective(summary: Mapping[str, Any], name: Objective) -> float:
    value: float | None
    if name == "quality":
        value = main_score(summary)
    elif name == "step_time":
        value = summary.get("step_time_s", {}).get("median")
    else:
        # Bytes of a token compare runs of different batches; of a task without tokens those of a
        # step are taken.
        value = (summary.get("bytes_per_token") or {}).get("total")
        if value is None:
            value = float(sum(n or 0 for n in summary.get("wan_bytes_per_step", {}).values()))
    # Optuna would take NaN for a good value.
    if value is None or not math.isfinite(value):
        raise RunFailed(f"the run has no {name.replace('_', ' ')}")
    return float(value)


@dataclass
class Search:
    """A search in the folder of a sweep.

    run: a function that runs the points of these words, and returns for each the summary, or the
        reason why there is none.
    compose: a function that composes a point, to plan it before it runs.
    batch: the number of settings that are asked for at once.
    """

    space: SearchSpace
    settings: SearchSettings
    run: Callable[[Sequence[Overrides]], list[Mapping[str, Any] | str]]
    compose: Callable[[Sequence[str]], Mapping[str, Any]]
    batch: int = 1
    front: list[Values] = field(default_factory=list)

    def go_on(self, folder: Path) -> int:
        """Run what is left of the search. Returns how many settings have been tried in all."""
        study = self._study()
        tried = self._told_before(study, folder)
        if tried:
            say(f"search: {len(tried)} settings are known from before")
        while len(tried) < self.settings.runs:
            count = min(self.batch, self.settings.runs - len(tried))
            # _ask adds what it returns to `tried`.
            asked = [trial for _ in range(count) if (trial := self._ask(study, tried)) is not None]
            if not asked:
                say("search: every setting of the space has been tried")
                break
            self._tell(study, trials=asked)
            self._say_front(study, num_tried=len(tried))
        return len(tried)

    def _study(self) -> Any:
        optuna = imported()
        sampler = optuna.samplers.TPESampler(
            seed=self.settings.sampler_seed,
            # A third of the runs at most: the sampler needs some to learn from.
            n_startup_trials=min(FIRST_AT_RANDOM, max(2, self.settings.runs // 3)),
            # Of several at once each counts the others as bad, so that they spread out.
            constant_liar=self.batch > 1,
        )
        directions = ["minimize"] * len(self.settings.objectives)
        return optuna.create_study(directions=directions, sampler=sampler)

    def _told_before(self, study: Any, folder: Path) -> set[tuple[str, ...]]:
        """Tell the study what earlier commands have found; return the settings they tried."""
        optuna = imported()
        by_values: dict[tuple[str, ...], dict[str, Any]] = {}
        results: dict[tuple[str, ...], list[list[float]]] = {}
        for name, entry in read_points(folder).items():
            values = self.space.read(entry["overrides"])
            # Points that this search did not make are no trials of it.
            if values is None:
                continue
            summary = read_summary(folder / name)
            key = _key(values)
            by_values[key] = values
            # Several seeds of a setting are one trial.
            if summary.get("status") == "finished":
                results.setdefault(key, []).append(
                    objectives_of(summary, names=self.settings.objectives)
                )
        # A setting with seeds missing is tried again; its finished runs are kept.
        complete = {k: v for k, v in results.items() if len(v) >= self.settings.seeds}
        for key, found in complete.items():
            study.add_trial(
                optuna.trial.create_trial(
                    params=by_values[key],
                    distributions=dict(self.space.varied),
                    values=[sum(each) / len(each) for each in zip(*found, strict=True)],
                )
            )
        return {*complete}

    def _ask(self, study: Any, tried: set[tuple[str, ...]]) -> Any:
        """Return a trial of a setting that was not tried; None if there seems to be none left."""
        optuna = imported()
        for number in range(MAX_ASKED):
            # TPE may propose the same setting for ever in a small space.
            if number == MAX_ASKED // 5:  # the sampler insists: try what is left at random
                for params in _all_of(self.space.varied):
                    if _key(params) not in tried:
                        study.enqueue_trial(params)
                        break
            trial = study.ask(fixed_distributions=dict(self.space.varied))
            if _key(trial.params) not in tried:
                tried.add(_key(trial.params))
                return trial
            # A trial that was proposed twice must be told something.
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return None

    def _tell(self, study: Any, trials: Sequence[Any]) -> None:
        """Run the points of these trials, or refuse them, and tell the study."""
        optuna = imported()
        words: dict[int, list[Overrides]] = {}
        for number, trial in enumerate(trials):
            seeds = range(1, self.settings.seeds + 1)
            own = [self.space.words(_texts(trial.params), seed=seed) for seed in seeds]
            # One seed is enough: they share shapes and plans.
            if refusal := self._refusal(own[0]):
                say(f"refused before it runs: {_named(trial.params)}: {refusal}")
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                words[number] = own
        # All points in one call: they may run at once.
        found = iter(self.run([point for own in words.values() for point in own]))
        for number, own in words.items():
            outcomes = [next(found) for _ in own]
            try:
                values = [
                    objectives_of(outcome, names=self.settings.objectives)
                    # A text is the reason why there is no summary.
                    for outcome in outcomes
                    if not isinstance(outcome, str)
                ]
                if len(values) < len(own):
                    raise RunFailed(next(o for o in outcomes if isinstance(o, str)))
            except RunFailed as error:
                say(f"counts as failed: {_named(trials[number].params)}: {error}")
                study.tell(trials[number], state=optuna.trial.TrialState.FAIL)
                continue
            means = [sum(each) / len(each) for each in zip(*values, strict=True)]
            study.tell(trials[number], values=means)

    def _refusal(self, words: Overrides) -> str | None:
        """Return why a setting may not run by its plan; None if it may."""
        # Planning takes a trial run, so it is not made without a bound.
        limit_s = self.settings.max_step_s
        limit_mb = self.settings.max_memory_mb
        if limit_s is None and limit_mb is None:
            return None
        # The planner imports torch.
        from xcloud.planner.planning import Planner

        plan: dict[str, Any] = {
            "_target_": "xcloud.planner.settings.Planning",
            "search": [],
            "profile": self.settings.profile,
        }
        planner = Planner(Settings.of({**self.compose(words), "plan": plan}))
        # The plan of the job as it is, not of what would be faster.
        own = planner.report(*planner.profile()).ranked.own
        if limit_s is not None and own.step_s > limit_s:
            planned = human_seconds(own.step_s)
            return f"planned step {planned}, allowed {human_seconds(limit_s)} (max_step_s)"
        # The fullest rank is what a machine must hold.
        cloud, num_bytes = max(own.memory.items(), key=lambda pair: pair[1])
        if limit_mb is not None and num_bytes > limit_mb * 1e6:
            allowed = human_bytes(int(limit_mb * 1e6))
            return f"planned memory {human_bytes(num_bytes)} in {cloud}, allowed {allowed}"
        return None

    def _say_front(self, study: Any, num_tried: int) -> None:
        """Say what no other setting beats in every objective."""
        best = study.best_trials
        self.front = [_texts(trial.params) for trial in best]
        say(f"search: {num_tried} of {self.settings.runs} settings tried; in front:")
        for trial in sorted(best, key=lambda trial: trial.values):
            shown = zip(self.settings.objectives, trial.values, strict=True)
            figures = ", ".join(_shown(name, value) for name, value in shown)
            say(f"  {_named(trial.params)}: {figures}")


def _shown(name: Objective, value: float) -> str:
    if name == "quality":
        return f"quality {abs(value):.4g}"
    if name == "step_time":
        return f"{human_seconds(value)} a step"
    return f"{value:.4g} bytes"


def _all_of(varied: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all settings of a space of choices and whole numbers, up to 10,000; else none."""
    found: list[dict[str, Any]] = [{}]
    for key, kind in varied.items():
        if hasattr(kind, "choices"):
            values = [*kind.choices]
        elif isinstance(kind.low, int):
            values = [*range(kind.low, kind.high + 1, kind.step)]
        else:
            return []
        found = [{**params, key: value} for params in found for value in values]
        # A space of so many settings is not listed to find one that is left.
        if len(found) > 10_000:
            return []
    return found


def _key(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(values[key]) for key in sorted(values))


def _texts(params: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in params.items()}


def _named(params: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in params.items())
