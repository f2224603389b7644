"""The verifier: proves a plan safe in every interleaving of its streams, from nothing but the plan."""

from chunkc.ir.verify.verifier import replayed_programs, verify, verify_beside

__all__ = ["replayed_programs", "verify", "verify_beside"]
