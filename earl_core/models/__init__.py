"""Where the initial model comes from when it is not there: made on the spot, or the model hub."""


class ModelBuildError(RuntimeError):
    """The model cannot be had on this machine; the message says what to do."""
