# SPDX-License-Identifier: Apache-2.0
"""INT2 KV-cache operations: the page layout, the codec, the PyTorch reference and the Triton kernels."""
