"""chunkc inside other libraries' training loops; each module needs that library."""
