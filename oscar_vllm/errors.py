# SPDX-License-Identifier: Apache-2.0
"""The ways a run can be refused. Each is also the builtin a caller would expect.

A message is one line: the value that was given, why it does not work, what to do instead.
"""


class OscarConfigError(ValueError):
    """An option has a wrong value, or two options contradict each other."""


class OscarUnsupportedError(NotImplementedError):
    """A feature of the engine or the model that this cache cannot serve."""


class OscarArtifactError(ValueError):
    """A calibration artifact is missing, damaged, or belongs to another model."""


class OscarSelfTestError(RuntimeError):
    """A kernel does not compute on this device what it must."""
