import torch

from xcloud.training.batch_plan import BatchPlan, cut


def test_every_sample_comes_once_in_each_epoch() -> None:
    plan = BatchPlan(num_samples=10, batch_size=4, seed=3)
    stream = torch.cat([plan.ids(step) for step in range(1, 6)])

    assert sorted(stream[:10].tolist()) == list(range(10))
    assert sorted(stream[10:].tolist()) == list(range(10))
    assert stream[:10].tolist() != stream[10:].tolist()


def test_clouds_agree_without_talking_and_seeds_differ() -> None:
    one, two = BatchPlan(100, 8, 1), BatchPlan(100, 8, 1)
    two.ids(40)  # asked in another order

    assert torch.equal(one.ids(7), two.ids(7))
    assert not torch.equal(one.ids(7), BatchPlan(100, 8, 2).ids(7))


def test_a_batch_may_be_longer_than_an_epoch() -> None:
    ids = BatchPlan(3, 8, 1).ids(1)

    assert sorted(ids[:3].tolist()) == [0, 1, 2]
    assert len(ids) == 8


def test_pieces_differ_by_at_most_one_sample_and_lose_none() -> None:
    pieces = cut(torch.arange(10), 4)

    assert [len(piece) for piece in pieces] == [3, 3, 2, 2]
    assert torch.cat(pieces).tolist() == list(range(10))
