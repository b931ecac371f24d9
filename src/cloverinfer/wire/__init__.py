"""Messages between processes: msgspec structs, one per kind, and 32-bit notices."""
