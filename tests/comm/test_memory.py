import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from tests.codecs import COMPRESSORS
from tests.configs import build
from tests.nightly import each_once
from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import PerBoundary, Phase, Phased, Selectable
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.memory import (
    DeltaCache,
    ErrorFeedback,
    Memory,
    NoMemory,
    SampleRows,
    TokenMeans,
)
from xcloud.comm.precision import BlockInt
from xcloud.comm.sparsify import RandomK, TopK
from xcloud.net.frame import TensorSpec

ROWS = SampleRows(ids=(7, 3), counts=(2, 3))


def send(memory: Memory, compressor: Compressor, tensor: Tensor, rows: SampleRows) -> Tensor:
    """What a channel does at the sending end; returns what the peer decodes."""
    sent = memory.before_send(tensor, rows)
    seen = compressor.decompress(compressor.compress(sent), TensorSpec.of(sent))
    memory.after_send(sent, seen, rows)
    return seen


def num_bytes(memory: Memory) -> int:
    """Of the rows that it holds."""
    rows = memory.state_dict().get("rows")
    return rows.nbytes if isinstance(rows, Tensor) else 0


@pytest.mark.parametrize("memory", [NoMemory(), ErrorFeedback(), DeltaCache()], ids=repr)
def test_without_loss_every_message_arrives_as_it_is(memory: Memory) -> None:
    sender, receiver = copy.deepcopy(memory), copy.deepcopy(memory)
    for _ in range(3):
        tensor = torch.randn(5, 4, dtype=torch.float64)
        sent = sender.before_send(tensor, ROWS)
        sender.after_send(sent, sent, ROWS)

        torch.testing.assert_close(receiver.after_receive(sent, ROWS), tensor)


def test_no_memory_holds_and_needs_nothing() -> None:
    memory, tensor = NoMemory(), torch.randn(5, 4)

    assert memory.before_send(tensor, ROWS) is tensor
    assert memory.after_receive(tensor, ROWS) is tensor
    assert memory.state_dict() == {}


@pytest.mark.parametrize("memory", [ErrorFeedback(), DeltaCache()], ids=repr)
def test_neither_input_is_changed(memory: Memory) -> None:
    tensor, seen = torch.randn(5, 4), torch.randn(5, 4)
    tensor_before, seen_before = tensor.clone(), seen.clone()
    for _ in range(2):
        sent = memory.before_send(tensor, ROWS)
        memory.after_send(sent, seen, ROWS)
        memory.after_receive(seen, ROWS)

    assert torch.equal(tensor, tensor_before)
    assert torch.equal(seen, seen_before)


def test_error_feedback_conserves_what_was_meant() -> None:
    memory, compressor = ErrorFeedback(), TopK(0.2)
    meant, arrived = torch.zeros(5, 4), torch.zeros(5, 4)
    for _ in range(20):
        tensor = torch.randn(5, 4)
        meant += tensor
        arrived += send(memory, compressor, tensor, ROWS)
    residual = memory.before_send(torch.zeros(5, 4), ROWS)

    torch.testing.assert_close(meant, arrived + residual)
    assert residual.norm() > 0.5  # or nothing was lost and nothing was shown


def test_error_feedback_delivers_in_the_mean_what_topk_alone_never_sends() -> None:
    tensor = torch.arange(1.0, 21).reshape(5, 4)
    means = []
    for memory in (ErrorFeedback(), NoMemory()):
        seen = [send(memory, TopK(0.1), tensor, ROWS) for _ in range(200)]
        means.append(torch.stack(seen).mean(0))

    assert (means[0] - tensor).norm() < 0.1 * tensor.norm()
    assert (means[1] - tensor).norm() > 0.8 * tensor.norm()


def test_error_feedback_follows_the_sample_not_its_place() -> None:
    memory = ErrorFeedback()
    seen = torch.zeros(5, 1)
    memory.after_send(torch.tensor([[1.0], [2], [3], [4], [5]]), seen, ROWS)
    sent = memory.before_send(torch.zeros(6, 1), SampleRows((3, 9, 7), (3, 1, 2)))

    assert sent.flatten().tolist() == [3, 4, 5, 0, 1, 2]


def test_decay_weakens_the_residual_at_each_visit() -> None:
    memory, zeros = ErrorFeedback(decay=0.5), torch.zeros(5, 2)
    memory.after_send(torch.ones(5, 2), zeros, ROWS)
    for expected in (0.5, 0.25):
        sent = memory.before_send(zeros, ROWS)
        memory.after_send(sent, zeros, ROWS)
        assert (sent == expected).all()


def test_a_residual_is_dropped_when_the_number_of_rows_changed() -> None:
    memory = ErrorFeedback()
    memory.after_send(torch.ones(5, 2), torch.zeros(5, 2), ROWS)
    sent = memory.before_send(torch.zeros(4, 2), SampleRows((7, 3), (1, 3)))

    assert sent[:1].eq(0).all()
    assert sent[1:].eq(1).all()


def test_a_sample_twice_in_a_message_loses_nothing_and_counts_nothing_twice() -> None:
    memory, twice = ErrorFeedback(), SampleRows((7, 7), (2, 2))
    memory.after_send(torch.ones(2, 1), torch.zeros(2, 1), SampleRows((7,), (2,)))
    sent = memory.before_send(torch.zeros(4, 1), twice)
    assert sent.flatten().tolist() == [1, 1, 0, 0]

    memory.after_send(torch.tensor([[1.0], [2], [10], [20]]), torch.zeros(4, 1), twice)
    assert memory.before_send(torch.zeros(2, 1), SampleRows((7,), (2,))).flatten().tolist() == [
        11,
        22,
    ]


@pytest.mark.parametrize(
    ("tensor_dtype", "dtype"),
    each_once([torch.float32, torch.bfloat16, torch.float16], [None, "bfloat16"], count=3),
)
def test_both_delta_caches_stay_bit_equal(dtype: str | None, tensor_dtype: torch.dtype) -> None:
    sender, receiver = DeltaCache(dtype), DeltaCache(dtype)
    generator = torch.Generator().manual_seed(0)
    for visit in range(30):
        first = int(torch.randint(5, (1,), generator=generator))
        # Sample 9 stands twice; sample 100 has another number of rows at every third visit.
        rows = SampleRows((first, 9, 9, 100), (2, 1, 1, 1 + visit % 3 // 2))
        tensor = torch.randn(sum(rows.counts), 8, generator=generator).to(tensor_dtype)
        value = receiver.after_receive(send(sender, BlockInt(3), tensor, rows), rows)
        value.zero_()  # it is the caller's, to change in place
        ours, theirs = sender.state_dict(), receiver.state_dict()

        assert all(torch.equal(ours[name], theirs[name]) for name in ("ids", "counts", "rows"))


def test_delta_cache_error_shrinks_as_the_changes_do() -> None:
    sender, receiver, tensor = DeltaCache(), DeltaCache(), torch.randn(5, 64)
    errors = []
    for visit in range(4):
        value = tensor + 0.1**visit * torch.randn(5, 64)
        seen = receiver.after_receive(send(sender, BlockInt(4), value, ROWS), ROWS)
        errors.append(float((value - seen).norm() / value.norm()))

    assert errors[0] > 0.05  # the value itself, in 4 bits
    assert errors[3] < 0.03 * errors[0]


def test_delta_cache_sends_the_value_itself_at_first_and_after_a_change_of_rows() -> None:
    memory, tensor = DeltaCache(), torch.randn(5, 4)
    assert torch.equal(memory.before_send(tensor, ROWS), tensor)
    memory.after_send(tensor, tensor, ROWS)
    change = memory.before_send(tensor[:4], SampleRows((7, 3), (1, 3)))

    assert torch.equal(change[:1], tensor[:1])
    torch.testing.assert_close(change[1:], tensor[1:4] - tensor[2:5])


@pytest.mark.parametrize("memory", [ErrorFeedback(), DeltaCache()], ids=repr)
def test_a_restored_memory_continues_bit_equal(memory: Memory) -> None:
    memory = copy.deepcopy(memory)
    send(memory, BlockInt(2), torch.randn(5, 4), ROWS)
    send(memory, BlockInt(2), torch.randn(3, 4), SampleRows((1, 2), (3, 0)))
    state = memory.state_dict()
    # Only what safetensors and JSON can hold.
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in state.items() if name not in tensors}
    stored = load(save(tensors)) | json.loads(json.dumps(numbers))
    restored = type(memory)()
    restored.load_state_dict(stored)
    tensor, rows = torch.randn(8, 4), SampleRows((3, 7, 1), (3, 2, 3))

    assert torch.equal(restored.before_send(tensor, rows), memory.before_send(tensor, rows))
    assert num_bytes(restored) == num_bytes(memory)


def test_an_empty_memory_can_be_stored_and_restored() -> None:
    memory = DeltaCache()
    send(memory, BlockInt(8), torch.randn(5, 4), ROWS)
    memory.load_state_dict(ErrorFeedback().state_dict())

    assert num_bytes(memory) == 0


@pytest.mark.parametrize(("dtype", "expected"), [(None, 80), ("float32", 80), ("bfloat16", 40)])
def test_rows_are_held_once_in_the_dtype_asked_for(dtype: str | None, expected: int) -> None:
    for memory in (ErrorFeedback(dtype=dtype), DeltaCache(dtype=dtype)):
        assert num_bytes(memory) == 0
        for _ in range(2):  # the second visit replaces the first
            send(memory, BlockInt(4), torch.randn(5, 4), ROWS)

        assert num_bytes(memory) == expected


@pytest.mark.parametrize("memory", [ErrorFeedback(), DeltaCache()], ids=repr)
def test_copies_share_no_state(memory: Memory) -> None:
    one, other = copy.deepcopy(memory), copy.deepcopy(memory)
    send(one, BlockInt(2), torch.randn(5, 4), ROWS)

    assert num_bytes(one) > 0
    assert num_bytes(other) == num_bytes(memory) == 0
    third = copy.deepcopy(one)
    send(one, BlockInt(2), torch.randn(5, 4), ROWS)
    assert not torch.equal(one.state_dict()["rows"], third.state_dict()["rows"])


@pytest.mark.parametrize("memory", [NoMemory(), ErrorFeedback(), DeltaCache()], ids=repr)
def test_every_memory_keeps_the_protocol(memory: Memory) -> None:
    assert isinstance(memory, Memory)
    assert (memory.label == "") == isinstance(memory, NoMemory)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ErrorFeedback(decay=1.5), r"ErrorFeedback.decay .* got 1.5"),
        (lambda: ErrorFeedback(decay="1"), r"ErrorFeedback.decay .* got '1'"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(dtype="float16"), r"ErrorFeedback.dtype must be one of .*bfloat16"),
        (lambda: DeltaCache(dtype="int8"), r"DeltaCache.dtype must be one of .* got 'int8'"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("memory", [ErrorFeedback(), DeltaCache()], ids=repr)
def test_a_message_that_is_not_finite_leaves_the_sample_without_a_past(memory: Memory) -> None:
    """An update may be skipped; the sample's next message is then finite again."""
    sender, receiver, compressor = copy.deepcopy(memory), copy.deepcopy(memory), BlockInt(8)
    first, bad, last = (torch.randn(5, 4) for _ in range(3))
    bad[0, 0] = torch.nan  # of sample 7
    for tensor in (first, bad):
        receiver.after_receive(send(sender, compressor, tensor, ROWS), ROWS)
    value = receiver.after_receive(send(sender, compressor, last, ROWS), ROWS)

    assert value.isfinite().all()
    torch.testing.assert_close(value, last, atol=0.1, rtol=0.05)


def places(direction: str, compressor: Compressor, memory: Memory) -> list[Callable[[], object]]:
    """Every way in which a run gets a compressor and a memory of this direction."""

    def plain() -> Compression:
        chosen: dict[str, Any] = {direction: compressor, f"{direction}_memory": memory}
        return Compression(**chosen)

    return [
        plain,
        lambda: Phased(first=Phase(2, Compression()), rest=Phase(None, plain())),
        lambda: PerBoundary(Compression(), boundary_1=plain()),
        lambda: Selectable({"own": Compression(), "other": plain()}),
    ]


@pytest.mark.parametrize("memory", [ErrorFeedback(), ErrorFeedback(0.5), DeltaCache()], ids=repr)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_memory_adds_up_errors_that_exceed_what_was_meant(
    direction: str, memory: Memory
) -> None:
    unbiased = [RandomK(0.1, unbiased=True), BlockInt(1, stochastic=True)]
    for compressor in [*COMPRESSORS, *unbiased]:
        chained = compressor if isinstance(compressor, Chain) else Chain(one=compressor)
        for one in (compressor, chained):
            for make in places(direction, one, memory):
                if one.feedback == "harmful":
                    with pytest.raises(ConfigError, match=rf"compression\.{direction}_memory is"):
                        make()
                else:
                    make()
            for make in places(direction, one, NoMemory()):
                make()


def test_both_ends_keep_the_same_means_of_tokens_and_a_skipped_update_leaves_none() -> None:
    generator = torch.Generator().manual_seed(0)
    of_token_TD = torch.randn(7, 4, generator=generator) * 10
    sender, receiver = TokenMeans(), TokenMeans()
    sizes = []
    for step in range(6):
        tokens_R = torch.randint(0, 7, (40,), generator=generator)
        rows = SampleRows(ids=(1, 2), counts=(25, 15), tokens=tokens_R)
        tensor = of_token_TD[tokens_R] + 0.1 * torch.randn(40, 4, generator=generator)
        sent = sender.before_send(tensor, rows)
        seen = sent.round()
        sender.after_send(sent, seen=seen, rows=rows)
        arrived = receiver.after_receive(seen, rows=rows)
        assert float((arrived - tensor).abs().max()) <= 0.51  # what is meant, but for rounding
        sizes.append(float(sent.norm() / tensor.norm()))
        for memory in (sender, receiver):
            memory.settle(was_used=step != 3)
            if step == 2:
                kept = memory.state_dict()
            if step == 3:  # skipped
                assert all(
                    torch.equal(kept[n], memory.state_dict()[n]) for n in ("tokens", "sums")
                )
    assert sizes[0] == 1 and sizes[-1] < 0.1
    again = TokenMeans()
    again.load_state_dict(sender.state_dict())
    assert torch.equal(again.before_send(tensor, rows), sender.before_send(tensor, rows))
    assert torch.equal(sender.before_send(tensor, rows), receiver.before_send(tensor, rows))
    # An evaluation uses the means and changes none; without any, rows are as they were.
    assert torch.equal(
        sender.before_evaluation(tensor, lambda: rows), again.before_send(tensor, rows)
    )
    assert TokenMeans().before_evaluation(tensor, lambda: rows) is tensor
    bad = torch.full((40, 4), torch.nan)
    sender.after_send(bad, seen=bad, rows=rows)
    assert torch.equal(again.before_send(tensor, rows), sender.before_send(tensor, rows))


def test_rows_are_compared_by_tokens_only_where_every_cloud_may_read_the_text() -> None:
    words = ["+exp=lora_clm", "compression=transform_tokens"]
    with pytest.raises(ConfigError, match="stage 1 reads no text"):
        build(*words)
    words.append("model.text_everywhere=true")
    assert build(*words).fields_of(1) >= {"text", "types", "label"}
    with pytest.raises(ConfigError, match=r"'cloud_b' reads 'text', but security.holders"):
        build(*words, "+security.holders={text: [cloud_a]}")
    backward = "+compression.backward_memory._target_=xcloud.comm.memory.TokenMeans"
    with pytest.raises(ConfigError, match="is for activations"):
        build(*words, backward)
