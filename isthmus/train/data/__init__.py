"""From files to micro-batches: rows, tokens, samples, their order, and reading ahead."""
