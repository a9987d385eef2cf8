# SPDX-License-Identifier: Apache-2.0
"""Calibration: from a transformers model and some text to an artifact that the server loads.

    capture -> statistics -> rotation, quantizer_search -> oscar_vllm.artifact

``python -m calib --help`` is the command line; `calibrate` the same as a function.
"""

from calib.pipeline import CalibrationResult, calibrate
from calib.rotation import PRESETS, Recipe

__all__ = ["PRESETS", "CalibrationResult", "Recipe", "calibrate"]
