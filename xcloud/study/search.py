"""A search over settings (`hydra/sweeper=search`), by Optuna's ask and tell, an extra: which point
to run next follows from what the points before it came to.

There is no database: what is known of earlier points is read from the sweep's own folder, as
points.csv lists it, so the same command resumes it. Several objectives make a Pareto front.
Seeds are repeats of a setting, whose mean counts. A setting whose planned step time or memory
breaks a bound is refused before it runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
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
TriedKey = tuple[str, ...]  # of a setting, by which it is known whether it was tried
MAX_ASKED = 20  # for a setting that has not been tried; then the space is taken for exhausted
FAR = 6.0  # times the distance from the best to the middle; what is farther is told as so far
MIN_LOGGED = 1e-9  # of what may be 0, such as bytes between clouds of a job in one cloud
MIN_KNOWN = 4  # settings that have run before the sampler's model chooses one


@settings("hydra.sweeper")
class SearchSettings:
    """The settings of a search.

    runs: the number of settings to try, earlier commands of the same sweep included.
    objectives: the goals, one or several: "quality" is the task's main score, "bytes" the bytes
        that cross between clouds for a token (for a step, where tokens are not counted),
        "step_time" the median seconds of a step.
    seeds: the number of runs of each setting, with the seeds from seed= on, or 1, 2 and so on.
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
    """The settings that a search varies, by key as typed, the words that all points share, and
    the first seed."""

    varied: Mapping[str, Any]
    shared: Overrides
    first_seed: int = 1

    @classmethod
    def of(cls, words: Sequence[str]) -> SearchSpace:
        """Read the words of a command line. Raises ConfigError for what cannot be searched."""
        optuna = imported()
        varied: dict[str, Any] = {}
        shared: list[str] = []
        first_seed = 1
        for word in words:
            found = read(word)
            key = "" if found is None else found.get_key_element().lstrip("+")
            if found is None or not found.is_sweep_override():
                if key != "seed":
                    shared.append(word)
                elif found is not None and isinstance(seed := found.value(), int):
                    first_seed = seed
                else:
                    raise ConfigError(f"{word}: a search takes a whole number, the first seed")
                continue
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
        return cls(varied=varied, shared=tuple(shared), first_seed=first_seed)

    def words(self, values: Values, seed: int) -> Overrides:
        """Return the words of a point."""
        own = [f"{key}={text}" for key, text in values.items()]
        return (*self.shared, *own, f"seed={seed}")

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
        if others != {word for word in self.shared if not word.startswith("sweep=")}:
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


@dataclass(frozen=True)
class Tried:
    """A setting that was tried.

    results: the mean over its seeds of each objective; None if it was refused or failed.
    """

    params: dict[str, Any]
    results: list[float] | None


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
        tried = self._tried_before(folder)
        if tried:
            say(f"search: {len(tried)} settings are known from before")
        while len(tried) < self.settings.runs:
            asked = self._ask(tried, count=min(self.batch, self.settings.runs - len(tried)))
            if not asked:
                say("search: every setting of the space has been tried")
                break
            for params, results in zip(asked, self._results(asked), strict=True):
                tried[_key(params)] = Tried(params, results)
            self._say_front(tried.values())
        return len(tried)

    def _seeds(self) -> range:
        return range(self.space.first_seed, self.space.first_seed + self.settings.seeds)

    def _tried_before(self, folder: Path) -> dict[TriedKey, Tried]:
        """Return what earlier commands have found."""
        found: dict[TriedKey, tuple[dict[str, Any], list[list[float]]]] = {}
        words = {f"seed={seed}" for seed in self._seeds()}
        for name, entry in read_points(folder).items():
            params = self.space.read(entry["overrides"])
            # Points that this search did not make are no trials of it.
            if params is None or words.isdisjoint(entry["overrides"]):
                continue
            summary = read_summary(folder / name)
            if summary.get("status") == "finished":
                _, results = found.setdefault(_key(params), (params, []))
                results.append(objectives_of(summary, names=self.settings.objectives))
        # A setting with seeds missing is tried again; its finished runs are kept.
        return {
            key: Tried(params, _means(results))
            for key, (params, results) in found.items()
            if len(results) >= self.settings.seeds
        }

    def _ask(self, tried: Mapping[TriedKey, Tried], count: int) -> list[dict[str, Any]]:
        """Return up to so many settings that were not tried."""
        optuna = imported()
        settings = _all_of(self.space.varied)
        left = [params for params in settings if _key(params) not in tried]
        # A sampler does not know that a space is finite.
        if settings and len(left) <= count:
            return left
        study = self._study(tried)
        found: dict[TriedKey, dict[str, Any]] = {}
        for number in range(MAX_ASKED):
            if number > count and left:  # the sampler insists: take others that are left
                study.enqueue_trial(next(p for p in left if _key(p) not in found))
            trial = study.ask(fixed_distributions=dict(self.space.varied))
            if _key(trial.params) in tried or _key(trial.params) in found:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            found[_key(trial.params)] = trial.params
            if len(found) == count:
                break
        return [*found.values()]

    def _study(self, tried: Mapping[TriedKey, Tried]) -> Any:
        """Return a study that knows the settings tried so far: these and the sampler's seed decide
        what it asks. Its model is a Gaussian process, which learns from few runs: with
        tree-structured Parzen estimators half of the searches of 12 runs ended behind a grid."""
        optuna = imported()
        first = self.first_params()
        sampler = optuna.samplers.GPSampler(
            seed=self.settings.sampler_seed * 10_000 + len(tried),
            n_startup_trials=max(MIN_KNOWN, len(first)),
        )
        directions = ["minimize"] * len(self.settings.objectives)
        study = optuna.create_study(directions=directions, sampler=sampler)
        for params, values in zip(
            (each.params for each in tried.values()), self.as_sampled(tried.values()), strict=True
        ):
            study.add_trial(
                optuna.trial.create_trial(
                    params=params, distributions=dict(self.space.varied), values=values
                )
            )
        for params in first:
            if _key(params) not in tried:
                study.enqueue_trial(params)
        return study

    def first_params(self) -> list[dict[str, Any]]:
        """Return the settings to begin with: each choice once, and all numbers in their middle."""
        choices = {
            k: kind.choices for k, kind in self.space.varied.items() if hasattr(kind, "choices")
        }
        count = max(map(len, choices.values()), default=1)
        return [
            {
                key: choices[key][number % len(choices[key])] if key in choices else _middle(kind)
                for key, kind in self.space.varied.items()
            }
            for number in range(min(count, max(1, self.settings.runs // 2)))
        ]

    def as_sampled(self, tried: Collection[Tried]) -> list[list[float]]:
        """Return the results of each setting as the sampler is told them. Of bytes and seconds
        factors count. A run that diverged counts as not much worse than the middle, or it would
        hide how all others differ. A setting without results counts as bad as the worst, or the
        sampler, which knew nothing of it, would ask for its neighbours again and again."""
        known = [each.results for each in tried if each.results is not None]
        columns: list[list[float]] = []
        for place, name in enumerate(self.settings.objectives):
            column = [results[place] for results in known] or [0.0]
            if name != "quality":
                column = [math.log(max(value, MIN_LOGGED)) for value in column]
            middle = statistics.median(column)
            if name != "bytes" and (spread := middle - min(column)) > 0:
                column = [min(value, middle + FAR * spread) for value in column]
            columns.append(column)
        worst = [max(column) for column in columns]
        rows = zip(*columns, strict=True)
        return [worst if each.results is None else [*next(rows)] for each in tried]

    def _results(self, asked: Sequence[dict[str, Any]]) -> list[list[float] | None]:
        """Run these settings; return the results of each, None where it is refused or fails."""
        words: dict[int, list[Overrides]] = {}
        for number, params in enumerate(asked):
            own = [self.space.words(_texts(params), seed=seed) for seed in self._seeds()]
            # One seed is enough: they share shapes and plans.
            if refusal := self._refusal(own[0]):
                say(f"refused before it runs: {_named(params)}: {refusal}")
            else:
                words[number] = own
        # All points in one call: they may run at once.
        outcomes = iter(self.run([point for own in words.values() for point in own]))
        found: list[list[float] | None] = [None] * len(asked)
        for number, own in words.items():
            of_seeds = [next(outcomes) for _ in own]
            try:
                for outcome in of_seeds:
                    if isinstance(outcome, str):  # the reason why there is no summary
                        raise RunFailed(outcome)
                names = self.settings.objectives
                found[number] = _means(
                    [objectives_of(one, names) for one in of_seeds if not isinstance(one, str)]
                )
            except RunFailed as error:
                say(f"counts as failed: {_named(asked[number])}: {error}")
        return found

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

    def _say_front(self, tried: Collection[Tried]) -> None:
        """Say what no other setting beats in every objective."""
        known = [each for each in tried if each.results is not None]
        best = [each for each in known if not any(_beats(other, each) for other in known)]
        self.front = [_texts(each.params) for each in best]
        say(f"search: {len(tried)} of {self.settings.runs} settings tried; in front:")
        for each in sorted(best, key=lambda each: each.results or []):
            shown = zip(self.settings.objectives, each.results or [], strict=True)
            figures = ", ".join(_shown(name, value) for name, value in shown)
            say(f"  {_named(each.params)}: {figures}")


def _beats(one: Tried, other: Tried) -> bool:
    """Return whether a setting is as good as another one in every objective, and better in one."""
    pairs = [*zip(one.results or [], other.results or [], strict=True)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _means(results: Sequence[Sequence[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*results, strict=True)]


def _shown(name: Objective, value: float) -> str:
    if name == "quality":
        return f"quality {abs(value):.4g}"
    if name == "step_time":
        return f"{human_seconds(value)} a step"
    return f"{value:.4g} bytes"


def _middle(kind: Any) -> Any:
    """Return the middle of a range of numbers, on its scale."""
    if kind.log:
        middle = math.sqrt(kind.low * kind.high)
        return round(middle) if isinstance(kind.low, int) else middle
    if isinstance(kind.low, int):
        return int(kind.low + (kind.high - kind.low) // kind.step // 2 * kind.step)
    return (kind.low + kind.high) / 2


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


def _key(values: Mapping[str, Any]) -> TriedKey:
    return tuple(str(values[key]) for key in sorted(values))


def _texts(params: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in params.items()}


def _named(params: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in params.items())
