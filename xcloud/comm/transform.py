"""Transform coding: a row in the principal components of the rows before it, every component in
steps of one size, and an entropy code for the whole numbers that this gives. One codec for one
direction of a boundary; pure tensor code, no links.

Shapes: R rows (tokens), H features, K components that are sent, S classes of components of like
variance.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.base.settings import settings
from xcloud.comm import bit_planes
from xcloud.comm.bit_planes import Bytes
from xcloud.comm.compressor import Compressor, Family, Feedback, refuse_integers, wide
from xcloud.comm.low_rank import matrix_shape
from xcloud.comm.noise_shaping import NoiseShaping
from xcloud.comm.state import State, copy_of
from xcloud.net.frame import Tensors, TensorSpec

MAX_FEATURES = 2048  # of rows with a basis
_ROWS_PER_FEATURE = 8  # before there is a basis
_LOOK_AT = 2  # times the bytes of a basis, sent since it came, before another is tried
_ROWS_OF_A_MESSAGE = 512  # that a basis is measured on, at most
_ROWS_LATER = 128  # the same of a message once there is one
_SENSITIVE = 0.8  # share of what gradients tell, in what an error is taken to cost
_KEPT = 0.25  # steps that a component's deviation must have, to be in a basis
_REST = 0.85  # steps from which what components leave of a feature is sent
_DEAD = 1 / 6  # of a step, that a component is made smaller before it is rounded
_FADE = 0.1  # weight of a message in the running mean square
_NEAR = 64.0  # times that a message's mean square may differ from it
_MOST_OCTAVES = 14  # that a row of a gradient may be smaller or larger than usual
_CLASSES_PER_OCTAVE = 2
_NUM_CLASSES = 16
_FEW_ROWS = 16  # their features are one class
_LARGEST_CODE = 1 << (bit_planes.MOST_BITS - 1)
_RANGE = (1e-15, 1e15)  # of the largest value, beyond which squares approach float32's limits

_COUNTS = ("seen", "since", "look_at", "features")

# kind, number of the basis, components
_HEAD = struct.Struct("<BBH")
_NOTHING, _NOT_FINITE, _ALONE, _IN_BASIS, _WITH_BASIS = range(5)


@dataclass(frozen=True)
class _Basis:
    """Principal components as both ends have them. Never changed in place.

    number: counts the bases of a channel, modulo 256.
    mean: float32 [H], what is subtracted before.
    codes: int8 [K, H], the components but for their size.
    sizes: float32 [K], what the codes of a component are multiplied by.
    classes: uint8 [K], ascending: the first have the largest variance.
    analysis: float32 [K, H], the sender's alone: what rows are multiplied by to be coded.
    """

    number: int
    mean_H: Tensor
    codes_KH: Tensor
    sizes_K: Tensor
    classes_K: Tensor
    analysis_KH: Tensor | None = None

    @cached_property
    def rows_KH(self) -> Tensor:
        """Return the components, of which a receiver adds up rows."""
        rows_KH: Tensor = self.codes_KH.float() * self.sizes_K[:, None]
        return rows_KH

    def codes(self, rows_RH: Tensor, delta: float) -> Tensor:
        """Return whole numbers [R, K + H]: of components, then of what these leave of features."""
        assert self.analysis_KH is not None, "a receiver does not code"
        around_RH = rows_RH - self.mean_H.to(rows_RH)
        codes_RK = _rounded(around_RH @ self.analysis_KH.to(rows_RH).T / delta, smaller=_DEAD)
        # What is left is of the decoded components, so that their rounding is made good here, too.
        rest_RH = around_RH / delta - codes_RK @ self.rows_KH.to(rows_RH)
        return torch.cat([codes_RK, _rounded(rest_RH, smaller=_REST - 0.5)], dim=1)

    def seen(self, codes_RC: Tensor, delta: float) -> Tensor:
        """Return the rows [R, H] that codes stand for."""
        values = codes_RC * delta
        values_RK, rest_RH = torch.split(values, list(self.codes_KH.shape), dim=1)
        rest_RH = rest_RH + self.mean_H.to(values)
        return torch.addmm(rest_RH, values_RK, self.rows_KH.to(values))

    def edges(self, num_features: int) -> list[int]:
        """Return where classes begin among components and, as the last class, features."""
        return [*_edges(self.classes_K.numpy()), len(self.classes_K) + num_features]

    def packed(self) -> Bytes:
        parts = (self.mean_H, self.sizes_K, self.classes_K, self.codes_KH)
        return np.concatenate([part.view(torch.uint8).reshape(-1).numpy() for part in parts])


@settings("Transform", frozen=False)
class Transform(Compressor):
    """Whole numbers of one step for all values, in an entropy code, in a basis of principal
    components that the sender measures and sends.

    x_hat = mean + delta * (D^T q + r),  q = round(A (x - mean) / delta), r: see below,
    delta = step * a running root mean square of x - mean

    Small components round to zero and cost next to nothing, so no rank need be chosen: one step
    for all is reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3). As
    delta hardly differs between messages, a small gradient costs little, too. Messages differ in
    size, which tells an onlooker something of their content.

    The basis D. The first rows cross in their own features, around the message's own mean and at a
    step of its own root mean square. Once there are 8 H of them, the sender takes the principal
    components that deviate by a quarter of delta or more, and sends them in 8 bits each, in front
    of the message that uses them first. When twice as many bytes have followed, and whenever these
    have doubled, it finds a new basis, with older moments halved. It sends that basis if the rows
    since the last one would have been smaller by its size. So a basis follows what training moves
    where that pays. r is what the components leave of a feature where that is 0.85 delta or more.
    Rows of more than 2,048 features have no basis: finding one takes seconds.

    What an error costs. An error e of a row changes the loss by some (g . e)^2, g: the row's
    gradient. Of activations the sender gets the gradients back, and takes e^T M e for the cost:
    M = 0.8 F / (mean of its diagonal) + 0.2 I, F = the mean of g g^T over rows, each of length 1.
    The basis is that of rows in which this cost is a length (M = L L^T): with V the principal
    components of L^T (x - mean), A = V^T L^T and D = V^T L^-1. So directions to which the loss
    does not answer get coarser steps. Only D crosses. Gradients have M = I, so A = D. (Ours; F is
    the empirical Fisher matrix of the activations.)

    Rounding: components are made smaller by a sixth of delta first, which saves more bytes than a
    larger step at the same error (as coders of video do).

    Wire: one part, uint8, at most 1 byte a value and some more, H * (H + 9) with a basis. Kind u8,
    number of the basis u8, components u16, delta float32 (float64 for such tensors); with a basis
    mean float32 [H], of components the sizes float32 [K], the classes by deviation uint8 [K] and
    the entries int8 [K, H]; then
    the codes of q and r (bit_planes.py). delta doubles where they would be longer than promised.

    step: bytes against error. 2.2 costs rows of MiniLM 23 bytes a token at a quarter of the
        variance, its gradients 9, whose usual step is larger.
    gradients: how rows of a boundary's gradient are coded.
        shaped: what the code of a row loses is made good by later rows (NoiseShaping), so that
            weights' gradients keep what rounds to zero in each row. Other tensors, the messages
            before the first basis, and gradients behind another compressor of a chain are coded
            row by row.
        evened: a row of norm n is coded as one of norm sqrt(n * usual), so that small rows do not
            always round to zero; usual: root mean square of the message's norms. How many octaves
            n is from it crosses as one more column of codes, 0 where a row rounds to zero. No mean
            is taken off: all rows that round to zero would be given what gradients of earlier
            updates had in common. For gradients of which a few rows are far larger than the rest.
    """

    family: ClassVar[Family] = "precision"
    feedback: ClassVar[Feedback] = "useful"
    label_form = "transform({step:g})"
    own_names = ("seen", "since", "look_at", "features", "mean_square", "moments", "gradients",
                 "number", "mean", "codes", "sizes", "classes", "analysis")  # fmt: skip
    child_names = ("shaping",)

    step: Annotated[float, Field(ge=0.05, le=64.0)] = 2.2
    gradients: Literal["shaped", "evened"] = "shaped"

    def __post_init__(self) -> None:
        self.seen = 0  # rows that the moments are of, since the run began
        self.since = 0  # bytes sent since the last basis
        self.look_at = 0  # so many of them before another basis is tried
        self.features = 0
        self._moments_HH: Tensor | None = None
        self._gradients_HH: Tensor | None = None  # their second moments, each of length 1
        self._mean_square = 0.0  # of a centred value, a running mean
        self.basis: _Basis | None = None
        self.shaping = NoiseShaping()

    @property
    def _is_evened(self) -> bool:
        return self.gradients == "evened"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        num_rows, num_features = matrix_shape(spec.shape)
        most = _head_bytes(spec) + _most_bytes(num_rows, num_features)
        if self._may_have_basis(num_features):
            most += num_features * (num_features + 9)
        return (TensorSpec(shape=(most,), dtype=torch.uint8, is_bound=True),)

    def compress(self, tensor: Tensor) -> Tensors:
        return self._compressed(tensor, None)

    def compress_gradient(self, gradient: Tensor, activations: Tensor) -> Tensors:
        return self._compressed(gradient, None if self._is_evened else activations)

    @property
    def learns_from_gradients(self) -> bool:
        return True

    def learn_from_gradient(self, gradient: Tensor) -> None:
        num_rows, num_features = matrix_shape(gradient.shape)
        if not num_rows or not self._may_have_basis(num_features):
            return
        if self.features not in (0, num_features):
            return
        rows_RH = gradient.detach().reshape(num_rows, num_features)
        rows_RH = rows_RH[:: -(-num_rows // _ROWS_LATER)].double()
        # Of length 1, as one row may have a gradient a million times that of the others.
        norms_R1 = torch.linalg.vector_norm(rows_RH, dim=1, keepdim=True)
        unit_RH = (rows_RH / norms_R1)[((norms_R1 > 0) & norms_R1.isfinite())[:, 0]]
        if not len(unit_RH):
            return
        moments_HH = (unit_RH.T @ unit_RH).cpu()
        if self._gradients_HH is not None:
            moments_HH += self._gradients_HH
        self._gradients_HH = moments_HH

    def _compressed(self, tensor: Tensor, activations: Tensor | None) -> Tensors:
        refuse_integers(tensor)
        spec = TensorSpec.of(tensor)
        num_rows, num_features = matrix_shape(spec.shape)
        matrix_RH = tensor.detach().reshape(num_rows, num_features).to(wide(tensor.dtype))
        largest = 0.0
        if matrix_RH.numel():
            low, high = torch.aminmax(matrix_RH)
            largest = float(torch.maximum(-low, high))
        if not math.isfinite(largest):
            return self._message(spec, kind=_NOT_FINITE, device=tensor.device)
        if largest == 0:
            return self._message(spec, kind=_NOTHING, device=tensor.device)
        # Squares would leave float32's range, so this message carries a unit of its own.
        if not _RANGE[0] < largest < _RANGE[1]:
            return self._alone(spec, *self._evened(matrix_RH / largest), unit=largest)
        matrix_RH, octaves_R1 = self._evened(matrix_RH)
        if self._may_have_basis(num_features) and self.features in (0, num_features):
            # Before the message is coded, and from what is meant, not from what the receiver sees:
            # the basis is the sender's business, who sends it.
            self._learn(matrix_RH)
        # A covariance of fewer rows than that is mostly noise, and a basis costs H bytes a
        # component.
        has_rows_enough = self.basis is not None or self.seen >= _ROWS_PER_FEATURE * self.features
        if self.features != num_features or not has_rows_enough:
            return self._alone(spec, matrix_RH, octaves_R1, unit=1.0)
        if activations is not None:
            activations = activations.detach().reshape(num_rows, num_features)
        return self._in_basis(spec, matrix_RH, octaves_R1, activations_RH=activations)

    def _evened(self, matrix_RH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return rows as they are coded, and by how many octaves they are below usual [R, 1]."""
        if not self._is_evened:
            return matrix_RH, None
        norms_R1 = torch.linalg.vector_norm(matrix_RH, dim=1, keepdim=True)
        usual = norms_R1.square().mean().sqrt()
        octaves_R1 = torch.log2(usual / norms_R1.clamp_min(usual * 2.0**-_MOST_OCTAVES)).round()
        octaves_R1 = octaves_R1.clamp_min(-_MOST_OCTAVES)
        return matrix_RH * 2 ** (octaves_R1 / 2), octaves_R1

    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
        device = parts[0].device
        data = parts[0].cpu().contiguous().numpy()
        num_rows, num_features = matrix_shape(spec.shape)
        head_bytes = _head_bytes(spec)
        if len(data) < head_bytes:
            raise FrameError(f"a message of {len(data)} bytes, its head alone has {head_bytes}")
        kind, number, num_components = _HEAD.unpack_from(data.tobytes()[: _HEAD.size])
        delta = float(np.frombuffer(data[_HEAD.size : head_bytes].tobytes(), _delta_type(spec))[0])
        rest = data[head_bytes:]
        if kind in (_NOTHING, _NOT_FINITE):
            if len(rest):
                raise FrameError(f"{len(rest)} bytes too many")
            # NaN or inf anywhere makes all of it NaN, so that divergence stays visible.
            value = 0.0 if kind == _NOTHING else math.nan
            return torch.full(spec.shape, value, dtype=spec.dtype, device=device)
        # Every value is multiplied by it.
        if not 0 < delta < math.inf:
            raise FrameError(f"the step of a message is {delta}")
        if kind == _ALONE:
            mean_H, order_H, edges, rest = _alone_head(rest, spec)
            codes, sizes_R1 = self._decoded(rest, num_rows, edges)
            values_RH = torch.from_numpy(codes).to(device, wide(spec.dtype)) * delta
            seen = torch.empty_like(values_RH)
            seen[:, torch.from_numpy(order_H).to(device)] = values_RH
            return _narrowed((seen + mean_H.to(seen)) * sizes_R1.to(seen), spec)
        if kind == _WITH_BASIS and self._may_have_basis(num_features):
            basis, rest = _unpacked(rest, number, num_components, num_features)
            known = self.basis
            # A sender that decodes what it sent itself keeps what it codes rows by.
            if known is None or known.analysis_KH is None or known.number != number:
                self.basis = basis  # later messages name it by its number alone
        elif kind != _IN_BASIS:
            raise FrameError(f"a message of kind {kind}")
        known = self.basis
        if known is None or known.number != number or len(known.mean_H) != num_features:
            raise FrameError(f"basis {number} of {num_features} features has not come")
        codes, sizes_R1 = self._decoded(rest, num_rows, known.edges(num_features))
        seen = known.seen(torch.from_numpy(codes).to(device, wide(spec.dtype)), delta=delta)
        return _narrowed(seen * sizes_R1.to(seen), spec)

    def _decoded(
        self, rest: Bytes, num_rows: int, edges: list[int]
    ) -> tuple[npt.NDArray[np.int32], Tensor]:
        """Return the codes of a message, and by what each row is to be multiplied [R, 1]. Raises
        FrameError."""
        if not self._is_evened:
            return bit_planes.decode(rest, num_rows, edges), torch.ones(1, 1)
        codes = bit_planes.decode(rest, num_rows, [*edges, edges[-1] + 1])
        octaves_R1 = codes[:, -1:]
        if (np.abs(octaves_R1) > _MOST_OCTAVES).any():
            raise FrameError(f"a row is more than {_MOST_OCTAVES} octaves from usual")
        return codes[:, :-1], 2.0 ** (-torch.from_numpy(octaves_R1).double() / 2)

    def _may_have_basis(self, num_features: int) -> bool:
        return 2 <= num_features <= MAX_FEATURES

    def _learn(self, matrix_RH: Tensor) -> None:
        """Add rows of a message to the moments."""
        most = _ROWS_OF_A_MESSAGE if self.basis is None else _ROWS_LATER
        # Evenly from all over the message. Fewer once there is a basis: a look at the next one
        # comes late and then has many messages.
        rows_RH = matrix_RH[:: -(-len(matrix_RH) // most)]
        self.features = matrix_RH.shape[1]
        self.seen += len(rows_RH)
        # A column of ones: one product then has the sums and the number of rows beside the
        # moments.
        with_ones_RH = torch.cat([rows_RH, rows_RH.new_ones(len(rows_RH), 1)], dim=1)
        # Float64 from here on: moments of a whole run are added up.
        moments_HH = (with_ones_RH.T @ with_ones_RH).double().cpu()
        if self._moments_HH is not None:
            moments_HH += self._moments_HH
        self._moments_HH = moments_HH

    def _measured(self) -> _Basis:
        """Return the basis of the moments, and halve these."""
        assert self._moments_HH is not None
        moments_HH = self._moments_HH / self._moments_HH[-1, -1]
        mean_H = moments_HH[-1, :-1] * (not self._is_evened)
        # The last row and column of the moments are sums of the ones: the mean.
        covariance_HH = moments_HH[:-1, :-1] - torch.outer(mean_H, mean_H)
        mean_square = float(covariance_HH.diagonal().mean())
        if self.basis is None:
            self._mean_square = mean_square
        cost_HH = self._cost_of_errors(len(covariance_HH))
        root_HH = torch.linalg.cholesky(cost_HH)
        values_H, vectors_HH = torch.linalg.eigh(root_HH.T @ covariance_HH @ root_HH)
        sd_H = values_H.flip(0).clamp_min(0).sqrt()
        num_kept = max(1, int((sd_H > _KEPT * self.step * math.sqrt(mean_square)).sum()))
        kept_KH = vectors_HH.flip(1).T[:num_kept]
        rows_KH = torch.linalg.solve_triangular(root_HH, kept_KH, upper=False, left=False)
        largest_K1 = rows_KH.abs().amax(1, keepdim=True)
        # In the order in memory that the receiver has: products then come to the same bits.
        codes_KH = (rows_KH * (127 / largest_K1)).round().to(torch.int8).contiguous()
        lengths_K = torch.linalg.vector_norm(rows_KH, dim=1)
        sizes_K = (lengths_K / torch.linalg.vector_norm(codes_KH.double(), dim=1)).float()
        # Older rows fade, as training moves what is sent.
        self._moments_HH = self._moments_HH / 2
        if self._gradients_HH is not None:
            self._gradients_HH = self._gradients_HH / 2
        basis = _Basis(
            number=0 if self.basis is None else (self.basis.number + 1) % 256,
            mean_H=mean_H.float(),
            codes_KH=codes_KH,
            sizes_K=sizes_K,
            classes_K=torch.from_numpy(_classes(sd_H[:num_kept].numpy())),
        )
        # Of the components as they cross, in 8 bits.
        return replace(basis, analysis_KH=basis.rows_KH @ cost_HH.float())

    def _cost_of_errors(self, num_features: int) -> Tensor:
        """Return M of the class's docstring [H, H], float64."""
        equal_HH = torch.eye(num_features, dtype=torch.float64)
        if self._gradients_HH is None:
            return equal_HH
        mean = self._gradients_HH.diagonal().mean()
        return _SENSITIVE * self._gradients_HH / mean + (1 - _SENSITIVE) * equal_HH

    def _in_basis(
        self,
        spec: TensorSpec,
        matrix_RH: Tensor,
        octaves_R1: Tensor | None,
        activations_RH: Tensor | None,
    ) -> Tensors:
        is_first = self.basis is None
        basis = self._measured() if self.basis is None else self.basis
        own = float((matrix_RH - basis.mean_H.to(matrix_RH)).square().mean())
        # The step follows the usual size of messages, so that one odd batch hardly moves it.
        usual = min(max(self._mean_square, own / _NEAR), own * _NEAR)
        self._mean_square = usual + _FADE * (own - usual)
        delta = self.step * math.sqrt(self._mean_square)

        def coded_in(basis: _Basis) -> _Codes:
            def codes_of(delta: float) -> tuple[Tensor, Tensor | None]:
                if activations_RH is None:
                    return basis.codes(matrix_RH, delta), None

                def code(rows_rH: Tensor) -> tuple[Tensor, Tensor]:
                    codes_rC = basis.codes(rows_rH, delta)
                    return codes_rC, basis.seen(codes_rC, delta)

                return self.shaping.shaped(matrix_RH, activations_RH, code, seed=self.seen)

            edges = basis.edges(num_features=matrix_RH.shape[1])
            return _coded(codes_of, delta, edges, spec, octaves_R1)

        made = coded_in(basis)
        has_new = is_first
        # A basis costs bytes: look ever more seldom, and send one only if it would have paid.
        if not is_first and self.since >= self.look_at:
            self.look_at = 2 * self.since
            other = self._measured()
            other_made = coded_in(other)
            # What has been sent since the last basis, had it been as much shorter as this message
            # is.
            would_save = self.since * (1 - len(other_made.data) / len(made.data))
            if would_save > other.packed().nbytes:
                has_new, basis, made = True, other, other_made
        if has_new:
            self.basis = basis
            self.since = 0
            self.look_at = _LOOK_AT * basis.packed().nbytes
        self.since += len(made.data)
        self.shaping.owed_FH = made.owed_FH
        content = made.data
        if has_new:
            content = np.concatenate([basis.packed(), content])
        return self._message(
            spec,
            kind=_WITH_BASIS if has_new else _IN_BASIS,
            device=matrix_RH.device,
            number=basis.number,
            num_components=len(basis.codes_KH),
            delta=made.delta,
            content=content,
        )

    def _alone(
        self, spec: TensorSpec, matrix_RH: Tensor, octaves_R1: Tensor | None, unit: float
    ) -> Tensors:
        """Return a message that needs no other one."""
        num_features = matrix_RH.shape[1]
        order_H = np.arange(num_features)
        edges = [0, num_features]
        head = np.zeros(0, dtype=np.uint8)
        if len(matrix_RH) >= _FEW_ROWS:
            mean_H = matrix_RH.mean(0) * (not self._is_evened)
            matrix_RH = matrix_RH - mean_H
            sd_H = matrix_RH.square().mean(0).sqrt().cpu().double().numpy()
            # Features of like deviation stand together, so that each class has gaps of its own
            # kind.
            classes, order_H, edges = _by_class(_classes(sd_H))
            means = (mean_H * unit).cpu().numpy().astype(_delta_type(spec))
            head = np.concatenate([means.view(np.uint8), classes])
        largest = float(matrix_RH.abs().max()) or 1.0
        rms = float(matrix_RH.square().mean().sqrt()) or 1.0
        delta = largest / max(1, round(largest / rms / self.step))  # what is alone is kept
        values_RH = matrix_RH[:, torch.from_numpy(order_H).to(matrix_RH.device)]
        made = _coded(
            lambda delta: (_rounded(values_RH / delta, smaller=0.0), None),
            delta,
            edges,
            spec,
            octaves_R1,
            taken=len(head),
        )
        return self._message(
            spec,
            kind=_ALONE,
            device=matrix_RH.device,
            delta=made.delta * unit,
            content=np.concatenate([head, made.data]),
        )

    def _message(
        self,
        spec: TensorSpec,
        kind: int,
        device: torch.device,
        number: int = 0,
        num_components: int = 0,
        delta: float = 0.0,
        content: Bytes | None = None,
    ) -> Tensors:
        head = _HEAD.pack(kind, number, num_components)
        head += np.array([delta], dtype=_delta_type(spec)).tobytes()
        parts = [np.frombuffer(head, dtype=np.uint8)]
        if content is not None:
            parts.append(content)
        return (torch.from_numpy(np.concatenate(parts)).to(device),)

    def own(self) -> State:
        """All that the next message depends on; nothing of it is ever changed in place."""
        state: State = {name: getattr(self, name) for name in _COUNTS}
        if self._moments_HH is not None:
            state["moments"] = copy_of(self._moments_HH)
        if self._gradients_HH is not None:
            state["gradients"] = copy_of(self._gradients_HH)
        if (basis := self.basis) is not None:
            state |= {
                "number": basis.number,
                "mean_square": torch.tensor(self._mean_square, dtype=torch.float64),
                "mean": copy_of(basis.mean_H),
                "codes": copy_of(basis.codes_KH),
                "sizes": copy_of(basis.sizes_K),
                "classes": copy_of(basis.classes_K),
            }
            if basis.analysis_KH is not None:
                state["analysis"] = copy_of(basis.analysis_KH)
        return state

    def take(self, own: State) -> None:
        # As at the start: a state of before the first basis names none.
        self.__post_init__()
        for name in _COUNTS:
            setattr(self, name, int(own.get(name, 0)))
        if "moments" in own:
            self._moments_HH = torch.as_tensor(own["moments"])
        if "gradients" in own:
            self._gradients_HH = torch.as_tensor(own["gradients"])
        if "codes" in own:
            self._mean_square = float(own["mean_square"])
            self.basis = _Basis(
                number=int(own["number"]),
                mean_H=torch.as_tensor(own["mean"]),
                codes_KH=torch.as_tensor(own["codes"]),
                sizes_K=torch.as_tensor(own["sizes"]),
                classes_K=torch.as_tensor(own["classes"]),
                analysis_KH=torch.as_tensor(own["analysis"]) if "analysis" in own else None,
            )


class _Codes(NamedTuple):
    """The step and the codes of a message, and what noise shaping owes after it."""

    delta: float
    data: Bytes
    owed_FH: Tensor | None


def _rounded(values: Tensor, smaller: float) -> Tensor:
    """Return the nearest whole numbers to values that are made smaller, as far as they can be
    sent."""
    sizes = (values.abs() - smaller).clamp(0, _LARGEST_CODE).round_()
    return sizes.copysign_(values)


def _coded(
    codes_of: Callable[[float], tuple[Tensor, Tensor | None]],
    delta: float,
    edges: list[int],
    spec: TensorSpec,
    octaves_R1: Tensor | None,
    taken: int = 0,
) -> _Codes:
    """Return codes of a message which are not longer than a receiver takes.

    codes_of: returns the codes for a step, and what noise shaping owes after them.
    delta: the step to begin with.
    taken: bytes of the message that others need.
    octaves_R1: one more column of codes, for rows that are not zero.
    """
    if octaves_R1 is not None:
        edges = [*edges, edges[-1] + 1]
    most = _most_bytes(*matrix_shape(spec.shape)) - taken
    delta = float(np.array(delta, dtype=_delta_type(spec)))  # as it will be read
    while True:
        codes_RC, owed_FH = codes_of(delta)
        if octaves_R1 is not None:
            codes_RC = torch.cat([codes_RC, octaves_R1 * codes_RC.any(1, keepdim=True)], dim=1)
        codes = codes_RC.to(torch.int32).cpu().numpy()
        coded = bit_planes.encode(codes, edges=edges)
        if coded is not None and len(coded) <= most:
            return _Codes(delta, coded, owed_FH=owed_FH)
        delta *= 2


def _alone_head(
    rest: Bytes, spec: TensorSpec
) -> tuple[Tensor, npt.NDArray[Any], list[int], Bytes]:
    """Return the mean, the order and the classes of features of a message that needs no other
    one, and its codes as bytes. Raises FrameError."""
    num_rows, num_features = matrix_shape(spec.shape)
    means = np.zeros(num_features)
    order_H = np.arange(num_features)
    edges = [0, num_features]
    # Means and classes cost bytes for each feature, which a few rows do not pay back.
    if num_rows >= _FEW_ROWS:
        mean_bytes = np.dtype(_delta_type(spec)).itemsize * num_features
        num_bytes = mean_bytes + (num_features + 1) // 2
        if len(rest) < num_bytes:
            raise FrameError("means and classes of features are truncated")
        means = np.frombuffer(rest[:mean_bytes].tobytes(), dtype=_delta_type(spec))
        pairs = rest[mean_bytes:num_bytes]
        classes_H: Bytes = np.stack([pairs >> 4, pairs & 15], axis=1).ravel()[:num_features]
        _, order_H, edges = _by_class(classes_H)
        rest = rest[num_bytes:]
    return torch.from_numpy(means.copy()), order_H, edges, rest


def _unpacked(rest: Bytes, number: int, num_rows: int, num_features: int) -> tuple[_Basis, Bytes]:
    """Return the basis at the start of a message, and what follows. Raises FrameError."""
    ends = np.cumsum([4 * num_features, 4 * num_rows, num_rows, num_rows * num_features])
    if not 1 <= num_rows <= num_features or len(rest) < ends[-1]:
        raise FrameError(
            f"a basis of {num_rows} components for {num_features} features in {len(rest)} bytes"
        )
    own = torch.from_numpy(rest[: ends[-1]].copy())
    mean_H = own[: ends[0]].view(torch.float32)
    sizes_K = own[ends[0] : ends[1]].view(torch.float32)
    classes_K = own[ends[1] : ends[2]]
    codes_KH = own[ends[2] :].view(torch.int8).view(num_rows, num_features)
    # A sender of another owner's may write anything.
    if not mean_H.isfinite().all() or not sizes_K.isfinite().all():
        raise FrameError("a basis with a mean or a component that is not finite")
    # Classes are ranges of columns for the entropy code, which reads by them what follows.
    if (classes_K.diff() < 0).any() or int(classes_K[-1]) >= _NUM_CLASSES:
        raise FrameError("components of a basis are not in the order of their classes")
    basis = _Basis(number, mean_H, codes_KH=codes_KH, sizes_K=sizes_K, classes_K=classes_K)
    return basis, rest[ends[-1] :]


def _classes(sd_C: npt.NDArray[Any]) -> Bytes:
    """Return the class of each column by its deviation: the largest ones have 0."""
    relative_C = np.maximum(sd_C, 1e-300) / max(float(sd_C.max()), 1e-300)
    octaves_C = np.round(-_CLASSES_PER_OCTAVE * np.log2(relative_C))
    classes_C: Bytes = octaves_C.clip(0, _NUM_CLASSES - 1).astype(np.uint8)
    return classes_C


def _by_class(classes_C: Bytes) -> tuple[Bytes, npt.NDArray[Any], list[int]]:
    """Return classes as bytes, the order of columns by class, and where classes begin in it."""
    order_C = np.argsort(classes_C, kind="stable")
    padded = np.pad(classes_C, (0, len(classes_C) % 2))
    pairs = ((padded[::2] << 4) | padded[1::2]).astype(np.uint8)
    return pairs, order_C, _edges(classes_C[order_C])


def _edges(classes_C: Bytes) -> list[int]:
    """Return where classes begin among columns that are ordered by them, and the number last."""
    inner: list[int] = (np.flatnonzero(np.diff(classes_C)) + 1).tolist()
    return [0, *inner, len(classes_C)]


def _narrowed(seen: Tensor, spec: TensorSpec) -> Tensor:
    """Return the rows as they were meant; rounding leads beyond no dtype's range."""
    largest = torch.finfo(spec.dtype).max
    return seen.clamp(-largest, largest).to(spec.dtype).view(spec.shape)


def _most_bytes(num_rows: int, num_features: int) -> int:
    """Return the most bytes of the codes of a message."""
    return num_rows * num_features + num_rows + 9 * num_features + 256


def _head_bytes(spec: TensorSpec) -> int:
    return _HEAD.size + np.dtype(_delta_type(spec)).itemsize


def _delta_type(spec: TensorSpec) -> str:
    return "<f8" if spec.dtype == torch.float64 else "<f4"
