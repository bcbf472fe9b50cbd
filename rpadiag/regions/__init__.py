"""The regions whose rounding can be aligned: contracts as PyTorch references, presets, and ``align``.

Every region file has the same four parts in the same order: the sites it spans, the contracts known of
implementations with their source, ``reference()``, and ``aligned()``, the differentiable operation that
``align`` puts in a model. Shape legend: T tokens, H columns or heads, D head size.
"""
