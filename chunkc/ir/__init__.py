"""The intermediate representation: what is executed when (schedule), where data lives (layout), what is done (plan).

Everything here is frozen data and pure functions: no torch tensors, no devices, no passes.
"""
