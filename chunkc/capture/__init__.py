"""Capture: from a module's forward to the operator schedule of one iteration."""
