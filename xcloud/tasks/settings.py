"""Config factories that take their parameters from the constructors they call, so that each
setting, its default and its check are written once. No tasks here.

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
    """The user's settings of a constructor. without: parameters that the factory passes itself.
    names: parameter=NAME if the setting has another name (seed="split_seed")."""

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
        """By setting name."""
        return self._parameters

    def make(self, settings: Mapping[str, Any], **given: Any) -> T:
        """Call the constructor with its own settings and `given`."""
        own = {
            self._own.get(name, name): settings[name]
            for name in self._parameters
            if name in settings
        }
        return self._constructor(**(own | given))


def settings_of(
    *groups: Group[Any], **defaults: Any
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Replace a factory's `**settings` by the groups' parameters, after its own.

    The config is checked against the resulting signature. defaults: override the constructors'.
    null for an object (a tokenizer) means its default.
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
    """Sampling settings without the shares that do not apply."""
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
