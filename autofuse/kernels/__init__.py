"""From a segment of a chain to a loaded kernel: lowering, kernel kinds, dialects, builders and launchers."""
