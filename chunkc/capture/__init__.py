"""Capture: from a module's forward to the operator schedule of one iteration.

Capture goes through torch.compile's backend API.
"""
