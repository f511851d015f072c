"""Decide which cloud may hold what.

`security` of an experiment (Visibility) restricts batch fields and parts of the model to named
clouds; policy.yaml of one cloud (Policy) sets bounds that a file from elsewhere cannot widen,
checked before what it names is imported (docs/security.md).

A rank loads exactly the fields that its stages read, so text that a stage does not need never
enters its cloud; a layout with a stage that reads or holds a restricted one elsewhere is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import yaml  # type: ignore[import-untyped]
from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.project import POLICY_FILE, project_root
from xcloud.base.settings import PACKAGED, Positive, settings
from xcloud.base.yaml_text import events
from xcloud.security.defences import Defence, Privacy
from xcloud.security.places import Lead, is_place, leads_of, lies_below, link_out

CONSTRUCTORS = frozenset(
    f"xcloud.{name}"
    for name in """
base.settings.nothing layout.Cloud layout.ClusterLayout line.mailbox.Mailbox
net.link_profile.LinkProfile
net.link_profile.Liveness features.one_way.layout.OneWayCloud features.one_way.layout.OneWayLayout
comm.compression.Compression comm.compression_plans.PerBoundary comm.compression_plans.PerTensor
comm.compression_plans.Phase comm.compression_plans.Phased comm.compressor.Chain
comm.low_rank.PowerSgd comm.low_rank.Svd comm.memory.DeltaCache comm.memory.ErrorFeedback
comm.precision.BlockInt comm.precision.Cast comm.sparsify.RandomK comm.sparsify.RandomTopK
comm.sparsify.TopK comm.sparsify.TopRows comm.transform.Transform
models.electra.model.MultilingualElectra
models.electra.parts.DiscriminatorSettings models.electra.parts.Generator experiment.Experiment
job.job.Launch features.one_way.job.OneWayExperiment features.one_way.job.OneWayTraining
models.abnet.AbNet models.backbone.OwnBackbone models.backbone.PretrainedBackbone
models.backbone.PublicBackbone models.backbone.SeededBackbone models.causal.CausalLM
models.causal_stage.NextTokenPretraining models.causal_stage.OwnCausal models.causal_network.Lora
models.transformer.Beam models.transformer.Greedy models.low_rank_split.LowRankSplit
models.split_point.Split models.pretraining.MaskedLanguageModelling models.transformer.Transformer
comm.memory.NoMemory features.replicas.gradient_averaging.GradientAveraging
features.replicas.late.GoOn features.replicas.late.Skip features.replicas.late.Wait
features.replicas.local_updates.LocalUpdates features.replicas.merging.Median
features.replicas.merging.NormBound features.replicas.merging.TrimmedMean
pipeline.one_forward_one_backward.OneForwardOneBackward
pipeline.one_forward_one_backward.ZeroBubble features.one_way.feed.Feed
features.replicas.outer_optimizer.OuterOptimizer pipeline.schedule.GPipe job.strategy.Strategy
features.autopilot.settings.Autopilot planner.settings.Planning tracking.tracker.MlflowTracker
tracking.tracker.NullTracker security.defences.GaussianNoise
security.defences.Marvell security.defences.MaxNorm
security.defences.Privacy features.leak_meter.meter.LeakMeter
security.policy.Visibility tasks.classification.DemoClassification
tasks.classification.DemoCrossLingual tasks.classification.FolderClassification
tasks.classification.FolderCrossLingual tasks.classification.HubClassification
tasks.classification.HubCrossLingual tasks.language_modelling.DemoLanguageModelling
tasks.language_modelling.FolderLanguageModelling tasks.language_modelling.HubLanguageModelling
tasks.multilingual_text.MultilingualText tasks.preferences.DemoPreferences
tasks.preferences.FolderPreferences tasks.preferences.HubPreferences
tasks.question_answering.DemoQuestionAnswering
tasks.question_answering.FolderQuestionAnswering tasks.question_answering.HubQuestionAnswering
tasks.text_sources.DemoText tasks.text_sources.FolderText tasks.text_sources.HubText
tasks.text_sources.PublicText tasks.tokenizer.FileTokenizer tasks.tokenizer.PretrainedTokenizer
tasks.tokenizer.TrainedTokenizer tasks.translation.DemoTranslation
tasks.translation.FolderTranslation tasks.translation.HubTranslation tasks.wit3.Wit3Translation
features.two_buffered.schedule.TwoBuffered pipeline.muon.Muon pipeline.settings.Checkpoints
pipeline.settings.Optimizer
pipeline.settings.Patches pipeline.settings.Training
""".split()
)


HeldBy = Callable[[str, str], frozenset[str] | None]
"""Of a job: what a cloud holds, of "holders" or "weights"; None where it has no such names."""
_WORDS = {
    "holders": ("reads", "no stage reads that field; the fields are"),
    "weights": ("holds the weights of", "the model has no such part; its parts are"),
}


MAX_SETTINGS = {
    "launch.max_restarts": 100,
    "training.checkpoint.keep": 100,
    "cluster.liveness.join_within_s": 7 * 86_400,
}
"""What a file from elsewhere may ask for at most, where it costs this cloud what training itself
does not: starts without end, a full disk, ports that stay open."""


OnDeparture = Literal["alarm", "stop", "ignore"]


@runtime_checkable
class Meter(Protocol):
    """A measurement of what other clouds could recover (features/leak_meter/meter.py)."""

    @property
    def last_steps(self) -> int:
        """The number of updates, the last of training, whose messages are kept."""

    @property
    def max_rows(self) -> int:
        """The number of rows kept of each kind of message, the newest."""

    def measure(self, run_dir: Path) -> dict[str, Any]:
        """Return the figures of a finished run for its summary."""


@settings("security")
class Visibility:
    """The settings of `security`.

    holders: field name -> clouds that may hold it. Unnamed fields may be held wherever a stage
        reads them.
    weights: the same for parts of the model, such as embeddings, layers, head.
    may_keep_rows: whether a cloud may keep what crossed from another for later epochs
        (training.activation_cache_mb).
    defences: noise on what crosses a boundary, by direction. meter: measure after training what
        others could recover. privacy: clip and noise gradients or weight changes, and account
        for it.
    on_departure: what to do when activations or gradients from another cloud suddenly change in
        norm, spread or direction (features/sentinel/): alarm, stop the run, or ignore it. None:
        alarm, but ignore where one machine plays all clouds, which then have one owner.
    """

    holders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    weights: Mapping[str, Sequence[str]] = field(default_factory=dict)
    may_keep_rows: bool = True
    defences: Mapping[Literal["forward", "backward"], Defence | None] = field(default_factory=dict)
    meter: Meter | None = None
    privacy: Privacy | None = None
    on_departure: OnDeparture | None = None

    @property
    def defences_label(self) -> str:
        """The defences in words: "gaussian(0.1)+marvell(4)", forward first; "" without any."""
        both = [self.defences.get(way) for way in ("forward", "backward")]
        if any(both):
            return "+".join(d.label if d else "none" for d in both)
        return ""

    def check(self, clouds: Sequence[str], held_by: HeldBy) -> None:
        """Raise ConfigError where a cloud reads a field, or holds a part of the model, against the
        rules.

        held_by: of the job.
        """
        for what, (verb, unknown) in _WORDS.items():
            rule: Mapping[str, Sequence[str]] = getattr(self, what)
            held = {cloud: held_by(cloud, what) or frozenset() for cloud in clouds if rule}
            known = frozenset[str]().union(*held.values())
            for name, holders in rule.items():
                where = f"security.{what}.{name}"
                only = ", ".join(holders) or "no cloud"
                if name not in known:
                    raise ConfigError(f"{where}: {unknown} {', '.join(sorted(known))}")
                for other in [holder for holder in holders if holder not in clouds]:
                    there = ", ".join(clouds)
                    raise ConfigError(f"{where} names cloud {other!r}; the clouds are {there}")
                for cloud in clouds:
                    if name in held[cloud] and cloud not in holders:
                        raise ConfigError(
                            f"cloud {cloud!r} {verb} {name!r}, but {where} allows it only in "
                            f"{only}. Move the stage (cluster.clouds, strategy) or the rule."
                        )


_SHA256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@settings()
class Policy:
    """The bounds of what an experiment file may ask of this cloud.

    Folders are relative to the project's.

    me: the name of this cloud: its ranks are of no other one, whatever a file or --cloud says.
    peers: the certificates by which this cloud knows others on a line between owners: name of the
        cloud -> its file, or two of them on the day of a change. Relative to the policy's folder,
        where this cloud's own lie too, as {me}.key and {me}.pem (`python -m xcloud keys new`).
    approved: SHA-256 of the experiment files that may run here, asked before anything in them is
        read; None: any that keeps to the rest.
    constructors: full names of those besides xcloud's own that a file may call.
    read: folders below which it may name files. The run folder is always one of them.
    write: the same for cache_dir and the tracker's folder.
    hub: names on the hub that may be fetched, with this machine's token: owner/name, or
        owner/name@revision where the file names a revision.
    addresses: the tracking servers, mailboxes and places for weights that it may name, as written
        there.
    clouds: names of those that may take part; None: any.
    holders, weights: as security.holders and security.weights, beside those of the file.
    require: dotted setting of the job -> the value it must have, or {min: …, max: …}. Of an
        object the name of its class counts; "job" is the job itself. MAX_SETTINGS are bounds of
        every policy that does not name them here.
    max_ranks: of all clouds together.
    """

    me: str | None = None
    peers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    approved: Sequence[_SHA256] | None = None
    constructors: Sequence[str] = ()
    read: Sequence[str] = ()
    write: Sequence[str] = (".cache", "mlruns")
    hub: Sequence[str] = ()
    addresses: Sequence[str] = ()
    clouds: Sequence[str] | None = None
    holders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    weights: Mapping[str, Sequence[str]] = field(default_factory=dict)
    require: Mapping[str, Any] = field(default_factory=dict)
    max_ranks: Positive = 1024

    def __post_init__(self) -> None:
        for key, wanted in self.require.items():
            if isinstance(wanted, Mapping) and not (wanted and wanted.keys() <= {"min", "max"}):
                raise ConfigError(
                    f"require.{key} must be a value, or bounds as {{min: 1, max: 2}}, got {wanted}"
                )

    @classmethod
    def of(cls, content: object, file: Path) -> Policy:
        """Build the policy that a file holds. Raises ConfigError."""
        known = [one.name for one in fields(cls)]
        if not isinstance(content, Mapping) or not content.keys() <= set(known):
            raise ConfigError(f"{file} may have these keys: {', '.join(known)}; got {content!r}")
        try:
            return cls(**content)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    def check_approved(self, data: bytes, file: Path, policy_file: Path) -> None:
        """Refuse a file whose content nobody here has approved, before it is parsed.

        policy_file: where this policy stands, for the message.
        """
        digest = hashlib.sha256(data).hexdigest()
        if self.approved is not None and digest not in self.approved:
            raise ConfigError(
                f"{file} is not approved in this cloud: its SHA-256 is {digest}, which is none "
                f"of `approved` in {policy_file}. Read what it asks for, and approve it, with "
                f"python -m xcloud approve {file}"
            )

    def check_build(self, settings: Mapping[str, Any]) -> None:
        """Refuse what building the job would call or make that it may not."""
        num_ranks = 0
        for where, key, value in _entries(settings):
            if key == "_target_":
                known = value in self.constructors or str(value) in CONSTRUCTORS
                if not (known and isinstance(value, str)):
                    more = _line("constructors", *self.constructors, str(value))
                    raise _refusal(
                        where, value, allowed="xcloud's and this cloud's constructors", line=more
                    )
            elif key.startswith("_"):
                raise ConfigError(f"{where}: an experiment file has no such key")
            elif key == "num_ranks" and isinstance(value, int):
                num_ranks += value
                if num_ranks > self.max_ranks:
                    allowed = f"{self.max_ranks} ranks in all"
                    raise _refusal(where, value, allowed=allowed, line=f"max_ranks: {num_ranks}")
        for lead in leads_of(settings):
            if lead.to == "command":
                raise ConfigError(
                    f"{lead.where} is {lead.value!r}, but no experiment file may name a command "
                    "that this machine runs, and no policy allows it: take it out of the file, "
                    "and give one of your own on the command line"
                )

    def check(self, settings: Mapping[str, Any], run_dir: Path) -> None:
        """Refuse what check_build does, and what running the job would read, write or contact."""
        self.check_build(settings)
        names = []
        cluster = settings.get("cluster")
        if isinstance(cluster, Mapping) and isinstance(cluster.get("clouds"), Mapping):
            names = list(map(str, cluster["clouds"]))
        allowed = names if self.clouds is None else self.clouds
        for name in names:
            if name not in allowed:
                more = _line("clouds", *allowed, name)
                raise _refusal("cluster.clouds", name, allowed=", ".join(allowed), line=more)
        if self.me is not None and names and self.me not in names:
            raise ConfigError(
                f"cluster.clouds are {', '.join(names)}, but this cloud is {self.me!r} "
                f"({POLICY_FILE}, me): it takes no part in this experiment"
            )
        for lead in leads_of(settings):
            self._check_lead(lead, str(run_dir.absolute()))

    def _check_lead(self, lead: Lead, run_dir: str) -> None:
        where = lead.where
        value = lead.value
        if lead.to == "address":
            if value not in self.addresses:
                allowed = ", ".join(self.addresses) or "no address"
                raise _refusal(
                    where, value, allowed=allowed, line=_line("addresses", *self.addresses, value)
                )
        elif lead.to == "hub" and not is_place(value):
            name = f"{value}@{lead.revision}" if lead.revision else value
            if name not in (*self.hub, *PACKAGED):
                allowed = f"of the hub {', '.join(self.hub) or 'nothing'}"
                raise _refusal(where, name, allowed=allowed, line=_line("hub", *self.hub, name))
        else:
            use = "write" if lead.to == "write" else "read"
            folders = [*getattr(self, use), run_dir]
            allowed = f"files below {', '.join(folders)} (in {project_root()})"
            if not lies_below(value, folders):
                raise _refusal(
                    where, value, allowed=allowed, line=_line(use, *getattr(self, use), value)
                )
            if use == "read" and (link := link_out(value, folders)) is not None:
                target = os.path.realpath(link)
                raise _refusal(
                    f"{link}, in {where},",
                    target,
                    allowed=allowed,
                    line=_line(use, *self.read, target),
                )

    def check_required(self, job: object) -> None:
        """Refuse a job that does not have what this cloud asks of every one."""
        for key, most in MAX_SETTINGS.items():
            value = value_at(job, key)
            if key not in self.require and value > most:
                more = f"require: {{{key}: {{max: {value:.10g}}}}}"
                raise _refusal(key, value, allowed=f"at most {most}", line=more)
        for key, wanted in self.require.items():
            value = job if key == "job" else value_at(job, key)
            if not _meets(value, wanted):
                asked = wanted
                if isinstance(wanted, Mapping):
                    asked = " and ".join(f"{name} {bound}" for name, bound in wanted.items())
                plain = value
                if not isinstance(value, str | int | float | None):
                    plain = type(value).__name__
                raise ConfigError(
                    f"{key} is {plain!r}, but {POLICY_FILE} of this cloud requires {asked}"
                )

    def check_held(self, clouds: Iterable[str], held_by: HeldBy) -> None:
        for what, cloud in product(_WORDS, clouds):
            rule: Mapping[str, Sequence[str]] = getattr(self, what)
            held = held_by(cloud, what) if rule else frozenset()
            if held is None:
                raise ConfigError(
                    f"{POLICY_FILE} of this cloud has {what}, and a job of this kind has no "
                    "fields or parts that it could restrict; without that rule it can run"
                )
            for name in sorted(held & rule.keys()):
                if cloud not in rule[name]:
                    more = f"{what}: {{{_line(name, *rule[name], cloud)}}}"
                    allowed = f"{name!r} only in {', '.join(rule[name]) or 'no cloud'}"
                    raise _refusal(
                        f"a cloud that holds {name!r}", cloud, allowed=allowed, line=more
                    )


def targets_of(settings: Mapping[str, Any]) -> set[str]:
    """Return all constructors that these settings name."""
    return {str(value) for _, key, value in _entries(settings) if key == "_target_"}


def _line(key: str, *names: str) -> str:
    return f"{key}: [{', '.join(names)}]"


def _refusal(where: str, came: object, allowed: str, line: str) -> ConfigError:
    return ConfigError(
        f"{where} is {came!r}, but an experiment file from elsewhere is allowed {allowed}. If you "
        f"want this, put it into {POLICY_FILE} of this cloud: {line}"
    )


def _entries(node: object, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield whatever nested containers hold, containers too: dotted name, last key, value."""
    if isinstance(node, Mapping):
        named = [(f"{path}.{key}" if path else str(key), str(key), node[key]) for key in node]
    else:
        parts = node if isinstance(node, list) else []
        last = path.rsplit(".", 1)[-1]
        named = [(f"{path}[{index}]", last, entry) for index, entry in enumerate(parts)]
    for where, key, value in named:
        yield where, key, value
        yield from _entries(value, where)


def value_at(node: Any, key: str) -> Any:
    """Return what a job has under a dotted name; None where it has nothing."""
    for part in key.split("."):
        if isinstance(node, Mapping):
            node = node.get(part)
        else:
            node = None if part.startswith("_") else getattr(node, part, None)
    return node


def _meets(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return bool(wanted.get("min", value) <= value <= wanted.get("max", value))
    return bool(value == wanted) or (isinstance(wanted, str) and type(value).__name__ == wanted)


MAX_BYTES = 128_000  # the largest experiment of conf/ has 7,000
MAX_VALUES = 4_000  # keys included; it has 500. OmegaConf takes 0.1 ms for each
MAX_LENGTH = 10_000  # characters of one value
MAX_DEPTH = 32  # it has 7


def plain_text(path: Path, approve: Callable[[bytes, Path], None] | None = None) -> str:
    """Read a YAML file that may come from elsewhere, if it holds mappings, lists, texts and
    numbers.

    approve: sees what it holds before it is parsed.

    No anchors and aliases (292 bytes can stand for a million values), no tags, no interpolation
    (which reads environment variables of this machine), and bounds that large experiments keep by
    far. Raises ConfigError naming the file and, where a value is the reason, its line.
    """
    if not path.is_file():  # a pipe might never end
        raise ConfigError(f"there is no file {path}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_BYTES} bytes")
        if approve is not None:
            approve(data, path)
        text = data.decode()
        _check_data(text, path)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    return text


def _check_data(text: str, path: Path) -> None:
    depth = num_values = 0
    for event in events(text):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        num_values += isinstance(event, yaml.NodeEvent)
        value = event.value if isinstance(event, yaml.ScalarEvent) else ""
        for is_there, what in (
            (getattr(event, "anchor", None), "an anchor or alias (& or *)"),
            (getattr(event, "tag", None), "a tag (!)"),
            ("${" in value, "an interpolation (${...}; run.py --resolve writes without)"),
            (depth > MAX_DEPTH, f"more than {MAX_DEPTH} values in each other"),
            (num_values > MAX_VALUES, f"more than {MAX_VALUES} keys and values"),
            (len(value) > MAX_LENGTH, f"more than {MAX_LENGTH} characters in a value"),
        ):
            if is_there:
                line = event.start_mark.line + 1
                raise ConfigError(f"{path}, line {line}: {what} is not read; plain values are")
