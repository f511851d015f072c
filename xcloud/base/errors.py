"""The exceptions a user may see, as one tree. Not a place for recovery code."""


class XcloudError(Exception):
    """Base of all errors that xcloud raises on purpose."""


class ConfigError(XcloudError, ValueError):
    """A setting cannot be honoured; the message names the key and what is allowed."""


class DataError(XcloudError, ValueError):
    """A corpus, tokenizer or checkpoint is missing or malformed; says how to get it."""


class LinkError(XcloudError):
    """Something went wrong between two ranks."""


class LinkTimeout(LinkError):
    """The peer stayed silent longer than this link can explain."""


class LinkClosed(LinkError):
    """The peer is gone."""


class FrameError(LinkError):
    """The error for what arrived instead of the frame that was expected."""


class SealError(XcloudError):
    """Sealed or signed bytes are not what the named cloud made."""


class ReplicasDiffer(XcloudError):
    """Copies of the model that must be equal are not; names stage and rank."""


class TrainingDiverged(XcloudError):
    """A loss or gradient is not finite; parameters are as before that update."""


class RunFailed(XcloudError):
    """A run ended before its time; the message names the first cause."""
