"""Functions for the config whose settings are those of the constructors that they fill, so that
each setting, its default and its check are written once. No task lives here.

    @settings_of(FOLDER, SAMPLES, Group(MyTask, without=("corpus",)))
    def my_task_from_files(**settings: Any) -> MyTask: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from xcloud.tasks.corpus.demo_labelled import DemoSizes
from xcloud.tasks.corpus.folder import LabelledFolder
from xcloud.tasks.corpus.hub import HubSet
from xcloud.tasks.corpus.labelled import ColumnChoice
from xcloud.tasks.corpus.text import Sampling

T = TypeVar("T")
R = TypeVar("R")
PLAIN = (str, int, float, tuple, type(None))


class Group(Generic[T]):
    """What a user sets of a constructor. without: parameters that the function gives instead.
    names: parameter=NAME where users call it otherwise (seed="split_seed")."""

    def __init__(
        self, constructor: Callable[..., T], without: tuple[str, ...] = (), **names: str
    ) -> None:
        self._constructor = constructor
        self._parameters = {
            names.get(name, name): parameter.replace(name=names.get(name, name))
            for name, parameter in inspect.signature(constructor).parameters.items()
            if name not in without
        }
        self._own = {new: old for old, new in names.items()}

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """By the name that users know."""
        return self._parameters

    def make(self, settings: Mapping[str, Any], **given: Any) -> T:
        """The constructor's object, from its own among the settings and what is given."""
        own = {
            self._own.get(name, name): settings[name]
            for name in self._parameters
            if name in settings
        }
        return self._constructor(**(own | given))


def settings_of(
    *groups: Group[Any], **defaults: Any
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let a function's `**settings` be those of the groups, in that order, after its own.

    The signature says so: the config is checked against it. defaults: where they differ from the
    constructors'. null for an object (a tokenizer) is its default.
    """

    def decorate(build: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(build)
        taken = {n: p for n, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        for group in groups:
            taken = taken | {n: p for n, p in group.parameters.items() if n not in taken}
        taken = {n: p.replace(default=defaults.get(n, p.default)) for n, p in taken.items()}
        signature = own.replace(parameters=list(taken.values()))

        @functools.wraps(build)
        def built(*args: Any, **settings: Any) -> R:
            given = signature.bind(*args, **settings).arguments
            said = {
                name: value
                for name, value in given.items()
                if value is not None or isinstance(taken[name].default, PLAIN)
            }
            return build(**(defaults | said))

        built.__signature__ = signature  # type: ignore[attr-defined]
        return built

    return decorate


def samples_without(*shares: str) -> Group[Sampling]:
    """Sampling of samples, less the shares that have nothing to be held out for."""
    return Group(
        functools.partial(Sampling, unit="samples"),
        (*shares, "unit"),
        seed="split_seed",
        max_train_pairs="max_train_samples",
        max_eval_pairs="max_eval_samples",
    )


DEMO = Group(DemoSizes, seed="corpus_seed")
FOLDER = Group(LabelledFolder, ("own_names",))
HUB = Group(HubSet, ("own_names", "hidden_test"))
COLUMNS = Group(ColumnChoice, ("num_texts",))
SAMPLES = samples_without()
