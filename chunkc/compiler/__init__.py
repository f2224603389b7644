"""The way from a module to a compiled model: capture, plan, compile, install and call.

This folder joins capture, passes and runtime, which do not know each other.
"""
