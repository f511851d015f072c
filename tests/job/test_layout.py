import pytest

from xcloud.base.errors import ConfigError
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import FREE, LinkProfile


def test_ranks_are_numbered_cloud_by_cloud() -> None:
    layout = ClusterLayout({"a": Cloud(2), "b": Cloud(1)})

    assert layout.num_ranks == 3
    assert layout.ranks_of(0) == (0, 1)
    assert layout.ranks_of(1) == (2,)
    assert layout.placement(2).cloud == "b"
    assert layout.leaders() == (0, 2)


def test_micro_batches_are_dealt_to_the_ranks_of_a_stage_in_turn() -> None:
    layout = ClusterLayout({"a": Cloud(2), "b": Cloud(3)})

    assert [layout.owner(0, i) for i in range(4)] == [0, 1, 0, 1]
    assert [layout.owner(1, i) for i in range(4)] == [2, 3, 4, 2]
    assert layout.min_micro_batches() == 3


def test_one_owner_may_hold_both_ends() -> None:
    layout = ClusterLayout({"owner": Cloud(1, [0, 2]), "other": Cloud(1, [1])})

    assert layout.placement(0).stages == (0, 2)
    assert layout.ranks_of(2) == (0,)
    assert layout.num_stages == 3


def test_a_cloud_can_deal_its_stages_to_its_ranks() -> None:
    layout = ClusterLayout({"all": Cloud(4, [0, 1], one_stage_per_rank=True)})

    assert layout.ranks_of(0) == (0, 1)
    assert layout.ranks_of(1) == (2, 3)
    assert not layout.crosses_clouds
    assert layout.wan_between(0, 3) is None


def test_a_pair_of_clouds_may_have_its_own_link() -> None:
    slow = LinkProfile(1e6)
    layout = ClusterLayout(
        {"a": Cloud(), "b": Cloud(), "c": Cloud()}, wan="free", links={"c-b": slow}
    )

    assert layout.wan_between(0, 1) is FREE
    assert layout.wan_between(1, 2) is slow
    assert layout.wan_between(2, 1) is slow


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ClusterLayout({}), "at least one"),
        (lambda: ClusterLayout({"a": Cloud(1, [0]), "b": Cloud(1, [0])}), "exactly once"),
        (lambda: ClusterLayout({"a": Cloud(1, [1])}), "exactly once"),
        (lambda: ClusterLayout({"a": Cloud(3, [0, 1], True)}), "multiple of 2"),
        (lambda: ClusterLayout({"a": Cloud()}, wan="oregon_tokyo"), "cluster/wan=oregon_tokyo"),
        (
            lambda: ClusterLayout({"a": Cloud(), "b": Cloud()}, links={"a-x": "free"}),
            "pair of clouds",
        ),
        (lambda: Cloud(num_ranks=0), "num_ranks"),
        (lambda: Cloud(num_ranks="two"), "num_ranks"),
        (lambda: Cloud(device="tpu"), "device"),
    ],
)
def test_layouts_that_make_no_sense_are_refused_in_words(make, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_micro_batches_are_dealt_to_replicas_and_in_each_to_its_lanes() -> None:
    layout = ClusterLayout(
        {
            "a": Cloud(2),  # ranks 0, 1
            "b": Cloud(1),  # rank 2
            "c": Cloud(1, [0, 1], replica=1),  # rank 3
        }
    )

    assert (layout.num_replicas, layout.num_stages) == (2, 2)
    assert layout.replicas_of(0) == ((0, 1), (3,))
    assert layout.replicas_of(1) == ((2,), (3,))
    assert [layout.owner(0, i) for i in range(8)] == [0, 3, 1, 3, 0, 3, 1, 3]
    assert [layout.owner(1, i) for i in range(4)] == [2, 3, 2, 3]
    assert layout.stage_cloud(1, replica=1) == "c" and layout.placement(3).replica == 1
    assert [layout.leaders(replica) for replica in (0, 1)] == [(0, 2), (3,)]
    period = layout.rank_period(0)
    for stage in (0, 1):
        owners = [layout.owner(stage, i) for i in range(3 * period)]
        assert owners == 3 * owners[:period]
    assert layout.num_lanes == 4, "two replicas, of which one has two ranks in a stage"
    fewest = layout.min_micro_batches()
    assert {layout.owner(0, i) for i in range(fewest)} == {0, 1, 3}
    assert {layout.owner(0, i) for i in range(fewest - 1)} != {0, 1, 3}
    assert "c: 1 rank, stages 0+1 of replica 1" in layout.describe()


@pytest.mark.parametrize(
    ("clouds", "said"),
    [
        ({"a": Cloud(replica=1)}, "count the replicas from 0"),
        ({"a": Cloud(1, [0, 1]), "b": Cloud(1, [0], replica=1)}, r"in replica 1, got \[0\]"),
        ({"a": Cloud(1, [0]), "b": Cloud(1, [0, 0], replica=1)}, "exactly once in replica 1"),
    ],
)
def test_every_replica_holds_every_stage_once(clouds: dict[str, Cloud], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClusterLayout(clouds)


@pytest.mark.parametrize("name", ["eu/west", "a\nb", "a\0b", "/"])
def test_a_cloud_whose_name_cannot_be_part_of_a_files_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="remove '/' and control characters"):
        ClusterLayout({name: Cloud(), "us": Cloud()})
    assert ClusterLayout({"zürich 1": Cloud(), "北京": Cloud()}).num_ranks == 2
