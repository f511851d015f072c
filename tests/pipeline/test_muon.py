"""Muon for the matrices of blocks, AdamW for the rest."""

import copy

import pytest
import torch
from torch import nn

from tests.channels import same_state
from tests.configs import build
from xcloud.base.errors import ConfigError
from xcloud.features.checkpoints.resume import changes
from xcloud.job.strategy import ModelPlacement
from xcloud.pipeline.muon import Muon, matrices_of_blocks, orthogonalized
from xcloud.pipeline.settings import Optimizer
from xcloud.pipeline.trainer import TrainedModule


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 9, bias=False)])
        self.named = nn.ModuleDict({"0": nn.Linear(9, 6, bias=False)})
        self.blocks.append(nn.Embedding(3, 6))
        self.head = nn.Linear(6, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[1](torch.tanh(self.blocks[0](self.words(ids))))
        hidden = self.named["0"](hidden) + self.blocks[2].weight.sum(0)
        result: torch.Tensor = self.head(torch.tanh(hidden))
        return result


def learn(part: TrainedModule, num_updates: int, first: int = 0) -> None:
    assert part.optimizer is not None
    for number in range(first, first + num_updates):
        part.module.zero_grad()
        ids = torch.arange(5) + number % 3
        nn.functional.cross_entropy(part.module(ids), (ids + 1) % 7).backward()
        part.optimizer.step()


def part(settings: Optimizer) -> TrainedModule:
    module = Tiny()
    return TrainedModule(module, settings.build(module))


MUON = Muon(learning_rate=0.01, weight_decay=0.1)


def test_only_matrices_inside_blocks_are_muons() -> None:
    module = Tiny()
    names = {id(p): name for name, p in module.named_parameters()}
    found = {names[id(p)] for p in matrices_of_blocks(module)}

    assert found == {"blocks.0.weight", "blocks.1.weight", "named.0.weight"}
    module.blocks[0].weight.requires_grad_(False)
    assert len(matrices_of_blocks(module)) == 2


def test_all_that_is_no_matrix_of_a_block_moves_as_under_adamw() -> None:
    """With equal gradients: those of the first update."""
    ours, adamw = part(MUON), part(Optimizer(learning_rate=0.01, weight_decay=0.1))
    for made in (ours, adamw):
        learn(made, 1)
    moved = {id(p) for p in matrices_of_blocks(ours.module)}
    theirs = dict(adamw.module.named_parameters())
    for name, p in ours.module.named_parameters():
        is_equal = torch.allclose(p, theirs[name], rtol=0, atol=1e-7)
        assert is_equal is (id(p) not in moved), name


@pytest.mark.parametrize("shape", [(6, 6), (3, 40), (40, 3), (1, 8)])
def test_a_direction_has_the_singular_vectors_of_the_matrix_and_values_near_one(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)

    found = left.T @ orthogonalized(matrix) @ right.T

    values = found.diagonal()
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3
    assert torch.allclose(found, torch.diag(values), atol=1e-3)


def test_the_updates_are_torchs_up_to_its_bfloat16() -> None:
    ours, theirs = nn.ModuleList([nn.Linear(24, 8, bias=False)]), nn.Linear(24, 8, bias=False)
    theirs.load_state_dict(ours[0].state_dict())
    start = ours[0].weight.detach().clone()
    made = MUON.build(ours)
    reference = torch.optim.Muon(
        theirs.parameters(), lr=0.01, weight_decay=0.1, momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        gradient = torch.randn(8, 24, generator=generator)
        ours[0].weight.grad, theirs.weight.grad = gradient, gradient.clone()
        made.step()
        reference.step()
    moved, expected = ours[0].weight.detach() - start, theirs.weight.detach() - start

    assert float((moved - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("gradient", [0.0, 1e-30, 1e15])
def test_a_gradient_of_any_size_gives_a_finite_update(gradient: float) -> None:
    layers = nn.ModuleList([nn.Linear(4, 3, bias=False)])
    layers[0].weight.grad = torch.full((3, 4), gradient)
    MUON.build(layers).step()

    assert layers[0].weight.isfinite().all()


def test_training_resumes_with_the_same_bits() -> None:
    whole, begun, resumed = part(MUON), part(MUON), part(MUON)
    learn(whole, 5)
    learn(begun, 2)
    state = copy.deepcopy(begun.state_dict())
    assert any(key.startswith("moments.momentum_buffer.") for key in state)
    resumed.load_state_dict(state)
    learn(resumed, 3, first=2)

    assert same_state([resumed.state_dict()], [whole.state_dict()])


@pytest.mark.parametrize("left_out", ["moments.momentum_buffer.", "moments.exp_avg."])
def test_each_kind_of_moment_is_kept(left_out: str) -> None:
    whole, resumed = part(MUON), part(MUON)
    learn(whole, 2)
    state = copy.deepcopy(whole.state_dict())
    for key in state:
        if key.startswith(left_out):
            state[key] = torch.zeros_like(state[key])  # type: ignore[arg-type]
    resumed.load_state_dict(state)
    for made in (whole, resumed):
        learn(made, 2, first=2)

    assert not same_state([resumed.state_dict()], [whole.state_dict()])


def test_one_word_chooses_it_and_keeps_the_recipes_rate() -> None:
    chosen = build("+exp=lora_clm", "training/optimizer=muon").training.optimizer

    assert isinstance(chosen, Muon) and chosen.learning_rate == 2e-3 and chosen.momentum == 0.95


def test_a_setting_written_in_place_of_the_group_says_how_it_is_chosen() -> None:
    with pytest.raises(ConfigError, match="choose it as training/optimizer=muon"):
        build("+exp=lora_clm", "training.optimizer=muon")


def test_a_run_does_not_resume_with_the_moments_of_the_other_optimizer() -> None:
    key, nobody = "training.optimizer._target_", ModelPlacement()
    found = changes({key: '"…Optimizer"'}, {key: '"…Muon"'}, before=nobody, after=nobody)

    assert len(found.refused) == 1 and key in found.refused[0]


def test_ranks_that_hold_parts_of_a_matrix_are_refused() -> None:
    sharded = ["cluster.clouds.cloud_b.shard=true", "cluster.clouds.cloud_b.num_ranks=2"]
    with pytest.raises(ConfigError, match="shard leaves each rank a part of every matrix, but "
                       "training/optimizer=muon"):  # fmt: skip
        build("+exp=lora_clm", "training/optimizer=muon", *sharded)


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1e4])
def test_a_direction_does_not_depend_on_the_size_of_the_matrix(scale: float) -> None:
    matrix = torch.randn(6, 4)
    torch.testing.assert_close(
        orthogonalized(scale * matrix), orthogonalized(matrix), rtol=1e-3, atol=1e-4
    )
