"""The intermediate representation: order of execution (schedule), places of data (layout), the plan.

Everything here is frozen data and pure functions: no torch tensors, no devices, no passes. docs/glossary.md defines
the terms.
"""
