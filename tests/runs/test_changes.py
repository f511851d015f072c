"""Going on with something changed: every cell of survive/resume.TABLE, on small jobs in threads,
over links in memory where there is one, and else on what decides."""

import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.attempts import CODECS, TRAINING, Shape, job
from tests.channels import same_state, stored
from tests.configs import composed
from tests.feature_rows import feature_rows
from tests.local_replicas import Diary, Scalar
from tests.nightly import each_once, first_daily
from tests.pipelines import TiedToy, in_threads
from tests.replicas import Post
from tests.toy import toy_config
from tests.trainers import Rank, ranks
from xcloud.base.errors import ConfigError
from xcloud.base.outcome import Outcome
from xcloud.base.settings import DROPPED, MOVED
from xcloud.comm.state import MEMORY, OUTER, State, load_states, states_of
from xcloud.feature_settings import OUTCOMES
from xcloud.features.checkpoints import resume as table
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.features.checkpoints.resume import (
    COLUMNS,
    TABLE,
    RankCheckpoints,
    changes,
    check_can_go_on,
    is_marked,
    outcome_of,
)
from xcloud.features.checkpoints.saving import about_part
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.late import GoOn
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.compared import as_text
from xcloud.job.config import Settings
from xcloud.job.given import resumed
from xcloud.job.strategy import ModelPlacement, RankStages, Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Checkpoints, Optimizer, Training
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.show.status import describe
from xcloud.use import TextGenerator, Translator

STRATEGIES = {
    "pipeline": Strategy(),
    "data parallel": Strategy("data_parallel", None, GradientAveraging()),
    "local updates": Strategy("local_updates", None, LocalUpdates(every=4)),
    "streaming": Strategy("streaming", None, LocalUpdates(every=4, fragments=2, overlap=1)),
}


SETTINGS = {"seed": "1", "training.max_steps": "9", "compression": "a", "cluster.clouds": "two"}
LAST = 9


class Attempt:
    """At a run of these ranks, in which all save at every second step."""

    def __init__(self, run_dir: Path, made: list[Rank], settings: dict[str, str]) -> None:
        self.ranks, self.folder, self.holders = made, CheckpointFolder(run_dir), []
        for number, rank in enumerate(made):
            layout = rank.wiring.ends.layout
            assert isinstance(layout, ClusterLayout)
            places = ModelPlacement.held(layout, rank.strategy, LAST)
            self.holders.append(RankCheckpoints(self.folder, number, places, settings))
        tables = {h.rank: h.table() for h in self.holders}
        self.from_step, self.note = newest_common(tables, lambda rank: f"rank {rank}")
        for holder, rank in zip(self.holders, made, strict=True) if self.from_step else ():
            parts = rank.stateful
            load_states(parts, holder.restore(self.from_step, states_of(parts), {})[0], "a rank")

    def train(self, until_step: int = LAST) -> None:
        for step in range(self.from_step + 1, until_step + 1):
            in_threads([lambda r=rank, s=step: r.update(s) for rank in self.ranks])
            for holder, rank in zip(self.holders, self.ranks, strict=True):
                if step % 2 == 0:
                    about = about_part(holder.places, holder.settings, 7, {})
                    self.folder.write(step, holder.rank, stored(rank.state_dict()), about)
                    self.folder.mark_agreed(step, 0, {})

    @property
    def state(self) -> list[State]:
        return [rank.state_dict() for rank in self.ranks]


def shape(column: str, *clouds: Cloud, micro_batches: int = 4) -> Shape:
    layout = ClusterLayout({name: cloud for name, cloud in zip("abc", clouds, strict=False)})
    return Shape(layout, GPipe(micro_batches), strategy=STRATEGIES[column])


def two(column: str) -> Shape:
    return shape(column, Cloud(), Cloud())


def more_lanes(column: str) -> Shape:
    return shape(column, Cloud(2), Cloud())


def attempt(tmp_path: Path, of: Shape, codec: str = "int4, delta", **changed: str) -> Attempt:
    settings = {**SETTINGS, **{k.replace("__", "."): v for k, v in changed.items()}}
    return Attempt(tmp_path, job(of, CODECS[codec]), settings)


def values(state: State) -> State:
    return {key: v for key, v in state.items() if key.startswith("trainer.stage ")}


def marked(state: State, mark: str) -> State:
    return {key: v for key, v in state.items() if is_marked(key, mark)}


# What may differ, by the row that it is of: settings, and who holds what before and after.
ALONE = [RankStages(0, 0, (0,)), RankStages(1, 0, (1,))]
LANES = [RankStages(0, 0, (0,)), RankStages(0, 0, (0,)), RankStages(1, 0, (1,))]
CUT = [*ALONE, RankStages(2, 0, (2,))]
PARTS = [place._replace(is_sharded=True) for place in LANES]
SETTING = {
    table.NOTHING: ("cluster.clouds.a.slowdown", "cluster.link_budget_bytes", "cluster.wan.trace"),
    "steps, optimizer, precision, divergence, decoding, security": (
        "training.max_steps", "training.optimizer.clip_norm", "security.meter.strength",
    ),
    "memory and speed of stages": (
        "model.activation_checkpointing", "model.vocabulary_chunk", "training.activation_cache_mb",
    ),
    "compression": ("compression.forward.int4.bits",),
    "schedule, accumulation": ("schedule.num_micro_batches", "training.accumulate_steps"),
    **{name: (name, f"{name}.every") for name in OUTCOMES},
    "model, task, data, seed, batch size, strategy, release": (
        "model.size", "seed", "training.batch_size", "strategy.name",
    ),
}  # fmt: skip
PLACES = {
    table.LANES: (ALONE, LANES), table.CUT: (ALONE, CUT), table.SHARD: (LANES, PARTS),
}  # fmt: skip


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", TABLE)
def test_every_cell_is_what_decides(row: str, column: str) -> None:
    held = [] if column == "one-way" else ALONE
    before = after = ModelPlacement(column, held, 4, 9)
    keys = SETTING.get(row, ("cluster.clouds.a.num_ranks",))
    if row in PLACES:
        if column != "one-way":
            before, after = (replace(before, ranks=ranks) for ranks in PLACES[row])
    for key in keys:
        found = changes({key: "1"}, {key: "2"}, ModelPlacement.read(asdict(before)), after)
        cell = outcome_of(row, column)
        assert found.said == [f"{key} 1 -> 2"]
        if TABLE[row].others.get(column, cell) is None and row not in SETTING:
            continue  # such a job has none
        assert bool(found.refused) == bool(cell.refused), (found, cell)
        assert set(cell.lost) <= set(found.lost) or cell.refused
        assert found.needs_merge == cell.needs_merge
        if cell.refused and row in SETTING:
            assert found.refused == [
                f"{key} is 2: {cell.refused}; set {key} back to 1, or start a new run"
            ]


# What no row of TABLE names one by one. A new setting of a model or task has to stand here, where
# its change is another run, or in a row of its own.
OTHER_RUN = frozenset(
    """
    model._target_ model.adapter_size model.attention_dropout
    model.backbone model.backbone_dropout model.encoder_layers_per_stage
    model.blocks_per_stage model.checkpoint model.coding model.cross_attention_heads model.decoder
    model.discriminator model.dropout model.embeddings model.encoder model.generators
    model.label_smoothing model.lora model.output model.own model.pooling
    model.public_text model.router_loss model.scratch model.split model.text model.text_everywhere
    model.train_head model.weights model.word_adapters
    """.split()
)


GROUPS: dict[str, type] = {
    "training": Training,
    "training.optimizer": Optimizer,
    "training.checkpoint": Checkpoints,
    **{key: kind for rows in feature_rows().values() for key, kind in rows.groups.items()},
}


def test_every_setting_is_in_a_row_on_purpose() -> None:
    seen = set[str]()
    for name in ("lora_clm", "abnet_iwslt", "bert_split_squad", "electra_multilingual"):
        seen |= {*Settings.of(composed(f"+exp={name}")).compared}
    for group, settings in GROUPS.items():
        seen |= {f"{group}.{one.name}" for one in fields(settings)} - GROUPS.keys()
    rows = [row.keys for row in TABLE.values() if row.keys]
    unknown = sorted(
        key for key in seen
        if not key.startswith("cluster.") and not any(re.match(keys, key) for keys in rows)
    )  # fmt: skip
    assert unknown == []
    *others, last = rows
    left = {
        key for key in seen if re.match(last, key) and not any(re.match(k, key) for k in others)
    }
    found = {".".join(key.split(".")[:2]) for key in left if key.startswith("model.")}
    assert found <= OTHER_RUN, sorted(found - OTHER_RUN)


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "surviving.md").read_text("utf-8")
    lines = ["| changed since | what happens | but |", "| --- | --- | --- |"]
    for name, row in TABLE.items():
        others: dict[str, list[str]] = {}
        since_merge = Outcome((*row.usual.lost, "what other clouds did since the last merge"))
        for column, outcome in row.others.items():
            if outcome and outcome != since_merge:  # these two are said once, above the table
                others.setdefault(str(outcome), []).append(column)
        but = "; ".join(f"{', '.join(columns)}: {said}" for said, columns in others.items())
        lines.append(f"| {name} | {row.usual} | {but} |")
    assert "\n".join(lines) in page


@pytest.mark.parametrize("column", first_daily(STRATEGIES, 1))
def test_what_moves_nothing_leaves_the_same_bits(column: str, tmp_path: Path) -> None:
    attempt(tmp_path, two(column)).train(5)
    second = attempt(tmp_path, two(column), cluster__clouds__a__slowdown="3")
    second.train()
    assert second.from_step == 4
    whole = attempt(tmp_path / "whole", two(column))
    whole.train()
    assert same_state(second.state, whole.state)


@pytest.mark.parametrize(
    ("column", "change"),
    each_once([*STRATEGIES], [("plain", "int4, delta"), ("int4, delta", "plain")], count=1),
)
def test_another_compression_forgets_what_the_old_one_remembers_and_nothing_else(
    column: str, change: tuple[str, str], tmp_path: Path
) -> None:
    first, then = change
    attempt(tmp_path, two(column), first).train(4)
    second = attempt(tmp_path, two(column), then, compression="b")
    for rank, state in enumerate(second.state):
        old = second.folder.read(4, rank)
        assert same_state([values(state)], [values(dict(old))])
        assert same_state([marked(state, OUTER)], [marked(dict(old), OUTER)])
        for key, value in marked(state, MEMORY).items():
            assert "residual" not in key or not torch.count_nonzero(torch.as_tensor(value))
    second.train()


@pytest.mark.parametrize("column", first_daily(["pipeline", "data parallel"], 1))
def test_other_lanes_take_over_weights_and_moments(column: str, tmp_path: Path) -> None:
    attempt(tmp_path, two(column)).train(5)
    second = attempt(tmp_path, more_lanes(column), cluster__clouds="two lanes")
    old = [values(dict(second.folder.read(4, rank))) for rank in (0, 0, 1)]
    assert second.from_step == 4 and same_state([values(s) for s in second.state], old)
    second.train()


@pytest.mark.slow
@pytest.mark.nightly
def test_apart_replicas_change_places_after_a_merge_only_and_keep_momentum(tmp_path: Path) -> None:
    column = "local updates"
    attempt(tmp_path, two(column)).train(7)  # merged at 4, apart at 6
    second = attempt(tmp_path, more_lanes(column), cluster__clouds="two lanes")
    assert second.from_step == 4
    assert "step 6: rank 0, rank 1, rank 2: replicas differed then" in second.note
    old = {}
    for rank in (0, 1):
        old[rank] = dict(second.folder.read(4, rank))
    momentum = {k[k.index(OUTER) :]: v for k, v in marked(old[0], OUTER).items()}
    found = {}
    for state in second.state[:2]:
        found |= {k[k.index(OUTER) :]: v for k, v in marked(state, OUTER).items()}
    assert found.keys() == momentum.keys() and any(map(torch.count_nonzero, _tensors(momentum)))
    assert same_state([found], [momentum])
    for state, rank in zip(second.state, (0, 0, 1), strict=True):  # moments of each cloud's own
        assert same_state([values(state)], [values(old[rank])])
    second.train()  # ends equal


def _tensors(state: State) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def test_streaming_never_is_merged_before_its_end(tmp_path: Path) -> None:
    attempt(tmp_path, two("streaming")).train(5)
    with pytest.raises(ConfigError, match=r"replicas differed then.*the last step"):
        attempt(tmp_path, more_lanes("streaming"), cluster__clouds="two lanes")


@pytest.mark.slow
@pytest.mark.nightly
def test_one_replica_of_local_updates_becomes_no_two_and_two_become_one_after_a_merge_only(
    tmp_path: Path,
) -> None:
    strategy = Strategy("local_updates", 1, LocalUpdates(every=4))
    alone = Shape(ClusterLayout({"a": Cloud(1, [0, 1])}), GPipe(4), strategy=strategy)
    attempt(tmp_path / "one", alone).train(4)
    with pytest.raises(ConfigError, match="one replica made it, so nothing was merged"):
        attempt(tmp_path / "one", two("local updates"), cluster__clouds="more")
    attempt(tmp_path / "two", two("local updates")).train(7)
    fewer = attempt(tmp_path / "two", alone, cluster__clouds="one")
    assert fewer.from_step == 4
    fewer.train()


def test_a_cut_elsewhere_is_refused(tmp_path: Path) -> None:
    attempt(tmp_path, two("pipeline")).train(3)
    three = shape("pipeline", Cloud(), Cloud(), Cloud())
    with pytest.raises(
        ConfigError, match="number of stages: stages hold other layers then; undo cluster"
    ):
        attempt(tmp_path, three, cluster__clouds="three")


def tied(codec: str, lanes: int) -> list[Rank]:
    layout = ClusterLayout({"a": Cloud(), "b": Cloud(lanes)})
    plan, training = BatchPlan(16, 8, 1), Training(9, **TRAINING)  # type: ignore[arg-type]
    return ranks(layout, training, CODECS[codec], GPipe(2), plan, toy=TiedToy)


@pytest.mark.parametrize(
    ("codec", "lanes", "change"),
    [("int4, delta", 1, "compression"), ("plain", 2, "cluster.clouds")],
)
def test_tied_ends_go_on_without_residuals(
    codec: str, lanes: int, change: str, tmp_path: Path
) -> None:
    Attempt(tmp_path, tied("plain", 1), SETTINGS).train(4)
    second = Attempt(tmp_path, tied(codec, lanes), {**SETTINGS, change: "other"})
    second.train(6)
    assert second.from_step == 4


SHARDED = {"cluster.clouds.a.shard": "true", "cluster.clouds.b.num_ranks": "1"}


def sharded(run_dir: Path, rank: int, num_b: int = 1, num_a: int = 2) -> RankCheckpoints:
    places = [RankStages(0, 0, (0,), True)] * num_a + [RankStages(1, 0, (1,))] * num_b
    settings = SHARDED | {"cluster.clouds.b.num_ranks": str(num_b)}
    return RankCheckpoints(
        CheckpointFolder(run_dir), rank, ModelPlacement("pipeline", places, 1, 9), settings
    )


def test_each_rank_of_a_sharded_stage_gets_its_own_part_again(tmp_path: Path) -> None:
    for rank in range(3):
        stage = 0 if rank < 2 else 1
        state: State = {
            "trainer.num_updates": 5, "trainer.guard.num_in_a_row": 0,
            f"trainer.stage {stage}.values.w": torch.full((2,), float(rank)),
        }  # fmt: skip
        holder = sharded(tmp_path, rank)
        about = about_part(holder.places, holder.settings, 7, {})
        holder.folder.write(5, rank, state, about)
    for rank, (num_b, source) in enumerate([(2, 0.0), (2, 1.0), (2, 2.0), (2, 2.0)]):
        found, _ = sharded(tmp_path, rank, num_b).restore(5, {}, {})
        stage = 0 if rank < 2 else 1
        assert found[f"trainer.stage {stage}.values.w"].tolist() == [source] * 2  # type: ignore
    slower = sharded(tmp_path, 1)
    slower = replace(slower, settings={**slower.settings, "cluster.clouds.a.slowdown": "2"})
    own = slower.restore(5, {}, {})[0]["trainer.stage 0.values.w"]
    assert isinstance(own, Tensor) and own.tolist() == [1.0, 1.0]
    (line,) = sharded(tmp_path, 0, num_a=3).table().values()
    assert "parts of a sharded stage: each rank has a part, and parts are not joined" in line


def test_the_hub_of_a_run_with_other_clouds_has_values_for_those_that_begin_again() -> None:
    settings = LocalUpdates(every=2, late=GoOn(10))
    post, diary = Post(2), Diary()
    hub, member = (Scalar(replica, post, settings, 4, diary) for replica in (0, 1))
    hub.rounds.load_state_dict(hub.rounds.state_dict())
    in_threads([lambda: hub.rounds.resume(2), lambda: member.rounds.resume(0)])
    assert member.value == hub.value


def test_a_run_without_a_checkpoint_begins_anew_only_if_that_is_asked_for(tmp_path: Path) -> None:
    asked = Settings.of(toy_config("two_clouds"))
    with pytest.raises(ConfigError, match=r"has no checkpoint.*add resume_anew=true"):
        check_can_go_on(asked, tmp_path)
    check_can_go_on(asked, tmp_path, anew=True)


def test_a_refusal_names_the_key_and_what_to_set_it_back_to_once(tmp_path: Path) -> None:
    asked = Settings.of(toy_config("two_clouds"))
    for rank in (0, 1):
        folder = CheckpointFolder(tmp_path)
        about = about_part(
            asked.job.places, {**asked.compared, "training.batch_size": "16"}, 7, {}
        )
        folder.write(5, rank, {"x": rank}, about)
        folder.mark_agreed(5, 0, {})
    with pytest.raises(ConfigError) as refused:
        check_can_go_on(asked, tmp_path)
    assert str(refused.value) == (
        f"{tmp_path} cannot resume. training.batch_size is 8: that would be another run; set "
        "training.batch_size back to 16, or start a new run"
    )


def test_one_setting_of_a_compression_is_named_by_itself() -> None:
    """Whoever is to undo it need not find out which it was."""
    before = ModelPlacement("pipeline", ALONE, labels={"compression": "fp16+int8"})
    after = replace(before, labels={"compression": "fp16+int4"})
    other = "training.max_steps"
    saved = {"compression.backward.bits": "8", other: "1"}
    found = changes(saved, {"compression.backward.bits": "4", other: "2"}, before, after)
    assert found.said == ["compression.backward.bits 8 -> 4", f"{other} 1 -> 2"]


@pytest.mark.parametrize(
    ("key", "column", "why"),
    [
        ("cluster.rendezvous", "pipeline", None),  # it only says who computes what
        ("cluster.rendezvous", "one-way", "its ranks cannot change places"),
        ("of_another_release", "pipeline", "that would be another run"),
        ("of_another_release", "one-way", "that would be another run"),
    ],
)
def test_a_setting_that_no_row_names_goes_on_only_where_it_changes_no_number(
    key: str, column: str, why: str | None
) -> None:
    both = ModelPlacement(column, ALONE if column == "pipeline" else ())
    found = changes({key: "1"}, {key: "2"}, both, both)
    expected = [] if why is None else [
        f"{key} is 2: {why}; set {key} back to 1, or start a new run"
    ]  # fmt: skip
    assert found.refused == expected and found.lost == [] and not found.needs_merge


def test_a_class_that_has_moved_or_a_key_that_is_no_more_is_no_change() -> None:
    """A checkpoint of an earlier release has the earlier name."""
    assert MOVED
    both = ModelPlacement("pipeline", ALONE)
    for earlier, name in MOVED.items():
        saved = {"key._target_": as_text(earlier)}
        assert changes(saved, {"key._target_": as_text(name)}, both, both).said == []
    for kind, dropped in DROPPED.items():
        now = {"feed._target_": as_text(kind)}
        saved = {**now, **{f"feed.{key}": as_text(value) for key, value in dropped.items()}}
        saved |= {f"feed.{key}.of_a_group": "0" for key in dropped}
        assert changes(saved, now, both, both).said == []


def test_a_compression_is_named_by_its_label() -> None:
    before = ModelPlacement("pipeline", ALONE, labels={"compression": "fp16+int8"})
    after = replace(before, labels={"compression": "int4+int4"})
    keys = ("compression.forward._target_", "compression.backward.bits")
    found = changes(dict.fromkeys(keys, "1"), dict.fromkeys(keys, "2"), before, after)
    assert found.said == ["compression fp16+int8 -> int4+int4"]
    assert found.price(has_memory=False) == "nothing is lost by this"


@pytest.mark.parametrize(
    "use", [lambda path: resumed(path, [], path), describe, Translator, TextGenerator]
)
def test_a_folder_that_holds_no_run_is_named_alike_by_all_that_read_runs(
    use: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^there is no folder .*nowhere$"):
        use(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no run: there is no "):
        use(tmp_path)
