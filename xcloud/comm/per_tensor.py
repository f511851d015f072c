"""Different compression for different tensors of one average: matrices, vectors, embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Compressor

_EMBEDDING = re.compile(
    r"(^|\.)(embed\w*|\w+_embed(ding)?s?|wte|wpe|words|positions|types|lm_head)(\.|$)"
)
_ROWS = re.compile(r"\[\d+:\d+\]$")


class PerTensor:
    """`default`, except for some.

    vectors: norms and biases, and whatever has one axis or none; they are few values of much
        effect. embeddings: tables of words and positions and the head over the vocabulary, by the
        name; a step changes few of their rows. names: regular expressions to be found in a
        parameter's name, such as "lora_B" or "layers\\.0\\."; the first that is found decides,
        before vectors and embeddings. What is None counts as the rest.
    """

    def __init__(
        self,
        default: Compressor,
        vectors: Compressor | None = None,
        embeddings: Compressor | None = None,
        names: Mapping[str, Compressor] | None = None,
    ) -> None:
        self.default, self.vectors, self.embeddings = default, vectors, embeddings
        self.names = dict(names or {})
        for name, compressor in self._named.items():
            if not isinstance(compressor, Compressor):
                raise ConfigError(
                    f"PerTensor.{name} must be a compressor, got {compressor!r}; in YAML give it "
                    "a _target_, such as xcloud.comm.chain.Chain"
                )
        for pattern in self.names:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"PerTensor.names: {pattern!r} is no regular expression: {error}"
                ) from error

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """name: of the parameter, its module's name before it; rows of it that an average cuts
        out, such as "…weight[0:64]", are called as the whole."""
        name = _ROWS.sub("", name)
        for pattern, compressor in self.names.items():
            if re.search(pattern, name):
                return compressor
        if self.vectors is not None and len(shape) < 2:
            return self.vectors
        if self.embeddings is not None and _EMBEDDING.search(name):
            return self.embeddings
        return self.default

    @property
    def label(self) -> str:
        """Such as "powersgd(4), vectors: fp16"."""
        (_, default), *others = self._named.items()
        return ", ".join((default.label, *(f"{name}: {c.label}" for name, c in others)))

    @property
    def is_identity(self) -> bool:
        return all(compressor.family == "none" for compressor in self._named.values())

    @property
    def _named(self) -> dict[str, Compressor]:
        some = {"vectors": self.vectors, "embeddings": self.embeddings, **self.names}
        return {"default": self.default} | {n: c for n, c in some.items() if c is not None}

    def __repr__(self) -> str:
        return f"PerTensor({', '.join(f'{name}={c}' for name, c in self._named.items())})"
