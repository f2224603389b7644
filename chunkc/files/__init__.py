"""Files: read strictly, decoded by type, written whole or not at all.

All documents that chunkc keeps (plans, profiles, checkpoints), and those of others that it reads, may come from a
stranger: they go through here.
"""

from __future__ import annotations

from chunkc.files.decoding import Decoder, shown
from chunkc.files.kept import KeptDocuments
from chunkc.files.reading import FormatError, fault_at, read_json
from chunkc.files.writing import flush_folder, replace_file, save_bytes, save_text, synced_file

__all__ = [
    "Decoder",
    "FormatError",
    "KeptDocuments",
    "fault_at",
    "flush_folder",
    "read_json",
    "replace_file",
    "save_bytes",
    "save_text",
    "shown",
    "synced_file",
]
